//! Processes that an exec has left behind in a sandbox. They are looked for before the
//! sandbox falls asleep.

use std::time::{Duration, Instant};

use torpor_records::PodRecord;
use torpor_records::Role;
use torpor_runsc::left::left_by_exec;

use crate::reconcile::node::Node;
use crate::reconcile::observe::words;

/// Time limit, under the sandbox's lock. A thousand processes are read in a tenth of it.
const READ_LIMIT: Duration = Duration::from_secs(2);

/// Records the processes that are left now. If they cannot be determined, the failure is logged and
/// none are recorded: a sandbox that does not answer is not kept awake for them.
/// The caller holds the sandbox's lock, and the sandbox runs.
pub(crate) fn note(node: &Node, record: &PodRecord) {
    let sandbox = &record.sandbox;
    if !node.records.has_execs(sandbox) {
        return;
    }
    let found = names(node, record);
    let left = found.unwrap_or_else(|why| {
        tracing::warn!(pod_uid = %record.pod_uid, error = why, "cannot determine which processes exec has left behind");
        Vec::new()
    });
    if let Err(error) = node.records.write_left(sandbox, &left) {
        tracing::warn!(pod_uid = %record.pod_uid, error = words(&error), "cannot record the processes that exec has left behind");
    }
}

fn names(node: &Node, record: &PodRecord) -> Result<Vec<String>, String> {
    let parts = node.records.containers_of(&record.sandbox);
    let parts = parts.map_err(|error| words(&error))?;
    let mut control = node
        .connect(&record.sandbox)
        .map_err(|error| words(&error))?;
    let deadline = Instant::now() + READ_LIMIT;
    let mut left = Vec::new();
    for part in parts.iter().filter(|part| part.role == Role::Container) {
        let of_part = left_by_exec(&mut control, part.id.as_str(), deadline);
        left.extend(of_part.map_err(|error| words(&error))?);
    }
    Ok(left)
}

//! Looking for processes that exec has left behind in a sandbox, before it falls asleep.

use std::time::{Duration, Instant};

use torpor_records::PodRecord;
use torpor_records::Role;
use torpor_runsc::left::left_by_exec;

use crate::reconcile::node::Node;
use crate::reconcile::observe::words;

/// A thousand processes are read in a tenth of it; the sandbox' lock is held meanwhile.
const LOOK_LIMIT: Duration = Duration::from_secs(2);

/// Notes what there is now. What cannot be found out is told, and counts as nothing: a sandbox that
/// does not answer is not kept awake for it. The caller holds the sandbox' lock, and the sandbox
/// runs.
pub(crate) fn look(node: &Node, record: &PodRecord) {
    let sandbox = &record.sandbox;
    if !node.records.has_execs(sandbox) {
        return;
    }
    let looked = names(node, record);
    let left = looked.unwrap_or_else(|why| {
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
    let deadline = Instant::now() + LOOK_LIMIT;
    let mut left = Vec::new();
    for part in parts.iter().filter(|part| part.role == Role::Container) {
        let of_part = left_by_exec(&mut control, part.id.as_str(), deadline);
        left.extend(of_part.map_err(|error| words(&error))?);
    }
    Ok(left)
}

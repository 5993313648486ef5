//! Processes that an exec has left behind in a sandbox. They are looked for before the
//! sandbox falls asleep.

use std::time::{Duration, Instant};

use torpor_core::ids::SandboxId;
use torpor_records::Role;
use torpor_runsc::left::left_by_exec;

use crate::node::Node;

/// Time limit, under the sandbox's lock. A thousand processes are read in a tenth of it.
const READ_LIMIT: Duration = Duration::from_secs(2);

/// Records the processes that are left now. If they cannot be determined, the failure is logged and
/// none are recorded: a sandbox that does not answer is not kept awake for them.
/// The caller holds the sandbox's lock, and the sandbox runs.
pub fn note(node: &Node, sandbox: &SandboxId) {
    if !node.records.has_execs(sandbox) {
        return;
    }
    let left = names(node, sandbox).unwrap_or_else(|error| {
        crate::log_line!("cannot determine which processes exec has left behind: {error:#}");
        Vec::new()
    });
    if let Err(error) = node.records.write_left(sandbox, &left) {
        let error = anyhow::Error::new(error);
        crate::log_line!("cannot record the processes that exec has left behind: {error:#}");
    }
}

fn names(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Vec<String>> {
    let parts = node.records.containers_of(sandbox)?;
    let mut control = node.runsc.connect(sandbox)?;
    let deadline = Instant::now() + READ_LIMIT;
    let mut left = Vec::new();
    for part in parts.iter().filter(|part| part.role == Role::Container) {
        left.extend(left_by_exec(&mut control, part.id.as_str(), deadline)?);
    }
    Ok(left)
}

//! The start of a sandbox that is restored. Torpor starts the sandbox where it can. Otherwise, and
//! after Torpor has failed, runsc starts it.

use std::path::Path;
use std::time::Duration;

use torpor_records::Role;
use torpor_records::RunscRecord;
use torpor_records::{ContainerRecord, PodRecord};
use torpor_runsc::command::Runsc;
use torpor_runsc_direct::Start;

use super::via_runsc::restore_container;
use crate::node::{COMMAND_LIMIT, Node};

/// Time after which a failed restore is not tried once more at once: the caller that waits for the
/// restore has given up, or will soon.
pub(super) const SECOND_TRY_LIMIT: Duration = Duration::from_secs(20);

/// The failed restore of a sandbox that Torpor has started. runsc may succeed.
#[derive(Debug, thiserror::Error)]
#[error("cannot restore a sandbox that Torpor started without runsc")]
pub(super) struct StartedWithoutRunsc;

/// Returns the kept record of runsc from which Torpor starts the sandbox; none where runsc starts
/// it. An unreadable record is logged and counts as none: runsc does not need it.
pub(super) fn kept(node: &Node, pod: &PodRecord) -> Option<RunscRecord> {
    if !node.config.begin_sandboxes {
        return None;
    }
    node.records.runsc(&pod.sandbox).unwrap_or_else(|error| {
        crate::log_line!("{:#}", anyhow::Error::new(error));
        None
    })
}

/// Keeps runsc's record of a sandbox whose processes, and with them the record, are about to be
/// removed. If that fails, runsc starts the sandbox the next time.
pub(super) fn keep(node: &Node, pod: &PodRecord) {
    let sandbox = &pod.sandbox;
    let keep = || -> anyhow::Result<()> {
        let parts = node.records.containers_of(sandbox)?;
        let others = parts.iter().filter(|part| part.role == Role::Container);
        let others = others.map(|part| part.id.as_str());
        match node
            .runsc_of(sandbox)
            .kept(sandbox.as_str(), others.clone())?
        {
            Some(kept) => {
                // An unreadable earlier record counts as none.
                let earlier = node.records.runsc(sandbox).unwrap_or_default();
                Ok(node
                    .records
                    .write_runsc(sandbox, &kept.or_from(earlier, others))?)
            }
            // The record was removed by an earlier call, which has kept it.
            None => Ok(()),
        }
    };
    if let Err(error) = keep() {
        crate::log_line!("runsc starts the sandbox the next time: {error:#}");
        forget(node, pod);
    }
}

/// Removes the kept record: runsc starts the sandbox, until the sandbox has fallen asleep again.
pub(super) fn forget(node: &Node, pod: &PodRecord) {
    if let Err(error) = node.records.remove_runsc(&pod.sandbox) {
        crate::log_line!("{:#}", anyhow::Error::new(error));
    }
}

/// Starts the sandbox and restores its first container, until the sandbox waits for the other
/// containers. `start`: none where runsc starts it.
pub(super) fn restore_root(
    node: &Node,
    runsc: &Runsc,
    root: &ContainerRecord,
    start: Option<&Start<'_>>,
    image: &Path,
) -> anyhow::Result<()> {
    match start {
        Some(start) => Ok(start.restore(image, COMMAND_LIMIT)?),
        None => restore_container(node, runsc, root, None, image),
    }
}

//! The end of a sandbox whose memory is in a committed image.

use torpor_core::ids::{ImageId, SandboxId};
use torpor_records::SleepNote;

use super::remains::remove_remains;
use super::{begin, room};
use crate::node::Node;

/// Records that the sandbox is hibernated, then ends its processes and removes runsc's records of
/// it. The image is committed. The call may be repeated.
pub fn end(node: &Node, sandbox: &SandboxId, id: &ImageId) -> anyhow::Result<()> {
    let pod = node.records.pod(sandbox)?;
    // The state must be written before the first process ends: by it the keepers distinguish a
    // hibernation from a crash.
    node.records.write_hibernated(sandbox, id)?;
    let working_set = || node.cgroups.working_set(pod.cgroup.parent()?);
    let lived = !node.cgroups.pids(&pod.cgroup)?.is_empty();
    let before = working_set().filter(|_| lived);
    begin::keep(node, &pod);
    remove_remains(node, &pod, &node.records.containers_of(sandbox)?)?;
    room::give_back(node, sandbox);
    if let (Some(bytes_before), Some(bytes_after)) = (before, working_set()) {
        let dozed = node
            .records
            .doze(sandbox)?
            .is_some_and(|note| note.reclaimed);
        let doze = dozed.then(|| node.records.sleep(sandbox).ok()).flatten();
        let note = SleepNote::new(bytes_before, bytes_after, doze);
        node.records.write_sleep(sandbox, &note)?;
    }
    Ok(node.records.write_doze(sandbox, None)?)
}

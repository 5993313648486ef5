//! Removal of the remains of a sandbox that does not run, or is not to run any more: processes,
//! runsc's records, filestores.

use std::path::Path;

use anyhow::Context;
use torpor_records::{ContainerRecord, PodRecord};
use torpor_runsc_direct::filestore;

use super::processes::kill_processes;
use crate::node::{COMMAND_LIMIT, Node};

/// Ends the pod's processes, and removes runsc's records and files of its containers. The keepers
/// and Torpor's records stay.
pub(super) fn remove_remains(
    node: &Node,
    pod: &PodRecord,
    parts: &[ContainerRecord],
) -> anyhow::Result<()> {
    kill_processes(node, &pod.cgroup)?;
    let runsc = node.runsc_of(&pod.sandbox);
    // The root container comes last: the records of the other containers name it.
    for part in parts.iter().rev() {
        if runsc.knows(part.id.as_str(), pod.sandbox.as_str()) {
            runsc.delete(part.id.as_str(), COMMAND_LIMIT)?;
        }
    }
    // No process of the sandbox lives. So the files that still exist belong to a removed container,
    // and the next restore would read them.
    runsc.sweep(pod.sandbox.as_str())?;
    // A sandbox without processes is not paused.
    node.records.forget_pause(&pod.sandbox)?;
    remove_filestores(node, pod, parts)?;
    remove_volume_filestores(pod)
}

/// Removes the files to which gVisor writes ([`filestore`]). A failed restore leaves some, and the
/// next restore fails where one exists.
pub(super) fn remove_filestores(
    node: &Node,
    pod: &PodRecord,
    parts: &[ContainerRecord],
) -> anyhow::Result<()> {
    for part in parts {
        let Ok(spec) = node.records.spec(&part.id) else {
            continue;
        };
        let root = spec.pointer("/root/path").and_then(|path| path.as_str());
        if let Some(root) = root {
            remove_file(&Path::new(root).join(filestore(pod.sandbox.as_str())))?;
        }
    }
    Ok(())
}

fn remove_volume_filestores(pod: &PodRecord) -> anyhow::Result<()> {
    let name = filestore(pod.sandbox.as_str());
    let mut files = pod.volumes.iter().map(|volume| volume.source.join(&name));
    files.try_for_each(|path| remove_file(&path))
}

fn remove_file(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

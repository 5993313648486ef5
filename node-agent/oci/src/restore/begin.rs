//! Who begins a sandbox that is restored: torpor-oci where it knows how, and runsc everywhere else and where that has failed.

use std::path::Path;
use std::time::Duration;

use torpor_records::Role;
use torpor_records::RunscRecord;
use torpor_records::{ContainerRecord, PodRecord};
use torpor_runsc::command::Runsc;
use torpor_runsc_direct::Start;

use super::sandbox::restore_container;
use crate::node::{COMMAND_LIMIT, Node};

/// A restore that has failed after this long is not tried once more at once: who waits for it has given up, or will soon.
pub(super) const SECOND_TRY_LIMIT: Duration = Duration::from_secs(20);

/// A restore failed of a sandbox that runsc has not begun, which may know better.
#[derive(Debug, thiserror::Error)]
#[error("cannot restore a sandbox that Torpor started without runsc")]
pub(super) struct BegunByUs;

/// What the sandbox is begun from that runsc does not begin. That it cannot be read is no reason not to wake: runsc needs none of it.
pub(super) fn kept(node: &Node, pod: &PodRecord) -> Option<RunscRecord> {
    if !node.config.begin_sandboxes {
        return None;
    }
    node.records.kept(&pod.sandbox).unwrap_or_else(|error| {
        eprintln!("torpor-oci: {:#}", anyhow::Error::new(error));
        None
    })
}

/// Keeps that of a sandbox which is about to lose its processes, and with them runsc's record. Where it cannot, runsc begins the next one.
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
                // What cannot be read is not there.
                let earlier = node.records.kept(sandbox).unwrap_or_default();
                Ok(node.records.keep(sandbox, &kept.or_from(earlier, others))?)
            }
            // It was removed before, and kept then.
            None => Ok(()),
        }
    };
    if let Err(error) = keep() {
        eprintln!("torpor-oci: runsc starts the sandbox the next time: {error:#}");
        forget(node, pod);
    }
}

/// From now on runsc begins the sandbox, until it has fallen asleep once more.
pub(super) fn forget(node: &Node, pod: &PodRecord) {
    if let Err(error) = node.records.forget_kept(&pod.sandbox) {
        eprintln!("torpor-oci: {:#}", anyhow::Error::new(error));
    }
}

/// Restores the sandbox with its first container up to where it waits for the others.
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

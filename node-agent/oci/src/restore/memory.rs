//! The memory of a sandbox that stands still: which image it is in too, and what follows from that.

use torpor_core::Entry;
use torpor_core::ids::{ImageId, SandboxId};
use torpor_gvisor::control::Control;
use torpor_gvisor::pause;

use super::{end, store};
use crate::node::{CALL_LIMIT, Node};

/// The image that the sandbox' memory lies in, by the ledger, if it is there.
pub(crate) fn memory_image(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Option<ImageId>> {
    let pod = node.records.pod(sandbox)?;
    let store = store(node)?;
    let held = |image: &ImageId| store.image(&pod.namespace, image).is_ok();
    Ok(store
        .ledger(&pod.pod_uid)?
        .read()?
        .restorable(held)
        .cloned())
}

/// The image that is the memory of a sandbox that stands still, for as long as it does. The caller holds the lock.
pub(crate) fn stands_in(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Option<ImageId>> {
    let Ok(mut control) = Control::connect(node.runsc.root(), sandbox.as_str()) else {
        return Ok(None);
    };
    if !pause::is_paused(&node.records, &mut control, sandbox, CALL_LIMIT)? {
        return Ok(None);
    }
    memory_image(node, sandbox)
}

/// A sandbox that stands still with its memory in an image, and loses a container, sleeps on in the image alone until the kubelet has brought the container back: if it went on, it would be without that
/// container's memory. Answers whether it does. The caller holds the lock.
pub(crate) fn sleep_on(node: &Node, sandbox: &SandboxId) -> anyhow::Result<bool> {
    let Some(image) = stands_in(node, sandbox)? else {
        return Ok(false);
    };
    let pod = node.records.pod(sandbox)?;
    let asleep = Entry::Asleep {
        image: image.clone(),
        by_itself: true,
    };
    store(node)?.ledger(&pod.pod_uid)?.append(&asleep)?;
    end(node, sandbox, &image).map(|_| true)
}

/// Before a paused sandbox is resumed: from now on no image is its memory.
pub(crate) fn about_to_run(node: &Node, sandbox: &SandboxId) -> anyhow::Result<()> {
    if memory_image(node, sandbox)?.is_some() {
        let pod = node.records.pod(sandbox)?;
        store(node)?.ledger(&pod.pod_uid)?.append(&Entry::Awake)?;
    }
    Ok(())
}

//! The memory of a sandbox that stands still: which image it is in too, and what follows from that.

use anyhow::{bail, ensure};
use torpor_core::Entry;
use torpor_core::ids::{ImageId, SandboxId};
use torpor_core::ledger::Memory;
use torpor_records::WakeCause;
use torpor_runsc::control::Control;
use torpor_runsc::held_open::NOT_HELD_OPEN;
use torpor_runsc::held_open::{self};
use torpor_runsc::pause;
use torpor_runsc::resume::{self, Left, Resumed};
use torpor_snapshots::ImageError;

use super::{end, store, wake_locked};
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
    let Ok(mut control) = node.runsc.connect(sandbox) else {
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

/// A sandbox that sleeps is not woken into its own end: nobody would have its memory then.
pub(super) fn ensure_held_open(node: &Node, sandbox: &SandboxId) -> anyhow::Result<()> {
    ensure!(
        held_open::is_held_open(&node.records, sandbox)?,
        "{NOT_HELD_OPEN}, which then continues from its image; try again in a moment"
    );
    Ok(())
}

/// A sandbox before it is resumed.
pub(crate) enum AboutToRun {
    /// The ledger says that it is awake, and the image, if there was one, is stale.
    Recorded(Option<Left>),
    /// It cannot run on, and its memory is the image's alone.
    GoferGone,
}

/// Says in the ledger that the sandbox is awake, unless it cannot be resumed.
pub(crate) fn about_to_run(
    node: &Node,
    control: &Control,
    sandbox: &SandboxId,
) -> anyhow::Result<AboutToRun> {
    let pod = node.records.pod(sandbox)?;
    let store = store(node)?;
    let ledger = store.ledger(&pod.pod_uid)?;
    let found = |image: &ImageId| store.image(&pod.namespace, image);
    let is_away = |image: &ImageId| matches!(found(image), Err(ImageError::Missing { .. }));
    let known = ledger.read()?;
    let Some(image) = outlived(&known.memory, is_away).cloned() else {
        return Ok(AboutToRun::Recorded(None));
    };
    if !resume::has_gofers(&node.runsc.of(sandbox), control, sandbox)? {
        return Ok(AboutToRun::GoferGone);
    }
    // Where there is no image nobody brings the sandbox back, and who ends it must not wait for that.
    if found(&image).is_ok() {
        ensure_held_open(node, sandbox)?;
    }
    let seq = ledger.append(&Entry::Awake)?.seq;
    Ok(AboutToRun::Recorded(Some(Left { image, ledger, seq })))
}

/// Resumes the sandbox by the one rule for that.
pub(crate) fn resume(
    node: &Node,
    control: &mut Control,
    sandbox: &SandboxId,
    left: Option<Left>,
) -> anyhow::Result<Resumed> {
    let runsc = node.runsc.of(sandbox);
    let resumed = resume::resume(&node.records, &runsc, control, sandbox, left, CALL_LIMIT);
    Ok(resumed?)
}

/// Lets a sandbox that stands still run on: resumed, or restored from its image where it cannot be resumed. Answers whether it stood still.
/// The caller holds the lock.
pub(crate) fn run_on(
    node: &Node,
    control: &mut Control,
    sandbox: &SandboxId,
    cause: WakeCause,
) -> anyhow::Result<bool> {
    if !pause::is_paused(&node.records, control, sandbox, CALL_LIMIT)? {
        return Ok(false);
    }
    let resumed = match about_to_run(node, control, sandbox)? {
        AboutToRun::Recorded(left) => resume(node, control, sandbox, left)?,
        AboutToRun::GoferGone => Resumed::GoferGone,
    };
    match resumed {
        Resumed::Runs => Ok(true),
        Resumed::RanAlready => Ok(false),
        Resumed::GoferGone if restored(node, sandbox, cause)? => Ok(true),
        Resumed::GoferGone => {
            bail!(
                "the sandbox has lost a gofer, and its image cannot be read: the sandbox stays paused"
            )
        }
    }
}

/// Restores a sandbox that stands still and cannot run on; answers whether there was an image to restore it from. The caller holds the lock.
pub(crate) fn restored(node: &Node, sandbox: &SandboxId, cause: WakeCause) -> anyhow::Result<bool> {
    let sleeps = sleep_on(node, sandbox)?;
    if sleeps {
        wake_locked(node, sandbox, cause)?;
    }
    Ok(sleeps)
}

/// The image that the sandbox leaves behind when it runs on. One that was committed is left also where it cannot be found or read now: it may be there
/// again later, and would be taken for the sandbox' memory. Of one that was only being made nothing may have become.
fn outlived(memory: &Memory, is_away: impl Fn(&ImageId) -> bool) -> Option<&ImageId> {
    match memory {
        Memory::Saving { image } if is_away(image) => None,
        memory => memory.image(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_was_committed_is_left_behind_also_while_it_cannot_be_found() {
        let image = ImageId::parse("pod-a.1").expect("an id");
        let saving = Memory::Saving {
            image: image.clone(),
        };
        let committed = Memory::Committed {
            image: image.clone(),
        };
        for (memory, is_away, left) in [
            (&Memory::Live, true, None),
            (&saving, true, None),
            (&saving, false, Some(&image)),
            (&committed, true, Some(&image)),
            (&committed, false, Some(&image)),
        ] {
            assert_eq!(outlived(memory, |_| is_away), left, "{memory:?} {is_away}");
        }
    }
}

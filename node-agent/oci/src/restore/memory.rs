//! The memory of a sandbox that stands still: which image it is in too, and what follows from that.

use anyhow::ensure;
use torpor_core::Entry;
use torpor_core::ids::{ImageId, SandboxId};
use torpor_core::ledger::Memory;
use torpor_gvisor::pause;
use torpor_gvisor::record::NOT_HELD_OPEN;
use torpor_snapshots::{ImageError, LedgerFile};

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
        node.records.is_held_open(sandbox)?,
        "{NOT_HELD_OPEN}, which goes on from its image; try again in a moment"
    );
    Ok(())
}

/// Before a paused sandbox is resumed: from now on no image is its memory.
pub(crate) fn about_to_run(node: &Node, sandbox: &SandboxId) -> anyhow::Result<AboutToRun> {
    let pod = node.records.pod(sandbox)?;
    let store = store(node)?;
    let ledger = store.ledger(&pod.pod_uid)?;
    let found = |image: &ImageId| store.image(&pod.namespace, image);
    let is_away = |image: &ImageId| matches!(found(image), Err(ImageError::Missing { .. }));
    let known = ledger.read()?;
    let Some(image) = outlived(&known.memory, is_away) else {
        return Ok(AboutToRun { left: None });
    };
    // Where there is no image nobody brings the sandbox back, and who ends it must not wait for that.
    if found(image).is_ok() {
        ensure_held_open(node, sandbox)?;
    }
    let seq = ledger.append(&Entry::Awake)?.seq;
    Ok(AboutToRun {
        left: Some((ledger, seq, image.clone())),
    })
}

/// The image that the sandbox leaves behind when it runs on. One that was committed is left also where it cannot be found or read now: it may be there
/// again later, and would be taken for the sandbox' memory. Of one that was only being made nothing may have become.
fn outlived(memory: &Memory, is_away: impl Fn(&ImageId) -> bool) -> Option<&ImageId> {
    match memory {
        Memory::Saving { image } if is_away(image) => None,
        memory => memory.image(),
    }
}

/// The ledger says of a sandbox that it runs.
#[must_use = "what came of it"]
pub(crate) struct AboutToRun {
    /// With the sequence number of that entry, and the image that was the sandbox' memory.
    left: Option<(LedgerFile, u64, ImageId)>,
}

impl AboutToRun {
    /// Whether there is an image that is its memory again if it does not run after all.
    pub(crate) fn leaves_an_image(&self) -> bool {
        self.left.is_some()
    }

    /// It does not run after all: the image is its memory again.
    pub(crate) fn take_back(self) -> anyhow::Result<()> {
        if let Some((ledger, seq, image)) = self.left {
            ledger.append_at(seq, &Entry::Committed { image })?;
        }
        Ok(())
    }

    /// What came of it. A sandbox that ended before it heard that it may run on has not run: the image is its memory again.
    pub(crate) fn settle(self, resumed: Result<bool, pause::Error>) -> anyhow::Result<bool> {
        if resumed.as_ref().is_err_and(pause::Error::was_not_heard) {
            self.take_back()?;
        }
        Ok(resumed?)
    }
}

#[cfg(test)]
mod tests {
    use torpor_core::ids::PodUid;
    use torpor_gvisor::control;
    use torpor_snapshots::Store;

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

    #[test]
    fn only_a_sandbox_that_heard_nothing_keeps_its_image() {
        let source = || std::io::ErrorKind::ConnectionReset.into();
        let method = "containerManager.Resume";
        let not_heard = control::Error::NotHeard {
            method,
            source: source(),
        };
        let unknown = control::Error::NoAnswer {
            method,
            source: source(),
        };
        for (resumed, keeps) in [
            (Ok(true), false),
            (Err(not_heard.into()), true),
            (Err(unknown.into()), false),
        ] {
            let dir = tempfile::tempdir().expect("a directory");
            let store = Store::open(dir.path()).expect("a store");
            let pod = PodUid::new("pod-a").expect("a uid");
            let ledger = store.ledger(&pod).expect("a ledger");
            let image = ImageId::parse("pod-a.1").expect("an id");
            let committed = Entry::Committed {
                image: image.clone(),
            };
            ledger.append(&committed).expect("written");
            let seq = ledger.append(&Entry::Awake).expect("written").seq;
            let words = format!("{resumed:?}");
            let about_to_run = AboutToRun {
                left: Some((ledger, seq, image.clone())),
            };
            assert_eq!(about_to_run.settle(resumed).is_ok(), words == "Ok(true)");
            let state = store.ledger(&pod).expect("a ledger").read().expect("read");
            assert_eq!(!state.is_stale(&image), keeps, "{words}");
        }
    }
}

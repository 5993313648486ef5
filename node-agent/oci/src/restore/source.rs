//! Where a new sandbox gets its memory from.

use torpor_core::ids::ImageId;
use torpor_core::ledger::Memory;
use torpor_core::{ImageState, LedgerState};
use torpor_records::PodRecord;
use torpor_snapshots::Store;

/// Where a new sandbox of this Pod gets its memory from.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// From its program, as Kubernetes starts it.
    Cold,
    /// From an image: its own, because its sandbox was taken away while it slept (reboot, killed shim), or the one that
    /// its Sandbox left. `copy`: the user asked for the image, so it may be stale and may be used again.
    Image { image: ImageId, copy: bool },
}

/// A Pod that has run goes on from the image that it sleeps in or not at all: after a crash while awake it starts as
/// Kubernetes would start it, and from an image that it has left behind (`last`) only if its user wishes that.
pub(super) fn source(
    ledger: &LedgerState,
    held: impl Fn(&ImageId) -> bool,
    given: Option<ImageId>,
    copy: bool,
    last: Option<ImageId>,
) -> Source {
    let crashed = || last.map_or(Source::Cold, |image| Source::Image { image, copy: true });
    match (&ledger.memory, given) {
        // A save that was not finished when the sandbox died: there is nothing of it to go on from.
        (Memory::Saving { image }, _) if !held(image) => crashed(),
        (Memory::Live, Some(image)) if ledger.seq == 0 => Source::Image { image, copy },
        (Memory::Live, _) => crashed(),
        (memory, given) => match memory.image() {
            Some(image) => Source::Image {
                image: image.clone(),
                copy: copy && given.as_ref() == Some(image),
            },
            None => Source::Cold,
        },
    }
}

/// The image that the Pod last made, if it is still there.
pub(super) fn last_image(store: &Store, pod: &PodRecord) -> anyhow::Result<Option<ImageId>> {
    let images = store.list_pod(&pod.pod_uid)?.into_iter();
    let whole = images.filter(|image| image.state == ImageState::Committed);
    Ok(whole
        .map(|image| image.id)
        .max_by_key(|image| image.number()))
}

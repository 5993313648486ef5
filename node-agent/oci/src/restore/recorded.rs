//! A restore with the ledger's entries around it, and with the marker of an image that is taken from another Pod.

use torpor_core::Entry;
use torpor_core::ids::ImageId;
use torpor_records::{ContainerRecord, PodRecord, RestoreReport, WakeCause};
use torpor_snapshots::ledger_file::Error::Fenced;
use torpor_snapshots::{Image, LedgerFile};

use super::{Refusal, reason_of, renew, sandbox};
use crate::node::Node;
use crate::stages::Stages;

/// What a restore is for.
pub(super) enum Restored<'a> {
    /// A sandbox that was hibernated in place goes on.
    InPlace(WakeCause),
    /// A new sandbox goes on from an image. `takes`: it is another Pod's, which nobody else may go on from.
    Anew {
        takes: bool,
        report: &'a RestoreReport,
    },
}

impl Restored<'_> {
    fn cause(&self) -> WakeCause {
        match self {
            Self::InPlace(cause) => *cause,
            Self::Anew { .. } => WakeCause::Asked,
        }
    }

    fn takes(&self) -> bool {
        matches!(self, Self::Anew { takes: true, .. })
    }
}

/// Restores with the ledger's entries around it. A Pod that goes on from another's image takes it: the marker is there before anything runs, and
/// from before it on the ledger tells whether this Pod has run. One that has not gives the image back. What is reported of a sandbox that goes on
/// is there before it is recorded that it does: nobody who finds it running would report it. The caller holds the lock.
pub(super) fn wake_recorded(
    node: &Node,
    pod: &PodRecord,
    image: &Image,
    parts: &[ContainerRecord],
    ledger: &LedgerFile,
    what: &Restored<'_>,
) -> anyhow::Result<Stages> {
    let waking = ledger.append(&Entry::Waking {
        image: image.id().clone(),
    })?;
    let take = || -> anyhow::Result<()> {
        if what.takes() {
            image.mark_consumed(&pod.pod_uid).map_err(Refusal::from)?;
        }
        Ok(())
    };
    // Once more: an earlier sandbox of this Pod may have given it back meanwhile.
    let awake = |give_back: &dyn Fn()| {
        if let Restored::Anew { .. } = what {
            renew::renew(node, pod, parts, give_back)?;
        }
        take()?;
        if let Restored::Anew { report, .. } = what {
            node.records.write_report(&pod.pod_uid, report)?;
        }
        Ok(ledger.append_at(waking.seq, &Entry::Awake).map(drop)?)
    };
    let restored =
        take().and_then(|()| sandbox::restore(node, pod, image, parts, what.cause(), awake));
    // A Pod that starts cold instead leaves its memory behind for good.
    if let Err(error) = &restored
        && has_failed(ledger, waking.seq, image.id(), reason_of(error))?
        && what.takes()
        && !pod.cold_start_on_failure
    {
        image.release(&pod.pod_uid).map_err(Refusal::from)?;
    }
    restored
}

/// Notes that nothing of the restore runs; answers whether that was this Pod's last word. Fenced: the kubelet may have made another sandbox of
/// the Pod meanwhile, which says of itself how its restore went.
fn has_failed(
    ledger: &LedgerFile,
    waking: u64,
    image: &ImageId,
    reason: &str,
) -> anyhow::Result<bool> {
    let failed = Entry::WakeFailed {
        image: image.clone(),
        reason: reason.to_owned(),
    };
    match ledger.append_at(waking, &failed) {
        Ok(_) => Ok(true),
        Err(Fenced { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

//! The plan for a Pod that the API does not have any more, and for the memory in its images.
//!
//! The Pod may have been evicted while the controller was away, or the watch of snapshots may be
//! behind that of Pods. The snapshot that names the Pod then comes later. The Pod's memory
//! therefore stays until all of this holds:
//! - the grace time is over; a Pod that its user deleted to remove it has none
//! - the node has no record of its sandbox any more
//! - the apiserver's own answer, requested for this plan, has neither the Pod nor a snapshot that
//!   names it and that the watch does not show
//!
//! Any other whole image waits for the last two. An image whose snapshot is being deleted has no
//! grace time either; the apiserver's answer has to confirm that deletion.

use super::{Planning, View};
use crate::ids::ImageId;
use crate::ledger::Memory;
use crate::state::{
    Answer, Departure, ImageState, Live, PodPresence, SnapshotReason, SnapshotWish,
};
use crate::steps::{Action, Reason};
use crate::time::later;

impl Planning<'_> {
    /// Plans for a Pod that is gone. The kubelet ends its sandbox. Afterwards only the images that
    /// snapshots refer to stay, and the ledger with them, because it records whether those images
    /// are stale.
    pub(super) fn plan_gone(&mut self) {
        self.why.push(Reason::PodGone);
        if self.view.observed.live != Live::None {
            return;
        }
        self.discard_partials();
        if let Some(image) = self.view.fresh.clone() {
            self.adopt_at_rest(&image);
        }
        if self.view.observed.sandbox.is_some() {
            // A sandbox that is being removed may still be restoring.
            if self.view.unused_foreign_image().is_some() {
                self.look_at(later(self.now, self.policy.look_again));
            }
            return;
        }
        // A snapshot may name an image that is not in the store now. If the image comes back, it is
        // the snapshot's, by its status and by the ledger.
        let mut kept = self.view.is_awaited();
        for image in self.images(ImageState::Committed) {
            let wanted = self.view.is_referenced(&image) || self.waits_for_restore(&image);
            if wanted || !self.may_give_up(&image) {
                kept = true;
            } else {
                self.give_up(&image);
            }
        }
        // The image that is the Pod's memory may come back, too, although no snapshot names it yet.
        let missing = self.view.missing_memory().cloned();
        kept |= missing.is_some_and(|image| !self.may_give_up(&image));
        self.plan_ledger_of_gone(kept);
    }

    fn plan_ledger_of_gone(&mut self, kept: bool) {
        let has_ledger = self.view.ledger.seq > 0 || self.view.corrupt.is_some();
        if !has_ledger || kept {
            return;
        }
        if let Some(image) = self.view.unused_foreign_image().cloned() {
            self.removal(Action::ReleaseImage { image }, None, None);
        }
        self.removal(Action::DiscardLedger, None, None);
    }

    /// Returns whether the image of a Pod that is gone may be removed, though it may be its memory.
    /// If not, `why` and `wake_at` describe what it waits for.
    fn may_give_up(&mut self, image: &ImageId) -> bool {
        let view = self.view;
        let Some(departure) = &view.desired.departure else {
            return false;
        };
        if view.is_left_memory(image) {
            let is_claimed = view.needing_image().next().is_some();
            if is_claimed && view.fresh.as_ref() == Some(image) {
                // The snapshots are about to adopt the image. If that entry cannot be written now,
                // it is written later.
                return false;
            }
            let until = later(departure.since, self.policy.unclaimed_grace);
            let is_waited_for = until > self.now && !departure.has_no_grace();
            if is_waited_for && !view.may_be_deleted(image, view.desired.answer.as_ref()) {
                let image = image.clone();
                self.why.push(Reason::Unclaimed { image, until });
                self.look_at(until);
                return false;
            }
        }
        match &view.desired.answer {
            None => {
                self.asks = true;
                let image = image.clone();
                self.why.push(Reason::Asking { image });
                false
            }
            Some(answer) if view.is_behind(answer) => {
                let image = image.clone();
                self.why.push(Reason::Asking { image });
                self.look_at(later(self.now, self.policy.ask_again));
                false
            }
            Some(_) => true,
        }
    }

    fn give_up(&mut self, image: &ImageId) {
        let view = self.view;
        let departure = view.desired.departure.as_ref();
        let by_user = departure.is_some_and(|departure| departure.by_user);
        let answer = view.desired.answer.as_ref();
        let is_deleted = view.may_be_deleted(image, answer);
        if view.is_left_memory(image) && !by_user && !is_deleted {
            let over = |departure: &Departure| {
                later(departure.since, self.policy.unclaimed_grace) <= self.now
            };
            self.why.push(Reason::GivenUp {
                image: image.clone(),
                disk_short: !departure.is_some_and(over),
            });
        }
        self.discard(image);
    }
}

impl Departure {
    fn has_no_grace(&self) -> bool {
        self.by_user || self.disk_short
    }
}

impl View<'_> {
    /// Returns whether the image may be the memory of a Pod that is gone: the ledger names it, or
    /// there is no ledger that contradicts. If another Pod was restored from the image, that Pod
    /// has the memory now. A sandbox that never ran has no memory of its own.
    pub(super) fn is_left_memory(&self, image: &ImageId) -> bool {
        let mut images = self.observed.images.iter();
        let taken = images.any(|i| i.id == *image && i.consumed_by.is_some());
        let is_memory = self.ledger.memory.image() == Some(image);
        // A ledger that cannot be trusted counts as no ledger.
        let no_ledger = self.ledger.seq == 0;
        !taken && (is_memory && self.ledger.ran || no_ledger)
    }

    /// Returns the image that is the Pod's memory by the ledger and is not in the store. A save
    /// that was cut off left no image.
    fn missing_memory(&self) -> Option<&ImageId> {
        let memory = &self.ledger.memory;
        let cut_off = matches!(memory, Memory::Saving { .. });
        let own = |image: &&ImageId| image.pod() == &self.desired.pod_uid;
        let image = memory.image().filter(|_| !cut_off).filter(own)?;
        (!self.held(image)).then_some(image)
    }

    /// Returns the image that holds the memory of a Pod that is gone and whose sandbox has ended,
    /// unless a Suspend snapshot has the image.
    pub(super) fn left(&self) -> Option<&ImageId> {
        let is_left = self.desired.pod == PodPresence::Gone && self.observed.live == Live::None;
        let image = self.fresh.as_ref().filter(|_| is_left)?;
        let mut kept = self.desired.kept_snapshots();
        let is_suspended =
            kept.any(|s| s.reason == SnapshotReason::Suspend && self.image_of(s) == Some(image));
        (self.is_left_memory(image) && !is_suspended).then_some(image)
    }

    /// Returns whether a snapshot that has the image is being deleted, and the memory with it. The
    /// watch alone does not prove that: the snapshot may have been released before, while the Pod
    /// was there and the image was the Pod's own.
    fn may_be_deleted(&self, image: &ImageId, answer: Option<&Answer>) -> bool {
        let snapshots = self.desired.snapshots.iter();
        let mut deleted = snapshots.filter(|s| s.wish == SnapshotWish::Delete);
        deleted.any(|snapshot| {
            let is_certain = answer.is_none_or(|answer| answer.deleting.contains(&snapshot.uid));
            is_certain && self.images_of_deleted(snapshot).contains(image)
        })
    }

    /// Returns whether the apiserver has a Pod or snapshots that the watches do not show.
    fn is_behind(&self, answer: &Answer) -> bool {
        let snapshots = &self.desired.snapshots;
        let is_shown = |uid: &_| snapshots.iter().any(|snapshot| snapshot.uid == *uid);
        answer.has_pod || !answer.snapshots.iter().all(is_shown)
    }
}

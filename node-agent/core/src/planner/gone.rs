//! A Pod that the API has no more, and the memory that it left in an image.
//!
//! The Pod may have been evicted while the controller was away, or the watch of snapshots may be behind that of Pods: the snapshot that names the Pod comes later. So its memory
//! stays until all of this is so:
//! - the grace time is over, which a Pod that somebody deleted to be rid of it does not have
//! - the node has no record of its sandbox any more
//! - the apiserver itself, asked for this plan, has neither the Pod nor a snapshot that names it and that the watch does not show
//!
//! Every other whole image waits for the last two. An image whose snapshot is being deleted, also by the apiserver's word, has no grace time either.

use super::{Planning, View};
use crate::ids::ImageId;
use crate::ledger::Memory;
use crate::state::{
    Answer, Departure, ImageState, Live, PodPresence, SnapshotReason, SnapshotWish, later,
};
use crate::steps::{Action, Reason};

impl Planning<'_> {
    /// The sandbox is the kubelet's to end. After that only what snapshots refer to stays, with the ledger, which says whether those images are stale.
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
            if self.view.taken_in_vain().is_some() {
                self.look_at(later(self.now, self.policy.look_again));
            }
            return;
        }
        // An image that a snapshot names and that is not there may come back, and is the snapshot's then: by its status and by the ledger.
        let mut kept = self.view.is_awaited();
        for image in self.images(ImageState::Committed) {
            let wanted = self.view.is_referenced(&image) || self.waits_for_restore(&image);
            if wanted || !self.may_give_up(&image) {
                kept = true;
            } else {
                self.give_up(&image);
            }
        }
        // So may the one that is its memory, although nobody has named it yet.
        let missing = self.view.missing_memory().cloned();
        kept |= missing.is_some_and(|image| !self.may_give_up(&image));
        self.plan_ledger_of_gone(kept);
    }

    fn plan_ledger_of_gone(&mut self, kept: bool) {
        let has_ledger = self.view.ledger.seq > 0 || self.view.corrupt.is_some();
        if !has_ledger || kept {
            return;
        }
        if let Some(image) = self.view.taken_in_vain().cloned() {
            self.removal(Action::ReleaseImage { image }, None);
        }
        self.removal(Action::DiscardLedger, None);
    }

    /// Whether the image of a Pod that is gone may go, though it may be its memory. If not, `why` and `wake_at` say what is waited for.
    fn may_give_up(&mut self, image: &ImageId) -> bool {
        let view = self.view;
        let Some(departure) = &view.desired.departure else {
            return false;
        };
        if view.is_left_memory(image) {
            let is_claimed = view.needing_image().next().is_some();
            if is_claimed && view.fresh.as_ref() == Some(image) {
                // It is about to be theirs: an entry that could not be written is written later.
                return false;
            }
            let until = later(departure.since, self.policy.unclaimed_grace);
            let is_waited_for = until > self.now && !departure.has_no_grace();
            if is_waited_for && !view.may_be_deleted(image, departure.answer.as_ref()) {
                let image = image.clone();
                self.why.push(Reason::Unclaimed { image, until });
                self.look_at(until);
                return false;
            }
        }
        match &departure.answer {
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
        let answer = departure.and_then(|departure| departure.answer.as_ref());
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
    /// Whether the image may be the memory of a Pod that is gone: by the ledger, or because there is none, which then says nothing against it. A Pod that went on from it has
    /// that memory now.
    pub(super) fn is_left_memory(&self, image: &ImageId) -> bool {
        let mut images = self.observed.images.iter();
        let taken = images.any(|i| i.id == *image && i.consumed_by.is_some());
        let is_memory = self.ledger.memory.image() == Some(image);
        // One that cannot be trusted counts as none.
        let no_ledger = self.ledger.seq == 0;
        !taken && (is_memory || no_ledger)
    }

    /// The image that is the Pod's memory by the ledger and is not in the store. A save that was cut off left none.
    fn missing_memory(&self) -> Option<&ImageId> {
        let memory = &self.ledger.memory;
        let cut_off = matches!(memory, Memory::Saving { .. });
        let own = |image: &&ImageId| image.pod() == &self.desired.pod_uid;
        let image = memory.image().filter(|_| !cut_off).filter(own)?;
        (!self.held(image)).then_some(image)
    }

    /// The image that holds the memory of a Pod that is gone and whose sandbox has ended, unless a Suspend snapshot has it.
    pub(super) fn left(&self) -> Option<&ImageId> {
        let is_left = self.desired.pod == PodPresence::Gone && self.observed.live == Live::None;
        let image = self.fresh.as_ref().filter(|_| is_left)?;
        let mut kept = self.desired.kept_snapshots();
        let is_suspended =
            kept.any(|s| s.reason == SnapshotReason::Suspend && self.image_of(s) == Some(image));
        (self.is_left_memory(image) && !is_suspended).then_some(image)
    }

    /// Whether a snapshot that has the image is being deleted, and with it the memory. By the watch alone that is not certain: it may have been let go before, while the Pod was there,
    /// whose own the image was then.
    fn may_be_deleted(&self, image: &ImageId, answer: Option<&Answer>) -> bool {
        let snapshots = self.desired.snapshots.iter();
        let mut deleted = snapshots.filter(|s| s.wish == SnapshotWish::Delete);
        deleted.any(|snapshot| {
            let is_certain = answer.is_none_or(|answer| answer.deleting.contains(&snapshot.uid));
            is_certain && self.images_of_deleted(snapshot).contains(image)
        })
    }

    /// Whether the apiserver has what the watches do not show.
    fn is_behind(&self, answer: &Answer) -> bool {
        let snapshots = &self.desired.snapshots;
        let is_shown = |uid: &_| snapshots.iter().any(|snapshot| snapshot.uid == *uid);
        answer.has_pod || !answer.snapshots.iter().all(is_shown)
    }
}

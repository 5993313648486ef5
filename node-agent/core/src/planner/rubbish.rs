//! Removal of unfinished images, and of images that nothing refers to.

use super::Planning;
use crate::ids::ImageId;
use crate::ledger::Entry;
use crate::state::ImageState;
use crate::steps::{Action, Reason};
use crate::time::later;

impl Planning<'_> {
    /// Removes the partial images of a Pod that is there, and its stale images that no snapshot
    /// refers to.
    pub(super) fn plan_rubbish(&mut self) {
        if self.view.corrupt.is_some() {
            return;
        }
        self.discard_partials();
        for image in self.images(ImageState::Committed) {
            if self.view.is_rubbish(&image) && !self.waits_for_restore(&image) {
                self.discard(&image);
            }
        }
    }

    /// Returns whether the image must stay because a Pod is being restored from it. Such an image
    /// stays even if nothing else refers to it.
    pub(super) fn waits_for_restore(&mut self, image: &ImageId) -> bool {
        let restoring = self.view.is_being_restored(image);
        if restoring {
            self.look_at(later(self.now, self.policy.look_again));
        }
        restoring
    }

    /// Removes the partial images. No save is under way while a plan is made, so every partial
    /// image is a leftover.
    pub(super) fn discard_partials(&mut self) {
        for image in self.images(ImageState::Partial) {
            let action = Action::DiscardPartial {
                image: image.clone(),
            };
            let planned = self.steps.iter().any(|step| step.action == action);
            if planned || !self.may_try_removal() {
                continue;
            }
            let after = self.must_record_removal(&image).then(|| Entry::Discarded {
                image: image.clone(),
            });
            self.step(action, None, after);
        }
    }

    /// Removes the image. The ledger first leaves the image of a frozen sandbox, whose memory it
    /// is: if the sandbox then dies, it starts cold instead of waiting for an image that is gone.
    pub(super) fn discard(&mut self, image: &ImageId) {
        self.why.push(Reason::Garbage {
            image: image.clone(),
        });
        let after = self.must_record_removal(image).then(|| Entry::Discarded {
            image: image.clone(),
        });
        let before = self.view.is_memory(image).then_some(Entry::Awake);
        let image = image.clone();
        self.removal(Action::DiscardImage { image }, before, after);
    }

    /// Returns whether the ledger is to record that an image is gone: the ledger can be trusted,
    /// and it names the image.
    fn must_record_removal(&self, image: &ImageId) -> bool {
        self.view.corrupt.is_none() && self.view.ledger.images.contains_key(image)
    }

    pub(super) fn images(&self, state: ImageState) -> Vec<ImageId> {
        let images = self
            .view
            .observed
            .images
            .iter()
            .filter(|image| image.state == state);
        images.map(|image| image.id.clone()).collect()
    }
}

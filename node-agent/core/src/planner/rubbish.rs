//! What may go: unfinished images, and images that nothing refers to.

use super::Planning;
use crate::ids::ImageId;
use crate::ledger::Entry;
use crate::state::{ImageState, later};
use crate::steps::{Action, Reason};

impl Planning<'_> {
    /// The Pod is there: partial images go, and stale ones that no snapshot refers to.
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

    /// Also an image that nobody wants any more is not taken from under a Pod that is coming back from it.
    pub(super) fn waits_for_restore(&mut self, image: &ImageId) -> bool {
        let restoring = self.view.is_being_restored(image);
        if restoring {
            self.look_at(later(self.now, self.policy.look_again));
        }
        restoring
    }

    /// Nothing is being saved while a plan is made, so every partial image is a leftover.
    pub(super) fn discard_partials(&mut self) {
        for image in self.images(ImageState::Partial) {
            let action = Action::DiscardPartial {
                image: image.clone(),
            };
            let planned = self.steps.iter().any(|step| step.action == action);
            if planned || !self.may_try_removal() {
                continue;
            }
            let after = self.may_forget(&image).then(|| Entry::Discarded {
                image: image.clone(),
            });
            self.step(action, None, after);
        }
    }

    pub(super) fn discard(&mut self, image: &ImageId) {
        self.why.push(Reason::Garbage {
            image: image.clone(),
        });
        let after = self.may_forget(image).then(|| Entry::Discarded {
            image: image.clone(),
        });
        self.removal(
            Action::DiscardImage {
                image: image.clone(),
            },
            after,
        );
    }

    /// Whether the ledger can and should be told that an image is gone: it can be trusted, and it knows the image.
    fn may_forget(&self, image: &ImageId) -> bool {
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

//! Fetched images on this node's disk. Blocks.

use torpor_core::state::ImageState;

use super::plan::{Ended, Held, Place, Use};
use crate::reconcile::node::Node;

/// Returns whether this node made the image itself and still has it.
pub(super) fn is_own(node: &Node, (namespace, image): &Place) -> bool {
    let found = node.store.image(namespace, image);
    let fetched = node.store.fetched().image(namespace, image);
    found.is_ok() && fetched.is_err()
}

pub(super) fn held(node: &Node) -> Vec<Held> {
    let store = node.store.fetched();
    let listed = store.list().unwrap_or_default();
    let held = listed.into_iter().map(|image| Held {
        whole: image.state == ImageState::Committed
            && store.image(&image.namespace, &image.id).is_ok(),
        consumed_by: image.consumed_by,
        place: (image.namespace, image.id),
    });
    held.collect()
}

/// Finds out whether a Pod that the apiserver does not have any more ran from the image; none if
/// that is not known yet. An image that the Pod has not taken is removed first, so that no sandbox
/// of the Pod can take it later. `is_wanted`: another Pod of this node waits for the image.
pub(super) fn settle(
    node: &Node,
    ((namespace, image), pod): &Use,
    is_wanted: bool,
) -> Option<Ended> {
    if node.sandbox_of(pod).is_some() {
        return None;
    }
    let ledger = node
        .store
        .ledger(pod)
        .and_then(|ledger| ledger.read())
        .ok()?;
    let is_in_image = ledger.seq > 0 && ledger.memory.image() == Some(image);
    let store = node.store.fetched();
    let taken_by = match store.image(namespace, image) {
        Ok(found) => found.consumed_by().ok()?,
        Err(_) => None,
    };
    match (taken_by.as_ref() == Some(pod), is_in_image) {
        // The planner gives the image back.
        (_, true) => None,
        (true, false) => Some(Ended::Ran),
        (false, false) if ledger.seq > 0 => Some(Ended::Ran),
        (false, false) if is_wanted => None,
        (false, false) => {
            store.remove_partial(namespace, image).ok()?;
            store.remove_image(namespace, image).ok()?;
            node.sandbox_of(pod).is_none().then_some(Ended::NeverRan)
        }
    }
}

//! Room and time for a save: the checks before it begins, and the limits while it is under way.

use std::time::Duration;

use torpor_core::image_size;
use torpor_core::steps::Outcome;
use torpor_core::store_limit::{self, OverLimit};
use torpor_records::{PodLock, PodRecord};
use torpor_runsc::keeper::Verb;

use super::context::{Context, VERB_LIMIT, failed};
use crate::policy::saves;
use crate::reconcile::node::Node;
use crate::reconcile::observe::words;

/// Time limit of a save, without the addition for its size.
pub(super) const SAVE_LIMIT: Duration = Duration::from_secs(300);
/// Bytes of memory for each of which a save may take one second more. A slow disk that
/// other programs use too writes them in less than a second.
const SLOWEST_SAVE: u64 = 20 << 20;

/// Returns the time limit of a save of so many bytes. Without a limit, a save without an end
/// would pause the sandbox without an end.
pub(super) fn save_limit(expected: Option<u64>) -> Duration {
    let seconds = expected.unwrap_or(0) / SLOWEST_SAVE;
    SAVE_LIMIT.saturating_add(Duration::from_secs(seconds))
}

/// Returns the failure of a save if there is no room for it.
pub(crate) fn no_room(context: &Context<'_>) -> Option<Outcome> {
    let (record, lock) = context.sandbox?;
    no_room_for(
        context,
        saves::figures(context.node, record, lock).expected(),
    )
}

/// Returns the failure of a save of `expected` bytes if there is no room for it. If the size is
/// not known, the limits only must not be reached yet.
pub(super) fn no_room_for(context: &Context<'_>, expected: Option<u64>) -> Option<Outcome> {
    let (node, wanted) = (context.node, expected.unwrap_or(0));
    if let Err(refused) = node.store.check_room(wanted, node.limits.reserve) {
        return Some(failed(refused.reason(), &refused));
    }
    let limit = node.namespace_limit().filter(|_| context.limited)?;
    let used = match node.store.namespace_bytes(context.namespace) {
        Ok(used) => used,
        Err(error) => return Some(failed("StoreUnreadable", &error)),
    };
    let refused = store_limit::check(context.namespace, used, wanted, Some(limit)).err()?;
    Some(failed(OverLimit::REASON, &refused))
}

/// Returns a function that decides, by the bytes written so far, whether a save is stopped.
///
/// Before a stop for the size, the memory is counted again: pages that a wake was still reading
/// at the first count were not in memory yet.
pub(super) fn stop_of(
    node: &Node,
    record: &PodRecord,
    lock: &PodLock,
    mut cap: Option<u64>,
) -> impl FnMut(u64) -> Option<image_size::Stop> {
    let reserve = node.limits.reserve;
    move |written| {
        if cap.is_some_and(|cap| written > cap) {
            cap = saves::figures(node, record, lock).cap().or(cap);
        }
        let capacity = node.store.capacity().ok();
        let free = capacity.map(|capacity| capacity.available);
        let least = capacity.map_or(0, |capacity| capacity.kept(reserve) / 2);
        image_size::stop(written, cap, free, least)
    }
}

/// Ends a sandbox that continues a stopped save. It cannot be trusted any more, and its end
/// frees the bytes that it has written.
pub(super) fn force_end(context: &Context<'_>) {
    let Some((record, lock)) = context.sandbox else {
        return;
    };
    let sandbox = &record.sandbox;
    let asked = context
        .node
        .ask_keeper(sandbox, lock, Verb::ForceEnd.into(), VERB_LIMIT);
    match asked {
        Ok(_) => {
            tracing::error!(pod = %context.pod, "ended the sandbox, because it continued to write an image after the save was stopped");
        }
        Err(error) => {
            tracing::error!(pod = %context.pod, error = words(&error), "cannot end the sandbox, which continues to write an image after the save was stopped");
        }
    }
}

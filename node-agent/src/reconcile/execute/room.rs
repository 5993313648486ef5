//! Room and time for a save: what refuses it before it begins, and what stops it while it is under way.

use std::time::Duration;

use torpor_core::image_size;
use torpor_core::steps::Outcome;
use torpor_core::store_limit::{self, OverLimit};
use torpor_records::{PodLock, PodRecord};
use torpor_runsc::keeper::Verb;

use super::{Context, WAKE_LIMIT, failed};
use crate::policy::saves;
use crate::reconcile::node::Node;
use crate::reconcile::observe::words;

/// How long a save may take, whatever the size of the sandbox.
pub(super) const SAVE_LIMIT: Duration = Duration::from_secs(300);
/// For each so many bytes of memory it may take a second more: a slow disk that others use too takes them in less.
const SLOWEST_SAVE: u64 = 20 << 20;

/// How long a save of so many bytes may take: a sandbox that is written without end stands still without end.
pub(super) fn save_limit(expected: Option<u64>) -> Duration {
    let seconds = expected.unwrap_or(0) / SLOWEST_SAVE;
    SAVE_LIMIT.saturating_add(Duration::from_secs(seconds))
}

/// How a save fails for which there is no room, if there is none.
pub(crate) fn no_room(context: &Context<'_>) -> Option<Outcome> {
    let (record, lock) = context.sandbox?;
    no_room_for(
        context,
        saves::figures(context.node, record, lock).expected(),
    )
}

/// Of a sandbox whose size is not known, it is only asked that something is left.
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

/// When a save of the sandbox is stopped. Its memory is counted again before it is stopped for its size: what a wake still reads was not
/// in memory yet.
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

/// The sandbox cannot be trusted any more; its end frees what it has written.
pub(super) fn force_end(context: &Context<'_>) {
    let Some((record, lock)) = context.sandbox else {
        return;
    };
    let sandbox = &record.sandbox;
    let asked = context
        .node
        .ask_keeper(sandbox, lock, Verb::ForceEnd, None, None, WAKE_LIMIT);
    match asked {
        Ok(_) => {
            tracing::error!(pod = %context.pod, "ended the sandbox, because it continued to write an image after the save was stopped");
        }
        Err(error) => {
            tracing::error!(pod = %context.pod, error = words(&error), "cannot end the sandbox, which continues to write an image after the save was stopped");
        }
    }
}

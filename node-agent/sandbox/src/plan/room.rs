//! Room and time for a save: the checks before it begins, and the limits while it is under way.

use std::time::Duration;

use torpor_core::image_size;
use torpor_core::steps::Outcome;
use torpor_core::store_limit::{self, OverLimit};
use torpor_records::PodRecord;
use torpor_snapshots::Store;
use torpor_snapshots::steps::Place;

use crate::figures::largest_figures;
use crate::node::Node;

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

/// Returns the failure of a save of `expected` bytes if there is no room for it. If the size is
/// not known, the limits only must not be reached yet. `reserve`: percent of the disk. `limit`:
/// bytes of the namespace's images.
pub(super) fn no_room_for(
    place: &Place<'_>,
    expected: Option<u64>,
    reserve: u8,
    limit: Option<u64>,
) -> Option<Outcome> {
    let wanted = expected.unwrap_or(0);
    if let Err(refused) = place.store.check_room(wanted, reserve) {
        return Some(Outcome::failed(refused.reason(), &refused));
    }
    let limit = limit?;
    let used = match place.store.namespace_bytes(place.namespace) {
        Ok(used) => used,
        Err(error) => return Some(Outcome::failed("StoreUnreadable", &error)),
    };
    let refused = store_limit::check(place.namespace, used, wanted, Some(limit)).err()?;
    Some(Outcome::failed(OverLimit::REASON, &refused))
}

/// Returns a function that decides, by the bytes written so far, whether a save is stopped.
///
/// Before a stop for the size, the memory is counted again: the first count lacks the pages of the
/// last two seconds, for example those of a wake.
pub(super) fn stop_of(
    node: &Node,
    record: &PodRecord,
    store: &Store,
    reserve: u8,
    mut cap: Option<u64>,
) -> impl FnMut(u64) -> Option<image_size::Stop> {
    move |written| {
        if cap.is_some_and(|cap| written > cap) {
            cap = largest_figures(node, record).cap().or(cap);
        }
        let capacity = store.capacity().ok();
        let free = capacity.map(|capacity| capacity.available);
        let least = capacity.map_or(0, |capacity| capacity.kept(reserve) / 2);
        image_size::stop(written, cap, free, least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::tests::Limited;

    const MIB: u64 = 1 << 20;

    #[test]
    fn memory_that_the_kernel_has_not_summed_up_yet_stops_no_save() {
        let (stat, used) = ("memory.stat", "memory.current");
        let limited = Limited::by(&[
            (stat, "anon 1000\nshmem 0\n"),
            ("memory.swap.current", "0\n"),
            (used, "1000\n"),
        ]);
        let (node, pod) = (&limited.node, &limited.pod);
        let store = node.store().expect("a store");
        let stops = |written| {
            let cap = crate::figures::figures(node, pod).cap();
            assert!(cap.is_some());
            stop_of(node, pod, &store, 0, cap)(written).map(|stop| stop.reason())
        };
        assert_eq!(stops(100 * MIB), Some("ImageTooLarge"));
        limited.set(used, &(100 * MIB).to_string());
        assert_eq!(stops(100 * MIB), None);
        assert_eq!(stops(200 * MIB), Some("ImageTooLarge"));
    }
}

//! Room and time for a save: the checks before it begins, and the limits while it is under way.

use std::time::Duration;

use torpor_core::image_size;
use torpor_core::steps::Outcome;
use torpor_core::store_limit::{self, OverLimit};
use torpor_records::PodRecord;
use torpor_snapshots::Store;
use torpor_snapshots::steps::Place;

use crate::figures::figures_during_save;
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
/// Before a stop for the size, the memory is counted again: pages that a wake was still reading
/// at the first count were not in memory yet.
pub(super) fn stop_of(
    node: &Node,
    record: &PodRecord,
    store: &Store,
    reserve: u8,
    mut cap: Option<u64>,
) -> impl FnMut(u64) -> Option<image_size::Stop> {
    move |written| {
        if cap.is_some_and(|cap| written > cap) {
            cap = cap.max(figures_during_save(node, record).cap());
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
    use crate::figures::figures;
    use crate::node::tests::Limited;

    const MIB: u64 = 1 << 20;

    fn limited(current: u64, stat: &str) -> Limited {
        let files = [
            ("memory.stat", stat),
            ("memory.swap.current", "0\n"),
            ("memory.current", &current.to_string()),
        ];
        Limited::by(&files)
    }

    #[test]
    fn memory_that_the_kernel_has_not_summed_up_yet_stops_no_save() {
        let stale = "anon 1000\nshmem 0\nfile 0\n";
        let stops = |current| {
            let limited = limited(current, stale);
            let (node, pod) = (&limited.node, &limited.pod);
            let cap = figures(node, pod).cap();
            assert!(cap.is_some());
            let store = node.store().expect("a store");
            stop_of(node, pod, &store, 0, cap)(100 * MIB).map(|stop| stop.reason())
        };
        assert_eq!(stops(1000), Some("ImageTooLarge"));
        assert_eq!(stops(100 * MIB), None);
    }

    #[test]
    fn the_file_cache_of_an_image_that_is_written_does_not_raise_its_limit() {
        let stat = "anon 1000\nshmem 0\nfile 0\n";
        let limited = limited(1000, stat);
        let (node, pod) = (&limited.node, &limited.pod);
        let store = node.store().expect("a store");
        let mut stop = stop_of(node, pod, &store, 0, figures(node, pod).cap());
        for written in [50 * MIB, 70 * MIB] {
            // The kernel has not summed up the cache yet, or has.
            limited.set("memory.current", &(1000 + written).to_string());
            let stopped = stop(written).map(|stop| stop.reason());
            assert_eq!(stopped, (written > 64 * MIB).then_some("ImageTooLarge"));
            limited.set(
                "memory.stat",
                &format!("anon 1000\nshmem 0\nfile {written}\n"),
            );
        }
    }
}

//! Limits on all uploads of a node: their bandwidth, and their share of the processors.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The turn to cut, compress and encrypt. One thread of a node does that at a time, because a
/// sandbox that wakes meanwhile needs the processors.
#[derive(Debug, Clone, Default)]
pub(crate) struct Packing(Arc<Mutex<()>>);

impl Packing {
    /// Does the work when its turn has come. Blocks.
    pub(crate) fn alone<T>(&self, work: impl FnOnce() -> T) -> T {
        let _turn = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        work()
    }
}

/// Limits that the uploads of a node share.
#[derive(Debug)]
pub struct Pace {
    packing: Packing,
    bytes_per_second: Option<u64>,
    /// Time at which the link is free again.
    free_at: Mutex<Option<Instant>>,
}

impl Pace {
    /// `bytes_per_second`: bandwidth of all uploads together. `None` is no limit. A limit of 0
    /// counts as 1.
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        Self {
            packing: Packing::default(),
            bytes_per_second: bytes_per_second.map(|limit| limit.max(1)),
            free_at: Mutex::new(None),
        }
    }

    pub(crate) fn packing(&self) -> Packing {
        self.packing.clone()
    }

    /// Waits for the turn to send `bytes`.
    pub(crate) async fn wait(&self, bytes: u64) {
        let Some(limit) = self.bytes_per_second else {
            return;
        };
        let wait = {
            let mut free_at = self.free_at.lock().expect("no panic while it is held");
            let (wait, next) = turn(*free_at, Instant::now(), bytes, limit);
            *free_at = Some(next);
            wait
        };
        tokio::time::sleep(wait).await;
    }
}

/// Returns the time to wait, and the time at which the link is free after these bytes.
fn turn(free_at: Option<Instant>, now: Instant, bytes: u64, limit: u64) -> (Duration, Instant) {
    let begin = free_at.map_or(now, |free| free.max(now));
    let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(limit);
    let takes = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
    (begin - now, begin + takes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_wait_for_those_before_them_and_not_for_idle_time() {
        let now = Instant::now();
        let (first, free) = turn(None, now, 500, 1000);
        assert_eq!(first, Duration::ZERO);
        let (second, free) = turn(Some(free), now, 1000, 1000);
        assert_eq!(second, Duration::from_millis(500));
        let later = now + Duration::from_secs(60);
        let (third, free) = turn(Some(free), later, 100, 1000);
        assert_eq!(
            (third, free),
            (Duration::ZERO, later + Duration::from_millis(100))
        );
    }
}

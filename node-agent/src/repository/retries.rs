//! Failures of uploads and downloads, and when each is tried again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Failures by subject, since the last success of each.
#[derive(Debug)]
pub(super) struct Retries<K> {
    first_pause: Duration,
    longest_pause: Duration,
    failed: BTreeMap<K, Failed>,
}

#[derive(Debug, Clone, Copy)]
struct Failed {
    times: u32,
    /// Time of the first attempt that failed.
    since: Instant,
    /// No attempt is made before.
    until: Instant,
}

impl<K: Ord> Retries<K> {
    /// The pause after a failure doubles from `first_pause` to `longest_pause`.
    pub(super) fn new(first_pause: Duration, longest_pause: Duration) -> Self {
        Self {
            first_pause,
            longest_pause,
            failed: BTreeMap::new(),
        }
    }

    /// Records a failure. Returns the time of the next attempt.
    pub(super) fn failed(&mut self, of: K, now: Instant) -> Instant {
        let before = self.failed.get(&of);
        let times = before.map_or(0, |failed| failed.times) + 1;
        let pause = self.first_pause.saturating_mul(1 << (times - 1).min(10));
        let since = before.map_or(now, |failed| failed.since);
        let until = now + pause.min(self.longest_pause);
        let failed = Failed {
            times,
            since,
            until,
        };
        self.failed.insert(of, failed);
        until
    }

    pub(super) fn succeeded(&mut self, of: &K) {
        self.failed.remove(of);
    }

    /// Forgets the failures of all others.
    pub(super) fn retain(&mut self, is_wanted: impl Fn(&K) -> bool) {
        self.failed.retain(|of, _| is_wanted(of));
    }

    pub(super) fn has_failed(&self, of: &K) -> bool {
        self.failed.contains_key(of)
    }

    /// Reports whether the next attempt has to wait.
    pub(super) fn waits(&self, of: &K, now: Instant) -> bool {
        self.failed.get(of).is_some_and(|failed| failed.until > now)
    }

    /// Returns the time of the first attempt that failed.
    pub(super) fn since(&self, of: &K) -> Option<Instant> {
        self.failed.get(of).map(|failed| failed.since)
    }

    /// Returns the earliest time of an attempt that waits.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let all = self.failed.values().map(|failed| failed.until);
        all.filter(|until| *until > now).min()
    }
}

/// Waits until this time; for ever without one.
pub(super) async fn wait_until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time.into()).await,
        None => std::future::pending().await,
    }
}

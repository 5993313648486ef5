//! The schedule by which the room that a wake adds to a Pod's limit of memory is given back.
//!
//! The room is given back as soon as the Pod does not use it, and a minute after the wake at the
//! latest.

use std::time::{Duration, Instant};

/// Time from the wake to the first attempt. A wake's own buffers are mostly free after a second.
const FIRST_ATTEMPT: Duration = Duration::from_secs(1);
/// Time from the first attempt to the first garbage collection of gVisor, which by itself collects
/// once an hour.
const COLLECT_AFTER: Duration = Duration::from_secs(14);
/// Time from the first attempt to the end of the room, however much memory the sandbox uses.
const ENFORCE_AFTER: Duration = Duration::from_secs(59);

/// The room of one wake that is not yet given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryRoom {
    since: Instant,
    next_attempt: Instant,
    /// The longest time before the next attempt. It doubles with each attempt.
    interval: Duration,
}

/// The kind of an attempt to give the room back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    /// Restores the Pod's own limit if the memory in use fits into it.
    GiveBack,
    /// As `GiveBack`. Otherwise collects gVisor's garbage and gives back the unused part.
    Collect,
    /// As `Collect`, but gives back all of the room.
    Enforce,
}

impl MemoryRoom {
    /// Creates the schedule for room that is in use at `now`, right after a wake.
    pub(super) fn new(now: Instant) -> Self {
        Self {
            since: now,
            next_attempt: now + FIRST_ATTEMPT,
            interval: FIRST_ATTEMPT,
        }
    }

    /// Schedules the next attempt for room that is still in use at `now`.
    ///
    /// The interval doubles, but no attempt comes later than the time from which its kind is
    /// another one. After the last such time, an attempt comes each second.
    pub(super) fn next(self, now: Instant) -> Self {
        let interval = self.interval.saturating_mul(2);
        let limit = [COLLECT_AFTER, ENFORCE_AFTER]
            .map(|after| self.since + FIRST_ATTEMPT + after)
            .into_iter()
            .find(|time| *time > now)
            .unwrap_or(now + FIRST_ATTEMPT);
        Self {
            next_attempt: limit.min(now + interval),
            interval,
            ..self
        }
    }

    pub(super) fn is_due(self, now: Instant) -> bool {
        self.next_attempt <= now
    }

    /// Returns the time until the next attempt.
    pub(super) fn due_in(self, now: Instant) -> Duration {
        self.next_attempt.saturating_duration_since(now)
    }

    /// Returns the kind of an attempt at `now`.
    pub(super) fn attempt(self, now: Instant) -> Attempt {
        let age = now.saturating_duration_since(self.since + FIRST_ATTEMPT);
        match age {
            _ if age >= ENFORCE_AFTER => Attempt::Enforce,
            _ if age >= COLLECT_AFTER => Attempt::Collect,
            _ => Attempt::GiveBack,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_looked_at_again_and_again_and_ends_after_a_minute() {
        let began = Instant::now();
        let mut room = MemoryRoom::new(began);
        let mut attempts = Vec::new();
        while attempts.len() < 8 {
            let now = began + room.due_in(began);
            assert!(room.is_due(now) && !room.is_due(now - Duration::from_millis(1)));
            attempts.push((now.duration_since(began).as_secs(), room.attempt(now)));
            room = room.next(now);
        }
        let expected = [
            (1, Attempt::GiveBack),
            (3, Attempt::GiveBack),
            (7, Attempt::GiveBack),
            (15, Attempt::Collect),
            (31, Attempt::Collect),
            (60, Attempt::Enforce),
            (61, Attempt::Enforce),
            (62, Attempt::Enforce),
        ];
        assert_eq!(attempts, expected);
    }
}

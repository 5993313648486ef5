//! When the room above a Pod's limit of memory, which a wake has made, is given back: as soon as it is not used, and a minute after the wake at the latest.

use std::time::{Duration, Instant};

/// A wake's own buffers are mostly free after a second.
const FIRST_LOOK: Duration = Duration::from_secs(1);
/// So long after the first look gVisor is asked to collect its garbage, which it does by itself once an hour.
const COLLECT_AFTER: Duration = Duration::from_secs(14);
/// So long after the first look the room ends, whatever the sandbox uses.
const ENDS_AFTER: Duration = Duration::from_secs(59);

/// Room that is owed to the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owed {
    since: Instant,
    at: Instant,
    wait: Duration,
}

/// What a look does with the room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    /// Gives back what is not used.
    GiveBack,
    /// The same, after gVisor has collected its garbage.
    Collect,
    /// Gives all of it back.
    Enforce,
}

impl Owed {
    /// Room that is found in use at `now`, right after a wake.
    pub(super) fn new(now: Instant) -> Self {
        Self {
            since: now,
            at: now + FIRST_LOOK,
            wait: FIRST_LOOK,
        }
    }

    /// It is still in use at `now`. The next look comes after twice as long a time, and not after the end.
    pub(super) fn again(self, now: Instant) -> Self {
        let wait = self.wait.saturating_mul(2);
        let next = [COLLECT_AFTER, ENDS_AFTER]
            .map(|after| self.since + FIRST_LOOK + after)
            .into_iter()
            .find(|time| *time > now)
            .unwrap_or(now + FIRST_LOOK);
        Self {
            at: next.min(now + wait),
            wait,
            ..self
        }
    }

    pub(super) fn is_due(self, now: Instant) -> bool {
        self.at <= now
    }

    pub(super) fn wait(self, now: Instant) -> Duration {
        self.at.saturating_duration_since(now)
    }

    pub(super) fn look(self, now: Instant) -> Look {
        let age = now.saturating_duration_since(self.since + FIRST_LOOK);
        match age {
            _ if age >= ENDS_AFTER => Look::Enforce,
            _ if age >= COLLECT_AFTER => Look::Collect,
            _ => Look::GiveBack,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_looked_at_again_and_again_and_ends_after_a_minute() {
        let began = Instant::now();
        let mut owed = Owed::new(began);
        let mut looks = Vec::new();
        while looks.len() < 8 {
            let now = began + owed.wait(began);
            assert!(owed.is_due(now) && !owed.is_due(now - Duration::from_millis(1)));
            looks.push((now.duration_since(began).as_secs(), owed.look(now)));
            owed = owed.again(now);
        }
        let expected = [
            (1, Look::GiveBack),
            (3, Look::GiveBack),
            (7, Look::GiveBack),
            (15, Look::Collect),
            (31, Look::Collect),
            (60, Look::Enforce),
            (61, Look::Enforce),
            (62, Look::Enforce),
        ];
        assert_eq!(looks, expected);
    }
}

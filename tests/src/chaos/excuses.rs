//! Events that allow a sandbox's program to start anew.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Event that may cost a sandbox its memory.
///
/// Each kind allows one new start: a container that was started again because of one event may have
/// been started in vain because of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Excuse {
    /// A process below the sandbox was killed while the sandbox may have been awake.
    Struck,
    /// containerd died while it started the sandbox's container. It ends such a container when it
    /// starts.
    CutOff,
}

const BOTH: [Excuse; 2] = [Excuse::Struck, Excuse::CutOff];

/// Number of cycles, this one included, for which each excuse holds, by name of the sandbox.
#[derive(Debug, Default)]
pub(super) struct Excuses(Mutex<HashMap<String, [u8; BOTH.len()]>>);

impl Excuses {
    fn all(&self) -> MutexGuard<'_, HashMap<String, [u8; BOTH.len()]>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an excuse for this cycle and the next.
    pub(super) fn excuse(&self, name: String, excuse: Excuse) {
        self.all().entry(name).or_default()[excuse as usize] = 2;
    }

    pub(super) fn is_excused(&self, name: &str) -> bool {
        let all = self.all();
        all.get(name)
            .is_some_and(|left| left.iter().any(|left| *left > 0))
    }

    /// Counts the excuses down at the begin of a cycle.
    pub(super) fn fade(&self, name: &str) {
        for left in self.all().get_mut(name).into_iter().flatten() {
            *left = left.saturating_sub(1);
        }
    }

    /// Uses up an excuse for a new start; reports whether there was one.
    pub(super) fn take(&self, name: &str) -> bool {
        let mut all = self.all();
        let mut left = all.get_mut(name).into_iter().flatten();
        let one = left.find(|left| **left > 0);
        one.is_some_and(|one| std::mem::take(one) > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_two_events_excuses_once_in_this_cycle_or_the_next() {
        let excuses = Excuses::default();
        let excuse = |name: &str, why| excuses.excuse(name.to_owned(), why);
        assert!(!excuses.is_excused("a") && !excuses.take("a"));
        excuse("a", Excuse::Struck);
        excuse("a", Excuse::Struck);
        assert!(excuses.is_excused("a") && !excuses.is_excused("b"));
        assert!(excuses.take("a") && !excuses.take("a"));
        for why in BOTH {
            excuse("a", why);
        }
        assert!(excuses.take("a") && excuses.take("a") && !excuses.take("a"));
        excuse("a", Excuse::CutOff);
        excuses.fade("a");
        assert!(excuses.is_excused("a"));
        excuse("a", Excuse::Struck);
        excuses.fade("a");
        assert!(
            excuses.take("a") && !excuses.take("a"),
            "the older one has faded"
        );
    }
}

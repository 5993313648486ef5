//! What excuses a sandbox whose program has started anew.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Why its memory may be gone. Each costs it once: a container that was started again because of the one may have been started in vain because of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Excuse {
    /// Something was killed that it ran on while it may have been awake.
    Struck,
    /// containerd died while it started its container, and ends that when it comes up.
    CutOff,
}

const BOTH: [Excuse; 2] = [Excuse::Struck, Excuse::CutOff];

/// By name of the sandbox: noticed in so many cycles, this one included.
#[derive(Debug, Default)]
pub(super) struct Excuses(Mutex<HashMap<String, [u8; BOTH.len()]>>);

impl Excuses {
    fn all(&self) -> MutexGuard<'_, HashMap<String, [u8; BOTH.len()]>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// In this cycle or the next.
    pub(super) fn excuse(&self, name: String, excuse: Excuse) {
        self.all().entry(name).or_default()[excuse as usize] = 2;
    }

    pub(super) fn is_excused(&self, name: &str) -> bool {
        let all = self.all();
        all.get(name)
            .is_some_and(|left| left.iter().any(|left| *left > 0))
    }

    /// Another cycle begins.
    pub(super) fn fade(&self, name: &str) {
        for left in self.all().get_mut(name).into_iter().flatten() {
            *left = left.saturating_sub(1);
        }
    }

    /// It has started anew. Whether there was an excuse; there is one less now.
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

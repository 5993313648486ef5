//! The signal that ends the shim.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// A signal that is given once, and stays given.
#[derive(Debug, Default)]
pub(crate) struct EndSignal {
    given: Mutex<bool>,
    changed: Condvar,
}

impl EndSignal {
    pub(crate) fn give(&self) {
        *self.given.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Waits for the signal, or until `limit` is over. Returns whether the signal was given.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .changed
            .wait_timeout_while(given, limit, |given| !*given);
        let (given, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *given
    }

    /// Waits for the signal, or until `is_unused` holds at two looks, with `interval` between them.
    pub(crate) fn wait_or_unused(&self, interval: Duration, is_unused: impl Fn() -> bool) {
        let mut was_unused = false;
        while !self.wait(interval) {
            let is_unused = is_unused();
            if was_unused && is_unused {
                return;
            }
            was_unused = is_unused;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const INTERVAL: Duration = Duration::from_millis(1);
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_signal_that_was_given_before_the_wait_ends_it() {
        let signal = EndSignal::default();
        assert!(!signal.wait(INTERVAL));
        signal.give();
        assert!(signal.wait(LONG));
        signal.wait_or_unused(LONG, || panic!("no look"));
    }

    #[test]
    fn a_shim_that_is_used_at_every_other_look_goes_on() {
        let signal = EndSignal::default();
        let looks = Cell::new(0);
        signal.wait_or_unused(INTERVAL, || {
            looks.set(looks.get() + 1);
            looks.get() % 2 == 0 || looks.get() > 20
        });
        assert_eq!(looks.get(), 21);
    }
}

//! What this process remembers of templates between passes: whose user was told that somebody else has the name of its NetworkPolicy.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::events::AGAIN;

/// When the user of each template was told last, by the template's UID.
#[derive(Debug, Default)]
pub struct Memory(Mutex<HashMap<String, Instant>>);

impl Memory {
    /// Whether it is time to tell. If it is, it counts as told.
    pub fn is_due(&self, uid: &str, now: Instant) -> bool {
        let mut all = self.lock();
        let told = all.get(uid);
        let due = told.is_none_or(|told| now.saturating_duration_since(*told) >= AGAIN);
        if due {
            all.insert(uid.to_owned(), now);
        }
        due
    }

    /// There is nothing to tell any more, or the template is gone.
    pub fn forget(&self, uid: &str) {
        self.lock().remove(uid);
    }

    // A panic elsewhere leaves the map as it was.
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_stays_so_is_told_about_every_hour_and_anew_after_it_was_not() {
        let (memory, begin) = (Memory::default(), Instant::now());
        let due = |minutes: u64| memory.is_due("u", begin + Duration::from_secs(60 * minutes));
        assert_eq!([due(0), due(1), due(54)], [true, false, false]);
        assert_eq!([due(55), due(56)], [true, false]);
        assert!(memory.is_due("another", begin));
        memory.forget("u");
        assert!(due(57));
    }
}

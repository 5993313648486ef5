//! Memory of templates between passes: Events about foreign NetworkPolicies.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::events::REPEAT_INTERVAL;

/// Time of the last Event about each template, by UID.
#[derive(Debug, Default)]
pub struct Memory(Mutex<HashMap<String, Instant>>);

impl Memory {
    /// Reports whether an Event is due. If so, records it as published.
    pub fn is_due(&self, uid: &str, now: Instant) -> bool {
        let mut all = self.lock();
        let published = all.get(uid);
        let due = published
            .is_none_or(|published| now.saturating_duration_since(*published) >= REPEAT_INTERVAL);
        if due {
            all.insert(uid.to_owned(), now);
        }
        due
    }

    /// Forgets a template that is gone or has no fault any more.
    pub fn forget(&self, uid: &str) {
        self.lock().remove(uid);
    }

    // A panic elsewhere leaves the map unchanged.
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_lasting_fault_is_published_about_every_hour_and_a_new_one_at_once() {
        let (memory, begin) = (Memory::default(), Instant::now());
        let due = |minutes: u64| memory.is_due("u", begin + Duration::from_secs(60 * minutes));
        assert_eq!([due(0), due(1), due(54)], [true, false, false]);
        assert_eq!([due(55), due(56)], [true, false]);
        assert!(memory.is_due("another", begin));
        memory.forget("u");
        assert!(due(57));
    }
}

//! Tracks client connections; at the limit evicts the one idle longest.
//!
//! Clients with idle connections therefore cannot keep other clients out. Requests cost nothing
//! here: connections are inspected only when the limit is reached.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::connection::Activity;

/// Candidates chosen in one pass: a pass over 20,000 connections takes one or two milliseconds.
const CANDIDATES: usize = 256;

/// Open connections. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct ConnectionLimit(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    /// Number of the next connection.
    next: u64,
    activities: HashMap<u64, Activity>,
    /// Candidates for eviction with the time since which each was idle; the last is evicted first.
    candidates: Vec<(Instant, u64)>,
}

impl ConnectionLimit {
    /// Adds a connection; dropping the result removes it.
    pub fn register(&self, activity: Activity) -> Registration {
        let mut inner = self.inner();
        let number = inner.next;
        inner.next += 1;
        inner.activities.insert(number, activity);
        Registration {
            connection_limit: self.clone(),
            number,
        }
    }

    /// Requests the eviction of the connection idle longest; reports whether there is one.
    pub fn evict_idle(&self) -> bool {
        let (mut inner, now) = (self.inner(), Instant::now());
        let found = inner.next_candidate(now).or_else(|| {
            inner.choose_candidates(now);
            inner.next_candidate(now)
        });
        if let Some(activity) = &found {
            activity.request_eviction();
        }
        found.is_some()
    }

    // Each change is complete, so that a poisoned lock still guards valid data.
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn choose_candidates(&mut self, now: Instant) {
        let activities = self.activities.iter();
        let idle =
            activities.filter_map(|(number, activity)| Some((activity.idle_since(now)?, *number)));
        self.candidates = oldest(idle.collect(), CANDIDATES);
    }

    /// Returns the next candidate that has stayed idle since it was chosen.
    fn next_candidate(&mut self, now: Instant) -> Option<Activity> {
        while let Some((since, number)) = self.candidates.pop() {
            let activity = self.activities.get(&number);
            let still = activity.filter(|activity| activity.idle_since(now) == Some(since));
            if still.is_some() {
                return still.cloned();
            }
        }
        None
    }
}

/// Returns the `count` smallest, in descending order.
fn oldest<T: Ord>(mut all: Vec<T>, count: usize) -> Vec<T> {
    if count < all.len() {
        all.select_nth_unstable(count);
        all.truncate(count);
    }
    all.sort_unstable_by(|a, b| b.cmp(a));
    all
}

/// Registration of a connection, removed on drop.
#[derive(Debug)]
pub struct Registration {
    connection_limit: ConnectionLimit,
    number: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.connection_limit
            .inner()
            .activities
            .remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::{thread::sleep, time::Duration};

    use proptest::prelude::*;

    use super::*;
    use crate::connection::{Bound, QUIET, Timeouts};

    fn connect(connection_limit: &ConnectionLimit) -> (Activity, Registration) {
        let timeouts = Timeouts {
            head: Duration::MAX,
            idle: Duration::MAX,
            busy: Duration::MAX,
        };
        let activity = Activity::new(timeouts);
        // Times have a resolution of one millisecond.
        sleep(Duration::from_millis(2));
        (activity.clone(), connection_limit.register(activity))
    }

    fn evicted(connections: &[&(Activity, Registration)]) -> Vec<bool> {
        let activities = connections.iter().map(|(activity, _)| activity);
        activities
            .map(|activity| activity.idle_since(Instant::now()).is_none())
            .collect()
    }

    #[test]
    fn the_connection_idle_longest_is_evicted() {
        let connection_limit = ConnectionLimit::default();
        let (first, second, third) = (
            connect(&connection_limit),
            connect(&connection_limit),
            connect(&connection_limit),
        );
        drop(first.0.request(false, Bound::Router));
        sleep(QUIET);
        assert!(connection_limit.evict_idle());
        assert_eq!(evicted(&[&first, &second, &third]), [false, true, false]);
        assert!(connection_limit.evict_idle());
        assert_eq!(evicted(&[&first, &second, &third]), [false, true, true]);
    }

    #[test]
    fn a_candidate_with_a_new_request_or_without_a_connection_is_skipped() {
        let connection_limit = ConnectionLimit::default();
        let (first, second, third) = (
            connect(&connection_limit),
            connect(&connection_limit),
            connect(&connection_limit),
        );
        let fourth = connect(&connection_limit);
        sleep(QUIET);
        assert!(
            connection_limit.evict_idle(),
            "this makes all of them candidates"
        );
        let _request = second.0.request(true, Bound::Client);
        drop(third);
        assert!(connection_limit.evict_idle());
        assert_eq!(evicted(&[&first, &fourth]), [true, true]);
        assert!(
            !connection_limit.evict_idle(),
            "the only other one has a request"
        );
        drop((first, second, fourth));
        assert!(connection_limit.inner().activities.is_empty());
    }

    proptest! {
        #[test]
        fn oldest_returns_the_smallest_values(all in prop::collection::vec(any::<u16>(), 0..50), count in 1_usize..60) {
            let mut sorted = all.clone();
            sorted.sort_unstable();
            sorted.truncate(count);
            sorted.reverse();
            prop_assert_eq!(oldest(all, count), sorted);
        }
    }
}

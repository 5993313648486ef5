//! Who is connected, and who has to go when nobody else can come in: of those that have nothing under way, the one that has had nothing for longest. So nobody keeps others
//! out by connections on which they ask for nothing. Requests have no part in this: a connection is looked at when there is no place left.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::connection::Pulse;

/// How many are chosen at once: looking at twenty thousand takes a millisecond or two.
const CHOSEN: usize = 256;

/// The connections. Clones are the same ones.
#[derive(Clone, Debug, Default)]
pub struct Crowd(Arc<Mutex<Inside>>);

#[derive(Debug, Default)]
struct Inside {
    /// Number of the next one.
    next: u64,
    pulses: HashMap<u64, Pulse>,
    /// Who goes next, and since when they had nothing under way when they were chosen. The last goes first.
    chosen: Vec<(Instant, u64)>,
}

impl Crowd {
    /// A connection comes; it has gone when the result is dropped.
    pub fn enter(&self, pulse: Pulse) -> Entered {
        let mut inside = self.inside();
        let number = inside.next;
        inside.next += 1;
        inside.pulses.insert(number, pulse);
        Entered {
            crowd: self.clone(),
            number,
        }
    }

    /// Asks the one that has had nothing under way for longest to go. Says whether there is one.
    pub fn make_way(&self) -> bool {
        let (mut inside, now) = (self.inside(), Instant::now());
        let found = inside.next_chosen(now).or_else(|| {
            inside.choose(now);
            inside.next_chosen(now)
        });
        if let Some(pulse) = &found {
            pulse.ask_to_go();
        }
        found.is_some()
    }

    // A poisoned lock only says that somebody panicked; each change is whole.
    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inside {
    fn choose(&mut self, now: Instant) {
        let pulses = self.pulses.iter();
        let idle = pulses.filter_map(|(number, pulse)| Some((pulse.idle_since(now)?, *number)));
        self.chosen = oldest(idle.collect(), CHOSEN);
    }

    /// The next one that was chosen and has done nothing since.
    fn next_chosen(&mut self, now: Instant) -> Option<Pulse> {
        while let Some((since, number)) = self.chosen.pop() {
            let pulse = self.pulses.get(&number);
            let still = pulse.filter(|pulse| pulse.idle_since(now) == Some(since));
            if still.is_some() {
                return still.cloned();
            }
        }
        None
    }
}

/// The `count` smallest, the smallest last.
fn oldest<T: Ord>(mut all: Vec<T>, count: usize) -> Vec<T> {
    if count < all.len() {
        all.select_nth_unstable(count);
        all.truncate(count);
    }
    all.sort_unstable_by(|a, b| b.cmp(a));
    all
}

/// A connection in the crowd.
#[derive(Debug)]
pub struct Entered {
    crowd: Crowd,
    number: u64,
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.crowd.inside().pulses.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::{thread::sleep, time::Duration};

    use proptest::prelude::*;

    use super::*;
    use crate::connection::{Bound, Patience, QUIET};

    fn come(crowd: &Crowd) -> (Pulse, Entered) {
        let patience = Patience {
            head: Duration::MAX,
            idle: Duration::MAX,
            busy: Duration::MAX,
        };
        let pulse = Pulse::new(patience);
        // Times are told apart by their milliseconds.
        sleep(Duration::from_millis(2));
        (pulse.clone(), crowd.enter(pulse))
    }

    fn going(connections: &[&(Pulse, Entered)]) -> Vec<bool> {
        let pulses = connections.iter().map(|(pulse, _)| pulse);
        pulses
            .map(|pulse| pulse.idle_since(Instant::now()).is_none())
            .collect()
    }

    #[test]
    fn the_one_goes_that_has_had_nothing_under_way_for_longest() {
        let crowd = Crowd::default();
        let (first, second, third) = (come(&crowd), come(&crowd), come(&crowd));
        drop(first.0.request(false, Bound::Busy));
        sleep(QUIET);
        assert!(crowd.make_way());
        assert_eq!(going(&[&first, &second, &third]), [false, true, false]);
        assert!(crowd.make_way());
        assert_eq!(going(&[&first, &second, &third]), [false, true, true]);
    }

    #[test]
    fn who_was_chosen_and_has_asked_since_or_has_gone_is_left_alone() {
        let crowd = Crowd::default();
        let (first, second, third) = (come(&crowd), come(&crowd), come(&crowd));
        let fourth = come(&crowd);
        sleep(QUIET);
        assert!(crowd.make_way(), "this chooses all of them");
        let _request = second.0.request(true, Bound::Own);
        drop(third);
        assert!(crowd.make_way());
        assert_eq!(going(&[&first, &fourth]), [true, true]);
        assert!(!crowd.make_way(), "nobody is left but who has a request");
        drop((first, second, fourth));
        assert!(crowd.inside().pulses.is_empty());
    }

    proptest! {
        #[test]
        fn the_oldest_are_those_that_come_first_in_order(all in prop::collection::vec(any::<u16>(), 0..50), count in 1_usize..60) {
            let mut sorted = all.clone();
            sorted.sort_unstable();
            sorted.truncate(count);
            sorted.reverse();
            prop_assert_eq!(oldest(all, count), sorted);
        }
    }
}

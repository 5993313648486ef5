//! Who saves next, when more sandboxes of a node want to than may at once.
//!
//! What somebody asked for (a suspension, a snapshot) comes before what a sandbox does because it is idle, namespaces take turns,
//! and who has waited for as long as its patience comes before everybody, so that nobody starves. What nobody asked for also waits
//! while somebody outside waits for a sandbox to wake: both need the same processors and the same disk.
//!
//! Wakes are not queued here: the processes that do them need no agent (`torpor_gvisor::turns`). A save that waits for its turn
//! holds nothing: no lock, no paused sandbox that nobody may resume. So no wake ever waits for a save that waits.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::ids::Namespace;
use crate::state::later;

/// Why a save is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Urgency {
    /// Somebody asked for it.
    Asked,
    /// The sandbox is idle, or the node is short of memory.
    ByItself,
}

/// How many at once, and how long one waits before it comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// At least 1.
    pub at_once: usize,
    pub patience: Duration,
    /// A save that lasts longer is counted no more: one that hangs does not keep the others from theirs.
    pub longest: Duration,
}

/// One that wants to save, from [`Queue::join`] to [`Queue::leave`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

#[derive(Debug, Clone)]
struct Waiting {
    ticket: Ticket,
    urgency: Urgency,
    namespace: Namespace,
    since: Timestamp,
}

/// The queue of one node.
#[derive(Debug, Clone)]
pub struct Queue {
    capacity: Capacity,
    /// In the order in which they came.
    waiting: Vec<Waiting>,
    under_way: Vec<(Ticket, Timestamp)>,
    /// When each namespace last had a turn, counted in turns; forgotten when nobody waits.
    served: BTreeMap<Namespace, u64>,
    turns: u64,
    tickets: u64,
}

impl Queue {
    pub fn new(capacity: Capacity) -> Self {
        Self {
            capacity,
            waiting: Vec::new(),
            under_way: Vec::new(),
            served: BTreeMap::new(),
            turns: 0,
            tickets: 0,
        }
    }

    /// Somebody wants to save.
    pub fn join(&mut self, urgency: Urgency, namespace: Namespace, now: Timestamp) -> Ticket {
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        self.waiting.push(Waiting {
            ticket,
            urgency,
            namespace,
            since: now,
        });
        ticket
    }

    /// It has saved, or does not want to any more.
    pub fn leave(&mut self, ticket: Ticket) {
        self.waiting.retain(|waiting| waiting.ticket != ticket);
        self.under_way.retain(|(held, _)| *held != ticket);
        if self.waiting.is_empty() {
            self.served.clear();
        }
    }

    /// Gives the next turn, if there is one to give. `called`: somebody waits for a sandbox of this node to wake.
    pub fn admit(&mut self, called: bool, now: Timestamp) -> Option<Ticket> {
        let counts = |since: &Timestamp| later(*since, self.capacity.longest) > now;
        let counted = self.under_way.iter().filter(|(_, since)| counts(since));
        if counted.count() >= self.capacity.at_once {
            return None;
        }
        let key = |waiting: &Waiting| {
            let overdue = later(waiting.since, self.capacity.patience) <= now;
            let served = self.served.get(&waiting.namespace).copied();
            match overdue {
                true => (0, None, waiting.ticket),
                false if waiting.urgency == Urgency::Asked => (1, served, waiting.ticket),
                false => (2, served, waiting.ticket),
            }
        };
        let next = self.waiting.iter().min_by_key(|waiting| key(waiting))?;
        if called && key(next).0 == 2 {
            return None;
        }
        let (ticket, namespace) = (next.ticket, next.namespace.clone());
        self.waiting.retain(|waiting| waiting.ticket != ticket);
        self.under_way.push((ticket, now));
        self.turns += 1;
        self.served.insert(namespace, self.turns);
        Some(ticket)
    }

    /// Whether it is its turn.
    pub fn is_admitted(&self, ticket: Ticket) -> bool {
        self.under_way.iter().any(|(held, _)| *held == ticket)
    }

    /// Whether anybody waits, so that there may be a turn to give although nobody has left.
    pub fn is_waited_for(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// How many wait, by why.
    pub fn waiting(&self, urgency: Urgency) -> usize {
        let of = |waiting: &&Waiting| waiting.urgency == urgency;
        self.waiting.iter().filter(of).count()
    }

    /// How many have their turn.
    pub fn under_way(&self) -> usize {
        self.under_way.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CAPACITY: Capacity = Capacity {
        at_once: 1,
        patience: Duration::from_secs(30),
        longest: Duration::from_secs(60),
    };

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn namespace(name: &str) -> Namespace {
        Namespace::new(name).unwrap()
    }

    /// Turns given one after the other, each ended before the next.
    fn order(queue: &mut Queue, called: bool, now: i64) -> Vec<Ticket> {
        std::iter::from_fn(|| {
            let ticket = queue.admit(called, at(now))?;
            queue.leave(ticket);
            Some(ticket)
        })
        .collect()
    }

    #[test]
    fn what_somebody_asked_for_comes_before_what_a_timer_wants() {
        let mut queue = Queue::new(CAPACITY);
        let idle = queue.join(Urgency::ByItself, namespace("a"), at(0));
        let asked = queue.join(Urgency::Asked, namespace("a"), at(1));
        assert_eq!(order(&mut queue, false, 2), [asked, idle]);
    }

    #[test]
    fn namespaces_take_turns() {
        let mut queue = Queue::new(CAPACITY);
        let mut join = |name| queue.join(Urgency::ByItself, namespace(name), at(0));
        let (a1, a2, a3, b1, b2) = (join("a"), join("a"), join("a"), join("b"), join("b"));
        assert_eq!(order(&mut queue, false, 1), [a1, b1, a2, b2, a3]);
    }

    #[test]
    fn a_timer_waits_while_somebody_waits_for_a_wake_but_not_for_ever() {
        let mut queue = Queue::new(CAPACITY);
        let idle = queue.join(Urgency::ByItself, namespace("a"), at(0));
        let asked = queue.join(Urgency::Asked, namespace("a"), at(0));
        assert_eq!(order(&mut queue, true, 1), [asked]);
        assert!(queue.is_waited_for());
        assert_eq!(queue.waiting(Urgency::ByItself), 1);
        assert_eq!(order(&mut queue, true, 30), [idle]);
        assert!(!queue.is_waited_for());
    }

    #[test]
    fn who_gives_up_takes_nobodys_turn() {
        let mut queue = Queue::new(CAPACITY);
        let first = queue.join(Urgency::Asked, namespace("a"), at(0));
        let second = queue.join(Urgency::Asked, namespace("a"), at(0));
        queue.leave(first);
        assert_eq!(queue.admit(false, at(0)), Some(second));
        assert!(queue.is_admitted(second) && !queue.is_admitted(first));
        let third = queue.join(Urgency::Asked, namespace("a"), at(0));
        assert_eq!(queue.admit(false, at(0)), None);
        queue.leave(second);
        assert_eq!(queue.admit(false, at(0)), Some(third));
    }

    #[test]
    fn a_save_that_hangs_does_not_keep_the_others_from_theirs() {
        let mut queue = Queue::new(CAPACITY);
        let hangs = queue.join(Urgency::Asked, namespace("a"), at(0));
        let waits = queue.join(Urgency::Asked, namespace("a"), at(0));
        assert_eq!(queue.admit(false, at(0)), Some(hangs));
        assert_eq!(queue.admit(false, at(59)), None);
        assert_eq!(queue.admit(false, at(60)), Some(waits));
        assert!(queue.is_admitted(hangs));
    }

    proptest! {
        /// Whoever comes while others keep coming: never more at once than may, and once its patience is over nobody who came later
        /// goes before it.
        #[test]
        fn nobody_starves(
            at_once in 1..4_usize,
            events in proptest::collection::vec((0..5_u8, 0..3_u8, any::<bool>()), 1..200),
        ) {
            let longest = Duration::from_secs(1 << 30);
            let mut queue = Queue::new(Capacity { at_once, longest, ..CAPACITY });
            let (mut now, mut held, mut since) = (0, Vec::new(), BTreeMap::new());
            for (what, name, flag) in events {
                match what {
                    0 | 1 => {
                        let urgency = if flag { Urgency::Asked } else { Urgency::ByItself };
                        let ticket = queue.join(urgency, namespace(["a", "b", "c"][usize::from(name)]), at(now));
                        since.insert(ticket, now);
                    }
                    2 if !held.is_empty() => queue.leave(held.remove(0)),
                    3 => now += 7,
                    _ => {
                        if let Some(ticket) = queue.admit(flag, at(now)) {
                            let came = since.remove(&ticket).unwrap();
                            let overdue = since.iter().find(|(other, came)| **other < ticket && **came + 30 <= now);
                            prop_assert!(overdue.is_none(), "{ticket:?}, which came at {came}, before {overdue:?}");
                            held.push(ticket);
                        }
                    }
                }
                prop_assert!(queue.under_way() <= at_once);
                prop_assert_eq!(queue.under_way(), held.len());
            }
            // Nobody else comes: all have their turn, whoever waits for a wake.
            now += 60;
            for ticket in held.drain(..) {
                queue.leave(ticket);
            }
            prop_assert_eq!(order(&mut queue, true, now).len(), since.len());
        }
    }
}

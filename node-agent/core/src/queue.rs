//! The order of saves when more sandboxes of a node want to save than may at once.
//!
//! A requested save (a suspension, a snapshot) comes before the save of a sandbox that is idle.
//! Namespaces take turns. A save that has waited for as long as its patience comes first, so that
//! no save starves. A save without a request also waits while a caller waits for a sandbox to wake:
//! a wake and a save need the same processors and the same disk.
//!
//! The bandwidth of the disk may be limited. A save by idleness then waits until the images before
//! it are paid for ([`crate::bandwidth`]). A requested save does not wait for bandwidth. Neither
//! does a save because the node is short: programs that wait for memory would then wait for the
//! disk.
//!
//! Wakes are not queued here: the processes that wake sandboxes need no agent
//! ([`crate::wake_line`]). A save that waits for its turn holds neither a lock nor a paused sandbox
//! that cannot be resumed. No wake therefore waits for a save that waits.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::bandwidth::{Bandwidth, Charge};
use crate::ids::Namespace;
use crate::time::later;

/// The urgency of a save; the most urgent comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Urgency {
    /// The API requests the save.
    Asked,
    /// The sandbox is idle, and the node is short of memory or swap.
    Pressed,
    /// The sandbox is idle.
    ByItself,
}

impl Urgency {
    pub const ALL: [Self; 3] = [Self::Asked, Self::Pressed, Self::ByItself];

    /// Returns whether such a save waits for bandwidth.
    fn is_paced(self) -> bool {
        self == Self::ByItself
    }
}

/// The limits of a node for its saves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Number of saves at once; at least 1.
    pub at_once: usize,
    /// Time after which a waiting save comes first.
    pub patience: Duration,
    /// A save that lasts longer does not count any more: a save that hangs does not take the turns
    /// of others.
    pub longest: Duration,
    /// Bytes a second that images write, on average; `None`: no limit.
    pub bandwidth: Option<NonZeroU64>,
}

/// The request of a sandbox for a turn to save.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    pub urgency: Urgency,
    pub namespace: Namespace,
    /// Bytes of the image, if known.
    pub size: Option<u64>,
}

/// The handle of a save from [`Queue::join`] to [`Queue::leave`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

#[derive(Debug, Clone)]
struct Waiting {
    ticket: Ticket,
    wish: Wish,
    since: Timestamp,
    /// Time since which the save has waited for bandwidth.
    held_back: Option<Timestamp>,
}

#[derive(Debug, Clone)]
struct UnderWay {
    ticket: Ticket,
    since: Timestamp,
    charge: Option<Charge>,
    /// Time from the first wait for bandwidth to the turn.
    held_back: Duration,
}

/// The queue of a node.
#[derive(Debug, Clone)]
pub struct Queue {
    capacity: Capacity,
    /// The waiting saves, in the order in which they came.
    waiting: Vec<Waiting>,
    under_way: Vec<UnderWay>,
    bandwidth: Option<Bandwidth>,
    /// Number of the last turn of each namespace; cleared when no save waits.
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
            bandwidth: capacity.bandwidth.map(Bandwidth::new),
            served: BTreeMap::new(),
            turns: 0,
            tickets: 0,
        }
    }

    /// Adds a save to the queue.
    pub fn join(&mut self, wish: Wish, now: Timestamp) -> Ticket {
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        self.waiting.push(Waiting {
            ticket,
            wish,
            since: now,
            held_back: None,
        });
        ticket
    }

    /// Removes a save that has ended or is not wanted any more. `written`: bytes of its image.
    pub fn leave(&mut self, ticket: Ticket, written: u64) {
        self.waiting.retain(|waiting| waiting.ticket != ticket);
        let is_ended = |held: &mut UnderWay| held.ticket == ticket;
        for ended in self.under_way.extract_if(.., is_ended) {
            if let Some((disk, charge)) = self.bandwidth.as_mut().zip(ended.charge) {
                disk.end(charge, written);
            }
        }
        if self.waiting.is_empty() {
            self.served.clear();
        }
    }

    /// Gives the next turn, if one is free. `wake_awaited`: a caller waits for a sandbox of this
    /// node to wake.
    pub fn admit(&mut self, wake_awaited: bool, now: Timestamp) -> Option<Ticket> {
        let counts = |held: &&UnderWay| later(held.since, self.capacity.longest) > now;
        if self.under_way.iter().filter(counts).count() >= self.capacity.at_once {
            return None;
        }
        let next = self.next(wake_awaited, now)?;
        let Waiting {
            ticket,
            wish,
            held_back,
            ..
        } = self.waiting.remove(next);
        let held_back = held_back.and_then(|since| now.duration_since(since).try_into().ok());
        let paced = wish.urgency.is_paced();
        let disk = self.bandwidth.as_mut();
        self.under_way.push(UnderWay {
            ticket,
            since: now,
            charge: disk.map(|disk| disk.begin(wish.size, paced, now)),
            held_back: held_back.unwrap_or_default(),
        });
        self.turns += 1;
        self.served.insert(wish.namespace, self.turns);
        Some(ticket)
    }

    /// Returns the index of the save that comes next. Saves that are passed over for want of
    /// bandwidth are marked.
    fn next(&mut self, wake_awaited: bool, now: Timestamp) -> Option<usize> {
        let is_free = |disk: &Bandwidth, overdue| disk.free_at(overdue).is_some_and(|at| at <= now);
        let disk = self.bandwidth.as_ref();
        let [free, free_to_overdue] =
            [false, true].map(|overdue| disk.is_none_or(|disk| is_free(disk, overdue)));
        let mut first: Option<(_, usize)> = None;
        for (place, waiting) in self.waiting.iter_mut().enumerate() {
            let overdue = later(waiting.since, self.capacity.patience) <= now;
            let urgency = waiting.wish.urgency;
            if wake_awaited && !overdue && urgency != Urgency::Asked {
                continue;
            }
            let free = if overdue { free_to_overdue } else { free };
            if urgency.is_paced() && !free {
                waiting.held_back.get_or_insert(now);
                continue;
            }
            let served = self.served.get(&waiting.wish.namespace).copied();
            let key = match overdue {
                true => (None, None, waiting.ticket),
                false => (Some(urgency), served, waiting.ticket),
            };
            if first.as_ref().is_none_or(|(least, _)| key < *least) {
                first = Some((key, place));
            }
        }
        first.map(|(_, place)| place)
    }

    /// Returns whether the save has its turn.
    pub fn is_admitted(&self, ticket: Ticket) -> bool {
        self.under_way.iter().any(|held| held.ticket == ticket)
    }

    /// Returns whether the save waits for bandwidth.
    pub fn is_held_back(&self, ticket: Ticket) -> bool {
        let mut waiting = self.waiting.iter();
        waiting.any(|waiting| waiting.ticket == ticket && waiting.held_back.is_some())
    }

    /// Returns the time from the first wait for bandwidth to the turn, of a save that has its turn.
    pub fn was_held_back(&self, ticket: Ticket) -> Duration {
        let mut under_way = self.under_way.iter();
        let held = under_way.find(|held| held.ticket == ticket);
        held.map_or(Duration::ZERO, |held| held.held_back)
    }

    /// Returns the time at which there is bandwidth for the waiting saves again, if known.
    pub fn free_at(&self) -> Option<Timestamp> {
        self.bandwidth.as_ref()?.free_at(false)
    }

    /// Returns whether a save waits. Then a turn may become free although no save has left.
    pub fn is_waited_for(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns the number of waiting saves of an urgency.
    pub fn waiting(&self, urgency: Urgency) -> usize {
        let is_such = |waiting: &&Waiting| waiting.wish.urgency == urgency;
        self.waiting.iter().filter(is_such).count()
    }

    /// Returns the number of saves that have their turn.
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
        bandwidth: None,
    };

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn namespace(name: &str) -> Namespace {
        Namespace::new(name).unwrap()
    }

    fn wish(urgency: Urgency, name: &str) -> Wish {
        Wish {
            urgency,
            namespace: namespace(name),
            size: None,
        }
    }

    /// Gives turns one after the other, each ended before the next.
    fn order(queue: &mut Queue, wake_awaited: bool, now: i64) -> Vec<Ticket> {
        std::iter::from_fn(|| {
            let ticket = queue.admit(wake_awaited, at(now))?;
            queue.leave(ticket, 0);
            Some(ticket)
        })
        .collect()
    }

    #[test]
    fn a_requested_save_comes_before_a_timers_save() {
        let mut queue = Queue::new(CAPACITY);
        let idle = queue.join(wish(Urgency::ByItself, "a"), at(0));
        let asked = queue.join(wish(Urgency::Asked, "a"), at(1));
        assert_eq!(order(&mut queue, false, 2), [asked, idle]);
    }

    #[test]
    fn namespaces_take_turns() {
        let mut queue = Queue::new(CAPACITY);
        let mut join = |name| queue.join(wish(Urgency::ByItself, name), at(0));
        let (a1, a2, a3, b1, b2) = (join("a"), join("a"), join("a"), join("b"), join("b"));
        assert_eq!(order(&mut queue, false, 1), [a1, b1, a2, b2, a3]);
    }

    #[test]
    fn a_timers_save_waits_for_a_pending_wake_but_not_for_ever() {
        let mut queue = Queue::new(CAPACITY);
        let idle = queue.join(wish(Urgency::ByItself, "a"), at(0));
        let asked = queue.join(wish(Urgency::Asked, "a"), at(0));
        assert_eq!(order(&mut queue, true, 1), [asked]);
        assert!(queue.is_waited_for());
        assert_eq!(queue.waiting(Urgency::ByItself), 1);
        assert_eq!(order(&mut queue, true, 30), [idle]);
        assert!(!queue.is_waited_for());
    }

    #[test]
    fn a_save_that_leaves_the_queue_takes_no_turn_from_another() {
        let mut queue = Queue::new(CAPACITY);
        let first = queue.join(wish(Urgency::Asked, "a"), at(0));
        let second = queue.join(wish(Urgency::Asked, "a"), at(0));
        queue.leave(first, 0);
        assert_eq!(queue.admit(false, at(0)), Some(second));
        assert!(queue.is_admitted(second) && !queue.is_admitted(first));
        let third = queue.join(wish(Urgency::Asked, "a"), at(0));
        assert_eq!(queue.admit(false, at(0)), None);
        queue.leave(second, 0);
        assert_eq!(queue.admit(false, at(0)), Some(third));
    }

    #[test]
    fn a_save_that_hangs_does_not_keep_other_saves_from_their_turn() {
        let mut queue = Queue::new(CAPACITY);
        let hangs = queue.join(wish(Urgency::Asked, "a"), at(0));
        let waits = queue.join(wish(Urgency::Asked, "a"), at(0));
        assert_eq!(queue.admit(false, at(0)), Some(hangs));
        assert_eq!(queue.admit(false, at(59)), None);
        assert_eq!(queue.admit(false, at(60)), Some(waits));
        assert!(queue.is_admitted(hangs));
    }

    fn bandwidth(rate: u64, urgency: Urgency, size: Option<u64>) -> (Queue, Wish) {
        let queue = Queue::new(Capacity {
            at_once: 2,
            bandwidth: NonZeroU64::new(rate),
            ..CAPACITY
        });
        let wish = Wish {
            size,
            ..wish(urgency, "a")
        };
        (queue, wish)
    }

    #[test]
    fn a_timer_waits_until_the_image_before_it_is_paid_for() {
        let (mut queue, image) = bandwidth(10, Urgency::ByItself, Some(50));
        let [first, second] = [(); 2].map(|()| queue.join(image.clone(), at(0)));
        assert_eq!(queue.admit(false, at(0)), Some(first));
        assert_eq!(queue.admit(false, at(0)), None);
        assert!(queue.is_held_back(second) && !queue.is_held_back(first));
        assert_eq!(queue.free_at(), Some(at(5)));
        queue.leave(first, 30);
        assert_eq!(queue.free_at(), Some(at(3)));
        assert_eq!(queue.admit(false, at(2)), None);
        assert_eq!(queue.admit(false, at(3)), Some(second));
        assert_eq!(queue.was_held_back(second), Duration::from_secs(3));
        assert!(!queue.is_held_back(second));
    }

    #[test]
    fn an_image_that_takes_longer_than_anything_else_has_its_turn_and_is_paid_for() {
        let (mut queue, image) = bandwidth(10, Urgency::ByItself, Some(1_000_000));
        let large = queue.join(image.clone(), at(0));
        assert_eq!(queue.admit(false, at(0)), Some(large));
        queue.leave(large, 1_000_000);
        let next = queue.join(image, at(1));
        assert_eq!(queue.admit(false, at(99_999)), None);
        assert_eq!(queue.admit(false, at(100_000)), Some(next));
    }

    #[test]
    fn while_the_size_of_an_image_is_unknown_only_unpaced_saves_begin() {
        let (mut queue, image) = bandwidth(10, Urgency::ByItself, None);
        let unknown = queue.join(image.clone(), at(0));
        assert_eq!(queue.admit(false, at(0)), Some(unknown));
        let waits = queue.join(image.clone(), at(0));
        assert_eq!(queue.admit(false, at(50)), None);
        assert!(queue.is_held_back(waits));
        for urgency in [Urgency::Asked, Urgency::Pressed] {
            let wish = Wish {
                urgency,
                ..image.clone()
            };
            let ticket = queue.join(wish, at(50));
            assert_eq!(queue.admit(false, at(50)), Some(ticket), "{urgency:?}");
            queue.leave(ticket, 0);
        }
        queue.leave(unknown, 20);
        assert_eq!(queue.admit(false, at(50)), Some(waits));
    }

    #[test]
    fn a_save_under_pressure_comes_after_a_requested_and_before_a_timers_save() {
        let mut queue = Queue::new(CAPACITY);
        let mut join = |urgency| queue.join(wish(urgency, "a"), at(0));
        let (idle, pressed, asked) = (
            join(Urgency::ByItself),
            join(Urgency::Pressed),
            join(Urgency::Asked),
        );
        assert_eq!(order(&mut queue, false, 1), [asked, pressed, idle]);
    }

    proptest! {
        /// While other saves keep coming, no more saves than allowed have their turn at once. No
        /// later save goes before a save that has waited for as long as its patience.
        #[test]
        fn no_save_starves_in_the_queue(
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
                        let ticket = queue.join(wish(urgency, ["a", "b", "c"][usize::from(name)]), at(now));
                        since.insert(ticket, now);
                    }
                    2 if !held.is_empty() => queue.leave(held.remove(0), 0),
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
            // No other save comes: all waiting saves have their turn, although a wake is awaited.
            now += 60;
            for ticket in held.drain(..) {
                queue.leave(ticket, 0);
            }
            prop_assert_eq!(order(&mut queue, true, now).len(), since.len());
        }

        /// In any time, the paced saves that begin write at most what the rate of ten bytes a
        /// second allows, plus one image. A paced save that is not overdue begins when all images
        /// before it are paid for, requested or not.
        #[test]
        fn paced_saves_keep_to_the_rate(
            at_once in 1..4_usize,
            events in proptest::collection::vec((0..6_u8, 0..3_usize, 0..300_u64, 0..3_u8), 1..200),
        ) {
            let bandwidth = NonZeroU64::new(10);
            let longest = Duration::from_secs(1 << 30);
            let mut queue = Queue::new(Capacity { at_once, longest, bandwidth, ..CAPACITY });
            let (mut now, mut images, mut held) = (0, BTreeMap::new(), Vec::new());
            let mut begun: Vec<(i64, Urgency, u64)> = Vec::new();
            for (what, urgency, bytes, guess) in events {
                match what {
                    0 | 1 => {
                        let urgency = Urgency::ALL[urgency];
                        // The size is not known, right, or larger than the image will be.
                        let size = guess.checked_sub(1).map(|over| bytes + 100 * u64::from(over));
                        let wish = Wish { size, ..wish(urgency, "a") };
                        images.insert(queue.join(wish, at(now)), (urgency, bytes, now));
                    }
                    2 if !held.is_empty() => {
                        let ticket = held.remove(0);
                        queue.leave(ticket, images[&ticket].1);
                    }
                    3 => now += 7,
                    _ => {
                        let Some(ticket) = queue.admit(false, at(now)) else { continue };
                        held.push(ticket);
                        let (urgency, bytes, came) = images[&ticket];
                        if urgency == Urgency::ByItself {
                            for (n, (began, _, _)) in begun.iter().enumerate() {
                                let allowed = u64::try_from(10 * (now - began)).unwrap();
                                let sum = |alike: bool| begun[n..].iter().filter(|(_, other, _)| !alike || *other == urgency).map(|(_, _, bytes)| bytes).sum::<u64>();
                                prop_assert!(sum(true) <= allowed, "at {now}: {begun:?}");
                                prop_assert!(sum(false) <= allowed || came + 30 <= now, "at {now}: {begun:?}");
                            }
                        }
                        begun.push((now, urgency, bytes));
                    }
                }
            }
        }

        /// While requested saves without end need more than the disk can write, the paced saves
        /// have a tenth of its bandwidth, in their order.
        #[test]
        fn a_save_that_waits_for_bandwidth_has_its_turn(sizes in proptest::collection::vec(0..200_u64, 1..8)) {
            let mut queue = Queue::new(Capacity { bandwidth: NonZeroU64::new(10), ..CAPACITY });
            let waiting: Vec<_> = sizes.iter().map(|bytes| {
                let wish = Wish { size: Some(*bytes), ..wish(Urgency::ByItself, "a") };
                (queue.join(wish, at(0)), *bytes)
            }).collect();
            let (mut done, mut latest) = (0, 30);
            for now in 0.. {
                let wish = Wish { size: Some(1000), ..wish(Urgency::Asked, "b") };
                let asked = queue.join(wish, at(now));
                while let Some(ticket) = queue.admit(false, at(now)) {
                    let mut written = 1000;
                    if ticket != asked {
                        prop_assert_eq!(Some(ticket), waiting.get(done).map(|(ticket, _)| *ticket));
                        prop_assert!(now <= latest, "at {now}, not until {latest}");
                        written = waiting[done].1;
                        latest += i64::try_from(written).unwrap() + 1;
                        done += 1;
                    }
                    queue.leave(ticket, written);
                }
                prop_assert!(queue.waiting(Urgency::Asked) == 0, "somebody who asked waits");
                prop_assert!(now <= latest);
                if done == waiting.len() {
                    break;
                }
            }
        }
    }
}

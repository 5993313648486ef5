//! Queue of the objects that wait for a pass. An object waits at most once and has at most one pass
//! at a time. Namespaces take turns, so that a namespace with thousands of new sandboxes does not
//! delay the others.
//!
//! The queue has three lanes. Objects that a client waits for come first, then objects made in
//! advance, then updates that follow from a claim. The last two lanes have a limit of concurrent
//! passes: their passes wait for permits to write, and would otherwise keep the workers from
//! claims.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::{
    sync::Notify,
    time::{Duration, Instant},
};

use crate::cache::Key;

/// Longest time for which an object whose pass failed is held back, so that a fix takes effect
/// soon.
const LONGEST_HOLD_BACK: Duration = Duration::from_secs(1);

/// Priority of a pass. Lanes are in the order in which they are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    Awaited,
    InAdvance,
    /// The Sandbox was handed to a claim, and only the labels of its Pod are outdated.
    Following,
}

impl Lane {
    const ALL: [Self; 3] = [Self::Awaited, Self::InAdvance, Self::Following];

    /// Returns the limit of concurrent passes.
    fn limit(self) -> usize {
        match self {
            Self::Awaited => usize::MAX,
            Self::InAdvance => 16,
            Self::Following => 4,
        }
    }
}

/// Objects that wait, that wait for a time, and that have a pass in progress.
///
/// The number of objects bounds the queue's size, because each object is in it once.
#[derive(Debug, Default)]
pub struct Queue {
    content: Mutex<Content>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Content {
    /// Waiting objects of each lane.
    lanes: [Waiting; Lane::ALL.len()],
    waiting: HashMap<Key, Lane>,
    working: HashMap<Key, Lane>,
    /// Number of passes in progress, by lane.
    in_progress: [usize; Lane::ALL.len()],
    /// Objects that were added while their pass was in progress.
    again: HashMap<Key, Lane>,
    timed: BTreeSet<(Instant, Key)>,
    due: HashMap<Key, Instant>,
    /// Time until which an object whose pass failed is held back.
    held_back: HashMap<Key, Instant>,
}

/// Waiting objects of one lane.
#[derive(Debug, Default)]
struct Waiting {
    /// Namespaces with waiting objects, in the order of their turns.
    turns: VecDeque<String>,
    names: HashMap<String, VecDeque<String>>,
}

impl Queue {
    /// Asks for a pass that a client waits for.
    pub fn add(&self, key: Key) {
        self.add_in(Lane::Awaited, key);
    }

    /// Asks for a pass in a lane.
    pub fn add_in(&self, lane: Lane, key: Key) {
        let mut content = self.lock();
        content.clear_time(&key);
        content.push(lane, key);
        drop(content);
        self.changed.notify_one();
    }

    /// Asks for a pass after `delay`. The earlier of two times counts.
    pub fn add_after(&self, key: Key, delay: Duration) {
        let at = Instant::now() + delay;
        if self.lock().set_time(at, key) {
            self.changed.notify_one();
        }
    }

    /// Holds back an object whose pass has failed, for `delay` or [`LONGEST_HOLD_BACK`] at most.
    ///
    /// A failed pass writes its failure into the status, possibly in other words each time. That
    /// event would start the next pass at once.
    pub fn hold_back(&self, key: &Key, delay: Duration) {
        let until = Instant::now() + delay.min(LONGEST_HOLD_BACK);
        self.lock().held_back.insert(key.clone(), until);
    }

    /// Returns the next object. Its pass is in progress until [`Queue::done`].
    pub async fn next(&self) -> Key {
        loop {
            let wake_at = {
                let mut content = self.lock();
                content.move_due(Instant::now());
                if let Some(key) = content.pop() {
                    let more = content.has_more();
                    drop(content);
                    if more {
                        // One notification may cover several objects.
                        self.changed.notify_one();
                    }
                    return key;
                }
                content.timed.first().map(|(at, _)| *at)
            };
            let changed = self.changed.notified();
            match wake_at {
                Some(at) => drop(tokio::time::timeout_at(at, changed).await),
                None => changed.await,
            }
        }
    }

    /// Ends the pass of an object.
    pub fn done(&self, key: &Key) {
        let mut content = self.lock();
        if let Some(lane) = content.working.remove(key) {
            content.in_progress[lane as usize] -= 1;
        }
        if let Some(lane) = content.again.remove(key) {
            content.push(lane, key.clone());
        }
        let more = content.has_more();
        drop(content);
        if more {
            self.changed.notify_one();
        }
    }

    /// Reports whether an object waits or has a pass in progress.
    pub fn is_busy(&self) -> bool {
        let content = self.lock();
        !content.waiting.is_empty() || !content.working.is_empty()
    }

    /// Reports whether an object waits for a worker, or its time has come.
    ///
    /// An object whose pass is in progress does not count, even if it was added again.
    pub fn has_waiting(&self) -> bool {
        let mut content = self.lock();
        content.move_due(Instant::now());
        !content.waiting.is_empty()
    }

    /// Returns the number of objects that wait for a worker.
    pub fn depth(&self) -> usize {
        self.lock().waiting.len()
    }

    // A panic elsewhere leaves the sets as they were.
    fn lock(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Content {
    fn push(&mut self, lane: Lane, key: Key) {
        if self.working.contains_key(&key) {
            let again = self.again.entry(key).or_insert(lane);
            *again = lane.min(*again);
            return;
        }
        if let Some(until) = self
            .held_back
            .remove(&key)
            .filter(|at| *at > Instant::now())
        {
            self.held_back.insert(key.clone(), until);
            self.set_time(until, key);
            return;
        }
        if let Some(before) = self.waiting.get(&key).copied() {
            // The new lane is more urgent: the object moves there.
            if lane >= before {
                return;
            }
            self.lanes[before as usize].remove(&key);
        }
        self.waiting.insert(key.clone(), lane);
        self.lanes[lane as usize].push(key);
    }

    /// Returns the first lane that has a waiting object and is below its limit.
    fn lane(&self) -> Option<Lane> {
        Lane::ALL.into_iter().find(|lane| {
            let number = *lane as usize;
            !self.lanes[number].turns.is_empty() && self.in_progress[number] < lane.limit()
        })
    }

    fn has_more(&self) -> bool {
        self.lane().is_some()
    }

    fn pop(&mut self) -> Option<Key> {
        let lane = self.lane()?;
        let key = self.lanes[lane as usize].pop()?;
        self.in_progress[lane as usize] += 1;
        self.waiting.remove(&key);
        self.working.insert(key.clone(), lane);
        Some(key)
    }

    /// Moves the objects whose time has come into the lane of awaited ones.
    fn move_due(&mut self, now: Instant) {
        while let Some((at, key)) = self.timed.first().cloned() {
            if at > now {
                return;
            }
            self.clear_time(&key);
            self.push(Lane::Awaited, key);
        }
    }

    /// Sets the time of an object, unless an earlier one is set. Reports whether it did.
    fn set_time(&mut self, at: Instant, key: Key) -> bool {
        if self.waiting.contains_key(&key) || self.due.get(&key).is_some_and(|due| *due <= at) {
            return false;
        }
        self.clear_time(&key);
        self.timed.insert((at, key.clone()));
        self.due.insert(key, at);
        true
    }

    fn clear_time(&mut self, key: &Key) {
        if let Some(at) = self.due.remove(key) {
            self.timed.remove(&(at, key.clone()));
        }
    }
}

impl Waiting {
    fn push(&mut self, (namespace, name): Key) {
        let names = self.names.entry(namespace.clone()).or_default();
        if names.is_empty() {
            self.turns.push_back(namespace);
        }
        names.push_back(name);
    }

    fn pop(&mut self) -> Option<Key> {
        let namespace = self.turns.pop_front()?;
        let names = self.names.get_mut(&namespace)?;
        let name = names.pop_front()?;
        if names.is_empty() {
            self.names.remove(&namespace);
        } else {
            self.turns.push_back(namespace.clone());
        }
        Some((namespace, name))
    }

    fn remove(&mut self, (namespace, name): &Key) {
        let Some(names) = self.names.get_mut(namespace) else {
            return;
        };
        names.retain(|waiting| waiting != name);
        if names.is_empty() {
            self.names.remove(namespace);
            self.turns.retain(|turn| turn != namespace);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rstest::rstest;

    use super::*;

    fn key(namespace: &str, name: &str) -> Key {
        (namespace.to_owned(), name.to_owned())
    }

    async fn names(queue: &Queue, count: usize) -> Vec<String> {
        let mut names = Vec::new();
        for _ in 0..count {
            let (namespace, name) = queue.next().await;
            names.push(format!("{namespace}/{name}"));
        }
        names
    }

    #[tokio::test]
    async fn namespaces_take_turns() {
        let queue = Queue::default();
        for name in ["1", "2", "3"] {
            queue.add(key("big", name));
        }
        queue.add(key("small", "1"));
        assert_eq!(
            names(&queue, 4).await,
            ["big/1", "small/1", "big/2", "big/3"]
        );
    }

    #[tokio::test]
    async fn a_name_waits_once_and_one_pass_is_under_way() {
        let queue = Queue::default();
        queue.add(key("ns", "a"));
        queue.add(key("ns", "a"));
        assert_eq!(names(&queue, 1).await, ["ns/a"]);
        assert_eq!(queue.depth(), 0);
        queue.add(key("ns", "a"));
        assert_eq!(queue.depth(), 0, "not while it is being worked on");
        queue.done(&key("ns", "a"));
        assert_eq!(names(&queue, 1).await, ["ns/a"]);
    }

    #[tokio::test]
    async fn the_earlier_of_two_times_counts() {
        let queue = Queue::default();
        let hour = Duration::from_secs(3600);
        queue.add_after(key("ns", "a"), hour);
        queue.add_after(key("ns", "a"), Duration::from_millis(5));
        queue.add_after(key("ns", "a"), hour * 2);
        assert_eq!(names(&queue, 1).await, ["ns/a"]);
        queue.done(&key("ns", "a"));
        let content = queue.lock();
        assert!(content.timed.is_empty() && content.due.is_empty());
    }

    #[tokio::test]
    async fn adding_an_object_now_cancels_its_time() {
        let queue = Queue::default();
        queue.add_after(key("ns", "a"), Duration::from_secs(3600));
        queue.add(key("ns", "a"));
        assert_eq!(names(&queue, 1).await, ["ns/a"]);
        assert!(queue.lock().timed.is_empty());
    }

    #[tokio::test]
    async fn an_object_whose_pass_failed_is_held_back_for_a_limited_time() {
        let queue = Queue::default();
        let (failed, other) = (key("ns", "failed"), key("ns", "other"));
        let (first, later) = (Duration::from_millis(50), Duration::from_secs(60));
        for (delay, expected) in [(first, first), (later, LONGEST_HOLD_BACK)] {
            queue.add(failed.clone());
            assert_eq!(queue.next().await, failed);
            let begin = Instant::now();
            // The events of its writes come before the pass ends, and after.
            queue.add(failed.clone());
            queue.hold_back(&failed, delay);
            queue.add_after(failed.clone(), delay);
            queue.done(&failed);
            queue.add(failed.clone());
            queue.add(other.clone());
            assert_eq!(queue.next().await, other);
            assert_eq!(queue.next().await, failed);
            let waited = begin.elapsed();
            assert!(waited >= expected && waited < later, "{waited:?}");
            queue.done(&failed);
            queue.done(&other);
            // After a pass without failure the object is not held back.
            queue.add(failed.clone());
            assert_eq!(queue.lock().pop(), Some(failed.clone()));
            queue.done(&failed);
            let content = queue.lock();
            assert!(content.held_back.is_empty() && content.timed.is_empty());
        }
    }

    #[tokio::test]
    async fn awaited_objects_come_before_those_made_in_advance() {
        let queue = Queue::default();
        for name in ["1", "2", "3"] {
            queue.add_in(Lane::InAdvance, key("a", name));
        }
        queue.add(key("b", "1"));
        queue.add(key("a", "3"));
        assert_eq!(names(&queue, 4).await, ["b/1", "a/3", "a/1", "a/2"]);
        assert_eq!(queue.depth(), 0);
    }

    #[tokio::test]
    async fn two_busy_pools_of_different_namespaces_take_turns() {
        let (a, b) = (key("a", "pool"), key("b", "pool"));
        let queue = Queue::default();
        queue.add(a.clone());
        assert_eq!(queue.next().await, a);
        queue.add(a.clone());
        assert!(
            !queue.has_waiting(),
            "an object with a pass in progress does not count"
        );
        // The time of `b` comes while the only worker is busy and asks for no object.
        queue.add_after(b.clone(), Duration::ZERO);
        let mut order = Vec::new();
        let mut at_work = a;
        for _ in 0..4 {
            assert!(queue.has_waiting());
            // A pass ends and asks for the next one at once.
            queue.add_after(at_work.clone(), Duration::ZERO);
            queue.done(&at_work);
            at_work = queue.next().await;
            order.push(at_work.0.clone());
        }
        assert_eq!(order, ["b", "a", "b", "a"]);
    }

    #[rstest]
    #[tokio::test]
    async fn lanes_that_no_client_waits_for_have_a_limit_of_passes(
        #[values(Lane::InAdvance, Lane::Following)] lane: Lane,
    ) {
        let queue = Queue::default();
        for name in 0..=lane.limit() {
            queue.add_in(lane, key("ns", &name.to_string()));
        }
        names(&queue, lane.limit()).await;
        let last = key("ns", &lane.limit().to_string());
        assert!(queue.lock().pop().is_none(), "there is no room");
        queue.add(key("ns", "awaited"));
        assert_eq!(names(&queue, 1).await, ["ns/awaited"]);
        queue.done(&key("ns", "0"));
        assert_eq!(queue.next().await, last);
    }

    #[tokio::test]
    async fn following_updates_come_last_and_leave_workers_to_other_lanes() {
        let queue = Queue::default();
        for name in 0..10 {
            queue.add_in(Lane::Following, key("a", &name.to_string()));
        }
        names(&queue, Lane::Following.limit()).await;
        queue.add_in(Lane::InAdvance, key("b", "1"));
        queue.add(key("a", "9"));
        assert_eq!(names(&queue, 2).await, ["a/9", "b/1"]);
    }

    #[tokio::test]
    async fn every_worker_that_waits_gets_a_name() {
        let queue = Arc::new(Queue::default());
        let workers: Vec<_> = (0..4)
            .map(|_| {
                let queue = Arc::clone(&queue);
                tokio::spawn(async move { queue.next().await })
            })
            .collect();
        for name in 0..4 {
            queue.add(key("ns", &name.to_string()));
        }
        for worker in workers {
            worker.await.unwrap();
        }
        assert_eq!(queue.depth(), 0);
    }
}

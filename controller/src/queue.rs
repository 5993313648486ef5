//! Names of objects that wait for a pass. A name waits at most once, one pass at a time is under way per object, and namespaces take turns, so that one that asks for
//! thousands of sandboxes at once does not make the others wait.
//!
//! There are three lanes. What somebody waits for is taken before what is made in advance, and that before what only follows from a claim. Of the latter two only so many passes are under way at
//! once: they wait for their turns to write, and would keep the workers from those who claim.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::{
    sync::Notify,
    time::{Duration, Instant},
};

use crate::cache::Key;

/// Who failed is left in peace for no longer than this: what somebody does about it counts soon.
const LONGEST_PEACE: Duration = Duration::from_secs(1);

/// Whether somebody waits for an object. What comes first is taken first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    Awaited,
    InAdvance,
    /// It was handed to a claim, and only its Pod is still to be told.
    Following,
}

impl Lane {
    const ALL: [Self; 3] = [Self::Awaited, Self::InAdvance, Self::Following];

    /// How many passes are under way at once.
    fn limit(self) -> usize {
        match self {
            Self::Awaited => usize::MAX,
            Self::InAdvance => 16,
            Self::Following => 4,
        }
    }
}

/// Names that wait, that wait for a time, and that are being worked on. Bounded by the number of objects, because each is in it once.
#[derive(Debug, Default)]
pub struct Queue {
    content: Mutex<Content>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Content {
    /// What waits in each lane.
    lanes: [Waiting; Lane::ALL.len()],
    known: HashMap<Key, Lane>,
    working: HashMap<Key, Lane>,
    /// How many of each lane are being worked on.
    under_way: [usize; Lane::ALL.len()],
    /// Asked for again while it was being worked on.
    again: HashMap<Key, Lane>,
    timed: BTreeSet<(Instant, Key)>,
    due: HashMap<Key, Instant>,
    /// Until when those whose pass has failed are left in peace.
    in_peace: HashMap<Key, Instant>,
}

/// Names of one lane.
#[derive(Debug, Default)]
struct Waiting {
    /// Namespaces with something to do, in the order of their turns.
    turns: VecDeque<String>,
    names: HashMap<String, VecDeque<String>>,
}

impl Queue {
    /// Asks for a pass that somebody waits for.
    pub fn add(&self, key: Key) {
        self.add_in(Lane::Awaited, key);
    }

    /// Asks for a pass.
    pub fn add_in(&self, lane: Lane, key: Key) {
        let mut content = self.lock();
        content.forget_time(&key);
        content.push(lane, key);
        drop(content);
        self.changed.notify_one();
    }

    /// Asks for a pass after a while. Of two times the earlier one counts.
    pub fn add_after(&self, key: Key, delay: Duration) {
        let at = Instant::now() + delay;
        if self.lock().set_time(at, key) {
            self.changed.notify_one();
        }
    }

    /// The pass that is under way has failed, and the next try is after a while: whatever asks for one before waits for as long, or a second at most. What a pass writes of its failure asks for
    /// one, too, and may be put in other words each time.
    pub fn leave_in_peace(&self, key: &Key, delay: Duration) {
        let until = Instant::now() + delay.min(LONGEST_PEACE);
        self.lock().in_peace.insert(key.clone(), until);
    }

    /// The next name; it is being worked on until [`Queue::done`].
    pub async fn next(&self) -> Key {
        loop {
            let wake_at = {
                let mut content = self.lock();
                content.ripen(Instant::now());
                if let Some(key) = content.pop() {
                    let more = content.has_more();
                    drop(content);
                    if more {
                        // One notification may stand for several names.
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

    /// The pass has ended.
    pub fn done(&self, key: &Key) {
        let mut content = self.lock();
        if let Some(lane) = content.working.remove(key) {
            content.under_way[lane as usize] -= 1;
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

    /// Whether anything waits or is being worked on.
    pub fn is_busy(&self) -> bool {
        let content = self.lock();
        !content.known.is_empty() || !content.working.is_empty()
    }

    /// Whether a name waits for a worker, or has waited long enough. One that is being worked on does not, though it was asked for again.
    pub fn is_waited_for(&self) -> bool {
        let mut content = self.lock();
        content.ripen(Instant::now());
        !content.known.is_empty()
    }

    /// How many names wait for a worker.
    pub fn depth(&self) -> usize {
        self.lock().known.len()
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
        if let Some(until) = self.in_peace.remove(&key).filter(|at| *at > Instant::now()) {
            self.in_peace.insert(key.clone(), until);
            self.set_time(until, key);
            return;
        }
        if let Some(before) = self.known.get(&key).copied() {
            // Waited for by now: it goes over to the other lane.
            if lane >= before {
                return;
            }
            self.lanes[before as usize].remove(&key);
        }
        self.known.insert(key.clone(), lane);
        self.lanes[lane as usize].push(key);
    }

    /// The first lane that has something, and room for one more.
    fn lane(&self) -> Option<Lane> {
        Lane::ALL.into_iter().find(|lane| {
            let number = *lane as usize;
            !self.lanes[number].turns.is_empty() && self.under_way[number] < lane.limit()
        })
    }

    fn has_more(&self) -> bool {
        self.lane().is_some()
    }

    fn pop(&mut self) -> Option<Key> {
        let lane = self.lane()?;
        let key = self.lanes[lane as usize].pop()?;
        self.under_way[lane as usize] += 1;
        self.known.remove(&key);
        self.working.insert(key.clone(), lane);
        Some(key)
    }

    /// Moves what has waited long enough.
    fn ripen(&mut self, now: Instant) {
        while let Some((at, key)) = self.timed.first().cloned() {
            if at > now {
                return;
            }
            self.forget_time(&key);
            self.push(Lane::Awaited, key);
        }
    }

    /// Of two times the earlier one counts. Whether it is this one.
    fn set_time(&mut self, at: Instant, key: Key) -> bool {
        if self.known.contains_key(&key) || self.due.get(&key).is_some_and(|due| *due <= at) {
            return false;
        }
        self.forget_time(&key);
        self.timed.insert((at, key.clone()));
        self.due.insert(key, at);
        true
    }

    fn forget_time(&mut self, key: &Key) {
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
    async fn a_name_that_is_asked_for_now_does_not_come_again_at_its_time() {
        let queue = Queue::default();
        queue.add_after(key("ns", "a"), Duration::from_secs(3600));
        queue.add(key("ns", "a"));
        assert_eq!(names(&queue, 1).await, ["ns/a"]);
        assert!(queue.lock().timed.is_empty());
    }

    #[tokio::test]
    async fn who_failed_is_left_in_peace_whoever_asks_but_not_for_long() {
        let queue = Queue::default();
        let (failed, other) = (key("ns", "failed"), key("ns", "other"));
        let (first, later) = (Duration::from_millis(50), Duration::from_secs(60));
        for (delay, peace) in [(first, first), (later, LONGEST_PEACE)] {
            queue.add(failed.clone());
            assert_eq!(queue.next().await, failed);
            let begin = Instant::now();
            // What it writes is seen before it ends, and after.
            queue.add(failed.clone());
            queue.leave_in_peace(&failed, delay);
            queue.add_after(failed.clone(), delay);
            queue.done(&failed);
            queue.add(failed.clone());
            queue.add(other.clone());
            assert_eq!(queue.next().await, other);
            assert_eq!(queue.next().await, failed);
            let waited = begin.elapsed();
            assert!(waited >= peace && waited < later, "{waited:?}");
            queue.done(&failed);
            queue.done(&other);
            // It came through, and is looked at whenever somebody asks.
            queue.add(failed.clone());
            assert_eq!(queue.lock().pop(), Some(failed.clone()));
            queue.done(&failed);
            let content = queue.lock();
            assert!(content.in_peace.is_empty() && content.timed.is_empty());
        }
    }

    #[tokio::test]
    async fn what_somebody_waits_for_comes_before_what_is_made_in_advance() {
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
            !queue.is_waited_for(),
            "what it is asked for again waits for itself"
        );
        // Its time comes while the only worker is busy: nobody asks for the next name.
        queue.add_after(b.clone(), Duration::ZERO);
        let mut order = Vec::new();
        let mut at_work = a;
        for _ in 0..4 {
            assert!(queue.is_waited_for());
            // It gives way: a pass ends, and asks for the next one at once.
            queue.add_after(at_work.clone(), Duration::ZERO);
            queue.done(&at_work);
            at_work = queue.next().await;
            order.push(at_work.0.clone());
        }
        assert_eq!(order, ["b", "a", "b", "a"]);
    }

    #[rstest]
    #[tokio::test]
    async fn only_so_many_passes_that_nobody_waits_for_are_under_way(
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
    async fn what_follows_comes_last_and_keeps_nobody_from_a_worker() {
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

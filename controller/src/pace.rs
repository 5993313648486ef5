//! Gives writes that a client waits for precedence over writes in advance.
//!
//! An apiserver does a limited number of writes a second, and each write in progress delays the
//! others. Writes in advance (members of pools, Events, updates of a claim that is Ready) therefore
//! yield to the writes that a client waits for. While a client waits, one write in advance begins
//! now and then. In a pause between claims a few are in progress. After a longer time without a
//! waiting client many are.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

/// Interval at which one write in advance begins while a client waits, so that none waits forever.
///
/// A quarter of it applies to the labels of a claimed Pod and to a pool that is running low, an
/// eighth to a pool that is nearly empty. All kinds share one clock, since their writes would add
/// up otherwise. A kind without a write for this long takes the turn of a more urgent kind.
const INTERVAL: Duration = Duration::from_millis(200);
/// Time without a waiting client after which a pause begins. In a series of claims the next one
/// comes sooner.
const PAUSE: Duration = Duration::from_millis(30);
/// Limit of concurrent writes in advance in a pause. The next claim finds the apiserver with this
/// load.
const PAUSE_LIMIT: usize = 2;
/// Limit of concurrent writes in advance after [`CALM`] without a waiting client.
const CALM_LIMIT: usize = 32;
/// Time without a waiting client after which writes in advance have the apiserver to themselves.
const CALM: Duration = Duration::from_secs(1);

/// Urgency of a write in advance, by its purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Advance {
    /// Write for a pool with enough members, or an update without a deadline.
    #[default]
    Calm,
    /// Write of a claimed Pod's labels: no client waits, but NetworkPolicies select by these
    /// labels.
    Soon,
    /// Write for a pool that is running low.
    Low,
    /// Write for a pool that is nearly empty: claims will soon wait for its new members.
    Short,
}

/// Number of variants of [`Advance`].
const KINDS: usize = 4;

impl Advance {
    /// Returns the limit of concurrent writes in advance in a pause.
    fn pause_limit(self) -> usize {
        match self {
            Advance::Calm | Advance::Soon => PAUSE_LIMIT,
            Advance::Low => 3 * PAUSE_LIMIT,
            Advance::Short => 6 * PAUSE_LIMIT,
        }
    }

    /// Returns the time without a waiting client after which a pause begins.
    ///
    /// It is zero for pools that lack members: the next claim would wait for a member.
    fn pause(self) -> Duration {
        match self {
            Advance::Calm | Advance::Soon => PAUSE,
            Advance::Low | Advance::Short => Duration::ZERO,
        }
    }

    /// Returns the interval at which one more write begins while a client waits.
    fn interval(self) -> Duration {
        match self {
            Advance::Calm => INTERVAL,
            Advance::Soon | Advance::Low => INTERVAL / 4,
            Advance::Short => INTERVAL / 8,
        }
    }
}

/// Pacing of writes, shared by all writers.
#[derive(Debug, Default)]
pub struct Pace {
    state: Mutex<State>,
    /// By [`Advance`]: the holder of the lock is the first waiting writer. The others sleep.
    first: [tokio::sync::Mutex<()>; KINDS],
    /// Wakes the first waiting writers when there may be room.
    changed: Notify,
    /// Number of times that a writer checked for room.
    #[cfg(test)]
    looks: std::sync::atomic::AtomicUsize,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// Number of passes in progress that a client waits for.
    awaited: usize,
    /// Time at which the last of those passes ended.
    last: Option<Instant>,
    /// Number of writes in advance in progress.
    in_advance: usize,
    /// Time at which the last write in advance began, by [`Advance`].
    begun: [Option<Instant>; KINDS],
}

impl State {
    /// Counts one more write in advance.
    fn begin(&mut self, advance: Advance, now: Instant) {
        self.in_advance += 1;
        self.begun[advance as usize] = Some(now);
    }

    /// Returns when one more write begins while a client waits; `None` means at once.
    fn next(&self, advance: Advance) -> Option<Instant> {
        let last = self.begun.iter().flatten().max()?;
        // Before the next turn of the most urgent kind, which would be first each time.
        let earliest = *last + Advance::Short.interval() / 2;
        let own = self.begun[advance as usize].map_or(earliest, |own| earliest.max(own + INTERVAL));
        Some(own.min(*last + advance.interval()))
    }

    /// Returns the limit of concurrent writes in advance, and when it may rise by itself.
    fn limit(&self, advance: Advance, now: Instant) -> (usize, Option<Instant>) {
        let pause = match (self.awaited, self.last) {
            (0, None) => return (CALM_LIMIT, None),
            (0, Some(last)) if last + CALM <= now => return (CALM_LIMIT, None),
            (0, Some(last)) if last + advance.pause() <= now => {
                return (advance.pause_limit(), Some(last + CALM));
            }
            (0, Some(last)) => Some(last + advance.pause()),
            _ => None,
        };
        match self.next(advance) {
            Some(next) if next > now => (0, Some(pause.map_or(next, |pause| pause.min(next)))),
            _ => (self.in_advance + 1, None),
        }
    }
}

/// Guard of a pass that a client waits for.
#[derive(Debug)]
pub struct Awaited(Arc<Pace>);

impl Drop for Awaited {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.awaited -= 1;
        state.last = Some(Instant::now());
        let calmer = state.awaited == 0;
        drop(state);
        // While another client waits, writes begin by the clock.
        if calmer {
            self.0.changed.notify_waiters();
        }
    }
}

/// Permit for one write in advance.
#[derive(Debug)]
pub struct Permit(Arc<Pace>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.lock().in_advance -= 1;
        self.0.changed.notify_waiters();
    }
}

impl Pace {
    /// Counts a pass that a client waits for, until the guard is dropped.
    pub fn awaited(self: &Arc<Self>) -> Awaited {
        self.lock().awaited += 1;
        Awaited(Arc::clone(self))
    }

    /// Waits for the permit of a write in advance.
    ///
    /// Writers of the same urgency get their permits in the order in which they came.
    pub async fn permit(self: &Arc<Self>, advance: Advance) -> Permit {
        let _first = self.first[advance as usize].lock().await;
        loop {
            #[cfg(test)]
            self.looks
                .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            // From here on no change is missed. The limits differ, so each first waiter is woken.
            let changed = self.changed.notified();
            let more_at = {
                let mut state = self.lock();
                let now = Instant::now();
                let (limit, more_at) = state.limit(advance, now);
                if state.in_advance < limit {
                    state.begin(advance, now);
                    return Permit(Arc::clone(self));
                }
                more_at
            };
            match more_at {
                Some(at) => drop(tokio::time::timeout_at(at, changed).await),
                None => changed.await,
            }
        }
    }

    // A panic elsewhere leaves the counts as they were.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn free(pace: &Arc<Pace>) -> Vec<Permit> {
        std::iter::from_fn(|| pace.permit(Advance::Calm).now_or_never()).collect()
    }

    #[tokio::test]
    async fn writes_in_advance_yield_to_waiting_clients() {
        let pace = Arc::new(Pace::default());
        assert_eq!(free(&pace).len(), CALM_LIMIT);
        let awaited = pace.awaited();
        assert!(free(&pace).is_empty());
        assert!(pace.permit(Advance::Short).now_or_never().is_none());
        drop(awaited);
        assert!(free(&pace).is_empty(), "the next claim is expected");
        assert!(pace.permit(Advance::Low).now_or_never().is_some());
        let first = tokio::time::timeout(PAUSE * 20, pace.permit(Advance::Calm));
        let _first = first.await.unwrap();
        assert_eq!(free(&pace).len(), PAUSE_LIMIT - 1);
    }

    #[tokio::test]
    async fn a_write_in_advance_begins_after_its_interval_while_a_client_waits() {
        let pace = Arc::new(Pace::default());
        drop(free(&pace));
        let _awaited = pace.awaited();
        assert!(pace.permit(Advance::Calm).now_or_never().is_none());
        for advance in [Advance::Calm, Advance::Short] {
            let _permit = tokio::time::timeout(INTERVAL * 20, pace.permit(advance))
                .await
                .unwrap();
        }
    }

    #[test]
    fn writes_in_advance_have_the_apiserver_to_themselves_after_a_time_without_waiting_clients() {
        let now = Instant::now();
        let state = State {
            last: Some(now),
            ..State::default()
        };
        let limit = |at| state.limit(Advance::Calm, at);
        assert_eq!(limit(now), (1, None), "nothing was begun lately");
        assert_eq!(limit(now + PAUSE), (PAUSE_LIMIT, Some(now + CALM)));
        assert_eq!(limit(now + CALM), (CALM_LIMIT, None));
        let busy = State {
            begun: [Some(now); KINDS],
            ..state
        };
        assert_eq!(busy.limit(Advance::Calm, now), (0, Some(now + PAUSE)));
        assert_eq!(
            busy.limit(Advance::Low, now).0,
            Advance::Low.pause_limit(),
            "the next claim waits for a member"
        );
        let waits = State { awaited: 1, ..busy };
        assert_eq!(
            waits.limit(Advance::Short, now),
            (0, Some(now + INTERVAL / 8))
        );
        assert_eq!(waits.limit(Advance::Short, now + INTERVAL / 8), (1, None));
    }

    /// Returns the writes that begin within `time` while a client waits and every kind has more
    /// writes.
    fn begun_within(time: Duration) -> Vec<(Advance, Duration)> {
        const STEP: Duration = Duration::from_millis(1);
        let all = [Advance::Short, Advance::Low, Advance::Soon, Advance::Calm];
        let begin = Instant::now();
        let mut state = State {
            awaited: 1,
            ..State::default()
        };
        let mut begun = Vec::new();
        let mut passed = Duration::ZERO;
        while passed < time {
            for advance in all {
                let now = begin + passed;
                let (limit, _) = state.limit(advance, now);
                if state.in_advance < limit {
                    state.begin(advance, now);
                    begun.push((advance, passed));
                }
            }
            passed += STEP;
        }
        begun
    }

    #[test]
    fn urgent_writes_do_not_starve_others_and_all_share_one_clock() {
        let begun = begun_within(2 * CALM);
        for advance in [Advance::Short, Advance::Low, Advance::Soon, Advance::Calm] {
            let times: Vec<Duration> = begun
                .iter()
                .filter(|(kind, _)| *kind == advance)
                .map(|(_, at)| *at)
                .collect();
            assert!(times[0] <= INTERVAL, "{advance:?}: {times:?}");
            for pair in times.windows(2) {
                // Other kinds that have waited as long take a turn each.
                let most = INTERVAL + 2 * Advance::Short.interval();
                assert!(pair[1] - pair[0] <= most, "{advance:?}: {times:?}");
            }
        }
        let alone = (2 * CALM).div_duration_f64(Advance::Short.interval());
        let others = (2 * CALM).div_duration_f64(INTERVAL);
        assert!(
            begun.len() as f64 <= alone + 3.0 * others,
            "{}",
            begun.len()
        );
    }

    #[tokio::test]
    async fn a_permit_that_is_dropped_goes_to_the_next_writer() {
        let pace = Arc::new(Pace::default());
        let _awaited = pace.awaited();
        let first = pace.permit(Advance::Calm).await;
        let waiting: Vec<_> = (0..3)
            .map(|_| {
                let pace = Arc::clone(&pace);
                tokio::spawn(async move { drop(pace.permit(Advance::Calm).await) })
            })
            .collect();
        tokio::task::yield_now().await;
        assert!(pace.permit(Advance::Calm).now_or_never().is_none());
        drop(first);
        for task in waiting {
            task.await.unwrap();
        }
    }

    #[tokio::test]
    async fn only_the_first_of_many_waiting_writers_checks_for_room() {
        const MANY: usize = 500;
        let pace = Arc::new(Pace::default());
        let awaited = pace.awaited();
        drop(pace.permit(Advance::Calm).await);
        let order = Arc::new(Mutex::new(Vec::new()));
        let waiting: Vec<_> = (0..MANY)
            .map(|number| {
                let (pace, order) = (Arc::clone(&pace), Arc::clone(&order));
                tokio::spawn(async move {
                    let _permit = pace.permit(Advance::Calm).await;
                    order.lock().unwrap().push(number);
                    tokio::task::yield_now().await;
                })
            })
            .collect();
        tokio::task::yield_now().await;
        // Other clients come and go while one waits.
        for _ in 0..MANY {
            drop(pace.awaited());
            tokio::task::yield_now().await;
        }
        let looks = || pace.looks.load(std::sync::atomic::Ordering::Relaxed);
        assert!(
            looks() < MANY / 10,
            "writes begin by the clock: {}",
            looks()
        );
        // A cancelled writer blocks no other.
        waiting[0].abort();
        drop(awaited);
        for (number, task) in waiting.into_iter().enumerate() {
            assert_eq!(task.await.is_err(), number == 0);
        }
        let in_order: Vec<usize> = (1..MANY).collect();
        assert_eq!(*order.lock().unwrap(), in_order);
        // Each writer checks when it is the first, and again after a change.
        assert!(looks() <= 4 * MANY, "{}", looks());
    }

    #[tokio::test]
    async fn a_waiting_writer_gets_its_permit_after_the_calm_time() {
        let pace = Arc::new(Pace::default());
        drop(pace.awaited());
        let _held = (
            pace.permit(Advance::Calm).await,
            pace.permit(Advance::Calm).await,
        );
        let next = tokio::time::timeout(CALM * 3, pace.permit(Advance::Calm)).await;
        next.unwrap();
    }
}

//! Whose turn it is to write. An apiserver does only so many writes a second, whoever sends them, and each that is under way makes the others slower. So what nobody waits for (members of
//! pools, Events, what is noted about a claim that is Ready) gives way to what somebody waits for: one such write is begun now and then, a few are under way between claims that follow one
//! another, and many when nobody has waited for a while.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

/// While somebody waits, one write in advance is begun this often, so that none waits for ever; four times as often for the labels of a claimed Pod and for a pool that is running low, eight times for one that is nearly empty.
/// One clock goes for all of them, or what is begun in advance would add up; a kind of which none was begun for this long takes the turn of a more urgent one.
const PATIENCE: Duration = Duration::from_millis(200);
/// How long nobody must have waited before it counts as a pause: where claims come one after the other, the next is expected sooner.
const PAUSE: Duration = Duration::from_millis(30);
/// Writes in advance that are under way at once in a pause: whoever comes next finds the apiserver this busy.
const BETWEEN: usize = 2;
/// The same when nobody has waited for [`CALM`].
const ALONE: usize = 32;
/// How long nobody must have waited before writes in advance have the apiserver to themselves.
const CALM: Duration = Duration::from_secs(1);

/// What a write in advance is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Advance {
    /// A pool that has enough, or something that is only noted.
    #[default]
    Calm,
    /// A Pod that is to be told whose it is: nobody waits, but labels decide who may talk to it.
    Soon,
    /// A pool that is running low.
    Low,
    /// A pool that is nearly empty: whoever comes next but a few waits for its new members.
    Short,
}

/// How many kinds of [`Advance`] there are.
const KINDS: usize = 4;

impl Advance {
    /// How many writes in advance may be under way in a pause.
    fn room(self) -> usize {
        match self {
            Advance::Calm | Advance::Soon => BETWEEN,
            Advance::Low => 3 * BETWEEN,
            Advance::Short => 6 * BETWEEN,
        }
    }

    /// How long nobody must have waited for a pause. Whoever comes next waits for what a pool lacks.
    fn pause(self) -> Duration {
        match self {
            Advance::Calm | Advance::Soon => PAUSE,
            Advance::Low | Advance::Short => Duration::ZERO,
        }
    }

    /// How long the last that was begun is ago before one more is begun though somebody waits.
    fn patience(self) -> Duration {
        match self {
            Advance::Calm => PATIENCE,
            Advance::Soon | Advance::Low => PATIENCE / 4,
            Advance::Short => PATIENCE / 8,
        }
    }
}

/// Shared by all that write.
#[derive(Debug, Default)]
pub struct Pace {
    state: Mutex<State>,
    /// By [`Advance`]: whoever has it is the first of those that wait. The others sleep until it is their turn to look.
    first: [tokio::sync::Mutex<()>; KINDS],
    /// Tells the first ones, and nobody else, that there may be room.
    changed: Notify,
    /// How often somebody has looked whether it is their turn.
    #[cfg(test)]
    looks: std::sync::atomic::AtomicUsize,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// Passes under way that somebody waits for.
    awaited: usize,
    /// When the last of them ended.
    last: Option<Instant>,
    /// Writes in advance that are under way.
    in_advance: usize,
    /// When the last of those was begun, by [`Advance`].
    begun: [Option<Instant>; KINDS],
}

impl State {
    /// One more write in advance is under way.
    fn begin(&mut self, advance: Advance, now: Instant) {
        self.in_advance += 1;
        self.begun[advance as usize] = Some(now);
    }

    /// When one more is begun though somebody waits; at once if none was begun yet.
    fn next(&self, advance: Advance) -> Option<Instant> {
        let last = self.begun.iter().flatten().max()?;
        // Sooner than the most urgent, which would be there first each time.
        let turn = *last + Advance::Short.patience() / 2;
        let own = self.begun[advance as usize].map_or(turn, |own| turn.max(own + PATIENCE));
        Some(own.min(*last + advance.patience()))
    }

    /// How many writes in advance may be under way, and when it may be more though nothing happens.
    fn limit(&self, advance: Advance, now: Instant) -> (usize, Option<Instant>) {
        let pause = match (self.awaited, self.last) {
            (0, None) => return (ALONE, None),
            (0, Some(last)) if last + CALM <= now => return (ALONE, None),
            (0, Some(last)) if last + advance.pause() <= now => {
                return (advance.room(), Some(last + CALM));
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

/// Somebody waits as long as this is there.
#[derive(Debug)]
pub struct Awaited(Arc<Pace>);

impl Drop for Awaited {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.awaited -= 1;
        state.last = Some(Instant::now());
        let calmer = state.awaited == 0;
        drop(state);
        // While somebody else waits, all goes by the clock.
        if calmer {
            self.0.changed.notify_waiters();
        }
    }
}

/// Leave for one write in advance.
#[derive(Debug)]
pub struct Turn(Arc<Pace>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.lock().in_advance -= 1;
        self.0.changed.notify_waiters();
    }
}

impl Pace {
    /// Says that somebody waits.
    pub fn awaited(self: &Arc<Self>) -> Awaited {
        self.lock().awaited += 1;
        Awaited(Arc::clone(self))
    }

    /// Waits for the turn of a write in advance. Those of one kind have their turns in the order in which they came.
    pub async fn turn(self: &Arc<Self>, advance: Advance) -> Turn {
        let _first = self.first[advance as usize].lock().await;
        loop {
            #[cfg(test)]
            self.looks
                .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            // From here on no change is missed. Who has room differs, so that the first of each kind is told.
            let changed = self.changed.notified();
            let more_at = {
                let mut state = self.lock();
                let now = Instant::now();
                let (limit, more_at) = state.limit(advance, now);
                if state.in_advance < limit {
                    state.begin(advance, now);
                    return Turn(Arc::clone(self));
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

    fn free(pace: &Arc<Pace>) -> Vec<Turn> {
        std::iter::from_fn(|| pace.turn(Advance::Calm).now_or_never()).collect()
    }

    #[tokio::test]
    async fn what_nobody_waits_for_gives_way() {
        let pace = Arc::new(Pace::default());
        assert_eq!(free(&pace).len(), ALONE);
        let awaited = pace.awaited();
        assert!(free(&pace).is_empty());
        assert!(pace.turn(Advance::Short).now_or_never().is_none());
        drop(awaited);
        assert!(free(&pace).is_empty(), "the next is expected");
        assert!(pace.turn(Advance::Low).now_or_never().is_some());
        let first = tokio::time::timeout(PAUSE * 20, pace.turn(Advance::Calm));
        let _first = first.await.unwrap();
        assert_eq!(free(&pace).len(), BETWEEN - 1);
    }

    #[tokio::test]
    async fn one_that_waits_long_goes_ahead_though_somebody_waits() {
        let pace = Arc::new(Pace::default());
        drop(free(&pace));
        let _awaited = pace.awaited();
        assert!(pace.turn(Advance::Calm).now_or_never().is_none());
        for advance in [Advance::Calm, Advance::Short] {
            let _turn = tokio::time::timeout(PATIENCE * 20, pace.turn(advance))
                .await
                .unwrap();
        }
    }

    #[test]
    fn it_has_the_apiserver_to_itself_once_nobody_has_waited_for_a_while() {
        let now = Instant::now();
        let state = State {
            last: Some(now),
            ..State::default()
        };
        let limit = |at| state.limit(Advance::Calm, at);
        assert_eq!(limit(now), (1, None), "nothing was begun lately");
        assert_eq!(limit(now + PAUSE), (BETWEEN, Some(now + CALM)));
        assert_eq!(limit(now + CALM), (ALONE, None));
        let busy = State {
            begun: [Some(now); KINDS],
            ..state
        };
        assert_eq!(busy.limit(Advance::Calm, now), (0, Some(now + PAUSE)));
        assert_eq!(
            busy.limit(Advance::Low, now).0,
            Advance::Low.room(),
            "whoever comes next waits for it"
        );
        let waits = State { awaited: 1, ..busy };
        assert_eq!(
            waits.limit(Advance::Short, now),
            (0, Some(now + PATIENCE / 8))
        );
        assert_eq!(waits.limit(Advance::Short, now + PATIENCE / 8), (1, None));
    }

    /// The writes that are begun within `time` while somebody waits all the time and everybody has more to write.
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
    fn what_is_urgent_keeps_nothing_else_waiting_for_long_and_all_share_one_clock() {
        let begun = begun_within(2 * CALM);
        for advance in [Advance::Short, Advance::Low, Advance::Soon, Advance::Calm] {
            let times: Vec<Duration> = begun
                .iter()
                .filter(|(kind, _)| *kind == advance)
                .map(|(_, at)| *at)
                .collect();
            assert!(times[0] <= PATIENCE, "{advance:?}: {times:?}");
            for pair in times.windows(2) {
                // Others that have waited as long take a turn each.
                let most = PATIENCE + 2 * Advance::Short.patience();
                assert!(pair[1] - pair[0] <= most, "{advance:?}: {times:?}");
            }
        }
        let alone = (2 * CALM).div_duration_f64(Advance::Short.patience());
        let others = (2 * CALM).div_duration_f64(PATIENCE);
        assert!(
            begun.len() as f64 <= alone + 3.0 * others,
            "{}",
            begun.len()
        );
    }

    #[tokio::test]
    async fn a_turn_that_ends_is_the_next_ones() {
        let pace = Arc::new(Pace::default());
        let _awaited = pace.awaited();
        let first = pace.turn(Advance::Calm).await;
        let waiting: Vec<_> = (0..3)
            .map(|_| {
                let pace = Arc::clone(&pace);
                tokio::spawn(async move { drop(pace.turn(Advance::Calm).await) })
            })
            .collect();
        tokio::task::yield_now().await;
        assert!(pace.turn(Advance::Calm).now_or_never().is_none());
        drop(first);
        for task in waiting {
            task.await.unwrap();
        }
    }

    #[tokio::test]
    async fn of_many_that_wait_only_those_look_that_may_go_on() {
        const MANY: usize = 500;
        let pace = Arc::new(Pace::default());
        let awaited = pace.awaited();
        drop(pace.turn(Advance::Calm).await);
        let order = Arc::new(Mutex::new(Vec::new()));
        let waiting: Vec<_> = (0..MANY)
            .map(|number| {
                let (pace, order) = (Arc::clone(&pace), Arc::clone(&order));
                tokio::spawn(async move {
                    let _turn = pace.turn(Advance::Calm).await;
                    order.lock().unwrap().push(number);
                    tokio::task::yield_now().await;
                })
            })
            .collect();
        tokio::task::yield_now().await;
        // Others come and go while somebody waits.
        for _ in 0..MANY {
            drop(pace.awaited());
            tokio::task::yield_now().await;
        }
        let looks = || pace.looks.load(std::sync::atomic::Ordering::Relaxed);
        assert!(looks() < MANY / 10, "all goes by the clock: {}", looks());
        // One that gives up keeps nobody waiting.
        waiting[0].abort();
        drop(awaited);
        for (number, task) in waiting.into_iter().enumerate() {
            assert_eq!(task.await.is_err(), number == 0);
        }
        let in_order: Vec<usize> = (1..MANY).collect();
        assert_eq!(*order.lock().unwrap(), in_order);
        // Each looks when it is the first, and again when something has changed.
        assert!(looks() <= 4 * MANY, "{}", looks());
    }

    #[tokio::test]
    async fn whoever_waits_for_a_turn_gets_it_when_it_is_calm_again() {
        let pace = Arc::new(Pace::default());
        drop(pace.awaited());
        let _held = (
            pace.turn(Advance::Calm).await,
            pace.turn(Advance::Calm).await,
        );
        let next = tokio::time::timeout(CALM * 3, pace.turn(Advance::Calm)).await;
        next.unwrap();
    }
}

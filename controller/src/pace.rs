//! Whose turn it is to write. An apiserver does only so many writes a second, whoever sends them, and each that is under way makes the others slower. So what nobody waits for (members of
//! pools, Events, what is noted about a claim that is Ready) gives way to what somebody waits for: one such write is begun now and then, a few are under way between claims that follow one
//! another, and many when nobody has waited for a while.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

/// While somebody waits, one write that is only noted, or is for a pool that has enough, is begun this often, so that none waits for ever.
const PATIENCE: Duration = Duration::from_millis(50);
/// Writes in advance that are under way at once while somebody has waited a moment ago: whoever comes next finds the apiserver this busy.
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
    /// A pool that is running low.
    Low,
    /// A pool that is nearly empty: whoever comes next but a few waits for its new members.
    Short,
}

impl Advance {
    /// How many writes in advance may be under way while somebody waits (but for one every [`PATIENCE`]), and while somebody has waited a moment ago.
    fn room(self) -> (usize, usize) {
        match self {
            Advance::Calm => (0, BETWEEN),
            Advance::Low => (1, 3 * BETWEEN),
            Advance::Short => (2, 6 * BETWEEN),
        }
    }
}

/// Shared by all that write.
#[derive(Debug, Default)]
pub struct Pace {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// Passes under way that somebody waits for.
    awaited: usize,
    /// When the last of them ended.
    last: Option<Instant>,
    /// Writes in advance that are under way.
    in_advance: usize,
    /// When the last of those was begun that are not for a pool that is running low.
    begun: Option<Instant>,
}

impl State {
    /// How many writes in advance may be under way, and when it may be more though nothing happens.
    fn limit(&self, advance: Advance, now: Instant) -> (usize, Option<Instant>) {
        let (beside, between) = advance.room();
        if self.awaited > 0 {
            let next = self.begun.map(|begun| begun + PATIENCE);
            return match (advance, next) {
                (Advance::Calm, Some(next)) if next > now => (beside, Some(next)),
                (Advance::Calm, _) => (self.in_advance + 1, None),
                (Advance::Low | Advance::Short, _) => (beside, None),
            };
        }
        match self.last.map(|last| last + CALM) {
            Some(calm) if calm > now => (between, Some(calm)),
            _ => (ALONE, None),
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
        drop(state);
        self.0.changed.notify_waiters();
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

    /// Waits for the turn of a write in advance.
    pub async fn turn(self: &Arc<Self>, advance: Advance) -> Turn {
        loop {
            // From here on no change is missed. Who has room differs, so that each is told of each.
            let changed = self.changed.notified();
            let more_at = {
                let mut state = self.lock();
                let now = Instant::now();
                let (limit, more_at) = state.limit(advance, now);
                if state.in_advance < limit {
                    state.in_advance += 1;
                    if advance == Advance::Calm {
                        state.begun = Some(now);
                    }
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
        let low = pace.turn(Advance::Low).now_or_never();
        assert!(low.is_some(), "a pool that runs low has room all the same");
        drop((low, awaited));
        let held = free(&pace);
        assert_eq!(held.len(), BETWEEN);
        assert!(pace.turn(Advance::Low).now_or_never().is_some());
    }

    #[tokio::test]
    async fn one_that_waits_long_goes_ahead_though_somebody_waits() {
        let pace = Arc::new(Pace::default());
        drop(free(&pace));
        let _awaited = pace.awaited();
        assert!(pace.turn(Advance::Calm).now_or_never().is_none());
        let _turn = tokio::time::timeout(PATIENCE * 20, pace.turn(Advance::Calm))
            .await
            .unwrap();
    }

    #[test]
    fn it_has_the_apiserver_to_itself_once_nobody_has_waited_for_a_while() {
        let now = Instant::now();
        let state = State {
            last: Some(now),
            ..State::default()
        };
        let limit = |at| state.limit(Advance::Calm, at);
        assert_eq!(limit(now), (BETWEEN, Some(now + CALM)));
        assert_eq!(limit(now + CALM), (ALONE, None));
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
    async fn whoever_waits_for_a_turn_gets_it_when_it_is_calm_again() {
        let pace = Arc::new(Pace::default());
        drop(pace.awaited());
        let held = free(&pace);
        assert_eq!(held.len(), BETWEEN);
        let next = tokio::time::timeout(CALM * 3, pace.turn(Advance::Calm)).await;
        next.unwrap();
    }
}

//! Downloads of this node that run or have failed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::Fetches;
use super::plan::{Place, Plan};

/// Pause after a failure, and the longest one. It doubles in between.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// An image whose fetch has failed.
#[derive(Debug, Clone, Copy)]
struct Failed {
    times: u32,
    since: Instant,
    /// No attempt is made before.
    until: Instant,
}

/// Downloads of this node that run or have failed.
#[derive(Default)]
pub(super) struct Work {
    running: HashMap<Place, CancellationToken>,
    failed: BTreeMap<Place, Failed>,
    pub(super) tasks: JoinSet<(Place, bool)>,
}

impl Work {
    /// Returns the next time at which a fetch that failed is due.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let all = self.failed.values().map(|one| one.until);
        all.filter(|until| *until > now).min()
    }

    /// Begins, ends and removes what the plan says.
    pub(super) async fn begin(
        &mut self,
        fetches: &Arc<Fetches>,
        plan: Plan,
        stop: &CancellationToken,
    ) {
        let is_wanted = |place: &Place| plan.fetch.iter().any(|want| want.place == *place);
        let running = self.running.iter();
        running
            .filter(|(place, _)| !is_wanted(place))
            .for_each(|(_, stop)| stop.cancel());
        self.failed.retain(|place, _| is_wanted(place));
        let removed = plan.remove.into_iter();
        let removed = removed.filter(|place| !self.running.contains_key(place));
        fetches.remove(removed.collect()).await;
        let now = Instant::now();
        for want in plan.fetch {
            let before = self.failed.get(&want.place).copied();
            let waits = before.is_some_and(|one| one.until > now);
            let is_full = self.running.len() >= fetches.at_once;
            if waits || is_full || self.running.contains_key(&want.place) {
                continue;
            }
            let cancelled = stop.child_token();
            self.running.insert(want.place.clone(), cancelled.clone());
            let fetches = fetches.clone();
            let since = before.map_or(now, |one| one.since);
            self.tasks.spawn(async move {
                let done = fetches.one(&want, since, &cancelled).await;
                (want.place, done)
            });
        }
    }

    pub(super) fn ended(&mut self, place: &Place, done: bool) {
        self.running.remove(place);
        match done {
            true => drop(self.failed.remove(place)),
            false => {
                let again = again(self.failed.get(place), Instant::now());
                self.failed.insert(place.clone(), again);
            }
        }
    }
}

fn again(before: Option<&Failed>, now: Instant) -> Failed {
    let times = before.map_or(0, |failed| failed.times) + 1;
    let pause = FIRST_PAUSE.saturating_mul(1 << (times - 1).min(10));
    Failed {
        times,
        since: before.map_or(now, |failed| failed.since),
        until: now + pause.min(LONGEST_PAUSE),
    }
}

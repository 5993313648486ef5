//! Downloads of this node that run or have failed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::Fetches;
use super::plan::{Place, Plan};
use crate::repository::retries::Retries;

/// Pause after a failure, and the longest one. It doubles in between.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Downloads of this node that run or have failed.
pub(super) struct Work {
    running: HashMap<Place, CancellationToken>,
    failed: Retries<Place>,
    pub(super) tasks: JoinSet<(Place, bool)>,
}

impl Work {
    pub(super) fn new() -> Self {
        Self {
            running: HashMap::new(),
            failed: Retries::new(FIRST_PAUSE, LONGEST_PAUSE),
            tasks: JoinSet::new(),
        }
    }

    /// Returns the next time at which a fetch that failed is due.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        self.failed.due(now)
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
        self.failed.retain(is_wanted);
        let removed = plan.remove.into_iter();
        let removed = removed.filter(|place| !self.running.contains_key(place));
        fetches.remove(removed.collect()).await;
        let now = Instant::now();
        for want in plan.fetch {
            let waits = self.failed.waits(&want.place, now);
            let is_full = self.running.len() >= fetches.at_once;
            if waits || is_full || self.running.contains_key(&want.place) {
                continue;
            }
            let cancelled = stop.child_token();
            self.running.insert(want.place.clone(), cancelled.clone());
            let fetches = fetches.clone();
            let since = self.failed.since(&want.place).unwrap_or(now);
            self.tasks.spawn(async move {
                let done = fetches.one(&want, since, &cancelled).await;
                (want.place, done)
            });
        }
    }

    pub(super) fn ended(&mut self, place: &Place, done: bool) {
        self.running.remove(place);
        match done {
            true => self.failed.succeeded(place),
            false => {
                self.failed.failed(place.clone(), Instant::now());
            }
        }
    }
}

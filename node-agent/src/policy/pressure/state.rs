//! The state of the node's pressure, shared by the reader of the figures and the tasks of the Pods.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::Notify;
use torpor_core::ids::PodUid;
use torpor_core::pressure::{Candidate, Limits, Readings, Resource, Watch};
use torpor_core::state::Desired;

use crate::args::PressureArgs;
use crate::report::metrics::Metrics;

/// Time that the figures need to follow after a sandbox has gone to sleep.
const SETTLE: Duration = Duration::from_secs(2);
/// Time within which a chosen sandbox has to sleep. The save of a large sandbox takes seconds, on a
/// disk that other programs use too.
const ANSWER: Duration = Duration::from_secs(30);

/// The limits, the candidates and the sandbox that is chosen to sleep.
#[derive(Debug)]
pub(crate) struct NodePressure {
    limits: Limits,
    /// Sandboxes without any annotation about sleep may be chosen too.
    on_all: bool,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    watch: Watch,
    candidates: HashMap<PodUid, Candidate>,
}

impl NodePressure {
    pub(crate) fn new(args: &PressureArgs) -> Self {
        Self {
            limits: Limits {
                available: args.memory_pressure_available.percent(),
                stalled: args.memory_pressure_stalled.percent(),
                swap_free: args.swap_pressure_free.percent(),
                idle: args.pressure_idle,
                settle: SETTLE,
                answer: ANSWER,
            },
            on_all: args.pressure_on_all,
            state: Mutex::default(),
            changed: Notify::new(),
        }
    }

    /// Returns whether sandboxes without any annotation about sleep may be put to sleep too.
    pub(crate) fn is_on_all(&self) -> bool {
        self.on_all
    }

    /// Returns `desired` with an earlier sleep if this sandbox is chosen.
    pub(crate) fn shorten(&self, desired: Desired) -> Desired {
        match self.lock().watch.asked() {
            Some(ask) if ask.pod == desired.pod_uid => ask.shorten(desired, self.limits.idle),
            _ => desired,
        }
    }

    /// Records from a Pod's task whether its sandbox could be chosen to sleep.
    pub(crate) fn note(&self, pod: &PodUid, candidate: Option<Candidate>) {
        let candidates = &mut self.lock().candidates;
        match candidate {
            Some(candidate) => drop(candidates.insert(pod.clone(), candidate)),
            None => drop(candidates.remove(pod)),
        }
    }

    /// Returns the resources that the node is short of, each with a text.
    pub(crate) fn short(&self) -> Vec<(Resource, String)> {
        let state = self.lock();
        let short = state.watch.short().iter();
        short.map(|(of, words)| (*of, words.clone())).collect()
    }

    /// Waits until the resources that the node is short of change.
    pub(crate) async fn news(&self) {
        self.changed.notified().await;
    }

    /// Applies new figures and chooses anew which sandbox has to sleep. Returns the Pods for which
    /// that changed.
    pub(super) fn update(
        &self,
        readings: &Readings,
        now: Timestamp,
        metrics: &Metrics,
    ) -> Vec<PodUid> {
        let state = &mut *self.lock();
        let candidates: Vec<Candidate> = state.candidates.values().cloned().collect();
        let before = state.watch.asked().cloned();
        let short_of = |watch: &Watch| watch.short().keys().copied().collect::<Vec<_>>();
        let was_short_of = short_of(&state.watch);
        state.watch.read(readings, &self.limits);
        if short_of(&state.watch) != was_short_of {
            self.changed.notify_one();
        }
        state.watch.choose(&candidates, &self.limits, now);
        let after = state.watch.asked().cloned();
        metrics.pressure(state.watch.short());
        if before == after {
            return Vec::new();
        }
        if let Some(ask) = &after {
            metrics.asked_to_sleep(ask.short_of);
            tracing::info!(pod = %ask.pod, short_of = %ask.short_of, doze = ask.doze, "the node is short of a resource: asking a sandbox to sleep");
        }
        before.into_iter().chain(after).map(|ask| ask.pod).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    impl NodePressure {
        /// Returns a state that never chooses a sandbox.
        pub(crate) fn off() -> Self {
            Self {
                limits: Limits {
                    available: None,
                    stalled: None,
                    swap_free: None,
                    idle: Duration::from_secs(30),
                    settle: SETTLE,
                    answer: ANSWER,
                },
                on_all: false,
                state: Mutex::default(),
                changed: Notify::new(),
            }
        }
    }

    #[test]
    fn a_change_of_the_resources_that_a_node_is_short_of_is_news() {
        let mut pressure = NodePressure::off();
        pressure.limits.available = Some(10);
        let metrics = Metrics::new();
        let is_news = |memory_available| {
            let readings = Readings {
                memory_total: 100,
                memory_available,
                ..Readings::default()
            };
            pressure.update(&readings, Timestamp::UNIX_EPOCH, &metrics);
            pressure.news().now_or_never().is_some()
        };
        let news = [50, 5, 4, 50, 60].map(is_news);
        assert_eq!(news, [false, true, false, true, false]);
    }
}

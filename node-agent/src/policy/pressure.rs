//! The node's memory and swap, and who sleeps when there is too little of them. Who that is, is decided in `torpor_core::pressure`;
//! that it may sleep, by the planner.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use torpor_cgroup::meminfo::{self, Meminfo};
use torpor_core::ids::PodUid;
use torpor_core::pressure::{Candidate, Limits, Readings, Resource, Watch};
use torpor_core::state::Desired;

use crate::args::PressureArgs;
use crate::reconcile::driver::Driver;
use crate::report::metrics::Metrics;

/// How often the node's figures are read.
const LOOK: Duration = Duration::from_secs(2);
/// So long the figures need to follow when a sandbox has gone to sleep.
const SETTLE: Duration = Duration::from_secs(2);
/// The save of a large sandbox takes seconds, on a disk that others use too.
const ANSWER: Duration = Duration::from_secs(30);

/// What the tasks of the Pods and the reader of the figures share.
#[derive(Debug)]
pub(crate) struct NodePressure {
    limits: Limits,
    /// Also sandboxes without any annotation about sleep.
    on_all: bool,
    known: Mutex<Known>,
    news: Notify,
}

#[derive(Debug, Default)]
struct Known {
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
            known: Mutex::default(),
            news: Notify::new(),
        }
    }

    /// Whether sandboxes without any annotation about sleep may be put to sleep too.
    pub(crate) fn is_on_all(&self) -> bool {
        self.on_all
    }

    /// What is wanted of the sandbox, the node considered.
    pub(crate) fn shorten(&self, desired: Desired) -> Desired {
        match self.lock().watch.asked() {
            Some(ask) if ask.pod == desired.pod_uid => ask.shorten(desired, self.limits.idle),
            _ => desired,
        }
    }

    /// What a Pod's task has seen: whether its sandbox could be asked.
    pub(crate) fn note(&self, pod: &PodUid, candidate: Option<Candidate>) {
        let candidates = &mut self.lock().candidates;
        match candidate {
            Some(candidate) => drop(candidates.insert(pod.clone(), candidate)),
            None => drop(candidates.remove(pod)),
        }
    }

    /// What the node is short of, in words.
    pub(crate) fn short(&self) -> Vec<(Resource, String)> {
        let known = self.lock();
        let short = known.watch.short().iter();
        short.map(|(of, words)| (*of, words.clone())).collect()
    }

    /// Waits until the node is short of something else than before.
    pub(crate) async fn news(&self) {
        self.news.notified().await;
    }

    /// Decides anew; answers whose task is to look, because it is asked or is not any more.
    fn turn(&self, readings: &Readings, now: Timestamp, metrics: &Metrics) -> Vec<PodUid> {
        let known = &mut *self.lock();
        let candidates: Vec<Candidate> = known.candidates.values().cloned().collect();
        let before = known.watch.asked().cloned();
        let short_of = |watch: &Watch| watch.short().keys().copied().collect::<Vec<_>>();
        let was_short_of = short_of(&known.watch);
        known.watch.read(readings, &self.limits);
        if short_of(&known.watch) != was_short_of {
            self.news.notify_one();
        }
        known.watch.choose(&candidates, &self.limits, now);
        let after = known.watch.asked().cloned();
        metrics.pressure(known.watch.short());
        if before == after {
            return Vec::new();
        }
        if let Some(ask) = &after {
            metrics.asked_to_sleep(ask.short_of);
            tracing::info!(pod = %ask.pod, short_of = %ask.short_of, doze = ask.doze, "the node is short of a resource: asking a sandbox to sleep");
        }
        before.into_iter().chain(after).map(|ask| ask.pod).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads the node's figures until told to stop.
pub(crate) async fn watch(
    pressure: Arc<NodePressure>,
    driver: Driver,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) {
    loop {
        // Files of the kernel's own: they answer at once.
        match readings() {
            Ok(readings) => {
                for pod in pressure.turn(&readings, Timestamp::now(), &metrics) {
                    driver.poke_if_kept(&pod);
                }
            }
            Err(error) => tracing::warn!(%error, "cannot read the state of the node's memory"),
        }
        // Both arms only wait.
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            () = stop.cancelled() => return,
        }
    }
}

fn readings() -> std::io::Result<Readings> {
    Ok(Readings {
        stalled: meminfo::stalled(),
        ..of_meminfo(&meminfo::read()?)
    })
}

fn of_meminfo(memory: &Meminfo) -> Readings {
    Readings {
        memory_total: memory.mem_total,
        // Linux has it since 3.14.
        memory_available: memory.mem_available.unwrap_or(0),
        swap_total: memory.swap_total,
        swap_free: memory.swap_free,
        stalled: None,
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    impl NodePressure {
        /// That nothing makes ask.
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
                known: Mutex::default(),
                news: Notify::new(),
            }
        }
    }

    #[test]
    fn that_the_node_is_short_of_something_else_than_before_is_news() {
        let mut pressure = NodePressure::off();
        pressure.limits.available = Some(10);
        let metrics = Metrics::new();
        let is_news = |memory_available| {
            let readings = Readings {
                memory_total: 100,
                memory_available,
                ..Readings::default()
            };
            pressure.turn(&readings, Timestamp::UNIX_EPOCH, &metrics);
            pressure.news().now_or_never().is_some()
        };
        let news = [50, 5, 4, 50, 60].map(is_news);
        assert_eq!(news, [false, true, false, true, false]);
    }
}

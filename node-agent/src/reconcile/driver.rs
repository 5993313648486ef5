//! The reconcile loop: one task per Pod UID, which observes, plans, publishes and acts.
//!
//! Only the Pod's shim changes a sandbox on this node. It takes the steps of a plan if the sandbox
//! is in the state that the plan was made for. The caches deliver what the API wants. A task runs
//! when something about its Pod changed, when its plan requires it, and at intervals in any case,
//! because the node itself sends no events.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use torpor_api::snapshot::SandboxSnapshot;
use torpor_core::ids::PodUid;
use torpor_core::state::Desired;
use torpor_core::steps::{Plan, Reason};

use crate::policy::idle::Watched;
use crate::policy::saves::SaveTurn;
use crate::policy::sleep::SleepSettings;
use crate::reconcile::desired::desired;
use crate::report::publish;
use crate::report::sandboxes::Latest;

mod api_calls;
pub(crate) mod ask;
pub(crate) use ask::Asked;
mod departure;
pub(crate) use departure::pod_about;
mod gvisor;
mod kata;
mod keeper_rules;
use keeper_rules::KubeletRules;
mod look;
use look::{Look, Remembered};
mod own_writes;
mod shared;
pub(crate) use shared::Shared;
use shared::{class_of, pod_of};
mod sleep_watch;
use sleep_watch::SleepWatch;
mod steps;
use steps::run_steps;
mod tasks;
use tasks::Tasks;
mod wake;

/// Interval between two turns of a task without any event.
const LOOK: Duration = Duration::from_secs(5);
/// The same interval while the sandbox sleeps and its records stay unchanged. Meanwhile the task
/// reads only the time of these records.
const LOOK_ASLEEP: Duration = Duration::from_secs(180);
/// Within this time a woken sandbox has answered the caller that needed it.
const ANSWERED: Duration = Duration::from_secs(1);
/// Longest wait of a woken sandbox's task for other sandboxes that are being woken. It ends before
/// the sandbox may sleep again ([`Policy::linger`]), so the next turn misses nothing.
///
/// [`Policy::linger`]: torpor_core::state::Policy::linger
const GIVE_WAY_LIMIT: Duration = Duration::from_secs(3);
/// Wait after a write to the API failed.
const RETRY: Duration = Duration::from_secs(2);

/// A handle that starts the tasks of the Pods and wakes them.
#[derive(Clone)]
pub(crate) struct Driver {
    shared: Arc<Shared>,
    tasks: Arc<Mutex<Tasks>>,
    tracker: TaskTracker,
    stop: CancellationToken,
    begun: Arc<AtomicBool>,
}

impl Driver {
    pub(crate) fn new(shared: Arc<Shared>, stop: CancellationToken) -> Self {
        Self {
            shared,
            tasks: Arc::default(),
            tracker: TaskTracker::new(),
            stop,
            begun: Arc::default(),
        }
    }

    /// Waits until every task has ended its turn.
    pub(crate) async fn stopped(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }

    /// Runs the task of one Pod until nothing of the Pod is left or the agent ends.
    async fn drive(&self, pod: PodUid, notify: Arc<Notify>) {
        let mut remembered = Remembered::default();
        loop {
            let (wait, asleep) = match self.turn(&pod, &mut remembered, &notify).await {
                Turn::Again => continue,
                Turn::Wait(wait) => (wait, None),
                Turn::Rest(asleep, wait) => (wait, Some(asleep)),
                Turn::Nothing => {
                    self.tasks().end(&pod);
                    return;
                }
            };
            // All three arms only wait: a cancelled arm loses nothing.
            tokio::select! {
                () = notify.notified() => {}
                () = self.pause(wait, asleep) => {}
                () = self.stop.cancelled() => return,
            }
        }
    }

    /// Waits until the next turn is due without an event. With a sleeping sandbox the wait
    /// also ends when the sandbox's records change.
    async fn pause(&self, wait: Duration, asleep: Option<SleepWatch>) {
        let Some(asleep) = asleep else {
            return tokio::time::sleep(wait.min(LOOK)).await;
        };
        let until = tokio::time::Instant::now() + wait.min(LOOK_ASLEEP);
        while tokio::time::Instant::now() < until {
            let next = tokio::time::Instant::now() + LOOK;
            tokio::time::sleep_until(next.min(until)).await;
            // One system call about a file in memory. A call on another thread would take ten times
            // as long.
            if !asleep.is_unchanged(&self.shared.node.records) {
                return self.give_way().await;
            }
        }
    }

    /// Waits for other wakes before the turn of a woken sandbox. Many sandboxes may wake at once,
    /// their callers need the processors, and nothing waits for this task's report of the wake.
    async fn give_way(&self) {
        let until = tokio::time::Instant::now() + GIVE_WAY_LIMIT;
        loop {
            tokio::time::sleep(ANSWERED).await;
            let waits = self.shared.saves.is_wake_awaited();
            if !waits || tokio::time::Instant::now() >= until {
                return;
            }
        }
    }

    /// Does one turn: observes, plans, publishes, acts.
    async fn turn(
        &self,
        pod_uid: &PodUid,
        remembered: &mut Remembered,
        task: &Arc<Notify>,
    ) -> Turn {
        if self.stop.is_cancelled() {
            return Turn::Wait(Duration::ZERO);
        }
        let shared = &self.shared;
        let pod = pod_of(shared, pod_uid);
        shared.spans.note(pod_uid, pod.as_deref());
        let Ok((snapshots, has_image)) = self.snapshots_of(pod_uid, pod.as_deref()).await else {
            remembered.save_turn = None;
            return Turn::Wait(RETRY);
        };
        let snapshots = remembered.own_writes.over(snapshots);
        let departure = remembered.going.departure(pod.as_deref(), Timestamp::now());
        if let Err(wait) = self.adopt(&snapshots, pod.as_deref(), has_image).await {
            // The save turn goes to another task while the apiserver refuses this write.
            remembered.save_turn = None;
            return Turn::Wait(wait);
        }
        let desired = Desired {
            departure,
            // An answer is for one plan.
            answer: remembered.going.answer.take(),
            ..self.desired(pod_uid, pod.as_deref(), &snapshots)
        };
        let kubelet = KubeletRules::of(pod.as_deref(), &desired);
        let looked = self
            .look(pod.clone(), desired, kubelet, remembered.clone())
            .await;
        let Ok((mut look, idle)) = looked else {
            remembered.save_turn = None;
            return Turn::Wait(RETRY);
        };
        remembered.idle = idle;
        remembered.sent_rules = look.sent_rules.take();
        remembered.handled = look.handled.take();
        remembered.failures = std::mem::take(&mut look.failures);
        remembered.failed_wakes = look.failed_wakes;
        shared.pressure.note(pod_uid, look.candidate.take());
        if look.nothing {
            return self
                .end(pod_uid, &snapshots, &look, &mut remembered.own_writes)
                .await;
        }
        let watched = remembered.idle.is_some();
        let going = &remembered.going;
        let latest = Latest::of(&look.plan, watched, going.sandbox(), going.since());
        shared.board.note(pod_uid, latest);
        let (held, wish) = (remembered.save_turn.take(), look.wish.take());
        let joins = held.is_none();
        remembered.save_turn = shared.saves.follow(held, &look.plan, wish, task);
        if look.plan.steps.is_empty() {
            // The sandbox stays usable while its task waits for the save turn.
            look.kata = None;
        }
        self.shared.metrics.planned();
        self.publish_pressure(pod.as_deref(), &look.plan).await;
        let own_writes = &mut remembered.own_writes;
        let published = self
            .publish_status(pod.as_deref(), &snapshots, &look, own_writes)
            .await;
        if let Err(error) = published {
            log_unpublished(pod_uid, &error);
            if look.plan.steps.is_empty() {
                return Turn::Wait(RETRY);
            }
        }
        if look.plan.steps.is_empty() && look.plan.asks {
            return self.ask(pod_uid, look.namespace.as_ref(), remembered).await;
        }
        if look.plan.steps.is_empty() {
            // A task that has just joined the queue plans again if bandwidth holds it back:
            // the next plan publishes the reason of the wait.
            let news = |turn: &Arc<SaveTurn>| turn.has_come() || joins && turn.is_held_back();
            return match remembered.save_turn.as_ref().is_some_and(news) {
                true => Turn::Again,
                false => {
                    let wait = until(look.plan.wake_at);
                    let asleep = look.asleep.take();
                    asleep.map_or(Turn::Wait(wait), |asleep| Turn::Rest(asleep, wait))
                }
            };
        }
        self.act(look, pod, remembered).await;
        Turn::Again
    }

    /// Returns what the API and the node's pressure want of the Pod's sandbox.
    fn desired(
        &self,
        pod_uid: &PodUid,
        pod: Option<&Pod>,
        snapshots: &[Arc<SandboxSnapshot>],
    ) -> Desired {
        let pressure = &self.shared.pressure;
        let references: Vec<&SandboxSnapshot> = snapshots.iter().map(AsRef::as_ref).collect();
        let class = pod.and_then(|pod| class_of(&self.shared, pod));
        let mut desired = desired(pod_uid, pod, class.as_deref(), &references);
        let settings = pod.map(|pod| SleepSettings::of(pod, class.as_deref()));
        desired.pressure.may =
            settings.is_some_and(|settings| settings.may_be_pressed(pressure.is_on_all()));
        pressure.shorten(desired)
    }

    /// Writes an Event with the reason when the plan puts a sandbox to sleep early for the node.
    async fn publish_pressure(&self, pod: Option<&Pod>, plan: &Plan) {
        let short_of = plan.why.iter().find_map(|reason| match reason {
            Reason::Pressure { short_of } => Some(*short_of),
            _ => None,
        });
        let Some((pod, short_of)) = pod.zip(short_of).filter(|_| !plan.steps.is_empty()) else {
            return;
        };
        let short = self.shared.pressure.short();
        let words = short.into_iter().find(|(of, _)| *of == short_of);
        let words = words.map_or_else(
            || format!("the node is short of {short_of}"),
            |(_, words)| words,
        );
        self.shared.publisher.node_pressure(pod, &words).await;
    }

    /// Observes the Pod and plans, on a thread that may block.
    async fn look(
        &self,
        pod: Option<Arc<Pod>>,
        desired: Desired,
        kubelet: Option<KubeletRules>,
        remembered: Remembered,
    ) -> Result<(Look, Option<Watched>), tokio::task::JoinError> {
        let shared = self.shared.clone();
        let look = move || match kata::look(
            &shared,
            pod.as_deref(),
            &desired,
            kubelet.as_ref(),
            &remembered,
        ) {
            Some(looked) => looked,
            None => gvisor::look(&shared, pod.as_deref(), &desired, kubelet, remembered),
        };
        tokio::task::spawn_blocking(look).await
    }

    /// Runs the plan's steps until one does not succeed, on a thread that may block.
    async fn act(&self, mut look: Look, pod: Option<Arc<Pod>>, remembered: &mut Remembered) {
        let shared = self.shared.clone();
        let given_up = std::mem::take(&mut look.given_up);
        let mut noted = remembered.failures.clone();
        let done = tokio::task::spawn_blocking(move || {
            let written = run_steps(&shared, &mut look, pod.as_deref(), &mut noted);
            (noted, look.failed_wakes, written)
        });
        match done.await {
            Ok((noted, failed_wakes, written)) => {
                remembered.failures = noted;
                remembered.failed_wakes = failed_wakes;
                if let Some(turn) = &remembered.save_turn {
                    turn.wrote(written);
                }
                self.publish_given_up(given_up, remembered).await;
            }
            Err(error) => tracing::error!(%error, "a step panicked"),
        }
    }
}

/// The continuation of a task after one turn.
enum Turn {
    /// The next turn follows at once.
    Again,
    Wait(Duration),
    /// The sandbox sleeps, and there is nothing to do.
    Rest(SleepWatch, Duration),
    /// Neither the API nor the node has anything of the Pod any more: the task ends.
    Nothing,
}

/// Logs that a status was not written.
fn log_unpublished(pod_uid: &PodUid, error: &publish::Error) {
    let words = crate::reconcile::observe::words(error);
    if matches!(error, publish::Error::Conflict { .. }) {
        // The watch soon delivers the newer object, and the task runs again at once.
        tracing::debug!(%pod_uid, error = words, "cannot write the status");
    } else {
        tracing::warn!(%pod_uid, error = words, "cannot write the status");
    }
}

/// Returns the time until `wake_at`, zero if that has passed.
fn until(wake_at: Option<Timestamp>) -> Duration {
    let wait = wake_at.map(|at| at.duration_since(Timestamp::now()));
    wait.map_or(LOOK_ASLEEP, |wait| {
        Duration::try_from(wait).unwrap_or(Duration::ZERO)
    })
}

#[cfg(test)]
mod tests;

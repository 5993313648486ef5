//! One task per Pod UID: observe, plan, tell, do, and again.
//!
//! Nothing else on this node changes a sandbox but this task and torpor-oci, and they take turns by the sandbox' lock.
//! What the API wants arrives through the caches; a task is woken when something about its Pod changed, when its plan
//! asked for it, and now and then in any case, because the node itself sends no events.

use std::cell::{Cell, RefCell};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::ResourceExt;
use kube::runtime::reflector::{ObjectRef, Store as Cache};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use torpor_api::snapshot::SandboxSnapshot;
use torpor_core::ids::{Namespace, PodUid, SandboxId};
use torpor_core::pressure::Candidate;
use torpor_core::queue::Wish;
use torpor_core::state::{Desired, Failures, Observed, Policy};
use torpor_core::steps::{Outcome, Plan, Reason, Step};
use torpor_records::{PodLock, PodRecord, WakeCause};
use torpor_runsc::keeper::Rules;

use crate::kata::{Held, Kata};
use crate::policy::idle::Watched;
use crate::policy::pressure::NodePressure;
use crate::policy::saves::{SaveTurn, Saves};
use crate::policy::sleep::{Said, class_name};
use crate::reconcile::desired::desired;
use crate::reconcile::execute::{self, Context, execute};
use crate::reconcile::node::Node;
use crate::reconcile::shown::ShownSnapshots;
use crate::report::metrics::Metrics;
use crate::report::publish::{self, Publisher, SavedImage};
use crate::report::sandboxes::{Board, Latest};
use crate::report::spans::Spans;
use crate::report::wakes::FailedWakes;

mod asleep;
use asleep::Asleep;
mod ask;
pub(crate) use ask::Asked;
mod draft;
pub(crate) use draft::saved_name;
mod gofers;
mod gone;
pub(crate) use gone::pod_about;
use gone::{GivenUp, Going};
mod limits;
use limits::ToldLimits;
mod of_gvisor;
mod of_kata;
mod tasks;
use tasks::Tasks;
mod tell;
mod told;
use told::{Kubelet, Told, rules_now};
mod written;
use written::Written;

/// How often a task looks although nobody said that something changed.
const LOOK: Duration = Duration::from_secs(5);
/// The same while the sandbox sleeps and none of its files changes, which is all that is looked at meanwhile.
const LOOK_ASLEEP: Duration = Duration::from_secs(180);
/// Who was woken has answered by then.
const ANSWERED: Duration = Duration::from_secs(1);
/// For as long as others wait to be woken, at most: the next look finds what it does before it may sleep again ([`Policy::linger`]).
const COURTESY: Duration = Duration::from_secs(3);
/// After a write to the API failed.
const RETRY: Duration = Duration::from_secs(2);

/// What every task shares.
pub(crate) struct Shared {
    pub(crate) node: Arc<Node>,
    pub(crate) pods: Cache<Pod>,
    pub(crate) snapshots: Arc<ShownSnapshots>,
    pub(crate) classes: Cache<RuntimeClass>,
    pub(crate) publisher: Publisher,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) policy: Policy,
    pub(crate) board: Arc<Board>,
    pub(crate) saves: Arc<Saves>,
    pub(crate) pressure: Arc<NodePressure>,
    pub(crate) spans: Arc<Spans>,
    /// The sandboxes that Kata runs, where the agent has to do with them.
    pub(crate) kata: Option<Arc<Kata>>,
    /// What the apiserver has answered about Pods that are gone.
    pub(crate) asked: Asked,
}

/// Starts tasks and wakes them.
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

    /// Waits until no task is in the middle of something.
    pub(crate) async fn stopped(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }

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
            // All three arms only wait: nothing is lost when one of them wins.
            tokio::select! {
                () = notify.notified() => {}
                () = self.pause(wait, asleep) => {}
                () = self.stop.cancelled() => return,
            }
        }
    }

    /// Until the next look though nobody said that something changed: with a sandbox that sleeps, when something has happened to it.
    async fn pause(&self, wait: Duration, asleep: Option<Asleep>) {
        let Some(asleep) = asleep else {
            return tokio::time::sleep(wait.min(LOOK)).await;
        };
        let until = tokio::time::Instant::now() + wait.min(LOOK_ASLEEP);
        while tokio::time::Instant::now() < until {
            let next = tokio::time::Instant::now() + LOOK;
            tokio::time::sleep_until(next.min(until)).await;
            // One call of the kernel's about a file in memory: to have another thread make it takes ten times as long.
            if !asleep.is_as_it_was(&self.shared.node.records) {
                return self.give_way().await;
            }
        }
    }

    /// Somebody has woken the sandbox, and maybe many others. Nobody waits to be told of that, and who is to be answered needs the processors.
    async fn give_way(&self) {
        let until = tokio::time::Instant::now() + COURTESY;
        loop {
            tokio::time::sleep(ANSWERED).await;
            let waits = self.shared.saves.is_somebody_waiting();
            if !waits || tokio::time::Instant::now() >= until {
                return;
            }
        }
    }

    /// Observe, plan, tell, do.
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
        let snapshots = remembered.written.over(snapshots);
        let departure = remembered.going.departure(pod.as_deref(), Timestamp::now());
        if let Err(wait) = self.adopt(&snapshots, pod.as_deref(), has_image).await {
            // Others do not wait for what the API does not take.
            remembered.save_turn = None;
            return Turn::Wait(wait);
        }
        let desired = Desired {
            departure,
            ..self.desired(pod_uid, pod.as_deref(), &snapshots)
        };
        let kubelet = Kubelet::of(pod.as_deref(), &desired);
        let looked = self
            .look(pod.clone(), desired, kubelet, remembered.clone())
            .await;
        let Ok((mut look, idle)) = looked else {
            remembered.save_turn = None;
            return Turn::Wait(RETRY);
        };
        remembered.idle = idle;
        remembered.told = look.told.take();
        remembered.limits = look.limits.take();
        remembered.found = look.found.take();
        remembered.failures = std::mem::take(&mut look.failures);
        remembered.failed_wakes = look.failed_wakes;
        shared.pressure.note(pod_uid, look.candidate.take());
        if look.nothing {
            return self
                .end(pod_uid, &snapshots, &look, &mut remembered.written)
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
            // Whoever needs the sandbox while it waits for its turn may have it.
            look.lock = None;
            look.kata = None;
        }
        self.shared.metrics.planned();
        self.tell_of_pressure(pod.as_deref(), &look.plan).await;
        let written = &mut remembered.written;
        let told = self.tell(pod.as_deref(), &snapshots, &look, written).await;
        if let Err(error) = told {
            untold(pod_uid, &error);
            if look.plan.steps.is_empty() {
                return Turn::Wait(RETRY);
            }
        }
        if look.plan.steps.is_empty() && look.plan.asks {
            return self.ask(pod_uid, look.namespace.as_ref(), remembered).await;
        }
        if look.plan.steps.is_empty() {
            // Who joins the queue also looks what it waits for there, and tells it.
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

    /// What the API wants of the Pod's sandbox, and the node.
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
        let said = pod.map(|pod| Said::of(pod, class.as_deref()));
        desired.pressure.may = said.is_some_and(|said| said.may_be_pressed(pressure.is_on_all()));
        pressure.shorten(desired)
    }

    /// A sandbox that is put to sleep before its time is told why.
    async fn tell_of_pressure(&self, pod: Option<&Pod>, plan: &Plan) {
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

    async fn look(
        &self,
        pod: Option<Arc<Pod>>,
        desired: Desired,
        kubelet: Kubelet,
        remembered: Remembered,
    ) -> Result<(Look, Option<Watched>), tokio::task::JoinError> {
        let shared = self.shared.clone();
        let look =
            move || match of_kata::look(&shared, pod.as_deref(), &desired, &kubelet, &remembered) {
                Some(looked) => looked,
                None => of_gvisor::look(&shared, pod.as_deref(), &desired, kubelet, remembered),
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
                self.tell_given_up(given_up, remembered).await;
            }
            Err(error) => tracing::error!(%error, "a step panicked"),
        }
    }
}

enum Turn {
    Again,
    Wait(Duration),
    /// The sandbox sleeps, and there is nothing to do.
    Rest(Asleep, Duration),
    /// Neither the API nor the node knows anything of the Pod any more.
    Nothing,
}

fn untold(pod_uid: &PodUid, error: &publish::Error) {
    let words = crate::reconcile::observe::words(error);
    if matches!(error, publish::Error::Conflict { .. }) {
        // The watch shows in a moment what there is instead, and the task looks again at once.
        tracing::debug!(%pod_uid, error = words, "cannot write the status");
    } else {
        tracing::warn!(%pod_uid, error = words, "cannot write the status");
    }
}

fn until(wake_at: Option<Timestamp>) -> Duration {
    let wait = wake_at.map(|at| at.duration_since(Timestamp::now()));
    wait.map_or(LOOK_ASLEEP, |wait| {
        Duration::try_from(wait).unwrap_or(Duration::ZERO)
    })
}

fn pod_of(shared: &Shared, uid: &PodUid) -> Option<Arc<Pod>> {
    shared
        .pods
        .find(|pod| pod.uid().as_deref() == Some(uid.as_str()))
}

fn class_of(shared: &Shared, pod: &Pod) -> Option<Arc<RuntimeClass>> {
    let name = class_name(pod)?;
    shared.classes.get(&ObjectRef::new(name))
}

/// What a task knows of its Pod from turn to turn. After a restart of the agent everything is tried at once, and what was idle
/// counts as used until then.
#[derive(Debug, Clone, Default)]
struct Remembered {
    failures: Failures,
    idle: Option<Watched>,
    /// Its turn to save, or its place in the queue.
    save_turn: Option<Arc<SaveTurn>>,
    told: Option<Told>,
    /// The Pod's limits that the sandbox was told last.
    limits: Option<ToldLimits>,
    /// The sandbox that it has had in hand.
    found: Option<SandboxId>,
    written: Written,
    failed_wakes: FailedWakes,
    /// How its Pod goes.
    going: Going,
}

/// Whether the sandbox' turn to save has come, and what holds it back.
fn note_turn(observed: &mut Observed, turn: Option<&SaveTurn>) {
    observed.save_turn = turn.is_some_and(SaveTurn::has_come);
    observed.held_back = turn.is_some_and(SaveTurn::is_held_back);
}

/// What was seen and what follows; holds the sandbox' lock for the steps.
struct Look {
    pod_uid: PodUid,
    plan: Plan,
    /// What the sandbox, which runs, is about to stand still for.
    stops_for: Option<Step>,
    record: Option<PodRecord>,
    lock: Option<PodLock>,
    namespace: Option<Namespace>,
    /// What it waits to save.
    wish: Option<Wish>,
    saved: Vec<SavedImage>,
    /// Nothing of the Pod is on the node, and there is nothing left to be said of it but what the plan says.
    nothing: bool,
    /// Memory that the plan gives up.
    given_up: Vec<GivenUp>,
    /// It sleeps, and nobody is at work on it.
    asleep: Option<Asleep>,
    /// Whether it could sleep for the node's sake.
    candidate: Option<Candidate>,
    /// What its keeper goes by, and has been told.
    rules: Rules,
    told: Option<Told>,
    /// The Pod's limits that it was told last.
    limits: Option<ToldLimits>,
    /// The sandbox that this task has had in hand.
    found: Option<SandboxId>,
    /// When the plan was made.
    decided: Timestamp,
    /// Who wants it, if the plan wakes it.
    cause: WakeCause,
    /// What its namespace may store limits its save.
    limited: bool,
    /// What of the failures before is not made good yet.
    failures: Failures,
    failed_wakes: FailedWakes,
    /// The sandbox, if Kata runs it: then there is neither record nor lock.
    kata: Option<Held>,
}

/// Answers how many bytes of an image were written.
fn run_steps(shared: &Shared, look: &mut Look, pod: Option<&Pod>, failures: &mut Failures) -> u64 {
    let Some(namespace) = look.namespace.clone() else {
        // A ledger alone is removed with no image to name a namespace by.
        return remove_ledger_alone(shared, look, failures);
    };
    run_in(shared, look, &namespace, pod, failures)
}

fn remove_ledger_alone(shared: &Shared, look: &mut Look, failures: &mut Failures) -> u64 {
    match Namespace::new("none") {
        Ok(namespace) => run_in(shared, look, &namespace, None, failures),
        Err(error) => {
            tracing::error!(%error, "the constant name of a namespace is not valid");
            0
        }
    }
}

fn run_in(
    shared: &Shared,
    look: &mut Look,
    namespace: &Namespace,
    pod: Option<&Pod>,
    failures: &mut Failures,
) -> u64 {
    let mut kata = look.kata.take();
    let mut failed_wakes = look.failed_wakes;
    let draft = || draft::manifest(&shared.node, look.record.as_ref(), pod);
    // The Pod may have been deleted since the plan was made, and its keeper told: it is not told otherwise again.
    let rules = || match pod_of(shared, &look.pod_uid) {
        Some(pod) => rules_now(shared, &look.pod_uid, &pod),
        None => look.rules.clone(),
    };
    let context = Context {
        rules: &rules,
        by_itself: look.plan.sleeps_by_itself(),
        decided: look.decided,
        cause: look.cause,
        limited: look.limited,
        node: &shared.node,
        pod: &look.pod_uid,
        namespace,
        sandbox: look.record.as_ref().zip(look.lock.as_ref()),
        draft: &draft,
        partial: RefCell::new(None),
        written: Cell::new(0),
    };
    let act = |step: &Step| match &mut kata {
        Some(held) => held.act(step, look.decided, look.cause),
        None => execute(&context, step),
    };
    let tell = |step: &Step, outcome: &Outcome, took: Duration| {
        let kind = step.action.kind();
        shared.metrics.stepped(kind, outcome, took);
        shared.spans.stepped(&look.pod_uid, kind, outcome, took);
        log(&look.pod_uid, step, outcome, took);
        failures.note(&step.action, outcome, Timestamp::now());
        failed_wakes.note(step, outcome);
    };
    let no_room = || execute::no_room(&context);
    execute::run(
        &look.plan.steps,
        look.stops_for.as_ref(),
        no_room,
        act,
        tell,
    );
    let written = context.written.get();
    look.failed_wakes = failed_wakes;
    written
}

fn log(pod: &PodUid, step: &Step, outcome: &Outcome, took: Duration) {
    let took = took.as_millis();
    let kind = step.action.kind();
    match outcome {
        Outcome::Done | Outcome::Already => {
            tracing::info!(%pod, ?kind, took_ms = took, seq = step.fence.ledger_seq, "step done");
        }
        Outcome::Stale => {
            tracing::info!(%pod, ?kind, "step not done: it was planned for another state")
        }
        Outcome::Failed { reason, message } => {
            tracing::error!(%pod, ?kind, reason, message, took_ms = took, "step failed");
        }
        Outcome::Unknown { message } => {
            tracing::warn!(%pod, ?kind, message, took_ms = took, "the outcome of the step is unknown");
        }
    }
}

#[cfg(test)]
mod tests;

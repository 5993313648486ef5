//! The Kata sandboxes of this node, for the driver's tasks: observation, steps and wakes.
//!
//! A Kata sandbox has no keeper, so the agent itself listens for the packets that wake it. While
//! the agent does not run, no packet wakes a sandbox. Therefore an agent that ends in order resumes
//! the dozing sandboxes. An agent that starts resumes the paused sandboxes that it finds, before it
//! lets any doze again. Only containerd has the state of a paused sandbox; the agent
//! writes no records.

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use tokio::runtime::Handle;
use tokio::sync::OwnedMutexGuard;
use torpor_core::idle::Look as IdleLook;
use torpor_core::ids::{PodUid, SandboxId};
use torpor_core::state::{Desired, Doze, Failures, Live, NOT_WATCHED, Observed, Power};
use torpor_core::steps::{Action, Outcome, Step};
use torpor_kata::containerd::Containerd;
use torpor_kata::driver::{Driver, Seen};
use torpor_kata::sandbox::Sandbox;
use torpor_records::Rules;
use torpor_records::{Depth, Probes, SleepNote, WakeCause, WakeNote};

use crate::args::KataArgs;
use crate::policy::idle::Watched;
use crate::policy::swap::{SwapRoom, has_swap};
use crate::reconcile::observe::words;
use crate::report::metrics::Metrics;

mod history;
mod listener;
mod node_status;

use history::History;
use listener::{PacketListener, Target};

/// Limit for containerd's answer to a call that does no work.
const CONTAINERD_LIMIT: Duration = Duration::from_secs(10);
/// The reason why Kata sandboxes do not hibernate (Kata 4.1: docs/Limitations.md; its shims refuse
/// Checkpoint).
const NO_IMAGES: &str = "Kata cannot snapshot a running sandbox";
/// Time in which a sandbox answers a packet. A packet that came within this time before the
/// pause may have no answer yet.
const ANSWER: Duration = Duration::from_secs(1);

/// The state of one Pod's sandbox in this agent. Its lock is held during a step or a wake.
#[derive(Debug, Default)]
struct KataState {
    sandbox: Option<SandboxId>,
    /// Set if this agent has put the sandbox to sleep and listens for its packets.
    doze: Option<Doze>,
    asleep_since: Option<Timestamp>,
    /// When a peer or a user last needed the sandbox.
    awake_since: Option<Timestamp>,
    woke_at: Option<Timestamp>,
    listener: Option<PacketListener>,
    history: History,
}

/// The entry of a Pod, with all that a wake of its sandbox needs.
#[derive(Debug)]
struct Entry {
    namespace: String,
    name: String,
    state: Arc<tokio::sync::Mutex<KataState>>,
    /// The sandbox at the last look.
    last: Mutex<Option<Sandbox>>,
}

/// The Kata sandboxes of this node.
#[derive(Debug)]
pub(crate) struct Kata {
    driver: Driver,
    handlers: Vec<String>,
    swap: Arc<SwapRoom>,
    kubelet_port: u16,
    runtime: Handle,
    metrics: Arc<Metrics>,
    pods: Mutex<HashMap<PodUid, Arc<Entry>>>,
    /// Sends the Pods that a packet has woken, so that their tasks run.
    woken: tokio::sync::mpsc::UnboundedSender<PodUid>,
}

/// An observed sandbox whose lock is held.
pub(crate) struct LockedSandbox {
    kata: Arc<Kata>,
    pod: PodUid,
    sandbox: Sandbox,
    state: OwnedMutexGuard<KataState>,
}

/// The input of an observation: a Pod of the API and what follows from it.
pub(crate) struct PodInput<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) desired: &'a Desired,
    pub(crate) rules: &'a Rules,
    pub(crate) probes: &'a Probes,
}

/// An observation of a Kata sandbox.
pub(crate) struct Looked {
    pub(crate) observed: Observed,
    pub(crate) idle: Option<Watched>,
    /// None if the sandbox is being woken at this moment.
    pub(crate) locked: Option<LockedSandbox>,
}

impl Kata {
    /// Connects to containerd. Returns none if no handler is configured. The receiver delivers
    /// the Pods that a packet has woken.
    pub(crate) fn new(
        args: &KataArgs,
        swap: Arc<SwapRoom>,
        cgroup_root: &Path,
        kubelet_port: u16,
        metrics: Arc<Metrics>,
    ) -> anyhow::Result<Option<(Arc<Self>, tokio::sync::mpsc::UnboundedReceiver<PodUid>)>> {
        if args.kata_handlers.is_empty() {
            return Ok(None);
        }
        let runtime = Handle::current();
        let containerd = Containerd::at(
            &args.kata_containerd_socket,
            runtime.clone(),
            CONTAINERD_LIMIT,
        );
        // kata-deploy writes these names into containerd's configuration.
        let runtimes = args.kata_handlers.iter();
        let runtimes = runtimes.map(|handler| format!("io.containerd.{handler}.v2"));
        let (woken, receiver) = tokio::sync::mpsc::unbounded_channel();
        let kata = Self {
            driver: Driver::new(containerd, runtimes.collect(), cgroup_root)?,
            handlers: args.kata_handlers.clone(),
            swap,
            kubelet_port,
            runtime,
            metrics,
            pods: Mutex::default(),
            woken,
        };
        Ok(Some((Arc::new(kata), receiver)))
    }

    /// Observes a Pod's sandbox. Returns none if Kata does not run it. The call blocks.
    pub(crate) fn look(
        self: &Arc<Self>,
        input: &PodInput<'_>,
        failures: &Failures,
        idle: Option<Watched>,
        now: Timestamp,
    ) -> Option<Looked> {
        let pod = &input.desired.pod_uid;
        let mut observed = Observed {
            capable: Err(NO_IMAGES.to_owned()),
            dozes_unsaved: true,
            can_doze: has_swap(),
            failures: failures.clone(),
            ..Observed::nothing()
        };
        let seen = match self.driver.look(pod) {
            Ok(Some(seen)) => seen,
            Ok(None) => return None,
            Err(error) => {
                tracing::warn!(%pod, error = words(&error), "cannot determine the Pod's sandbox");
                // A Pod without an entry was never one of Kata's, and counts as such.
                self.entries().get(pod)?;
                observed.live = Live::Unknown;
                return Some(Looked {
                    observed,
                    idle,
                    locked: None,
                });
            }
        };
        let entry = self.entry(input);
        *lock(&entry.last) = Some(seen.sandbox.clone());
        observed.sandbox = Some(seen.sandbox.id.clone());
        observed.live = seen.standing.live;
        let Ok(mut state) = entry.state.clone().try_lock_owned() else {
            observed.busy = true;
            return Some(Looked {
                observed,
                idle,
                locked: None,
            });
        };
        self.update(&mut state, &seen, now);
        observed.doze = state
            .doze
            .filter(|_| seen.standing.live == Live::Paused && !seen.standing.half);
        if observed.live == Live::Running {
            let working_set = || self.driver.working_set(&seen.sandbox);
            let may_swap = || self.driver.may_swap(&seen.sandbox);
            observed.can_doze = self
                .swap
                .may_doze(working_set)
                .and_then(|()| may_swap().map_err(|error| error.to_string()));
        }
        (observed.awake_since, observed.woke_at) = (state.awake_since, state.woke_at);
        observed.asleep_since = state.asleep_since;
        let idle = self.watch(&mut state, input, &seen, &mut observed, idle, now);
        Some(Looked {
            observed,
            idle,
            locked: Some(LockedSandbox {
                kata: self.clone(),
                pod: pod.clone(),
                sandbox: seen.sandbox,
                state,
            }),
        })
    }

    /// Adapts the state to the observed sandbox.
    ///
    /// The state of an earlier sandbox of the Pod does not apply to a new one. A new sandbox that
    /// is found paused counts as needed now: while it was paused, packets may have been missed.
    fn update(&self, state: &mut KataState, seen: &Seen, now: Timestamp) {
        if state.sandbox.as_ref() != Some(&seen.sandbox.id) {
            *state = KataState {
                sandbox: Some(seen.sandbox.id.clone()),
                awake_since: (seen.standing.live == Live::Paused).then_some(now),
                ..KataState::default()
            };
        }
        if seen.standing.live == Live::Running && state.doze.take().is_some() {
            // Another process has resumed the sandbox, and needs it.
            (state.asleep_since, state.awake_since) = (None, Some(now));
        }
    }

    /// Observes since when a sandbox that may sleep has been idle. Opens or closes its listener.
    ///
    /// The listener exists only while the sandbox's processors rest: a sandbox that works must
    /// not be slowed down. The idle time begins with the listener.
    fn watch(
        &self,
        state: &mut KataState,
        input: &PodInput<'_>,
        seen: &Seen,
        observed: &mut Observed,
        idle: Option<Watched>,
        now: Timestamp,
    ) -> Option<Watched> {
        let desired = input.desired;
        let may_sleep = desired.sleep.first().is_some()
            || desired.power == Power::Asleep
            || desired.pressure.may;
        if !may_sleep || matches!(observed.live, Live::None | Live::Unknown) {
            if observed.live != Live::Unknown {
                state.listener = None;
            }
            return None;
        }
        if let Err(why) = answers_probes(input.pod) {
            observed.can_doze = Err(why);
            return None;
        }
        let mut watched = Watched::of(idle, &seen.sandbox.id, now);
        let is_new = watched.begins_at(now);
        if observed.live == Live::Running {
            let Some(cpu) = self.driver.processor_time(&seen.sandbox) else {
                observed.idle_known = Err("its processor time cannot be read".to_owned());
                return Some(watched);
            };
            let up = watched.up();
            watched.look(&IdleLook {
                at: now,
                up,
                cpu,
                host: None,
                // The idle time begins when the sandbox is ready.
                in_use: !desired.ready,
                // The idle time also begins anew with a wake by a plan, such as a scheduled wake.
                last_use: state.awake_since.max(state.woke_at),
            });
        }
        let works = observed.live == Live::Running && watched.begins_at(now) && !is_new;
        if works && desired.power != Power::Asleep {
            state.listener = None;
        } else if state.listener.is_none() {
            match self.open_listener(input, seen, now) {
                Ok(listener) => state.listener = Some(listener),
                Err(why) => {
                    observed.can_doze = Err(format!("packets would not wake the sandbox: {why}"));
                    return Some(watched);
                }
            }
        }
        if let Some(listener) = &state.listener {
            listener.set_rules(input.rules, input.probes);
            watched.used(listener.last().max(listener.began()).min(now));
        }
        observed.idle_since = Some(watched.since());
        Some(watched)
    }

    fn open_listener(
        &self,
        input: &PodInput<'_>,
        seen: &Seen,
        now: Timestamp,
    ) -> Result<PacketListener, String> {
        let pid = seen.pid.ok_or("its sandbox has no process")?;
        let status = input.pod.status.as_ref();
        let addresses = status.and_then(|status| status.pod_ips.as_ref());
        let own: Vec<IpAddr> = addresses
            .into_iter()
            .flatten()
            .filter_map(|address| address.ip.parse().ok())
            .collect();
        let target = Target {
            namespace: PathBuf::from(format!("/proc/{pid}/ns/net")),
            own,
            kubelet_port: self.kubelet_port,
        };
        PacketListener::open(&self.runtime, &target, now).map_err(|error| words(&error))
    }

    /// Resumes the Pod's sandbox if it dozes, then wakes the Pod's task.
    async fn wake(self: Arc<Self>, pod: PodUid, cause: WakeCause) {
        let Some(entry) = self.entries().get(&pod).cloned() else {
            return;
        };
        let mut state = entry.state.clone().lock_owned().await;
        let Some(sandbox) = lock(&entry.last).clone() else {
            return;
        };
        if state.doze.take().is_none() || state.sandbox.as_ref() != Some(&sandbox.id) {
            return;
        }
        // From now on the Pod's task plans a resume, even if this one fails.
        state.awake_since = Some(Timestamp::now());
        let began = Instant::now();
        let kata = self.clone();
        let resumed = tokio::task::spawn_blocking(move || kata.driver.resume(&sandbox)).await;
        match resumed {
            Ok(Ok(_)) => self.note_wake(&mut state, cause, began.elapsed()),
            Ok(Err(error)) => {
                tracing::error!(%pod, error = words(&error), "cannot resume the dozing sandbox; the agent tries again");
            }
            Err(error) => tracing::error!(%pod, %error, "a resume panicked"),
        }
        drop(state);
        // The receiver is gone only when the agent ends.
        let _ = self.woken.send(pod);
    }

    /// Records a wake in the state, the metrics and the history.
    fn note_wake(&self, state: &mut KataState, cause: WakeCause, took: Duration) {
        let now = Timestamp::now();
        state.asleep_since = None;
        state.woke_at = Some(now);
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let note = WakeNote {
            cause,
            from: Depth::Dozing,
            stages_end_micros: [("resumed".to_owned(), micros)].into(),
        };
        self.metrics
            .woke(&note, took, &[("resumed".to_owned(), took)]);
        state.history.woke(now, &note, took);
    }

    /// Resumes the dozing sandboxes when the agent ends: from then on no listener wakes them.
    pub(crate) async fn end(self: &Arc<Self>) {
        let pods: Vec<PodUid> = self.entries().keys().cloned().collect();
        let mut wakes = tokio::task::JoinSet::new();
        for pod in pods {
            wakes.spawn(self.clone().wake(pod, WakeCause::Asked));
        }
        while wakes.join_next().await.is_some() {}
    }

    /// Removes the entry of a Pod that is gone.
    pub(crate) fn forget(&self, pod: &PodUid) {
        self.entries().remove(pod);
    }

    fn entry(&self, input: &PodInput<'_>) -> Arc<Entry> {
        let mut pods = self.entries();
        let entry = pods
            .entry(input.desired.pod_uid.clone())
            .or_insert_with(|| {
                Arc::new(Entry {
                    namespace: input.pod.namespace().unwrap_or_default(),
                    name: input.pod.name_any(),
                    state: Arc::default(),
                    last: Mutex::default(),
                })
            });
        entry.clone()
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<PodUid, Arc<Entry>>> {
        lock(&self.pods)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LockedSandbox {
    /// Does one step if it was planned for this sandbox. There is no ledger, so no step has
    /// entries. `decided`: when the plan was made; `cause`: of the wake, if the step wakes the
    /// sandbox.
    pub(crate) fn act(&mut self, step: &Step, decided: Timestamp, cause: WakeCause) -> Outcome {
        if step.fence.pod_uid != self.pod
            || step.fence.sandbox_id.as_ref() != Some(&self.sandbox.id)
        {
            return Outcome::Stale;
        }
        match step.action {
            Action::Doze => self.doze(&step.action, decided),
            // From now on only the user who froze the sandbox lets it run.
            Action::Pause | Action::Freeze => {
                (self.state.doze, self.state.asleep_since) = (None, None);
                self.state.disarm();
                self.kata.driver.act(&self.sandbox, &step.action)
            }
            Action::Reclaim { .. } => self.reclaim(&step.action),
            Action::Resume => self.resume(&step.action, cause),
            _ => self.kata.driver.act(&self.sandbox, &step.action),
        }
    }

    /// Pauses the sandbox with an armed listener: a packet from now on causes a resume as soon as
    /// the pause is done.
    fn doze(&mut self, action: &Action, decided: Timestamp) -> Outcome {
        let Some(listener) = &self.state.listener else {
            return Outcome::Failed {
                reason: NOT_WATCHED.to_owned(),
                message: "packets would not wake the sandbox".to_owned(),
            };
        };
        let (kata, pod) = (self.kata.clone(), self.pod.clone());
        let runtime = kata.runtime.clone();
        let began = Timestamp::now();
        listener.arm(Box::new(move || {
            runtime.spawn(kata.clone().wake(pod.clone(), WakeCause::Packet));
        }));
        let outcome = self.kata.driver.act(&self.sandbox, action);
        if !matches!(outcome, Outcome::Done | Outcome::Already) {
            self.state.disarm();
            return outcome;
        }
        self.state.doze = Some(Doze { reclaimed: false });
        self.state.asleep_since = Some(decided);
        let last = self.state.listener.as_ref().map(PacketListener::last);
        let before = began.checked_sub(ANSWER).unwrap_or(Timestamp::MIN);
        if last.is_some_and(|last| last > before) {
            self.kata
                .runtime
                .spawn(self.kata.clone().wake(self.pod.clone(), WakeCause::Packet));
        }
        outcome
    }

    fn reclaim(&mut self, action: &Action) -> Outcome {
        let before = self.working_set();
        let outcome = self.kata.driver.act(&self.sandbox, action);
        let after = self.working_set();
        if matches!(outcome, Outcome::Done | Outcome::Already) {
            self.state.doze = Some(Doze { reclaimed: true });
            if let (Some(before), Some(after)) = (before, after) {
                let note = SleepNote::new(before, after, None);
                self.kata.metrics.fell_asleep(note);
                self.state.history.slept(note);
            }
        }
        outcome
    }

    /// Returns the working set of the sandbox's Pod in bytes; none if the kernel does not count it.
    pub(crate) fn working_set(&self) -> Option<u64> {
        self.kata.driver.working_set(&self.sandbox)
    }

    fn resume(&mut self, action: &Action, cause: WakeCause) -> Outcome {
        let dozed = self.state.doze.take().is_some();
        self.state.asleep_since = None;
        self.state.disarm();
        let began = Instant::now();
        let outcome = self.kata.driver.act(&self.sandbox, action);
        if dozed && outcome == Outcome::Done {
            self.kata
                .clone()
                .note_wake(&mut self.state, cause, began.elapsed());
        }
        outcome
    }
}

impl KataState {
    fn disarm(&self) {
        if let Some(listener) = &self.listener {
            listener.disarm();
        }
    }
}

/// Checks that the kubelet's probes get answers while the Pod's programs are paused. The
/// guest's kernel answers TCP probes. `Err`: the reason.
fn answers_probes(pod: &Pod) -> Result<(), String> {
    for (container, probe) in crate::reconcile::kubelet::each_probe(pod) {
        if probe.exec.is_some() || probe.http_get.is_some() || probe.grpc.is_some() {
            return Err(format!(
                "container {} has a probe that its program answers, but a Kata sandbox's programs are paused while it dozes (use a tcpSocket probe, which is answered)",
                container.name
            ));
        }
    }
    Ok(())
}

/// Returns whether Kata may run the Pod: it names a RuntimeClass. The node's default runtime
/// is never Kata.
pub(crate) fn may_be_kata(pod: &Pod) -> bool {
    let class = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.runtime_class_name.as_ref());
    class.is_some() && pod.uid().is_some()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_probes_that_the_guests_kernel_answers_let_a_sandbox_doze() {
        let pod = |probe: serde_json::Value| -> Pod {
            let containers = json!([{ "name": "a", "readinessProbe": probe }]);
            serde_json::from_value(json!({ "spec": { "containers": containers } })).expect("a Pod")
        };
        let answers = |probe| answers_probes(&pod(probe)).is_ok();
        assert!(answers(serde_json::Value::Null));
        assert!(answers(json!({ "tcpSocket": { "port": 80 } })));
        assert!(!answers(json!({ "httpGet": { "port": 80 } })));
        assert!(!answers(json!({ "grpc": { "port": 80 } })));
        assert!(!answers(json!({ "exec": { "command": ["true"] } })));
    }
}

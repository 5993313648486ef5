//! Sandboxes that Kata runs, for the driver's tasks: what is there of them, what is done with them, and who wakes them.
//!
//! They have no keeper, so the agent itself hears the packets that wake them. It hears nothing while it is not there: an agent that ends in order wakes
//! what dozes, and one that begins wakes what it finds paused, before it lets anything doze again. What is paused is known to containerd alone;
//! nothing is written down here.

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
use torpor_records::{Depth, Probes, SleepNote, WakeCause, WakeNote};
use torpor_runsc::keeper::Rules;

use crate::args::KataArgs;
use crate::policy::idle::Watched;
use crate::policy::swap::{SwapRoom, has_swap};
use crate::reconcile::node::CALL_LIMIT;
use crate::reconcile::observe::words;
use crate::report::metrics::Metrics;

mod ear;
mod report;

use ear::{Ear, Place};

/// Why there is no hibernation (Kata 4.1: docs/Limitations.md; its shims refuse Checkpoint).
const NO_IMAGES: &str = "Kata cannot snapshot a running sandbox";
/// A packet that came so short before the sandbox was paused may not have been answered.
const ANSWER: Duration = Duration::from_secs(1);

/// What this agent knows of one sandbox; locked while somebody is at work on it.
#[derive(Debug, Default)]
struct Known {
    sandbox: Option<SandboxId>,
    /// This agent has put it to sleep, and hears who wants it.
    doze: Option<Doze>,
    asleep_since: Option<Timestamp>,
    /// When somebody outside last needed it.
    awake_since: Option<Timestamp>,
    woke_at: Option<Timestamp>,
    ear: Option<Ear>,
    report: report::Noted,
}

/// What is needed to wake a sandbox.
#[derive(Debug)]
struct Entry {
    namespace: String,
    name: String,
    known: Arc<tokio::sync::Mutex<Known>>,
    seen: Mutex<Option<Sandbox>>,
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
    /// Pods whose task is to look, because a packet has woken them.
    poke: tokio::sync::mpsc::UnboundedSender<PodUid>,
}

/// A sandbox that was looked at and that nobody else works on meanwhile.
pub(crate) struct Held {
    kata: Arc<Kata>,
    pod: PodUid,
    sandbox: Sandbox,
    known: OwnedMutexGuard<Known>,
}

/// What the API says about a Pod, as far as it matters here.
pub(crate) struct Wish<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) desired: &'a Desired,
    pub(crate) rules: &'a Rules,
    pub(crate) probes: &'a Probes,
}

/// What was seen of a Kata sandbox.
pub(crate) struct Looked {
    pub(crate) observed: Observed,
    pub(crate) idle: Option<Watched>,
    /// None: somebody wakes it at this moment.
    pub(crate) held: Option<Held>,
}

impl Kata {
    /// None where no handler is named. Pods to look at anew come out of the second part.
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
        let containerd = Containerd::at(&args.kata_containerd_socket, runtime.clone(), CALL_LIMIT);
        // As kata-deploy writes them into containerd's configuration.
        let runtimes = args.kata_handlers.iter();
        let runtimes = runtimes.map(|handler| format!("io.containerd.{handler}.v2"));
        let (poke, poked) = tokio::sync::mpsc::unbounded_channel();
        let kata = Self {
            driver: Driver::new(containerd, runtimes.collect(), cgroup_root)?,
            handlers: args.kata_handlers.clone(),
            swap,
            kubelet_port,
            runtime,
            metrics,
            pods: Mutex::default(),
            poke,
        };
        Ok(Some((Arc::new(kata), poked)))
    }

    /// Looks at a Pod's sandbox; none if it is none of Kata's. Called from threads that may block.
    pub(crate) fn look(
        self: &Arc<Self>,
        wish: &Wish<'_>,
        failures: &Failures,
        idle: Option<Watched>,
        now: Timestamp,
    ) -> Option<Looked> {
        let pod = &wish.desired.pod_uid;
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
                // Of a Pod that was never one of ours nothing is said.
                self.entries().get(pod)?;
                observed.live = Live::Unknown;
                return Some(Looked {
                    observed,
                    idle,
                    held: None,
                });
            }
        };
        let entry = self.entry(wish);
        *lock(&entry.seen) = Some(seen.sandbox.clone());
        observed.sandbox = Some(seen.sandbox.id.clone());
        observed.live = seen.standing.live;
        let Ok(mut known) = entry.known.clone().try_lock_owned() else {
            observed.busy = true;
            return Some(Looked {
                observed,
                idle,
                held: None,
            });
        };
        self.settle(&mut known, &seen, now);
        observed.doze = known
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
        (observed.awake_since, observed.woke_at) = (known.awake_since, known.woke_at);
        observed.asleep_since = known.asleep_since;
        let idle = self.watch(&mut known, wish, &seen, &mut observed, idle, now);
        Some(Looked {
            observed,
            idle,
            held: Some(Held {
                kata: self.clone(),
                pod: pod.clone(),
                sandbox: seen.sandbox,
                known,
            }),
        })
    }

    /// What was known of another sandbox of the Pod is not known of this one, and of one that is found paused nobody knows who wanted it meanwhile.
    fn settle(&self, known: &mut Known, seen: &Seen, now: Timestamp) {
        if known.sandbox.as_ref() != Some(&seen.sandbox.id) {
            *known = Known {
                sandbox: Some(seen.sandbox.id.clone()),
                awake_since: (seen.standing.live == Live::Paused).then_some(now),
                ..Known::default()
            };
        }
        if seen.standing.live == Live::Running && known.doze.take().is_some() {
            // Somebody else has resumed it, and needs it.
            (known.asleep_since, known.awake_since) = (None, Some(now));
        }
    }

    /// Since when nobody has needed it, of one that may sleep. Its packets are listened to only while its processors rest: one that works is not
    /// slowed down, and its time begins when the listening does.
    fn watch(
        &self,
        known: &mut Known,
        wish: &Wish<'_>,
        seen: &Seen,
        observed: &mut Observed,
        idle: Option<Watched>,
        now: Timestamp,
    ) -> Option<Watched> {
        let desired = wish.desired;
        let may_sleep = desired.sleep.first().is_some()
            || desired.power == Power::Asleep
            || desired.pressure.may;
        if !may_sleep || matches!(observed.live, Live::None | Live::Unknown) {
            if observed.live != Live::Unknown {
                known.ear = None;
            }
            return None;
        }
        if let Err(why) = answers_probes(wish.pod) {
            observed.can_doze = Err(why);
            return None;
        }
        let mut watched = Watched::of(idle, &seen.sandbox.id, now);
        let is_new = watched.is_of(now);
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
                // Its time begins when it is ready.
                in_use: !desired.ready,
                // Also one that was woken by a plan, as at its time, is idle since then.
                last_use: known.awake_since.max(known.woke_at),
            });
        }
        let works = observed.live == Live::Running && watched.is_of(now) && !is_new;
        if works && desired.power != Power::Asleep {
            known.ear = None;
        } else if known.ear.is_none() {
            match self.listen(wish, seen, now) {
                Ok(ear) => known.ear = Some(ear),
                Err(why) => {
                    observed.can_doze = Err(format!("packets would not wake the sandbox: {why}"));
                    return Some(watched);
                }
            }
        }
        if let Some(ear) = &known.ear {
            ear.set_rules(wish.rules, wish.probes);
            watched.used(ear.last().max(ear.began()).min(now));
        }
        observed.idle_since = Some(watched.since());
        Some(watched)
    }

    fn listen(&self, wish: &Wish<'_>, seen: &Seen, now: Timestamp) -> Result<Ear, String> {
        let pid = seen.pid.ok_or("its sandbox has no process")?;
        let status = wish.pod.status.as_ref();
        let addresses = status.and_then(|status| status.pod_ips.as_ref());
        let own: Vec<IpAddr> = addresses
            .into_iter()
            .flatten()
            .filter_map(|address| address.ip.parse().ok())
            .collect();
        let place = Place {
            namespace: PathBuf::from(format!("/proc/{pid}/ns/net")),
            own,
            kubelet_port: self.kubelet_port,
        };
        Ear::open(&self.runtime, &place, now).map_err(|error| words(&error))
    }

    /// Somebody has sent it something: it runs on at once.
    async fn rouse(self: Arc<Self>, pod: PodUid, cause: WakeCause) {
        let Some(entry) = self.entries().get(&pod).cloned() else {
            return;
        };
        let mut known = entry.known.clone().lock_owned().await;
        let Some(sandbox) = lock(&entry.seen).clone() else {
            return;
        };
        if known.doze.take().is_none() || known.sandbox.as_ref() != Some(&sandbox.id) {
            return;
        }
        // From now on a look at it plans its resume, whatever becomes of this one.
        known.awake_since = Some(Timestamp::now());
        let began = Instant::now();
        let kata = self.clone();
        let resumed = tokio::task::spawn_blocking(move || kata.driver.resume(&sandbox)).await;
        match resumed {
            Ok(Ok(_)) => self.woke(&mut known, cause, began.elapsed()),
            Ok(Err(error)) => {
                tracing::error!(%pod, error = words(&error), "cannot resume the dozing sandbox; the agent tries again");
            }
            Err(error) => tracing::error!(%pod, %error, "a resume panicked"),
        }
        drop(known);
        // Nobody listens any more only when the agent ends.
        let _ = self.poke.send(pod);
    }

    fn woke(&self, known: &mut Known, cause: WakeCause, took: Duration) {
        let now = Timestamp::now();
        known.asleep_since = None;
        known.woke_at = Some(now);
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let note = WakeNote {
            cause,
            from: Depth::Dozing,
            stages_end_micros: [("resumed".to_owned(), micros)].into(),
        };
        self.metrics
            .woke(&note, took, &[("resumed".to_owned(), took)]);
        known.report.woke(now, &note, took);
    }

    /// Resumes what dozes: from now on nobody hears who wants it.
    pub(crate) async fn end(self: &Arc<Self>) {
        let pods: Vec<PodUid> = self.entries().keys().cloned().collect();
        let mut rousing = tokio::task::JoinSet::new();
        for pod in pods {
            rousing.spawn(self.clone().rouse(pod, WakeCause::Asked));
        }
        while rousing.join_next().await.is_some() {}
    }

    /// The Pod is gone.
    pub(crate) fn forget(&self, pod: &PodUid) {
        self.entries().remove(pod);
    }

    fn entry(&self, wish: &Wish<'_>) -> Arc<Entry> {
        let mut pods = self.entries();
        let entry = pods.entry(wish.desired.pod_uid.clone()).or_insert_with(|| {
            Arc::new(Entry {
                namespace: wish.pod.namespace().unwrap_or_default(),
                name: wish.pod.name_any(),
                known: Arc::default(),
                seen: Mutex::default(),
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

impl Held {
    /// Does one step, if the sandbox is that for which it was planned. There is no ledger: no step has entries. `decided`: when the plan
    /// was made; `cause`: who wants it, if this wakes it.
    pub(crate) fn act(&mut self, step: &Step, decided: Timestamp, cause: WakeCause) -> Outcome {
        if step.fence.pod_uid != self.pod
            || step.fence.sandbox_id.as_ref() != Some(&self.sandbox.id)
        {
            return Outcome::Stale;
        }
        match step.action {
            Action::Doze => self.doze(&step.action, decided),
            // From now on nobody but who froze it lets it run.
            Action::Pause | Action::Freeze => {
                (self.known.doze, self.known.asleep_since) = (None, None);
                self.known.disarm();
                self.kata.driver.act(&self.sandbox, &step.action)
            }
            Action::Reclaim { .. } => self.reclaim(&step.action),
            Action::Resume => self.resume(&step.action, cause),
            _ => self.kata.driver.act(&self.sandbox, &step.action),
        }
    }

    /// Whoever sends it something from now on has it resumed as soon as this is over.
    fn doze(&mut self, action: &Action, decided: Timestamp) -> Outcome {
        let Some(ear) = &self.known.ear else {
            return Outcome::Failed {
                reason: NOT_WATCHED.to_owned(),
                message: "packets would not wake the sandbox".to_owned(),
            };
        };
        let (kata, pod) = (self.kata.clone(), self.pod.clone());
        let runtime = kata.runtime.clone();
        let began = Timestamp::now();
        ear.arm(Box::new(move || {
            runtime.spawn(kata.clone().rouse(pod.clone(), WakeCause::Packet));
        }));
        let outcome = self.kata.driver.act(&self.sandbox, action);
        if !matches!(outcome, Outcome::Done | Outcome::Already) {
            self.known.disarm();
            return outcome;
        }
        self.known.doze = Some(Doze { reclaimed: false });
        self.known.asleep_since = Some(decided);
        let last = self.known.ear.as_ref().map(Ear::last);
        let before = began.checked_sub(ANSWER).unwrap_or(Timestamp::MIN);
        if last.is_some_and(|last| last > before) {
            self.kata
                .runtime
                .spawn(self.kata.clone().rouse(self.pod.clone(), WakeCause::Packet));
        }
        outcome
    }

    fn reclaim(&mut self, action: &Action) -> Outcome {
        let before = self.working_set();
        let outcome = self.kata.driver.act(&self.sandbox, action);
        let after = self.working_set();
        if matches!(outcome, Outcome::Done | Outcome::Already) {
            self.known.doze = Some(Doze { reclaimed: true });
            if let (Some(before), Some(after)) = (before, after) {
                let note = SleepNote::new(before, after, None);
                self.kata.metrics.fell_asleep(note);
                self.known.report.slept(note);
            }
        }
        outcome
    }

    /// Of its Pod, in bytes; none where it is not counted.
    pub(crate) fn working_set(&self) -> Option<u64> {
        self.kata.driver.working_set(&self.sandbox)
    }

    fn resume(&mut self, action: &Action, cause: WakeCause) -> Outcome {
        let dozed = self.known.doze.take().is_some();
        self.known.asleep_since = None;
        self.known.disarm();
        let began = Instant::now();
        let outcome = self.kata.driver.act(&self.sandbox, action);
        if dozed && outcome == Outcome::Done {
            self.kata
                .clone()
                .woke(&mut self.known, cause, began.elapsed());
        }
        outcome
    }
}

impl Known {
    fn disarm(&self) {
        if let Some(ear) = &self.ear {
            ear.disarm();
        }
    }
}

/// Whether the kubelet's probes are answered while the Pod's programs stand still: a TCP probe is, by the guest's kernel.
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

/// Whether the Pod names a runtime at all: the node's default one is none of Kata's.
pub(crate) fn may_be_ours(pod: &Pod) -> bool {
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

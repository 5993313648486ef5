//! No client required. Decides what to do for one Sandbox: pure, total, deterministic. The same things seen at the same time give the same plan.
//!
//! Order, as upstream: expiry, else claims → Pod → Service. Torpor's part (memory kept over a suspension) decides within the Pod's turn whether the Pod may be deleted
//! yet, and what a new one continues from.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt;
use serde_json::{Value, json};
use torpor_api::{
    PodRecord, Sandbox, annotations,
    conditions::{self, Draft},
    reasons,
};

use super::{
    dereference::{Observed, pod_name},
    pod_spec::runtime_class_name,
    validate::{Desired, Ownership, ownership, validate},
};

mod claims;
mod memory;
mod pods;
mod services;
mod wakeup;

pub(crate) use self::claims::is_name_taken;
pub(super) use self::memory::disruption;

/// Part of the work; a failure skips the rest of its area only, as upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    Claims,
    Pod,
    Service,
}

/// What must still be true of a snapshot at the apiserver when a Pod is deleted or created on its strength.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageFence {
    pub name: String,
    pub uid: String,
    /// Node on which the saved Pod ran: the agent of no other may have committed the image.
    pub node: Option<String>,
    pub use_of: ImageUse,
}

/// Why an image has to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageUse {
    /// The Pod goes, and the image is all that remains of its memory.
    OnlyCopy,
    /// A Pod continues from it, which can happen once.
    Resume,
    /// A Pod starts as a copy of it.
    Copy,
}

/// What must still be true when a snapshot is deleted.
#[derive(Clone, Debug, PartialEq)]
pub enum SnapshotFence {
    /// It is as it was when it was seen to be worthless: nobody has committed it meanwhile.
    Unchanged { resource_version: String },
    /// Its Pod lives and is not being deleted, so that the memory is not lost with the image; and
    /// nobody has begun to delete that Pod for the snapshot's sake since the snapshot was seen.
    PodAlive {
        name: String,
        uid: String,
        resource_version: String,
    },
    /// Nothing: the sandbox has gone on from it.
    Stale,
}

/// One call.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    CreateClaim(Value),
    PatchClaim {
        name: String,
        patch: Value,
    },
    /// The time at which the Sandbox was to be awake has come: it is resumed if it is suspended, and the time is forgotten.
    WakeUp {
        resume: bool,
    },
    ForgetPodName,
    RecordPodName(String),
    /// Nobody is to look for the memory of the Pod that last ran.
    ForgetLastPod,
    CreatePod {
        pod: Value,
        image: Option<ImageFence>,
    },
    PatchPod {
        name: String,
        patch: Value,
    },
    DeletePod {
        name: String,
        uid: String,
        /// Version of the Pod that is meant, where it goes because it has no memory: it may have
        /// been restored since it was seen.
        resource_version: Option<String>,
        image: Option<ImageFence>,
    },
    CreateService(Value),
    PatchService {
        name: String,
        patch: Value,
        adopts: bool,
    },
    DeleteService {
        name: String,
        uid: String,
    },
    CreateSnapshot(Value),
    DeleteSnapshot {
        name: String,
        uid: String,
        fence: SnapshotFence,
    },
    /// Writes Consumed=True: the sandbox goes on without this image.
    SupersedeSnapshot {
        name: String,
        message: String,
    },
    DeleteSandbox {
        uid: String,
    },
}

/// What becomes of the record of the Pod that last ran for the Sandbox.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum LastPod {
    #[default]
    Keep,
    Write(PodRecord),
    /// Somebody wants the Pod, and its memory with it, gone.
    Forget,
}

/// One call and the area that it belongs to.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub area: Area,
    pub action: Action,
}

/// What happens to a condition of Torpor's.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Shown {
    #[default]
    Remove,
    Keep,
    Set(Draft),
}

/// What the status says about memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryOutlook {
    pub hibernated: Shown,
    pub restored: Shown,
    /// Overrides upstream's Suspended condition (strategy Freeze).
    pub suspended: Option<Draft>,
    /// The Pod has ended, and its memory has not: the sandbox goes on from it.
    pub keeps_ended: bool,
    /// Memory that is given up although the Sandbox does not start cold: it starts as a copy.
    pub given_up: Option<String>,
}

/// The Service as the status shows it.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ServiceOutlook {
    /// Nothing was looked at; the status keeps what it says.
    #[default]
    Untouched,
    None,
    /// There is none yet; it is made in this pass.
    Wanted,
    Exists(Arc<Service>),
}

/// What to do, and what to say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// Why something is not done, in upstream's words; at most one per area.
    pub refusals: Vec<(Area, String)>,
    /// More than one Pod is ours.
    pub several_pods: Option<usize>,
    /// The Pod that the status describes, ours or not.
    pub pod: Option<Arc<Pod>>,
    pub service: ServiceOutlook,
    pub memory: MemoryOutlook,
    pub phase: Phase,
    /// Written when all else is done: nobody waits for it.
    pub last_pod: LastPod,
    /// When to look again though nothing has changed.
    pub requeue: Option<Duration>,
}

/// Which part of a Sandbox's life the plan is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    #[default]
    Active,
    /// Expired, and the status does not say so yet.
    Expiring,
    /// Expired and marked: what belongs to the Sandbox goes.
    Expired,
    /// Being deleted: garbage collection does everything.
    Deleted,
}

/// Upstream asks again at once after it has marked a Sandbox expired.
pub const AT_ONCE: Duration = Duration::from_millis(1);
/// Upstream never waits less than this for an expiry.
const EXPIRY_FLOOR: Duration = Duration::from_secs(2);

impl Plan {
    fn step(&mut self, area: Area, action: Action) {
        self.steps.push(Step { area, action });
    }

    /// Looks again after this time at the latest, though nothing has changed.
    fn look_again(&mut self, wait: Duration) {
        self.requeue = Some(self.requeue.map_or(wait, |sooner| sooner.min(wait)));
    }

    /// Whether the Sandbox is suspended without an image: no Pod, or one that goes without one.
    pub fn loses_memory(&self) -> bool {
        let goes = |step: &Step| matches!(step.action, Action::DeletePod { image: None, .. });
        self.pod.is_none() || self.steps.iter().any(goes)
    }

    /// Whether the Pod is being evicted, or was ended by its kubelet.
    pub fn is_evicted(&self) -> bool {
        self.pod.as_deref().is_some_and(memory::is_evicted)
    }

    fn refuse(&mut self, area: Area, why: String) {
        self.refusals.push((area, why));
    }
}

/// Decides.
pub fn plan(observed: &Observed, now: Timestamp) -> Plan {
    let desired = validate(observed);
    if desired.sandbox.metadata.deletion_timestamp.is_some() {
        return Plan {
            phase: Phase::Deleted,
            ..Plan::default()
        };
    }
    let mut plan = Plan::default();
    match expiry(desired.sandbox, now) {
        Expiry::Past if marked_expired(desired.sandbox) => {
            plan.phase = Phase::Expired;
            expire(&mut plan, &desired, observed);
        }
        Expiry::Past => {
            plan.phase = Phase::Expiring;
            plan.requeue = Some(AT_ONCE);
        }
        Expiry::In(wait) => {
            plan.requeue = Some(wait);
            plan_active(&mut plan, &desired, observed, now);
        }
        Expiry::Never => plan_active(&mut plan, &desired, observed, now),
    }
    plan
}

fn plan_active(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed, now: Timestamp) {
    wakeup::plan(plan, desired, now);
    claims::plan(plan, desired, observed);
    pods::plan(plan, desired, observed, now);
    if plan.several_pods.is_none() {
        services::plan(plan, desired, observed);
    }
}

/// Whether a Sandbox has expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    Never,
    In(Duration),
    Past,
}

/// When a Sandbox expires, as seen at `now`. The wait has upstream's floor of two seconds.
pub fn expiry(sandbox: &Sandbox, now: Timestamp) -> Expiry {
    let Some(time) = &sandbox.spec.shutdown_time else {
        return Expiry::Never;
    };
    match Duration::try_from(time.0.duration_since(now)) {
        Ok(left) if !left.is_zero() => Expiry::In(left.max(EXPIRY_FLOOR)),
        // Negative: it is over.
        _ => Expiry::Past,
    }
}

/// Whether the status says already that the Sandbox has expired.
pub fn marked_expired(sandbox: &Sandbox) -> bool {
    let conditions = sandbox
        .status
        .as_ref()
        .map_or(&[][..], |status| &status.conditions);
    conditions::find(conditions, conditions::READY)
        .is_some_and(|ready| ready.reason == reasons::sandbox::SANDBOX_EXPIRED)
}

/// Deletes what belongs to an expired Sandbox, and with policy Delete the Sandbox itself. Its snapshots stay as long as it does.
fn expire(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed) {
    let sandbox = desired.sandbox;
    if let Some(pod) = observed.pods.get(&pod_name(sandbox))
        && ownership(&**pod, sandbox) == Ownership::Ours
        && pod.metadata.deletion_timestamp.is_none()
    {
        plan.step(Area::Pod, delete_pod(pod, None));
        memory::forget_record(plan, desired);
    }
    if let Some(service) = &observed.service
        && ownership(&**service, sandbox) == Ownership::Ours
    {
        let (name, uid) = (service.name_any(), service.uid().unwrap_or_default());
        plan.step(Area::Service, Action::DeleteService { name, uid });
    }
    if sandbox.spec.shutdown_policy == Some(torpor_api::ShutdownPolicy::Delete) {
        plan.step(
            Area::Claims,
            Action::DeleteSandbox {
                uid: desired.uid.clone(),
            },
        );
    }
}

fn delete_pod(pod: &Pod, image: Option<ImageFence>) -> Action {
    Action::DeletePod {
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        resource_version: None,
        image,
    }
}

/// Deletes a Pod that has no memory worth keeping, as long as it is as it was seen.
fn delete_as_seen(pod: &Pod) -> Action {
    Action::DeletePod {
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        resource_version: pod.resource_version(),
        image: None,
    }
}

/// Whether the absence of the Pod in the caches has to be made certain by asking. In state Running a Pod that is there after all is found when it is created anew.
pub fn asks_for_the_named_pod(observed: &Observed) -> bool {
    let sandbox = &*observed.sandbox;
    if sandbox.metadata.deletion_timestamp.is_some() {
        return false;
    }
    let suspended = sandbox.spec.operating_mode == torpor_api::OperatingMode::Suspended;
    let named = sandbox.annotations().get(annotations::POD_NAME);
    // A member of a pool has the name from the beginning, before it has a Pod.
    let new = sandbox.status.is_none() && named == Some(&sandbox.name_any());
    !has_pod(observed) && (suspended || (named.is_some() && !new) || marked_expired(sandbox))
}

/// Whether a Pod that is seen is the Sandbox' own.
fn has_pod(observed: &Observed) -> bool {
    let owner = |pod: &Arc<Pod>| ownership(&**pod, &observed.sandbox);
    observed
        .pods
        .values()
        .any(|pod| owner(pod) == Ownership::Ours)
}

/// Whether it has to be made certain by asking that there is no image to go on from, where there may have been one: a Pod that is made without it costs the memory that is in it.
pub fn asks_for_snapshots(observed: &Observed) -> bool {
    let sandbox = &*observed.sandbox;
    let status = sandbox.status.as_ref();
    let said = |type_| conditions::find(&status?.conditions, type_);
    let may_have_slept = said(conditions::SUSPENDED).is_some_and(|said| said.status == "True")
        || said(conditions::HIBERNATED).is_some();
    may_have_slept
        && !observed.snapshots_are_certain
        && sandbox.metadata.deletion_timestamp.is_none()
        && sandbox.spec.operating_mode == torpor_api::OperatingMode::Running
        && runtime_class_name(&sandbox.spec.pod_template.spec).is_some()
        && !has_pod(observed)
        && !memory::has_image(&validate(observed), observed)
}

/// Whether it has to be made certain what the Sandbox itself says before it starts without memory:
/// a process whose watch is behind knows neither that it was suspended meanwhile nor that it slept.
pub fn asks_for_sandbox(observed: &Observed) -> bool {
    let sandbox = &*observed.sandbox;
    // A new Sandbox has no Pod to remember.
    let had_a_pod =
        sandbox.status.is_some() && sandbox.annotations().contains_key(annotations::POD_NAME);
    had_a_pod
        && !observed.sandbox_is_certain
        && sandbox.metadata.deletion_timestamp.is_none()
        && sandbox.spec.operating_mode == torpor_api::OperatingMode::Running
        && runtime_class_name(&sandbox.spec.pod_template.spec).is_some()
        && !has_pod(observed)
        && !memory::has_image(&validate(observed), observed)
}

/// Nodes of images of which nothing was heard for long, or ever: whether the cluster still has them is only found by asking. Their SandboxNodes stay when they go. Nobody asks for
/// them while there is a Pod, which has its own node, nor twice for one that is gone.
pub fn asks_for_nodes(observed: &Observed, now: Timestamp) -> Vec<String> {
    if has_pod(observed) {
        return Vec::new();
    }
    let named = super::dereference::nodes_of_memory(observed);
    let is_silent = |name: &str| {
        let node = observed.nodes.get(name);
        node.is_none_or(|node| node.is_silent(now))
    };
    let silent = named.into_iter().filter(|name| is_silent(name));
    let asked = &observed.gone_nodes;
    silent.filter(|name| !asked.contains(name)).collect()
}

/// Merge patch that takes the Pod name off a Sandbox, or puts it on.
pub fn pod_name_patch(name: Option<&str>) -> Value {
    json!({"metadata": {"annotations": {annotations::POD_NAME: name}}})
}

#[cfg(test)]
mod tests;

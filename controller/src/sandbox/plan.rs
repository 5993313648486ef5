//! No client required. Plans the next steps for one Sandbox: pure, total, deterministic. The same
//! observations at the same time give the same plan.
//!
//! The order is upstream's: expiry, else claims → Pod → Service. Torpor's part (memory kept
//! over a suspension) belongs to the step of the Pod. It decides whether the Pod may be deleted
//! yet, and what a new one continues from.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

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
    validate::{Desired, Ownership, ownership, validate},
};

mod claims;
mod memory;
mod pods;
mod services;
mod wakeup;

pub(crate) use self::claims::is_name_taken;
pub(super) use self::memory::{disruption, needs_cluster, node_of_taker};

/// Part of the work. A failure skips only the rest of its area, as upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    Claims,
    Pod,
    Service,
}

/// Conditions that a snapshot must meet at the apiserver when a Pod is deleted or created because
/// of it.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageFence {
    pub name: String,
    pub uid: String,
    /// Node on which the saved Pod ran. Only its agent may have committed the image.
    pub node: Option<String>,
    pub use_of: ImageUse,
}

/// Purpose for which an image is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageUse {
    /// The Pod is deleted, and only the image keeps its memory.
    OnlyCopy,
    /// A Pod continues from the image, which can happen once.
    Resume,
    /// A Pod starts as a copy of the image.
    Copy,
    /// A Pod starts as a copy of the image, which must not be older than its sandbox.
    Backup,
}

/// Conditions for the deletion of a snapshot.
#[derive(Clone, Debug, PartialEq)]
pub enum SnapshotFence {
    /// The useless snapshot is unchanged: no agent has committed it since it was observed.
    Unchanged { resource_version: String },
    /// The snapshot's Pod exists and is not being deleted, so the memory is not lost with the
    /// image. No pass has begun to delete that Pod because of the snapshot since it was observed.
    PodAlive {
        name: String,
        uid: String,
        resource_version: String,
    },
    /// No condition: the sandbox has continued from the image.
    Stale,
}

/// One call to the apiserver.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    CreateClaim(Value),
    PatchClaim {
        name: String,
        patch: Value,
    },
    /// Resumes a suspended Sandbox whose wake-up time has come, and removes the time.
    WakeUp {
        resume: bool,
    },
    ForgetPodName,
    RecordPodName(String),
    /// Removes the record of the last Pod, so that its memory is not looked for.
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
        /// Version of the Pod, where it is deleted for lack of memory. It may have been restored
        /// since it was observed.
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
    /// Writes Consumed=True: the sandbox continues without this image.
    SupersedeSnapshot {
        name: String,
        message: String,
    },
    /// Changes the metadata of a snapshot. The patch names the version that it was made from.
    PatchSnapshot {
        name: String,
        patch: Value,
    },
    DeleteSandbox {
        uid: String,
    },
    /// Deletes a Sandbox that is in its archive, if nobody has changed it since it was observed.
    DeleteArchived {
        uid: String,
        resource_version: String,
        archive: ImageFence,
        /// The image on its node, which goes with the Sandbox.
        image: ImageFence,
    },
    /// Removes the request to archive the Sandbox at once.
    ForgetArchive,
}

/// Change of the record of the Pod that last ran for the Sandbox.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum LastPod {
    #[default]
    Keep,
    Write(PodRecord),
    /// The Pod is deleted on purpose, and its memory with it.
    Forget,
}

/// One action and its area.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub area: Area,
    pub action: Action,
}

/// Change of one of Torpor's conditions.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ConditionChange {
    #[default]
    Remove,
    Keep,
    Set(Draft),
}

/// Torpor's part of the status, about memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryOutlook {
    pub hibernated: ConditionChange,
    pub restored: ConditionChange,
    /// Arrival of the claim in the sandbox.
    pub bound: ConditionChange,
    /// Archive of a suspended Sandbox.
    pub archived: ConditionChange,
    /// Overrides upstream's Suspended condition (strategy Freeze).
    pub suspended: Option<Draft>,
    /// True if the Pod has ended but its memory remains, from which the sandbox continues.
    pub keeps_ended: bool,
    /// Reason why memory was given up by a Sandbox that starts as a copy instead of cold.
    pub given_up: Option<String>,
}

/// Service as the status shows it.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ServiceOutlook {
    /// The Service was not examined; the status stays unchanged.
    #[default]
    Untouched,
    None,
    /// There is no Service yet; this pass creates it.
    Wanted,
    Exists(Arc<Service>),
}

/// Steps of a pass, and the input for the status.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// Reasons why a step is not taken, in upstream's words; at most one for each area.
    pub refusals: Vec<(Area, String)>,
    /// Number of Pods that the Sandbox controls, if more than one.
    pub several_pods: Option<usize>,
    /// Pod that the status describes, controlled by the Sandbox or not.
    pub pod: Option<Arc<Pod>>,
    pub service: ServiceOutlook,
    pub memory: MemoryOutlook,
    pub phase: Phase,
    /// Change of the last Pod's record, written at the end of the pass.
    pub last_pod: LastPod,
    /// Time until the next pass that is needed without a change.
    pub requeue: Option<Duration>,
}

/// Phase of a Sandbox's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    #[default]
    Active,
    /// Expired, but not yet in the status.
    Expiring,
    /// Expired in the status: the objects of the Sandbox are deleted.
    Expired,
    /// Being deleted: garbage collection does the rest.
    Deleted,
}

/// Delay of a pass at once. Upstream requeues so after it has marked a Sandbox expired.
pub const AT_ONCE: Duration = Duration::from_millis(1);
/// Shortest wait for an expiry, as upstream.
const EXPIRY_FLOOR: Duration = Duration::from_secs(2);

impl Plan {
    fn step(&mut self, area: Area, action: Action) {
        self.steps.push(Step { area, action });
    }

    /// Asks for the next pass after this time at the latest.
    fn requeue_after(&mut self, wait: Duration) {
        self.requeue = Some(self.requeue.map_or(wait, |sooner| sooner.min(wait)));
    }

    /// Reports whether the Sandbox is suspended without an image: it has no Pod, or one that is
    /// deleted without an image.
    pub fn loses_memory(&self) -> bool {
        let deletes = |step: &Step| matches!(step.action, Action::DeletePod { image: None, .. });
        self.pod.is_none() || self.steps.iter().any(deletes)
    }

    /// Reports whether the Pod is being evicted, or was ended by its kubelet.
    pub fn is_evicted(&self) -> bool {
        self.pod.as_deref().is_some_and(memory::is_evicted)
    }

    fn refuse(&mut self, area: Area, why: String) {
        self.refusals.push((area, why));
    }
}

/// Plans one pass.
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

/// Expiry of a Sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    Never,
    In(Duration),
    Past,
}

/// Returns when a Sandbox expires, as of `now`. The wait has upstream's minimum of two seconds.
pub fn expiry(sandbox: &Sandbox, now: Timestamp) -> Expiry {
    let Some(time) = &sandbox.spec.shutdown_time else {
        return Expiry::Never;
    };
    match Duration::try_from(time.0.duration_since(now)) {
        Ok(left) if !left.is_zero() => Expiry::In(left.max(EXPIRY_FLOOR)),
        // A negative duration means that the time has passed.
        _ => Expiry::Past,
    }
}

/// Reports whether the status marks the Sandbox as expired.
pub fn marked_expired(sandbox: &Sandbox) -> bool {
    let conditions = sandbox
        .status
        .as_ref()
        .map_or(&[][..], |status| &status.conditions);
    conditions::find(conditions, conditions::READY)
        .is_some_and(|ready| ready.reason == reasons::sandbox::SANDBOX_EXPIRED)
}

/// Deletes the objects of an expired Sandbox, and with policy Delete the Sandbox itself.
///
/// Its snapshots stay as long as the Sandbox.
fn expire(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed) {
    let sandbox = desired.sandbox;
    if let Some(pod) = observed.pods.get(&pod_name(sandbox))
        && ownership(&**pod, sandbox) == Ownership::Ours
        && pod.metadata.deletion_timestamp.is_none()
    {
        plan.step(Area::Pod, delete_pod(pod, None));
        memory::forget_record(plan, desired);
    }
    memory::discard_backups(plan, desired, observed);
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

/// Deletes a Pod without memory worth keeping, if it is unchanged since it was observed.
fn delete_as_seen(pod: &Pod) -> Action {
    Action::DeletePod {
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        resource_version: pod.resource_version(),
        image: None,
    }
}

/// Reports whether the apiserver must confirm the absence of the Pod.
///
/// For a Sandbox in state Running the creation finds a Pod that exists after all.
pub fn must_confirm_pod(observed: &Observed) -> bool {
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

/// Reports whether an observed Pod belongs to the Sandbox.
fn has_pod(observed: &Observed) -> bool {
    let owner = |pod: &Arc<Pod>| ownership(&**pod, &observed.sandbox);
    observed
        .pods
        .values()
        .any(|pod| owner(pod) == Ownership::Ours)
}

/// Reports whether the apiserver must confirm that there is no image to continue from.
///
/// It must where the sandbox may have slept: a Pod created without an existing image loses that
/// memory.
pub fn must_confirm_snapshots(observed: &Observed) -> bool {
    let sandbox = &*observed.sandbox;
    let status = sandbox.status.as_ref();
    let condition = |type_| conditions::find(&status?.conditions, type_);
    let may_have_slept = condition(conditions::SUSPENDED)
        .is_some_and(|condition| condition.status == "True")
        || condition(conditions::HIBERNATED).is_some();
    may_have_slept && !observed.snapshots_are_certain && starts_without_memory(observed)
}

/// Reports whether the Sandbox must be read from the apiserver before it starts without memory.
///
/// A process with a late watch does not know that the Sandbox was suspended meanwhile or slept.
pub fn must_confirm_sandbox(observed: &Observed) -> bool {
    let sandbox = &*observed.sandbox;
    // A new Sandbox had no Pod.
    let had_a_pod =
        sandbox.status.is_some() && sandbox.annotations().contains_key(annotations::POD_NAME);
    had_a_pod && !observed.sandbox_is_certain && starts_without_memory(observed)
}

/// Reports whether the next Pod of a Sandbox that an agent could have saved would have no memory.
fn starts_without_memory(observed: &Observed) -> bool {
    let sandbox = &*observed.sandbox;
    let class = sandbox.spec.pod_template.spec.runtime_class_name();
    sandbox.metadata.deletion_timestamp.is_none()
        && sandbox.spec.operating_mode == torpor_api::OperatingMode::Running
        && class.is_some()
        && !has_pod(observed)
        && !memory::has_image(&validate(observed), observed)
}

/// Returns the nodes of images whose existence the apiserver must confirm.
///
/// These are nodes without a recent report. SandboxNodes of removed nodes stay, so only a request
/// shows whether a node exists. A Sandbox with a Pod needs no answer, and a node that is gone is
/// not asked about again.
pub fn nodes_to_confirm(observed: &Observed, now: Timestamp) -> Vec<String> {
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

/// Returns the nodes of images that are to be uploaded and are not yet: if such a node takes no
/// Pods, the Sandbox continues elsewhere.
pub fn nodes_to_examine(observed: &Observed) -> Vec<String> {
    let resumes = observed.sandbox.spec.operating_mode == torpor_api::OperatingMode::Running;
    if !resumes || has_pod(observed) {
        return Vec::new();
    }
    let uploading = observed.snapshots.values().filter(|snapshot| {
        snapshot.is_committed() && !snapshot.is_uploaded() && snapshot.upload_reason().is_some()
    });
    let nodes = uploading.filter_map(|snapshot| snapshot.status.as_ref()?.node_name.clone());
    nodes.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Returns the nodes that may have claimed an image for a Pod that is gone.
pub fn nodes_of_takers(observed: &Observed) -> BTreeSet<String> {
    if has_pod(observed) {
        return BTreeSet::new();
    }
    let snapshots = observed.snapshots.values();
    snapshots
        .filter_map(|snapshot| memory::node_of_taker(snapshot))
        .collect()
}

/// Returns the merge patch that sets or removes the Pod name of a Sandbox.
pub fn pod_name_patch(name: Option<&str>) -> Value {
    json!({"metadata": {"annotations": {annotations::POD_NAME: name}}})
}

#[cfg(test)]
mod tests;

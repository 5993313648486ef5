//! Plans Torpor's part: memory that outlives the Pod.
//!
//! Suspend with strategy Hibernate: the controller creates a SandboxSnapshot for exactly this
//! Pod → the agent saves and writes Committed=True → the controller deletes the Pod. Resume:
//! the controller creates a Pod on the node of the image, once per image.
//!
//! Three rules apply. Each has a fence that is checked at the apiserver when the step is taken.
//!
//! - A Pod is deleted for its image only while that image is committed and not consumed.
//! - An image is deleted only when its Pod lives, or the sandbox has continued from the image, or
//!   no agent committed it.
//! - A Pod continues only from an image that is committed and not consumed.

use std::{cmp::Reverse, sync::Arc};

use jiff::Timestamp;
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Condition};
use kube::ResourceExt;
use serde_json::{Value, json};
use torpor_api::{
    PodRecord, Sandbox, SandboxSnapshot, SnapshotReason,
    conditions::{self, Draft, Status},
    node::RuntimeCapabilities,
    reasons::hibernated,
    retention::Retention,
    snapshot::PROVISIONERS,
};

use super::{Action, ConditionChange, ImageFence, ImageUse, Plan, SnapshotFence};
use crate::{
    owners::owner_reference,
    sandbox::{
        dereference::Observed,
        validate::{Desired, Ownership, ownership},
    },
    saved_pod,
};

mod archive;
mod awake;
mod backup;
mod elsewhere;
mod evicted;
mod location;
mod origin;
mod record;
mod resume;
mod suspend;
mod unclaimed;

pub(in crate::sandbox) use self::archive::needs_cluster;
pub(in crate::sandbox) use self::elsewhere::node_of_taker;
pub(in crate::sandbox) use self::evicted::{disruption, is_evicted};
use self::{
    archive::Kept,
    location::{LOOK_FOR_NODE, hibernated_kept, image_missing},
    origin::node_of_image,
    unclaimed::LeftMemory,
};
pub(super) use self::{
    awake::{annotations_for_pod, awake},
    backup::discard as discard_backups,
    record::{forget_record, record},
    resume::start,
    suspend::suspend,
};

// --- observed state ---

/// Returns the suspend snapshots of this Sandbox, not of an earlier one of its name, by name.
fn own_snapshots<'a>(
    desired: &'a Desired<'_>,
    observed: &'a Observed,
) -> impl Iterator<Item = &'a Arc<SandboxSnapshot>> {
    owned_snapshots(desired, observed, SnapshotReason::Suspend)
}

/// Returns the snapshots of this Sandbox that it owns and that were made for this reason, by name.
fn owned_snapshots<'a>(
    desired: &'a Desired<'_>,
    observed: &'a Observed,
    reason: SnapshotReason,
) -> impl Iterator<Item = &'a Arc<SandboxSnapshot>> {
    observed.snapshots.values().filter(move |snapshot| {
        snapshot.spec.reason == reason
            && snapshot.spec.sandbox_name == desired.name
            && ownership(&***snapshot, desired.sandbox) == Ownership::Ours
    })
}

fn snapshot_of_pod<'a>(
    desired: &'a Desired<'_>,
    observed: &'a Observed,
    pod_uid: &str,
) -> Option<&'a Arc<SandboxSnapshot>> {
    own_snapshots(desired, observed)
        .find(|snapshot| snapshot.spec.pod_uid.as_deref() == Some(pod_uid))
}

fn is_deleting(snapshot: &SandboxSnapshot) -> bool {
    snapshot.metadata.deletion_timestamp.is_some()
}

/// Reports whether the sandbox's memory is in its image, even if the image is missing at the
/// moment.
fn is_resumable(snapshot: &SandboxSnapshot) -> bool {
    (snapshot.is_committed() || snapshot.is_missing())
        && !snapshot.is_consumed()
        && !is_deleting(snapshot)
}

/// Reports whether the snapshot's save has not completed, so that no Pod can continue from it.
fn is_incomplete(snapshot: &SandboxSnapshot) -> bool {
    !snapshot.is_committed() && !snapshot.is_missing() && !is_deleting(snapshot)
}

fn newest_resumable<'a>(
    desired: &'a Desired<'_>,
    observed: &'a Observed,
) -> Option<&'a Arc<SandboxSnapshot>> {
    newest(own_snapshots(desired, observed).filter(|snapshot| is_resumable(snapshot)))
}

/// Returns the snapshot whose image was committed last.
fn newest<'a>(
    snapshots: impl Iterator<Item = &'a Arc<SandboxSnapshot>>,
) -> Option<&'a Arc<SandboxSnapshot>> {
    snapshots.min_by_key(|snapshot| (Reverse(snapshot.committed_at()), snapshot.name_any()))
}

/// Reports whether there is an image that the sandbox can continue from.
pub(super) fn has_image(desired: &Desired<'_>, observed: &Observed) -> bool {
    newest_resumable(desired, observed).is_some()
}

fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("")
}

fn is_terminating(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec
        .as_ref()?
        .node_name
        .as_deref()
        .filter(|name| !name.is_empty())
}

/// Returns the node's capabilities for this Pod's runtime, and the runtime's name for messages.
fn capabilities(observed: &Observed, pod: &Pod) -> (RuntimeCapabilities, String) {
    let class = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.runtime_class_name.clone());
    let handler = class.and_then(|class| observed.handlers.get(&class));
    let node = node_of(pod).and_then(|name| observed.nodes.get(name));
    let can = match (handler, node) {
        (Some(handler), Some(node)) => node.capabilities(handler),
        _ => RuntimeCapabilities::default(),
    };
    let name = handler.map_or_else(
        || "The default runtime".to_owned(),
        |handler| format!("Runtime {handler}"),
    );
    (can, name)
}

fn pod_condition(pod: &Pod, pod_type: &str, shown_as: &'static str) -> Option<Draft> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let condition = conditions
        .iter()
        .find(|condition| condition.type_ == pod_type)?;
    let reason = condition.reason.clone().filter(|reason| !reason.is_empty());
    Some(Draft {
        type_: shown_as,
        status: condition.status.clone().into(),
        reason: reason.unwrap_or_else(|| "Unknown".to_owned()).into(),
        message: condition.message.clone().unwrap_or_default().into(),
    })
}

fn restored_condition(pod: &Pod) -> Option<Draft> {
    pod_condition(pod, conditions::POD_RESTORED, conditions::RESTORED)
}

/// Reports whether the sandbox's memory is in an image that its Pod holds, or is being restored
/// from it.
///
/// The node could save it then, whatever capabilities it reports now. An agent reports none when
/// its SandboxNode was deleted or when it could not ask the runtime at its start.
fn sleeps_in_place(pod: &Pod) -> bool {
    let condition = pod_condition(pod, conditions::POD_HIBERNATED, conditions::HIBERNATED);
    condition.is_some_and(|condition| {
        condition.status == "True" || condition.reason == hibernated::WAKING
    })
}

fn previous_condition<'a>(sandbox: &'a Sandbox, type_: &str) -> Option<&'a Condition> {
    conditions::find(&sandbox.status.as_ref()?.conditions, type_)
}

fn condition_false(
    type_: &'static str,
    reason: &'static str,
    message: impl Into<String>,
) -> ConditionChange {
    ConditionChange::Set(Draft::new(type_, Status::False, reason, message.into()))
}

// --- conditions ---

/// Sets Hibernated, unless an invalid annotation has to be shown instead.
fn show_hibernated(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    change: ConditionChange,
) {
    let problems: Vec<String> = desired
        .settings
        .problems
        .iter()
        .map(ToString::to_string)
        .collect();
    plan.memory.hibernated = if !problems.is_empty() {
        condition_false(
            conditions::HIBERNATED,
            hibernated::INVALID_ANNOTATION,
            problems.join("; "),
        )
    } else if let Some(message) = class_problem(desired, observed) {
        condition_false(
            conditions::HIBERNATED,
            hibernated::SNAPSHOT_CLASS_NOT_SUPPORTED,
            message,
        )
    } else {
        change
    };
}

fn class_problem(desired: &Desired<'_>, observed: &Observed) -> Option<String> {
    let name = desired.settings.snapshot_class.as_ref()?;
    match &observed.snapshot_class {
        None => Some(format!(
            "SnapshotClass {name:?} does not exist; images are kept on the node that makes them"
        )),
        Some(class) if !PROVISIONERS.contains(&&*class.spec.provisioner) => Some(format!(
            "SnapshotClass {name:?} has provisioner {:?}, which is not supported (known: {}); images are kept on the node that makes them",
            class.spec.provisioner,
            PROVISIONERS.join(", ")
        )),
        Some(class) => {
            let problems = Retention::of(&class.spec).problems;
            let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
            let problems = problems.join("; ");
            (!problems.is_empty()).then(|| format!("SnapshotClass {name:?}: {problems}"))
        }
    }
}

const NOT_KEPT: &str = "memory was not kept";

/// Plans for a suspended Sandbox whose Pod is gone.
pub(super) fn asleep(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed, now: Timestamp) {
    if saved_pod::last_pod(desired.sandbox).is_none() {
        backup::discard(plan, desired, observed);
    }
    let change = if let Some(snapshot) = newest_resumable(desired, observed) {
        archive::plan(plan, desired, observed, &Kept::In(snapshot), now);
        match snapshot.is_missing() {
            true => {
                plan.requeue_after(LOOK_FOR_NODE);
                hibernated_missing(observed, snapshot)
            }
            false => hibernated_kept(observed, snapshot),
        }
    } else if let Some((backup, _)) = backup::of_lost_pod(desired, observed) {
        archive::plan(plan, desired, observed, &Kept::Awaited, now);
        backup::kept(backup)
    } else {
        let left = unclaimed::settle(plan, desired, observed, now);
        let is_saving = own_snapshots(desired, observed).any(|snapshot| is_incomplete(snapshot));
        let kept = match &left {
            LeftMemory::Awaited(_) => Kept::Awaited,
            _ if is_saving => Kept::Awaited,
            LeftMemory::GivenUp(_) | LeftMemory::Nothing => Kept::Nothing,
        };
        archive::plan(plan, desired, observed, &kept, now);
        without_image(plan, desired, observed, left)
    };
    show_hibernated(plan, desired, observed, change);
}

/// Returns Hibernated for a suspended Sandbox that has neither Pod nor image.
fn without_image(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    left: LeftMemory,
) -> ConditionChange {
    let is_incomplete = own_snapshots(desired, observed).any(|snapshot| is_incomplete(snapshot));
    match left {
        LeftMemory::Awaited(change) => change,
        LeftMemory::GivenUp(_) if let Some(backup) = backup::of_last_pod(desired, observed) => {
            backup::kept(backup)
        }
        LeftMemory::GivenUp(why) if !is_incomplete => {
            unclaimed::forget(plan, desired);
            condition_false(conditions::HIBERNATED, hibernated::SAVE_FAILED, why)
        }
        _ if is_incomplete => condition_false(
            conditions::HIBERNATED,
            hibernated::SAVE_FAILED,
            format!("The Pod ended before its memory was saved; {NOT_KEPT}"),
        ),
        // The reason why memory was not kept cannot be observed once the Pod is gone.
        _ => match previous_condition(desired.sandbox, conditions::HIBERNATED) {
            Some(before)
                if before.reason == hibernated::RUNTIME_NOT_CAPABLE
                    || before.reason == hibernated::SAVE_FAILED =>
            {
                ConditionChange::Keep
            }
            _ => ConditionChange::Remove,
        },
    }
}

/// Returns Hibernated for memory that is being saved.
fn hibernated_saving(message: impl Into<String>) -> ConditionChange {
    condition_false(conditions::HIBERNATED, hibernated::SAVING, message)
}

/// Returns Hibernated while an earlier snapshot with the needed name is being deleted.
fn hibernated_waiting(snapshot: &SandboxSnapshot) -> ConditionChange {
    hibernated_saving(format!(
        "Waiting for the earlier SandboxSnapshot {:?} to be removed",
        snapshot.name_any()
    ))
}

/// Returns Hibernated for saved memory whose image is missing.
fn hibernated_missing(observed: &Observed, snapshot: &SandboxSnapshot) -> ConditionChange {
    let message = image_missing(observed, snapshot);
    condition_false(conditions::HIBERNATED, hibernated::IMAGE_MISSING, message)
}

fn fence(observed: &Observed, snapshot: &SandboxSnapshot, use_of: ImageUse) -> ImageFence {
    ImageFence {
        name: snapshot.name_any(),
        uid: snapshot.uid().unwrap_or_default(),
        node: node_of_image(observed, snapshot).cloned(),
        use_of,
    }
}

/// Returns a snapshot of a Pod to create. `record`: of that Pod, if it is known.
fn snapshot_to_make(
    desired: &Desired<'_>,
    name: &str,
    (uid, node): (&str, &str),
    reason: SnapshotReason,
    record: Option<&PodRecord>,
) -> Value {
    let spec = json!({
        "sandboxName": desired.name,
        "podUID": uid,
        "nodeName": node,
        "reason": reason,
    });
    let mut snapshot = new_snapshot(desired, name, spec);
    if let Some(class) = &desired.settings.snapshot_class {
        snapshot["spec"]["snapshotClassName"] = class.as_str().into();
    }
    if let Some(record) = record {
        snapshot["metadata"]["annotations"] = saved_pod::annotation(record);
    }
    snapshot
}

/// Returns a snapshot to create, which the Sandbox owns.
fn new_snapshot(desired: &Desired<'_>, name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "torpor.dev/v1alpha1",
        "kind": "SandboxSnapshot",
        "metadata": {
            "name": name,
            "namespace": desired.namespace,
            "ownerReferences": [owner_reference(desired.sandbox)],
        },
        "spec": spec,
    })
}

fn delete_snapshot(snapshot: &SandboxSnapshot, fence: SnapshotFence) -> Action {
    let (name, uid) = (snapshot.name_any(), snapshot.uid().unwrap_or_default());
    Action::DeleteSnapshot { name, uid, fence }
}

//! No client required. Plans the next step for a trigger or a PodSnapshot. The plan depends only on
//! the given objects.

use std::{cmp::Reverse, sync::Arc};

use k8s_openapi::{
    api::core::v1::Pod,
    apimachinery::pkg::apis::meta::v1::{Condition, OwnerReference},
};
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};
use torpor_api::{
    PodSnapshot, PodSnapshotManualTrigger, SandboxSnapshot, SnapshotReason,
    conditions::{self, Draft, Status},
    labels, name_hash,
    pod_snapshot::{self, reasons},
    reasons::snapshot as image_reasons,
};

use crate::watches::sandbox_of;

/// Objects around a trigger: the Pod that it names, and the objects with its own name.
#[derive(Clone, Debug, Default)]
pub(super) struct Observed {
    pub(super) pod: Option<Arc<Pod>>,
    pub(super) image: Option<Arc<SandboxSnapshot>>,
    pub(super) snapshot: Option<Arc<PodSnapshot>>,
}

/// One write to the apiserver.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    MakeImage(Value),
    MakeSnapshot(Value),
    /// Sets the final condition of the trigger.
    Settle(Draft),
    /// Deletes the image that a failed trigger left.
    DropImage {
        uid: String,
        resource_version: Option<String>,
    },
}

/// Returns the next step for a trigger that is not being deleted.
///
/// `capable` checks whether the node of a Pod can save its memory.
pub(super) fn trigger(
    trigger: &PodSnapshotManualTrigger,
    observed: &Observed,
    capable: impl Fn(&Pod) -> Result<(), String>,
) -> Option<Step> {
    let (name, uid) = (trigger.name_any(), trigger.uid().unwrap_or_default());
    let image = observed.image.as_deref();
    if let Some(outcome) = trigger.outcome() {
        let left = image.filter(|image| {
            outcome.status == "False" && !is_deleting(*image) && is_owned_by(*image, &uid)
        });
        return left.map(|image| Step::DropImage {
            uid: image.uid().unwrap_or_default(),
            resource_version: image.resource_version(),
        });
    }
    if let Some(snapshot) = observed.snapshot.as_deref() {
        return match snapshot.spec.trigger_uid == uid {
            false => fail(format!(
                "PodSnapshot {name:?} already exists and belongs to another trigger"
            )),
            true if snapshot.is_ready() => settle(Status::True, reasons::COMPLETE, String::new()),
            true => unavailable(snapshot).and_then(|why| fail(why.message.clone())),
        };
    }
    match image {
        // A PodSnapshot owns the image already; the watch of PodSnapshots is behind.
        Some(image) if is_kept(image) => None,
        Some(image) if !is_owned_by(image, &uid) => fail(format!(
            "SandboxSnapshot {name:?} already exists and does not belong to the trigger"
        )),
        Some(image) if is_deleting(image) => fail(format!("SandboxSnapshot {name:?} was deleted")),
        Some(image) if image.is_committed() => {
            Some(Step::MakeSnapshot(snapshot_of(trigger, image)))
        }
        // No agent has adopted the image, so none reports the end of the Pod.
        Some(image) if !image.is_adopted() && !pod_exists(observed, image) => {
            let pod = &trigger.spec.target_pod;
            fail(format!("Pod {pod:?} ended before it was saved"))
        }
        Some(image) => failure(image).and_then(|why| fail(why.message.clone())),
        None => match savable(trigger, observed.pod.as_deref(), capable) {
            Ok((pod, sandbox)) => Some(Step::MakeImage(image_of(trigger, pod, sandbox))),
            Err(why) => fail(why),
        },
    }
}

fn settle(status: Status, reason: &'static str, message: String) -> Option<Step> {
    let draft = Draft::new(pod_snapshot::TRIGGERED, status, reason, message);
    Some(Step::Settle(draft))
}

fn fail(why: String) -> Option<Step> {
    settle(Status::False, reasons::FAILED, why)
}

fn is_deleting<K: Resource>(object: &K) -> bool {
    object.meta().deletion_timestamp.is_some()
}

/// Reports whether the object with this UID is an owner of `object`.
fn is_owned_by<K: Resource>(object: &K, uid: &str) -> bool {
    let mut owners = object.meta().owner_references.iter().flatten();
    owners.any(|owner| owner.uid == uid)
}

fn is_a<K: Resource<DynamicType = ()>>(owner: &OwnerReference) -> bool {
    owner.kind == K::kind(&()) && owner.api_version == K::api_version(&())
}

/// Reports whether the Pod of an image exists.
fn pod_exists(observed: &Observed, image: &SandboxSnapshot) -> bool {
    let uid = observed.pod.as_ref().and_then(|pod| pod.uid());
    uid == image.spec.pod_uid
}

/// Reports whether an image belongs to the PodSnapshot of its name.
fn is_kept(image: &SandboxSnapshot) -> bool {
    let mut owners = image.metadata.owner_references.iter().flatten();
    owners.any(|owner| {
        is_a::<PodSnapshot>(owner) && Some(&owner.name) == image.metadata.name.as_ref()
    })
}

/// Returns the condition that says why an image will not come soon.
///
/// The agent would retry, but the client of the trigger does not wait that long.
fn failure(image: &SandboxSnapshot) -> Option<&Condition> {
    let condition = conditions::find(image.conditions(), conditions::COMMITTED)?;
    let failed = [
        image_reasons::SAVE_FAILED,
        image_reasons::SANDBOX_NOT_FOUND,
        image_reasons::RUNTIME_NOT_CAPABLE,
        image_reasons::IMAGE_MISSING,
    ];
    (condition.status == "False" && failed.contains(&condition.reason.as_str()))
        .then_some(condition)
}

/// Returns the condition Ready if it is False.
pub(super) fn unavailable(snapshot: &PodSnapshot) -> Option<&Condition> {
    let condition = conditions::find(snapshot.conditions(), conditions::READY)?;
    (condition.status == "False").then_some(condition)
}

/// Returns the Pod and the name of its Sandbox if the Pod's memory can be saved, else the reason.
fn savable<'a>(
    trigger: &PodSnapshotManualTrigger,
    pod: Option<&'a Pod>,
    capable: impl Fn(&Pod) -> Result<(), String>,
) -> Result<(&'a Pod, &'a str), String> {
    let name = &trigger.spec.target_pod;
    let pod = pod.ok_or_else(|| format!("Pod {name:?} does not exist"))?;
    let sandbox = sandbox_of(pod).ok_or_else(|| {
        format!("Pod {name:?} has no Sandbox; only Pods of Sandboxes can be saved")
    })?;
    if is_deleting(pod) {
        return Err(format!("Pod {name:?} is being deleted"));
    }
    capable(pod)?;
    Ok((pod, &sandbox.name))
}

fn owner<K: Resource<DynamicType = ()>>(object: &K) -> OwnerReference {
    OwnerReference {
        api_version: K::api_version(&()).into_owned(),
        kind: K::kind(&()).into_owned(),
        name: object.name_any(),
        uid: object.meta().uid.clone().unwrap_or_default(),
        ..OwnerReference::default()
    }
}

fn image_of(trigger: &PodSnapshotManualTrigger, pod: &Pod, sandbox: &str) -> Value {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
    json!({
        "apiVersion": SandboxSnapshot::api_version(&()),
        "kind": SandboxSnapshot::kind(&()),
        "metadata": {
            "name": trigger.name_any(),
            "namespace": trigger.namespace(),
            "labels": {labels::SANDBOX_NAME_HASH: name_hash(sandbox)},
            "ownerReferences": [owner(trigger)],
        },
        "spec": {
            "sandboxName": sandbox,
            "nodeName": node,
            "podUID": pod.uid(),
            "reason": SnapshotReason::Manual,
        },
    })
}

fn snapshot_of(trigger: &PodSnapshotManualTrigger, image: &SandboxSnapshot) -> Value {
    json!({
        "apiVersion": PodSnapshot::api_version(&()),
        "kind": PodSnapshot::kind(&()),
        "metadata": {
            "name": trigger.name_any(),
            "namespace": trigger.namespace(),
            "labels": {labels::SANDBOX_NAME_HASH: name_hash(&image.spec.sandbox_name)},
            "annotations": {pod_snapshot::ORIGIN_POD: trigger.spec.target_pod},
        },
        "spec": {"podUID": image.spec.pod_uid, "triggerUID": trigger.uid()},
    })
}

// --- PodSnapshot ---

/// Returns the patch that makes the PodSnapshot the owner of an image that its trigger still owns.
pub(super) fn hand_over(snapshot: &PodSnapshot, image: &SandboxSnapshot) -> Option<Value> {
    // A client that may write PodSnapshots may name any UID, for example that of a Sandbox, which
    // owns the image of its suspension.
    let mut owners = image.metadata.owner_references.iter().flatten();
    let is_its_triggers = owners.any(|owner| {
        owner.uid == snapshot.spec.trigger_uid && is_a::<PodSnapshotManualTrigger>(owner)
    });
    let by_hand = image.spec.reason == SnapshotReason::Manual;
    let wanted = is_its_triggers && by_hand && !is_deleting(image);
    wanted.then(|| {
        json!({"metadata": {
            "resourceVersion": image.resource_version(),
            "ownerReferences": [owner(snapshot)],
        }})
    })
}

/// Returns the new condition Ready, if it differs from the current one.
///
/// `image` has the snapshot's name and no longer belongs to its trigger.
pub(super) fn ready(snapshot: &PodSnapshot, image: Option<&SandboxSnapshot>) -> Option<Draft> {
    let uid = snapshot.uid().unwrap_or_default();
    let name = snapshot.name_any();
    let own = image.filter(|image| is_owned_by(*image, &uid) && !is_deleting(*image));
    let (status, reason, message) = match own {
        Some(image) if image.is_committed() => (Status::True, reasons::AVAILABLE, String::new()),
        Some(image) => {
            let condition = conditions::find(image.conditions(), conditions::COMMITTED);
            let message = condition.map_or_else(String::new, |condition| condition.message.clone());
            (Status::False, reasons::UNAVAILABLE, message)
        }
        None => {
            let message =
                format!("SandboxSnapshot {name:?} with the saved memory no longer exists");
            (Status::False, reasons::UNAVAILABLE, message)
        }
    };
    let condition = conditions::find(snapshot.conditions(), conditions::READY);
    let known = condition.is_some_and(|condition| {
        condition.status == status.as_str()
            && condition.reason == reason
            && condition.message == message
    });
    (!known).then(|| Draft::new(conditions::READY, status, reason, message))
}

/// Returns the newest available PodSnapshot of a Sandbox, which the SDK expects its next Pod to
/// restore.
///
/// The SDK takes the first of several in the same second. The apiserver orders the list by name.
pub(crate) fn newest(kept: &[Arc<PodSnapshot>]) -> Option<&PodSnapshot> {
    let ready = kept.iter().map(AsRef::as_ref).filter(|one| one.is_ready());
    ready.max_by_key(|snapshot: &&PodSnapshot| {
        let created = snapshot.metadata.creation_timestamp.as_ref();
        (created.map(|time| time.0), Reverse(snapshot.name_any()))
    })
}

#[cfg(test)]
mod tests;

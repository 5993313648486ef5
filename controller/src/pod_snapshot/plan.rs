//! No client required. What to do for a trigger and for a PodSnapshot: the same things seen give the same step.

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

/// What is seen beside a trigger: the Pod that it names, and what has its own name.
#[derive(Clone, Debug, Default)]
pub(super) struct Around {
    pub(super) pod: Option<Arc<Pod>>,
    pub(super) image: Option<Arc<SandboxSnapshot>>,
    pub(super) snapshot: Option<Arc<PodSnapshot>>,
}

/// One write.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    MakeImage(Value),
    MakeSnapshot(Value),
    /// What came of the trigger, which is final.
    Settle(Draft),
    /// Nobody waits for it any more.
    DropImage {
        uid: String,
        resource_version: Option<String>,
    },
}

/// The next step for a trigger that is not being deleted. `capable` says whether the node of a Pod can save its memory.
pub(super) fn trigger(
    trigger: &PodSnapshotManualTrigger,
    around: &Around,
    capable: impl Fn(&Pod) -> Result<(), String>,
) -> Option<Step> {
    let (name, uid) = (trigger.name_any(), trigger.uid().unwrap_or_default());
    let image = around.image.as_deref();
    if let Some(outcome) = trigger.outcome() {
        let left = image.filter(|image| {
            outcome.status == "False" && !is_deleting(*image) && is_owned_by(*image, &uid)
        });
        return left.map(|image| Step::DropImage {
            uid: image.uid().unwrap_or_default(),
            resource_version: image.resource_version(),
        });
    }
    if let Some(snapshot) = around.snapshot.as_deref() {
        return match snapshot.spec.trigger_uid == uid {
            false => fail(format!(
                "PodSnapshot {name:?} exists already, of another trigger"
            )),
            true if snapshot.is_ready() => settle(Status::True, reasons::COMPLETE, String::new()),
            true => unavailable(snapshot).and_then(|why| fail(why.message.clone())),
        };
    }
    match image {
        // It is kept already, and the watch of PodSnapshots is behind.
        Some(image) if is_kept(image) => None,
        Some(image) if !is_owned_by(image, &uid) => fail(format!(
            "SandboxSnapshot {name:?} exists already, of somebody else"
        )),
        Some(image) if is_deleting(image) => fail(format!("SandboxSnapshot {name:?} was deleted")),
        Some(image) if image.is_committed() => {
            Some(Step::MakeSnapshot(snapshot_of(trigger, image)))
        }
        // Nobody else says so: no agent knows of it yet.
        Some(image) if !image.is_adopted() && !is_there(around, image) => {
            let pod = &trigger.spec.target_pod;
            fail(format!("Pod {pod:?} ended before it was saved"))
        }
        Some(image) => failure(image).and_then(|why| fail(why.message.clone())),
        None => match savable(trigger, around.pod.as_deref(), capable) {
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

/// Whether the object with this uid is one of its owners.
fn is_owned_by<K: Resource>(object: &K, uid: &str) -> bool {
    let mut owners = object.meta().owner_references.iter().flatten();
    owners.any(|owner| owner.uid == uid)
}

fn is_a<K: Resource<DynamicType = ()>>(owner: &OwnerReference) -> bool {
    owner.kind == K::kind(&()) && owner.api_version == K::api_version(&())
}

/// Whether the Pod that an image is of is seen.
fn is_there(around: &Around, image: &SandboxSnapshot) -> bool {
    let seen = around.pod.as_ref().and_then(|pod| pod.uid());
    seen == image.spec.pod_uid
}

/// Whether an image belongs to the PodSnapshot of its name.
fn is_kept(image: &SandboxSnapshot) -> bool {
    let mut owners = image.metadata.owner_references.iter().flatten();
    owners.any(|owner| {
        is_a::<PodSnapshot>(owner) && Some(&owner.name) == image.metadata.name.as_ref()
    })
}

/// Why an image that is asked for will not come soon. The agent would try again; whoever asked has left by then.
fn failure(image: &SandboxSnapshot) -> Option<&Condition> {
    let said = conditions::find(image.conditions(), conditions::COMMITTED)?;
    let failed = [
        image_reasons::SAVE_FAILED,
        image_reasons::SANDBOX_NOT_FOUND,
        image_reasons::RUNTIME_NOT_CAPABLE,
        image_reasons::IMAGE_MISSING,
    ];
    (said.status == "False" && failed.contains(&said.reason.as_str())).then_some(said)
}

/// What Ready says where it says no.
pub(super) fn unavailable(snapshot: &PodSnapshot) -> Option<&Condition> {
    let said = conditions::find(snapshot.conditions(), conditions::READY)?;
    (said.status == "False").then_some(said)
}

/// The Pod and the name of its Sandbox, if it has memory that can be saved.
fn savable<'a>(
    trigger: &PodSnapshotManualTrigger,
    pod: Option<&'a Pod>,
    capable: impl Fn(&Pod) -> Result<(), String>,
) -> Result<(&'a Pod, &'a str), String> {
    let name = &trigger.spec.target_pod;
    let pod = pod.ok_or_else(|| format!("Pod {name:?} does not exist"))?;
    let sandbox = sandbox_of(pod)
        .ok_or_else(|| format!("Pod {name:?} is no Sandbox's; only Pods of Sandboxes are saved"))?;
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

// --- PodSnapshot ------------------------------------------------------------------------------------------------------------------------

/// The patch that makes a SandboxSnapshot the PodSnapshot's own, if it is still its trigger's.
pub(super) fn hand_over(snapshot: &PodSnapshot, image: &SandboxSnapshot) -> Option<Value> {
    // Who may write PodSnapshots may name any uid in one: that of a Sandbox, say, which owns the image of its suspension.
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

/// What Ready is to say, if that is another thing than it says. `image` has the snapshot's name, and is not its trigger's any more.
pub(super) fn ready(snapshot: &PodSnapshot, image: Option<&SandboxSnapshot>) -> Option<Draft> {
    let uid = snapshot.uid().unwrap_or_default();
    let name = snapshot.name_any();
    let own = image.filter(|image| is_owned_by(*image, &uid) && !is_deleting(*image));
    let (status, reason, message) = match own {
        Some(image) if image.is_committed() => (Status::True, reasons::AVAILABLE, String::new()),
        Some(image) => {
            let said = conditions::find(image.conditions(), conditions::COMMITTED);
            let message = said.map_or_else(String::new, |said| said.message.clone());
            (Status::False, reasons::UNAVAILABLE, message)
        }
        None => {
            let message = format!("SandboxSnapshot {name:?}, which held it, is gone");
            (Status::False, reasons::UNAVAILABLE, message)
        }
    };
    let said = conditions::find(snapshot.conditions(), conditions::READY);
    let known = said.is_some_and(|said| {
        said.status == status.as_str() && said.reason == reason && said.message == message
    });
    (!known).then(|| Draft::new(conditions::READY, status, reason, message))
}

/// Of a Sandbox' PodSnapshots the one that the SDK asks its next Pod for: the newest that can be had. Of those of one second it takes the first in the list, which
/// the apiserver orders by name.
pub(crate) fn newest(kept: &[Arc<PodSnapshot>]) -> Option<&PodSnapshot> {
    let ready = kept.iter().map(AsRef::as_ref).filter(|one| one.is_ready());
    ready.max_by_key(|snapshot: &&PodSnapshot| {
        let created = snapshot.metadata.creation_timestamp.as_ref();
        (created.map(|time| time.0), Reverse(snapshot.name_any()))
    })
}

#[cfg(test)]
mod tests;

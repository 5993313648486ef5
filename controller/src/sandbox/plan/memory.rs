//! Torpor's part: memory that outlives the Pod.
//!
//! Suspend with strategy Hibernate: make a SandboxSnapshot for exactly this Pod → the agent saves and writes Committed=True → only then the Pod is deleted.
//! Resume: a new Pod on the node of the image, once per image. The rules, each with a fence that is checked at the apiserver when the step is taken:
//! a Pod is deleted for its image only while that image is committed and not consumed; an image is deleted only when its Pod lives, or the sandbox has gone on
//! from it, or nobody committed it; a Pod continues only from an image that is committed and not consumed.

use std::{cmp::Reverse, sync::Arc};

use jiff::Timestamp;
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Condition};
use kube::ResourceExt;
use torpor_api::{
    Sandbox, SandboxSnapshot, SnapshotReason,
    conditions::{self, Draft, Status},
    node::RuntimeCapabilities,
    reasons::hibernated,
    retention::Retention,
    snapshot::NODE_PROVISIONER,
};

use super::{Action, ImageFence, ImageUse, Plan, Shown, SnapshotFence};
use crate::sandbox::{
    dereference::Observed,
    validate::{Desired, Ownership, ownership},
};

mod evicted;
mod origin;
mod record;
mod resume;
mod suspend;
mod unclaimed;
mod whereabouts;

pub(in crate::sandbox) use self::evicted::{disruption, is_evicted};
use self::{
    origin::node_of_image,
    unclaimed::Left,
    whereabouts::{LOOK_FOR_NODE, image_missing, kept_in},
};
pub(super) use self::{
    record::{forget_record, record},
    resume::{awake, start, wishes_for_pod},
    suspend::suspend,
};

// --- what is seen -----------------------------------------------------------------------------------------------------------------------

/// Suspend snapshots of this very Sandbox (not of an earlier one of its name), by name.
fn own_snapshots<'a>(
    desired: &'a Desired<'_>,
    observed: &'a Observed,
) -> impl Iterator<Item = &'a Arc<SandboxSnapshot>> {
    observed.snapshots.values().filter(|snapshot| {
        snapshot.spec.reason == SnapshotReason::Suspend
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

/// Whether the sandbox' memory is in its image, be that missing at the moment.
fn is_resumable(snapshot: &SandboxSnapshot) -> bool {
    (snapshot.is_committed() || snapshot.is_missing())
        && !snapshot.is_consumed()
        && !is_deleting(snapshot)
}

/// Whether it is of no use to anybody: a save that did not come to its end.
fn is_half_made(snapshot: &SandboxSnapshot) -> bool {
    !snapshot.is_committed() && !snapshot.is_missing() && !is_deleting(snapshot)
}

fn newest_resumable<'a>(
    desired: &'a Desired<'_>,
    observed: &'a Observed,
) -> Option<&'a Arc<SandboxSnapshot>> {
    own_snapshots(desired, observed)
        .filter(|snapshot| is_resumable(snapshot))
        .min_by_key(|snapshot| {
            let status = snapshot.status.as_ref();
            let committed = status
                .and_then(|s| s.committed_at.as_ref())
                .map(|time| time.0);
            (Reverse(committed), snapshot.name_any())
        })
}

/// Whether an image is seen that the sandbox may go on from.
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

/// What the node can do with this Pod's runtime, and the runtime's name for messages.
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

/// Whether the sandbox' memory is in an image that its Pod holds, be it on its way out of that. Its node has been able to save it, whatever that can say of itself at the moment: an agent
/// whose SandboxNode was deleted, or that could not ask the runtime when it began, says that it can do nothing.
fn sleeps_in_place(pod: &Pod) -> bool {
    let said = pod_condition(pod, conditions::POD_HIBERNATED, conditions::HIBERNATED);
    said.is_some_and(|said| said.status == "True" || said.reason == hibernated::WAKING)
}

fn shown_before<'a>(sandbox: &'a Sandbox, type_: &str) -> Option<&'a Condition> {
    conditions::find(&sandbox.status.as_ref()?.conditions, type_)
}

fn says(type_: &'static str, reason: &'static str, message: impl Into<String>) -> Shown {
    Shown::Set(Draft::new(type_, Status::False, reason, message.into()))
}

// --- conditions -------------------------------------------------------------------------------------------------------------------------

/// Sets Hibernated, unless a wrong annotation has to be shown instead.
fn show_hibernated(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed, shown: Shown) {
    let problems: Vec<String> = desired
        .settings
        .problems
        .iter()
        .map(ToString::to_string)
        .collect();
    plan.memory.hibernated = if !problems.is_empty() {
        says(
            conditions::HIBERNATED,
            hibernated::INVALID_ANNOTATION,
            problems.join("; "),
        )
    } else if let Some(message) = class_problem(desired, observed) {
        says(
            conditions::HIBERNATED,
            hibernated::SNAPSHOT_CLASS_NOT_SUPPORTED,
            message,
        )
    } else {
        shown
    };
}

fn class_problem(desired: &Desired<'_>, observed: &Observed) -> Option<String> {
    let name = desired.settings.snapshot_class.as_ref()?;
    match &observed.snapshot_class {
        None => Some(format!(
            "SnapshotClass {name:?} does not exist; images are kept on the node that makes them"
        )),
        Some(class) if class.spec.provisioner != NODE_PROVISIONER => Some(format!(
            "SnapshotClass {name:?} has provisioner {:?}, which is not supported; images are kept on the node that makes them",
            class.spec.provisioner
        )),
        Some(class) => {
            let problems = Retention::read(&class.spec.parameters).problems;
            let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
            let problems = problems.join("; ");
            (!problems.is_empty()).then(|| format!("SnapshotClass {name:?}: {problems}"))
        }
    }
}

const NOT_KEPT: &str = "memory was not kept";

/// The Pod is gone: what is left of its memory.
pub(super) fn asleep(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed, now: Timestamp) {
    let shown = if let Some(snapshot) = newest_resumable(desired, observed) {
        match snapshot.is_missing() {
            true => {
                plan.look_again(LOOK_FOR_NODE);
                says_missing(observed, snapshot)
            }
            false => kept_in(observed, snapshot),
        }
    } else {
        let left = unclaimed::settle(plan, desired, observed, now);
        without_image(plan, desired, observed, left)
    };
    show_hibernated(plan, desired, observed, shown);
}

/// What Hibernated says of a suspended Sandbox that has neither Pod nor image.
fn without_image(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed, left: Left) -> Shown {
    let is_half_made = own_snapshots(desired, observed).any(|snapshot| is_half_made(snapshot));
    match left {
        Left::Awaited(shown) => shown,
        Left::GivenUp(why) if !is_half_made => {
            unclaimed::forget(plan, desired);
            says(conditions::HIBERNATED, hibernated::SAVE_FAILED, why)
        }
        _ if is_half_made => says(
            conditions::HIBERNATED,
            hibernated::SAVE_FAILED,
            format!("The Pod ended before its memory was saved; {NOT_KEPT}"),
        ),
        // Why memory was not kept can no longer be seen once the Pod is gone.
        _ => match shown_before(desired.sandbox, conditions::HIBERNATED) {
            Some(before)
                if before.reason == hibernated::RUNTIME_NOT_CAPABLE
                    || before.reason == hibernated::SAVE_FAILED =>
            {
                Shown::Keep
            }
            _ => Shown::Remove,
        },
    }
}

/// The memory is on its way into an image.
fn says_saving(message: impl Into<String>) -> Shown {
    says(conditions::HIBERNATED, hibernated::SAVING, message)
}

/// A snapshot of this Pod goes, and the next one has its name.
fn says_earlier_goes(snapshot: &SandboxSnapshot) -> Shown {
    says_saving(format!(
        "Waiting for the earlier SandboxSnapshot {:?} to be removed",
        snapshot.name_any()
    ))
}

/// The memory was saved, and its image cannot be found.
fn says_missing(observed: &Observed, snapshot: &SandboxSnapshot) -> Shown {
    let message = image_missing(observed, snapshot);
    says(conditions::HIBERNATED, hibernated::IMAGE_MISSING, message)
}

fn fence(observed: &Observed, snapshot: &SandboxSnapshot, use_of: ImageUse) -> ImageFence {
    ImageFence {
        name: snapshot.name_any(),
        uid: snapshot.uid().unwrap_or_default(),
        node: node_of_image(observed, snapshot).cloned(),
        use_of,
    }
}

fn delete_snapshot(snapshot: &SandboxSnapshot, fence: SnapshotFence) -> Action {
    let (name, uid) = (snapshot.name_any(), snapshot.uid().unwrap_or_default());
    Action::DeleteSnapshot { name, uid, fence }
}

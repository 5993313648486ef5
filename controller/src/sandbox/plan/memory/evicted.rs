//! Keeps the memory of an evicted Pod of a running Sandbox. Causes are a drain of its node, a
//! taint, a preemption, or the kubelet itself.
//!
//! A sandbox that sleeps in place, hibernated or dozing, has its memory in an image. The image gets
//! a snapshot while the Pod terminates, as in a suspension, and the next Pod continues from it on
//! that node. An awake sandbox cannot be saved in time, because the kubelet ends its programs
//! meanwhile. A condition reports that.
//!
//! A kubelet whose node shuts down, or is short of memory or disk, ends Pods without deleting them.
//! A Pod that ended so while its sandbox slept stays until its image has a snapshot, because the
//! deletion of an ended Pod removes it at once. A Pod whose sandbox was awake has failed, as
//! upstream.

use k8s_openapi::api::core::v1::{Pod, PodCondition};
use kube::ResourceExt;
use torpor_api::{
    SandboxSnapshot,
    annotations::SuspensionStrategy,
    conditions,
    reasons::{hibernated, snapshot as snapshot_reasons},
};

use super::{
    super::{Area, ConditionChange, ImageUse, Plan, delete_pod},
    NOT_KEPT, capabilities, condition_false, fence, hibernated_kept, hibernated_missing,
    hibernated_saving, hibernated_waiting, is_deleting, is_terminating, node_of,
    origin::mismatch,
    phase, pod_condition, previous_condition, sleeps_in_place, snapshot_of_pod,
    suspend::make_snapshot,
};
use crate::sandbox::{dereference::Observed, validate::Desired};

/// Returns the Pod's condition DisruptionTarget if it is True.
pub(in crate::sandbox) fn disruption(pod: &Pod) -> Option<&PodCondition> {
    let all = pod.status.as_ref()?.conditions.as_ref()?;
    all.iter().find(|condition| {
        condition.type_ == conditions::POD_DISRUPTION_TARGET && condition.status == "True"
    })
}

/// Reason of DisruptionTarget when the kubelet ended the Pod (Kubernetes,
/// `pkg/kubelet/nodeshutdown` and `pkg/kubelet/eviction`).
const BY_KUBELET: &str = "TerminationByKubelet";
/// Reason in the status of a Pod that failed in a node shutdown (same source).
const NODE_SHUTDOWN: &str = "NodeShutdown";

/// Reports whether the Pod ends because it was evicted, rather than deleted by a user.
pub(in crate::sandbox) fn is_evicted(pod: &Pod) -> bool {
    is_ended_by_kubelet(pod) || is_terminating(pod) && disruption(pod).is_some()
}

/// Reports whether the kubelet has ended the Pod for the node's sake.
///
/// The kubelet writes the reason once all containers have ended, and does not delete the Pod. It
/// writes no such reason on Pods that exceed their own limits, which have failed.
fn is_ended_by_kubelet(pod: &Pod) -> bool {
    let reason = pod
        .status
        .as_ref()
        .and_then(|status| status.reason.as_deref());
    let disrupted =
        disruption(pod).is_some_and(|condition| condition.reason.as_deref() == Some(BY_KUBELET));
    phase(pod) == "Failed" && (disrupted || reason == Some(NODE_SHUTDOWN))
}

/// Reports whether the kubelet ended the Pod while its sandbox slept, according to the Pod's
/// condition.
///
/// A dozing or waking sandbox may have been awake at the end. The node's agent knows.
pub(super) fn ended_asleep(pod: &Pod) -> bool {
    const MAY_SLEEP: [&str; 2] = [hibernated::DOZING, hibernated::WAKING];
    let condition = pod_condition(pod, conditions::POD_HIBERNATED, conditions::HIBERNATED);
    is_ended_by_kubelet(pod)
        && condition.is_some_and(|condition| {
            condition.status == "True" || MAY_SLEEP.contains(&&*condition.reason)
        })
}

/// Reports whether the agent has found that the Pod left no memory.
pub(super) fn is_denied(snapshot: &SandboxSnapshot) -> bool {
    let condition = conditions::find(snapshot.conditions(), conditions::COMMITTED);
    snapshot.is_told_by_agent()
        && condition
            .is_some_and(|condition| condition.reason == snapshot_reasons::SANDBOX_NOT_FOUND)
}

/// Keeps the image of an evicted Pod. Returns the condition Hibernated, if it is the controller's
/// to set.
pub(super) fn keep(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
) -> Option<ConditionChange> {
    let keeps = desired.settings.strategy() == SuspensionStrategy::Hibernate;
    let node = node_of(pod).filter(|_| keeps && is_evicted(pod))?;
    match is_terminating(pod) {
        true => keep_terminating(plan, desired, observed, pod, node),
        false => keep_ended(plan, desired, observed, pod, node),
    }
}

/// Returns Hibernated with the location of the Pod's image, or with `until_whole` while it is
/// incomplete.
fn hibernated_progress(
    observed: &Observed,
    snapshot: &SandboxSnapshot,
    until_whole: String,
) -> ConditionChange {
    if let Some(why) = mismatch(observed, snapshot) {
        return condition_false(conditions::HIBERNATED, hibernated::SAVE_FAILED, why);
    }
    if snapshot.is_missing() {
        return hibernated_missing(observed, snapshot);
    }
    match snapshot.is_committed() && !snapshot.is_consumed() {
        true => hibernated_kept(observed, snapshot),
        false => hibernated_saving(until_whole),
    }
}

/// Keeps the image of a Pod that is being deleted: the image gets a snapshot meanwhile.
fn keep_terminating(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    node: &str,
) -> Option<ConditionChange> {
    let (can, _) = capabilities(observed, pod);
    if !can.hibernate && !sleeps_in_place(pod) {
        return None;
    }
    let uid = pod.uid().unwrap_or_default();
    if let Some(snapshot) = snapshot_of_pod(desired, observed, &uid) {
        let name = snapshot.name_any();
        let message =
            format!("The Pod is evicted; its image is being kept in SandboxSnapshot {name:?}");
        return Some(hibernated_progress(observed, snapshot, message));
    }
    // The node's agent hibernates a dozing sandbox when it sees the eviction.
    let asleep = pod_condition(pod, conditions::POD_HIBERNATED, conditions::HIBERNATED)
        .is_some_and(|draft| draft.status == "True" || draft.reason == hibernated::DOZING);
    if asleep {
        let message = "The Pod is evicted; its image is about to be kept";
        return Some(make_snapshot(plan, desired, observed, pod, node, message));
    }
    let message = format!(
        "The Pod was evicted from node {node:?} while the sandbox was awake; {NOT_KEPT}. \
         `kubectl torpor drain` keeps it before a node is drained"
    );
    Some(condition_false(
        conditions::HIBERNATED,
        hibernated::SAVE_FAILED,
        message,
    ))
}

/// Keeps the image of a Pod that has ended, and then deletes the Pod.
///
/// Until then the sandbox has not finished. The node's capabilities do not matter: it has
/// hibernated the sandbox.
fn keep_ended(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    node: &str,
) -> Option<ConditionChange> {
    let uid = pod.uid().unwrap_or_default();
    let Some(snapshot) = snapshot_of_pod(desired, observed, &uid) else {
        let finished = previous_condition(desired.sandbox, conditions::FINISHED)
            .is_some_and(|finished| finished.status == "True");
        if finished || !ended_asleep(pod) {
            return None;
        }
        plan.memory.keeps_ended = true;
        let message = "The kubelet ended the Pod; its image is about to be kept";
        return Some(make_snapshot(plan, desired, observed, pod, node, message));
    };
    if is_denied(snapshot) || snapshot.is_consumed() {
        let message = format!(
            "The kubelet of node {node:?} ended the Pod while the sandbox was awake; {NOT_KEPT}"
        );
        let reason = hibernated::SAVE_FAILED;
        return Some(condition_false(conditions::HIBERNATED, reason, message));
    }
    plan.memory.keeps_ended = true;
    if is_deleting(snapshot) {
        return Some(hibernated_waiting(snapshot));
    }
    if let Some(why) = mismatch(observed, snapshot) {
        let message = format!("{why}. To keep the memory, delete the SandboxSnapshot");
        return Some(condition_false(
            conditions::HIBERNATED,
            hibernated::SAVE_FAILED,
            message,
        ));
    }
    if snapshot.is_committed() {
        let image = fence(observed, snapshot, ImageUse::OnlyCopy);
        plan.step(Area::Pod, delete_pod(pod, Some(image)));
    } else if snapshot.is_missing() {
        // The snapshot names the image, with or without the Pod.
        plan.step(Area::Pod, delete_pod(pod, None));
    }
    let name = snapshot.name_any();
    let message = format!(
        "The kubelet of node {node:?} ended the Pod; its image is being kept in SandboxSnapshot {name:?}. \
         To start without it, delete the Pod"
    );
    Some(hibernated_progress(observed, snapshot, message))
}

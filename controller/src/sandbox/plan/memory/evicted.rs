//! A Pod that is taken away from a Sandbox that is to run: a drain of its node, a taint, a preemption, or the kubelet itself.
//!
//! A sandbox that sleeps in place, hibernated or dozing, has its memory in an image already. The image gets a snapshot while the Pod goes, as in a suspension, and the next Pod continues
//! from it, on that node. One that is awake cannot be saved in time: the kubelet ends its programs while it is being asked. That is said.
//!
//! A kubelet whose node shuts down, or is short of memory or disk, ends Pods and deletes none. A Pod that ended so while its sandbox slept stays until its image is kept: one that has
//! ended is gone at once when it is deleted. One that was awake has failed, as upstream.

use k8s_openapi::api::core::v1::{Pod, PodCondition};
use kube::ResourceExt;
use torpor_api::{
    SandboxSnapshot,
    annotations::SuspensionStrategy,
    conditions,
    reasons::{hibernated, snapshot as snapshot_reasons},
};

use super::{
    super::{Area, ImageUse, Plan, Shown, delete_pod},
    NOT_KEPT, capabilities, fence, is_deleting, is_terminating, kept_in, node_of,
    origin::mismatch,
    phase, pod_condition, says, says_earlier_goes, says_missing, says_saving, shown_before,
    sleeps_in_place, snapshot_of_pod,
    suspend::make_snapshot,
};
use crate::sandbox::{dereference::Observed, validate::Desired};

/// What whoever disrupts the Pod said of it, if somebody does.
pub(in crate::sandbox) fn disruption(pod: &Pod) -> Option<&PodCondition> {
    let all = pod.status.as_ref()?.conditions.as_ref()?;
    all.iter().find(|condition| {
        condition.type_ == conditions::POD_DISRUPTION_TARGET && condition.status == "True"
    })
}

/// Why a Pod is disrupted, or has failed, where it is its kubelet's doing (Kubernetes, `pkg/kubelet/nodeshutdown` and `pkg/kubelet/eviction`).
const BY_KUBELET: &str = "TerminationByKubelet";
const NODE_SHUTDOWN: &str = "NodeShutdown";

/// Whether the Pod goes because it was evicted, and not because somebody deleted it to be rid of it.
pub(in crate::sandbox) fn is_evicted(pod: &Pod) -> bool {
    is_ended_by_kubelet(pod) || is_terminating(pod) && disruption(pod).is_some()
}

/// Whether the kubelet has ended the Pod for the node's sake. It writes so once all containers have ended, and leaves the Pod where it is. Pods that exceed their own limits it ends
/// without such a word: those have failed.
fn is_ended_by_kubelet(pod: &Pod) -> bool {
    let reason = pod
        .status
        .as_ref()
        .and_then(|status| status.reason.as_deref());
    let disrupted = disruption(pod).is_some_and(|said| said.reason.as_deref() == Some(BY_KUBELET));
    phase(pod) == "Failed" && (disrupted || reason == Some(NODE_SHUTDOWN))
}

/// Whether the kubelet ended the Pod in its sleep, as far as the Pod says. What was dozing, or waking, may have been awake when it ended: the node's agent knows.
pub(super) fn ended_asleep(pod: &Pod) -> bool {
    const MAY_SLEEP: [&str; 2] = [hibernated::DOZING, hibernated::WAKING];
    let said = pod_condition(pod, conditions::POD_HIBERNATED, conditions::HIBERNATED);
    is_ended_by_kubelet(pod)
        && said.is_some_and(|said| said.status == "True" || MAY_SLEEP.contains(&&*said.reason))
}

/// Whether the agent has found that the Pod left no memory.
pub(super) fn is_denied(snapshot: &SandboxSnapshot) -> bool {
    let said = conditions::find(snapshot.conditions(), conditions::COMMITTED);
    snapshot.is_told_by_agent()
        && said.is_some_and(|said| said.reason == snapshot_reasons::SANDBOX_NOT_FOUND)
}

/// Keeps the image of a Pod that is evicted; answers what is said of the sandbox' memory, if that is ours to say.
pub(super) fn keep(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
) -> Option<Shown> {
    let keeps = desired.settings.strategy() == SuspensionStrategy::Hibernate;
    let node = node_of(pod).filter(|_| keeps && is_evicted(pod))?;
    match is_terminating(pod) {
        true => keep_going(plan, desired, observed, pod, node),
        false => keep_ended(plan, desired, observed, pod, node),
    }
}

/// Where the Pod's image is, or that it is not whole yet.
fn says_how_far(observed: &Observed, snapshot: &SandboxSnapshot, until_whole: String) -> Shown {
    if let Some(why) = mismatch(observed, snapshot) {
        return says(conditions::HIBERNATED, hibernated::SAVE_FAILED, why);
    }
    if snapshot.is_missing() {
        return says_missing(observed, snapshot);
    }
    match snapshot.is_committed() && !snapshot.is_consumed() {
        true => kept_in(observed, snapshot),
        false => says_saving(until_whole),
    }
}

/// It is being deleted: its image gets a snapshot while it goes.
fn keep_going(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    node: &str,
) -> Option<Shown> {
    let (can, _) = capabilities(observed, pod);
    if !can.hibernate && !sleeps_in_place(pod) {
        return None;
    }
    let uid = pod.uid().unwrap_or_default();
    if let Some(snapshot) = snapshot_of_pod(desired, observed, &uid) {
        let name = snapshot.name_any();
        let message =
            format!("The Pod is evicted; its image is being kept in SandboxSnapshot {name:?}");
        return Some(says_how_far(observed, snapshot, message));
    }
    // What dozes the node's agent lets sleep deeper when it sees the eviction.
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
    Some(says(
        conditions::HIBERNATED,
        hibernated::SAVE_FAILED,
        message,
    ))
}

/// It has ended, and stays until it is deleted: that is done once its image is kept. Until then the sandbox has not finished. Whether the node can hibernate is not asked: it has.
fn keep_ended(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    node: &str,
) -> Option<Shown> {
    let uid = pod.uid().unwrap_or_default();
    let Some(snapshot) = snapshot_of_pod(desired, observed, &uid) else {
        let finished = shown_before(desired.sandbox, conditions::FINISHED)
            .is_some_and(|finished| finished.status == "True");
        if finished || !ended_asleep(pod) {
            return None;
        }
        plan.memory.keeps_ended = true;
        let message = "The kubelet ended the Pod; its image is about to be kept";
        return Some(make_snapshot(plan, desired, observed, pod, node, message));
    };
    if is_denied(snapshot) || snapshot.is_consumed() {
        let message = format!("The kubelet of node {node:?} ended the Pod awake; {NOT_KEPT}");
        let reason = hibernated::SAVE_FAILED;
        return Some(says(conditions::HIBERNATED, reason, message));
    }
    plan.memory.keeps_ended = true;
    if is_deleting(snapshot) {
        return Some(says_earlier_goes(snapshot));
    }
    if let Some(why) = mismatch(observed, snapshot) {
        let message = format!("{why}. To keep the memory, delete the SandboxSnapshot");
        return Some(says(
            conditions::HIBERNATED,
            hibernated::SAVE_FAILED,
            message,
        ));
    }
    if snapshot.is_committed() {
        let image = fence(observed, snapshot, ImageUse::OnlyCopy);
        plan.step(Area::Pod, delete_pod(pod, Some(image)));
    } else if snapshot.is_missing() {
        // The snapshot names it, with or without the Pod.
        plan.step(Area::Pod, delete_pod(pod, None));
    }
    let name = snapshot.name_any();
    let message = format!(
        "The kubelet of node {node:?} ended the Pod; its image is being kept in SandboxSnapshot {name:?}. \
         To start anew without it, delete the Pod"
    );
    Some(says_how_far(observed, snapshot, message))
}

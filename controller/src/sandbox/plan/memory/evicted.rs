//! A Pod that is taken away from a Sandbox that is to run: a drain of its node, a taint, a preemption.
//!
//! A sandbox that sleeps in place, hibernated or dozing, has its memory in an image already. The image gets a snapshot while the Pod goes, as in a suspension, and the next Pod continues
//! from it, on that node. One that is awake cannot be saved in time: the kubelet ends its programs while it is being asked. That is said.

use k8s_openapi::api::core::v1::{Pod, PodCondition};
use kube::ResourceExt;
use torpor_api::{
    annotations::SuspensionStrategy, conditions, reasons::hibernated,
    snapshot::suspend_snapshot_name,
};

use super::{
    super::{Action, Area, Plan, Shown},
    NOT_KEPT, capabilities, is_terminating, kept_in, node_of, pod_condition, says, says_missing,
    snapshot_of_pod,
    suspend::suspend_snapshot,
};
use crate::sandbox::{dereference::Observed, validate::Desired};

/// What whoever disrupts the Pod said of it, if somebody does.
pub(in crate::sandbox) fn disruption(pod: &Pod) -> Option<&PodCondition> {
    let all = pod.status.as_ref()?.conditions.as_ref()?;
    all.iter().find(|condition| {
        condition.type_ == conditions::POD_DISRUPTION_TARGET && condition.status == "True"
    })
}

/// Whether the Pod goes because it was evicted, and not because somebody deleted it to be rid of it.
pub(in crate::sandbox) fn is_evicted(pod: &Pod) -> bool {
    is_terminating(pod) && disruption(pod).is_some()
}

/// Keeps the image of a Pod that is evicted; answers what is said of the sandbox' memory, if that is ours to say.
pub(super) fn keep(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
) -> Option<Shown> {
    let keeps = desired.settings.strategy() == SuspensionStrategy::Hibernate;
    let (can, _) = capabilities(observed, pod);
    let node = node_of(pod).filter(|_| keeps && can.hibernate && is_evicted(pod))?;
    let uid = pod.uid().unwrap_or_default();
    let saving = |message: String| says(conditions::HIBERNATED, hibernated::SAVING, message);
    if let Some(snapshot) = snapshot_of_pod(desired, observed, &uid) {
        let name = snapshot.name_any();
        if snapshot.is_missing() {
            return Some(says_missing(observed, snapshot));
        }
        return Some(match snapshot.is_committed() && !snapshot.is_consumed() {
            true => kept_in(observed, snapshot),
            false => saving(format!(
                "The Pod is evicted; its image is being kept in SandboxSnapshot {name:?}"
            )),
        });
    }
    // What dozes the node's agent lets sleep deeper when it sees the eviction.
    let asleep = pod_condition(pod, conditions::POD_HIBERNATED, conditions::HIBERNATED)
        .is_some_and(|draft| draft.status == "True" || draft.reason == hibernated::DOZING);
    let name = suspend_snapshot_name(&desired.name, &uid);
    if asleep && !observed.snapshots.contains_key(&name) {
        let snapshot = suspend_snapshot(desired, pod, node);
        plan.step(Area::Pod, Action::CreateSnapshot(snapshot));
        return Some(saving(
            "The Pod is evicted; its image is about to be kept".to_owned(),
        ));
    }
    let message = format!(
        "The Pod was evicted from node {node:?} while the sandbox was awake; {NOT_KEPT}. \
         Suspend sandboxes before their node is drained"
    );
    Some(says(
        conditions::HIBERNATED,
        hibernated::SAVE_FAILED,
        message,
    ))
}

//! Plans for a running Sandbox with its Pod: what the Pod reports about its memory, and the cleanup
//! of images that the Pod does not need.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use torpor_api::{
    SandboxSnapshot,
    annotations::{self, OnRestoreFailure, SleepAfter},
    conditions::{self, Draft},
    reasons::{hibernated, restored, snapshot as snapshot_reasons},
};

use super::{
    super::{
        Action, Area, ConditionChange, ImageUse, Plan, SnapshotFence, delete_as_seen, delete_pod,
    },
    archive, backup, capabilities, condition_false, delete_snapshot, elsewhere, evicted, fence,
    is_deleting, is_resumable, is_terminating, node_of, own_snapshots, phase, pod_condition,
    restored_condition,
    resume::{after_cold_start, claim_annotations, sleep_annotations, trace},
    show_hibernated, sleeps_in_place, snapshot_of_pod,
};
use crate::sandbox::{dereference::Observed, validate::Desired};

/// Returns Torpor's annotations for an existing Pod; the value `None` removes one.
pub(in crate::sandbox::plan) fn annotations_for_pod(
    desired: &Desired<'_>,
    pod: &Pod,
) -> Vec<(&'static str, Option<String>)> {
    let mut wishes = vec![
        (
            annotations::HIBERNATE,
            desired.settings.hibernate.then(|| "true".to_owned()),
        ),
        (annotations::FREEZE, None),
        (annotations::POD_TRACE_CONTEXT, trace(desired)),
    ];
    wishes.extend(sleep_annotations(desired));
    if pod.annotations().contains_key(annotations::CLAIM) {
        wishes.extend(claim_annotations(desired));
    }
    // During a restore the annotation holds the policy with which it began.
    let restoring = pod.annotations().contains_key(annotations::RESTORE_IMAGE)
        && restored_condition(pod).is_none_or(|restored| restored.status != "True");
    if let Some(policy) = desired.settings.on_restore_failure
        && !restoring
    {
        wishes.push((
            annotations::ON_RESTORE_FAILURE,
            Some(policy.as_str().to_owned()),
        ));
    }
    wishes
}

/// Plans for a running Sandbox with its Pod.
pub(in crate::sandbox::plan) fn awake(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    now: Timestamp,
) {
    archive::end(plan, desired, observed);
    backup::plan(plan, desired, observed, pod, now);
    let change = evicted::keep(plan, desired, observed, pod)
        .unwrap_or_else(|| hibernated_in_place(desired, observed, pod));
    let change = backup::with_obstacle(change, desired, observed);
    show_hibernated(plan, desired, observed, change);
    cancel_suspension(plan, desired, observed, pod);
    if let Some(source) = source_of(desired, observed, pod) {
        elsewhere::record_taker(plan, source, pod);
        if elsewhere::has_more_places(desired, observed, source, pod) {
            plan.step(Area::Pod, delete_as_seen(pod));
        }
    }
    if let Some(bound) = pod_condition(pod, conditions::POD_BOUND, conditions::BOUND) {
        plan.memory.bound = ConditionChange::Set(bound);
    }
    plan.memory.restored = match restored_condition(pod) {
        Some(draft) => {
            settle_restore(plan, desired, observed, pod, &draft);
            ConditionChange::Set(backup::described(pod, draft))
        }
        None if pod.annotations().contains_key(annotations::RESTORE_IMAGE) => {
            ConditionChange::Remove
        }
        None => after_cold_start(desired, observed),
    };
    delete_consumed(plan, desired, observed, pod);
}

fn hibernated_in_place(desired: &Desired<'_>, observed: &Observed, pod: &Pod) -> ConditionChange {
    if let Some(draft) = pod_condition(pod, conditions::POD_HIBERNATED, conditions::HIBERNATED) {
        return ConditionChange::Set(draft);
    }
    let (can, runtime) = capabilities(observed, pod);
    let Some(node) = node_of(pod).filter(|_| {
        let by_itself = [
            desired.settings.hibernate_after,
            desired.settings.doze_after,
        ];
        let by_itself = by_itself
            .into_iter()
            .flatten()
            .any(|after| after != SleepAfter::Off);
        (desired.settings.hibernate || by_itself) && !can.hibernate
    }) else {
        return ConditionChange::Remove;
    };
    let message = format!("{runtime} on node {node:?} cannot hibernate");
    condition_false(
        conditions::HIBERNATED,
        hibernated::RUNTIME_NOT_CAPABLE,
        message,
    )
}

/// Cancels a suspension when the Sandbox is to run again before its Pod was deleted.
///
/// The controller deletes the snapshot. The agent wakes the sandbox before it deletes the image.
fn cancel_suspension(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed, pod: &Pod) {
    let uid = pod.uid().unwrap_or_default();
    let Some(snapshot) = snapshot_of_pod(desired, observed, &uid) else {
        return;
    };
    // A Pod that ends loses its memory. Then only the image is left, from which the next Pod
    // continues.
    let ends = is_terminating(pod) || matches!(phase(pod), "Succeeded" | "Failed");
    if ends || is_deleting(snapshot) {
        return;
    }
    if snapshot
        .annotations()
        .contains_key(annotations::REPLACES_POD)
    {
        // Another pass may be about to delete the Pod. The next Pod continues from the image.
        if is_resumable(snapshot) && snapshot.is_committed() {
            let image = fence(observed, snapshot, ImageUse::OnlyCopy);
            plan.step(Area::Pod, delete_pod(pod, Some(image)));
        }
        return;
    }
    let fence = SnapshotFence::PodAlive {
        name: pod.name_any(),
        uid,
        resource_version: snapshot.resource_version().unwrap_or_default(),
    };
    plan.step(Area::Pod, delete_snapshot(snapshot, fence));
}

/// Returns the snapshot that a Pod was created to continue from.
fn source_of<'a>(
    desired: &'a Desired<'_>,
    observed: &'a Observed,
    pod: &Pod,
) -> Option<&'a Arc<SandboxSnapshot>> {
    if pod.annotations().contains_key(annotations::RESTORE_COPY) {
        return None;
    }
    let image = pod.annotations().get(annotations::RESTORE_IMAGE)?;
    own_snapshots(desired, observed).find(|snapshot| {
        snapshot
            .status
            .as_ref()
            .and_then(|status| status.image_id.as_ref())
            == Some(image)
    })
}

/// Acts on the agent's report about the restore.
fn settle_restore(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    draft: &Draft,
) {
    if is_terminating(pod) {
        return;
    }
    let source = source_of(desired, observed, pod).filter(|snapshot| !is_deleting(snapshot));
    let supersede = |plan: &mut Plan| {
        if let Some(snapshot) = source.filter(|snapshot| !snapshot.is_consumed()) {
            let (name, message) = (snapshot.name_any(), draft.message.to_string());
            plan.step(Area::Pod, Action::SupersedeSnapshot { name, message });
        }
    };
    if draft.status == "True" {
        if let Some(snapshot) = source {
            plan.step(Area::Pod, delete_snapshot(snapshot, SnapshotFence::Stale));
        }
    } else if draft.reason == restored::COLD_STARTED {
        supersede(plan);
    } else if sleeps_in_place(pod) {
        // The agent retries a failed wake in place. The image is deleted with this Pod.
    } else if draft.reason == restored::IMAGE_STALE
        && !pod.annotations().contains_key(annotations::RESTORE_COPY)
    {
        // Another Pod has continued from this image. This Pod never ran; the next one starts cold.
        supersede(plan);
        plan.step(Area::Pod, delete_as_seen(pod));
    } else if draft.status == "False" && policy_was_changed(desired, pod) {
        // The sandbox reads the policy at its creation, so a new policy needs a new Pod.
        plan.step(Area::Pod, delete_as_seen(pod));
    }
}

fn policy_was_changed(desired: &Desired<'_>, pod: &Pod) -> bool {
    let cold = OnRestoreFailure::ColdStart;
    desired.settings.restore_policy() == cold
        && pod
            .annotations()
            .get(annotations::ON_RESTORE_FAILURE)
            .map(String::as_str)
            != Some(cold.as_str())
}

/// Deletes consumed images, which a running Sandbox does not need.
fn delete_consumed(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed, pod: &Pod) {
    let uid = pod.uid().unwrap_or_default();
    for snapshot in own_snapshots(desired, observed) {
        let used = conditions::find(snapshot.conditions(), conditions::CONSUMED)
            .is_some_and(|c| c.status == "True" && c.reason == snapshot_reasons::RESUMED);
        let this_pods = snapshot.spec.pod_uid.as_deref() == Some(&uid);
        // The Pod that consumed the image may still be restoring from it. Once it reports Restored,
        // settle_restore deletes the image.
        let status = snapshot.status.as_ref();
        let by_this = status.and_then(|s| s.consumed_by_pod_uid.as_deref()) == Some(&uid);
        let action = delete_snapshot(snapshot, SnapshotFence::Stale);
        let planned = plan.steps.iter().any(|step| step.action == action);
        if used && !this_pods && !by_this && !is_deleting(snapshot) && !planned {
            plan.step(Area::Pod, action);
        }
    }
}

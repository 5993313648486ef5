//! Plans a suspend of the Pod, by strategy.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt;
use torpor_api::{
    PodRecord, SandboxSnapshot, SnapshotReason,
    annotations::{self, SuspensionStrategy},
    conditions::{self, Draft, Status},
    reasons::{freeze, hibernated, restored as restored_reasons, snapshot as snapshot_reasons},
    snapshot::suspend_snapshot_name,
};

use super::{
    super::{
        Action, Area, ConditionChange, ImageUse, Plan, SnapshotFence, delete_as_seen, delete_pod,
        pods::patch_pod,
    },
    NOT_KEPT, archive, capabilities, condition_false, delete_snapshot, evicted, fence,
    hibernated_kept, hibernated_missing, hibernated_saving, hibernated_waiting, is_deleting,
    is_terminating, node_of,
    origin::mismatch,
    phase, pod_condition,
    record::forget_record,
    restored_condition, show_hibernated, sleeps_in_place, snapshot_of_pod, snapshot_to_make,
};
use crate::{
    sandbox::{dereference::Observed, metadata, validate::Desired},
    saved_pod,
    time_left::time_left,
};

/// Interval at which a taken snapshot name is checked.
const NAME_TAKEN: Duration = Duration::from_secs(30);
/// Time that a Pod with an image to restore may take until its node's agent reports on it.
const RESTORE_BEGINS: Duration = Duration::from_secs(60);
/// Time that a restore may take in all, while the agent reports it.
const RESTORE_ENDS: Duration = Duration::from_secs(600);

/// Plans for a suspended Sandbox with its Pod.
pub(in crate::sandbox::plan) fn suspend(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    now: Timestamp,
) {
    if desired.settings.strategy() != SuspensionStrategy::Hibernate {
        archive::show_without_image(plan, desired);
    }
    let change = match desired.settings.strategy() {
        SuspensionStrategy::Stop => {
            stop(plan, desired, pod);
            ConditionChange::Remove
        }
        SuspensionStrategy::Freeze => freeze_pod(plan, desired, observed, pod, now),
        SuspensionStrategy::Hibernate => hibernate(plan, desired, observed, pod, now),
    };
    show_hibernated(plan, desired, observed, change);
    // Restored describes this Pod as long as it exists.
    plan.memory.restored = ConditionChange::Keep;
}

/// Suspends as upstream: deletes the Pod with its memory.
///
/// Unless the strategy is Stop, the Pod must have no memory worth keeping, so it is deleted only if
/// unchanged.
fn stop(plan: &mut Plan, desired: &Desired<'_>, pod: &Pod) {
    forget_record(plan, desired);
    if !is_terminating(pod) {
        let as_it_is = desired.settings.strategy() == SuspensionStrategy::Stop;
        plan.step(
            Area::Pod,
            match as_it_is {
                true => delete_pod(pod, None),
                false => delete_as_seen(pod),
            },
        );
    }
}

/// Reports whether the sandbox has been running.
///
/// For the kubelet a Pod also runs when it repeatedly fails to start the containers. A Pod whose
/// image was refused has no memory other than that image.
pub(super) fn runs(pod: &Pod) -> bool {
    phase(pod) == "Running" && !was_refused(pod)
}

fn was_refused(pod: &Pod) -> bool {
    let restored = restored_condition(pod);
    let refused = restored.is_some_and(|restored| {
        restored.status == "False" && restored.reason != restored_reasons::COLD_STARTED
    });
    let status = pod.status.as_ref();
    let containers = status.and_then(|status| status.container_statuses.as_deref());
    let is_up = |container: &ContainerStatus| {
        let state = container.state.as_ref();
        state.is_some_and(|state| state.running.is_some())
    };
    // A failed wake in place leaves the same condition, for a moment also after a later one that
    // succeeds.
    refused && !sleeps_in_place(pod) && containers.is_some_and(|all| !all.iter().any(is_up))
}

/// Reports whether the sandbox may have continued from its image although the kubelet does not
/// report its Pod as running.
///
/// Its memory is then only in this Pod. If the restore has failed, the memory is still in the
/// image. The image of a copy is unaffected.
fn may_have_resumed(plan: &mut Plan, pod: &Pod, now: Timestamp) -> bool {
    let carries = |key| pod.annotations().contains_key(key);
    let resumes = carries(annotations::RESTORE_IMAGE) && !carries(annotations::RESTORE_COPY);
    if !resumes || has_ended(pod) {
        return false;
    }
    if let Some(restored) = restored_condition(pod) {
        return restored.status == "True";
    }
    let condition = pod_condition(pod, conditions::POD_HIBERNATED, conditions::HIBERNATED);
    let limit = match condition.is_some_and(|condition| condition.reason == hibernated::WAKING) {
        true => RESTORE_ENDS,
        false => RESTORE_BEGINS,
    };
    let made = pod.metadata.creation_timestamp.as_ref();
    let Some(left) = time_left(limit, made.map(|made| made.0), now) else {
        return false;
    };
    plan.requeue_after(left);
    true
}

fn freeze_pod(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    now: Timestamp,
) -> ConditionChange {
    if is_terminating(pod) {
        return ConditionChange::Keep;
    }
    if !runs(pod) && !may_have_resumed(plan, pod, now) {
        stop(plan, desired, pod);
        return ConditionChange::Remove;
    }
    let reported = pod_condition(pod, conditions::POD_HIBERNATED, conditions::HIBERNATED);
    let frozen = reported
        .as_ref()
        .is_some_and(|draft| draft.reason == hibernated::FROZEN);
    let (can, runtime) = capabilities(observed, pod);
    // A frozen sandbox stays, even if its node does not report the capability at the moment,
    // because only the Pod has its memory.
    if !can.freeze && !frozen {
        stop(plan, desired, pod);
        return condition_false(
            conditions::HIBERNATED,
            hibernated::RUNTIME_NOT_CAPABLE,
            not_capable("freeze", &runtime, pod),
        );
    }
    let wish = [(annotations::FREEZE, Some("true".to_owned()))];
    if let Some(patch) = metadata::torpor_patch_for(pod, &wish) {
        patch_pod(plan, pod, patch);
    }
    plan.memory.suspended = Some(if frozen {
        let message = "Pod is frozen. Sandbox is suspended";
        Draft::new(
            conditions::SUSPENDED,
            Status::True,
            freeze::POD_FROZEN,
            message,
        )
    } else {
        let message = "Pod is being frozen. Sandbox is suspending";
        Draft::new(
            conditions::SUSPENDED,
            Status::False,
            freeze::POD_FREEZING,
            message,
        )
    });
    reported.map_or(ConditionChange::Remove, ConditionChange::Set)
}

fn not_capable(verb: &str, runtime: &str, pod: &Pod) -> String {
    let node = node_of(pod).unwrap_or_default();
    format!("{runtime} on node {node:?} cannot {verb}; {NOT_KEPT}")
}

fn hibernate(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    now: Timestamp,
) -> ConditionChange {
    let uid = pod.uid().unwrap_or_default();
    let Some(snapshot) = snapshot_of_pod(desired, observed, &uid) else {
        return begin_hibernate(plan, desired, observed, pod, now);
    };
    if is_deleting(snapshot) {
        return match is_terminating(pod) {
            true => ConditionChange::Keep,
            false => hibernated_waiting(snapshot),
        };
    }
    if snapshot.is_committed()
        && let Some(why) = mismatch(observed, snapshot)
    {
        let message = format!("{why}. To save the memory, delete the SandboxSnapshot");
        return condition_false(conditions::HIBERNATED, hibernated::SAVE_FAILED, message);
    }
    if snapshot.is_committed() && !snapshot.is_consumed() {
        if !is_terminating(pod) {
            plan.step(
                Area::Pod,
                delete_pod(pod, Some(fence(observed, snapshot, ImageUse::OnlyCopy))),
            );
        }
        return hibernated_kept(observed, snapshot);
    }
    if snapshot.is_missing() && !snapshot.is_consumed() {
        // The Pod sleeps in the same image, and stays until the image is found. A Pod that has
        // ended is not needed.
        if has_ended(pod) {
            stop(plan, desired, pod);
        }
        return hibernated_missing(observed, snapshot);
    }
    if is_terminating(pod) {
        return ConditionChange::Keep;
    }
    if snapshot.is_committed() {
        // The image is consumed: the Pod continued afterwards, so a new image is needed under the
        // same name.
        plan.step(Area::Pod, delete_snapshot(snapshot, SnapshotFence::Stale));
        return hibernated_saving(format!(
            "Waiting for the used SandboxSnapshot {:?} to be removed",
            snapshot.name_any()
        ));
    }
    not_committed(plan, desired, snapshot, pod, now)
}

fn has_ended(pod: &Pod) -> bool {
    matches!(phase(pod), "Succeeded" | "Failed")
}

/// Plans for a Pod whose snapshot is being made or has failed.
fn not_committed(
    plan: &mut Plan,
    desired: &Desired<'_>,
    snapshot: &SandboxSnapshot,
    pod: &Pod,
    now: Timestamp,
) -> ConditionChange {
    let name = snapshot.name_any();
    let committed = conditions::find(snapshot.conditions(), conditions::COMMITTED);
    let message = committed
        .map(|condition| condition.message.clone())
        .unwrap_or_default();
    let may_sleep = evicted::ended_asleep(pod) && !evicted::is_denied(snapshot);
    if has_ended(pod) && !may_sleep {
        stop(plan, desired, pod);
        return condition_false(
            conditions::HIBERNATED,
            hibernated::SAVE_FAILED,
            format!("The Pod ended before its memory was saved; {NOT_KEPT}"),
        );
    }
    if !has_memory(plan, pod, now) {
        // The Pod was to continue from an image and has not. That image still holds its memory.
        stop(plan, desired, pod);
        return ConditionChange::Remove;
    }
    match committed.map(|condition| condition.reason.as_str()) {
        Some(snapshot_reasons::RUNTIME_NOT_CAPABLE) => {
            stop(plan, desired, pod);
            let message = format!("{message}; {NOT_KEPT}");
            condition_false(
                conditions::HIBERNATED,
                hibernated::RUNTIME_NOT_CAPABLE,
                message,
            )
        }
        Some(snapshot_reasons::SAVE_FAILED) => {
            condition_false(conditions::HIBERNATED, hibernated::SAVE_FAILED, message)
        }
        _ => {
            // The agent's message says what the save waits for.
            let why = if message.is_empty() { "" } else { ": " };
            hibernated_saving(format!(
                "Memory is being saved to SandboxSnapshot {name:?}{why}{message}"
            ))
        }
    }
}

/// Reports whether the Pod has or may have memory worth keeping.
fn has_memory(plan: &mut Plan, pod: &Pod, now: Timestamp) -> bool {
    runs(pod) || evicted::ended_asleep(pod) || may_have_resumed(plan, pod, now)
}

/// Begins to hibernate a Pod that has no snapshot yet.
fn begin_hibernate(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    now: Timestamp,
) -> ConditionChange {
    if is_terminating(pod) {
        // A Pod that is evicted while its sandbox sleeps leaves its image.
        return evicted::keep(plan, desired, observed, pod).unwrap_or(ConditionChange::Keep);
    }
    let node = node_of(pod);
    let Some(node) = node.filter(|_| has_memory(plan, pod, now)) else {
        stop(plan, desired, pod);
        return ConditionChange::Remove;
    };
    let (can, runtime) = capabilities(observed, pod);
    if !can.hibernate && !sleeps_in_place(pod) {
        stop(plan, desired, pod);
        let named_a_runtime = pod
            .spec
            .as_ref()
            .is_some_and(|spec| spec.runtime_class_name.is_some());
        // A Sandbox with neither Torpor's strategy nor a RuntimeClass shows no condition of Torpor.
        if desired.settings.suspension_strategy.is_none() && !named_a_runtime {
            return ConditionChange::Remove;
        }
        let message = not_capable("hibernate", &runtime, pod);
        return condition_false(
            conditions::HIBERNATED,
            hibernated::RUNTIME_NOT_CAPABLE,
            message,
        );
    }
    let message = "Memory is about to be saved";
    make_snapshot(plan, desired, observed, pod, node, message)
}

/// Creates the snapshot of this Pod, unless another snapshot has its name.
pub(super) fn make_snapshot(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    node: &str,
    message: &str,
) -> ConditionChange {
    let uid = pod.uid().unwrap_or_default();
    // The status of a Pod that ends may no longer name its images.
    let record = PodRecord::of(pod).or_else(|| {
        let last = saved_pod::last_pod(desired.sandbox);
        last.filter(|record| record.uid == uid)
    });
    make(
        plan,
        desired,
        observed,
        (&uid, node),
        record.as_ref(),
        message,
    )
}

/// Creates the snapshot of a Pod that is gone, unless another snapshot has its name.
pub(super) fn make_snapshot_of(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    record: &PodRecord,
    message: &str,
) -> ConditionChange {
    let of = (record.uid.as_str(), record.node_name.as_str());
    make(plan, desired, observed, of, Some(record), message)
}

fn make(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    (uid, node): (&str, &str),
    record: Option<&PodRecord>,
    message: &str,
) -> ConditionChange {
    let name = suspend_snapshot_name(&desired.name, uid);
    if observed.snapshots.contains_key(&name) {
        return name_taken(plan, &name);
    }
    let snapshot = snapshot_to_make(desired, &name, (uid, node), SnapshotReason::Suspend, record);
    plan.step(Area::Pod, Action::CreateSnapshot(snapshot));
    hibernated_saving(message)
}

/// Reports that a foreign snapshot has the name of the one to create.
///
/// The user must remove it. Its deletion may cause no event for this Sandbox.
fn name_taken(plan: &mut Plan, name: &str) -> ConditionChange {
    plan.requeue_after(NAME_TAKEN);
    let message = format!(
        "SandboxSnapshot {name:?} exists and does not belong to this Sandbox's Pod; delete it to continue"
    );
    condition_false(conditions::HIBERNATED, hibernated::SAVE_FAILED, message)
}

//! Suspend: what happens to the Pod, by strategy.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt;
use serde_json::json;
use torpor_api::{
    PodRecord, SandboxSnapshot,
    annotations::{self, SuspensionStrategy},
    conditions::{self, Draft, Status},
    reasons::{freeze, hibernated, restored as restored_reasons, snapshot as snapshot_reasons},
    snapshot::suspend_snapshot_name,
};

use super::{
    super::{
        Action, Area, ImageUse, Plan, Shown, SnapshotFence, delete_as_seen, delete_pod,
        pods::patch_pod,
    },
    NOT_KEPT, capabilities, delete_snapshot, evicted, fence, is_deleting, is_terminating, kept_in,
    node_of,
    origin::mismatch,
    phase, pod_condition,
    record::forget_record,
    says, says_earlier_goes, says_missing, says_saving, show_hibernated, sleeps_in_place,
    snapshot_of_pod,
};
use crate::{
    sandbox::{
        dereference::Observed,
        metadata,
        validate::{Desired, owner_reference},
    },
    saved_pod,
};

/// How often to look whether a name that somebody else took is free.
const NAME_TAKEN: Duration = Duration::from_secs(30);
/// How long a Pod that is to continue from an image may take before its node's agent says a word of that.
const RESTORE_BEGINS: Duration = Duration::from_secs(60);
/// How long it may take in all, as long as the agent says that it is being restored.
const RESTORE_ENDS: Duration = Duration::from_secs(600);

/// The user wants the Sandbox suspended, and its Pod is there.
pub(in crate::sandbox::plan) fn suspend(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    now: Timestamp,
) {
    let shown = match desired.settings.strategy() {
        SuspensionStrategy::Stop => {
            stop(plan, desired, pod);
            Shown::Remove
        }
        SuspensionStrategy::Freeze => freeze_pod(plan, desired, observed, pod, now),
        SuspensionStrategy::Hibernate => hibernate(plan, desired, observed, pod, now),
    };
    show_hibernated(plan, desired, observed, shown);
    // It describes this Pod for as long as there is one.
    plan.memory.restored = Shown::Keep;
}

/// Upstream's suspend: the memory goes with the Pod, which is to have none worth keeping unless the
/// user says so.
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

/// Whether the sandbox has been running. To the kubelet so is a Pod whose containers it starts in vain, again and again: one that was refused its image has no memory but that.
pub(super) fn runs(pod: &Pod) -> bool {
    phase(pod) == "Running" && !was_refused(pod)
}

fn was_refused(pod: &Pod) -> bool {
    let restored = pod_condition(pod, conditions::POD_RESTORED, conditions::RESTORED);
    let refused = restored.is_some_and(|restored| {
        restored.status == "False" && restored.reason != restored_reasons::COLD_STARTED
    });
    let status = pod.status.as_ref();
    let containers = status.and_then(|status| status.container_statuses.as_deref());
    let is_up = |container: &ContainerStatus| {
        let state = container.state.as_ref();
        state.is_some_and(|state| state.running.is_some())
    };
    // A wake in place that failed leaves the same word, for a moment also after the next one that does not.
    refused && !sleeps_in_place(pod) && containers.is_some_and(|all| !all.iter().any(is_up))
}

/// Whether the sandbox may have gone on from its image though the kubelet has yet to say that its Pod runs: then its memory is in this Pod and nowhere else. Where the restore has failed
/// it is in the image still. What a copy starts from is there as before.
fn may_have_resumed(plan: &mut Plan, pod: &Pod, now: Timestamp) -> bool {
    let carries = |key| pod.annotations().contains_key(key);
    let resumes = carries(annotations::RESTORE_IMAGE) && !carries(annotations::RESTORE_COPY);
    if !resumes || has_ended(pod) {
        return false;
    }
    if let Some(restored) = pod_condition(pod, conditions::POD_RESTORED, conditions::RESTORED) {
        return restored.status == "True";
    }
    let said = pod_condition(pod, conditions::POD_HIBERNATED, conditions::HIBERNATED);
    let limit = match said.is_some_and(|said| said.reason == hibernated::WAKING) {
        true => RESTORE_ENDS,
        false => RESTORE_BEGINS,
    };
    let made = pod.metadata.creation_timestamp.as_ref();
    // A clock that is behind the apiserver's makes it new.
    let age = made.and_then(|made| Duration::try_from(now.duration_since(made.0)).ok());
    let left = limit.saturating_sub(age.unwrap_or_default());
    if left.is_zero() {
        return false;
    }
    plan.look_again(left);
    true
}

fn freeze_pod(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    now: Timestamp,
) -> Shown {
    if is_terminating(pod) {
        return Shown::Keep;
    }
    if !runs(pod) && !may_have_resumed(plan, pod, now) {
        stop(plan, desired, pod);
        return Shown::Remove;
    }
    let reported = pod_condition(pod, conditions::POD_HIBERNATED, conditions::HIBERNATED);
    let frozen = reported
        .as_ref()
        .is_some_and(|draft| draft.reason == hibernated::FROZEN);
    let (can, runtime) = capabilities(observed, pod);
    // What stands still has been frozen: its node may have no word for that at the moment, and its memory is nowhere else.
    if !can.freeze && !frozen {
        stop(plan, desired, pod);
        return says(
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
    reported.map_or(Shown::Remove, Shown::Set)
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
) -> Shown {
    let uid = pod.uid().unwrap_or_default();
    let Some(snapshot) = snapshot_of_pod(desired, observed, &uid) else {
        return begin_hibernate(plan, desired, observed, pod, now);
    };
    if is_deleting(snapshot) {
        return match is_terminating(pod) {
            true => Shown::Keep,
            false => says_earlier_goes(snapshot),
        };
    }
    if snapshot.is_committed()
        && let Some(why) = mismatch(observed, snapshot)
    {
        let message = format!("{why}. To save the memory, delete the SandboxSnapshot");
        return says(conditions::HIBERNATED, hibernated::SAVE_FAILED, message);
    }
    if snapshot.is_committed() && !snapshot.is_consumed() {
        if !is_terminating(pod) {
            plan.step(
                Area::Pod,
                delete_pod(pod, Some(fence(observed, snapshot, ImageUse::OnlyCopy))),
            );
        }
        return kept_in(observed, snapshot);
    }
    if snapshot.is_missing() && !snapshot.is_consumed() {
        // The Pod sleeps in the same image, and stays until that is found. One that has ended is of no more use.
        if has_ended(pod) {
            stop(plan, desired, pod);
        }
        return says_missing(observed, snapshot);
    }
    if is_terminating(pod) {
        return Shown::Keep;
    }
    if snapshot.is_committed() {
        // Consumed: the Pod went on after the image was made, so that a new one is needed, under the same name.
        plan.step(Area::Pod, delete_snapshot(snapshot, SnapshotFence::Stale));
        return says_saving(format!(
            "Waiting for the used SandboxSnapshot {:?} to be removed",
            snapshot.name_any()
        ));
    }
    not_committed(plan, desired, snapshot, pod, now)
}

fn has_ended(pod: &Pod) -> bool {
    matches!(phase(pod), "Succeeded" | "Failed")
}

/// The snapshot of this Pod is under way, or failed.
fn not_committed(
    plan: &mut Plan,
    desired: &Desired<'_>,
    snapshot: &SandboxSnapshot,
    pod: &Pod,
    now: Timestamp,
) -> Shown {
    let name = snapshot.name_any();
    let committed = conditions::find(snapshot.conditions(), conditions::COMMITTED);
    let message = committed
        .map(|condition| condition.message.clone())
        .unwrap_or_default();
    let may_sleep = evicted::ended_asleep(pod) && !evicted::is_denied(snapshot);
    if has_ended(pod) && !may_sleep {
        stop(plan, desired, pod);
        return says(
            conditions::HIBERNATED,
            hibernated::SAVE_FAILED,
            format!("The Pod ended before its memory was saved; {NOT_KEPT}"),
        );
    }
    if !has_memory(plan, pod, now) {
        // It was to continue from an image, and has not: that is its memory still.
        stop(plan, desired, pod);
        return Shown::Remove;
    }
    match committed.map(|condition| condition.reason.as_str()) {
        Some(snapshot_reasons::RUNTIME_NOT_CAPABLE) => {
            stop(plan, desired, pod);
            let message = format!("{message}; {NOT_KEPT}");
            says(
                conditions::HIBERNATED,
                hibernated::RUNTIME_NOT_CAPABLE,
                message,
            )
        }
        Some(snapshot_reasons::SAVE_FAILED) => {
            says(conditions::HIBERNATED, hibernated::SAVE_FAILED, message)
        }
        _ => {
            // The node says what it waits for.
            let why = if message.is_empty() { "" } else { ": " };
            says_saving(format!(
                "Memory is being saved to SandboxSnapshot {name:?}{why}{message}"
            ))
        }
    }
}

/// Whether the Pod has, or may have, memory worth keeping.
fn has_memory(plan: &mut Plan, pod: &Pod, now: Timestamp) -> bool {
    runs(pod) || evicted::ended_asleep(pod) || may_have_resumed(plan, pod, now)
}

/// No snapshot of this Pod yet.
fn begin_hibernate(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    now: Timestamp,
) -> Shown {
    if is_terminating(pod) {
        // One that is evicted in its sleep leaves its image.
        return evicted::keep(plan, desired, observed, pod).unwrap_or(Shown::Keep);
    }
    let node = node_of(pod);
    let Some(node) = node.filter(|_| has_memory(plan, pod, now)) else {
        // It has no memory worth keeping.
        stop(plan, desired, pod);
        return Shown::Remove;
    };
    let (can, runtime) = capabilities(observed, pod);
    if !can.hibernate && !sleeps_in_place(pod) {
        stop(plan, desired, pod);
        let named_a_runtime = pod
            .spec
            .as_ref()
            .is_some_and(|spec| spec.runtime_class_name.is_some());
        // Who asked for nothing of ours, neither strategy nor runtime, sees nothing of ours.
        if desired.settings.suspension_strategy.is_none() && !named_a_runtime {
            return Shown::Remove;
        }
        let message = not_capable("hibernate", &runtime, pod);
        return says(
            conditions::HIBERNATED,
            hibernated::RUNTIME_NOT_CAPABLE,
            message,
        );
    }
    let message = "Memory is about to be saved";
    make_snapshot(plan, desired, observed, pod, node, message)
}

/// Makes the snapshot of this Pod, unless another has its name.
pub(super) fn make_snapshot(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    node: &str,
    message: &str,
) -> Shown {
    let uid = pod.uid().unwrap_or_default();
    // What the kubelet reports of a Pod that ends may name no image any more.
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

/// Makes the snapshot of a Pod that is gone, unless another has its name.
pub(super) fn make_snapshot_of(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    record: &PodRecord,
    message: &str,
) -> Shown {
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
) -> Shown {
    let name = suspend_snapshot_name(&desired.name, uid);
    if observed.snapshots.contains_key(&name) {
        return name_taken(plan, &name);
    }
    let mut snapshot = json!({
        "apiVersion": "torpor.dev/v1alpha1",
        "kind": "SandboxSnapshot",
        "metadata": {
            "name": name,
            "namespace": desired.namespace,
            "ownerReferences": [owner_reference(desired.sandbox)],
        },
        "spec": {
            "sandboxName": desired.name,
            "podUID": uid,
            "nodeName": node,
            "reason": "Suspend",
        },
    });
    if let Some(record) = record {
        snapshot["metadata"]["annotations"] = saved_pod::annotation(record);
    }
    plan.step(Area::Pod, Action::CreateSnapshot(snapshot));
    says_saving(message)
}

/// Not one of ours, or it would have been found before. It is the user's to remove, and no event of
/// it need reach this Sandbox.
fn name_taken(plan: &mut Plan, name: &str) -> Shown {
    plan.look_again(NAME_TAKEN);
    let message = format!(
        "SandboxSnapshot {name:?} exists and is not of this Sandbox's Pod; delete it to go on"
    );
    says(conditions::HIBERNATED, hibernated::SAVE_FAILED, message)
}

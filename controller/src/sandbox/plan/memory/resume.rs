//! Resume: what a new Pod continues from, and what a running one still owes its image.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::json;
use torpor_api::{
    SandboxSnapshot,
    annotations::{self, OnRestoreFailure, SleepAfter, WakeOn},
    conditions::{self, Draft},
    reasons::{hibernated, restored, snapshot as snapshot_reasons},
};
use torpor_daemon::spans::LONGEST_CARRIER;

use super::{
    super::{Action, Area, ImageUse, Plan, Shown, SnapshotFence, delete_as_seen, delete_pod},
    capabilities, delete_snapshot, evicted, fence, image_missing, is_deleting, is_half_made,
    is_resumable, is_terminating, newest_resumable, node_of,
    origin::{record, trusted_node},
    own_snapshots, phase, pod_condition, says, show_hibernated, shown_before, sleeps_in_place,
    snapshot_of_pod,
    unclaimed::{self, Left},
    whereabouts::{LOOK_FOR_NODE, Lost, await_node, cold_start, lost, may_be_back, out_of_reach},
};
use crate::sandbox::{
    dereference::Observed,
    pod_spec::{self, Memory, inject},
    validate::Desired,
};

/// Why memory cannot be brought back: reason and message.
pub(super) type Obstacle = (&'static str, String);

// --- no Pod -----------------------------------------------------------------------------------------------------------------------------

/// The user wants the Sandbox running, and there is no Pod.
pub(in crate::sandbox::plan) fn start(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    now: Timestamp,
) {
    show_hibernated(plan, desired, observed, Shown::Remove);
    if let Some(snapshot) = newest_resumable(desired, observed) {
        delete_half_made(plan, desired, observed);
        return resume(plan, desired, observed, snapshot, now);
    }
    let given_up = match unclaimed::settle(plan, desired, observed, now) {
        Left::Awaited(shown) => return show_hibernated(plan, desired, observed, shown),
        Left::GivenUp(why) => Some(why),
        Left::Nothing => None,
    };
    delete_half_made(plan, desired, observed);
    if given_up.is_some() {
        unclaimed::forget(plan, desired);
    }
    if let Some(name) = &desired.settings.restore_from {
        plan.memory.given_up = given_up;
        return copy(plan, desired, observed, name, now);
    }
    let shown = match given_up {
        Some(why) => {
            let message = format!("Started without the saved memory. {why}");
            says(conditions::RESTORED, restored::COLD_STARTED, message)
        }
        None => after_cold_start(desired, observed),
    };
    create_pod(plan, desired, observed, None, shown);
}

/// The sandbox goes on without images that are still being made; one that has just been committed
/// is found by the fence.
fn delete_half_made(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed) {
    for snapshot in own_snapshots(desired, observed).filter(|snapshot| is_half_made(snapshot)) {
        let resource_version = snapshot.resource_version().unwrap_or_default();
        let fence = SnapshotFence::Unchanged { resource_version };
        plan.step(Area::Pod, delete_snapshot(snapshot, fence));
    }
}

fn resume(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    snapshot: &Arc<SandboxSnapshot>,
    now: Timestamp,
) {
    let policy = desired.settings.restore_policy();
    match can_restore(desired, observed, snapshot, false) {
        Ok(memory) => {
            let start = Some((memory, fence(observed, snapshot, ImageUse::Resume)));
            create_pod(plan, desired, observed, start, Shown::Remove);
        }
        Err((reason, message)) if policy == OnRestoreFailure::Fail => {
            wait_for_node(plan, observed, snapshot);
            let message = format!("{message}. {}", remedy(observed, snapshot));
            plan.memory.restored = says(conditions::RESTORED, reason, message);
        }
        Err((_, message)) if may_be_back(desired, observed, snapshot, now) => {
            await_node(plan, desired, &message);
        }
        Err((reason, message)) => {
            let message = cold_start_message(reason, &message);
            for image in own_snapshots(desired, observed).filter(|image| is_resumable(image)) {
                let (name, message) = (image.name_any(), message.clone());
                plan.step(Area::Pod, Action::SupersedeSnapshot { name, message });
            }
            let shown = says(conditions::RESTORED, restored::COLD_STARTED, message);
            create_pod(plan, desired, observed, None, shown);
        }
    }
}

/// What the user can do about an image that is not restored.
fn remedy(observed: &Observed, snapshot: &SandboxSnapshot) -> String {
    let cold = cold_start();
    match lost(observed, snapshot) {
        Some(lost) => lost.remedy(),
        None if snapshot.is_missing() => format!("To {cold}"),
        None => {
            let name = snapshot.name_any();
            format!("The image is kept in SandboxSnapshot {name:?}; to {cold}")
        }
    }
}

/// No event tells that a node has come back to the cluster, or has left it while its image was waited for.
fn wait_for_node(plan: &mut Plan, observed: &Observed, snapshot: &SandboxSnapshot) {
    if snapshot.is_missing() || lost(observed, snapshot) == Some(Lost::Gone) {
        plan.look_again(LOOK_FOR_NODE);
    }
}

fn copy(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed, name: &str, now: Timestamp) {
    let named = observed.snapshots.get(name);
    let found = named.ok_or_else(|| {
        let message = format!(
            "SandboxSnapshot {name:?} does not exist in this namespace; `kubectl get sandboxsnapshots` lists what there is"
        );
        (restored::SNAPSHOT_NOT_FOUND, message)
    });
    let memory = found.and_then(|snapshot| {
        if !snapshot.is_committed() || is_deleting(snapshot) {
            let message = format!(
                "SandboxSnapshot {name:?} is not committed; its condition Committed says why, and the Sandbox starts when it is"
            );
            return Err((restored::SNAPSHOT_NOT_READY, message));
        }
        Ok((
            can_restore(desired, observed, snapshot, true)?,
            fence(observed, snapshot, ImageUse::Copy),
        ))
    });
    match memory {
        Ok(start) => create_pod(plan, desired, observed, Some(start), Shown::Remove),
        Err((reason, mut message))
            if desired.settings.restore_policy() == OnRestoreFailure::Fail =>
        {
            if let Some(snapshot) = named
                && let Some(lost) = lost(observed, snapshot)
            {
                wait_for_node(plan, observed, snapshot);
                message = format!("{message}. {}", lost.remedy());
            }
            plan.memory.restored = says(conditions::RESTORED, reason, message);
        }
        Err((_, message))
            if named.is_some_and(|snapshot| may_be_back(desired, observed, snapshot, now)) =>
        {
            await_node(plan, desired, &message);
        }
        Err((reason, message)) => {
            let message = cold_start_message(reason, &message);
            let shown = says(conditions::RESTORED, restored::COLD_STARTED, message);
            create_pod(plan, desired, observed, None, shown);
        }
    }
}

fn cold_start_message(reason: &str, why: &str) -> String {
    format!("Started without the saved memory ({reason}): {why}")
}

/// Whether the node that holds the image can restore it. What only the node can see (damage, a used image) it says itself.
fn can_restore(
    desired: &Desired<'_>,
    observed: &Observed,
    snapshot: &SandboxSnapshot,
    copy: bool,
) -> Result<Memory, Obstacle> {
    let name = snapshot.name_any();
    let policy = desired.settings.restore_policy();
    let home = trusted_node(observed, snapshot)?;
    if let Some(lost) = lost(observed, snapshot) {
        let message = out_of_reach(observed, snapshot, lost);
        return Err((restored::NODE_UNAVAILABLE, message));
    }
    if snapshot.is_missing() {
        let message = image_missing(observed, snapshot);
        return Err((restored::IMAGE_MISSING, message));
    }
    let saved = record(observed, snapshot);
    let Some(memory) = Memory::of(snapshot, home, saved, copy, policy) else {
        let message = format!("SandboxSnapshot {name:?} does not say where its image lies");
        return Err((restored::SNAPSHOT_NOT_READY, message));
    };
    let node_name = &memory.node;
    let node = observed.nodes.get(node_name);
    let class = pod_spec::runtime_class_name(&desired.sandbox.spec.pod_template.spec);
    let handler = class.and_then(|class| observed.handlers.get(&class));
    let able = handler.zip(node);
    if !able.is_some_and(|(handler, node)| node.capabilities(handler).restore) {
        let runtime = handler.map_or("the default runtime", String::as_str);
        let message =
            format!("Node {node_name:?}, which holds the image, cannot restore with {runtime}");
        return Err((restored::NODE_UNAVAILABLE, message));
    }
    let made_with = snapshot
        .status
        .as_ref()
        .and_then(|status| status.fingerprint.as_ref());
    let offered = node
        .and_then(|node| node.status.as_ref())
        .and_then(|status| status.fingerprint.as_ref());
    if let (Some(made_with), Some(offered)) = (made_with, offered) {
        let different = made_with.differs_in(offered);
        if !different.is_empty() {
            let message = format!(
                "The image was made with another runtime than node {node_name:?} has now (different: {})",
                different.join(", ")
            );
            return Err((restored::FINGERPRINT_MISMATCH, message));
        }
    }
    Ok(memory)
}

/// The image of the runtime that goes into a new Pod, if it does. One that continues an image has what was saved, whatever is asked for now: it could not be restored otherwise.
fn runtime_image<'a>(
    desired: &Desired<'_>,
    observed: &'a Observed,
    memory: Option<&Memory>,
) -> Result<Option<&'a str>, inject::Error> {
    let wanted = memory.map_or(desired.settings.inject_runtime, Memory::has_runtime);
    match &observed.runtime_image {
        _ if !wanted => Ok(None),
        Some(image) => Ok(Some(image)),
        None => Err(inject::Error::NoImage),
    }
}

fn create_pod(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    start: Option<(Memory, super::super::ImageFence)>,
    restored: Shown,
) {
    let mut wishes: Vec<(&str, String)> = Vec::new();
    if desired.settings.hibernate {
        wishes.push((annotations::HIBERNATE, "true".to_owned()));
    }
    if let Some(policy) = desired.settings.on_restore_failure {
        wishes.push((annotations::ON_RESTORE_FAILURE, policy.as_str().to_owned()));
    }
    let sleep = by_itself(desired);
    wishes.extend(
        sleep
            .into_iter()
            .filter_map(|(key, after)| Some((key, after?))),
    );
    wishes.extend(trace(desired).map(|carrier| (annotations::POD_TRACE_CONTEXT, carrier)));
    wishes.extend(on_restore(desired).into_iter().flatten());
    let (memory, image) = start.unzip();
    let memory = memory.map(|memory| Memory {
        pod_snapshot: observed.pod_snapshot.clone(),
        ..memory
    });
    let pod = runtime_image(desired, observed, memory.as_ref())
        .and_then(|runtime| pod_spec::pod(desired.sandbox, &wishes, memory.as_ref(), runtime));
    match pod {
        Ok(pod) => plan.step(Area::Pod, Action::CreatePod { pod, image }),
        Err(why) => return plan.refuse(Area::Pod, why.to_string()),
    }
    if desired.sandbox.annotations().get(annotations::POD_NAME) != Some(&desired.name) {
        plan.step(Area::Pod, Action::RecordPodName(desired.name.clone()));
    }
    plan.memory.restored = restored;
}

/// What Restored says about a Pod that was not restored: whether memory was left behind.
fn after_cold_start(desired: &Desired<'_>, observed: &Observed) -> Shown {
    let left_behind = own_snapshots(desired, observed).filter_map(|snapshot| {
        let consumed = conditions::find(snapshot.conditions(), conditions::CONSUMED)?;
        (consumed.status == "True" && consumed.reason == snapshot_reasons::SUPERSEDED)
            .then_some(consumed)
    });
    if let Some(consumed) = left_behind.max_by_key(|consumed| consumed.last_transition_time.0) {
        let message = consumed.message.clone();
        return says(conditions::RESTORED, restored::COLD_STARTED, message);
    }
    match shown_before(desired.sandbox, conditions::RESTORED) {
        Some(before) if before.status != "False" => Shown::Remove,
        Some(before) if before.reason == restored::COLD_STARTED => Shown::Keep,
        Some(before) => says(
            conditions::RESTORED,
            restored::COLD_STARTED,
            cold_start_message(&before.reason, &before.message),
        ),
        None => Shown::Remove,
    }
}

/// The trace that the agent's spans belong to. It is told on Pods that an agent may do something with: all others are as upstream's.
fn trace(desired: &Desired<'_>) -> Option<String> {
    pod_spec::runtime_class_name(&desired.sandbox.spec.pod_template.spec)?;
    crate::trace::carried(desired.sandbox).filter(|carrier| carrier.len() <= LONGEST_CARRIER)
}

/// The command that runs in the Pod when it goes on from memory, and its container.
fn on_restore(desired: &Desired<'_>) -> Option<[(&'static str, String); 2]> {
    let command = desired.settings.on_restore_exec.as_ref()?;
    let container = pod_spec::default_container(desired.sandbox)?;
    Some([
        (annotations::ON_RESTORE_EXEC, json!(command).to_string()),
        (annotations::ON_RESTORE_EXEC_CONTAINER, container),
    ])
}

/// When the sandbox falls asleep by itself, what wakes it, and what it starts from when it crashes.
fn by_itself(desired: &Desired<'_>) -> [(&'static str, Option<String>); 6] {
    let settings = &desired.settings;
    let canonical = |after: Option<SleepAfter>| after.map(SleepAfter::canonical);
    [
        (annotations::DOZE_AFTER, canonical(settings.doze_after)),
        (
            annotations::HIBERNATE_AFTER,
            canonical(settings.hibernate_after),
        ),
        (
            annotations::ON_CRASH,
            settings.on_crash.map(|policy| policy.as_str().to_owned()),
        ),
        (
            annotations::WAKE_ON,
            settings.wake_on.as_ref().map(WakeOn::canonical),
        ),
        (
            annotations::NEXT_WAKEUP,
            settings.next_wakeup.as_ref().map(ToString::to_string),
        ),
        (
            annotations::WAKE_AT,
            settings.wake_at.as_ref().map(ToString::to_string),
        ),
    ]
}

// --- a Pod ------------------------------------------------------------------------------------------------------------------------------

/// Torpor's annotations that an existing Pod should carry; `None` takes one off.
pub(in crate::sandbox::plan) fn wishes_for_pod(
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
    wishes.extend(by_itself(desired));
    // While a restore is under way the annotation tells which policy it was begun with.
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

fn restored_condition(pod: &Pod) -> Option<Draft> {
    pod_condition(pod, conditions::POD_RESTORED, conditions::RESTORED)
}

/// The user wants the Sandbox running, and its Pod is there.
pub(in crate::sandbox::plan) fn awake(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
) {
    let shown = evicted::keep(plan, desired, observed, pod)
        .unwrap_or_else(|| hibernated_in_place(desired, observed, pod));
    show_hibernated(plan, desired, observed, shown);
    cancel_suspension(plan, desired, observed, pod);
    plan.memory.restored = match restored_condition(pod) {
        Some(draft) => {
            settle_restore(plan, desired, observed, pod, &draft);
            Shown::Set(draft)
        }
        None if pod.annotations().contains_key(annotations::RESTORE_IMAGE) => Shown::Remove,
        None => after_cold_start(desired, observed),
    };
    forget_used(plan, desired, observed, pod);
}

fn hibernated_in_place(desired: &Desired<'_>, observed: &Observed, pod: &Pod) -> Shown {
    if let Some(draft) = pod_condition(pod, conditions::POD_HIBERNATED, conditions::HIBERNATED) {
        return Shown::Set(draft);
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
        return Shown::Remove;
    };
    let message = format!("{runtime} on node {node:?} cannot hibernate");
    says(
        conditions::HIBERNATED,
        hibernated::RUNTIME_NOT_CAPABLE,
        message,
    )
}

/// Running again before the Pod was deleted: the snapshot goes, and the agent wakes the sandbox before it deletes the bytes.
fn cancel_suspension(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed, pod: &Pod) {
    let uid = pod.uid().unwrap_or_default();
    let Some(snapshot) = snapshot_of_pod(desired, observed, &uid) else {
        return;
    };
    // A Pod that ends takes its memory along; then the image is what is left, and the next Pod continues from it.
    let ends = is_terminating(pod) || matches!(phase(pod), "Succeeded" | "Failed");
    if ends || is_deleting(snapshot) {
        return;
    }
    if snapshot
        .annotations()
        .contains_key(annotations::REPLACES_POD)
    {
        // Somebody may be about to delete the Pod: the next one continues from the image.
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

/// The snapshot that a Pod was made to continue from.
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

/// The agent has said how the restore went.
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
        // A wake in place that failed is the agent's to try again: the image goes with this Pod.
    } else if draft.reason == restored::IMAGE_STALE
        && !pod.annotations().contains_key(annotations::RESTORE_COPY)
    {
        // Somebody has continued from this image already. This Pod never ran; the next one starts cold.
        supersede(plan);
        plan.step(Area::Pod, delete_as_seen(pod));
    } else if draft.status == "False" && policy_was_changed(desired, pod) {
        // The policy is read when the sandbox is made, so that a new Pod is needed for the new one.
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

/// Images that some Pod continued from are of no more use to a Sandbox that runs.
fn forget_used(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed, pod: &Pod) {
    let uid = pod.uid().unwrap_or_default();
    for snapshot in own_snapshots(desired, observed) {
        let used = conditions::find(snapshot.conditions(), conditions::CONSUMED)
            .is_some_and(|c| c.status == "True" && c.reason == snapshot_reasons::RESUMED);
        let this_pods = snapshot.spec.pod_uid.as_deref() == Some(&uid);
        // The Pod that took the image may still be restoring from it; once it says Restored, settle_restore deletes it.
        let status = snapshot.status.as_ref();
        let by_this = status.and_then(|s| s.consumed_by_pod_uid.as_deref()) == Some(&uid);
        let action = delete_snapshot(snapshot, SnapshotFence::Stale);
        let planned = plan.steps.iter().any(|step| step.action == action);
        if used && !this_pods && !by_this && !is_deleting(snapshot) && !planned {
            plan.step(Area::Pod, action);
        }
    }
}

//! Plans a resume: the image that a new Pod continues from.

use std::sync::Arc;

use jiff::Timestamp;
use kube::ResourceExt;
use serde_json::json;
use torpor_api::{
    SandboxSnapshot,
    annotations::{self, OnRestoreFailure, SleepAfter, WakeOn},
    conditions, labels,
    reasons::{restored, snapshot as snapshot_reasons},
};
use torpor_daemon::spans::LONGEST_CARRIER;

use super::{
    super::{Action, Area, ConditionChange, ImageUse, Plan, SnapshotFence},
    archive, backup, condition_false, delete_snapshot, elsewhere, fence, is_deleting,
    is_incomplete, is_resumable,
    location::{
        GIVEN_UP_AFTER, LOOK_FOR_NODE, LOOK_SOON, LostNode, await_node, cold_start, lost,
        may_be_back,
    },
    newest_resumable,
    origin::{record, trusted_node},
    own_snapshots, previous_condition, show_hibernated,
    unclaimed::{self, LeftMemory},
};
use crate::claim::files;
use crate::sandbox::{
    dereference::Observed,
    pod_spec::{self, Memory, Start, inject},
    validate::Desired,
};

/// Reason and message why memory cannot be restored.
pub(super) type Obstacle = (&'static str, String);

/// Plans for a running Sandbox without a Pod.
pub(in crate::sandbox::plan) fn start(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    now: Timestamp,
) {
    show_hibernated(plan, desired, observed, ConditionChange::Remove);
    archive::end(plan, desired, observed);
    if let Some(snapshot) = newest_resumable(desired, observed) {
        if let Some((backup, why)) = backup::in_place_of(desired, observed, snapshot) {
            let (name, message) = (snapshot.name_any(), why.clone());
            plan.step(Area::Pod, Action::SupersedeSnapshot { name, message });
            return continue_from_backup(plan, desired, observed, (backup, &why));
        }
        delete_incomplete(plan, desired, observed);
        return resume(plan, desired, observed, snapshot, now);
    }
    if let Some((backup, why)) = backup::of_lost_pod(desired, observed) {
        return continue_from_backup(plan, desired, observed, (backup, &why));
    }
    let given_up = match unclaimed::settle(plan, desired, observed, now) {
        LeftMemory::Awaited(change) => return show_hibernated(plan, desired, observed, change),
        LeftMemory::GivenUp(why) => Some(why),
        LeftMemory::Nothing => None,
    };
    if let Some((why, backup)) = given_up
        .as_deref()
        .zip(backup::of_last_pod(desired, observed))
    {
        return continue_from_backup(plan, desired, observed, (backup, why));
    }
    delete_incomplete(plan, desired, observed);
    if given_up.is_some() {
        unclaimed::forget(plan, desired);
    }
    if let Some(name) = &desired.settings.restore_from {
        plan.memory.given_up = given_up;
        return copy(plan, desired, observed, name, now);
    }
    let change = match given_up {
        Some(why) => {
            let message = format!("Started without the saved memory. {why}");
            condition_false(conditions::RESTORED, restored::COLD_STARTED, message)
        }
        None => after_cold_start(desired, observed),
    };
    create_pod(plan, desired, observed, None, change);
}

/// Starts a Pod as a copy of a backup. `why`: why there is no newer memory. The record of the last
/// Pod stays until the new one has run, which may need the backup again.
fn continue_from_backup(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    (backup, why): (&SandboxSnapshot, &str),
) {
    delete_incomplete(plan, desired, observed);
    match can_restore(desired, observed, backup, true) {
        Ok(memory) => {
            let memory = Memory {
                backup: Some(backup::words(backup, why)),
                ..memory
            };
            let start = Some((memory, fence(observed, backup, ImageUse::Backup)));
            create_pod(plan, desired, observed, start, ConditionChange::Remove);
        }
        Err((reason, message)) if desired.settings.restore_policy() == OnRestoreFailure::Fail => {
            plan.requeue_after(LOOK_SOON);
            let message = format!("{why}. {message}. To {}", cold_start());
            plan.memory.restored = condition_false(conditions::RESTORED, reason, message);
        }
        Err((reason, message)) => {
            let message = cold_start_message(reason, &format!("{why}. {message}"));
            let change = condition_false(conditions::RESTORED, restored::COLD_STARTED, message);
            create_pod(plan, desired, observed, None, change);
        }
    }
}

/// Deletes snapshots whose save has not completed. The fence finds one that was just committed.
fn delete_incomplete(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed) {
    for snapshot in own_snapshots(desired, observed).filter(|snapshot| is_incomplete(snapshot)) {
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
    if let Some(message) = elsewhere::continued(observed, snapshot) {
        let name = snapshot.name_any();
        return plan.step(Area::Pod, Action::SupersedeSnapshot { name, message });
    }
    match can_restore(desired, observed, snapshot, false) {
        Ok(memory) => {
            let start = Some((memory, fence(observed, snapshot, ImageUse::Resume)));
            create_pod(plan, desired, observed, start, ConditionChange::Remove);
        }
        Err((reason, message)) if elsewhere::waits(reason) => {
            plan.requeue_after(LOOK_SOON);
            plan.memory.restored = condition_false(conditions::RESTORED, reason, message);
        }
        Err((reason, message)) if policy == OnRestoreFailure::Fail => {
            wait_for_node(plan, observed, snapshot);
            let message = format!("{message}. {}", remedy(observed, snapshot));
            plan.memory.restored = condition_false(conditions::RESTORED, reason, message);
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
            let change = condition_false(conditions::RESTORED, restored::COLD_STARTED, message);
            create_pod(plan, desired, observed, None, change);
        }
    }
}

/// Returns the remedy for an image that is not restored.
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

/// Schedules a pass to look for the node of an image.
///
/// No event reports that the node has returned to the cluster, or has left it meanwhile.
fn wait_for_node(plan: &mut Plan, observed: &Observed, snapshot: &SandboxSnapshot) {
    if snapshot.is_missing() || lost(observed, snapshot) == Some(LostNode::Gone) {
        plan.requeue_after(LOOK_FOR_NODE);
    }
}

fn copy(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed, name: &str, now: Timestamp) {
    let named = observed.snapshots.get(name);
    let found = named.ok_or_else(|| {
        let message = format!(
            "SandboxSnapshot {name:?} does not exist in this namespace; `kubectl get sandboxsnapshots` lists the existing ones"
        );
        (restored::SNAPSHOT_NOT_FOUND, message)
    });
    let memory = found.and_then(|snapshot| {
        if !snapshot.is_committed() || is_deleting(snapshot) {
            let message = format!(
                "SandboxSnapshot {name:?} is not committed; its condition Committed has the reason, and the Sandbox starts once it is True"
            );
            return Err((restored::SNAPSHOT_NOT_READY, message));
        }
        Ok((
            can_restore(desired, observed, snapshot, true)?,
            fence(observed, snapshot, ImageUse::Copy),
        ))
    });
    match memory {
        Ok(start) => create_pod(
            plan,
            desired,
            observed,
            Some(start),
            ConditionChange::Remove,
        ),
        Err((reason, mut message))
            if desired.settings.restore_policy() == OnRestoreFailure::Fail
                || named.is_some_and(|named| named.is_archive() && is_new(desired, now)) =>
        {
            if named.is_some_and(|named| named.is_archive()) {
                plan.requeue_after(LOOK_SOON);
            }
            if let Some(snapshot) = named
                && let Some(lost) = lost(observed, snapshot)
            {
                wait_for_node(plan, observed, snapshot);
                message = format!("{message}. {}", lost.remedy());
            }
            plan.memory.restored = condition_false(conditions::RESTORED, reason, message);
        }
        Err((_, message))
            if named.is_some_and(|snapshot| may_be_back(desired, observed, snapshot, now)) =>
        {
            await_node(plan, desired, &message);
        }
        Err((reason, message)) => {
            let message = cold_start_message(reason, &message);
            let change = condition_false(conditions::RESTORED, restored::COLD_STARTED, message);
            create_pod(plan, desired, observed, None, change);
        }
    }
}

/// Reports whether the Sandbox is so new that the obstacle to its archive may pass.
fn is_new(desired: &Desired<'_>, now: Timestamp) -> bool {
    let created = desired.sandbox.metadata.creation_timestamp.as_ref();
    created.is_some_and(|created| now.duration_since(created.0) < GIVEN_UP_AFTER)
}

fn cold_start_message(reason: &str, why: &str) -> String {
    format!("Started without the saved memory ({reason}): {why}")
}

/// Returns the memory to continue from, with the nodes that can restore it.
fn can_restore(
    desired: &Desired<'_>,
    observed: &Observed,
    snapshot: &SandboxSnapshot,
    copy: bool,
) -> Result<Memory, Obstacle> {
    let name = snapshot.name_any();
    let policy = desired.settings.restore_policy();
    let (nodes, server) = match snapshot.is_archive() {
        true => (
            elsewhere::nodes_of_archive(desired, observed, snapshot)?,
            None,
        ),
        false => {
            let origin = trusted_node(observed, snapshot)?;
            let nodes = elsewhere::nodes(desired, observed, snapshot, origin, copy)?;
            let has_others = nodes.iter().any(|node| node != origin);
            let is_served = has_others && elsewhere::is_served(observed, snapshot, origin);
            (nodes, is_served.then(|| origin.to_owned()))
        }
    };
    let saved = record(observed, snapshot);
    Memory::of(snapshot, nodes, server, saved, copy, policy).ok_or_else(|| {
        let message = format!("SandboxSnapshot {name:?} does not name its image and node");
        (restored::SNAPSHOT_NOT_READY, message)
    })
}

/// Returns the image of the runtime to inject into a new Pod, if any.
///
/// A Pod that continues from an image has the runtime if the saved Pod had it, whatever the
/// annotation now asks for. The image could not be restored otherwise.
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
    restored: ConditionChange,
) {
    let mut wishes: Vec<(&str, String)> = Vec::new();
    if desired.settings.hibernate {
        wishes.push((annotations::HIBERNATE, "true".to_owned()));
    }
    if let Some(policy) = desired.settings.on_restore_failure {
        wishes.push((annotations::ON_RESTORE_FAILURE, policy.as_str().to_owned()));
    }
    let sleep = sleep_annotations(desired);
    wishes.extend(
        sleep
            .into_iter()
            .filter_map(|(key, after)| Some((key, after?))),
    );
    wishes.extend(trace(desired).map(|carrier| (annotations::POD_TRACE_CONTEXT, carrier)));
    wishes.extend(on_restore(desired).into_iter().flatten());
    if annotations::binds(desired.sandbox.annotations()) {
        let command = desired.settings.on_claim_exec.as_ref();
        wishes.extend(command.map(|words| (annotations::ON_CLAIM_EXEC, json!(words).to_string())));
        wishes.extend(
            claim_annotations(desired)
                .into_iter()
                .filter_map(|(key, value)| Some((key, value?))),
        );
    }
    let (memory, image) = start.unzip();
    let memory = memory.map(|memory| Memory {
        pod_snapshot: observed.pod_snapshot.clone(),
        ..memory
    });
    let runtime = runtime_image(desired, observed, memory.as_ref());
    let pod = runtime.map_err(pod_spec::Error::from).and_then(|runtime| {
        let start = match (&memory, &observed.golden) {
            (Some(memory), _) => Start::Memory(memory),
            (None, Some(golden)) if restored == ConditionChange::Remove => Start::Golden(golden),
            (None, _) => Start::Cold,
        };
        pod_spec::pod(desired.sandbox, &wishes, start, runtime)
    });
    match pod {
        Ok(pod) => plan.step(Area::Pod, Action::CreatePod { pod, image }),
        Err(why) => return plan.refuse(Area::Pod, why.to_string()),
    }
    if desired.sandbox.annotations().get(annotations::POD_NAME) != Some(&desired.name) {
        plan.step(Area::Pod, Action::RecordPodName(desired.name.clone()));
    }
    plan.memory.restored = restored;
}

/// Returns Restored for a Pod that was not restored, with the memory that it left unused.
pub(super) fn after_cold_start(desired: &Desired<'_>, observed: &Observed) -> ConditionChange {
    let left_behind = own_snapshots(desired, observed).filter_map(|snapshot| {
        let consumed = conditions::find(snapshot.conditions(), conditions::CONSUMED)?;
        (consumed.status == "True" && consumed.reason == snapshot_reasons::SUPERSEDED)
            .then_some(consumed)
    });
    if let Some(consumed) = left_behind.max_by_key(|consumed| consumed.last_transition_time.0) {
        let message = consumed.message.clone();
        return condition_false(conditions::RESTORED, restored::COLD_STARTED, message);
    }
    match previous_condition(desired.sandbox, conditions::RESTORED) {
        Some(before) if before.status != "False" => ConditionChange::Remove,
        Some(before) if before.reason == restored::COLD_STARTED => ConditionChange::Keep,
        Some(before) => condition_false(
            conditions::RESTORED,
            restored::COLD_STARTED,
            cold_start_message(&before.reason, &before.message),
        ),
        None => ConditionChange::Remove,
    }
}

/// Returns the trace for the agent's spans.
///
/// Only Pods that an agent may act on get it. All others are as upstream's.
pub(super) fn trace(desired: &Desired<'_>) -> Option<String> {
    desired
        .sandbox
        .spec
        .pod_template
        .spec
        .runtime_class_name()?;
    crate::trace::carried(desired.sandbox).filter(|carrier| carrier.len() <= LONGEST_CARRIER)
}

/// Returns the annotations with the command that runs after a restore, and its container.
fn on_restore(desired: &Desired<'_>) -> Option<[(&'static str, String); 2]> {
    let command = desired.settings.on_restore_exec.as_ref()?;
    let container = pod_spec::default_container(desired.sandbox)?;
    Some([
        (annotations::ON_RESTORE_EXEC, json!(command).to_string()),
        (annotations::ON_RESTORE_EXEC_CONTAINER, container),
    ])
}

/// Returns the annotations that the kubelet writes into the volume for a claim. Without a claim,
/// and until the Secret with the claim's files is written, the first is empty: it marks Pods that
/// have the volume.
pub(super) fn claim_annotations(desired: &Desired<'_>) -> [(&'static str, Option<String>); 3] {
    let on_sandbox = desired.sandbox.annotations();
    let secret = on_sandbox.get(annotations::CLAIM_SECRET);
    let is_written = secret.is_none_or(|state| state == files::WRITTEN);
    let claim = desired.sandbox.labels().get(labels::CLAIM_UID);
    let claim = claim.filter(|_| is_written);
    let with_claim = |value: Option<&String>| value.filter(|_| claim.is_some()).cloned();
    [
        (annotations::CLAIM, Some(claim.cloned().unwrap_or_default())),
        (
            annotations::CLAIM_ENV,
            with_claim(on_sandbox.get(annotations::CLAIM_ENV)),
        ),
        (annotations::CLAIM_SECRET, with_claim(secret)),
    ]
}

/// Returns the annotations about when the sandbox falls asleep by itself, what wakes it, and what
/// it starts from after a crash.
pub(super) fn sleep_annotations(desired: &Desired<'_>) -> [(&'static str, Option<String>); 6] {
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

//! Plans backups: the image of a sandbox that hibernates in place is also kept off its node
//! (`torpor.dev/back-up-after`).
//!
//! A backup is a SandboxSnapshot that the Sandbox owns. It adopts the image in which the sandbox
//! sleeps, and the node's agent uploads that image. Once the sandbox runs on, the agent marks the
//! backup as superseded, and the controller deletes it.
//!
//! If the node leaves the cluster, the next Pod starts as a copy of the backup. A copy needs no
//! proof that the first Pod has ended, which only the lost node could give.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::json;
use torpor_api::{
    PodRecord, SandboxSnapshot, SnapshotReason, annotations,
    conditions::{self, Draft, Status},
    labels,
    reasons::{hibernated, restored},
    snapshot::{REPOSITORY_PROVISIONER, backup_name},
};

use super::{
    super::{Action, Area, ConditionChange, Plan, SnapshotFence},
    delete_snapshot, evicted, is_deleting, is_terminating,
    location::{LostNode, lost},
    newest, owned_snapshots, restored_condition, snapshot_to_make,
};
use crate::{
    sandbox::{dereference::Observed, validate::Desired},
    saved_pod,
    time_left::time_left,
};

/// Returns the backups of this Sandbox that are not being deleted.
fn own_backups<'a>(
    desired: &'a Desired<'_>,
    observed: &'a Observed,
) -> impl Iterator<Item = &'a Arc<SandboxSnapshot>> {
    let owned = owned_snapshots(desired, observed, SnapshotReason::Manual);
    owned.filter(|one| one.labels().contains_key(labels::BACKUP) && !is_deleting(one))
}

/// Plans for a running Sandbox with its Pod: makes the backup of its sleep, and deletes those of
/// earlier ones.
pub(super) fn plan(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    now: Timestamp,
) {
    let is_wanted = desired.settings.back_up_after.is_some();
    if !is_wanted && own_backups(desired, observed).next().is_none() {
        return;
    }
    let uid = pod.uid().unwrap_or_default();
    // A Pod that has not run yet may be about to start from a backup. A member of a pool is
    // replaced and not restored, and has no record.
    let last = saved_pod::last_pod(desired.sandbox);
    let has_run = last.is_some_and(|record| record.uid == uid) && is_settled(pod);
    if !has_run || is_terminating(pod) || evicted::is_evicted(pod) {
        return;
    }
    let asleep_since = asleep_since(pod);
    let is_current = |backup: &&Arc<SandboxSnapshot>| {
        backup.spec.pod_uid.as_ref() == Some(&uid)
            && !backup.is_consumed()
            && (backup.is_committed() || asleep_since.is_some())
    };
    let (current, old): (Vec<_>, Vec<_>) = own_backups(desired, observed).partition(is_current);
    for backup in old {
        plan.step(Area::Pod, delete_snapshot(backup, SnapshotFence::Stale));
    }
    let wanted = desired.settings.back_up_after.zip(asleep_since);
    let Some((after, since)) = wanted.filter(|_| current.is_empty()) else {
        return;
    };
    if let Some(left) = time_left(after, Some(since), now) {
        return plan.requeue_after(left);
    }
    create(plan, desired, observed, pod, since);
}

/// Returns since when the sandbox has been hibernated in place, if it is.
fn asleep_since(pod: &Pod) -> Option<Timestamp> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let asleep = conditions
        .iter()
        .find(|one| one.type_ == conditions::POD_HIBERNATED && one.status == "True")?;
    Some(asleep.last_transition_time.as_ref()?.0)
}

fn create(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
    since: Timestamp,
) {
    let uid = pod.uid().unwrap_or_default();
    let name = backup_name(&desired.name, &uid, &since.to_string());
    if obstacle(desired, observed).is_some() || observed.snapshots.contains_key(&name) {
        return;
    }
    let Some(record) = PodRecord::of(pod).or_else(|| saved_pod::last_pod(desired.sandbox)) else {
        return;
    };
    let (of, reason) = ((&*uid, &*record.node_name), SnapshotReason::Manual);
    let mut backup = snapshot_to_make(desired, &name, of, reason, Some(&record));
    backup["metadata"]["labels"] = json!({labels::BACKUP: "true"});
    plan.step(Area::Pod, Action::CreateSnapshot(backup));
}

/// Returns why the backups that are wished for are not made.
fn obstacle(desired: &Desired<'_>, observed: &Observed) -> Option<String> {
    desired.settings.back_up_after?;
    let class = observed.snapshot_class.as_ref();
    let has_repository = class.is_some_and(|one| one.spec.provisioner == REPOSITORY_PROVISIONER);
    (!has_repository).then(|| {
        format!(
            "{} needs a SnapshotClass of provisioner {REPOSITORY_PROVISIONER} in {}; no backup is made",
            annotations::BACK_UP_AFTER,
            annotations::SNAPSHOT_CLASS
        )
    })
}

/// Adds to the condition of a sandbox that sleeps in place why it gets no backup.
pub(super) fn with_obstacle(
    change: ConditionChange,
    desired: &Desired<'_>,
    observed: &Observed,
) -> ConditionChange {
    match (change, obstacle(desired, observed)) {
        (ConditionChange::Set(asleep), Some(why)) if asleep.status == "True" => {
            let message = format!("{} {why}.", asleep.message).trim().to_owned();
            ConditionChange::Set(Draft {
                message: message.into(),
                ..asleep
            })
        }
        (change, _) => change,
    }
}

/// Reports whether a Pod that was to start as a copy has done so, or has started cold. Until then
/// the backup may be the only memory.
pub(super) fn is_settled(pod: &Pod) -> bool {
    let restored = restored_condition(pod);
    !pod.annotations().contains_key(annotations::RESTORE_BACKUP)
        || restored.is_some_and(|one| one.status == "True" || one.reason == restored::COLD_STARTED)
}

/// Deletes the backups of a Sandbox whose memory is not wanted any more.
pub(in crate::sandbox::plan) fn discard(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
) {
    for backup in own_backups(desired, observed) {
        plan.step(Area::Pod, delete_snapshot(backup, SnapshotFence::Stale));
    }
}

/// Returns the backup with the same image as a snapshot that is not uploaded, whose node has left
/// the cluster, and why the snapshot cannot be used. A drain may make such a snapshot in the last
/// moment of a node.
pub(super) fn in_place_of<'a>(
    desired: &'a Desired<'_>,
    observed: &'a Observed,
    snapshot: &SandboxSnapshot,
) -> Option<(&'a Arc<SandboxSnapshot>, String)> {
    let is_lost = lost(observed, snapshot) == Some(LostNode::Gone) && !snapshot.is_uploaded();
    let image = |of: &SandboxSnapshot| of.status.as_ref()?.image_id.clone();
    let wanted = image(snapshot).filter(|_| is_lost)?;
    let backup = own_backups(desired, observed)
        .find(|backup| is_usable(backup) && image(backup).as_ref() == Some(&wanted))?;
    let why = format!(
        "The node of SandboxSnapshot {:?} has left the cluster",
        snapshot.name_any()
    );
    Some((backup, why))
}

/// Reports whether a backup is whole and not older than its sandbox.
fn is_usable(backup: &SandboxSnapshot) -> bool {
    backup.is_committed() && backup.is_uploaded() && !backup.is_consumed()
}

/// Returns the backup of the last Pod, and why the Pod's own memory is out of reach, if its node
/// has left the cluster.
pub(super) fn of_lost_pod<'a>(
    desired: &'a Desired<'_>,
    observed: &'a Observed,
) -> Option<(&'a Arc<SandboxSnapshot>, String)> {
    let last = saved_pod::last_pod(desired.sandbox)?;
    let node = &last.node_name;
    let lost = observed.gone_nodes.contains(node);
    let backup = of_last_pod(desired, observed).filter(|_| lost)?;
    Some((backup, format!("Node {node:?} has left the cluster")))
}

/// Returns the newest backup of the last Pod that is whole and not older than its sandbox.
pub(super) fn of_last_pod<'a>(
    desired: &'a Desired<'_>,
    observed: &'a Observed,
) -> Option<&'a Arc<SandboxSnapshot>> {
    let last = saved_pod::last_pod(desired.sandbox)?;
    let of_last = |backup: &&Arc<SandboxSnapshot>| backup.spec.pod_uid.as_ref() == Some(&last.uid);
    let backups = own_backups(desired, observed).filter(of_last);
    newest(backups.filter(|backup| is_usable(backup)))
}

/// Returns the words about a backup that a Pod starts from. `why`: why there is no newer memory.
pub(super) fn words(backup: &SandboxSnapshot, why: &str) -> String {
    let made = backup.committed_at().map(|at| format!(", made at {at:.0}"));
    format!(
        "{why}. This is the backup SandboxSnapshot {:?}{}: a change since then is lost.",
        backup.name_any(),
        made.unwrap_or_default()
    )
}

/// Adds these words to the condition Restored of a Pod that has started from a backup.
pub(super) fn described(pod: &Pod, draft: Draft) -> Draft {
    match pod.annotations().get(annotations::RESTORE_BACKUP) {
        Some(words) if draft.status == "True" => Draft {
            message: format!("{} {words}", draft.message).into(),
            ..draft
        },
        _ => draft,
    }
}

/// Returns Hibernated for a suspended Sandbox whose memory is in a backup.
pub(super) fn kept(backup: &SandboxSnapshot) -> ConditionChange {
    let message = format!(
        "Memory is kept in the backup SandboxSnapshot {:?}, in its repository",
        backup.name_any()
    );
    ConditionChange::Set(Draft::new(
        conditions::HIBERNATED,
        Status::True,
        hibernated::HIBERNATED,
        message,
    ))
}

//! Plans the archive of a suspended Sandbox.
//!
//! 1. The controller creates a SandboxSnapshot of reason Archive for the uploaded image. The
//!    Sandbox owns it.
//! 2. The pass of that snapshot (`controller/src/archive.rs`) writes the record into the repository
//!    and commits the snapshot.
//! 3. The controller removes the owner, so that the archive outlives the Sandbox.
//! 4. The controller deletes the Sandbox, if nobody has changed it since.
//!
//! An archive whose Sandbox is not to be archived any more is deleted.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use kube::ResourceExt;
use serde_json::json;
use torpor_api::{
    Sandbox, SandboxSnapshot,
    archive::{self, LARGEST_MANIFEST},
    conditions, extensions,
    reasons::archived as reasons,
};

use super::{
    super::{Action, Area, ConditionChange, ImageUse, Plan, SnapshotFence},
    condition_false, delete_snapshot, fence, is_deleting,
    origin::record,
};
use crate::{
    owners::owner_reference,
    sandbox::{
        dereference::Observed,
        validate::{Desired, Ownership, ownership},
    },
};

/// Reports whether the plan needs the UID of the cluster.
pub(in crate::sandbox) fn needs_cluster(observed: &Observed) -> bool {
    let desired = crate::sandbox::validate::validate(observed);
    desired.suspended && desired.settings.archive_after.is_some()
}

/// Plans for a suspended Sandbox without a Pod. `image` holds its memory.
pub(super) fn plan(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    image: Option<&Arc<SandboxSnapshot>>,
    now: Timestamp,
) {
    let Some(after) = desired.settings.archive_after else {
        return discard(plan, desired, observed);
    };
    if let Some((reason, message)) = unfit(desired.sandbox) {
        plan.memory.archived = condition_false(conditions::ARCHIVED, reason, message);
        return discard(plan, desired, observed);
    }
    plan.memory.archived = match ready(image, after, now) {
        Err(wait) => {
            if let Some(left) = wait.left {
                plan.requeue_after(left);
            }
            condition_false(conditions::ARCHIVED, wait.reason, wait.message)
        }
        Ok(image) => archive(plan, desired, observed, image),
    };
}

/// Returns why a Sandbox cannot be archived, as reason and message.
fn unfit(sandbox: &Sandbox) -> Option<(&'static str, String)> {
    let mut owners = sandbox.owner_references().iter();
    let holder = owners.find(|owner| {
        let group = owner.api_version.split('/').next();
        owner.controller == Some(true) && group == Some(extensions::GROUP)
    });
    if let Some(holder) = holder {
        let message = format!(
            "{} {:?} holds the Sandbox, which would replace it; only Sandboxes of their own are archived",
            holder.kind, holder.name
        );
        return Some((reasons::HELD, message));
    }
    let mut volumes = sandbox.spec.volume_claim_templates.iter();
    if let Some(volume) = volumes.next() {
        let message = format!(
            "The PersistentVolumeClaim of volumeClaimTemplates {:?} would be deleted with the Sandbox, and the archive does not keep its data",
            volume.metadata.name
        );
        return Some((reasons::HAS_VOLUMES, message));
    }
    let size = serde_json::to_vec(&archive::manifest(sandbox)).map_or(0, |bytes| bytes.len());
    (size > LARGEST_MANIFEST).then(|| {
        let message = format!(
            "The Sandbox' manifest has {size} bytes; an archive keeps at most {LARGEST_MANIFEST}"
        );
        (reasons::TOO_LARGE, message)
    })
}

/// Reason why an archive waits.
struct Wait {
    reason: &'static str,
    message: String,
    /// Time until it is over, if no change ends it.
    left: Option<Duration>,
}

/// Returns the image, once it is in a repository and the time has come.
fn ready(
    image: Option<&Arc<SandboxSnapshot>>,
    after: Duration,
    now: Timestamp,
) -> Result<&Arc<SandboxSnapshot>, Wait> {
    let wait = |reason, message: String| Wait {
        reason,
        message,
        left: None,
    };
    let image = image.ok_or_else(|| {
        let message = "The Sandbox has no saved memory; condition Hibernated has the reason";
        wait(reasons::NO_IMAGE, message.to_owned())
    })?;
    let name = image.name_any();
    let status = image.status.as_ref();
    let committed = status.and_then(|status| status.committed_at.as_ref());
    let since = committed.map(|at| Duration::try_from(now.duration_since(at.0)));
    // A clock behind the node's gives an age of zero.
    let since = since.and_then(Result::ok).unwrap_or_default();
    if let Some(left) = after.checked_sub(since).filter(|left| !left.is_zero()) {
        let message = format!(
            "The Sandbox is archived {} s after its suspension",
            after.as_secs()
        );
        return Err(Wait {
            left: Some(left),
            ..wait(reasons::WAITING, message)
        });
    }
    if image.is_uploaded() {
        return Ok(image);
    }
    match conditions::find(image.conditions(), conditions::UPLOADED) {
        Some(uploaded) => Err(wait(
            reasons::UPLOADING,
            format!("SandboxSnapshot {name:?} is not in its repository yet: {}", uploaded.message),
        )),
        None if image.spec.snapshot_class_name.is_some() => Err(wait(
            reasons::UPLOADING,
            format!("The upload of SandboxSnapshot {name:?} has not begun"),
        )),
        None => Err(wait(
            reasons::NO_REPOSITORY,
            "The memory is on its node's disk only. Resume the Sandbox, set torpor.dev/snapshot-class to a SnapshotClass of provisioner repository.torpor.dev, and suspend it again".to_owned(),
        )),
    }
}

/// Plans the next step of the archive of an uploaded image.
fn archive(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    image: &Arc<SandboxSnapshot>,
) -> ConditionChange {
    let status = image.status.as_ref();
    let image_id = status.and_then(|status| status.image_id.clone());
    let (Some(image_id), Some(cluster)) = (image_id, observed.cluster_uid.as_deref()) else {
        return archiving("The cluster's UID is being read".to_owned());
    };
    let name = archive::name(&desired.name, &image_id);
    let Some(found) = observed.snapshots.get(&name) else {
        let created = json!({
            "apiVersion": "torpor.dev/v1alpha1",
            "kind": "SandboxSnapshot",
            "metadata": {
                "name": name,
                "namespace": desired.namespace,
                "ownerReferences": [owner_reference(desired.sandbox)],
            },
            "spec": {
                "sandboxName": desired.name,
                "reason": "Archive",
                "snapshotClassName": image.spec.snapshot_class_name,
                "archive": {"cluster": cluster, "imageID": image_id},
            },
        });
        plan.step(Area::Pod, Action::CreateSnapshot(created));
        return archiving(format!("SandboxSnapshot {name:?} is being written"));
    };
    if !is_of(desired, observed, found) {
        let message = format!(
            "SandboxSnapshot {name:?} exists and is no archive of this Sandbox; delete it to continue"
        );
        return condition_false(conditions::ARCHIVED, reasons::ARCHIVE_FAILED, message);
    }
    if is_deleting(found) {
        return archiving(format!("SandboxSnapshot {name:?} is being deleted"));
    }
    if !found.is_committed() {
        let committed = conditions::find(found.conditions(), conditions::COMMITTED);
        let message = committed.map_or("it is being written", |one| one.message.as_str());
        let message = format!("SandboxSnapshot {name:?}: {message}");
        return match committed {
            Some(_) => condition_false(conditions::ARCHIVED, reasons::ARCHIVE_FAILED, message),
            None => archiving(message),
        };
    }
    if ownership(&**found, desired.sandbox) == Ownership::Ours {
        let patch = json!({"metadata": {
            "resourceVersion": found.resource_version(), "ownerReferences": [],
        }});
        plan.step(Area::Pod, Action::PatchSnapshot { name, patch });
    } else {
        let delete = Action::DeleteArchived {
            uid: desired.uid.clone(),
            resource_version: desired.sandbox.resource_version().unwrap_or_default(),
            archive: fence(observed, found, ImageUse::Copy),
        };
        plan.step(Area::Pod, delete);
    }
    archiving("The archive is written; the Sandbox is being deleted".to_owned())
}

fn archiving(message: String) -> ConditionChange {
    condition_false(conditions::ARCHIVED, reasons::ARCHIVING, message)
}

/// Reports whether a snapshot is an archive of this Sandbox, and not of an earlier one of its name.
fn is_of(desired: &Desired<'_>, observed: &Observed, snapshot: &SandboxSnapshot) -> bool {
    let saved = record(observed, snapshot).map(|record| &record.sandbox_uid);
    snapshot.is_archive()
        && (ownership(snapshot, desired.sandbox) == Ownership::Ours || saved == Some(&desired.uid))
}

/// Deletes archives of a Sandbox that is not to be archived: it has run on, or will.
pub(super) fn discard(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed) {
    let left = observed.snapshots.values();
    for archive in left.filter(|one| is_of(desired, observed, one) && !is_deleting(one)) {
        plan.step(Area::Pod, delete_snapshot(archive, SnapshotFence::Stale));
    }
}

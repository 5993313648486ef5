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
    OperatingMode, Sandbox, SandboxSnapshot,
    annotations::{self, ArchiveAfter, Settings},
    archive::{self, LARGEST_MANIFEST},
    conditions,
    reasons::archived as reasons,
};

use super::{
    super::{Action, Area, ConditionChange, ImageUse, Plan, SnapshotFence},
    condition_false, delete_snapshot, elsewhere, fence, is_deleting, new_snapshot,
    origin::record,
    previous_condition,
};
use crate::{
    sandbox::{
        dereference::Observed,
        validate::{Desired, Ownership, ownership},
    },
    time_left::time_left,
};

/// Reports whether the plan needs the UID of the cluster.
pub(in crate::sandbox) fn needs_cluster(observed: &Observed) -> bool {
    let sandbox = &observed.sandbox;
    sandbox.spec.operating_mode == OperatingMode::Suspended
        && Settings::read(
            sandbox.metadata.annotations.as_ref(),
            sandbox.spec.pod_template.annotations(),
        )
        .archive_after
        .is_some()
}

/// Memory of a suspended Sandbox without a Pod.
pub(super) enum Kept<'a> {
    In(&'a Arc<SandboxSnapshot>),
    /// It is being saved, or looked for.
    Awaited,
    Nothing,
}

/// Plans for a suspended Sandbox without a Pod.
pub(super) fn plan(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    kept: &Kept<'_>,
    now: Timestamp,
) {
    let Some(after) = desired.settings.archive_after else {
        return discard(plan, desired, observed);
    };
    if let Some((reason, message)) = unfit(desired.sandbox) {
        plan.memory.archived = condition_false(conditions::ARCHIVED, reason, message);
        return discard(plan, desired, observed);
    }
    plan.memory.archived = match ready(desired, observed, kept, after, now) {
        Err(wait) => {
            if let Some(left) = wait.left {
                plan.requeue_after(left);
            }
            condition_false(conditions::ARCHIVED, wait.reason, wait.message)
        }
        Ok(image) => archive(plan, desired, observed, image),
    };
}

/// Shows that a suspension of this strategy leaves no image to archive.
pub(super) fn show_without_image(plan: &mut Plan, desired: &Desired<'_>) {
    if desired.settings.archive_after.is_some() {
        let message = format!(
            "Only {}: Hibernate leaves an image that can be archived",
            annotations::SUSPENSION_STRATEGY
        );
        plan.memory.archived = condition_false(conditions::ARCHIVED, reasons::NO_IMAGE, message);
    }
}

/// Returns why a Sandbox cannot be archived, as reason and message.
fn unfit(sandbox: &Sandbox) -> Option<(&'static str, String)> {
    if let Some(holder) = archive::holder(sandbox) {
        let message = format!(
            "{holder} holds the Sandbox, and would replace it; only Sandboxes of their own are archived"
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
    let size = archive::text(&archive::manifest(sandbox)).len();
    (size > LARGEST_MANIFEST).then(|| {
        let message = format!(
            "The Sandbox' manifest has {size} bytes; an archive keeps at most {LARGEST_MANIFEST}"
        );
        (reasons::TOO_LARGE, message)
    })
}

/// Reason for which an archive waits.
struct Wait {
    reason: &'static str,
    message: String,
    /// Time until it is over, if no change ends it.
    left: Option<Duration>,
}

impl Wait {
    fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
            left: None,
        }
    }
}

/// Returns the image, once it is in a repository and the time has come.
fn ready<'a>(
    desired: &Desired<'_>,
    observed: &Observed,
    kept: &Kept<'a>,
    after: Duration,
    now: Timestamp,
) -> Result<&'a Arc<SandboxSnapshot>, Wait> {
    let image = match kept {
        Kept::In(image) => image,
        Kept::Awaited => {
            let message = "The memory is being saved or looked for; condition Hibernated has more";
            return Err(Wait::new(reasons::UPLOADING, message));
        }
        Kept::Nothing => {
            let message = "The Sandbox has no saved memory; condition Hibernated has the reason";
            return Err(Wait::new(reasons::NO_IMAGE, message));
        }
    };
    if let Some(at) = desired.settings.next_wakeup.filter(|at| *at > now) {
        let message = format!("The Sandbox is to wake at {at:.0}, and is archived after that");
        return Err(Wait::new(reasons::WAITING, message));
    }
    // The memory may have run on in a Pod elsewhere. A resume settles that.
    if let Some(why) = elsewhere::may_have_continued(observed, image) {
        return Err(Wait::new(reasons::ARCHIVE_FAILED, why));
    }
    let name = image.name_any();
    if let Some(left) = time_left(after, image.committed_at(), now) {
        let message = format!(
            "The Sandbox is archived {} s after its suspension",
            after.as_secs()
        );
        return Err(Wait {
            left: Some(left),
            ..Wait::new(reasons::WAITING, message)
        });
    }
    if image.is_uploaded() {
        return Ok(image);
    }
    match conditions::find(image.conditions(), conditions::UPLOADED) {
        Some(uploaded) => Err(Wait::new(
            reasons::UPLOADING,
            format!(
                "SandboxSnapshot {name:?} is not in its repository yet: {}",
                uploaded.message
            ),
        )),
        None if image.spec.snapshot_class_name.is_some() => Err(Wait::new(
            reasons::UPLOADING,
            format!("The upload of SandboxSnapshot {name:?} has not begun"),
        )),
        None => Err(Wait::new(
            reasons::NO_REPOSITORY,
            "The memory is on its node's disk only. Resume the Sandbox, set torpor.dev/snapshot-class to a SnapshotClass of provisioner repository.torpor.dev, and suspend it again",
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
        let message = "The UID of namespace kube-system, which identifies the cluster, cannot be read; the controller's log has the cause";
        return condition_false(conditions::ARCHIVED, reasons::ARCHIVE_FAILED, message);
    };
    let name = archive::name(&desired.name, &image_id);
    let spec = json!({
        "sandboxName": desired.name,
        "reason": "Archive",
        "snapshotClassName": image.spec.snapshot_class_name,
        "archive": {"cluster": cluster, "imageID": image_id},
    });
    let Some(found) = observed.snapshots.get(&name) else {
        let created = new_snapshot(desired, &name, spec);
        plan.step(Area::Pod, Action::CreateSnapshot(created));
        return archiving(format!("SandboxSnapshot {name:?} is being written"));
    };
    let is_the_one = serde_json::to_value(&found.spec).is_ok_and(|found| found == spec);
    if !is_the_one || !is_of(desired, observed, found) {
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
    if !has_manifest(found, desired.sandbox) {
        plan.step(Area::Pod, delete_snapshot(found, SnapshotFence::Stale));
        let message =
            "The Sandbox has changed since its archive was written, which is written anew";
        return archiving(message.to_owned());
    }
    let (own, others): (Vec<_>, Vec<_>) = found
        .owner_references()
        .iter()
        .partition(|owner| owner.uid == desired.uid);
    if !own.is_empty() {
        // Else the archive would go with the Sandbox.
        let patch = json!({"metadata": {
            "resourceVersion": found.resource_version(), "ownerReferences": others,
        }});
        plan.step(Area::Pod, Action::PatchSnapshot { name, patch });
    } else {
        let delete = Action::DeleteArchived {
            uid: desired.uid.clone(),
            resource_version: desired.sandbox.resource_version().unwrap_or_default(),
            archive: fence(observed, found, ImageUse::Copy),
            image: fence(observed, image, ImageUse::OnlyCopy),
        };
        plan.step(Area::Pod, delete);
    }
    archiving("The archive is written; the Sandbox is being deleted".to_owned())
}

/// Reports whether an archive has the present manifest of a Sandbox. The cache has its hash alone.
fn has_manifest(archive: &SandboxSnapshot, sandbox: &Sandbox) -> bool {
    let written = archive.annotations().get(annotations::ARCHIVED_SANDBOX);
    let hash = archive::manifest_hash(&archive::text(&archive::manifest(sandbox)));
    written.is_some_and(|written| *written == hash || archive::manifest_hash(written) == hash)
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

/// Plans for a Sandbox that runs. Its archives go, and so does a request to archive it at once: it
/// was one to the suspension that is over.
pub(super) fn end(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed) {
    discard(plan, desired, observed);
    let own = desired
        .sandbox
        .annotations()
        .get(annotations::ARCHIVE_AFTER);
    let was_suspended = previous_condition(desired.sandbox, conditions::SUSPENDED)
        .is_some_and(|suspended| suspended.status == "True");
    if was_suspended && own.is_some_and(|after| after == ArchiveAfter::NOW) {
        plan.step(Area::Pod, Action::ForgetArchive);
    }
}

/// Deletes archives of a Sandbox that is not to be archived: it has run on, or will.
fn discard(plan: &mut Plan, desired: &Desired<'_>, observed: &Observed) {
    let left = observed.snapshots.values();
    for archive in left.filter(|one| is_of(desired, observed, one) && !is_deleting(one)) {
        plan.step(Area::Pod, delete_snapshot(archive, SnapshotFence::Stale));
    }
}

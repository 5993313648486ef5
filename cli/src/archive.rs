//! `archive` and `restore-archive`: a Sandbox moves into the repository of its SnapshotClass, and
//! back, also into another cluster.

use std::time::Duration;

use jiff::Timestamp;
use kube::ResourceExt;
use kube::api::PostParams;
use serde_json::{Value, json};
use tokio::time::Instant;
use torpor_api::annotations::{
    ARCHIVE_AFTER, ARCHIVED_SANDBOX, ArchiveAfter, SAVED_POD, SNAPSHOT_CLASS, SUSPENSION_STRATEGY,
    Settings, SuspensionStrategy,
};
use torpor_api::conditions::{self, ARCHIVED, COMMITTED, HIBERNATED};
use torpor_api::reasons::{archived, snapshot as reasons};
use torpor_api::snapshot::ArchiveSource;
use torpor_api::{
    OperatingMode, PodRecord, Sandbox, SandboxSnapshot, SandboxSnapshotSpec, SnapshotReason,
    archive,
};

use crate::args::{Archive, RestoreArchive};
use crate::change::{Changed, find, patch};
use crate::connect::{Cluster, call};
use crate::error::Error;
use crate::fork;
use crate::goal::{Goal, Progress, RESUMED, described};
use crate::objects::list;
use crate::view::conditions_of;
use crate::watching::{RECREATED, Wait, refused};

/// Archived Sandbox.
#[derive(Clone, Debug)]
pub struct Done {
    /// The archive; none if the command did not wait.
    pub archive: Option<SandboxSnapshot>,
    pub took: Duration,
}

/// Suspends a Sandbox and archives it. A Sandbox that cannot be archived stays suspended.
pub async fn archive(
    cluster: &Cluster,
    args: &Archive,
    say: &(dyn Fn(&str) + Sync),
) -> Result<Done, Error> {
    let began = Instant::now();
    let known = find(cluster, &args.name).await?;
    let change = request(&known, args.class.as_deref(), Timestamp::now());
    let change = change.map_err(|message| refused(&args.name, &message))?;
    patch(cluster, &known, change).await?;
    if args.timeout.is_zero() {
        return Ok(Done {
            archive: None,
            took: began.elapsed(),
        });
    }
    let wait = Wait::new(cluster, &args.name, "archived", args.timeout, say);
    let gone = wait.until_named(cluster.api::<Sandbox>(), &args.name, |now| {
        progress(&known, now)
    });
    if let Err(error) = gone.await {
        if matches!(error, Error::Refused { .. }) {
            let before = known.annotations().get(ARCHIVE_AFTER);
            let undo = json!({"metadata": {"annotations": {ARCHIVE_AFTER: before}}});
            // The refusal is what the user has to know.
            let _ = patch(cluster, &known, undo).await;
        }
        return Err(error);
    }
    let of_this = |archive: &SandboxSnapshot| {
        let saved = archive.annotations().get(SAVED_POD);
        let saved = saved.and_then(|saved| PodRecord::parse(saved).ok());
        saved.is_some_and(|saved| Some(&saved.sandbox_uid) == known.uid().as_ref())
    };
    match newest(cluster, &args.name).await?.filter(of_this) {
        Some(archive) => Ok(Done {
            archive: Some(archive),
            took: began.elapsed(),
        }),
        None => Err(refused(
            &args.name,
            "deleted meanwhile, and there is no archive of it",
        )),
    }
}

/// Returns the patch that requests an archive; `Err`: why this Sandbox cannot be archived. Pure.
fn request(sandbox: &Sandbox, class: Option<&str>, now: Timestamp) -> Result<Value, String> {
    if let Some(holder) = archive::holder(sandbox) {
        return Err(format!("{holder} holds it, and would replace it"));
    }
    if !sandbox.spec.volume_claim_templates.is_empty() {
        return Err("it has volumeClaimTemplates, whose data an archive does not keep".to_owned());
    }
    let template = sandbox.spec.pod_template.annotations();
    let settings = Settings::read(sandbox.metadata.annotations.as_ref(), template);
    if settings.strategy() != SuspensionStrategy::Hibernate {
        return Err(format!("its {SUSPENSION_STRATEGY} keeps no image"));
    }
    if class.or(settings.snapshot_class.as_deref()).is_none() {
        return Err(format!(
            "it has no SnapshotClass: name one with a repository by --class, or set {SNAPSHOT_CLASS}"
        ));
    }
    let mut patch = Goal::Suspend.patch(sandbox, now)?;
    patch["metadata"]["annotations"][ARCHIVE_AFTER] = json!(ArchiveAfter::NOW);
    let Some(class) = class else {
        return Ok(patch);
    };
    let is_suspended = sandbox.spec.operating_mode == OperatingMode::Suspended;
    if is_suspended
        && sandbox
            .annotations()
            .get(SNAPSHOT_CLASS)
            .map(String::as_str)
            != Some(class)
    {
        return Err(
            "suspended already: its memory is kept by another SnapshotClass; resume it first"
                .to_owned(),
        );
    }
    patch["metadata"]["annotations"][SNAPSHOT_CLASS] = json!(class);
    Ok(patch)
}

/// Returns the progress towards the deletion of an archived Sandbox. Pure.
fn progress(before: &Sandbox, now: Option<&Sandbox>) -> Progress {
    let Some(now) = now else {
        return Progress::Done;
    };
    if now.uid() != before.uid() {
        return Progress::Refused(RECREATED.to_owned());
    }
    if now.metadata.deletion_timestamp.is_some() {
        return Progress::Waiting("being deleted".to_owned());
    }
    if now.spec.operating_mode == OperatingMode::Running {
        return Progress::Refused(RESUMED.to_owned());
    }
    let all = conditions_of(now);
    match conditions::find(all, ARCHIVED) {
        Some(condition) => match condition.reason.as_str() {
            archived::NO_IMAGE
            | archived::NO_REPOSITORY
            | archived::HAS_VOLUMES
            | archived::HELD
            | archived::TOO_LARGE => Progress::Refused(described(condition)),
            _ => Progress::Waiting(described(condition)),
        },
        None => Progress::Waiting(
            conditions::find(all, HIBERNATED)
                .map_or_else(|| "being suspended".to_owned(), described),
        ),
    }
}

/// Has a Sandbox continue from its archive.
pub async fn restore(
    cluster: &Cluster,
    args: &RestoreArchive,
    say: &(dyn Fn(&str) + Sync),
) -> Result<Changed, Error> {
    let began = Instant::now();
    let archive = match (&args.image, &args.from_cluster, &args.class) {
        (Some(image), Some(from), Some(class)) => {
            let source = ArchiveSource {
                cluster: from.clone(),
                image_id: image.clone(),
            };
            import(cluster, args, source, class, say).await?
        }
        _ => named(cluster, &args.name).await?,
    };
    let manifest = manifest(&archive, args.name_as.as_deref(), Timestamp::now());
    let manifest = manifest.map_err(|why| refused(&args.name, &why))?;
    let started = fork::start(cluster, &manifest, &args.name, args.timeout, began, say);
    started.await
}

/// Returns the archive of this name, or the newest of the Sandbox of this name.
async fn named(cluster: &Cluster, name: &str) -> Result<SandboxSnapshot, Error> {
    let doing = format!("get SandboxSnapshot {name}");
    let found = call(&doing, cluster.api::<SandboxSnapshot>().get_opt(name)).await?;
    if let Some(found) = found.filter(SandboxSnapshot::is_archive) {
        return Ok(found);
    }
    newest(cluster, name).await?.ok_or_else(|| {
        let message =
            "there is no archive of this name or Sandbox; to list: `kubectl torpor list-archives`";
        refused(name, message)
    })
}

/// Returns the newest complete archive of a Sandbox.
async fn newest(cluster: &Cluster, sandbox: &str) -> Result<Option<SandboxSnapshot>, Error> {
    let all = list::<SandboxSnapshot>("SandboxSnapshots", &cluster.api()).await?;
    let of_sandbox = all
        .items
        .into_iter()
        .filter(|one| one.is_archive() && one.spec.sandbox_name == sandbox && one.is_committed());
    // The time of the memory: an old archive may have been read today.
    Ok(of_sandbox.max_by_key(|one| {
        let status = one.status.as_ref();
        let committed = status.and_then(|status| status.committed_at.as_ref());
        committed.map(|at| at.0)
    }))
}

/// Returns when an archive was written, or read from another cluster's. Pure.
pub(crate) fn archived_at(archive: &SandboxSnapshot) -> Option<Timestamp> {
    let committed = conditions::find(archive.conditions(), COMMITTED)?;
    Some(committed.last_transition_time.0)
}

/// Makes the SandboxSnapshot of an archive that this cluster does not know, and waits for it.
async fn import(
    cluster: &Cluster,
    args: &RestoreArchive,
    source: ArchiveSource,
    class: &str,
    say: &(dyn Fn(&str) + Sync),
) -> Result<SandboxSnapshot, Error> {
    let api = cluster.api::<SandboxSnapshot>();
    let name = archive::name(&args.name, &source.image_id);
    let spec = SandboxSnapshotSpec {
        archive: Some(source),
        reason: SnapshotReason::Archive,
        sandbox_name: args.name.clone(),
        snapshot_class_name: Some(class.to_owned()),
        ..SandboxSnapshotSpec::default()
    };
    let doing = format!("get SandboxSnapshot {name}");
    let known = match call(&doing, api.get_opt(&name)).await? {
        Some(known) if known.spec == spec => known,
        Some(_) => {
            let message = format!("SandboxSnapshot {name} exists, and is another archive");
            return Err(refused(&args.name, &message));
        }
        None => {
            let doing = format!("create SandboxSnapshot {name}");
            let wanted = SandboxSnapshot::new(&name, spec);
            call(&doing, api.create(&PostParams::default(), &wanted)).await?
        }
    };
    let wait = Wait::new(
        cluster,
        &args.name,
        "read from its archive",
        args.timeout,
        say,
    );
    wait.until(api, &known, imported).await
}

/// Returns the progress of an archive that is read from a repository. Pure.
fn imported(archive: &SandboxSnapshot) -> Progress {
    if archive.is_committed() {
        return Progress::Done;
    }
    let Some(condition) = conditions::find(archive.conditions(), COMMITTED) else {
        return Progress::Waiting("the archive is being read".to_owned());
    };
    match condition.reason.as_str() {
        reasons::KEY_MISSING
        | reasons::ARCHIVE_MISSING
        | reasons::ARCHIVE_CORRUPT
        | reasons::CLUSTER_NOT_ALLOWED
        | reasons::INVALID_CLASS => Progress::Refused(format!(
            "{}. To try again: `kubectl delete sandboxsnapshot {}`, then this command",
            described(condition).trim_end_matches('.'),
            archive.name_any()
        )),
        _ => Progress::Waiting(described(condition)),
    }
}

/// Returns the manifest of the Sandbox that continues from an archive; `Err`: why there is none.
/// Pure.
fn manifest(
    archive: &SandboxSnapshot,
    name: Option<&str>,
    now: Timestamp,
) -> Result<Sandbox, String> {
    let snapshot = archive.name_any();
    if archive.metadata.deletion_timestamp.is_some() {
        return Err(format!("SandboxSnapshot {snapshot} is being deleted"));
    }
    let written = archive.annotations().get(ARCHIVED_SANDBOX);
    let written = written.filter(|_| archive.is_committed()).ok_or_else(|| {
        format!(
            "SandboxSnapshot {snapshot} is not complete; its condition Committed has the reason"
        )
    })?;
    let archived: Sandbox = serde_json::from_str(written).map_err(|error| {
        format!("annotation {ARCHIVED_SANDBOX} of SandboxSnapshot {snapshot}: {error}")
    })?;
    let mut restored = archive::restored(&archived, &snapshot, now);
    let name = name.unwrap_or(&archive.spec.sandbox_name);
    restored.metadata.name = Some(name.to_owned());
    Ok(restored)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::tests::{at, written};

    fn sandbox(mode: &str, annotations: Value, conditions: &[&str]) -> Sandbox {
        serde_json::from_value(json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
            "metadata": {"name": "demo", "uid": "u", "annotations": annotations},
            "spec": {"operatingMode": mode, "podTemplate": {"spec": {"containers": []}}},
            "status": {"conditions": written(conditions, |_, reason| reason)},
        }))
        .unwrap()
    }

    #[test]
    fn a_request_suspends_and_may_name_the_class_of_a_sandbox_that_runs() {
        let now = at("2026-11-28T00:00:00Z");
        let running = sandbox("Running", json!({}), &[]);
        let patch = request(&running, Some("far"), now).unwrap();
        let annotations = json!({ARCHIVE_AFTER: "now", SNAPSHOT_CLASS: "far"});
        assert_eq!(patch["metadata"]["annotations"], annotations);
        assert_eq!(patch["spec"]["operatingMode"], "Suspended");
        let suspended = sandbox("Suspended", json!({SNAPSHOT_CLASS: "near"}), &[]);
        request(&suspended, Some("near"), now).unwrap();
        request(&suspended, None, now).unwrap();
        let without = request(&sandbox("Running", json!({}), &[]), None, now).unwrap_err();
        assert!(without.contains("--class"), "{without}");
        let stops = json!({SUSPENSION_STRATEGY: "Stop", SNAPSHOT_CLASS: "far"});
        request(&sandbox("Running", stops, &[]), None, now).unwrap_err();
        let refusal = request(&suspended, Some("far"), now).unwrap_err();
        assert!(refusal.contains("resume it first"), "{refusal}");
    }

    #[test]
    fn the_progress_ends_with_the_sandbox_or_with_a_reason() {
        let before = sandbox("Running", json!({}), &[]);
        assert_eq!(progress(&before, None), Progress::Done);
        let of = |mode, conditions: &[&str]| {
            progress(&before, Some(&sandbox(mode, json!({}), conditions)))
        };
        assert!(matches!(of("Running", &[]), Progress::Refused(_)));
        assert!(matches!(of("Suspended", &[]), Progress::Waiting(_)));
        let uploading = of("Suspended", &["Archived=False:Uploading"]);
        assert!(matches!(uploading, Progress::Waiting(why) if why.contains("Uploading")));
        let refused = of("Suspended", &["Archived=False:HasVolumes"]);
        assert!(matches!(refused, Progress::Refused(why) if why.contains("HasVolumes")));
        let mut other = sandbox("Suspended", json!({}), &[]);
        other.metadata.uid = Some("v".to_owned());
        assert_eq!(
            progress(&before, Some(&other)),
            Progress::Refused(RECREATED.to_owned())
        );
    }

    fn archive_of(manifest: Option<&str>, conditions: &[&str]) -> SandboxSnapshot {
        serde_json::from_value(json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": {"name": "a", "annotations": {ARCHIVED_SANDBOX: manifest.unwrap_or_default()}},
            "spec": {
                "sandboxName": "demo", "reason": "Archive", "snapshotClassName": "far",
                "archive": {"cluster": "c", "imageID": "u.1"},
            },
            "status": {"conditions": written(conditions, |_, reason| reason)},
        }))
        .unwrap()
    }

    #[test]
    fn a_restored_sandbox_has_the_archives_name_or_a_new_one() {
        let text = r#"{"apiVersion":"agents.x-k8s.io/v1beta1","kind":"Sandbox","metadata":{"name":"old"},"spec":{"podTemplate":{"spec":{"containers":[]}}}}"#;
        let now = at("2026-11-28T00:00:00Z");
        let whole = archive_of(Some(text), &["Committed=True:Committed"]);
        let name = |name| manifest(&whole, name, now).unwrap().name_any();
        assert_eq!((&*name(None), &*name(Some("new"))), ("demo", "new"));
        let part = archive_of(Some(text), &["Committed=False:KeyMissing"]);
        manifest(&part, None, now).unwrap_err();
        let damaged = archive_of(Some("{"), &["Committed=True:Committed"]);
        let why = manifest(&damaged, None, now).unwrap_err();
        assert!(why.contains(ARCHIVED_SANDBOX), "{why}");
    }

    #[test]
    fn an_import_waits_for_a_repository_and_not_for_a_key() {
        let of = |conditions: &[&str]| imported(&archive_of(None, conditions));
        assert_eq!(of(&["Committed=True:Committed"]), Progress::Done);
        let unavailable = of(&["Committed=False:RepositoryUnavailable"]);
        assert!(matches!(unavailable, Progress::Waiting(_)));
        let missing = of(&["Committed=False:KeyMissing"]);
        assert!(
            matches!(missing, Progress::Refused(why) if why.contains("delete sandboxsnapshot a"))
        );
    }
}

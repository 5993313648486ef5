//! Reconciles SandboxSnapshots of reason Archive: writes the record of an archived Sandbox into the
//! repository, or reads it from there.
//!
//! An archive whose image belongs to a suspended Sandbox of this cluster is written. Every other
//! one is read: one of another cluster, or one whose SandboxSnapshot was deleted. Either way the
//! annotations are written before the condition Committed, and the record is in the repository
//! before both. Agents have no part in it.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use serde_json::{Value, json};
use torpor_api::{
    PodRecord, Sandbox, SandboxSnapshot, SandboxSnapshotStatus, annotations,
    archive::{self, ArchiveRecord, LARGEST_MANIFEST},
    conditions::{self, Draft, Status},
    name_hash,
    reasons::{event, snapshot as reasons},
    snapshot::{ArchiveSource, Upload},
};
use torpor_repository::{Health, ImageName, Repository};

use crate::{
    calls,
    context::Context,
    events::{self, Note, Severity},
    outline, repository, saved_pod,
    snapshot::{Error, condition_patch, unless_changed},
};

/// Archives that are written or read at once. Their requests to object stores must not keep the
/// passes of other snapshots waiting.
pub const AT_ONCE: usize = 2;
/// Pause of an archive that waits for others.
const BUSY: Duration = Duration::from_secs(2);

/// Failure to write or read an archive, which the condition Committed shows.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Open(#[from] repository::Error),
    #[error("{}", .0.words())]
    Repository(#[from] torpor_repository::Error),
    #[error("{0}")]
    Corrupt(String),
    /// The repository does not have the whole image.
    #[error("{0}")]
    Damaged(String),
    #[error(
        "the Sandbox' image is not in the repository of this SnapshotClass, or is not its memory any more"
    )]
    NoSource,
}

impl Failure {
    fn reason(&self) -> &'static str {
        match self {
            Self::Open(repository::Error::OtherCluster { .. }) => reasons::CLUSTER_NOT_ALLOWED,
            Self::Open(repository::Error::Cluster(_) | repository::Error::NoCluster) => {
                reasons::REPOSITORY_UNAVAILABLE
            }
            Self::Open(_) => reasons::INVALID_CLASS,
            Self::Repository(error) => match error.reason() {
                "RepositoryDenied" => reasons::REPOSITORY_DENIED,
                "ImageMissing" => reasons::ARCHIVE_MISSING,
                "ImageCorrupt" => reasons::ARCHIVE_CORRUPT,
                "KeyMissing" => reasons::KEY_MISSING,
                "KeyServiceUnavailable" => reasons::KEY_SERVICE_UNAVAILABLE,
                _ => reasons::REPOSITORY_UNAVAILABLE,
            },
            Self::Corrupt(_) => reasons::ARCHIVE_CORRUPT,
            Self::Damaged(_) => reasons::DAMAGED,
            Self::NoSource => reasons::PENDING,
        }
    }
}

/// Runs one pass over an archive. Returns the time until the next attempt, if there is to be one.
pub async fn reconcile(
    snapshot: &SandboxSnapshot,
    context: &Context,
) -> Result<Option<Duration>, Error> {
    let is_settled = snapshot.is_committed() || snapshot.metadata.deletion_timestamp.is_some();
    let Some(source) = snapshot.spec.archive.as_ref().filter(|_| !is_settled) else {
        return Ok(None);
    };
    let Ok(_turn) = context.archives.try_acquire() else {
        return Ok(Some(BUSY));
    };
    let record = match record(snapshot, source, context).await {
        Ok(record) => record,
        Err(Stop::Observe(error)) => return Err(Error::Observe(error)),
        Err(Stop::Failed(failure)) => {
            report(snapshot, &failure, context).await?;
            return Err(Error::Archive(failure.to_string()));
        }
    };
    let Some(annotated) = annotate(snapshot, &record, context).await? else {
        return Ok(None);
    };
    let status = committed(&annotated, &record);
    if write_status(&annotated, &status, context).await? {
        let url = status.upload.as_ref().map_or("", |upload| &upload.url);
        let note = Note {
            severity: Severity::Normal,
            reason: event::SANDBOX_ARCHIVED,
            message: format!(
                "Memory and manifest of Sandbox {:?} are in {url}",
                record.sandbox.name_any()
            ),
        };
        events::publish(&context.api, snapshot, note).await;
    }
    Ok(None)
}

/// Writes a failure into the condition Committed. The same failure keeps its first message: texts
/// of object stores have times and ids in them, and each write starts a pass.
async fn report(
    snapshot: &SandboxSnapshot,
    failure: &Failure,
    context: &Context,
) -> Result<(), Error> {
    let reason = failure.reason();
    let before = conditions::find(snapshot.conditions(), conditions::COMMITTED);
    if before.is_some_and(|before| before.reason == reason) {
        return Ok(());
    }
    let message = failure.to_string();
    let draft = Draft::new(conditions::COMMITTED, Status::False, reason, message);
    let patch = condition_patch(snapshot, draft);
    patch_status(snapshot, &patch, context).await.map(drop)
}

/// Cause for which there is no record.
enum Stop {
    Observe(calls::Error),
    Failed(Failure),
}

impl<E: Into<Failure>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Returns the record of an archive, which is in the repository then.
async fn record(
    snapshot: &SandboxSnapshot,
    source: &ArchiveSource,
    context: &Context,
) -> Result<ArchiveRecord, Stop> {
    let class = snapshot
        .spec
        .snapshot_class_name
        .as_deref()
        .unwrap_or_default();
    let repository = repository::of_cluster(context, class, &source.cluster).await?;
    let namespace = snapshot.namespace().unwrap_or_default();
    let name = ImageName::new(&namespace, &source.image_id);
    let name = name.ok_or_else(|| Failure::Corrupt("its name is no image's".to_owned()))?;
    let own = repository::own_cluster(context).await?;
    let written = match source.cluster == own {
        true => {
            let found = to_write(snapshot, source, repository.url(), context);
            found.await.map_err(Stop::Observe)?
        }
        false => None,
    };
    let is_written = written.is_some();
    let mut record = match written {
        Some(record) => record,
        // The archive of a Sandbox comes from the Sandbox: agents could write a record.
        None if !snapshot.owner_references().is_empty() => return Err(Failure::NoSource.into()),
        None => read(&repository.archive(&name).await?, &source.image_id)?,
    };
    verify(&repository, &name, record.image.digest.as_deref()).await?;
    if is_written {
        repository.put_archive(&name, &record.encode()).await?;
    }
    let bytes = record.image.size_bytes.unwrap_or_default();
    record.image.upload = Some(Upload {
        done_bytes: bytes,
        sent_bytes: 0,
        total_bytes: bytes,
        url: repository.url().to_owned(),
    });
    Ok(record)
}

/// Checks that the repository has the image with this digest, all of its chunks, and that its key
/// is there. The content of the chunks is checked at the restore.
async fn verify(
    repository: &Repository,
    name: &ImageName,
    digest: Option<&str>,
) -> Result<(), Failure> {
    if let Health::Damaged(why) = repository.health(name).await? {
        return Err(Failure::Damaged(why));
    }
    let stored = repository.image(name).await?;
    let manifest: serde_json::Value = serde_json::from_slice(stored.manifest())
        .map_err(|error| Failure::Damaged(format!("the image's manifest: {error}")))?;
    match manifest["digest"].as_str() == digest {
        true => Ok(()),
        false => Err(Failure::Damaged(format!(
            "the repository has another image of this name (digest {}, not {})",
            manifest["digest"],
            digest.unwrap_or_default()
        ))),
    }
}

/// Returns the record of a suspended Sandbox of this cluster; none if the image belongs to none.
async fn to_write(
    snapshot: &SandboxSnapshot,
    source: &ArchiveSource,
    url: &str,
    context: &Context,
) -> Result<Option<ArchiveRecord>, calls::Error> {
    let (namespace, name) = (
        snapshot.namespace().unwrap_or_default(),
        &snapshot.spec.sandbox_name,
    );
    let Some(sandbox) = context.caches.sandboxes.get(&namespace, name) else {
        return Ok(None);
    };
    let sandbox = match outline::is_outline(&*sandbox) {
        true => outline::read_full(&context.api, &*sandbox)
            .await?
            .map(Arc::new),
        false => Some(sandbox),
    };
    let images = context.caches.snapshots.indexed(&namespace, name);
    let pods = context.caches.pods.indexed(&namespace, &name_hash(name));
    Ok(sandbox.and_then(|sandbox| {
        let class = &snapshot.spec.snapshot_class_name;
        let image = images.iter().find(|image| {
            is_source(image, source, &sandbox)
                && image.spec.snapshot_class_name == *class
                && url_of(image) == Some(url)
        })?;
        let pods = pods.iter().map(|pod| &**pod);
        let pod = saved_pod::saved_pod(image, pods, Some(&sandbox))?;
        of(image, &sandbox, pod, Timestamp::now())
    }))
}

/// Reports whether a snapshot holds the memory of this Sandbox in the image, whole in a repository.
fn is_source(image: &SandboxSnapshot, source: &ArchiveSource, sandbox: &Sandbox) -> bool {
    let status = image.status.as_ref();
    let owners = image.owner_references();
    !image.is_archive()
        && image.is_uploaded()
        && !image.is_consumed()
        && status.and_then(|status| status.image_id.as_ref()) == Some(&source.image_id)
        && owners
            .iter()
            .any(|owner| Some(&owner.uid) == sandbox.metadata.uid.as_ref())
}

/// Returns the repository to which an image was uploaded.
fn url_of(image: &SandboxSnapshot) -> Option<&str> {
    let upload = image.status.as_ref()?.upload.as_ref()?;
    Some(&upload.url)
}

/// Returns the record of an image of a Sandbox. Pure.
fn of(
    image: &SandboxSnapshot,
    sandbox: &Sandbox,
    pod: PodRecord,
    now: Timestamp,
) -> Option<ArchiveRecord> {
    let status = image.status.as_ref()?;
    Some(ArchiveRecord {
        archived_at: Time(now),
        pod,
        sandbox: archive::manifest(sandbox),
        image: SandboxSnapshotStatus {
            conditions: Vec::new(),
            node_name: None,
            consumed_by_pod_uid: None,
            upload: None,
            ..status.clone()
        },
    })
}

/// Reads a record, which must be that of the image. Pure.
fn read(bytes: &[u8], image_id: &str) -> Result<ArchiveRecord, Failure> {
    let mut record = ArchiveRecord::decode(bytes).map_err(|e| Failure::Corrupt(e.to_string()))?;
    record.sandbox = archive::manifest(&record.sandbox);
    let corrupt = |why: &str| Err(Failure::Corrupt(why.to_owned()));
    if record.image.image_id.as_deref() != Some(image_id) {
        return corrupt("it is the archive of another image");
    }
    if record.image.digest.is_none() {
        return corrupt("it does not name the image's digest");
    }
    if archive::text(&record.sandbox).len() > LARGEST_MANIFEST {
        return corrupt("its manifest is too large");
    }
    Ok(record)
}

/// Returns the status of a committed archive. Pure.
fn committed(snapshot: &SandboxSnapshot, record: &ArchiveRecord) -> SandboxSnapshotStatus {
    let before = snapshot.conditions().to_vec();
    let mut status = SandboxSnapshotStatus {
        conditions: before,
        node_name: None,
        consumed_by_pod_uid: None,
        ..record.image.clone()
    };
    let archived = record.archived_at.0;
    let name = record.sandbox.name_any();
    let message = format!("Sandbox {name:?}, archived at {archived:.0}");
    for (type_, reason) in [
        (conditions::COMMITTED, reasons::COMMITTED),
        (conditions::UPLOADED, reasons::UPLOADED),
    ] {
        let draft = Draft::new(type_, Status::True, reason, message.clone());
        set(&mut status, draft, snapshot);
    }
    status
}

fn set(status: &mut SandboxSnapshotStatus, draft: Draft, snapshot: &SandboxSnapshot) {
    let generation = snapshot.metadata.generation;
    conditions::set(&mut status.conditions, draft, generation, Timestamp::now());
}

/// Writes the manifest and the record of the Pod. Returns the snapshot afterwards; none if it has
/// changed or is gone.
async fn annotate(
    snapshot: &SandboxSnapshot,
    record: &ArchiveRecord,
    context: &Context,
) -> Result<Option<SandboxSnapshot>, Error> {
    let mut written = saved_pod::annotation(&record.pod);
    written[annotations::ARCHIVED_SANDBOX] = archive::text(&record.sandbox).into();
    let patch = json!({"metadata": {
        "resourceVersion": snapshot.resource_version(), "annotations": written,
    }});
    let (namespace, name) = (
        snapshot.namespace().unwrap_or_default(),
        snapshot.name_any(),
    );
    let written = context
        .api
        .patch::<SandboxSnapshot>(&namespace, &name, &patch);
    unless_changed(written.await)
}

/// Writes the status, if it differs. Returns whether it was written.
async fn write_status(
    snapshot: &SandboxSnapshot,
    status: &SandboxSnapshotStatus,
    context: &Context,
) -> Result<bool, Error> {
    if snapshot.status.as_ref() == Some(status) {
        return Ok(false);
    }
    let version = snapshot.resource_version();
    let patch = json!({"metadata": {"resourceVersion": version}, "status": status});
    patch_status(snapshot, &patch, context).await
}

/// Writes a patch of the status. Returns whether it was written.
async fn patch_status(
    snapshot: &SandboxSnapshot,
    patch: &Value,
    context: &Context,
) -> Result<bool, Error> {
    let (namespace, name) = (
        snapshot.namespace().unwrap_or_default(),
        snapshot.name_any(),
    );
    let written = context
        .api
        .patch_status::<SandboxSnapshot>(&namespace, &name, patch);
    Ok(unless_changed(written.await)?.is_some())
}

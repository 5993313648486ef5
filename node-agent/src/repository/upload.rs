//! Upload of the images of this node's SandboxSnapshots.
//!
//! A committed image is safe on this node. Its upload makes it safe elsewhere, and waits for
//! nothing that a sandbox needs. An upload that is cut off, by a restart of the agent too, is begun
//! again and sends only the missing chunks.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::ResourceExt;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use torpor_api::conditions::{self, Draft, Status};
use torpor_api::reasons::snapshot as reasons;
use torpor_api::snapshot::{SandboxSnapshot, Upload};
use torpor_core::ids::{ImageId, Namespace};
use torpor_repository::{ImageName, LocalFile, Pace, Progress, Repository, Stored};

use super::classes::{self, Repositories};
use super::retries::{Retries, wait_until};
use crate::reconcile::node::Node;
use crate::reconcile::snapshot_index::SnapshotIndex;
use crate::report::bytes::{mebibytes, signed};
use crate::report::metrics::Metrics;
use crate::report::publish::Publisher;

/// Interval at which the progress of an upload is written into the snapshot's status.
const PROGRESS: Duration = Duration::from_secs(15);
/// Time after which the first progress is written. Most uploads end before.
const FIRST_PROGRESS: Duration = Duration::from_secs(2);
/// Pause after the first failure of an upload, and the longest one. It doubles in between.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// UID of a SandboxSnapshot.
type Uid = String;

/// Error of one attempt to upload an image.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Class(#[from] classes::Error),
    #[error("{}", .0.words())]
    Repository(#[from] torpor_repository::Error),
    #[error("cannot read the image: {0}")]
    Image(String),
    #[error(
        "the images of the namespace have {} MiB in the repository already, and its SnapshotClass allows {} MiB (maxSizePerNamespace); delete SandboxSnapshots, or raise the limit",
        mebibytes(*used), mebibytes(*most)
    )]
    Quota { used: u64, most: u64 },
}

impl Error {
    fn reason(&self) -> &'static str {
        match self {
            Self::Class(error) if error.is_about_class() => reasons::INVALID_CLASS,
            Self::Class(_) => reasons::REPOSITORY_UNAVAILABLE,
            Self::Repository(error) => match error.reason() {
                "RepositoryDenied" => reasons::REPOSITORY_DENIED,
                "KeyServiceUnavailable" => reasons::KEY_SERVICE_UNAVAILABLE,
                "ImageUnreadable" => reasons::IMAGE_UNREADABLE,
                _ => reasons::REPOSITORY_UNAVAILABLE,
            },
            Self::Image(_) => reasons::IMAGE_UNREADABLE,
            Self::Quota { .. } => reasons::QUOTA_EXCEEDED,
        }
    }
}

/// The uploads of this node.
pub(crate) struct Uploads {
    pub(crate) node: Arc<Node>,
    pub(crate) snapshots: Arc<SnapshotIndex>,
    pub(crate) repositories: Arc<Repositories>,
    pub(crate) publisher: Publisher,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) pace: Pace,
    pub(crate) at_once: usize,
}

/// Returns the uploads to begin: the oldest images first, as many as fit.
fn to_begin<'a>(
    wanted: impl IntoIterator<Item = &'a Arc<SandboxSnapshot>>,
    running: &HashMap<Uid, CancellationToken>,
    failed: &Retries<Uid>,
    at_once: usize,
    now: Instant,
) -> Vec<&'a Arc<SandboxSnapshot>> {
    let is_due = |snapshot: &&Arc<SandboxSnapshot>| {
        let uid = snapshot.uid().unwrap_or_default();
        !failed.waits(&uid, now) && !running.contains_key(&uid)
    };
    let mut due: Vec<_> = wanted.into_iter().filter(is_due).collect();
    due.sort_by_key(|snapshot| {
        let committed = snapshot
            .status
            .as_ref()
            .and_then(|s| s.committed_at.as_ref());
        (committed.map(|time| time.0), snapshot.uid())
    });
    due.truncate(at_once.saturating_sub(running.len()));
    due
}

/// Uploads until `stop` is cancelled.
pub(crate) async fn run(uploads: Arc<Uploads>, stop: CancellationToken) {
    let mut events = uploads.snapshots.events();
    let mut running: HashMap<Uid, CancellationToken> = HashMap::new();
    let mut failed: Retries<Uid> = Retries::new(FIRST_PAUSE, LONGEST_PAUSE);
    // Uploads that the watch does not show as done yet.
    let mut done: BTreeSet<Uid> = BTreeSet::new();
    let mut tasks: JoinSet<(Uid, bool)> = JoinSet::new();
    loop {
        let mut wanted = uploads.wanted();
        let uids: BTreeSet<Uid> = wanted.iter().filter_map(|one| one.uid()).collect();
        done.retain(|uid| uids.contains(uid));
        wanted.retain(|one| one.uid().is_none_or(|uid| !done.contains(&uid)));
        let is_wanted = |uid: &Uid| wanted.iter().any(|one| one.uid().as_ref() == Some(uid));
        // A sandbox that runs again does not need its image any more.
        running
            .iter()
            .filter(|(uid, _)| !is_wanted(uid))
            .for_each(|(_, stop)| stop.cancel());
        failed.retain(is_wanted);
        let now = Instant::now();
        let begin = to_begin(&wanted, &running, &failed, uploads.at_once, now);
        for snapshot in begin {
            let uid = snapshot.uid().unwrap_or_default();
            let cancelled = stop.child_token();
            running.insert(uid.clone(), cancelled.clone());
            let (uploads, snapshot) = (uploads.clone(), snapshot.clone());
            tasks.spawn(async move {
                // A dropped upload leaves chunks that the next attempt finds.
                tokio::select! {
                    done = uploads.one(&snapshot) => (uid, done),
                    () = cancelled.cancelled() => (uid, false),
                }
            });
        }
        let waiting = wanted.iter().filter(|one| {
            let uid = one.uid().unwrap_or_default();
            !running.contains_key(&uid) && !failed.has_failed(&uid)
        });
        for snapshot in waiting {
            uploads.queued(snapshot).await;
        }
        // Cancel-safe: all arms only wait.
        tokio::select! {
            Ok(()) = events.changed() => {}
            () = wait_until(failed.due(now)) => {}
            Some(ended) = tasks.join_next() => {
                let Ok((uid, is_done)) = ended else { continue };
                running.remove(&uid);
                match is_done {
                    true => {
                        failed.succeeded(&uid);
                        done.insert(uid);
                    }
                    false => {
                        failed.failed(uid, Instant::now());
                    }
                }
            }
            () = stop.cancelled() => return tasks.shutdown().await,
        }
    }
}

impl Uploads {
    fn wanted(&self) -> Vec<Arc<SandboxSnapshot>> {
        let mut wanted = self.snapshots.to_upload();
        wanted.retain(|snapshot| {
            let class = snapshot.spec.snapshot_class_name.as_deref();
            class.is_some_and(|class| self.repositories.uploads(class))
        });
        wanted
    }

    /// Uploads the image of one snapshot, and reports it. Returns whether it was uploaded.
    async fn one(&self, snapshot: &SandboxSnapshot) -> bool {
        let progress = Progress::default();
        let begun = Instant::now();
        let uploaded = async {
            let class = snapshot
                .spec
                .snapshot_class_name
                .clone()
                .unwrap_or_default();
            let repository = self.repositories.of(&class, None).await?;
            // An image that has lost an object is mended whatever the limit is now.
            let is_new = snapshot.upload_reason() != Some(reasons::DAMAGED);
            if let Some(most) = repository.max_size().filter(|_| is_new) {
                let used = self.snapshots.uploaded_bytes(snapshot);
                let own = size(snapshot);
                if used.saturating_add(own) > most {
                    return Err(Error::Quota { used, most });
                }
            }
            let stored = self.upload(snapshot, &repository, &progress).await?;
            Ok::<_, Error>((repository, stored))
        };
        match uploaded.await {
            Ok((repository, stored)) => {
                self.metrics.uploaded(stored.sent, begun.elapsed());
                self.done(snapshot, &repository, stored).await
            }
            Err(error) => {
                let (namespace, name) = (snapshot.namespace(), snapshot.name_any());
                tracing::warn!(%error, ?namespace, name, "cannot upload an image; it is retried");
                let reason = error.reason();
                self.metrics.upload_failed(reason);
                let message =
                    format!("{error}. The image is safe on its node; the upload is retried");
                self.report(snapshot, reason, message, None).await;
                false
            }
        }
    }

    async fn upload(
        &self,
        snapshot: &SandboxSnapshot,
        repository: &Repository,
        progress: &Progress,
    ) -> Result<Stored, Error> {
        let (name, manifest, files) = self.open(snapshot).await?;
        let uploading = repository.upload(&name, manifest, files, progress, &self.pace);
        tokio::pin!(uploading);
        let first = tokio::time::Instant::now() + FIRST_PROGRESS;
        let mut reports = tokio::time::interval_at(first, PROGRESS);
        loop {
            // Cancel-safe: the upload is only polled again, and the interval only waits.
            tokio::select! {
                done = &mut uploading => return Ok(done?),
                _ = reports.tick() => {
                    let (done, total) = (progress.done(), progress.total());
                    let message = format!(
                        "{} of {} MiB are in {}",
                        mebibytes(done), mebibytes(total), repository.url()
                    );
                    let upload = upload_status(repository, total, done, progress.sent());
                    self.report(snapshot, reasons::UPLOADING, message, Some(upload)).await;
                }
            }
        }
    }

    /// Opens the image of a snapshot: its name in the repository, its manifest and its files.
    async fn open(
        &self,
        snapshot: &SandboxSnapshot,
    ) -> Result<(ImageName, Vec<u8>, Vec<LocalFile>), Error> {
        let status = snapshot.status.as_ref();
        let id = status
            .and_then(|status| status.image_id.clone())
            .unwrap_or_default();
        let namespace = snapshot.namespace().unwrap_or_default();
        let node = self.node.clone();
        let opened = tokio::task::spawn_blocking(move || {
            let unreadable = |error: &dyn std::fmt::Display| Error::Image(error.to_string());
            let name =
                ImageName::new(&namespace, &id).ok_or_else(|| unreadable(&"it has no name"))?;
            let namespace = Namespace::new(namespace).map_err(|e| unreadable(&e))?;
            let id = ImageId::parse(&id).map_err(|e| unreadable(&e))?;
            let image = node
                .store
                .image(&namespace, &id)
                .map_err(|e| unreadable(&e))?;
            let (manifest, _) = image.manifest().encode().map_err(|e| unreadable(&e))?;
            let files = image.manifest().files.iter().map(|file| {
                let opened = image.open_file(&file.name).map_err(|e| unreadable(&e))?;
                let (name, file) = (file.name.clone(), opened.into());
                Ok(LocalFile { name, file })
            });
            let files: Result<Vec<_>, Error> = files.collect();
            Ok((name, manifest, files?))
        });
        opened
            .await
            .unwrap_or_else(|error| Err(Error::Image(error.to_string())))
    }

    async fn done(
        &self,
        snapshot: &SandboxSnapshot,
        repository: &Repository,
        stored: Stored,
    ) -> bool {
        let Stored { size, sent } = stored;
        let message = format!(
            "The image is in {}: {} MiB, of which {} MiB were sent",
            repository.url(),
            mebibytes(size),
            mebibytes(sent)
        );
        let upload = upload_status(repository, size, size, sent);
        let draft = Draft::new(
            conditions::UPLOADED,
            Status::True,
            reasons::UPLOADED,
            message,
        );
        self.publisher
            .upload(&self.snapshots, snapshot, draft, Some(upload))
            .await
    }

    async fn queued(&self, snapshot: &SandboxSnapshot) {
        if conditions::find(snapshot.conditions(), conditions::UPLOADED).is_none() {
            let message = "The upload waits for its turn (--uploads-at-once)".to_owned();
            self.report(snapshot, reasons::QUEUED, message, None).await;
        }
    }

    async fn report(
        &self,
        snapshot: &SandboxSnapshot,
        reason: &'static str,
        message: String,
        upload: Option<Upload>,
    ) {
        let draft = Draft::new(conditions::UPLOADED, Status::False, reason, message);
        self.publisher
            .upload(&self.snapshots, snapshot, draft, upload)
            .await;
    }
}

/// Returns the bytes of a snapshot's image.
fn size(snapshot: &SandboxSnapshot) -> u64 {
    let status = snapshot.status.as_ref();
    let size = status.and_then(|status| status.size_bytes);
    u64::try_from(size.unwrap_or_default()).unwrap_or_default()
}

fn upload_status(repository: &Repository, total: u64, done: u64, sent: u64) -> Upload {
    Upload {
        done_bytes: signed(done),
        sent_bytes: signed(sent),
        total_bytes: signed(total),
        url: repository.url().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn snapshot(uid: &str, committed: &str) -> Arc<SandboxSnapshot> {
        let object = json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": { "name": uid, "namespace": "n", "uid": uid },
            "spec": { "sandboxName": "s" },
            "status": { "committedAt": committed },
        });
        Arc::new(serde_json::from_value(object).expect("a snapshot"))
    }

    #[test]
    fn the_oldest_images_go_first_and_as_many_as_are_allowed() {
        let all = [
            snapshot("young", "2026-01-03T00:00:00Z"),
            snapshot("old", "2026-01-01T00:00:00Z"),
            snapshot("middle", "2026-01-02T00:00:00Z"),
        ];
        let now = Instant::now();
        let mut running = HashMap::new();
        let mut failed = Retries::new(FIRST_PAUSE, LONGEST_PAUSE);
        let begin = |running: &_, failed: &_, at_once, now| -> Vec<String> {
            let chosen = to_begin(&all, running, failed, at_once, now);
            chosen.iter().map(|one| one.name_any()).collect()
        };
        assert_eq!(begin(&running, &failed, 2, now), ["old", "middle"]);
        running.insert("old".to_owned(), CancellationToken::new());
        assert_eq!(begin(&running, &failed, 2, now), ["middle"]);
        assert_eq!(begin(&running, &failed, 1, now), [""; 0]);
        let until = failed.failed("middle".to_owned(), now);
        assert_eq!(begin(&running, &failed, 2, now), ["young"]);
        assert_eq!(begin(&running, &failed, 2, until), ["middle"]);
    }

    #[test]
    fn failures_are_repeated_less_and_less_often() {
        let now = Instant::now();
        let mut failed = Retries::new(FIRST_PAUSE, LONGEST_PAUSE);
        let pauses: Vec<u64> = (0..9)
            .map(|_| (failed.failed("image", now) - now).as_secs())
            .collect();
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 300, 300, 300]);
    }
}

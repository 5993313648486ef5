//! Download of images for Pods of this node that continue from images of other nodes.
//!
//! Meanwhile the Pod's shim waits in the creation of the sandbox
//! (`node-agent/sandbox/src/restore/fetched.rs`). The order of the steps is that of [`plan`]: the
//! claim is in the API before the first byte is on the disk.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::runtime::reflector::Store as Cache;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use torpor_api::reasons::restored as reasons;
use torpor_api::{annotations, conditions};
use torpor_core::ids::{ImageId, Namespace, PodUid};
use torpor_core::state::ImageState;
use torpor_records::FetchFailure;
use torpor_repository::{ImageName, Progress, Repository, StoredImage};
use torpor_snapshots::{Manifest, Partial};

use super::claims::Claims;
use super::classes::{self, Repositories};
use crate::reconcile::desired::condition;
use crate::reconcile::node::Node;
use crate::reconcile::snapshot_index::SnapshotIndex;
use crate::report::bytes::mebibytes;
use crate::report::metrics::Metrics;
use crate::report::publish::Publisher;

mod plan;

use plan::{Held, Place, Plan, Seen, Want, parsed};

/// Interval at which the progress of a fetch is written into the Pod's condition.
const PROGRESS: Duration = Duration::from_secs(2);
/// Pause after a failure, and the longest one. It doubles in between.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Pause after a failure to write the claims.
const CLAIM_PAUSE: Duration = Duration::from_secs(1);
/// Time for which a Pod that may start cold waits for a repository that does not answer.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(60);

/// Error of one attempt to fetch an image.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Class(#[from] classes::Error),
    #[error("{}", .0.words())]
    Repository(#[from] torpor_repository::Error),
    #[error("{0}")]
    Corrupt(String),
    #[error("{0}")]
    NoRoom(String),
    #[error("cannot write the image to this node's disk: {0}")]
    Disk(String),
}

impl Error {
    fn reason(&self) -> &'static str {
        match self {
            Self::Class(_) => reasons::REPOSITORY_UNAVAILABLE,
            Self::Repository(error) => match error.reason() {
                "RepositoryDenied" => reasons::REPOSITORY_DENIED,
                "ImageMissing" => reasons::IMAGE_MISSING,
                "ImageCorrupt" => reasons::IMAGE_CORRUPT,
                "KeyMissing" => reasons::KEY_MISSING,
                _ => reasons::REPOSITORY_UNAVAILABLE,
            },
            Self::Corrupt(_) => reasons::IMAGE_CORRUPT,
            Self::NoRoom(_) => reasons::NO_ROOM,
            Self::Disk(_) => reasons::RESTORE_FAILED,
        }
    }

    /// Reports whether another attempt fails too, as far as this node can tell.
    fn is_final(&self) -> bool {
        match self {
            Self::Repository(error) => error.is_final(),
            Self::Corrupt(_) => true,
            Self::Class(_) | Self::NoRoom(_) | Self::Disk(_) => false,
        }
    }
}

fn disk(error: &dyn std::fmt::Display) -> Error {
    Error::Disk(error.to_string())
}

/// The downloads of this node.
pub(crate) struct Fetches {
    pub(crate) node: Arc<Node>,
    pub(crate) pods: Cache<Pod>,
    /// Changes with every event about a Pod of this node.
    pub(crate) pod_events: watch::Receiver<u64>,
    pub(crate) snapshots: Arc<SnapshotIndex>,
    pub(crate) repositories: Arc<Repositories>,
    pub(crate) publisher: Publisher,
    pub(crate) metrics: Arc<Metrics>,
}

/// An image whose fetch has failed.
#[derive(Debug, Clone, Copy)]
struct Failed {
    times: u32,
    since: Instant,
    /// No attempt is made before.
    until: Instant,
}

/// Fetches until `stop` is cancelled.
pub(crate) async fn run(fetches: Arc<Fetches>, stop: CancellationToken) {
    let publisher = &fetches.publisher;
    let mut claims = Claims::new(publisher.client().clone(), publisher.node_name().to_owned());
    let mut pod_events = fetches.pod_events.clone();
    let mut snapshot_events = fetches.snapshots.events();
    let mut running: HashMap<Place, CancellationToken> = HashMap::new();
    let mut failed: BTreeMap<Place, Failed> = BTreeMap::new();
    let mut tasks: JoinSet<(Place, bool)> = JoinSet::new();
    loop {
        let now = Instant::now();
        let wants = fetches.wants();
        let mut retry_at = None;
        match fetches.next(&mut claims, &wants).await {
            Err(error) => {
                tracing::warn!(%error, "cannot claim the images that Pods of this node need");
                retry_at = Some(now + CLAIM_PAUSE);
            }
            Ok(plan) => {
                let is_wanted = |place: &Place| plan.fetch.iter().any(|want| want.place == *place);
                running
                    .iter()
                    .filter(|(place, _)| !is_wanted(place))
                    .for_each(|(_, stop)| stop.cancel());
                failed.retain(|place, _| is_wanted(place));
                let removed = plan
                    .remove
                    .iter()
                    .filter(|place| !running.contains_key(*place));
                fetches.remove(removed.cloned().collect()).await;
                for want in plan.fetch {
                    let place = want.place.clone();
                    let before = failed.get(&place).copied();
                    if running.contains_key(&place) || before.is_some_and(|one| one.until > now) {
                        continue;
                    }
                    let cancelled = stop.child_token();
                    running.insert(place.clone(), cancelled.clone());
                    let fetches = fetches.clone();
                    let since = before.map_or(now, |one| one.since);
                    tasks.spawn(async move {
                        // A dropped fetch leaves a partial image, which the next one removes.
                        tokio::select! {
                            done = fetches.one(&want, since) => (place, done),
                            () = cancelled.cancelled() => (place, true),
                        }
                    });
                }
            }
        }
        fetches.release_ending(&wants).await;
        let due = failed
            .values()
            .map(|one| one.until)
            .filter(|until| *until > now);
        let next = due.chain(retry_at).min();
        let retry = async {
            match next {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        // Cancel-safe: all arms only wait.
        tokio::select! {
            Ok(()) = pod_events.changed() => {}
            Ok(()) = snapshot_events.changed() => {}
            () = retry => {}
            Some(ended) = tasks.join_next() => {
                let Ok((place, done)) = ended else { continue };
                running.remove(&place);
                match done {
                    true => drop(failed.remove(&place)),
                    false => drop(failed.insert(place.clone(), again(failed.get(&place), Instant::now()))),
                }
            }
            () = stop.cancelled() => return tasks.shutdown().await,
        }
    }
}

fn again(before: Option<&Failed>, now: Instant) -> Failed {
    let times = before.map_or(0, |failed| failed.times) + 1;
    let pause = FIRST_PAUSE.saturating_mul(1 << (times - 1).min(10));
    Failed {
        times,
        since: before.map_or(now, |failed| failed.since),
        until: now + pause.min(LONGEST_PAUSE),
    }
}

/// Returns what a Pod wants to fetch; none if it continues from no image of a repository.
fn want(pod: &Pod) -> Option<Want> {
    let annotated = |key: &str| pod.annotations().get(key).cloned();
    let image = ImageId::parse(&annotated(annotations::RESTORE_IMAGE)?).ok()?;
    let restored = condition(pod, conditions::POD_RESTORED);
    let cold = restored.and_then(|one| one.reason.as_deref()) == Some(reasons::COLD_STARTED);
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    Some(Want {
        pod: PodUid::new(pod.uid()?).ok()?,
        place: (Namespace::new(pod.namespace()?).ok()?, image),
        digest: annotated(annotations::RESTORE_DIGEST)?,
        class: annotated(annotations::RESTORE_CLASS)?,
        copy: annotated(annotations::RESTORE_COPY).as_deref() == Some("true"),
        cold_start: annotated(annotations::ON_RESTORE_FAILURE).as_deref()
            == Some(annotations::OnRestoreFailure::ColdStart.as_str()),
        settled: cold || restored.is_some_and(|one| one.status == "True"),
        ends: pod.metadata.deletion_timestamp.is_some()
            || matches!(phase, Some("Succeeded" | "Failed")),
    })
}

impl Fetches {
    fn wants(&self) -> Vec<Want> {
        self.pods
            .state()
            .iter()
            .filter_map(|pod| want(pod))
            .collect()
    }

    /// Decides, and writes the claims. The rest of the plan holds once they are written.
    async fn next(
        &self,
        claims: &mut Claims,
        wants: &[Want],
    ) -> Result<Plan, super::claims::Error> {
        let pods = self
            .pods
            .state()
            .iter()
            .filter_map(|pod| PodUid::new(pod.uid()?).ok())
            .collect();
        let node = self.node.clone();
        let mut wants = wants.to_vec();
        let disk = tokio::task::spawn_blocking(move || {
            // An image that this node made itself is not fetched.
            wants.retain(|want| !is_own(&node, &want.place));
            (held(&node), wants)
        });
        let (held, wants) = disk.await.unwrap_or_default();
        let known = claims.read().await?.to_vec();
        let named: BTreeSet<Place> = known
            .iter()
            .filter_map(|claim| Some(parsed(claim)?.0))
            .filter(|(namespace, image)| self.snapshots.is_named(namespace.as_str(), image))
            .collect();
        let plan = plan::plan(&Seen {
            wants: &wants,
            pods: &pods,
            held: &held,
            claims: &known,
            named: &named,
        });
        claims.write(&plan.claims).await?;
        Ok(plan)
    }

    async fn remove(&self, places: Vec<Place>) {
        if places.is_empty() {
            return;
        }
        let node = self.node.clone();
        let removed = tokio::task::spawn_blocking(move || {
            let store = node.store.fetched();
            for (namespace, image) in places {
                let partial = store.remove_partial(&namespace, &image);
                let whole = store.remove_image(&namespace, &image);
                for error in [partial.err(), whole.err()].into_iter().flatten() {
                    tracing::warn!(%error, %image, "cannot remove a fetched image");
                }
            }
        });
        let _ = removed.await;
    }

    /// Ends the wait of the shims of Pods that are being deleted.
    async fn release_ending(&self, wants: &[Want]) {
        for want in wants.iter().filter(|want| want.ends && !want.settled) {
            let message = "the Pod is being deleted; its image is not fetched".to_owned();
            self.note(want, "PodDeleted", message, true).await;
        }
    }

    async fn note(&self, want: &Want, reason: &str, message: String, pod_ends: bool) {
        let failure = FetchFailure {
            reason: reason.to_owned(),
            message,
            pod_ends,
        };
        let (node, pod) = (self.node.clone(), want.pod.clone());
        let noted =
            tokio::task::spawn_blocking(move || node.records.note_fetch(&pod, Some(&failure)));
        if let Ok(Err(error)) = noted.await {
            tracing::warn!(%error, "cannot note that an image was not fetched");
        }
    }

    /// Fetches an image for a Pod. Returns whether the image is on this node. `since`: the time of
    /// the first attempt.
    async fn one(&self, want: &Want, since: Instant) -> bool {
        let begun = Instant::now();
        let progress = Progress::default();
        match self.fetch(want, &progress).await {
            Ok(()) => {
                self.metrics.fetched(progress.sent(), begun.elapsed());
                let (node, pod) = (self.node.clone(), want.pod.clone());
                let _ =
                    tokio::task::spawn_blocking(move || node.records.note_fetch(&pod, None)).await;
                true
            }
            Err(error) => {
                let (reason, image) = (error.reason(), &want.place.1);
                tracing::warn!(%error, %image, pod = %want.pod, "cannot fetch an image");
                self.metrics.fetch_failed(reason);
                let gives_up = want.cold_start && since.elapsed() >= GIVEN_UP_AFTER;
                let message = format!("Image {image} cannot be fetched: {error}");
                if error.is_final() || gives_up {
                    self.note(want, reason, message.clone(), false).await;
                }
                self.report(want, reason, format!("{message}. The fetch is retried"))
                    .await;
                false
            }
        }
    }

    async fn fetch(&self, want: &Want, progress: &Progress) -> Result<(), Error> {
        let repository = self.repositories.of(&want.class).await?;
        let (namespace, image) = &want.place;
        let name = ImageName::new(namespace.as_str(), &image.to_string());
        let name = name.ok_or_else(|| Error::Corrupt(format!("{image} names no image")))?;
        let stored = repository.image(&name).await?;
        let manifest = checked(&stored, want)?;
        let (partial, files) = self.begin(want, &manifest).await?;
        self.download(want, &repository, &stored, files, progress)
            .await?;
        let content = stored.manifest().to_vec();
        let committed = tokio::task::spawn_blocking(move || partial.commit_copy(&content));
        let committed = committed.await.map_err(|error| disk(&error))?;
        committed.map_err(|error| Error::Corrupt(error.to_string()))?;
        Ok(())
    }

    async fn download(
        &self,
        want: &Want,
        repository: &Repository,
        stored: &StoredImage,
        files: Vec<File>,
        progress: &Progress,
    ) -> Result<(), Error> {
        let downloading = repository.fetch(stored, files, progress);
        tokio::pin!(downloading);
        let mut reports = tokio::time::interval(PROGRESS);
        loop {
            // Cancel-safe: the download is only polled again, and the interval only waits.
            tokio::select! {
                done = &mut downloading => return Ok(done?),
                _ = reports.tick() => {
                    let message = format!(
                        "{} of {} MiB of image {} are here, from {}",
                        mebibytes(progress.done()), mebibytes(progress.total()),
                        want.place.1, repository.url()
                    );
                    self.report(want, reasons::FETCHING, message).await;
                }
            }
        }
    }

    /// Makes the image's directory and its empty files.
    async fn begin(&self, want: &Want, manifest: &Manifest) -> Result<(Partial, Vec<File>), Error> {
        let (node, (namespace, image)) = (self.node.clone(), want.place.clone());
        let names: Vec<String> = manifest
            .files
            .iter()
            .map(|file| file.name.clone())
            .collect();
        let size = manifest.size();
        let begun = tokio::task::spawn_blocking(move || {
            let store = node.store.fetched();
            let room = store.check_room(size, node.limits.reserve);
            room.map_err(|error| Error::NoRoom(error.to_string()))?;
            store
                .remove_partial(&namespace, &image)
                .map_err(|error| disk(&error))?;
            let partial = store
                .begin(&namespace, &image)
                .map_err(|error| disk(&error))?;
            let files = names
                .iter()
                .map(|name| partial.open_file(name).map(File::from));
            let files: Result<Vec<File>, _> = files.collect();
            Ok((partial, files.map_err(|error| disk(&error))?))
        });
        begun.await.map_err(|error| disk(&error))?
    }

    async fn report(&self, want: &Want, reason: &'static str, message: String) {
        let pod = self
            .pods
            .find(|pod| pod.uid().as_deref() == Some(want.pod.as_str()));
        if let Some(pod) = pod {
            self.publisher.fetch(&pod, reason, message).await;
        }
    }
}

/// Returns whether this node made the image itself and still has it.
fn is_own(node: &Node, (namespace, image): &Place) -> bool {
    let found = node.store.image(namespace, image);
    let fetched = node.store.fetched().image(namespace, image);
    found.is_ok() && fetched.is_err()
}

fn held(node: &Node) -> Vec<Held> {
    let listed = node.store.fetched().list().unwrap_or_default();
    let held = listed.into_iter().map(|image| Held {
        whole: image.state == ImageState::Committed,
        consumed_by: image.consumed_by,
        place: (image.namespace, image.id),
    });
    held.collect()
}

/// Checks the manifest of an image in a repository: it must be the one that the SandboxSnapshot
/// names, and its files those that the repository has.
fn checked(stored: &StoredImage, want: &Want) -> Result<Manifest, Error> {
    let (manifest, digest) =
        Manifest::decode(stored.manifest()).map_err(|error| Error::Corrupt(error.to_string()))?;
    if digest.to_string() != want.digest {
        return Err(Error::Corrupt(format!(
            "the repository has another image of this name (digest {digest}, not {})",
            want.digest
        )));
    }
    let expected = manifest
        .files
        .iter()
        .map(|file| (file.name.as_str(), file.size));
    if !expected.eq(stored.files().map(|file| (file.name, file.size))) {
        return Err(Error::Corrupt(
            "the repository has other files than the manifest names".to_owned(),
        ));
    }
    Ok(manifest)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::reconcile::desired::tests::pod;

    fn asking(annotations: serde_json::Value, status: serde_json::Value) -> Option<Want> {
        let mut pod = pod(annotations);
        pod.status = serde_json::from_value(status).expect("a status");
        want(&pod)
    }

    fn all() -> serde_json::Value {
        json!({
            annotations::RESTORE_IMAGE: "saved.1", annotations::RESTORE_DIGEST: "blake3:0",
            annotations::RESTORE_CLASS: "c",
        })
    }

    #[test]
    fn a_pod_wants_an_image_of_a_repository_until_it_has_begun_or_ends() {
        assert_eq!(asking(json!({}), json!({})), None);
        assert_eq!(
            asking(json!({ annotations::RESTORE_IMAGE: "saved.1" }), json!({})),
            None
        );
        let waits = asking(all(), json!({})).expect("a want");
        assert!(waits.is_open() && !waits.copy && !waits.cold_start);
        let reported = |status: &str, reason: &str| {
            let condition =
                json!({ "type": "torpor.dev/Restored", "status": status, "reason": reason });
            asking(all(), json!({ "conditions": [condition] }))
                .expect("a want")
                .is_open()
        };
        assert!(!reported("True", "Restored"));
        assert!(!reported("False", "ColdStarted"));
        assert!(reported("False", "Fetching"));
        assert!(reported("False", "ImageCorrupt"), "it is tried again");
        assert!(
            !asking(all(), json!({ "phase": "Failed" }))
                .expect("a want")
                .is_open()
        );
    }

    #[test]
    fn a_copy_and_a_policy_are_read() {
        let mut wishes = all();
        wishes[annotations::RESTORE_COPY] = json!("true");
        wishes[annotations::ON_RESTORE_FAILURE] = json!("ColdStart");
        let copy = asking(wishes, json!({})).expect("a want");
        assert!(copy.copy && copy.cold_start);
    }
}

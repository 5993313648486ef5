//! Download of images for Pods of this node that continue from images of other nodes: from the node
//! that holds the image, or else from a repository.
//!
//! Meanwhile the Pod's shim waits in the creation of the sandbox
//! (`node-agent/sandbox/src/restore/fetched.rs`). The order of the steps is that of [`plan`]: the
//! claim is in the API before the first byte is on the disk.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::runtime::reflector::Store as Cache;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use torpor_api::node::FetchedImage;
use torpor_api::reasons::restored as reasons;
use torpor_api::{annotations, conditions};
use torpor_core::ids::{ImageId, Namespace, PodUid};
use torpor_records::FetchFailure;
use torpor_repository::{ImageName, Progress};
use torpor_snapshots::{Manifest, Partial, SaveError};

use super::ask;
use super::claims::{self, Claims, READ_AGAIN};
use super::classes::Repositories;
use super::retries::wait_until;
use crate::peers::client::Peers;
use crate::reconcile::desired::condition;
use crate::reconcile::node::Node;
use crate::reconcile::observe::words;
use crate::reconcile::snapshot_index::SnapshotIndex;
use crate::report::bytes::mebibytes;
use crate::report::metrics::Metrics;
use crate::report::publish::Publisher;

mod disk;
mod error;
mod plan;
mod source;
mod work;

use disk::{held, is_own, settle};
use error::{Error, disk_error};
use plan::{Ended, Held, Place, Plan, Seen, Use, Want, parsed};
use source::Source;
use work::Work;

/// Interval at which the progress of a fetch is written into the Pod's condition.
const PROGRESS: Duration = Duration::from_secs(2);
/// Pause after a failure to write the claims, and while it is not known how a Pod ended.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Time for which a Pod that may start cold waits for a node or a repository that does not answer.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(60);

/// The downloads of this node.
pub(crate) struct Fetches {
    pub(crate) node: Arc<Node>,
    pub(crate) pods: Cache<Pod>,
    /// Changes with every event about a Pod of this node.
    pub(crate) pod_events: watch::Receiver<u64>,
    pub(crate) snapshots: Arc<SnapshotIndex>,
    pub(crate) repositories: Arc<Repositories>,
    pub(crate) peers: Peers,
    pub(crate) publisher: Publisher,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) at_once: usize,
}

/// Result of a look at the node and the API.
struct Next {
    plan: Plan,
    /// Time after which to look again, even if nothing happens.
    look_again: Option<Duration>,
}

/// Fetches until `stop` is cancelled.
pub(crate) async fn run(fetches: Arc<Fetches>, stop: CancellationToken) {
    let publisher = &fetches.publisher;
    let mut claims = Claims::new(publisher.client().clone(), publisher.node_name().to_owned());
    let mut pod_events = fetches.pod_events.clone();
    let mut snapshot_events = fetches.snapshots.events();
    let mut work = Work::new();
    loop {
        let wants = fetches.wants();
        let look_again = match fetches.next(&mut claims, &wants).await {
            Err(error) => {
                tracing::warn!(%error, "cannot claim the images that Pods of this node need");
                Some(LOOK_AGAIN)
            }
            Ok(next) => {
                work.begin(&fetches, next.plan, &stop).await;
                next.look_again
            }
        };
        fetches.release_ending(&wants).await;
        let now = Instant::now();
        let next = work.due(now).into_iter();
        let next = next.chain(look_again.map(|pause| now + pause)).min();
        // Cancel-safe: all arms only wait.
        tokio::select! {
            Ok(()) = pod_events.changed() => {}
            Ok(()) = snapshot_events.changed() => {}
            () = wait_until(next) => {}
            Some(ended) = work.tasks.join_next() => {
                if let Ok((place, done)) = ended {
                    work.ended(&place, done);
                }
            }
            () = stop.cancelled() => return work.tasks.shutdown().await,
        }
    }
}

/// Returns what a Pod wants to fetch; none if it continues from no image that can be fetched.
fn want(pod: &Pod) -> Option<Want> {
    let annotated = |key: &str| pod.annotations().get(key).cloned();
    let class = annotated(annotations::RESTORE_CLASS);
    let node = annotated(annotations::RESTORE_NODE);
    if class.is_none() && node.is_none() {
        return None;
    }
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
        class,
        node,
        cluster: annotated(annotations::RESTORE_CLUSTER),
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
    async fn next(&self, claims: &mut Claims, wants: &[Want]) -> Result<Next, claims::Error> {
        let pods: BTreeSet<PodUid> = self
            .pods
            .state()
            .iter()
            .filter_map(|pod| PodUid::new(pod.uid()?).ok())
            .collect();
        let (node, mut wants) = (self.node.clone(), wants.to_vec());
        let disk = tokio::task::spawn_blocking(move || {
            // An image that this node made itself is not fetched.
            wants.retain(|want| !is_own(&node, &want.place));
            (held(&node), wants)
        });
        let (held, wants) = disk.await.unwrap_or_default();
        let known = claims.read().await?;
        let taken = self.snapshots.taken_here();
        let taken: Vec<Use> = taken
            .into_iter()
            .map(|(of, image, pod)| ((of, image), pod))
            .collect();
        let mut ended = BTreeMap::new();
        let to_settle = plan::to_settle(&known, &taken, &held, &pods);
        for of in &to_settle {
            if let Some(how) = self.ended(of, &wants).await {
                ended.insert(of.clone(), how);
            }
        }
        let named = self.named(&known, &held, &taken).await;
        let plan = plan::plan(&Seen {
            wants: &wants,
            pods: &pods,
            held: &held,
            claims: &known,
            taken: &taken,
            named: &named,
            ended: &ended,
        });
        claims.write(&plan.claims).await?;
        let look_again = match (ended.len() < to_settle.len(), plan.claims.is_empty()) {
            (true, _) => Some(LOOK_AGAIN),
            (false, false) => Some(READ_AGAIN),
            (false, true) => None,
        };
        Ok(Next { plan, look_again })
    }

    /// Returns the images that a SandboxSnapshot names. The apiserver is asked before a claim is
    /// dropped, because the watch may be behind.
    async fn named(&self, known: &[FetchedImage], held: &[Held], taken: &[Use]) -> BTreeSet<Place> {
        let claimed: BTreeSet<Place> = known
            .iter()
            .filter_map(|one| Some(parsed(one)?.0.0))
            .collect();
        let mut named = BTreeSet::new();
        let held = held.iter().map(|one| one.place.clone());
        let taken = taken.iter().map(|(place, _)| place.clone());
        let all: BTreeSet<Place> = claimed.iter().cloned().chain(held).chain(taken).collect();
        for place in all {
            let (namespace, image) = &place;
            let mut is_named = self.snapshots.is_named(namespace.as_str(), image);
            if !is_named && claimed.contains(&place) {
                let client = self.publisher.client();
                // Without an answer it may be named.
                is_named = ask::is_named(client, namespace.as_str(), image)
                    .await
                    .unwrap_or(true);
            }
            if is_named {
                named.insert(place);
            }
        }
        named
    }

    /// Finds out how a Pod ended that is not in the cache; none if that is not known yet.
    async fn ended(&self, of: &Use, wants: &[Want]) -> Option<Ended> {
        let ((namespace, _), pod) = of;
        let (client, name) = (self.publisher.client(), self.publisher.node_name());
        match ask::is_gone(client, name, namespace.as_str(), pod).await {
            Ok(true) => {}
            Ok(false) => return None,
            Err(error) => {
                tracing::warn!(error = words(&error), %pod, "cannot ask for a Pod that took an image");
                return None;
            }
        }
        let is_wanted = wants
            .iter()
            .any(|want| want.is_open() && want.place == of.0);
        let (node, of) = (self.node.clone(), of.clone());
        let found = tokio::task::spawn_blocking(move || settle(&node, &of, is_wanted));
        found.await.ok().flatten()
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
            let failure = FetchFailure {
                reason: "PodDeleted".to_owned(),
                message,
                pod_ends: true,
            };
            self.note(&want.pod, Some(failure)).await;
        }
    }

    /// Notes for the Pod's shim why its image is not fetched, or that it is.
    async fn note(&self, pod: &PodUid, failure: Option<FetchFailure>) {
        let (node, pod) = (self.node.clone(), pod.clone());
        let noted = tokio::task::spawn_blocking(move || {
            match node.records.fetch_failure(&pod)? == failure {
                true => Ok(()),
                false => node.records.note_fetch(&pod, failure.as_ref()),
            }
        });
        if let Ok(Err(error)) = noted.await {
            let error: torpor_records::Error = error;
            tracing::warn!(%error, "cannot note that an image was not fetched");
        }
    }

    /// Fetches an image for a Pod. Returns whether the image is on this node, or is not to be
    /// fetched any more. `since`: the time of the first attempt.
    async fn one(&self, want: &Want, since: Instant, cancelled: &CancellationToken) -> bool {
        let begun = Instant::now();
        let progress = Progress::default();
        let error = match self.fetch(want, &progress, cancelled).await {
            Ok(true) => {
                self.metrics.fetched(progress.sent(), begun.elapsed());
                for other in self
                    .wants()
                    .iter()
                    .filter(|other| other.place == want.place)
                {
                    self.note(&other.pod, None).await;
                }
                return true;
            }
            Ok(false) => return true,
            Err(error) => error,
        };
        let (reason, image) = (error.reason(), &want.place.1);
        tracing::warn!(%error, %image, pod = %want.pod, "cannot fetch an image");
        self.metrics.fetch_failed(reason);
        let message = format!("Image {image} cannot be fetched: {error}");
        let all = self.wants();
        for other in all
            .iter()
            .filter(|other| other.is_open() && other.place == want.place)
        {
            // A Pod that may start cold gives node or repository time; another one waits anyway.
            let is_told = match other.cold_start {
                true => since.elapsed() >= GIVEN_UP_AFTER && !error.is_busy(),
                false => error.is_final(),
            };
            match is_told {
                // The shim reports it.
                true => {
                    let failure = FetchFailure {
                        reason: reason.to_owned(),
                        message: message.clone(),
                        pod_ends: false,
                    };
                    self.note(&other.pod, Some(failure)).await;
                }
                false => {
                    self.report(other, reason, format!("{message}. The fetch is retried"))
                        .await
                }
            }
        }
        false
    }

    /// Fetches an image. Returns false if it is not to be fetched any more.
    async fn fetch(
        &self,
        want: &Want,
        progress: &Progress,
        cancelled: &CancellationToken,
    ) -> Result<bool, Error> {
        let (client, node) = (self.publisher.client(), self.publisher.node_name());
        let (namespace, _) = &want.place;
        // The cache may still have a Pod that is gone, for which another one was made elsewhere.
        if !ask::is_to_run(client, node, namespace.as_str(), &want.pod).await? {
            return Ok(false);
        }
        if let Some(holder) = &want.node {
            match self
                .fetch_from(want, Some(holder), progress, cancelled)
                .await
            {
                Err(error) if want.class.is_some() && error.is_of_place() => {
                    let image = &want.place.1;
                    tracing::info!(%error, %image, "the image comes from its repository instead");
                }
                done => return done,
            }
        }
        self.fetch_from(want, None, progress, cancelled).await
    }

    /// Fetches an image from a node, or from its repository.
    async fn fetch_from(
        &self,
        want: &Want,
        node: Option<&str>,
        progress: &Progress,
        cancelled: &CancellationToken,
    ) -> Result<bool, Error> {
        let mut source = self.source(want, node).await?;
        let manifest = source.checked(want)?;
        let (partial, files) = self.begin(want, &manifest).await?;
        // Cancel-safe: a dropped download leaves a partial image, which the next one removes.
        tokio::select! {
            done = self.download(want, &mut source, &manifest, files, progress) => done?,
            () = cancelled.cancelled() => return Ok(false),
        }
        let content = source.manifest().to_vec();
        let committed = tokio::task::spawn_blocking(move || partial.commit_copy(&content));
        let committed = committed.await.map_err(|error| disk_error(&error))?;
        committed.map_err(|error| match error {
            SaveError::Manifest { .. } => Error::Corrupt(error.to_string()),
            error => disk_error(&error),
        })?;
        Ok(true)
    }

    async fn source(&self, want: &Want, node: Option<&str>) -> Result<Source, Error> {
        if let Some(node) = node {
            let offer = self.peers.ask(node, &want.place, &want.pod).await?;
            return Ok(Source::Node(offer));
        }
        let (namespace, image) = &want.place;
        let class = want.class.as_deref().unwrap_or_default();
        let repository = self.repositories.of(class, want.cluster.as_deref()).await?;
        let name = ImageName::new(namespace.as_str(), &image.to_string());
        let name = name.ok_or_else(|| Error::Corrupt(format!("{image} names no image")))?;
        let stored = repository.image(&name).await?;
        Ok(Source::Repository(repository, stored))
    }

    async fn download(
        &self,
        want: &Want,
        source: &mut Source,
        manifest: &Manifest,
        files: Vec<File>,
        progress: &Progress,
    ) -> Result<(), Error> {
        let from = source.to_string();
        let downloading = source.download(manifest, files, progress);
        tokio::pin!(downloading);
        let mut reports = tokio::time::interval(PROGRESS);
        loop {
            // Cancel-safe: the download is only polled again, and the interval only waits.
            tokio::select! {
                done = &mut downloading => return done,
                _ = reports.tick() => {
                    let message = format!(
                        "{} of {} MiB of image {} are here, from {from}",
                        mebibytes(progress.done()), mebibytes(progress.total()), want.place.1
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
                .map_err(|error| disk_error(&error))?;
            let partial = store
                .begin(&namespace, &image)
                .map_err(|error| disk_error(&error))?;
            let files = names
                .iter()
                .map(|name| partial.open_file(name).map(File::from));
            let files: Result<Vec<File>, _> = files.collect();
            Ok((partial, files.map_err(|error| disk_error(&error))?))
        });
        begun.await.map_err(|error| disk_error(&error))?
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
        let mut nowhere = all();
        nowhere[annotations::RESTORE_CLASS].take();
        let nowhere = nowhere.as_object().expect("a map").iter();
        let nowhere = nowhere.filter(|(_, value)| !value.is_null());
        let mut place: serde_json::Map<_, _> =
            nowhere.map(|(k, v)| (k.clone(), v.clone())).collect();
        assert_eq!(
            asking(place.clone().into(), json!({})),
            None,
            "nothing to fetch from"
        );
        place.insert(annotations::RESTORE_NODE.to_owned(), json!("other"));
        let of_node = asking(place.into(), json!({})).expect("a want");
        assert_eq!(of_node.node.as_deref(), Some("other"));
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

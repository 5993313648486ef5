//! Asking the apiserver itself about a Pod that the watch shows no more: the watch of its snapshots may be behind.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};
use tokio::sync::Mutex;
use tokio::time::Instant;
use torpor_api::snapshot::SandboxSnapshot;
use torpor_core::ids::{Namespace, PodUid, SnapshotUid};
use torpor_core::state::Answer;

use k8s_openapi::api::core::v1::Pod;

use super::{Driver, RETRY, Remembered, Turn};
use crate::reconcile::about::named_pod;
use crate::reconcile::shown::may_be_of_node;
use crate::report::publish::API_LIMIT;

/// How long an answer about a namespace is kept for those that wait for it.
const KEPT_FOR: Duration = Duration::from_secs(60);
/// How many objects are read at once. Tenants make them, each may have more than a megabyte.
const PAGE: u32 = 10;
/// Of Pods only the metadata are read.
const PODS_PAGE: u32 = 100;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("cannot list {what} of namespace {namespace}")]
    Api {
        what: &'static str,
        namespace: String,
        #[source]
        source: kube::Error,
    },
    #[error(
        "the apiserver did not answer the list of {what} of namespace {namespace} within {API_LIMIT:?}"
    )]
    Timeout {
        what: &'static str,
        namespace: String,
    },
}

/// Answers of the apiserver, by namespace. One question at a time about each: a namespace of many
/// snapshots delays no other.
#[derive(Debug, Default)]
pub(crate) struct Asked(std::sync::Mutex<HashMap<String, Arc<Mutex<Option<Told>>>>>);

/// What one namespace has.
#[derive(Debug)]
struct Told {
    at: Instant,
    pods: BTreeSet<String>,
    /// Snapshots of this node, by the Pod that they name.
    snapshots: HashMap<PodUid, OfPod>,
}

/// Snapshots that name one Pod.
#[derive(Debug, Clone, Default)]
struct OfPod {
    kept: BTreeSet<SnapshotUid>,
    deleting: BTreeSet<SnapshotUid>,
}

impl Asked {
    async fn about(
        &self,
        client: &Client,
        node: &str,
        namespace: &str,
        pod: &PodUid,
    ) -> Result<Answer, Error> {
        let asked_at = Instant::now();
        let of_namespace = self.of_namespace(namespace);
        let mut told = of_namespace.lock().await;
        // Pods that go together wait together: an answer to a question that was put later is as good for all of them.
        let answered = match told.take().filter(|told| told.at >= asked_at) {
            Some(answered) => answered,
            None => Told::ask(client, node, namespace).await?,
        };
        Ok(told.insert(answered).answer(pod))
    }

    /// The namespace's place; places that nobody uses are dropped after [`KEPT_FOR`].
    fn of_namespace(&self, namespace: &str) -> Arc<Mutex<Option<Told>>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, place| {
            Arc::strong_count(place) > 1 || place.try_lock().is_ok_and(|told| is_kept(&told))
        });
        all.entry(namespace.to_owned()).or_default().clone()
    }
}

fn is_kept(told: &Option<Told>) -> bool {
    told.as_ref()
        .is_some_and(|told| told.at.elapsed() < KEPT_FOR)
}

impl Told {
    async fn ask(client: &Client, node: &str, namespace: &str) -> Result<Self, Error> {
        // Before the first answer: what it says is at least as new.
        let at = Instant::now();
        let mut pods = BTreeSet::new();
        let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let of_node = format!("spec.nodeName={node}");
        let mut params = ListParams::default().fields(&of_node).limit(PODS_PAGE);
        loop {
            let listed = within("Pods", namespace, api.list_metadata(&params)).await?;
            pods.extend(listed.items.iter().filter_map(ResourceExt::uid));
            match listed.metadata.continue_.filter(|next| !next.is_empty()) {
                Some(next) => params = params.continue_token(&next),
                None => break,
            }
        }
        let mut snapshots: HashMap<PodUid, OfPod> = HashMap::new();
        let api: Api<SandboxSnapshot> = Api::namespaced(client.clone(), namespace);
        let mut params = ListParams::default().limit(PAGE);
        loop {
            let listed = within("SandboxSnapshots", namespace, api.list(&params)).await?;
            for snapshot in &listed.items {
                if let Some((pod, uid)) = names(snapshot, node) {
                    let of_pod = snapshots.entry(pod).or_default();
                    match snapshot.metadata.deletion_timestamp {
                        Some(_) => of_pod.deleting.insert(uid),
                        None => of_pod.kept.insert(uid),
                    };
                }
            }
            match listed.metadata.continue_.filter(|next| !next.is_empty()) {
                Some(next) => params = params.continue_token(&next),
                None => break,
            }
        }
        Ok(Self {
            at,
            pods,
            snapshots,
        })
    }

    fn answer(&self, pod: &PodUid) -> Answer {
        let OfPod { kept, deleting } = self.snapshots.get(pod).cloned().unwrap_or_default();
        Answer {
            has_pod: self.pods.contains(pod.as_str()),
            snapshots: kept,
            deleting,
        }
    }
}

/// The Pod that a snapshot of this node names, and the snapshot's UID.
fn names(snapshot: &SandboxSnapshot, node: &str) -> Option<(PodUid, SnapshotUid)> {
    let pod = named_pod(snapshot).filter(|_| may_be_of_node(snapshot, node))?;
    Some((pod, SnapshotUid::new(snapshot.uid()?).ok()?))
}

async fn within<T>(
    what: &'static str,
    namespace: &str,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    let namespace = namespace.to_owned();
    match tokio::time::timeout(API_LIMIT, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(Error::Api {
            what,
            namespace,
            source,
        }),
        Err(_) => Err(Error::Timeout { what, namespace }),
    }
}

impl Driver {
    /// Asks for the next plan, which is made at once.
    pub(super) async fn ask(
        &self,
        pod: &PodUid,
        namespace: Option<&Namespace>,
        remembered: &mut Remembered,
    ) -> Turn {
        let Some(namespace) = namespace else {
            // An image lies in a directory of its namespace; where that is not known there is nothing to be asked about.
            remembered.going.answer = Some(Answer::default());
            return Turn::Again;
        };
        let shared = &self.shared;
        let publisher = &shared.publisher;
        let node = publisher.node_name();
        let asked = &shared.asked;
        let answer = asked.about(publisher.client(), node, namespace.as_str(), pod);
        let answer = tokio::select! {
            answer = answer => answer,
            () = self.stop.cancelled() => return Turn::Wait(RETRY),
        };
        match answer {
            Ok(answer) => {
                remembered.going.answer = Some(answer);
                Turn::Again
            }
            Err(error) => {
                let error = crate::reconcile::observe::words(&error);
                tracing::warn!(%pod, error, "cannot determine whether the images of a deleted Pod are still needed: they are kept");
                Turn::Wait(RETRY)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use torpor_test_apiserver::Apiserver;

    use super::*;

    fn snapshot(name: &str, namespace: &str, spec: serde_json::Value) -> serde_json::Value {
        json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": { "name": name, "namespace": namespace }, "spec": spec,
        })
    }

    #[test]
    fn a_namespace_waits_for_no_other_and_is_forgotten() {
        let asked = Asked::default();
        let slow = asked.of_namespace("slow");
        let held = slow.try_lock().expect("free");
        let is_free = |namespace: &str| asked.of_namespace(namespace).try_lock().is_ok();
        assert!(is_free("other") && !is_free("slow"));
        drop(held);
        drop(slow);
        asked.of_namespace("third");
        let left = asked.0.lock().expect("not poisoned");
        assert_eq!(left.keys().collect::<Vec<_>>(), ["third"]);
    }

    #[tokio::test]
    async fn the_apiserver_is_asked_for_the_pod_and_for_the_snapshots_of_its_namespace_page_by_page()
     {
        let server = Apiserver::new();
        let pod = server.create(
            "pods",
            json!({ "metadata": { "name": "there", "namespace": "n" }, "spec": { "nodeName": "node", "containers": [] } }),
        );
        let there = PodUid::new(pod["metadata"]["uid"].as_str().expect("a UID")).expect("a UID");
        for n in 0..PAGE {
            let spec = json!({ "sandboxName": "s", "podUID": "another" });
            server.create("sandboxsnapshots", snapshot(&format!("a{n}"), "n", spec));
        }
        let own = json!({ "sandboxName": "s", "podUID": "gone", "nodeName": "node" });
        let claim = server.create("sandboxsnapshots", snapshot("own", "n", own.clone()));
        server.create("sandboxsnapshots", snapshot("own", "of-somebody-else", own));
        let foreign = json!({ "sandboxName": "s", "podUID": "gone", "nodeName": "node-b" });
        server.create("sandboxsnapshots", snapshot("foreign", "n", foreign));
        let asked = Asked::default();
        let client = server.client();
        let answer = asked
            .about(&client, "node", "n", &there)
            .await
            .expect("an answer");
        assert!(answer.has_pod && answer.snapshots.is_empty(), "{answer:?}");
        let gone = PodUid::new("gone").expect("a UID");
        let answer = asked
            .about(&client, "node", "n", &gone)
            .await
            .expect("an answer");
        let uid = claim["metadata"]["uid"].as_str().expect("a UID");
        assert!(!answer.has_pod);
        assert_eq!(
            answer.snapshots,
            [SnapshotUid::new(uid).expect("a UID")].into()
        );
    }
}

//! Questions to the apiserver about Pods that the watch of Pods has no more. The watch of snapshots
//! may be behind, so the apiserver itself lists them.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};
use tokio::sync::Mutex;
use tokio::time::Instant;
use torpor_api::snapshot::SandboxSnapshot;
use torpor_core::ids::{PodUid, SnapshotUid};
use torpor_core::state::Answer;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::reconcile::references::named_pod;
use crate::reconcile::snapshot_index::may_be_of_node;
use crate::report::publish::API_LIMIT;

/// How long the listing of a namespace is kept for the tasks that wait for it.
const KEPT_FOR: Duration = Duration::from_secs(60);
/// SandboxSnapshots per page of a list. Tenants make them, and each may have more than a megabyte.
pub(crate) const PAGE: u32 = 10;
/// Pods per page of a list, which has only their metadata.
pub(crate) const PODS_PAGE: u32 = 100;

/// The reason why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot read {what}{}", of(.namespace))]
    Api {
        what: &'static str,
        namespace: String,
        #[source]
        source: kube::Error,
    },
    #[error(
        "the apiserver did not answer the request for {what}{} within {API_LIMIT:?}", of(.namespace)
    )]
    Timeout {
        what: &'static str,
        namespace: String,
    },
}

/// Returns a clause about the namespace; none for objects of the cluster.
fn of(namespace: &str) -> String {
    match namespace {
        "" => String::new(),
        namespace => format!(" of namespace {namespace:?}"),
    }
}

/// The listings of namespaces that the apiserver has returned. One request at a time runs for each
/// namespace, so that a namespace with many snapshots delays no other.
#[derive(Debug, Default)]
pub(crate) struct Asked(std::sync::Mutex<HashMap<String, Arc<Mutex<Option<Listing>>>>>);

/// The Pods and snapshots of one namespace that belong to this node.
#[derive(Debug)]
struct Listing {
    /// When the request began. The listing is at least as new.
    at: Instant,
    /// UIDs.
    pods: BTreeSet<String>,
    /// By the UID of the Pod that they name.
    snapshots: HashMap<PodUid, OfPod>,
}

/// The snapshots that name one Pod.
#[derive(Debug, Clone, Default)]
struct OfPod {
    kept: BTreeSet<SnapshotUid>,
    deleting: BTreeSet<SnapshotUid>,
}

impl Asked {
    /// Returns what the apiserver has of the Pod, no older than this call.
    pub(super) async fn about(
        &self,
        client: &Client,
        node: &str,
        namespace: &str,
        pod: &PodUid,
    ) -> Result<Answer, Error> {
        let asked_at = Instant::now();
        let of_namespace = self.of_namespace(namespace);
        let mut place = of_namespace.lock().await;
        // When many Pods go at once, their tasks wait here together. A listing that was requested
        // after this call began serves them all.
        let listing = match place.take().filter(|listing| listing.at >= asked_at) {
            Some(listing) => listing,
            None => Listing::read(client, node, namespace).await?,
        };
        Ok(place.insert(listing).answer(pod))
    }

    /// Returns the place of the namespace's listing. Drops the places that no task has used for
    /// [`KEPT_FOR`].
    fn of_namespace(&self, namespace: &str) -> Arc<Mutex<Option<Listing>>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, place| {
            Arc::strong_count(place) > 1 || place.try_lock().is_ok_and(|listing| is_kept(&listing))
        });
        all.entry(namespace.to_owned()).or_default().clone()
    }
}

fn is_kept(listing: &Option<Listing>) -> bool {
    listing
        .as_ref()
        .is_some_and(|listing| listing.at.elapsed() < KEPT_FOR)
}

impl Listing {
    async fn read(client: &Client, node: &str, namespace: &str) -> Result<Self, Error> {
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

/// Returns the Pod that a snapshot names and the snapshot's UID. None if the snapshot names another
/// node.
fn names(snapshot: &SandboxSnapshot, node: &str) -> Option<(PodUid, SnapshotUid)> {
    let pod = named_pod(snapshot).filter(|_| may_be_of_node(snapshot, node))?;
    Some((pod, SnapshotUid::new(snapshot.uid()?).ok()?))
}

/// Returns the metadata of a Pod of a node, as the apiserver has it; none if there is no such Pod.
pub(crate) async fn pod_of_node(
    client: &Client,
    node: &str,
    namespace: &str,
    pod: &PodUid,
) -> Result<Option<ObjectMeta>, Error> {
    let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let of_node = format!("spec.nodeName={node}");
    let mut params = ListParams::default().fields(&of_node).limit(PODS_PAGE);
    loop {
        let listed = within("Pods", namespace, api.list_metadata(&params)).await?;
        let mut found = listed.items.into_iter();
        let found = found.find(|one| one.uid().as_deref() == Some(pod.as_str()));
        if let Some(found) = found {
            return Ok(Some(found.metadata));
        }
        match listed.metadata.continue_.filter(|next| !next.is_empty()) {
            Some(next) => params = params.continue_token(&next),
            None => return Ok(None),
        }
    }
}

/// Waits for the answer at most [`API_LIMIT`].
pub(crate) async fn within<T>(
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

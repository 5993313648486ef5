//! Watches of the apiserver and their caches.

use std::sync::Arc;

use futures::{Stream, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Api;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt, watcher};
use tokio_util::sync::CancellationToken;
use torpor_api::annotations::TAKEN_BY;
use torpor_api::snapshot::{SandboxSnapshot, SnapshotClass};

use crate::reconcile::snapshot_index::SnapshotIndex;

/// Number of objects in one page of a list. Tenants make these objects. An object may have more
/// than a megabyte, and its parsed form takes several times that.
const PAGE: u32 = 10;

pub(crate) type Events<K> = std::pin::Pin<Box<dyn Stream<Item = Result<K, watcher::Error>> + Send>>;

/// Longest record of a Pod that takes an image, in bytes.
const LONGEST_RECORD: usize = 1024;

/// Watches objects; returns their cache and the events, which must be taken.
pub(crate) fn reflect<K>(
    api: Api<K>,
    config: watcher::Config,
    trim: fn(&mut K),
) -> (Store<K>, Events<K>)
where
    K: kube::Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + Sync
        + 'static,
{
    let (store, writer) = reflector::store();
    let events = watcher(api, config.page_size(PAGE))
        .modify(trim)
        .default_backoff()
        .reflect(writer)
        .touched_objects();
    (store, events.boxed())
}

/// Removes fields of a SnapshotClass that the agent does not read.
pub(crate) fn trim_snapshot_class(class: &mut SnapshotClass) {
    class.metadata.managed_fields = None;
    class.metadata.labels = None;
    class.metadata.annotations = None;
}

/// Watches all SandboxSnapshots and puts each event into the index `into`. An item of the stream is
/// the list of snapshots that the event has changed, as the index returns it.
pub(crate) fn index(
    api: Api<SandboxSnapshot>,
    into: Arc<SnapshotIndex>,
) -> Events<Vec<Arc<SandboxSnapshot>>> {
    watcher(api, watcher::Config::default().page_size(PAGE))
        .modify(trim_snapshot)
        .default_backoff()
        .map_ok(move |event| into.take(event))
        .boxed()
}

/// Removes fields of a Pod that the agent does not read and that a user may make large.
pub(crate) fn trim_pod(pod: &mut Pod) {
    pod.metadata.managed_fields = None;
    pod.metadata.labels = None;
}

/// Removes fields of a SandboxSnapshot that the agent does not read and that a user may make large.
/// Each agent caches all snapshots of the cluster.
fn trim_snapshot(snapshot: &mut SandboxSnapshot) {
    let metadata = &mut snapshot.metadata;
    metadata.managed_fields = None;
    metadata.labels = None;
    metadata.owner_references = None;
    // The agent reads only the controller's record of the Pod that takes the image.
    metadata.annotations = metadata.annotations.take().and_then(|mut annotations| {
        annotations.retain(|key, value| key == TAKEN_BY && value.len() <= LONGEST_RECORD);
        (!annotations.is_empty()).then_some(annotations)
    });
}

pub(crate) fn trim_class(class: &mut RuntimeClass) {
    class.metadata.managed_fields = None;
    class.metadata.labels = None;
}

/// Takes events until `stop` is cancelled. Fails when the watch ends.
pub(crate) async fn pump<K>(
    mut events: Events<K>,
    stop: CancellationToken,
    mut changed: impl FnMut(&K),
) -> anyhow::Result<()> {
    loop {
        // Cancel-safe: both arms only wait, and an event that was not received stays in the stream.
        tokio::select! {
            event = events.next() => match event {
                Some(Ok(object)) => changed(&object),
                Some(Err(error)) => tracing::warn!(%error, "a watch was interrupted"),
                None => anyhow::bail!("a watch ended"),
            },
            () = stop.cancelled() => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kube::ResourceExt;
    use serde_json::json;
    use torpor_test_apiserver::Apiserver;

    use super::*;

    fn large_snapshot(name: &str) -> serde_json::Value {
        json!({
            "metadata": {
                "name": name, "namespace": "ns", "finalizers": ["a.b/c"],
                "labels": {"a": "b"}, "annotations": {"a": "b"},
                "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"}],
                "managedFields": [{"manager": "m", "operation": "Apply"}],
            },
            "spec": {"sandboxName": "s"},
        })
    }

    #[tokio::test]
    async fn snapshots_are_listed_in_pages_and_kept_without_unused_metadata() {
        let server = Apiserver::new();
        for n in 0..PAGE + 1 {
            server.create("sandboxsnapshots", large_snapshot(&format!("s{n}")));
        }
        let api = Api::<SandboxSnapshot>::all(server.client());
        let shown = Arc::new(SnapshotIndex::new("node".to_owned()));
        let mut events = index(api, shown.clone());
        let listed = async {
            let mut all = Vec::new();
            while all.is_empty() {
                let changed = events.next().await.expect("the watch goes on");
                all = changed.expect("it is not interrupted");
            }
            all
        };
        let listed = tokio::time::timeout(Duration::from_secs(20), listed)
            .await
            .expect("all is listed");
        shown.wait_until_whole().await;
        let sizes = server.take_lists().into_iter().map(|(_, size)| size);
        assert_eq!(sizes.collect::<Vec<_>>(), [10, 1]);
        assert_eq!(listed.len(), 11);
        for snapshot in listed {
            let metadata = &snapshot.metadata;
            assert_eq!(
                metadata.finalizers.as_deref(),
                Some(&["a.b/c".to_owned()][..])
            );
            assert_eq!(metadata.labels, None);
            assert_eq!(metadata.annotations, None);
            assert_eq!(metadata.owner_references, None);
            assert_eq!(metadata.managed_fields, None);
        }
    }

    #[tokio::test]
    async fn runtime_classes_are_kept_with_their_annotations() {
        let server = Apiserver::new();
        let class = json!({
            "metadata": { "name": "torpor", "labels": {"a": "b"}, "annotations": { "torpor.dev/doze-after": "30s" } },
            "handler": "torpor",
        });
        server.create("runtimeclasses", class);
        let api = Api::<RuntimeClass>::all(server.client());
        let (store, mut events) = reflect(api, watcher::Config::default(), trim_class);
        let reading = async { while events.next().await.is_some() {} };
        tokio::select! {
            ready = store.wait_until_ready() => ready.expect("the watch goes on"),
            () = reading => panic!("the watch ended"),
        }
        let kept = store.get(&reflector::ObjectRef::new("torpor"));
        let kept = kept.expect("it is there");
        assert_eq!(kept.metadata.labels, None);
        assert_eq!(kept.annotations()["torpor.dev/doze-after"], "30s");
    }

    #[test]
    fn a_pod_is_kept_without_its_labels_and_with_its_annotations_and_owners() {
        let mut pod: Pod = serde_json::from_value(json!({
            "metadata": {
                "name": "p", "labels": {"a": "b"}, "annotations": {"a": "b"},
                "ownerReferences": [{"apiVersion": "v1", "kind": "Sandbox", "name": "s", "uid": "u"}],
                "managedFields": [{"manager": "m", "operation": "Apply"}],
            },
        }))
        .expect("a Pod");
        trim_pod(&mut pod);
        assert_eq!(
            (pod.metadata.labels, pod.metadata.managed_fields),
            (None, None)
        );
        assert!(pod.metadata.annotations.is_some());
        assert!(pod.metadata.owner_references.is_some());
    }
}

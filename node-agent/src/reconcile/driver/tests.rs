//! Tests of a Pod's task with an apiserver and a store: a Pod that is gone and has left its memory.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use torpor_core::Entry;
use torpor_core::ids::ImageId;
use torpor_core::state::Policy;
use torpor_test_apiserver::Apiserver;

use super::*;
use crate::policy::pressure::NodePressure;
use crate::policy::saves::Saves;
use crate::reconcile::snapshot_index::SnapshotIndex;
use crate::reconcile::steps_for_tests::node_in;
use crate::report::metrics::Metrics;
use crate::report::publish::Publisher;
use crate::report::sandboxes::tests::image_in;
use crate::report::spans::Spans;

const NODE: &str = "node";
const POD: &str = "pod-1";
const LIMIT: Duration = Duration::from_secs(30);

/// A driver on a node whose only Pod is gone and has left its memory in an image.
struct Bench {
    _dir: tempfile::TempDir,
    server: Apiserver,
    shared: Arc<Shared>,
    driver: Driver,
    pod: PodUid,
    image: ImageId,
}

impl Bench {
    fn new(unclaimed_grace: Duration) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let server = Apiserver::new();
        let node = Arc::new(node_in(dir.path()));
        let image = image_in(&node, "pod-1.1");
        let pod = image.pod().clone();
        let ledger = node.store.ledger(&pod).expect("a ledger");
        for entry in [
            Entry::Saving {
                image: image.clone(),
                snapshots: BTreeSet::new(),
            },
            Entry::Committed {
                image: image.clone(),
            },
            Entry::Asleep {
                image: image.clone(),
                by_itself: false,
            },
        ] {
            ledger.append(&entry).expect("written");
        }
        let metrics = Arc::new(Metrics::new());
        let shared = Arc::new(Shared {
            pods: kube::runtime::reflector::store().0,
            snapshots: Arc::new(SnapshotIndex::new(NODE.to_owned())),
            classes: kube::runtime::reflector::store().0,
            publisher: Publisher::new(server.client(), NODE.to_owned()),
            policy: Policy {
                unclaimed_grace,
                ask_again: Duration::ZERO,
                ..Policy::default()
            },
            board: Arc::default(),
            saves: Saves::new(1, None, dir.path(), metrics.clone()),
            pressure: Arc::new(NodePressure::off()),
            spans: Arc::new(Spans::new(None)),
            kata: None,
            asked: Asked::default(),
            metrics,
            node,
        });
        let driver = Driver::new(shared.clone(), CancellationToken::new());
        Self {
            _dir: dir,
            server,
            shared,
            driver,
            pod,
            image,
        }
    }

    fn snapshot(&self) -> Value {
        self.server.create(
            "sandboxsnapshots",
            json!({
                "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
                "metadata": { "name": "late", "namespace": "n" },
                "spec": { "sandboxName": "s", "podUID": POD, "nodeName": NODE, "reason": "Suspend" },
            }),
        )
    }

    fn in_api(&self) -> Option<Value> {
        self.server.get("sandboxsnapshots", "n", "late")
    }

    /// Delivers the snapshot as the watch does.
    fn show(&self) {
        let shown = self
            .in_api()
            .and_then(|one| serde_json::from_value(one).ok());
        if let Some(snapshot) = shown {
            let event = kube::runtime::watcher::Event::Apply(snapshot);
            self.shared.snapshots.take(event);
        }
        self.driver.wake_task(&self.pod);
    }

    fn has_image(&self) -> bool {
        let images = self.shared.node.store.list_pod(&self.pod);
        images.is_ok_and(|images| images.iter().any(|one| one.id == self.image))
    }

    async fn until(&self, words: &str, mut condition: impl FnMut() -> bool) {
        let waits = async {
            while !condition() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let came = tokio::time::timeout(LIMIT, waits).await;
        came.unwrap_or_else(|_| panic!("not seen: {words}; {:?}", self.in_api()));
    }
}

#[tokio::test]
async fn a_snapshot_that_comes_late_gets_the_image_of_a_pod_that_is_gone() {
    let bench = Bench::new(Duration::from_secs(600));
    bench.driver.begin();
    let is_unclaimed = || bench.shared.board.is_oldest_unclaimed(&bench.pod);
    bench.until("it waits for a snapshot", is_unclaimed).await;
    bench.snapshot();
    let committed = || {
        bench.show();
        let snapshot = bench.in_api().expect("the snapshot");
        snapshot["status"]["imageID"] == json!(bench.image.to_string())
            && snapshot["status"]["conditions"][0]["status"] == "True"
    };
    bench.until("it is committed", committed).await;
    let snapshot = bench.in_api().expect("the snapshot");
    assert_eq!(snapshot["status"]["nodeName"], NODE);
    assert_eq!(snapshot["status"]["podUID"], POD);
    assert!(bench.has_image());
}

#[tokio::test]
async fn an_image_stays_while_its_snapshot_exists_and_its_removal_is_an_event() {
    let bench = Bench::new(Duration::ZERO);
    bench.snapshot();
    bench.driver.begin();
    let asked = || {
        bench
            .server
            .take_lists()
            .iter()
            .any(|(kind, _)| kind == "sandboxsnapshots")
    };
    bench.until("the apiserver is asked", asked).await;
    bench.driver.wake_task(&bench.pod);
    bench.until("it is asked again", asked).await;
    assert!(bench.has_image(), "the API has a snapshot of it");
    bench.server.remove("sandboxsnapshots", "n", "late");
    let given_up = || {
        bench.driver.wake_task(&bench.pod);
        !bench.has_image()
    };
    bench.until("the image goes", given_up).await;
    let has_event = || {
        let events = bench.server.list("events");
        events.iter().any(|event| {
            event["reason"] == "MemoryGivenUp"
                && event["regarding"]["name"] == "s"
                && event["note"]
                    .as_str()
                    .is_some_and(|note| note.contains("pod-1.1"))
        })
    };
    bench.until("it is said on the Sandbox", has_event).await;
}

#[tokio::test]
async fn a_snapshot_of_an_unknown_pod_is_answered_once_and_keeps_no_task() {
    let bench = Bench::new(Duration::from_secs(600));
    bench.driver.begin();
    bench.server.create(
        "sandboxsnapshots",
        json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": { "name": "late", "namespace": "n" },
            "spec": { "sandboxName": "s", "podUID": "unknown", "nodeName": NODE },
        }),
    );
    let unknown = PodUid::new("unknown").expect("a UID");
    let answered = || {
        bench.show();
        bench.driver.wake_task(&unknown);
        let snapshot = bench.in_api().expect("the snapshot");
        snapshot["status"]["conditions"][0]["reason"] == "SandboxNotFound"
    };
    bench.until("it is answered", answered).await;
    let ended = || {
        bench.show();
        !bench.driver.wake_task(&unknown)
    };
    bench.until("its task has ended", ended).await;
    let sweeps = bench.driver.clone();
    let swept = tokio::task::spawn_blocking(move || sweeps.take_up());
    swept.await.expect("it sweeps");
    assert!(!bench.driver.wake_task(&unknown), "a sweep begins none");
    // A deletion removes the finalizer too.
    bench.server.delete("sandboxsnapshots", "n", "late");
    let released = || {
        bench.show();
        bench.driver.wake_task(&unknown);
        bench.in_api().is_none()
    };
    bench.until("it is released", released).await;
}

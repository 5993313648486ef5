//! `drain`.

use std::time::Duration;

use serde_json::{Value, json};
use torpor_cli::args::Drain;
use torpor_cli::drain::{Outcome, SuspendError, Target, look, suspend_all};
use torpor_cli::error::Error;
use torpor_cli::run::{Ended, drained};
use torpor_test_apiserver::Apiserver;

use crate::support::{cluster, create, mode, set_conditions};

const ASLEEP: [(&str, &str, &str); 2] = [
    ("Suspended", "True", "PodTerminated"),
    ("Hibernated", "True", "Hibernated"),
];

/// Creates a Sandbox with its Pod on node-0 and a RuntimeClass that can hibernate there.
fn on_node(server: &Apiserver, name: &str, annotations: &Value) {
    let sandbox = create(server, name);
    let patch = json!({"metadata": {"annotations": annotations}});
    server.edit("sandboxes", "x", name, &patch);
    let owner = json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": name,
        "uid": sandbox["metadata"]["uid"], "controller": true,
    });
    server.create(
        "pods",
        json!({
            "metadata": {"name": name, "namespace": "x", "ownerReferences": [owner]},
            "spec": {"nodeName": "node-0", "runtimeClassName": "torpor", "containers": []},
        }),
    );
    let runs = json!({"status": {"phase": "Running"}});
    server.edit("pods", "x", name, &runs);
}

fn node_with_torpor(server: &Apiserver) {
    server.create("nodes", json!({"metadata": {"name": "node-0"}}));
    server.create(
        "runtimeclasses",
        json!({"metadata": {"name": "torpor"}, "handler": "torpor"}),
    );
    server.create(
        "sandboxnodes",
        json!({"metadata": {"name": "node-0"}, "spec": {}, "status": {"runtimes": [
            {"handler": "torpor", "kind": "gVisor", "capabilities": {"hibernate": true}},
        ]}}),
    );
}

fn drain(node: &str, dry_run: bool) -> Drain {
    Drain {
        node: node.to_owned(),
        dry_run,
        timeout: Duration::from_secs(60),
    }
}

/// Returns the result of `name` in a drain of node-0, where `answer` plays the controller.
async fn result_of_drain(
    server: &Apiserver,
    name: &str,
    answer: impl AsyncFnOnce(&Apiserver),
) -> Result<Outcome, SuspendError> {
    let cluster = cluster(server);
    let (targets, unseen) = Box::pin(look(&cluster, "node-0")).await.unwrap();
    assert_eq!(unseen, Vec::<String>::new());
    let mut results = Vec::new();
    let controller = async {
        let asked = |s: &Apiserver| mode(s, name) == "Suspended";
        server.until("the suspension is requested", asked).await;
        answer(server).await;
    };
    let limit = Duration::from_secs(60);
    let ended = |target: &Target, result| results.push((target.name.clone(), result));
    let drain = suspend_all(&cluster, &targets, limit, &|_| {}, ended);
    tokio::join!(drain, controller);
    let (of, result) = results.pop().unwrap();
    assert_eq!((of.as_str(), results.len()), (name, 0));
    result
}

#[tokio::test]
async fn a_drain_leaves_no_sandbox_suspended_and_skips_those_that_would_lose_memory() {
    let server = Apiserver::new();
    node_with_torpor(&server);
    on_node(&server, "kept", &json!({}));
    let stops = json!({"torpor.dev/suspension-strategy": "Stop"});
    on_node(&server, "stops", &stops);
    let cluster = cluster(&server);
    let controller = async {
        let suspended = |s: &Apiserver| mode(s, "kept") == "Suspended";
        server.until("the suspension is requested", suspended).await;
        let cordoned = server.get("nodes", "", "node-0").unwrap();
        assert_eq!(
            cordoned["spec"]["unschedulable"], true,
            "not cordoned before"
        );
        set_conditions(&server, "kept", &ASLEEP);
    };
    let asked = drain("node-0", false);
    let (ended, ()) = tokio::join!(drained(&cluster, &asked), controller);
    // The Sandbox with the strategy Stop is skipped.
    assert_eq!(ended.unwrap(), Ended::Failed);
    assert_eq!(mode(&server, "kept"), "Running");
    assert_eq!(mode(&server, "stops"), "Running");
}

#[tokio::test]
async fn a_drain_reports_lost_memory_and_a_deleted_sandbox() {
    let server = Apiserver::new();
    node_with_torpor(&server);
    on_node(&server, "s", &json!({}));
    let lost = [
        ("Suspended", "True", "PodTerminated"),
        ("Hibernated", "False", "SaveFailed"),
    ];
    let result = result_of_drain(&server, "s", async |s| set_conditions(s, "s", &lost)).await;
    assert!(matches!(result, Ok(Outcome::MemoryLost(why)) if why.contains("SaveFailed")));
    assert_eq!(mode(&server, "s"), "Running");
    let goes = async |s: &Apiserver| {
        s.delete("sandboxes", "x", "s");
    };
    let result = result_of_drain(&server, "s", goes).await;
    assert!(matches!(result, Ok(Outcome::Gone)), "{result:?}");
}

#[tokio::test]
async fn a_sandbox_resumed_during_a_drain_is_suspended_again() {
    let server = Apiserver::new();
    node_with_torpor(&server);
    on_node(&server, "s", &json!({}));
    let resumed_once = async |s: &Apiserver| {
        s.edit(
            "sandboxes",
            "x",
            "s",
            &json!({"spec": {"operatingMode": "Running"}}),
        );
        let again = |s: &Apiserver| mode(s, "s") == "Suspended";
        s.until("the suspension is requested again", again).await;
        set_conditions(s, "s", &ASLEEP);
    };
    let result = result_of_drain(&server, "s", resumed_once).await;
    assert!(matches!(result, Ok(Outcome::MemoryKept(_))), "{result:?}");
    assert_eq!(mode(&server, "s"), "Running");
}

#[tokio::test]
async fn a_suspension_that_does_not_end_in_time_is_called_off() {
    let server = Apiserver::new();
    node_with_torpor(&server);
    on_node(&server, "s", &json!({}));
    let cluster = cluster(&server);
    let (targets, _) = Box::pin(look(&cluster, "node-0")).await.unwrap();
    let mut results = Vec::new();
    let limit = Duration::from_millis(50);
    suspend_all(&cluster, &targets, limit, &|_| {}, |_, result| {
        results.push(result)
    })
    .await;
    assert!(
        matches!(
            &results[..],
            [Err(SuspendError::StillRuns(Error::Timeout { .. }))]
        ),
        "{results:?}"
    );
    assert_eq!(mode(&server, "s"), "Running");
}

#[tokio::test]
async fn a_sandbox_suspended_by_another_client_during_a_drain_is_not_resumed() {
    let server = Apiserver::new();
    node_with_torpor(&server);
    on_node(&server, "s", &json!({}));
    let by_others = json!({"spec": {"operatingMode": "Suspended"}});
    server.edit("sandboxes", "x", "s", &by_others);
    let result = result_of_drain(&server, "s", async |s| set_conditions(s, "s", &ASLEEP)).await;
    assert!(matches!(result, Ok(Outcome::MemoryKept(_))), "{result:?}");
    assert_eq!(mode(&server, "s"), "Suspended");
}

#[tokio::test]
async fn a_dry_run_changes_nothing_and_a_missing_node_is_named() {
    let server = Apiserver::new();
    node_with_torpor(&server);
    on_node(&server, "demo", &json!({}));
    let cluster = cluster(&server);
    let ended = drained(&cluster, &drain("node-0", true)).await;
    assert_eq!(ended.unwrap(), Ended::Done);
    assert_eq!(mode(&server, "demo"), "Running");
    let node = server.get("nodes", "", "node-0").unwrap();
    assert_eq!(node["spec"].get("unschedulable"), None);
    for dry_run in [true, false] {
        let asked = drain("node-1", dry_run);
        let error = drained(&cluster, &asked).await.unwrap_err();
        assert_eq!(error.to_string(), "there is no node node-1");
        assert!(error.remedy().unwrap().contains("kubectl get nodes"));
    }
}

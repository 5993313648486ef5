//! Tests that only the node of the saved Pod may report about its image. A compromised agent writes
//! any status of a SandboxSnapshot.

use rstest::rstest;
use serde_json::{Value, json};

use crate::{
    objects::{
        IMAGE, NS, committed, condition, golden, mode, pod_record, sandbox_node, torpor_sandbox,
    },
    world::World,
};

/// Returns a world with a second node that has all capabilities.
fn two_nodes() -> World {
    let world = World::new();
    world.api.create("sandboxnodes", sandbox_node("n2"));
    world
        .api
        .create("nodes", json!({"metadata": {"name": "n2"}}));
    world
}

async fn suspending(change: Value) -> (World, String) {
    let world = two_nodes();
    world.ready(torpor_sandbox(change)).await;
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    let name = world.snapshot();
    (world, name)
}

async fn suspended(change: Value) -> (World, String) {
    let (world, name) = suspending(change).await;
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    (world, name)
}

const STOLEN: &str = "reports its image on node \"n2\", but its Pod ran on node \"n1\"";

#[tokio::test]
async fn a_pod_is_not_deleted_because_another_node_reports_the_image() {
    let (world, name) = suspending(json!({})).await;
    world.edit_snapshot(&name, &committed("i.1", "n2"));
    world.settle().await;
    assert!(!world.pod_is_terminating());
    let (status, reason, message) = world.condition("Hibernated").unwrap();
    assert_eq!([&*status, &*reason], ["False", "SaveFailed"]);
    assert!(message.contains(STOLEN), "{message}");
    // The agent of the Pod's own node reports the image.
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    world.settle().await;
    assert!(world.pod_is_terminating());
}

#[tokio::test]
async fn the_apiserver_is_asked_which_node_has_the_image_before_the_pod_is_deleted() {
    let (world, name) = suspending(json!({})).await;
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    world.sync();
    world.edit_snapshot(&name, &json!({"status": {"nodeName": "n2"}}));
    world.stale_pass().await.unwrap();
    assert!(!world.pod_is_terminating());
}

#[tokio::test]
async fn a_pod_that_its_kubelet_ended_stays_for_an_image_that_another_node_claims() {
    let world = two_nodes();
    world.ready(torpor_sandbox(json!({}))).await;
    world.set_pod_condition(condition("torpor.dev/Hibernated", "True", "Hibernated", ""));
    world.settle().await;
    world.set_pod_condition(condition(
        "DisruptionTarget",
        "True",
        "TerminationByKubelet",
        "",
    ));
    world.edit_pod(&json!({"status": {"phase": "Failed", "reason": "Terminated"}}));
    world.settle().await;
    let name = world.snapshot();
    world.edit_snapshot(&name, &committed("i.1", "n2"));
    world.settle().await;
    assert!(!world.pod_is_terminating());
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    world.settle().await;
    assert!(world.pod_is_terminating());
}

#[rstest]
#[case::fails("Fail")]
#[case::starts_cold("ColdStart")]
#[tokio::test]
async fn no_pod_is_drawn_to_a_node_that_claims_the_image_of_another(#[case] policy: &str) {
    let policy_of = json!({"metadata": {"annotations": {"torpor.dev/on-restore-failure": policy}}});
    let (world, name) = suspended(policy_of).await;
    world.edit_snapshot(&name, &json!({"status": {"nodeName": "n2"}}));
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    let (_, reason, message) = world.condition("Restored").unwrap();
    assert!(message.contains(STOLEN), "{message}");
    if policy == "Fail" {
        assert_eq!(reason, "NodeMismatch");
        assert!(world.pod().is_none());
        assert_eq!(world.events(), ["SnapshotCommitted", "RestoreFailed"]);
    } else {
        assert_eq!(reason, "ColdStarted");
        let pod = world.pod().unwrap();
        assert_eq!(pod["spec"].get("affinity"), None);
        assert_eq!(pod["spec"]["containers"][0]["image"], "img");
    }
}

#[tokio::test]
async fn the_images_of_the_next_pod_are_those_that_its_kubelet_reported() {
    let (world, name) = suspended(json!({})).await;
    let evil = json!([{"name": "c", "imageID": "registry.example/evil@sha256:666"}]);
    world.edit_snapshot(&name, &json!({"status": {"containers": evil}}));
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    let pod = world.pod().unwrap();
    assert_eq!(pod["spec"]["containers"][0]["image"], IMAGE);
}

#[tokio::test]
async fn a_snapshot_of_an_older_version_is_restored_with_the_templates_images() {
    let (world, name) = suspended(json!({})).await;
    let older = json!({"metadata": {"annotations": {"torpor.dev/saved-pod": null}}});
    world.edit_snapshot(&name, &older);
    let forgotten = json!({"metadata": {"annotations": {"torpor.dev/last-pod": null}}});
    world.edit_sandbox(&forgotten);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    let pod = world.pod().unwrap();
    assert_eq!(
        pod["metadata"]["annotations"]["torpor.dev/restore-image"],
        "i.1"
    );
    let container = &pod["spec"]["containers"][0];
    assert_eq!(
        (&container["image"], &container["imagePullPolicy"]),
        (&json!("img"), &json!("IfNotPresent"))
    );
}

fn copy() -> Value {
    torpor_sandbox(json!({"metadata": {"annotations": {"torpor.dev/restore-from": "golden"}}}))
}

#[tokio::test]
async fn a_copy_is_made_on_the_node_that_is_recorded_and_on_no_other() {
    let world = two_nodes();
    let mut stolen = golden();
    stolen["status"]["nodeName"] = "n2".into();
    world.api.create("sandboxsnapshots", stolen);
    world.api.create("sandboxes", copy());
    world.settle().await;
    assert!(world.pod().is_none());
    let (_, reason, message) = world.condition("Restored").unwrap();
    assert_eq!(reason, "NodeMismatch");
    assert!(message.contains(STOLEN), "{message}");
    world.edit_snapshot("golden", &json!({"status": {"nodeName": "n1"}}));
    world.settle().await;
    assert!(world.pod().is_some());
}

#[tokio::test]
async fn a_snapshot_without_a_recorded_pod_is_restored_once_the_record_is_added() {
    let world = two_nodes();
    let mut older = golden();
    older["metadata"]["annotations"].take();
    world.api.create("sandboxsnapshots", older);
    world.api.create("sandboxes", copy());
    world.settle().await;
    assert!(world.pod().is_none());
    let (_, reason, message) = world.condition("Restored").unwrap();
    assert_eq!(reason, "NodeMismatch");
    assert!(message.contains("torpor.dev/saved-pod"), "{message}");
    let record = json!({"metadata": {"annotations": {
        "torpor.dev/saved-pod": r#"{"name": "g", "nodeName": "n1", "uid": "g"}"#,
    }}});
    world.edit_snapshot("golden", &record);
    world.settle().await;
    assert!(world.pod().is_some());
}

#[tokio::test]
async fn the_pod_of_a_manual_snapshot_is_recorded_while_it_exists() {
    let world = two_nodes();
    world.ready(torpor_sandbox(json!({}))).await;
    let by_hand = json!({"metadata": {"name": "m", "namespace": NS}, "spec": {"sandboxName": "s"}});
    world.api.create("sandboxsnapshots", by_hand);
    let uid = world.pod_uid();
    world.edit_snapshot("m", &committed("i.1", "n1"));
    world.edit_snapshot("m", &json!({"status": {"podUID": uid}}));
    world.sync();
    let found = world.api.get("sandboxsnapshots", NS, "m").unwrap();
    let found = std::sync::Arc::new(serde_json::from_value(found).unwrap());
    let context = std::sync::Arc::clone(&world.context);
    torpor_controller::snapshot::reconcile(found, context)
        .await
        .unwrap();
    let snapshot = &world.snapshots()[0];
    let record = &snapshot["metadata"]["annotations"]["torpor.dev/saved-pod"];
    assert_eq!(*record, pod_record(&world.sandbox(), &uid, "n1"));
}

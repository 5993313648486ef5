//! Tests of SandboxSnapshots: conditions that the controller writes, and those that it leaves to
//! the agents.

use std::sync::Arc;

use serde_json::{Value, json};
use torpor_controller::snapshot;

use crate::{
    objects::{NS, committed, condition, mode, torpor_sandbox},
    world::World,
};

/// Runs a pass over a snapshot.
async fn pass(world: &World, name: &str) {
    let found = world.api.get("sandboxsnapshots", NS, name);
    let found = serde_json::from_value(found.expect("the snapshot exists")).unwrap();
    let wait = snapshot::reconcile(Arc::new(found), Arc::clone(&world.context)).await;
    assert_eq!(wait.unwrap(), None);
}

fn committed_condition(world: &World) -> Value {
    world.snapshots()[0]["status"]["conditions"][0].clone()
}

#[tokio::test]
async fn a_pod_force_deleted_during_its_save_is_reported_by_its_agent() {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    let name = world.snapshot();
    world.api.remove("pods", NS, "s");
    let gone = condition("Committed", "False", "SandboxNotFound", "The Pod is gone");
    let report = json!({
        "metadata": {"finalizers": ["torpor.dev/image"]},
        "status": {"nodeName": "n1", "conditions": [gone]},
    });
    world.edit_snapshot(&name, &report);
    world.settle().await;
    world.api.take_writes();
    pass(&world, &name).await;
    assert_eq!(world.api.take_writes(), []);
    assert_eq!(committed_condition(&world), gone);
    let message = "The Pod ended before its memory was saved; memory was not kept";
    world.assert_condition("Hibernated", "False", "SaveFailed", message);
}

/// Returns a world whose Sandbox is being suspended: its image was committed, but is missing before
/// the Pod is deleted.
async fn image_is_missing() -> (World, String) {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    let name = world.snapshot();
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    let missing = condition("Committed", "False", "ImageMissing", "not in the store");
    world.edit_snapshot(&name, &json!({"status": {"conditions": [missing]}}));
    world.settle().await;
    (world, name)
}

#[tokio::test]
async fn a_missing_image_of_an_existing_pod_is_not_reported_as_being_saved() {
    let (world, name) = image_is_missing().await;
    let message = format!(
        "The image of SandboxSnapshot {name:?} is not on node \"n1\"; the controller waits for it (a disk that is not mounted, a directory with another name)"
    );
    world.assert_condition("Hibernated", "False", "ImageMissing", &message);
    assert!(
        !world.pod_is_terminating(),
        "its sandbox sleeps in the same image"
    );
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    world.settle().await;
    assert!(world.pod_is_terminating());
}

#[tokio::test]
async fn a_pod_that_ends_while_its_image_is_missing_loses_no_memory() {
    let (world, _) = image_is_missing().await;
    world.edit_pod(&json!({"status": {"phase": "Failed"}}));
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    let hibernated = world.condition("Hibernated").expect("the condition is set");
    assert_eq!(hibernated.1, "ImageMissing");
    assert_eq!(world.events(), Vec::<String>::new(), "nothing is lost yet");
}

#[tokio::test]
async fn the_controller_reports_on_a_snapshot_that_no_agent_has_adopted() {
    let world = World::new();
    let snapshot = json!({
        "metadata": {"name": "m", "namespace": NS},
        "spec": {"sandboxName": "s", "podUID": "u-p", "reason": "Manual"},
    });
    world.api.create("sandboxsnapshots", snapshot);
    pass(&world, "m").await;
    assert_eq!(committed_condition(&world)["reason"], "SandboxNotFound");
    world.api.create("sandboxes", torpor_sandbox(json!({})));
    pass(&world, "m").await;
    assert_eq!(committed_condition(&world)["reason"], "Pending");
}

#[tokio::test]
async fn an_adopted_snapshot_without_a_report_is_removed_when_it_is_deleted() {
    let world = World::new();
    let snapshot = json!({
        "metadata": {
            "name": "m", "namespace": NS, "finalizers": ["torpor.dev/image"],
            "deletionTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"sandboxName": "s", "podUID": "u-p", "nodeName": "n1", "reason": "Suspend"},
    });
    world.api.create("sandboxsnapshots", snapshot);
    pass(&world, "m").await;
    assert_eq!(world.snapshots(), Vec::<Value>::new());
}

//! SandboxSnapshots: what is the controller's to say of them, and what it leaves to the agents.

use std::sync::Arc;

use serde_json::{Value, json};
use torpor_controller::snapshot;

use crate::{
    objects::{NS, committed, condition, mode, torpor_sandbox},
    world::World,
};

/// One pass over a snapshot as it is now.
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
async fn that_a_pod_was_force_deleted_while_it_was_saved_is_its_agents_to_tell() {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    let name = world.snapshot();
    world.api.remove("pods", NS, "s");
    let gone = condition("Committed", "False", "SandboxNotFound", "The Pod is gone");
    let told = json!({
        "metadata": {"finalizers": ["torpor.dev/image"]},
        "status": {"nodeName": "n1", "conditions": [gone]},
    });
    world.edit_snapshot(&name, &told);
    world.settle().await;
    world.api.take_writes();
    pass(&world, &name).await;
    assert_eq!(world.api.take_writes(), []);
    assert_eq!(committed_condition(&world), gone);
    let message = "The Pod ended before its memory was saved; memory was not kept";
    world.assert_says("Hibernated", "False", "SaveFailed", message);
}

/// A Sandbox that is being suspended, whose image was committed and cannot be found before its Pod was deleted.
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
async fn an_image_that_is_missing_while_its_pod_is_there_is_not_being_saved() {
    let (world, name) = image_is_missing().await;
    let message = format!(
        "The image of SandboxSnapshot {name:?} is not on node \"n1\", and is waited for (a disk that is not mounted, a directory with another name)"
    );
    world.assert_says("Hibernated", "False", "ImageMissing", &message);
    assert!(
        !world.pod_is_going(),
        "its sandbox sleeps in the same image"
    );
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    world.settle().await;
    assert!(world.pod_is_going());
}

#[tokio::test]
async fn a_pod_that_ends_while_its_image_is_missing_takes_no_memory_along() {
    let (world, _) = image_is_missing().await;
    world.edit_pod(&json!({"status": {"phase": "Failed"}}));
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    let said = world.condition("Hibernated").expect("it is said");
    assert_eq!(said.1, "ImageMissing");
    assert_eq!(world.events(), Vec::<String>::new(), "nothing is lost yet");
}

#[tokio::test]
async fn what_no_agent_has_adopted_the_controller_says_and_takes_back() {
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
async fn what_an_agent_adopted_and_never_told_of_goes_when_it_is_deleted() {
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

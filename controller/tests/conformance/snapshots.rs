//! SandboxSnapshots: what is the controller's to say of them, and what it leaves to the agents.

use std::sync::Arc;

use serde_json::{Value, json};
use torpor_controller::snapshot;

use crate::{
    objects::{NS, condition, mode, torpor_sandbox},
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

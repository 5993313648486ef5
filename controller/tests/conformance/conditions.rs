//! Tests of the conditions' `observedGeneration` and `lastTransitionTime`.
//!
//! [`World::assert_condition`] also checks `observedGeneration`.

use serde_json::json;

use crate::{
    objects::{mode, sandbox},
    world::World,
};

#[tokio::test]
async fn a_spec_that_changes_nothing_else_is_acknowledged_by_every_condition() {
    let world = World::new();
    world.ready(sandbox(json!({}))).await;
    world.let_time_pass();
    let later = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(3600);
    world.edit_sandbox(&json!({"spec": {"shutdownTime": later.to_string()}}));
    assert_eq!(world.generation(), 2);
    assert_eq!(world.writes_of_a_pass().await, ["patch status sandboxes"]);
    let awake = "Sandbox is not suspended";
    world.assert_condition("Suspended", "False", "NotSuspended", awake);
    world.assert_condition("PodScheduled", "True", "PodScheduled", "");
    world.assert_condition("Ready", "True", "DependenciesReady", "Pod is Ready");
    for type_ in world.condition_types() {
        assert!(!world.has_moved(&type_), "{type_}");
    }
}

#[tokio::test]
async fn the_time_of_a_condition_moves_with_its_status_and_with_nothing_else() {
    let world = World::new();
    world.ready(sandbox(json!({}))).await;
    let moved = || (world.has_moved("Suspended"), world.has_moved("Ready"));
    for _ in 0..2 {
        world.let_time_pass();
        world.edit_sandbox(&mode("Suspended"));
        world.settle().await;
        // Reason and message change; the status stays False.
        let terminating = "Pod is terminating. Sandbox is suspending";
        world.assert_condition("Suspended", "False", "PodTerminating", terminating);
        assert_eq!(moved(), (false, true), "on its way down");
        world.let_time_pass();
        world.pod_ends();
        world.settle().await;
        assert_eq!(moved(), (true, false), "suspended");
        world.let_time_pass();
        world.edit_sandbox(&mode("Running"));
        world.settle().await;
        assert_eq!(moved(), (true, false), "on its way back");
        world.let_time_pass();
        world.pod_becomes_ready();
        world.settle().await;
        assert_eq!(moved(), (false, true), "back");
    }
}

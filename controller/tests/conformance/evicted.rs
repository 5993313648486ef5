//! Pods that are taken from a Sandbox that is to run: by an eviction, or by their kubelet, which ends them and deletes them not (its node shuts down, or is short of memory or disk).

use rstest::rstest;
use serde_json::{Value, json};

use crate::{
    objects::{NS, committed, condition, manual_snapshot, mode, torpor_sandbox},
    world::World,
};

/// A world with a Sandbox of which its agent says this.
async fn asleep(status: &str, reason: &str) -> World {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    world.pod_says(condition("torpor.dev/Hibernated", status, reason, ""));
    world.settle().await;
    world
}

fn delete(world: &World) {
    world.edit_pod(&json!({"metadata": {"deletionTimestamp": "2026-11-21T12:00:00Z"}}));
}

/// The eviction API marks a Pod and deletes it.
fn evict(world: &World) {
    let by_api = "EvictionByEvictionAPI";
    world.pod_says(condition("DisruptionTarget", "True", by_api, ""));
    delete(world);
}

/// The kubelet has ended the Pod.
fn end(world: &World, reason: &str, disrupts: bool) {
    if disrupts {
        let by_kubelet = "TerminationByKubelet";
        world.pod_says(condition("DisruptionTarget", "True", by_kubelet, ""));
    }
    world.edit_pod(&json!({"status": {"phase": "Failed", "reason": reason}}));
}

/// The agent has found the Pod's memory, or none.
fn agent_says(world: &World, memory: bool) {
    let none = json!({
        "metadata": {"finalizers": ["torpor.dev/image"]},
        "status": {"conditions": [condition("Committed", "False", "SandboxNotFound", "no memory")]},
    });
    let said: Value = match memory {
        true => committed("i.1", "n1"),
        false => none,
    };
    world.edit_snapshot(&world.snapshot(), &said);
}

// --- evicted ----------------------------------------------------------------------------------------------------------------------------

#[rstest]
#[case::hibernated("True", "Hibernated")]
#[case::dozing("False", "Dozing")]
#[tokio::test]
async fn a_sleeping_pod_that_is_evicted_leaves_its_image_to_the_next_pod(
    #[case] status: &str,
    #[case] reason: &str,
) {
    let world = asleep(status, reason).await;
    evict(&world);
    world.settle().await;
    let name = world.snapshot();
    world.assert_says(
        "Hibernated",
        "False",
        "Saving",
        &format!("The Pod is evicted; its image is being kept in SandboxSnapshot {name:?}"),
    );
    agent_says(&world, true);
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    let image = world.pod_annotation("torpor.dev/restore-image");
    assert_eq!(image.as_deref(), Some("i.1"));
    assert_eq!(world.events(), ["SnapshotCommitted"]);
}

#[tokio::test]
async fn who_is_suspended_while_its_sleeping_pod_is_evicted_keeps_its_memory() {
    let world = asleep("True", "Hibernated").await;
    evict(&world);
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    agent_says(&world, true);
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    assert_eq!(world.condition("Hibernated").unwrap().0, "True");
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    let image = world.pod_annotation("torpor.dev/restore-image");
    assert_eq!(image.as_deref(), Some("i.1"));
}

#[tokio::test]
async fn what_keeps_the_image_of_an_evicted_pod_from_its_name_is_said_and_not_that_it_was_awake() {
    let world = asleep("True", "Hibernated").await;
    let name = format!("s-{}", &world.pod_uid()[..8]);
    let taken = manual_snapshot(&name);
    world.api.create("sandboxsnapshots", taken);
    evict(&world);
    // It is of no Sandbox, and so not in the cache: each pass finds it anew.
    for _ in 0..3 {
        world.pass().await.unwrap();
    }
    let message = format!(
        "SandboxSnapshot {name:?} exists and is not of this Sandbox's Pod; delete it to go on"
    );
    world.assert_says("Hibernated", "False", "SaveFailed", &message);
    assert!(world.pass().await.unwrap().is_some(), "it looks again");
    world.api.delete("sandboxsnapshots", NS, &name);
    world.settle().await;
    let message =
        format!("The Pod is evicted; its image is being kept in SandboxSnapshot {name:?}");
    world.assert_says("Hibernated", "False", "Saving", &message);
}

#[tokio::test]
async fn that_a_pod_was_evicted_awake_and_its_memory_lost_is_said() {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    evict(&world);
    world.settle().await;
    assert!(world.snapshots().is_empty());
    assert_eq!(world.events(), ["MemoryNotKept"]);
    world.pod_ends();
    world.settle().await;
    assert!(world.pod().is_some());
    assert_eq!(world.condition("Hibernated"), None);
}

#[tokio::test]
async fn a_sleeping_pod_that_somebody_deleted_is_started_anew() {
    let world = asleep("True", "Hibernated").await;
    delete(&world);
    world.settle().await;
    assert!(world.snapshots().is_empty());
}

// --- ended by the kubelet ---------------------------------------------------------------------------------------------------------------

/// A world whose Pod said that about its sleep when its kubelet ended it.
async fn ended(status: &str, sleep: &str, reason: &str, disrupts: bool) -> World {
    let world = asleep(status, sleep).await;
    end(&world, reason, disrupts);
    world.settle().await;
    world
}

#[rstest]
#[case::the_node_shuts_down("True", "Hibernated", "Terminated", true)]
#[case::the_node_is_short_of_memory("True", "Hibernated", "Evicted", true)]
#[case::the_kubelet_began_anew_meanwhile("True", "Hibernated", "NodeShutdown", false)]
#[case::while_it_was_about_to_wake("False", "Waking", "Terminated", true)]
#[tokio::test]
async fn a_sleeping_pod_that_its_kubelet_ended_leaves_its_image_to_the_next_pod(
    #[case] status: &str,
    #[case] sleep: &str,
    #[case] reason: &str,
    #[case] disrupts: bool,
) {
    let world = ended(status, sleep, reason, disrupts).await;
    let name = world.snapshot();
    let message = format!(
        "The kubelet of node \"n1\" ended the Pod; its image is being kept in SandboxSnapshot {name:?}. \
         To start anew without it, delete the Pod"
    );
    world.assert_says("Hibernated", "False", "Saving", &message);
    assert_eq!(world.condition("Finished"), None);
    assert_eq!(world.condition("Ready").unwrap().1, "DependenciesNotReady");
    assert!(!world.pod_is_going(), "its image would go with it");

    agent_says(&world, true);
    world.settle().await;
    assert!(world.pod_is_going());
    world.pod_ends();
    world.settle().await;
    let image = world.pod_annotation("torpor.dev/restore-image");
    assert_eq!(image.as_deref(), Some("i.1"));
    assert_eq!(world.condition("Finished"), None);
    assert_eq!(world.events(), ["SnapshotCommitted"]);
}

#[rstest]
#[case::awake("False", "Awake", "Terminated", true)]
#[case::it_exceeded_its_own_limits("True", "Hibernated", "Evicted", false)]
#[case::its_time_is_over("True", "Hibernated", "DeadlineExceeded", false)]
#[tokio::test]
async fn any_other_pod_that_its_kubelet_ended_has_failed(
    #[case] status: &str,
    #[case] sleep: &str,
    #[case] reason: &str,
    #[case] disrupts: bool,
) {
    let world = ended(status, sleep, reason, disrupts).await;
    world.assert_says("Finished", "True", "PodFailed", "Pod failed");
    assert!(world.snapshots().is_empty());
}

#[tokio::test]
async fn that_an_ended_pod_left_no_memory_is_said_and_it_has_failed() {
    let world = ended("False", "Dozing", "Evicted", true).await;
    assert_eq!(world.condition("Finished"), None);
    agent_says(&world, false);
    world.settle().await;
    world.assert_says("Finished", "True", "PodFailed", "Pod failed");
    let message = "The kubelet of node \"n1\" ended the Pod awake; memory was not kept";
    world.assert_says("Hibernated", "False", "SaveFailed", message);
    assert_eq!(world.events(), ["MemoryNotKept"]);
}

#[rstest]
#[case::at_once(false)]
#[case::while_its_image_is_being_kept(true)]
#[tokio::test]
async fn a_sandbox_may_be_suspended_when_its_kubelet_has_ended_its_pod(#[case] later: bool) {
    let world = asleep("True", "Hibernated").await;
    end(&world, "Terminated", true);
    if later {
        world.settle().await;
    }
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    assert!(!world.pod_is_going(), "its image would go with it");
    agent_says(&world, true);
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    assert_eq!(world.condition("Suspended").unwrap().1, "PodTerminated");
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    let image = world.pod_annotation("torpor.dev/restore-image");
    assert_eq!(image.as_deref(), Some("i.1"));
}

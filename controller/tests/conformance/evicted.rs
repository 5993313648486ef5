//! Tests of Pods that a running Sandbox loses.
//!
//! An eviction deletes the Pod. A kubelet ends the Pod without a deletion when its node shuts down
//! or is short of memory or disk.

use rstest::rstest;
use serde_json::{Value, json};

use crate::{
    objects::{NS, committed, condition, manual_snapshot, mode, torpor_sandbox},
    world::World,
};

/// Returns a world whose agent reports this status and reason of the condition Hibernated.
async fn asleep(status: &str, reason: &str) -> World {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    world.set_pod_condition(condition("torpor.dev/Hibernated", status, reason, ""));
    world.settle().await;
    world
}

fn delete(world: &World) {
    world.edit_pod(&json!({"metadata": {"deletionTimestamp": "2026-11-21T12:00:00Z"}}));
}

/// Marks and deletes the Pod, as the eviction API does.
fn evict(world: &World) {
    let by_api = "EvictionByEvictionAPI";
    world.set_pod_condition(condition("DisruptionTarget", "True", by_api, ""));
    delete(world);
}

/// Ends the Pod, as a kubelet does.
fn end(world: &World, reason: &str, disrupts: bool) {
    if disrupts {
        let by_kubelet = "TerminationByKubelet";
        world.set_pod_condition(condition("DisruptionTarget", "True", by_kubelet, ""));
    }
    world.edit_pod(&json!({"status": {"phase": "Failed", "reason": reason}}));
}

/// Reports the Pod's memory, or its absence, as an agent does.
fn agent_reports_memory(world: &World, memory: bool) {
    let none = json!({
        "metadata": {"finalizers": ["torpor.dev/image"]},
        "status": {"conditions": [condition("Committed", "False", "SandboxNotFound", "no memory")]},
    });
    let patch: Value = match memory {
        true => committed("i.1", "n1"),
        false => none,
    };
    world.edit_snapshot(&world.snapshot(), &patch);
}

// Evicted Pods.

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
    world.assert_condition(
        "Hibernated",
        "False",
        "Saving",
        &format!("The Pod is evicted; its image is being kept in SandboxSnapshot {name:?}"),
    );
    agent_reports_memory(&world, true);
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    let image = world.pod_annotation("torpor.dev/restore-image");
    assert_eq!(image.as_deref(), Some("i.1"));
    assert_eq!(world.events(), ["SnapshotCommitted"]);
}

#[tokio::test]
async fn a_sandbox_suspended_while_its_sleeping_pod_is_evicted_keeps_its_memory() {
    let world = asleep("True", "Hibernated").await;
    evict(&world);
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    agent_reports_memory(&world, true);
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
async fn a_snapshot_that_takes_the_name_for_an_evicted_pods_image_is_reported() {
    let world = asleep("True", "Hibernated").await;
    let name = format!("s-{}", &world.pod_uid()[..8]);
    let taken = manual_snapshot(&name);
    world.api.create("sandboxsnapshots", taken);
    evict(&world);
    // The snapshot belongs to no Sandbox, so the cache lacks it and each pass finds it anew.
    for _ in 0..3 {
        world.pass().await.unwrap();
    }
    let message = format!(
        "SandboxSnapshot {name:?} exists and does not belong to this Sandbox's Pod; delete it to continue"
    );
    world.assert_condition("Hibernated", "False", "SaveFailed", &message);
    assert!(world.pass().await.unwrap().is_some(), "it looks again");
    world.api.delete("sandboxsnapshots", NS, &name);
    world.settle().await;
    let message =
        format!("The Pod is evicted; its image is being kept in SandboxSnapshot {name:?}");
    world.assert_condition("Hibernated", "False", "Saving", &message);
}

#[tokio::test]
async fn the_lost_memory_of_a_pod_evicted_awake_is_reported() {
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
async fn a_sleeping_pod_that_a_user_deleted_is_replaced_without_memory() {
    let world = asleep("True", "Hibernated").await;
    delete(&world);
    world.settle().await;
    assert!(world.snapshots().is_empty());
}

// Pods ended by the kubelet.

/// Returns a world whose kubelet ended the Pod while the Pod had this condition Hibernated.
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
         To start without it, delete the Pod"
    );
    world.assert_condition("Hibernated", "False", "Saving", &message);
    assert_eq!(world.condition("Finished"), None);
    assert_eq!(world.condition("Ready").unwrap().1, "DependenciesNotReady");
    assert!(!world.pod_is_terminating(), "its image would go with it");

    agent_reports_memory(&world, true);
    world.settle().await;
    assert!(world.pod_is_terminating());
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
    world.assert_condition("Finished", "True", "PodFailed", "Pod failed");
    assert!(world.snapshots().is_empty());
}

#[tokio::test]
async fn an_ended_pod_without_memory_is_reported_and_has_failed() {
    let world = ended("False", "Dozing", "Evicted", true).await;
    assert_eq!(world.condition("Finished"), None);
    agent_reports_memory(&world, false);
    world.settle().await;
    world.assert_condition("Finished", "True", "PodFailed", "Pod failed");
    let message =
        "The kubelet of node \"n1\" ended the Pod while the sandbox was awake; memory was not kept";
    world.assert_condition("Hibernated", "False", "SaveFailed", message);
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
    assert!(!world.pod_is_terminating(), "its image would go with it");
    agent_reports_memory(&world, true);
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    assert_eq!(world.condition("Suspended").unwrap().1, "PodTerminated");
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    let image = world.pod_annotation("torpor.dev/restore-image");
    assert_eq!(image.as_deref(), Some("i.1"));
}

//! Tests of backups: SandboxSnapshots that keep the image of a sandbox asleep in place off its
//! node.

use jiff::{SignedDuration, Timestamp};
use rstest::rstest;
use serde_json::{Value, json};

use crate::{
    objects::{NS, committed, condition, mode, sandbox_node, torpor_sandbox},
    world::World,
};

/// Returns a world with a running Sandbox, backed up after ten minutes asleep, and two nodes.
async fn world_of(provisioner: &str) -> World {
    let world = World::new();
    let mut other = sandbox_node("n2");
    other["status"]["fetched"] = json!([]);
    world.api.create("sandboxnodes", other);
    let node = json!({"metadata": {"name": "n2"}});
    world.api.create("nodes", node);
    let class = json!({
        "metadata": {"name": "far"}, "spec": {"provisioner": provisioner, "parameters": {}},
    });
    world.api.create("snapshotclasses", class);
    let annotations =
        json!({"torpor.dev/snapshot-class": "far", "torpor.dev/back-up-after": "10m"});
    let change = json!({"metadata": {"annotations": annotations}});
    world.ready(torpor_sandbox(change)).await;
    world
}

/// Writes that the sandbox has slept for so long, as the agent does.
fn sleeps(world: &World, minutes: i64) {
    let since = Timestamp::now() - SignedDuration::from_mins(minutes);
    let mut asleep = condition("torpor.dev/Hibernated", "True", "Hibernated", "");
    asleep["lastTransitionTime"] = since.to_string().into();
    world.set_pod_condition(asleep);
}

fn wakes(world: &World) {
    world.set_pod_condition(condition("torpor.dev/Hibernated", "False", "Awake", ""));
}

async fn asleep_for(minutes: i64) -> World {
    let world = world_of("repository.torpor.dev").await;
    sleeps(&world, minutes);
    world.settle().await;
    world
}

/// Writes that the image of the backup is committed, and in its repository.
fn upload(world: &World, name: &str) {
    world.edit_snapshot(name, &committed("i.1", "n1"));
    let conditions = json!([
        condition("Committed", "True", "Committed", ""),
        condition("Uploaded", "True", "Uploaded", "")
    ]);
    let uploaded = json!({"status": {"digest": "blake3:1", "conditions": conditions}});
    world.edit_snapshot(name, &uploaded);
}

/// Writes that the sandbox ran on, as the agent does.
fn supersede(world: &World, name: &str) {
    let conditions = json!([
        condition("Committed", "True", "Committed", ""),
        condition("Uploaded", "True", "Uploaded", ""),
        condition("Consumed", "True", "Superseded", "")
    ]);
    world.edit_snapshot(name, &json!({"status": {"conditions": conditions}}));
}

/// Removes the node with the Pod, as the cluster does when the node's machine is gone.
fn lose_node(world: &World) {
    world.node_leaves("n1");
    world.api.remove("pods", NS, "s");
}

fn pod_is_deleted(world: &World) {
    let deleted = json!({"metadata": {"deletionTimestamp": Timestamp::now().to_string()}});
    world.edit_pod(&deleted);
}

fn restored_image(world: &World) -> Option<String> {
    world.pod_annotation("torpor.dev/restore-image")
}

#[tokio::test]
async fn a_sandbox_asleep_in_place_gets_one_backup_once_its_time_has_passed() {
    let world = asleep_for(9).await;
    assert!(world.snapshots().is_empty());
    let wait = world.pass().await.unwrap().expect("a time");
    assert!(wait.as_secs() <= 60, "{wait:?}");
    sleeps(&world, 11);
    world.settle().await;
    let name = world.snapshot();
    let backup = &world.snapshots()[0];
    assert_eq!(
        backup["spec"],
        json!({
            "sandboxName": "s", "podUID": world.pod_uid(), "nodeName": "n1", "reason": "Manual",
            "snapshotClassName": "far",
        })
    );
    assert_eq!(backup["metadata"]["labels"]["torpor.dev/backup"], "true");
    let owner = &backup["metadata"]["ownerReferences"][0];
    assert_eq!(owner["uid"], world.sandbox()["metadata"]["uid"]);
    upload(&world, &name);
    world.settle().await;
    assert!(world.writes_of_a_pass().await.is_empty());
    assert_eq!(world.snapshot(), name);
}

#[tokio::test]
async fn a_backup_goes_when_its_sandbox_runs_on_and_the_next_sleep_gets_another() {
    let world = asleep_for(11).await;
    let first = world.snapshot();
    upload(&world, &first);
    wakes(&world);
    supersede(&world, &first);
    world.settle().await;
    world.image_is_gone(&first);
    assert!(world.snapshots().is_empty());
    sleeps(&world, 12);
    world.settle().await;
    assert_ne!(world.snapshot(), first);
}

#[tokio::test]
async fn a_sandbox_of_a_lost_node_continues_from_its_backup() {
    let world = asleep_for(11).await;
    let backup = world.snapshot();
    upload(&world, &backup);
    let first = world.pod_uid();
    lose_node(&world);
    world.settle().await;
    assert_eq!(restored_image(&world).as_deref(), Some("i.1"));
    let copy = world.pod_annotation("torpor.dev/restore-copy");
    assert_eq!(copy.as_deref(), Some("true"));
    let pod = world.pod().expect("a Pod");
    let places =
        &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let places = places.to_string();
    assert!(
        places.contains("n2") && !places.contains("n1"),
        "not on a node that is there: {places}"
    );
    assert_ne!(world.pod_uid(), first);
    // The backup stays until the Pod has run.
    world.settle().await;
    assert_eq!(world.snapshot(), backup);
    world.pod_becomes_ready();
    world.settle().await;
    assert_eq!(world.snapshot(), backup, "the restore may still fail");
    world.set_pod_condition(condition(
        "torpor.dev/Restored",
        "True",
        "Restored",
        "It runs.",
    ));
    world.settle().await;
    let restored = world.condition("Restored").expect("a condition");
    assert_eq!(
        restored.2,
        format!(
            "It runs. Node \"n1\" has left the cluster. This is the backup SandboxSnapshot {backup:?}, made at 2026-01-01T00:00:00Z: a change since then is lost."
        )
    );
    assert_eq!(world.events(), ["Resumed"]);
    let left = &world.snapshots()[0]["metadata"];
    assert!(left["deletionTimestamp"].is_string(), "{left:#}");
}

#[tokio::test]
async fn a_sandbox_continues_from_its_backup_if_its_node_has_lost_the_image() {
    let world = asleep_for(11).await;
    upload(&world, &world.snapshot());
    world.api.remove("pods", NS, "s");
    world.settle().await;
    assert_eq!(world.pod(), None, "the node is asked first");
    let later = Timestamp::now() + SignedDuration::from_secs(60);
    let empty = json!({"status": {"heartbeatTime": later.to_string(), "sandboxes": []}});
    world.api.edit("sandboxnodes", "", "n1", &empty);
    world.settle().await;
    assert_eq!(restored_image(&world).as_deref(), Some("i.1"));
    let words = world.pod_annotation("torpor.dev/restore-backup");
    let words = words.expect("words for the condition");
    assert!(words.contains("has no image of it"), "{words}");
}

#[tokio::test]
async fn a_pod_that_never_ran_is_made_again_from_the_same_backup() {
    let world = asleep_for(11).await;
    upload(&world, &world.snapshot());
    lose_node(&world);
    world.settle().await;
    let first = world.pod_uid();
    pod_is_deleted(&world);
    world.settle().await;
    world.api.remove("pods", NS, "s");
    world.settle().await;
    assert_ne!(world.pod_uid(), first);
    assert_eq!(restored_image(&world).as_deref(), Some("i.1"));
}

#[rstest]
#[case::not_uploaded(false, false)]
#[case::superseded(true, true)]
#[tokio::test]
async fn a_backup_that_is_not_whole_or_older_than_its_sandbox_is_not_used(
    #[case] is_uploaded: bool,
    #[case] is_superseded: bool,
) {
    let world = asleep_for(11).await;
    let backup = world.snapshot();
    if is_uploaded {
        upload(&world, &backup);
    }
    if is_superseded {
        supersede(&world, &backup);
    }
    lose_node(&world);
    world.settle().await;
    assert_eq!(world.pod(), None);
    let restored = world.condition("Restored").expect("a condition");
    assert_eq!(restored.1, "NodeUnavailable", "{}", restored.2);
}

/// The watch has not shown the change yet.
#[tokio::test]
async fn a_backup_that_the_apiserver_has_as_superseded_is_not_used() {
    let world = asleep_for(11).await;
    let backup = world.snapshot();
    upload(&world, &backup);
    lose_node(&world);
    world.sync();
    supersede(&world, &backup);
    let _ = world.stale_pass().await;
    assert_eq!(world.pod(), None);
}

/// A drain lets a SandboxSnapshot adopt the image, and the node goes before its upload.
#[tokio::test]
async fn a_backup_stands_in_for_a_snapshot_of_the_same_image_that_was_not_uploaded() {
    let world = asleep_for(11).await;
    let backup = world.snapshot();
    upload(&world, &backup);
    let drained = condition("DisruptionTarget", "True", "EvictionByEvictionAPI", "");
    world.set_pod_condition(drained);
    pod_is_deleted(&world);
    world.settle().await;
    let suspend = world.image_of_suspension().expect("a snapshot");
    world.edit_snapshot(&suspend, &committed("i.1", "n1"));
    world.settle().await;
    lose_node(&world);
    world.settle().await;
    let copy = world.pod_annotation("torpor.dev/restore-copy");
    assert_eq!(copy.as_deref(), Some("true"));
    let all = world.snapshots();
    let left = all
        .iter()
        .find(|one| one["metadata"]["name"] == suspend.as_str())
        .expect("the snapshot");
    let conditions = left["status"]["conditions"].as_array().expect("conditions");
    let is_superseded = |one: &Value| one["type"] == "Consumed" && one["status"] == "True";
    assert!(conditions.iter().any(is_superseded), "{left:#}");
}

#[tokio::test]
async fn a_suspended_sandbox_of_a_lost_node_is_kept_in_its_backup_and_resumes_from_it() {
    let world = asleep_for(11).await;
    let backup = world.snapshot();
    upload(&world, &backup);
    lose_node(&world);
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    let hibernated = world.condition("Hibernated").expect("a condition");
    assert_eq!(hibernated.0, "True");
    assert!(hibernated.2.contains(&backup), "{}", hibernated.2);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(restored_image(&world).as_deref(), Some("i.1"));
}

#[tokio::test]
async fn a_sandbox_waits_for_a_node_that_is_silent_and_has_not_left() {
    let world = asleep_for(11).await;
    upload(&world, &world.snapshot());
    world.node_falls_silent("n1");
    world.api.remove("pods", NS, "s");
    world.settle().await;
    assert_eq!(world.pod(), None);
}

#[tokio::test]
async fn a_backup_stands_in_for_a_cold_start_once_a_silent_node_was_waited_for() {
    let world = asleep_for(11).await;
    upload(&world, &world.snapshot());
    let policy = json!({"metadata": {"annotations": {
        "torpor.dev/on-restore-failure": "ColdStart",
    }}});
    world.edit_sandbox(&policy);
    world.node_falls_silent("n1");
    world.api.remove("pods", NS, "s");
    world.settle().await;
    assert_eq!(world.pod(), None);
    world.let_time_pass();
    world.settle().await;
    assert_eq!(restored_image(&world).as_deref(), Some("i.1"));
}

#[rstest]
#[case::a_class_without_a_repository(Some("node.torpor.dev"))]
#[case::no_class(None)]
#[tokio::test]
async fn a_backup_without_a_repository_is_refused_with_the_remedy(#[case] class: Option<&str>) {
    let world = world_of(class.unwrap_or("repository.torpor.dev")).await;
    if class.is_none() {
        let none: Value = json!({"metadata": {"annotations": {"torpor.dev/snapshot-class": null}}});
        world.edit_sandbox(&none);
    }
    sleeps(&world, 11);
    world.settle().await;
    assert!(world.snapshots().is_empty());
    let hibernated = world.condition("Hibernated").expect("a condition");
    assert_eq!((&*hibernated.0, &*hibernated.1), ("True", "Hibernated"));
    assert!(
        hibernated.2.contains("repository.torpor.dev"),
        "{}",
        hibernated.2
    );
}

#[tokio::test]
async fn a_member_of_a_pool_gets_no_backup() {
    let world = world_of("repository.torpor.dev").await;
    let pool = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool",
        "name": "p", "uid": "pool-uid", "controller": true,
    });
    let member = json!({"metadata": {
        "ownerReferences": [pool], "annotations": {"torpor.dev/last-pod": null},
    }});
    world.edit_sandbox(&member);
    sleeps(&world, 11);
    world.settle().await;
    assert!(world.snapshots().is_empty());
}

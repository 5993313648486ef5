//! Tests of GKE's PodSnapshots as upstream's Python SDK uses them: a trigger before a suspension,
//! and the newest PodSnapshot after the resume.

use std::{sync::Arc, time::Duration};

use kube::Resource;
use rstest::rstest;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use torpor_controller::pod_snapshot::{self, Error};

use crate::{
    apiserver::{Fault, FaultAnswer},
    cluster::condition_of,
    objects::{NS, committed, condition, manual_snapshot, mode, sandbox, torpor_sandbox},
    world::World,
};

const TRIGGERS: &str = "podsnapshotmanualtriggers";
const SNAPSHOTS: &str = "podsnapshots";

/// Returns a trigger as the SDK creates it.
fn trigger(name: &str, pod: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": NS}, "spec": {"targetPod": pod}})
}

/// Returns a world with a running sandbox and a trigger for it.
async fn with_trigger() -> World {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    world.api.create(TRIGGERS, trigger("t", "s"));
    world
}

fn read<K: DeserializeOwned + Resource>(object: Value) -> Arc<K> {
    Arc::new(serde_json::from_value(object).unwrap())
}

/// Runs a pass over every object of these kinds.
async fn pass(world: &World) -> Result<(), Error> {
    world.sync();
    for object in world.api.list(TRIGGERS) {
        pod_snapshot::trigger(read(object), Arc::clone(&world.context)).await?;
    }
    world.sync();
    for object in world.api.list(SNAPSHOTS) {
        pod_snapshot::snapshot(read(object), Arc::clone(&world.context)).await?;
    }
    Ok(())
}

/// Runs passes until one writes nothing.
async fn settle(world: &World) {
    for _ in 0..20 {
        world.api.take_writes();
        pass(world).await.unwrap();
        if world.api.take_writes().is_empty() {
            return;
        }
    }
    panic!("it never settles");
}

/// Returns the condition Triggered of trigger "t".
fn outcome(world: &World) -> Option<(String, String, String)> {
    condition_of(&world.api.get(TRIGGERS, NS, "t")?, "Triggered")
}

fn assert_failed(world: &World, why: &str) {
    let wanted = ("False".to_owned(), "Failed".to_owned(), why.to_owned());
    assert_eq!(outcome(world), Some(wanted));
}

fn is_ready(world: &World, name: &str) -> bool {
    let snapshot = world.api.get(SNAPSHOTS, NS, name).expect("it exists");
    condition_of(&snapshot, "Ready").is_some_and(|ready| ready.0 == "True")
}

/// Commits the requested image, as the agent does.
fn agent_saves(world: &World, name: &str) {
    world.edit_snapshot(name, &committed(&format!("i.{name}"), "n1"));
}

/// Suspends and resumes the Sandbox up to the agent's part.
async fn suspend_and_resume(world: &World) {
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    let own = world.image_of_suspension().unwrap();
    world.edit_snapshot(&own, &committed("i.own", "n1"));
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    world.pod_becomes_ready();
}

#[tokio::test]
async fn a_snapshot_is_taken_before_a_suspension_and_named_on_the_resumed_pod() {
    let world = with_trigger().await;
    settle(&world).await;
    let image = world.api.get("sandboxsnapshots", NS, "t").unwrap();
    assert_eq!(image["spec"]["sandboxName"], "s");
    assert_eq!(image["spec"]["podUID"], world.pod_uid());
    assert_eq!(image["spec"]["reason"], "Manual");
    assert_eq!(
        image["metadata"]["ownerReferences"][0]["kind"],
        "PodSnapshotManualTrigger"
    );
    assert_eq!(outcome(&world), None, "it is being saved");
    assert_eq!(world.api.list(SNAPSHOTS), Vec::<Value>::new());

    agent_saves(&world, "t");
    settle(&world).await;
    assert_eq!(outcome(&world).unwrap().1, "Complete");
    let done = world.api.get(TRIGGERS, NS, "t").unwrap();
    assert_eq!(done["status"]["snapshotCreated"]["name"], "t");
    let snapshot = world.api.get(SNAPSHOTS, NS, "t").unwrap();
    let meta = &snapshot["metadata"];
    assert_eq!(meta["annotations"]["podsnapshot.gke.io/origin-pod"], "s");
    assert_eq!(
        meta["labels"]["agents.x-k8s.io/sandbox-name-hash"],
        crate::objects::hash()
    );
    assert!(is_ready(&world, "t"));

    suspend_and_resume(&world).await;
    let pod = world.pod().unwrap();
    assert_eq!(
        pod["metadata"]["annotations"]["torpor.dev/pod-snapshot"],
        "t"
    );
    let gate = &pod["spec"]["readinessGates"][0]["conditionType"];
    assert_eq!(gate, "torpor.dev/RestoreSettled", "the agent reports more");
}

#[rstest]
#[case::missing_pod("missing", "Pod \"missing\" does not exist")]
#[case::foreign_pod(
    "other",
    "Pod \"other\" has no Sandbox; only Pods of Sandboxes can be saved"
)]
#[tokio::test]
async fn a_trigger_for_a_pod_of_no_sandbox_fails(#[case] pod: &str, #[case] why: &str) {
    let world = World::new();
    let other = json!({"metadata": {"name": "other", "namespace": NS}, "spec": {"containers": []}});
    world.api.create("pods", other);
    world.api.create(TRIGGERS, trigger("t", pod));
    settle(&world).await;
    assert_failed(&world, why);
    assert_eq!(world.snapshots(), Vec::<Value>::new());
}

#[tokio::test]
async fn a_trigger_fails_where_the_runtime_cannot_save() {
    let world = World::new();
    world.ready(sandbox(json!({}))).await;
    world.api.create(TRIGGERS, trigger("t", "s"));
    settle(&world).await;
    assert_failed(
        &world,
        "the default runtime on node \"n1\" cannot save memory",
    );
}

#[tokio::test]
async fn a_trigger_fails_when_the_save_does_and_nothing_is_saved_later() {
    let world = with_trigger().await;
    settle(&world).await;
    let failed = condition("Committed", "False", "SaveFailed", "the disk is full");
    world.edit_snapshot("t", &json!({"status": {"conditions": [failed]}}));
    settle(&world).await;
    assert_failed(&world, "the disk is full");
    assert_eq!(world.snapshots(), Vec::<Value>::new());
}

#[tokio::test]
async fn a_trigger_does_not_take_a_foreign_snapshot() {
    let world = with_trigger().await;
    world.api.create("sandboxsnapshots", manual_snapshot("t"));
    agent_saves(&world, "t");
    settle(&world).await;
    assert_failed(
        &world,
        "SandboxSnapshot \"t\" already exists and does not belong to the trigger",
    );
    assert_eq!(world.snapshots().len(), 1);
    assert_eq!(world.api.list(SNAPSHOTS), Vec::<Value>::new());
}

#[tokio::test]
async fn a_trigger_does_not_take_a_foreign_pod_snapshot() {
    let world = with_trigger().await;
    let others = json!({"metadata": {"name": "t", "namespace": NS}, "spec": {"triggerUID": "x"}});
    world.api.create(SNAPSHOTS, others);
    settle(&world).await;
    assert_failed(
        &world,
        "PodSnapshot \"t\" already exists and belongs to another trigger",
    );
}

#[tokio::test]
async fn an_image_is_deleted_with_its_pod_snapshot_and_not_with_its_trigger() {
    let world = with_trigger().await;
    settle(&world).await;
    agent_saves(&world, "t");
    settle(&world).await;
    world.api.delete(TRIGGERS, NS, "t");
    world.api.collect_garbage();
    settle(&world).await;
    assert!(
        is_ready(&world, "t"),
        "the SDK deletes its triggers when it ends"
    );
    world.api.delete(SNAPSHOTS, NS, "t");
    world.api.collect_garbage();
    let image = world.api.get("sandboxsnapshots", NS, "t").unwrap();
    assert!(
        crate::cluster::is_terminating(&image),
        "its agent deletes the bytes: {image:#}"
    );
}

#[tokio::test]
async fn the_unfinished_snapshot_of_a_deleted_trigger_is_deleted() {
    let world = with_trigger().await;
    settle(&world).await;
    world.api.delete(TRIGGERS, NS, "t");
    world.api.collect_garbage();
    assert_eq!(world.snapshots(), Vec::<Value>::new());
}

#[tokio::test]
async fn a_pod_snapshot_reports_that_its_snapshot_is_gone() {
    let world = with_trigger().await;
    settle(&world).await;
    agent_saves(&world, "t");
    settle(&world).await;
    world.api.remove("sandboxsnapshots", NS, "t");
    settle(&world).await;
    let snapshot = world.api.get(SNAPSHOTS, NS, "t").unwrap();
    let (status, _, message) = condition_of(&snapshot, "Ready").unwrap();
    assert_eq!(status, "False");
    assert_eq!(
        message,
        "SandboxSnapshot \"t\" with the saved memory no longer exists"
    );
    assert_eq!(outcome(&world).unwrap().1, "Complete", "it was taken");
}

#[tokio::test]
async fn a_pod_without_a_pod_snapshot_to_restore_has_no_readiness_gate() {
    let world = with_trigger().await;
    settle(&world).await;
    agent_saves(&world, "t");
    settle(&world).await;
    let gates = |world: &World| world.pod().unwrap()["spec"].get("readinessGates").cloned();
    let before = world.pod_uid();
    world.api.remove("pods", NS, "s");
    world.settle().await;
    assert_ne!(world.pod_uid(), before, "one that starts cold");
    assert_eq!(gates(&world), None);
    world.pod_becomes_ready();
    world.settle().await;
    world.api.delete(SNAPSHOTS, NS, "t");
    world.api.collect_garbage();
    settle(&world).await;
    suspend_and_resume(&world).await;
    assert_eq!(gates(&world), None);
}

#[tokio::test]
async fn a_trigger_fails_when_its_pod_ends_before_it_is_saved() {
    let world = with_trigger().await;
    settle(&world).await;
    world.api.remove("pods", NS, "s");
    settle(&world).await;
    assert_failed(&world, "Pod \"s\" ended before it was saved");
    assert_eq!(world.snapshots(), Vec::<Value>::new());
}

/// The Pods before and after a suspension have the same name.
#[tokio::test]
async fn a_stale_view_of_the_pod_fails_no_trigger() {
    let world = with_trigger().await;
    world.sync();
    let earlier = world.pod().unwrap();
    world.edit_pod(&json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    world.sync();
    world.api.remove("pods", NS, "s");
    let mut next = earlier;
    for known in ["uid", "resourceVersion"] {
        next["metadata"].as_object_mut().unwrap().remove(known);
    }
    world.api.create("pods", next);
    let asked = read(world.api.get(TRIGGERS, NS, "t").unwrap());
    pod_snapshot::trigger(asked, Arc::clone(&world.context))
        .await
        .unwrap();
    assert_eq!(outcome(&world), None);
    let image = world.api.get("sandboxsnapshots", NS, "t").unwrap();
    assert_eq!(image["spec"]["podUID"], world.pod_uid());
}

/// A controller that crashes after a write, loses the response to it or has it refused continues
/// from the state at the apiserver.
#[rstest]
#[tokio::test]
async fn each_failed_write_is_recovered(
    #[values(
        ("create", "sandboxsnapshots"),
        ("create", SNAPSHOTS),
        ("patch", "sandboxsnapshots"),
        ("patch status", SNAPSHOTS),
        ("patch status", TRIGGERS),
    )]
    write: (&'static str, &'static str),
    #[values(
        FaultAnswer::LoseAnswer,
        FaultAnswer::Refuse(409),
        FaultAnswer::Refuse(403)
    )]
    answer: FaultAnswer,
) {
    let world = World::with_timeout(Duration::from_millis(200));
    world.ready(torpor_sandbox(json!({}))).await;
    world.api.create(TRIGGERS, trigger("t", "s"));
    let (verb, kind) = write;
    world.api.fail(Fault { verb, kind, answer });
    let mut went_wrong = 0;
    for round in 0..12 {
        went_wrong += usize::from(pass(&world).await.is_err());
        if round == 3 {
            agent_saves(&world, "t");
        }
    }
    let somebody_elses_turn = matches!(answer, FaultAnswer::Refuse(409)) && verb != "create";
    assert_eq!(went_wrong, usize::from(!somebody_elses_turn));
    assert_eq!(outcome(&world).unwrap().1, "Complete");
    assert!(is_ready(&world, "t"));
    let images = world.snapshots();
    let manual = images
        .iter()
        .filter(|one| one["spec"]["reason"] == "Manual");
    assert_eq!(manual.count(), 1);
}

//! Tests of restores: from the Sandbox's own image, as a copy of a named image, and failures of
//! both.

use rstest::rstest;
use serde_json::{Value, json};

use crate::{
    cluster::is_terminating,
    objects::{NS, committed, condition, golden, mode, torpor_sandbox},
    world::World,
};

const COLD: &str = "ColdStart";

fn policy(policy: &str) -> Value {
    json!({"metadata": {"annotations": {"torpor.dev/on-restore-failure": policy}}})
}

/// Returns a world with a Sandbox without a Pod, whose memory is in a committed image.
async fn asleep(change: Value) -> (World, String) {
    let world = World::new();
    world.ready(torpor_sandbox(change)).await;
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    let name = world.snapshot();
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    (world, name)
}

fn restore_image(world: &World) -> Value {
    world.pod().expect("the Pod exists")["metadata"]["annotations"]["torpor.dev/restore-image"]
        .clone()
}

// Resume.

#[tokio::test]
async fn the_new_pod_continues_from_the_image_on_its_node_with_the_same_images() {
    let (world, name) = asleep(json!({"spec": {"podTemplate": {"spec": {"containers": [
        {"name": "c", "image": "img", "imagePullPolicy": "Always"}, {"name": "d", "image": "other"},
    ]}}}}))
    .await;
    world.edit_sandbox(&mode("Running"));
    assert_eq!(
        world.writes_of_a_pass().await,
        ["create pods", "patch sandboxes", "patch status sandboxes"]
    );
    let pod = world.pod().unwrap();
    let annotations = &pod["metadata"]["annotations"];
    assert_eq!(annotations["torpor.dev/restore-image"], "i.1");
    assert_eq!(annotations["torpor.dev/on-restore-failure"], "Fail");
    assert_eq!(annotations.get("torpor.dev/restore-copy"), None);
    let required =
        &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let rule = json!({"key": "metadata.name", "operator": "In", "values": ["n1"]});
    assert_eq!(
        required["nodeSelectorTerms"],
        json!([{"matchFields": [rule]}])
    );
    let containers = &pod["spec"]["containers"];
    assert_eq!(containers[0]["image"], "registry.example/img@sha256:abc");
    assert_eq!(containers[0]["imagePullPolicy"], "IfNotPresent");
    assert_eq!(
        containers[1]["image"], "other",
        "not in the image, not changed"
    );
    assert_eq!(
        pod["spec"].get("hostname"),
        None,
        "the Pod's name is the same"
    );
    assert_eq!(world.condition("Hibernated"), None);
    assert_eq!(world.condition("Restored"), None, "not known yet");

    world.pod_becomes_ready();
    world.set_pod_condition(condition(
        "torpor.dev/Restored",
        "True",
        "Restored",
        "in 230 ms",
    ));
    world.settle().await;
    world.assert_condition("Restored", "True", "Restored", "in 230 ms");
    world.assert_condition("Ready", "True", "DependenciesReady", "Pod is Ready");
    let deleted = is_terminating(&world.snapshots()[0]);
    assert!(deleted, "the image is older than the sandbox now");
    assert_eq!(world.events(), ["SnapshotCommitted", "Resumed"]);
    world.image_is_gone(&name);
    world.settle().await;
    assert!(world.writes_of_a_pass().await.is_empty());
}

#[tokio::test]
async fn an_image_that_is_used_is_not_used_again() {
    let (world, name) = asleep(json!({})).await;
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    world.api.remove("pods", NS, "s");
    // The image is not consumed, since the Pod never ran.
    world.settle().await;
    assert_eq!(restore_image(&world), "i.1");
    let used = json!({"status": {"conditions": [
        condition("Committed", "True", "Committed", ""), condition("Consumed", "True", "Resumed", ""),
    ]}});
    world.sync();
    world.edit_snapshot(&name, &used);
    world.api.remove("pods", NS, "s");
    world.settle().await;
    assert_eq!(restore_image(&world), Value::Null);
}

#[tokio::test]
async fn an_image_stays_until_the_pod_that_took_it_runs() {
    let (world, name) = asleep(json!({})).await;
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    // The agent reports the use when the restore begins: after a crash the image must not be
    // restored in a second Pod.
    let pod = world.pod().unwrap()["metadata"]["uid"].clone();
    let used = json!({"status": {"consumedByPodUID": pod, "conditions": [
        condition("Committed", "True", "Committed", ""), condition("Consumed", "True", "Resumed", ""),
    ]}});
    world.edit_snapshot(&name, &used);
    world.settle().await;
    let is_deleting = || is_terminating(&world.snapshots()[0]);
    assert!(!is_deleting(), "the Pod is still restoring from it");
    world.set_pod_condition(condition("torpor.dev/Restored", "True", "Restored", ""));
    world.settle().await;
    assert!(is_deleting(), "the image is not needed any more");
}

#[tokio::test]
async fn the_apiserver_is_asked_before_a_pod_continues_from_an_image() {
    let (world, name) = asleep(json!({})).await;
    world.edit_sandbox(&mode("Running"));
    world.sync();
    let used = json!({"status": {"conditions": [
        condition("Committed", "True", "Committed", ""), condition("Consumed", "True", "Resumed", ""),
    ]}});
    world.edit_snapshot(&name, &used);
    world.stale_pass().await.unwrap();
    assert_eq!(restore_image(&world), Value::Null);
}

#[tokio::test]
async fn the_newest_image_is_restored() {
    let (world, name) = asleep(json!({})).await;
    let mut newer = world.snapshots()[0].clone();
    newer["metadata"]["name"] = "a-newer".into();
    newer["spec"]["podUID"] = "later".into();
    newer["status"]["imageID"] = "later.1".into();
    newer["status"]["committedAt"] = "2026-02-01T00:00:00Z".into();
    world.api.create("sandboxsnapshots", newer);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(restore_image(&world), "later.1");
    assert_ne!(name, "a-newer");
}

#[tokio::test]
async fn images_of_an_earlier_sandbox_of_the_same_name_are_not_used() {
    let (world, name) = asleep(json!({})).await;
    let owner = json!([{
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": "s",
        "uid": "earlier", "controller": true, "blockOwnerDeletion": true,
    }]);
    world.edit_snapshot(&name, &json!({"metadata": {"ownerReferences": owner}}));
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    let node_has_none = json!({"status": {"heartbeatTime": "2099-01-01T00:00:00Z"}});
    world.api.edit("sandboxnodes", "", "n1", &node_has_none);
    world.settle().await;
    assert_eq!(restore_image(&world), Value::Null);
}

#[tokio::test]
async fn a_sandbox_whose_pod_had_another_name_keeps_its_hostname() {
    let (world, name) = asleep(json!({})).await;
    let record = r#"{"name": "pool-x7k2p", "nodeName": "n1", "uid": "UID"}"#;
    let record = record.replace(
        "UID",
        world.snapshots()[0]["spec"]["podUID"].as_str().unwrap(),
    );
    let was = json!({"metadata": {"annotations": {"torpor.dev/saved-pod": record}}});
    world.edit_snapshot(&name, &was);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(world.pod().unwrap()["spec"]["hostname"], "pool-x7k2p");
}

#[tokio::test]
async fn the_condition_restored_stays_while_a_pod_is_frozen_or_saved_and_has_one_event() {
    let (world, name) = asleep(json!({})).await;
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    world.pod_becomes_ready();
    world.set_pod_condition(condition("torpor.dev/Restored", "True", "Restored", ""));
    world.settle().await;
    world.image_is_gone(&name);
    for strategy in ["Freeze", "Hibernate"] {
        let strategy = json!({"torpor.dev/suspension-strategy": strategy});
        world.edit_sandbox(&json!({"metadata": {"annotations": strategy}}));
        let ran = world.generation();
        world.edit_sandbox(&mode("Suspended"));
        world.settle().await;
        world.assert_condition_of_generation(ran, "Restored", "True", "Restored", "");
        world.edit_sandbox(&mode("Running"));
        world.settle().await;
    }
    assert_eq!(world.events(), ["SnapshotCommitted", "Resumed"]);
    world.edit_sandbox(&mode("Suspended"));
    world.api.remove("pods", NS, "s");
    world.settle().await;
    assert_eq!(
        world.condition("Restored"),
        None,
        "there is no Pod to speak of"
    );
}

// Obstacles.

fn agent_is_gone(world: &World) {
    world.api.remove("sandboxnodes", "", "n1");
}

fn node_is_gone(world: &World) {
    world.node_leaves("n1");
}

fn runtime_is_another(world: &World) {
    let other = json!({"status": {"fingerprint": {"kernel": "6.6", "platform": "kvm", "runscDigest": "2"}}});
    world.api.edit("sandboxnodes", "", "n1", &other);
}

fn runtime_cannot(world: &World) {
    world.api.edit(
        "sandboxnodes",
        "",
        "n1",
        &json!({"status": {"runtimes": []}}),
    );
}

#[tokio::test]
async fn a_sandbox_resumes_after_an_upgrade_with_the_build_that_saved_it() {
    let (world, name) = asleep(json!({})).await;
    let made_with = |digest: &str| json!({"fingerprint": {"runscDigest": digest}});
    let image = json!({"status": made_with("blake3:0123456789abcdef")});
    world.edit_snapshot(&name, &image);
    let mut upgraded = made_with("blake3:ffffffffffffffff");
    upgraded["runscBuilds"] = json!(["blake3:ffffffffffff"]);
    world
        .api
        .edit("sandboxnodes", "", "n1", &json!({"status": upgraded}));
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert!(world.pod().is_none());
    let restored = world.condition("Restored").expect("a condition");
    assert_eq!(restored.1, "FingerprintMismatch");
    let message = restored.2;
    assert!(
        message.contains("build blake3:0123456789abcdef"),
        "{message}"
    );

    // The operator brings the build to the node.
    let both = json!(["blake3:0123456789ab", "blake3:ffffffffffff"]);
    let brought = json!({"status": {"runscBuilds": both}});
    world.api.edit("sandboxnodes", "", "n1", &brought);
    world.settle().await;
    assert!(world.pod().is_some());
}

const KEPT: &str = "The image is kept in SandboxSnapshot NAME; to start without the memory, set torpor.dev/on-restore-failure: ColdStart";
const BRING_THE_AGENT_BACK: &str = "Bring the agent back to continue with the memory (`kubectl torpor doctor` checks it); to start without the memory, set torpor.dev/on-restore-failure: ColdStart";
const BRING_THE_NODE_BACK: &str = "Bring the node back to continue with the memory; to start without the memory, set torpor.dev/on-restore-failure: ColdStart, or delete the Sandbox";

#[rstest]
#[case(
    agent_is_gone,
    "NodeUnavailable",
    "The image of SandboxSnapshot NAME is on node \"n1\", from which no agent of Torpor reports",
    BRING_THE_AGENT_BACK
)]
#[case(
    node_is_gone,
    "NodeUnavailable",
    "The image of SandboxSnapshot NAME is on node \"n1\", which is gone from the cluster",
    BRING_THE_NODE_BACK
)]
#[case(
    runtime_is_another,
    "FingerprintMismatch",
    "Node \"n1\" lacks what the image was made with: platform systrap",
    KEPT
)]
#[case(
    runtime_cannot,
    "NodeUnavailable",
    "Node \"n1\" cannot restore the image with torpor",
    KEPT
)]
#[tokio::test]
async fn a_sandbox_that_cannot_be_restored_stays_down_until_the_user_decides(
    #[case] obstacle: fn(&World),
    #[case] reason: &str,
    #[case] why: &str,
    #[case] remedy: &str,
) {
    let (world, name) = asleep(json!({})).await;
    let [why, remedy] = [why, remedy].map(|text| text.replace("NAME", &format!("{name:?}")));
    obstacle(&world);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert!(world.pod().is_none());
    world.assert_condition("Restored", "False", reason, &format!("{why}. {remedy}"));
    world.assert_condition(
        "Ready",
        "False",
        "DependenciesNotReady",
        "Pod does not exist",
    );
    assert_eq!(world.events(), ["SnapshotCommitted", "RestoreFailed"]);

    world.let_time_pass();
    world.edit_sandbox(&policy(COLD));
    world.settle().await;
    assert_eq!(restore_image(&world), Value::Null);
    let cold = format!("Started without the saved memory ({reason}): {why}");
    world.assert_condition("Restored", "False", "ColdStarted", &cold);
    let snapshot = &world.snapshots()[0];
    assert!(!is_terminating(snapshot), "the image is kept");
    let consumed = &snapshot["status"]["conditions"][1];
    assert_eq!(
        (&consumed["type"], &consumed["reason"]),
        (&json!("Consumed"), &json!("Superseded"))
    );
    // The condition stays, whatever happens to the Pod.
    world.api.remove("pods", NS, "s");
    world.settle().await;
    assert_eq!(restore_image(&world), Value::Null);
    world.assert_condition("Restored", "False", "ColdStarted", &cold);
}

fn agent_comes_back(world: &World) {
    let node = crate::objects::sandbox_node("n1");
    world.api.create("sandboxnodes", node);
}

fn node_comes_back(world: &World) {
    let node = json!({"metadata": {"name": "n1"}});
    world.api.create("nodes", node);
}

/// A returning agent creates its SandboxNode and writes its status with another call.
fn agent_has_not_reported(world: &World) {
    agent_is_gone(world);
    let mut node = crate::objects::sandbox_node("n1");
    node.as_object_mut().unwrap().remove("status");
    world.api.create("sandboxnodes", node);
}

fn agent_reports(world: &World) {
    let node = crate::objects::sandbox_node("n1");
    world.api.edit("sandboxnodes", "", "n1", &node);
}

#[rstest]
#[case(agent_is_gone, agent_comes_back)]
#[case(agent_has_not_reported, agent_reports)]
#[case(node_is_gone, node_comes_back)]
#[tokio::test]
async fn policy_cold_start_waits_for_a_lost_node_before_it_gives_up_the_memory(
    #[case] is_lost: fn(&World),
    #[case] comes_back: fn(&World),
    #[values(true, false)] returns: bool,
) {
    let (world, _) = asleep(policy(COLD)).await;
    is_lost(&world);
    // An older condition of another start is not the beginning of the wait for this node.
    let cold = condition("Restored", "False", "ColdStarted", "long ago");
    let mut all = world.sandbox()["status"]["conditions"].clone();
    all.as_array_mut().unwrap().push(cold);
    let status = json!({"status": {"conditions": all}});
    world.api.edit("sandboxes", NS, "s", &status);
    world.let_time_pass();
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(world.pod(), None);
    let (status, reason, message) = world.condition("Restored").unwrap();
    assert_eq!([&*status, &*reason], ["False", "NodeUnavailable"]);
    let words =
        "The controller waits 60 s in all for the node; then the Sandbox starts without the memory";
    assert!(message.ends_with(words), "{message}");
    assert!(world.has_moved("Restored"), "it waits from now on");
    let again = world.pass().await.unwrap();
    assert_eq!(again, Some(std::time::Duration::from_secs(10)));
    if returns {
        comes_back(&world);
        world.settle().await;
        assert_eq!(restore_image(&world), "i.1");
    } else {
        world.let_time_pass();
        world.settle().await;
        assert_eq!(restore_image(&world), Value::Null);
        let (_, reason, _) = world.condition("Restored").unwrap();
        assert_eq!(reason, "ColdStarted");
    }
}

#[tokio::test]
async fn the_memory_is_restored_when_its_node_returns() {
    let (world, _) = asleep(json!({})).await;
    runtime_cannot(&world);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert!(world.pod().is_none());
    world.api.remove("sandboxnodes", "", "n1");
    world
        .api
        .create("sandboxnodes", crate::objects::sandbox_node("n1"));
    world.settle().await;
    assert_eq!(restore_image(&world), "i.1");
}

/// Reports a missing image, as the agent does while the image's directory has another name or its
/// disk is not mounted.
fn image_is_missing(world: &World, name: &str) {
    let missing = condition(
        "Committed",
        "False",
        "ImageMissing",
        "Image i.1 is not in this node's store.",
    );
    world.edit_snapshot(name, &json!({"status": {"conditions": [missing]}}));
}

const MISSING: &str = "is not on node \"n1\"; the controller waits for it (a disk that is not mounted, a directory with another name)";

#[tokio::test]
async fn a_missing_image_is_waited_for_and_not_given_up() {
    let (world, name) = asleep(json!({})).await;
    image_is_missing(&world, &name);
    world.settle().await;
    let why = format!("The image of SandboxSnapshot {name:?} {MISSING}");
    world.assert_condition("Hibernated", "False", "ImageMissing", &why);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert!(world.pod().is_none());
    let message =
        format!("{why}. To start without the memory, set torpor.dev/on-restore-failure: ColdStart");
    world.assert_condition("Restored", "False", "ImageMissing", &message);
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    world.settle().await;
    assert_eq!(restore_image(&world), "i.1");
}

#[tokio::test]
async fn an_image_on_a_deleted_node_is_not_reported_as_waited_for() {
    let (world, name) = asleep(json!({})).await;
    node_is_gone(&world);
    world.settle().await;
    let kept = format!(
        "Memory is kept in SandboxSnapshot {name:?} on node \"n1\", which is gone from the cluster. {BRING_THE_NODE_BACK}"
    );
    world.assert_condition("Hibernated", "True", "Hibernated", &kept);
    image_is_missing(&world, &name);
    world.settle().await;
    let missing = format!(
        "The image of SandboxSnapshot {name:?} was missing on node \"n1\", which is gone from the cluster. {BRING_THE_NODE_BACK}"
    );
    world.assert_condition("Hibernated", "False", "ImageMissing", &missing);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert!(world.pod().is_none());
    world.assert_condition("Restored", "False", "NodeUnavailable", &missing);
    assert!(world.pass().await.unwrap().is_some(), "it looks again");
    // The node and its disk are back.
    world
        .api
        .create("nodes", json!({"metadata": {"name": "n1"}}));
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    world.settle().await;
    assert_eq!(restore_image(&world), "i.1");
}

#[tokio::test]
async fn no_pod_is_created_for_a_deleted_node_when_the_cached_pod_is_gone() {
    let (world, _) = asleep(json!({})).await;
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(restore_image(&world), "i.1");
    node_is_gone(&world);
    world.sync();
    // The watch still shows the Pod.
    world.api.remove("pods", NS, "s");
    world.edit_sandbox(&json!({"metadata": {"annotations": {"torpor.dev/hibernate": "true"}}}));
    world.stale_pass().await.unwrap();
    assert_eq!(world.pod(), None);
    let (status, reason, _) = world.condition("Restored").unwrap();
    assert_eq!([&*status, &*reason], ["False", "NodeUnavailable"]);
}

#[tokio::test]
async fn policy_cold_start_starts_without_a_missing_image_and_keeps_it() {
    let (world, name) = asleep(policy(COLD)).await;
    image_is_missing(&world, &name);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(restore_image(&world), Value::Null);
    let cold = format!(
        "Started without the saved memory (ImageMissing): The image of SandboxSnapshot {name:?} {MISSING}"
    );
    world.assert_condition("Restored", "False", "ColdStarted", &cold);
    let deleted = is_terminating(&world.snapshots()[0]);
    assert!(!deleted, "its bytes are the user's to delete");
}

#[tokio::test]
async fn a_stale_image_is_not_restored_and_the_sandbox_starts_cold() {
    let (world, _) = asleep(json!({})).await;
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    world.set_pod_condition(condition(
        "torpor.dev/Restored",
        "False",
        "ImageStale",
        "used by Pod u-1",
    ));
    world.settle().await;
    world.assert_condition("Restored", "False", "ImageStale", "used by Pod u-1");
    world.pod_ends();
    world.settle().await;
    assert_eq!(restore_image(&world), Value::Null);
    world.assert_condition("Restored", "False", "ColdStarted", "used by Pod u-1");
    assert_eq!(
        world.events(),
        ["SnapshotCommitted", "RestoreFailed", "ColdStarted"]
    );
}

/// The kubelet reports the phase Running, because it has tried to start the container before.
#[tokio::test]
async fn a_pod_whose_restore_was_refused_is_suspended_without_a_new_image() {
    let (world, name) = asleep(json!({})).await;
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    world.edit_pod(&json!({
        "spec": {"nodeName": "n1"},
        "status": {"phase": "Running", "containerStatuses": [{
            "name": "c", "image": "i", "imageID": "i", "ready": false, "restartCount": 3,
            "state": {"waiting": {"reason": "RunContainerError"}},
            "lastState": {"terminated": {"exitCode": 128, "reason": "StartError"}},
        }]},
    }));
    let refused = condition("torpor.dev/Restored", "False", "SpecMismatch", "another");
    world.set_pod_condition(refused);
    world.settle().await;
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    assert!(world.pod_is_terminating());
    assert_eq!(
        world.snapshot(),
        name,
        "the image that it was to go on from"
    );
}

#[tokio::test]
async fn a_restore_that_fails_on_the_node_keeps_pod_and_image() {
    let (world, name) = asleep(json!({})).await;
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    world.set_pod_condition(condition(
        "torpor.dev/Restored",
        "False",
        "ImageCorrupt",
        "pages.img: digest",
    ));
    world.settle().await;
    world.assert_condition("Restored", "False", "ImageCorrupt", "pages.img: digest");
    assert!(!world.pod_is_terminating());
    assert_eq!(world.snapshot(), name);
    assert!(!is_terminating(&world.snapshots()[0]));
    // The user allows a cold start: a new Pod tries again under the new policy.
    world.edit_sandbox(&policy(COLD));
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    let pod = world.pod().unwrap();
    assert_eq!(
        pod["metadata"]["annotations"]["torpor.dev/on-restore-failure"],
        COLD
    );
    assert_eq!(restore_image(&world), "i.1");
    world.set_pod_condition(condition(
        "torpor.dev/Restored",
        "False",
        "ColdStarted",
        "pages.img: digest",
    ));
    world.settle().await;
    world.assert_condition("Restored", "False", "ColdStarted", "pages.img: digest");
    let consumed = &world.snapshots()[0]["status"]["conditions"][1];
    assert_eq!(consumed["reason"], "Superseded");
    assert!(!world.pod_is_terminating());
}

// Copies of a named snapshot.

fn from(name: &str) -> Value {
    json!({"metadata": {"annotations": {"torpor.dev/restore-from": name}}})
}

#[tokio::test]
async fn a_copy_starts_from_the_named_image_even_if_consumed_and_keeps_it() {
    let world = World::new();
    world.api.create("sandboxsnapshots", golden());
    let used = json!({"status": {"conditions": [
        condition("Committed", "True", "Committed", ""), condition("Consumed", "True", "Resumed", ""),
    ]}});
    world.edit_snapshot("golden", &used);
    world
        .api
        .create("sandboxes", torpor_sandbox(from("golden")));
    world.settle().await;
    let annotations = world.pod().unwrap()["metadata"]["annotations"].clone();
    assert_eq!(annotations["torpor.dev/restore-image"], "g.1");
    assert_eq!(annotations["torpor.dev/restore-copy"], "true");
    world.pod_becomes_ready();
    world.set_pod_condition(condition("torpor.dev/Restored", "True", "Restored", ""));
    world.settle().await;
    world.assert_condition("Restored", "True", "Restored", "");
    let golden = world.api.get("sandboxsnapshots", NS, "golden").unwrap();
    assert!(!is_terminating(&golden));
}

#[tokio::test]
async fn the_sandboxs_own_image_takes_precedence_over_the_named_one() {
    let (world, _) = asleep(json!({})).await;
    world.api.create("sandboxsnapshots", golden());
    world.edit_sandbox(&from("golden"));
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(restore_image(&world), "i.1");
}

#[tokio::test]
async fn an_unknown_snapshot_makes_no_pod_until_it_exists() {
    let world = World::new();
    world
        .api
        .create("sandboxes", torpor_sandbox(from("golden")));
    world.settle().await;
    assert!(world.pod().is_none());
    let unknown = "SandboxSnapshot \"golden\" does not exist in this namespace; `kubectl get sandboxsnapshots` lists the existing ones";
    world.assert_condition("Restored", "False", "SnapshotNotFound", unknown);
    world.api.create("sandboxsnapshots", golden());
    let saving = json!({"status": {"conditions": [condition("Committed", "False", "Saving", "")]}});
    world.edit_snapshot("golden", &saving);
    world.settle().await;
    assert!(world.pod().is_none());
    let not_ready = "SandboxSnapshot \"golden\" is not committed; its condition Committed has the reason, and the Sandbox starts once it is True";
    world.assert_condition("Restored", "False", "SnapshotNotReady", not_ready);
    world.edit_snapshot("golden", &committed("g.1", "n1"));
    world.settle().await;
    assert_eq!(restore_image(&world), "g.1");
}

#[tokio::test]
async fn an_unknown_snapshot_with_policy_cold_start_is_a_cold_start() {
    let world = World::new();
    let mut both = from("golden");
    torpor_test_apiserver::merge_patch::apply(&mut both, &policy(COLD));
    world.api.create("sandboxes", torpor_sandbox(both));
    world.settle().await;
    assert_eq!(restore_image(&world), Value::Null);
    let message = "Started without the saved memory (SnapshotNotFound): SandboxSnapshot \"golden\" does not exist in this namespace; `kubectl get sandboxsnapshots` lists the existing ones";
    world.assert_condition("Restored", "False", "ColdStarted", message);
}

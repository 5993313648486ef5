//! Tests of restores on other nodes than the image's own: from a repository, or from that node.

use rstest::rstest;
use serde_json::{Value, json};

use crate::{
    objects::{NS, committed, condition, mode, sandbox_node, torpor_sandbox},
    world::World,
};

/// Returns a world with two nodes and a Sandbox without a Pod, whose memory is on `n1` and in a
/// repository.
async fn uploaded() -> (World, String) {
    let world = World::new();
    let mut other = sandbox_node("n2");
    other["status"]["fetched"] = json!([]);
    world.api.create("sandboxnodes", other);
    world
        .api
        .create("nodes", json!({"metadata": {"name": "n2"}}));
    let class = json!({"metadata": {"annotations": {"torpor.dev/snapshot-class": "far"}}});
    world.ready(torpor_sandbox(class)).await;
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    let name = world.snapshot();
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    set_upload(&world, &name, "True", "Uploaded");
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    (world, name)
}

fn set_upload(world: &World, name: &str, status: &str, reason: &str) {
    let upload = json!({"status": {"digest": "blake3:1", "conditions": [
        condition("Committed", "True", "Committed", ""), condition("Uploaded", status, reason, ""),
    ]}});
    world.edit_snapshot(name, &upload);
}

/// Returns the nodes on which the Pod may run.
fn nodes(world: &World) -> Vec<String> {
    let Some(pod) = world.pod() else {
        return Vec::new();
    };
    let required =
        &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let terms = required["nodeSelectorTerms"].as_array().expect("terms");
    let node = |term: &Value| {
        term["matchFields"][0]["values"][0]
            .as_str()
            .map(str::to_owned)
    };
    terms.iter().filter_map(node).collect()
}

/// Writes a claim of node `n2` on the image.
fn claim(world: &World, pod: &str, state: &str) {
    let claim = json!({"imageID": "i.1", "namespace": NS, "podUID": pod, "state": state});
    let claimed = json!({"status": {"fetched": [claim]}});
    world.api.edit("sandboxnodes", "", "n2", &claimed);
}

/// Writes which Pod was made for the image, as the controller does.
fn taken_by(world: &World, name: &str, value: &str) {
    let taken = json!({"metadata": {"annotations": {"torpor.dev/taken-by": value}}});
    world.edit_snapshot(name, &taken);
}

#[tokio::test]
async fn the_pod_that_takes_an_image_is_recorded_before_it_is_made_and_once_it_has_a_node() {
    let (world, name) = uploaded().await;
    world.edit_sandbox(&mode("Running"));
    let writes = world.writes_of_a_pass().await;
    assert_eq!(writes[..2], ["patch sandboxsnapshots", "create pods"]);
    let taken = || {
        let mut all = world.snapshots().into_iter();
        let snapshot = all.find(|one| one["metadata"]["name"] == name.as_str());
        snapshot.expect("a snapshot")["metadata"]["annotations"]["torpor.dev/taken-by"].clone()
    };
    assert_eq!(taken(), "pending");
    world.pod_becomes_ready();
    world.settle().await;
    let pod = world.pod().expect("a Pod");
    let expected = json!({"nodeName": "n1", "uid": pod["metadata"]["uid"]});
    let written: Value = serde_json::from_str(taken().as_str().expect("text")).expect("JSON");
    assert_eq!(written, expected);
}

/// An agent that was taken over claims images of others, as far as it likes.
#[rstest]
#[case::no_pod_was_made(None, &["n1", "n2"])]
#[case::the_pod_was_on_another_node(Some("n1"), &["n1"])]
#[tokio::test]
async fn a_claim_of_a_node_without_the_pod_is_ignored(
    #[case] taken_on: Option<&str>,
    #[case] places: &[&str],
) {
    let (world, name) = uploaded().await;
    if let Some(node) = taken_on {
        let taker = json!({"nodeName": node, "uid": "pod-before"}).to_string();
        taken_by(&world, &name, &taker);
    }
    claim(&world, "pod-before", "Consumed");
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(nodes(&world), places);
}

#[tokio::test]
async fn a_pod_of_a_node_that_is_gone_is_left_to_the_users_policy() {
    let (world, name) = uploaded().await;
    taken_by(&world, &name, r#"{"nodeName":"n2","uid":"pod-before"}"#);
    world.node_leaves("n2");
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(world.pod(), None);
    let restored = world.condition("Restored").expect("a condition");
    assert_eq!(restored.1, "NodeUnavailable");
    assert!(restored.2.contains("may have continued"), "{}", restored.2);
}

#[tokio::test]
async fn a_pod_that_waits_for_a_node_is_made_anew_once_the_image_is_uploaded() {
    let (world, name) = uploaded().await;
    set_upload(&world, &name, "False", "Uploading");
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(nodes(&world), ["n1"]);
    let waits = condition("PodScheduled", "False", "Unschedulable", "no room");
    world.set_pod_condition(waits);
    world.settle().await;
    assert_eq!(nodes(&world), ["n1"]);
    set_upload(&world, &name, "True", "Uploaded");
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    assert_eq!(nodes(&world), ["n1", "n2"]);
}

#[tokio::test]
async fn a_consumed_image_of_an_unknown_pod_is_neither_used_nor_given_up() {
    let (world, name) = uploaded().await;
    taken_by(&world, &name, "pending");
    claim(&world, "pod-before", "Consumed");
    let cold = json!({"metadata": {"annotations": {"torpor.dev/on-restore-failure": "ColdStart"}}});
    world.edit_sandbox(&cold);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(world.pod(), None);
    let restored = world.condition("Restored").expect("a condition");
    assert_eq!(restored.1, "ImageClaimed");
}

#[tokio::test]
async fn an_uploaded_image_may_continue_on_each_node_and_preferably_on_its_own() {
    let (world, name) = uploaded().await;
    let snapshot = world.snapshots().remove(0);
    assert_eq!(snapshot["metadata"]["name"], name.as_str());
    assert_eq!(snapshot["spec"]["snapshotClassName"], "far");
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(nodes(&world), ["n1", "n2"]);
    let pod = world.pod().expect("a Pod");
    let preferred =
        &pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"];
    assert_eq!(
        preferred[0]["preference"]["matchFields"][0]["values"][0],
        "n1"
    );
    let annotations = &pod["metadata"]["annotations"];
    assert_eq!(annotations["torpor.dev/restore-class"], "far");
    assert_eq!(annotations["torpor.dev/restore-digest"], "blake3:1");
}

#[tokio::test]
async fn a_node_that_is_gone_does_not_take_an_uploaded_image_with_it() {
    let (world, _) = uploaded().await;
    world.node_leaves("n1");
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(nodes(&world), ["n2"]);
}

#[tokio::test]
async fn a_node_that_does_not_fit_is_no_place() {
    let (world, _) = uploaded().await;
    let other = json!({"status": {"fingerprint": {"platform": "kvm", "runscDigest": "2"}}});
    world.api.edit("sandboxnodes", "", "n2", &other);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(nodes(&world), ["n1"]);
}

#[tokio::test]
async fn the_message_names_the_gone_node_and_the_lack_of_another_node() {
    let (world, _) = uploaded().await;
    world.node_falls_silent("n2");
    world.node_leaves("n1");
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(world.pod(), None);
    let restored = world.condition("Restored").expect("a condition");
    assert_eq!(restored.1, "NodeUnavailable");
    let message = restored.2;
    assert!(message.contains("is gone from the cluster"), "{message}");
    assert!(
        message.contains("no other node can restore it"),
        "{message}"
    );
}

#[tokio::test]
async fn no_second_pod_is_made_while_a_node_may_have_run_the_first() {
    let (world, name) = uploaded().await;
    taken_by(&world, &name, r#"{"nodeName":"n2","uid":"pod-before"}"#);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(world.pod(), None);
    let restored = world.condition("Restored").expect("a condition");
    assert_eq!(restored.1, "ImageClaimed");
    let message = restored.2;
    assert!(
        message.contains("\"n2\"") && message.contains("pod-before"),
        "{message}"
    );
    // The node reports that the Pod never ran.
    claim(&world, "pod-before", "Claimed");
    world.let_time_pass();
    world.settle().await;
    assert_eq!(world.pod(), None, "the node has not settled it");
    claim(&world, "pod-before", "Released");
    world.let_time_pass();
    world.settle().await;
    assert_eq!(nodes(&world), ["n1", "n2"]);
}

#[tokio::test]
async fn an_image_that_a_pod_elsewhere_has_run_on_from_is_not_used_again() {
    let (world, name) = uploaded().await;
    taken_by(&world, &name, r#"{"nodeName":"n2","uid":"pod-before"}"#);
    claim(&world, "pod-before", "Consumed");
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    let pod = world.pod().expect("a Pod");
    let annotations = &pod["metadata"]["annotations"];
    assert_eq!(annotations.get("torpor.dev/restore-image"), None);
    let restored = world.condition("Restored").expect("a condition");
    assert_eq!(restored.1, "ColdStarted");
    let message = restored.2;
    assert!(
        message.contains("Pod pod-before on node \"n2\" continued"),
        "{message}"
    );
}

#[tokio::test]
async fn a_sandbox_of_a_cordoned_node_waits_for_the_upload_and_continues_elsewhere() {
    let (world, name) = uploaded().await;
    set_upload(&world, &name, "False", "Uploading");
    let cordoned = json!({"spec": {"unschedulable": true}});
    world.api.edit("nodes", "", "n1", &cordoned);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(world.pod(), None);
    let restored = world.condition("Restored").expect("a condition");
    assert_eq!(restored.1, "Uploading");
    set_upload(&world, &name, "True", "Uploaded");
    world.settle().await;
    assert_eq!(nodes(&world), ["n1", "n2"], "the scheduler knows the taint");
}

#[tokio::test]
async fn a_sandbox_whose_node_takes_pods_does_not_wait_for_the_upload() {
    let (world, name) = uploaded().await;
    set_upload(&world, &name, "False", "Uploading");
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(nodes(&world), ["n1"]);
}

#[tokio::test]
async fn a_class_with_a_repository_and_rules_is_supported() {
    let world = World::new();
    let class = json!({
        "metadata": {"name": "far"}, "provisioner": null,
        "spec": {
            "provisioner": "repository.torpor.dev",
            "parameters": {"url": "s3://b/p", "endpoint": "http://s3", "allowHTTP": "true", "keepLast": "2"},
        },
    });
    world.api.create("snapshotclasses", class);
    let named = json!({"metadata": {"annotations": {"torpor.dev/snapshot-class": "far"}}});
    world.ready(torpor_sandbox(named)).await;
    assert_eq!(world.condition("Hibernated"), None);
}

/// Makes a node serve its images, or not.
fn serves(world: &World, node: &str, does: bool) {
    let server = does.then(|| json!({"address": "10.0.0.1:9646", "certificate": "aa"}));
    let status = json!({"status": {"imageServer": server}});
    world.api.edit("sandboxnodes", "", node, &status);
}

/// Returns a world as [`uploaded`] does, whose image is on `n1` only. The node gives it to others.
async fn served() -> (World, String) {
    let (world, name) = uploaded().await;
    set_upload(&world, &name, "False", "RepositoryUnavailable");
    serves(&world, "n1", true);
    serves(&world, "n2", true);
    (world, name)
}

#[tokio::test]
async fn an_image_that_its_node_serves_may_continue_on_each_node_and_preferably_on_its_own() {
    let (world, _) = served().await;
    world.edit_sandbox(&mode("Running"));
    let writes = world.writes_of_a_pass().await;
    assert_eq!(writes[..2], ["patch sandboxsnapshots", "create pods"]);
    assert_eq!(nodes(&world), ["n1", "n2"]);
    let annotations = &world.pod().expect("a Pod")["metadata"]["annotations"];
    assert_eq!(annotations["torpor.dev/restore-node"], "n1");
    assert_eq!(annotations["torpor.dev/restore-digest"], "blake3:1");
    assert_eq!(annotations.get("torpor.dev/restore-class"), None);
}

#[tokio::test]
async fn an_image_in_both_places_is_fetched_from_either() {
    let (world, name) = served().await;
    set_upload(&world, &name, "True", "Uploaded");
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    let annotations = &world.pod().expect("a Pod")["metadata"]["annotations"];
    assert_eq!(annotations["torpor.dev/restore-node"], "n1");
    assert_eq!(annotations["torpor.dev/restore-class"], "far");
}

#[tokio::test]
async fn a_node_without_a_server_gets_no_image_from_another_node() {
    let (world, name) = served().await;
    serves(&world, "n2", false);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(nodes(&world), ["n1"]);
    let waits = condition("PodScheduled", "False", "Unschedulable", "no room");
    world.set_pod_condition(waits);
    world.settle().await;
    assert_eq!(nodes(&world), ["n1"]);
    assert!(!world.pod_is_terminating(), "the same node again");
    set_upload(&world, &name, "True", "Uploaded");
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    assert_eq!(nodes(&world), ["n1", "n2"], "from the repository");
}

#[rstest]
#[case::it_serves_no_images(false, false, false)]
#[case::its_agent_is_silent(true, true, false)]
#[case::it_has_lost_the_image(true, false, true)]
#[tokio::test]
async fn an_image_that_its_node_cannot_give_stays_with_it(
    #[case] does_serve: bool,
    #[case] is_silent: bool,
    #[case] is_missing: bool,
) {
    let (world, name) = served().await;
    serves(&world, "n1", does_serve);
    if is_silent {
        world.node_falls_silent("n1");
    }
    if is_missing {
        let missing = json!({"status": {"conditions": [
            condition("Committed", "False", "ImageMissing", "gone"),
        ]}});
        world.edit_snapshot(&name, &missing);
    }
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert!(
        !nodes(&world).contains(&"n2".to_owned()),
        "{:?}",
        world.pod()
    );
}

#[tokio::test]
async fn a_pod_that_waits_for_a_node_is_made_anew_once_the_node_serves_the_image() {
    let (world, _) = served().await;
    serves(&world, "n1", false);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    let waits = condition("PodScheduled", "False", "Unschedulable", "no room");
    world.set_pod_condition(waits);
    world.settle().await;
    assert_eq!(nodes(&world), ["n1"]);
    serves(&world, "n1", true);
    world.let_time_pass();
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    assert_eq!(nodes(&world), ["n1", "n2"]);
}

/// The node of the image is silent for a while, so that nobody can fetch the image meanwhile. The
/// Pod that fetched it before may run.
#[tokio::test]
async fn no_second_pod_is_made_on_a_node_that_gives_its_image_no_more() {
    let (world, name) = served().await;
    taken_by(&world, &name, r#"{"nodeName":"n2","uid":"pod-before"}"#);
    claim(&world, "pod-before", "Claimed");
    serves(&world, "n1", false);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(world.pod(), None);
    assert_eq!(
        world.condition("Restored").expect("a condition").1,
        "ImageClaimed"
    );
    claim(&world, "pod-before", "Released");
    world.let_time_pass();
    world.settle().await;
    assert_eq!(nodes(&world), ["n1"]);
}

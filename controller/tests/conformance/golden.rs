//! Tests of golden images: the controller makes them, members start from them, and claims take
//! members that sleep.

use rstest::rstest;
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, name},
    objects::{NS, condition, ready_pod},
};

const HIBERNATE: &str = "torpor.dev/hibernate";
const IMAGES: &str = "torpor.dev/golden-images";
/// The only node.
const NODE: &str = "n0";

/// Returns a cluster with a template that asks for golden images, and a pool of four members, one
/// of them hot.
fn cluster() -> Cluster {
    let cluster = Cluster::new();
    cluster.template(json!({
        "metadata": {"annotations": {"torpor.dev/golden": "true"}},
        "spec": {"podTemplate": {"spec": {"runtimeClassName": "torpor"}}},
    }));
    let heat = json!({"metadata": {"annotations": {"torpor.dev/heat": "hot=1,asleep=rest"}}});
    cluster.pool(4, heat);
    cluster
}

fn is_golden(object: &Value) -> bool {
    object["metadata"]["labels"]["torpor.dev/golden"].is_string()
}

/// Starts each pending Pod on the node, and removes those that end.
fn kubelet(cluster: &Cluster) {
    for pod in cluster.api.list("pods") {
        let ready = ready_pod(NODE);
        if pod["metadata"]["deletionTimestamp"].is_string() {
            cluster.api.remove("pods", NS, name(&pod));
        } else if pod["status"]["phase"] == "Pending" {
            cluster.api.edit("pods", NS, name(&pod), &ready);
        }
    }
}

/// Commits each snapshot.
fn agent(cluster: &Cluster) {
    for snapshot in cluster.api.list("sandboxsnapshots") {
        let pod = snapshot["spec"]["podUID"].as_str().expect("a Pod");
        let committed = json!({"status": {
            "imageID": format!("{pod}.1"), "nodeName": NODE, "podUID": pod,
            "committedAt": "2026-01-01T00:00:00Z",
            "conditions": [condition("Committed", "True", "Committed", "")],
        }});
        let sandboxsnapshot = name(&snapshot);
        cluster
            .api
            .edit("sandboxsnapshots", NS, sandboxsnapshot, &committed);
    }
}

/// Runs passes, each by a controller that was just started.
async fn passes(cluster: &Cluster, commits: bool) {
    for _ in 0..8 {
        cluster.another().passes().await;
        kubelet(cluster);
        if commits {
            agent(cluster);
        }
    }
}

fn golden(cluster: &Cluster, kind: &str) -> Vec<Value> {
    let mut all = cluster.api.list(kind);
    all.retain(is_golden);
    all
}

fn members(cluster: &Cluster) -> Vec<Value> {
    let mut all = cluster.api.list("sandboxes");
    all.retain(|one| one["metadata"]["labels"]["agents.x-k8s.io/warm-pool-sandbox"].is_string());
    all
}

fn asleep(sandboxes: &[Value]) -> usize {
    let sleeps = |one: &&Value| one["metadata"]["annotations"][HIBERNATE] == "true";
    sandboxes.iter().filter(sleeps).count()
}

#[tokio::test]
async fn a_golden_sandbox_is_saved_and_ended_before_members_that_sleep_are_made() {
    let cluster = cluster();
    passes(&cluster, false).await;
    // Until the image is committed there is only the member that is to run.
    let sandboxes = golden(&cluster, "sandboxes");
    let snapshots = golden(&cluster, "sandboxsnapshots");
    assert_eq!((sandboxes.len(), snapshots.len()), (1, 1));
    assert_eq!(members(&cluster).len(), 1);
    let pod = cluster
        .api
        .get("pods", NS, name(&sandboxes[0]))
        .expect("its Pod");
    assert_eq!(snapshots[0]["spec"]["podUID"], pod["metadata"]["uid"]);
    let record = &snapshots[0]["metadata"]["annotations"]["torpor.dev/saved-pod"];
    assert!(record.as_str().expect("a record").contains(NODE));

    passes(&cluster, true).await;
    assert!(golden(&cluster, "sandboxes").is_empty());
    assert_eq!(golden(&cluster, "sandboxsnapshots").len(), 1);
    let members = members(&cluster);
    assert_eq!((members.len(), asleep(&members)), (4, 3));
    let image = format!("{}.1", pod["metadata"]["uid"].as_str().expect("a UID"));
    for member in members {
        let pod = cluster.api.get("pods", NS, name(&member)).expect("its Pod");
        let on_pod = &pod["metadata"]["annotations"];
        let sleeps = member["metadata"]["annotations"][HIBERNATE] == "true";
        assert_eq!(on_pod[HIBERNATE] == "true", sleeps);
        assert_eq!(
            on_pod[IMAGES] == image.as_str(),
            sleeps,
            "the first one had no image yet"
        );
    }
}

#[tokio::test]
async fn a_claim_wakes_the_member_that_it_takes_and_the_pool_wakes_as_many_ahead() {
    let cluster = cluster();
    passes(&cluster, true).await;
    // This controller knows what claims took.
    for claim in ["a", "b"] {
        cluster.claim(claim, json!({}));
        for _ in 0..4 {
            cluster.passes().await;
            kubelet(&cluster);
        }
        let held = cluster.get_sandbox(&cluster.held_by(claim).expect("a Sandbox"));
        let annotations = &held["metadata"]["annotations"];
        assert!(
            annotations[HIBERNATE].is_null() && annotations["torpor.dev/golden-sandbox"].is_null()
        );
        let pod = cluster.api.get("pods", NS, name(&held)).expect("its Pod");
        assert!(pod["metadata"]["annotations"][HIBERNATE].is_null());
    }
    let members = members(&cluster);
    assert_eq!(members.len(), 4);
    assert!(asleep(&members) < 4, "one is awake for the next claim");
}

/// Replaces Torpor's conditions of a Pod, and others of their types, by these.
fn reports(cluster: &Cluster, pod: &str, conditions: &[Value]) {
    let found = cluster.api.get("pods", NS, pod).expect("a Pod");
    let mut all: Vec<Value> = found["status"]["conditions"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let replaced = |one: &Value| conditions.iter().any(|new| new["type"] == one["type"]);
    all.retain(|one| !one["type"].to_string().contains("torpor.dev/") && !replaced(one));
    all.extend_from_slice(conditions);
    let status = json!({"status": {"conditions": all}});
    cluster.api.edit("pods", NS, pod, &status);
}

/// Runs passes of the one controller until each object has seen the others' changes.
async fn settle(cluster: &Cluster) {
    for _ in 0..4 {
        cluster.passes().await;
    }
}

/// Returns a cluster whose members sleep, by their Pods, and the names of the members.
async fn sleeping(replicas: i32, template: &Value) -> (Cluster, Vec<String>) {
    let cluster = cluster();
    cluster.edit("sandboxtemplates", "t", template);
    let none = json!({
        "metadata": {"annotations": {"torpor.dev/heat": "hot=0,asleep=rest"}},
        "spec": {"replicas": replicas},
    });
    cluster.edit("sandboxwarmpools", "p", &none);
    passes(&cluster, true).await;
    let members = members(&cluster);
    let names: Vec<String> = members.iter().map(|one| name(one).to_owned()).collect();
    for name in &names {
        let asleep = condition("torpor.dev/Hibernated", "True", "Hibernated", "");
        reports(&cluster, name, &[asleep]);
    }
    cluster.passes().await;
    (cluster, names)
}

fn ready_of(cluster: &Cluster, claim: &str) -> Value {
    let claim = cluster
        .api
        .get("sandboxclaims", NS, claim)
        .expect("a claim");
    let all = claim["status"]["conditions"].as_array();
    let ready = all.into_iter().flatten().find(|one| one["type"] == "Ready");
    ready.cloned().unwrap_or_default()["status"].clone()
}

/// Returns the Sandboxes that a claim controls, with and without its commitment.
fn controlled(cluster: &Cluster, claim: &str) -> Vec<String> {
    let claim = cluster
        .api
        .get("sandboxclaims", NS, claim)
        .expect("a claim");
    let mut all = cluster.api.list("sandboxes");
    all.retain(|one| one["metadata"]["ownerReferences"][0]["uid"] == claim["metadata"]["uid"]);
    all.iter().map(|one| name(one).to_owned()).collect()
}

#[tokio::test]
async fn a_claim_is_ready_once_its_member_runs() {
    let (cluster, _) = sleeping(1, &json!({})).await;
    cluster.claim("c", json!({}));
    settle(&cluster).await;
    let taken = controlled(&cluster, "c");
    assert_eq!((taken.len(), cluster.held_by("c")), (1, None));
    let taken = &taken[0];
    let pod = cluster.api.get("pods", NS, taken).expect("its Pod");
    assert!(pod["metadata"]["annotations"][HIBERNATE].is_null());

    let restored = condition("torpor.dev/Restored", "True", "Restored", "");
    reports(&cluster, taken, &[restored]);
    settle(&cluster).await;
    assert_eq!(cluster.held_by("c").as_ref(), Some(taken));
    assert_eq!(ready_of(&cluster, "c"), "True");
}

/// Returns a template whose caches have its outline only, as its Pods have a large variable.
fn large() -> Value {
    let container = json!({
        "name": "c", "image": "img", "env": [{"name": "A", "value": "x".repeat(40_000)}],
    });
    let metadata = json!({"labels": {"app": "notebook"}});
    json!({"spec": {"podTemplate": {"metadata": metadata, "spec": {"containers": [container]}}}})
}

#[rstest]
#[case::small(json!({"spec": {"podTemplate": {"metadata": {"labels": {"app": "notebook"}}}}}))]
#[case::large(large())]
#[tokio::test]
async fn a_claim_takes_another_member_where_one_cannot_wake(#[case] template: Value) {
    let (cluster, names) = sleeping(2, &template).await;
    cluster.claim("c", json!({}));
    settle(&cluster).await;
    let first = controlled(&cluster, "c").pop().expect("a member");
    let mut others = names.iter().filter(|name| **name != first);
    let other = others.next().expect("another member");
    let cold = condition(
        "torpor.dev/Restored",
        "False",
        "ColdStarted",
        "it is damaged",
    );
    reports(
        &cluster,
        &first,
        &[cold, condition("Ready", "False", "ContainersNotReady", "")],
    );
    settle(&cluster).await;
    assert!(controlled(&cluster, "c").contains(other));
    assert_eq!(cluster.held_by("c"), None, "the other one sleeps still");

    let restored = condition("torpor.dev/Restored", "True", "Restored", "");
    reports(&cluster, other, &[restored]);
    settle(&cluster).await;
    assert_eq!(cluster.held_by("c").as_ref(), Some(other));
    assert_eq!(ready_of(&cluster, "c"), "True");
    assert_eq!(controlled(&cluster, "c"), std::slice::from_ref(other));
    let labels = &cluster.get_sandbox(other)["spec"]["podTemplate"]["metadata"]["labels"];
    assert_eq!(labels["app"], "notebook");
}

#[tokio::test]
async fn without_the_annotation_the_image_goes_and_members_that_sleep_stay() {
    let cluster = cluster();
    passes(&cluster, true).await;
    let off = json!({"metadata": {"annotations": {"torpor.dev/golden": null}}});
    cluster.edit("sandboxtemplates", "t", &off);
    passes(&cluster, true).await;
    assert!(golden(&cluster, "sandboxsnapshots").is_empty());
    let members = members(&cluster);
    assert_eq!((members.len(), asleep(&members)), (4, 3));
}

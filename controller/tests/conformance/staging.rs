//! Tests of staged images: the Pods that bring a template's images to the nodes of its pools.

use serde_json::{Value, json};
use torpor_controller::settings::Settings;

use crate::{
    apiserver::{Fault, FaultAnswer},
    cluster::{Cluster, is_terminating, name, settings},
    objects::{NS, runtime_class, sandbox_node},
};

/// Returns a cluster with two nodes that have the runtime, and a template that stages its images.
fn cluster() -> Cluster {
    let cluster = Cluster::with(Settings {
        runtime_image: Some("runtime:1".into()),
        ..settings()
    });
    cluster.api.create("runtimeclasses", runtime_class());
    for node in ["n0", "n1"] {
        cluster.api.create("sandboxnodes", sandbox_node(node));
        let whole = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}});
        cluster.api.create("nodes", whole);
    }
    cluster.template(json!({
        "metadata": {"annotations": {"torpor.dev/stage-images": "true"}},
        "spec": {"podTemplate": {"spec": {"runtimeClassName": "torpor"}}},
    }));
    cluster
}

/// Returns the Pods that stage images and are not being deleted.
fn staging(cluster: &Cluster) -> Vec<Value> {
    let mut pods = cluster.api.list("pods");
    pods.retain(|pod| {
        let is_staging = pod["metadata"]["labels"]["torpor.dev/staged-images"].is_string();
        is_staging && !is_terminating(pod)
    });
    pods
}

/// Runs passes, each by a controller that was just started.
async fn passes(cluster: &Cluster) {
    for _ in 0..3 {
        cluster.another().passes().await;
    }
}

#[tokio::test]
async fn images_are_staged_once_on_each_node_while_a_pool_names_the_template() {
    let cluster = cluster();
    passes(&cluster).await;
    assert!(staging(&cluster).is_empty(), "no pool names the template");

    cluster.pool(0, json!({}));
    passes(&cluster).await;
    let pods = staging(&cluster);
    assert_eq!(pods.len(), 2);
    for pod in &pods {
        assert!(pod["metadata"]["ownerReferences"][0]["kind"] == "SandboxTemplate");
        let ended = json!({"status": {"phase": "Succeeded"}});
        cluster.api.edit("pods", NS, name(pod), &ended);
    }
    passes(&cluster).await;
    let after = staging(&cluster);
    let uids = |pods: &[Value]| -> Vec<Value> {
        pods.iter()
            .map(|pod| pod["metadata"]["uid"].clone())
            .collect()
    };
    assert_eq!(uids(&after), uids(&pods), "they are kept");

    // Other images come in other Pods.
    let newer = json!({"spec": {"podTemplate": {"spec": {
        "containers": [{"name": "c", "image": "registry.example/new:2"}],
    }}}});
    cluster.edit("sandboxtemplates", "t", &newer);
    passes(&cluster).await;
    let pods = staging(&cluster);
    assert_eq!(pods.len(), 2);
    assert!(
        pods.iter()
            .all(|pod| pod.to_string().contains("registry.example/new:2"))
    );

    let off = json!({"metadata": {"annotations": {"torpor.dev/stage-images": null}}});
    cluster.edit("sandboxtemplates", "t", &off);
    passes(&cluster).await;
    assert!(staging(&cluster).is_empty());
}

#[tokio::test]
async fn a_pod_whose_create_has_no_answer_is_made_once() {
    let cluster = cluster();
    cluster.pool(0, json!({}));
    for answer in [FaultAnswer::LoseAnswer, FaultAnswer::TooLate] {
        let (verb, kind) = ("create", "pods");
        cluster.api.fail(Fault { verb, kind, answer });
    }
    passes(&cluster.impatient()).await;
    assert_eq!(staging(&cluster).len(), 2);
}

#[tokio::test]
async fn a_refused_pod_is_an_event_on_the_template_and_another_try() {
    let cluster = cluster();
    cluster.pool(0, json!({}));
    let answer = FaultAnswer::Refuse(403);
    let (verb, kind) = ("create", "pods");
    cluster.api.fail(Fault { verb, kind, answer });
    cluster.passes().await;
    assert_eq!(staging(&cluster).len(), 1);
    let events = cluster.events();
    let event = events
        .iter()
        .find(|(reason, _)| reason == "ImagesNotStaged");
    let (_, message) = event.expect("an Event");
    assert!(message.contains("made to fail"), "{message}");
    cluster.passes().await;
    assert_eq!(staging(&cluster).len(), 2);
}

//! Tests of the sandbox runtime's injection into Pods, from the template to the Pod.

use rstest::rstest;
use serde_json::{Value, json};
use torpor_controller::settings::Settings;

use crate::{
    cluster::{Cluster, condition_of, settings},
    objects::NS,
};

const ASKED: &str = "torpor.dev/inject-runtime";

fn cluster(runtime_image: Option<&str>) -> Cluster {
    Cluster::with(Settings {
        runtime_image: runtime_image.map(Into::into),
        ..settings()
    })
}

fn on_template() -> Value {
    json!({"metadata": {"annotations": {ASKED: "true"}}})
}

fn on_pod_template() -> Value {
    json!({"spec": {"podTemplate": {"metadata": {"annotations": {ASKED: "true"}}}}})
}

/// Returns the names of the init containers of a Sandbox's Pod.
fn init_containers(cluster: &Cluster, sandbox: &str) -> Vec<String> {
    let pod = cluster.api.get("pods", NS, sandbox).expect("it has a Pod");
    let all = pod["spec"]["initContainers"].as_array();
    all.into_iter()
        .flatten()
        .map(|container| container["name"].as_str().unwrap().to_owned())
        .collect()
}

#[rstest]
#[case::on_the_template(on_template())]
#[case::on_its_pod_template(on_pod_template())]
#[tokio::test]
async fn a_template_requests_injection_for_all_of_its_sandboxes(#[case] asks: Value) {
    let cluster = cluster(Some("runtime:1"));
    for sandbox in cluster.warm_and_cold(asks).await {
        assert_eq!(init_containers(&cluster, &sandbox), ["torpor-runtime"]);
        // The Sandbox's spec equals the template's, without the injected parts.
        let spec = cluster.get_sandbox(&sandbox)["spec"]["podTemplate"]["spec"].clone();
        assert_eq!(spec["containers"], json!([{"name": "c", "image": "img"}]));
        assert!(spec.get("initContainers").is_none());
    }
}

/// Injected parts are no difference between a member and its template, and a template that requests
/// injection later does not make its members stale.
#[rstest]
#[case::asked_from_the_beginning(on_template(), json!({"metadata": {"labels": {"x": "y"}}}))]
#[case::asked_in_the_pod_template_too(on_template(), on_pod_template())]
#[case::asked_later(json!({}), on_template())]
#[case::asked_no_more(on_pod_template(), json!({"spec": {"podTemplate": {"metadata": null}}}))]
#[tokio::test]
async fn injection_makes_no_member_stale(#[case] before: Value, #[case] change: Value) {
    let cluster = cluster(Some("runtime:1"));
    let [before, after] = cluster.members_over(before, &change).await;
    assert_eq!(after, before);
}

#[rstest]
#[case::no_image(None, on_template(), "the controller has no image of the runtime")]
#[case::no_command_for_the_args(
    Some("runtime:1"),
    json!({
        "metadata": {"annotations": {ASKED: "true"}},
        "spec": {"podTemplate": {"spec": {"containers": [{"name": "c", "image": "img", "args": ["x"]}]}}},
    }),
    "set command to the entrypoint"
)]
#[case::no_port_is_left(
    Some("runtime:1"),
    json!({
        "metadata": {"annotations": {ASKED: "true"}},
        "spec": {"podTemplate": {"spec": {"containers": [{
            "name": "c", "image": "img", "command": ["x"],
            "ports": [{"containerPort": 8888}, {"containerPort": 8080}, {"containerPort": 9090}],
        }]}}},
    }),
    "none is left for the runtime"
)]
#[tokio::test]
async fn an_impossible_injection_is_reported_and_no_pod_is_created(
    #[case] runtime_image: Option<&str>,
    #[case] template: Value,
    #[case] words: &str,
) {
    let cluster = cluster(runtime_image);
    cluster.template(template);
    cluster.pool(1, json!({}));
    cluster.passes().await;
    cluster.sandbox_passes().await;
    assert!(cluster.api.list("pods").is_empty());
    let sandbox = &cluster.api.list("sandboxes")[0];
    let (_, reason, message) = condition_of(sandbox, "Ready").unwrap();
    assert_eq!(reason, "ReconcilerError");
    assert!(message.contains(words), "{message}");
}

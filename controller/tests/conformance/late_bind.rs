//! Tests of late binding: what a claim brings reaches a member that runs already, and the claim is
//! Ready once it has arrived.

use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, name},
    objects::{NS, condition, ready_pod},
};

const NODE: &str = "n0";

/// Returns a cluster with a pool of one member whose template allows late variables.
fn cluster(annotations: Value) -> Cluster {
    let cluster = Cluster::new();
    cluster.template(json!({
        "metadata": {"annotations": annotations},
        "spec": {
            "envVarsInjectionPolicy": "Allowed",
            "podTemplate": {"spec": {"runtimeClassName": "torpor"}},
        },
    }));
    cluster.pool(1, json!({}));
    cluster
}

fn late() -> Value {
    json!({"torpor.dev/late-bind": "env"})
}

async fn passes(cluster: &Cluster) {
    for _ in 0..6 {
        cluster.passes().await;
        for pod in cluster.api.list("pods") {
            if pod["status"]["phase"] == "Pending" {
                cluster.api.edit("pods", NS, name(&pod), &ready_pod(NODE));
            }
        }
    }
}

/// Writes the agent's condition on a Pod, beside the kubelet's.
fn agent_reports(cluster: &Cluster, pod: &str, status: &str, reason: &str, message: &str) {
    let found = cluster.api.get("pods", NS, pod).expect("a Pod");
    let mut all: Vec<Value> = found["status"]["conditions"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    all.retain(|one| one["type"] != "torpor.dev/Bound");
    all.push(condition("torpor.dev/Bound", status, reason, message));
    cluster
        .api
        .edit("pods", NS, pod, &json!({"status": {"conditions": all}}));
}

fn ready_of(object: &Value) -> Value {
    let all = object["status"]["conditions"].as_array();
    let ready = all.into_iter().flatten().find(|one| one["type"] == "Ready");
    ready.cloned().unwrap_or_default()
}

fn claim(cluster: &Cluster) -> Value {
    cluster.api.get("sandboxclaims", NS, "c").expect("a claim")
}

fn launch_type(sandbox: &Value) -> &Value {
    &sandbox["metadata"]["labels"]["agents.x-k8s.io/launch-type"]
}

#[tokio::test]
async fn a_claim_with_variables_takes_a_member_and_is_ready_once_they_have_arrived() {
    let cluster = cluster(late());
    passes(&cluster).await;
    let env = json!([{"name": "USER_ID", "value": "it's 7"}]);
    cluster.claim("c", json!({"spec": {"env": env}}));
    passes(&cluster).await;

    let taken = cluster.held_by("c").expect("a Sandbox");
    let sandbox = cluster.get_sandbox(&taken);
    assert_eq!(*launch_type(&sandbox), "warm");
    let pod = cluster.api.get("pods", NS, &taken).expect("its Pod");
    let on_pod = &pod["metadata"]["annotations"];
    let uid = &claim(&cluster)["metadata"]["uid"];
    assert_eq!(&on_pod["torpor.dev/claim"], uid);
    let text = "export USER_ID=\"it's 7\"\n";
    assert_eq!(on_pod["torpor.dev/claim-env"], text);
    assert!(
        !pod["spec"]["containers"].to_string().contains("USER_ID"),
        "the Pod is the member's"
    );
    for object in [&sandbox, &claim(&cluster)] {
        let ready = ready_of(object);
        assert_eq!(
            (&ready["status"], &ready["reason"]),
            (&json!("False"), &json!("Binding"))
        );
    }

    let why = "the command of torpor.dev/on-claim-exec failed: exit code 3 (attempt 1).";
    agent_reports(&cluster, &taken, "False", "OnClaimExecFailed", why);
    passes(&cluster).await;
    assert_eq!(ready_of(&claim(&cluster))["message"], why);

    agent_reports(&cluster, &taken, "True", "Bound", "");
    passes(&cluster).await;
    assert_eq!(ready_of(&claim(&cluster))["status"], "True");
}

#[tokio::test]
async fn no_client_finds_the_sandbox_of_a_claim_ready_before_the_claim_has_arrived() {
    let cluster = cluster(late());
    passes(&cluster).await;
    cluster.claim("c", json!({}));
    // Each write of the claim's status with a Sandbox' name comes after the Sandbox' own.
    for _ in 0..12 {
        cluster.passes().await;
        if let Some(taken) = cluster.held_by("c") {
            let sandbox = cluster.get_sandbox(&taken);
            assert_eq!(ready_of(&sandbox)["status"], "False");
        }
    }
    let taken = cluster.held_by("c").expect("a Sandbox");
    agent_reports(&cluster, &taken, "True", "Bound", "");
    passes(&cluster).await;
    assert_eq!(ready_of(&claim(&cluster))["status"], "True");
}

#[tokio::test]
async fn a_cold_start_brings_the_variables_and_the_command_too() {
    let mut annotations = late();
    annotations["torpor.dev/on-claim-exec"] = r#"["/hook"]"#.into();
    let cluster = cluster(annotations);
    cluster.edit("sandboxwarmpools", "p", &json!({"spec": {"replicas": 0}}));
    passes(&cluster).await;
    let env = json!([{"name": "USER_ID", "value": "7"}]);
    cluster.claim("c", json!({"spec": {"env": env}}));
    passes(&cluster).await;
    let taken = cluster.held_by("c").expect("a Sandbox");
    assert_eq!(*launch_type(&cluster.get_sandbox(&taken)), "cold");
    let pod = cluster.api.get("pods", NS, &taken).expect("its Pod");
    let on_pod = &pod["metadata"]["annotations"];
    assert_eq!(on_pod["torpor.dev/claim-env"], "export USER_ID=7\n");
    assert_eq!(on_pod["torpor.dev/on-claim-exec"], r#"["/hook"]"#);
    let first = &pod["spec"]["containers"][0];
    assert_eq!(first["env"], env);
    let mounts = first["volumeMounts"].as_array().expect("mounts");
    assert!(mounts.iter().any(|one| one["mountPath"] == "/run/claim"));
    assert_eq!(ready_of(&claim(&cluster))["reason"], "Binding");
}

#[tokio::test]
async fn without_a_runtime_class_or_the_annotation_variables_start_cold_as_upstream() {
    for change in [
        json!({"metadata": {"annotations": {"torpor.dev/late-bind": null}}}),
        json!({"spec": {"podTemplate": {"spec": {"runtimeClassName": null}}}}),
    ] {
        let cluster = cluster(late());
        cluster.edit("sandboxtemplates", "t", &change);
        passes(&cluster).await;
        let env = json!([{"name": "USER_ID", "value": "7"}]);
        cluster.claim("c", json!({"spec": {"env": env}}));
        passes(&cluster).await;
        let taken = cluster.held_by("c").expect("a Sandbox");
        let sandbox = cluster.get_sandbox(&taken);
        assert_eq!(*launch_type(&sandbox), "cold", "{change}");
        let pod = cluster.api.get("pods", NS, &taken).expect("its Pod");
        assert!(!pod.to_string().contains("torpor-claim"));
        assert!(!pod.to_string().contains("torpor.dev/claim"));
        assert_eq!(ready_of(&claim(&cluster))["status"], "True");
    }
}

#[tokio::test]
async fn a_member_from_before_the_annotation_is_left_to_other_claims() {
    let cluster = cluster(json!({}));
    passes(&cluster).await;
    let allowed = json!({"metadata": {"annotations": late()}});
    cluster.edit("sandboxtemplates", "t", &allowed);
    cluster.claim("c", json!({"spec": {"env": [{"name": "A", "value": "1"}]}}));
    passes(&cluster).await;
    let taken = cluster.held_by("c").expect("a Sandbox");
    assert_eq!(*launch_type(&cluster.get_sandbox(&taken)), "cold");
    cluster.claim("plain", json!({}));
    passes(&cluster).await;
    let taken = cluster.held_by("plain").expect("a Sandbox");
    assert_eq!(*launch_type(&cluster.get_sandbox(&taken)), "warm");
}

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

/// Has the agent report that the claim has arrived, and checks that the claim is Ready then.
async fn arrives(cluster: &Cluster, pod: &str) {
    agent_reports(cluster, pod, "True", "Bound", "");
    passes(cluster).await;
    assert_eq!(ready_of(&claim(cluster))["status"], "True");
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

    arrives(&cluster, &taken).await;
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
    arrives(&cluster, &taken).await;
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

/// Creates a Secret, a ConfigMap and a ServiceAccount that claims may bring.
fn sources(cluster: &Cluster, claimable: bool) {
    let labels = json!({"torpor.dev/claimable": claimable.to_string()});
    for (kind, name, fields) in [
        ("secrets", "keys", json!({"data": {"key": "a2V5"}})),
        (
            "configmaps",
            "settings",
            json!({"data": {"settings.yaml": "a: 1"}}),
        ),
        ("serviceaccounts", "user", json!({})),
    ] {
        let mut object = fields;
        object["metadata"] = json!({"name": name, "namespace": NS, "labels": labels});
        cluster.api.create(kind, object);
    }
}

fn all_late() -> Value {
    json!({"torpor.dev/late-bind": "env,files,identity"})
}

fn with_files(files: &str) -> Value {
    json!({"metadata": {"annotations": {"torpor.dev/claim-files": files}}})
}

fn decoded(secret: &Value, file: &str) -> String {
    let data: k8s_openapi::ByteString =
        serde_json::from_value(secret["data"][file].clone()).expect("bytes");
    String::from_utf8(data.0).expect("text")
}

#[tokio::test]
async fn claim_files_and_token_are_in_a_secret_before_the_pod_names_the_claim() {
    let cluster = cluster(all_late());
    passes(&cluster).await;
    sources(&cluster, true);
    cluster.claim(
        "c",
        with_files("secret/keys, configmap/settings,token/user"),
    );
    passes(&cluster).await;
    let taken = cluster.held_by("c").expect("a Sandbox");
    let sandbox = cluster.get_sandbox(&taken);
    assert_eq!(*launch_type(&sandbox), "warm");
    let uid = claim(&cluster)["metadata"]["uid"].clone();
    let secret = cluster.api.get("secrets", NS, &secret_name(&sandbox));
    let secret = secret.expect("a Secret");
    assert_eq!(decoded(&secret, "key"), "key");
    assert_eq!(decoded(&secret, "settings.yaml"), "a: 1");
    assert_eq!(decoded(&secret, ".claim"), uid.as_str().expect("a UID"));
    let token = format!("token of user for {}", secret["metadata"]["uid"]);
    assert_eq!(decoded(&secret, "token"), token);
    let owner = &secret["metadata"]["ownerReferences"][0];
    assert_eq!(owner["uid"], sandbox["metadata"]["uid"]);
    let pod = cluster.api.get("pods", NS, &taken).expect("its Pod");
    let on_pod = &pod["metadata"]["annotations"];
    assert_eq!(
        (
            &on_pod["torpor.dev/claim"],
            &on_pod["torpor.dev/claim-secret"]
        ),
        (&uid, &json!("written"))
    );
    let projected = &pod["spec"]["volumes"][0]["projected"]["sources"][1]["secret"];
    assert_eq!(
        *projected,
        json!({"name": secret_name(&sandbox), "optional": true})
    );

    // The token is renewed in the same Secret; the claim stays Ready.
    agent_reports(&cluster, &taken, "True", "Bound", "");
    passes(&cluster).await;
    let old = json!({"metadata": {"annotations": {"torpor.dev/claim-token-until": "2026-01-01T00:00:00Z"}}});
    cluster.edit("sandboxes", &taken, &old);
    cluster.edit(
        "secrets",
        &secret_name(&sandbox),
        &json!({"data": {"token": "b2xk"}}),
    );
    passes(&cluster).await;
    let renewed = cluster
        .api
        .get("secrets", NS, &secret_name(&sandbox))
        .expect("a Secret");
    assert_eq!(decoded(&renewed, "token"), token);
    let until =
        &cluster.get_sandbox(&taken)["metadata"]["annotations"]["torpor.dev/claim-token-until"];
    assert!(
        until.as_str().is_some_and(|until| until > "2026-11"),
        "{until}"
    );
    assert_eq!(ready_of(&claim(&cluster))["status"], "True");
}

fn secret_name(sandbox: &Value) -> String {
    let uid = sandbox["metadata"]["uid"].as_str().expect("a UID");
    format!("torpor-claim-{uid}")
}

#[tokio::test]
async fn a_file_that_is_not_released_reaches_no_sandbox_and_the_claim_reports_why() {
    let cluster = cluster(all_late());
    passes(&cluster).await;
    sources(&cluster, false);
    cluster.claim("c", with_files("secret/keys"));
    passes(&cluster).await;
    let ready = ready_of(&claim(&cluster));
    assert_eq!(ready["reason"], "ClaimFilesRejected");
    let message = ready["message"].as_str().expect("a message");
    assert!(
        message.contains("Secret \"keys\"") && message.contains("claimable"),
        "{message}"
    );
    for secret in cluster.api.list("secrets") {
        assert_eq!(name(&secret), "keys");
    }
    let released = json!({"metadata": {"labels": {"torpor.dev/claimable": "true"}}});
    cluster.edit("secrets", "keys", &released);
    passes(&cluster).await;
    let taken = cluster.held_by("c").expect("a Sandbox");
    arrives(&cluster, &taken).await;
}

#[tokio::test]
async fn a_controller_without_the_rights_names_the_command_that_grants_them() {
    let cluster = cluster(all_late());
    passes(&cluster).await;
    sources(&cluster, true);
    cluster.api.fail(crate::apiserver::Fault {
        verb: "create",
        kind: "secrets",
        answer: crate::apiserver::FaultAnswer::Refuse(403),
    });
    cluster.claim("c", with_files("secret/keys"));
    cluster.passes().await;
    let message = ready_of(&claim(&cluster))["message"].to_string();
    assert!(
        message.contains("kubectl apply -n ns -k deploy/late-binding"),
        "{message}"
    );
}

#[tokio::test]
async fn a_secret_of_another_owner_stops_the_claim_and_stays() {
    let cluster = cluster(all_late());
    passes(&cluster).await;
    sources(&cluster, true);
    let member = cluster.api.list("sandboxes")[0].clone();
    let foreign = json!({
        "metadata": {"name": secret_name(&member), "namespace": NS}, "data": {"key": "eA=="},
    });
    cluster.api.create("secrets", foreign.clone());
    cluster.claim("c", with_files("secret/keys"));
    passes(&cluster).await;
    let ready = ready_of(&claim(&cluster));
    assert_eq!(ready["reason"], "ClaimFilesRejected");
    let kept = cluster
        .api
        .get("secrets", NS, &secret_name(&member))
        .expect("a Secret");
    assert_eq!(kept["data"], foreign["data"]);
}

#[tokio::test]
async fn controllers_that_die_between_the_writes_of_a_claims_files_leave_one_secret() {
    for verb in ["create", "patch"] {
        let cluster = cluster(all_late());
        passes(&cluster).await;
        sources(&cluster, true);
        cluster.api.fail(crate::apiserver::Fault {
            verb,
            kind: "secrets",
            answer: crate::apiserver::FaultAnswer::TooLate,
        });
        cluster.claim("c", with_files("secret/keys,token/user"));
        for _ in 0..4 {
            cluster.another().passes().await;
        }
        let taken = cluster.held_by("c");
        let secrets = cluster.api.list("secrets");
        assert_eq!(secrets.len(), 2, "{verb}");
        let taken = taken.expect("a Sandbox");
        agent_reports(&cluster, &taken, "True", "Bound", "");
        cluster.another().passes().await;
        cluster.another().passes().await;
        assert_eq!(ready_of(&claim(&cluster))["status"], "True", "{verb}");
    }
}

#[tokio::test]
async fn a_claim_forks_a_snapshot_that_its_owner_released_and_gets_its_variables_too() {
    let cluster = cluster(late());
    passes(&cluster).await;
    let snapshot = json!({
        "metadata": {"name": "branch", "namespace": NS, "finalizers": ["torpor.dev/image"]},
        "spec": {"sandboxName": "other", "reason": "Manual"},
        "status": {
            "imageID": "pod-other.1", "nodeName": NODE, "podUID": "pod-other",
            "committedAt": "2026-01-01T00:00:00Z",
            "conditions": [condition("Committed", "True", "Committed", "")],
        },
    });
    cluster.api.create("sandboxsnapshots", snapshot);
    let asked = json!({
        "metadata": {"annotations": {"torpor.dev/fork-of": "branch"}},
        "spec": {"env": [{"name": "BRANCH", "value": "2"}]},
    });
    cluster.claim("c", asked);
    passes(&cluster).await;
    let ready = ready_of(&claim(&cluster));
    assert_eq!(ready["reason"], "ForkRejected");
    assert!(ready["message"].to_string().contains("claimable=true"));
    let released = json!({"metadata": {"labels": {"torpor.dev/claimable": "true"}}});
    cluster.edit("sandboxsnapshots", "branch", &released);
    passes(&cluster).await;
    let taken = cluster.held_by("c").unwrap_or_else(|| "c".to_owned());
    let sandbox = cluster.get_sandbox(&taken);
    let on_sandbox = &sandbox["metadata"]["annotations"];
    assert_eq!(on_sandbox["torpor.dev/restore-from"], "branch");
    assert_eq!(on_sandbox["torpor.dev/claim-env"], "export BRANCH=2\n");
    let members = cluster.api.list("sandboxes").len();
    assert_eq!(members, 2, "the member of the pool is left to others");
}

#[tokio::test]
async fn files_of_a_claim_that_starts_cold_for_its_variables_are_delivered_too() {
    let cluster = cluster(json!({"torpor.dev/late-bind": "files"}));
    passes(&cluster).await;
    sources(&cluster, true);
    let mut asked = with_files("secret/keys");
    asked["spec"] = json!({"env": [{"name": "A", "value": "1"}]});
    cluster.claim("c", asked);
    passes(&cluster).await;
    let taken = cluster.held_by("c").expect("a Sandbox");
    let sandbox = cluster.get_sandbox(&taken);
    assert_eq!(*launch_type(&sandbox), "cold");
    let secret = cluster.api.get("secrets", NS, &secret_name(&sandbox));
    assert_eq!(decoded(&secret.expect("a Secret"), "key"), "key");
}

#[tokio::test]
async fn a_claim_passes_over_members_without_the_volume_for_what_it_brings() {
    let cluster = cluster(json!({}));
    passes(&cluster).await;
    let allowed = json!({"metadata": {"annotations": late()}});
    cluster.edit("sandboxtemplates", "t", &allowed);
    cluster.edit("sandboxwarmpools", "p", &json!({"spec": {"replicas": 3}}));
    passes(&cluster).await;
    for claim in ["a", "b"] {
        cluster.claim(
            claim,
            json!({"spec": {"env": [{"name": "A", "value": "1"}]}}),
        );
        cluster.passes().await;
        let held = cluster
            .api
            .list("sandboxes")
            .into_iter()
            .find(|one| one["metadata"]["annotations"]["torpor.dev/claim-env"].is_string());
        assert_eq!(*launch_type(&held.expect("a Sandbox")), "warm", "{claim}");
    }
}

#[tokio::test]
async fn a_token_that_cannot_be_renewed_and_files_that_are_gone_leave_the_claim_as_it_is() {
    let cluster = cluster(all_late());
    passes(&cluster).await;
    sources(&cluster, true);
    cluster.claim("c", with_files("secret/keys,token/user"));
    passes(&cluster).await;
    let taken = cluster.held_by("c").expect("a Sandbox");
    agent_reports(&cluster, &taken, "True", "Bound", "");
    passes(&cluster).await;
    // The Secret that was copied is not needed any more, and the account is not released any more.
    cluster.api.remove("secrets", NS, "keys");
    let kept = json!({"metadata": {"labels": {"torpor.dev/claimable": "false"}}});
    cluster.edit("serviceaccounts", "user", &kept);
    let old = json!({"metadata": {"annotations": {"torpor.dev/claim-token-until": "2026-01-01T00:00:00Z"}}});
    cluster.edit("sandboxes", &taken, &old);
    passes(&cluster).await;
    assert_eq!(ready_of(&claim(&cluster))["status"], "True");
    let ended = json!({"status": {"phase": "Failed"}});
    cluster.api.edit("pods", NS, &taken, &ended);
    passes(&cluster).await;
    assert_eq!(
        ready_of(&claim(&cluster))["status"],
        "False",
        "its state is mirrored"
    );
}

#[tokio::test]
async fn a_secret_of_written_files_that_is_gone_is_written_again() {
    let cluster = cluster(all_late());
    passes(&cluster).await;
    sources(&cluster, true);
    cluster.claim("c", with_files("secret/keys,token/user"));
    passes(&cluster).await;
    let taken = cluster.held_by("c").expect("a Sandbox");
    let secret = secret_name(&cluster.get_sandbox(&taken));
    // The node may not have seen files that are there.
    agent_reports(&cluster, &taken, "False", "ClaimNotDelivered", "1");
    cluster.api.take_all_writes();
    passes(&cluster).await;
    let tokens = cluster.api.take_all_writes();
    assert!(tokens.iter().all(|write| write.kind != "serviceaccounts"));
    cluster.api.remove("secrets", NS, &secret);
    agent_reports(&cluster, &taken, "False", "ClaimNotDelivered", "");
    passes(&cluster).await;
    let again = cluster.api.get("secrets", NS, &secret).expect("a Secret");
    assert_eq!(decoded(&again, "key"), "key");
}

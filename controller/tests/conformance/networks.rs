//! Tests of NetworkPolicies: no sandbox is created without the rules that apply to it.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use torpor_controller::settings::NetworkSettings;

use crate::{
    claims::{side_by_side, waiting},
    cluster::{Cluster, name, settings},
    objects::{NS, sandbox},
};

const OF_TEMPLATE: &str = "t-network-policy";
const DEFAULT: &str = "torpor-default-network-policy";
const LABEL: &str = "torpor.dev/network-policy";

fn foreign(name: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": NS}, "spec": {"podSelector": {}}})
}

/// Returns a cluster with a template without its NetworkPolicy, a pool of it and a claim.
fn new_everything(replicas: usize) -> Cluster {
    let cluster = Cluster::new();
    cluster.new_template(json!({}));
    cluster.pool(replicas, json!({}));
    cluster.claim("c", json!({}));
    cluster
}

#[tokio::test]
async fn a_claim_that_is_faster_than_the_network_policy_waits_for_it() {
    let cluster = new_everything(0);
    let again = cluster.claim_pass("c").await.unwrap();
    assert_eq!(
        again,
        Some(Duration::from_secs(60)),
        "the event comes sooner"
    );
    assert_eq!(cluster.writes(), ["patch status sandboxclaims"]);
    assert!(cluster.api.list("sandboxes").is_empty());
    let (status, reason, message) = cluster.claim_condition("c", "Ready").unwrap();
    assert_eq!((&*status, &*reason), ("False", "NetworkPolicyPending"));
    assert!(message.contains(OF_TEMPLATE), "{message}");
    cluster.template_pass("t").await.unwrap();
    // The policy exists, but the watch has not shown it.
    cluster.stale_claim_pass("c").await.unwrap();
    assert!(cluster.api.list("sandboxes").is_empty());
    let queue = &cluster.context.queues.claims;
    waiting(queue).await;
    cluster.sync();
    assert_eq!(waiting(queue).await, ["c"], "woken by the policy");
    cluster.claim_pass("c").await.unwrap();
    assert_eq!(cluster.held_by("c").as_deref(), Some("c"));
    assert_eq!(cluster.api.list("events").len(), 1, "SandboxProvisioned");
}

#[tokio::test]
async fn a_foreign_network_policy_keeps_claims_and_pools_from_making_sandboxes_until_it_is_deleted()
{
    let cluster = new_everything(2);
    cluster.api.create("networkpolicies", foreign(OF_TEMPLATE));
    for _ in 0..3 {
        cluster.passes().await;
    }
    assert!(cluster.api.list("sandboxes").is_empty());
    let ready = cluster.claim_condition("c", "Ready").unwrap();
    assert_eq!(ready.1, "NetworkPolicyNotOwned");
    let events = cluster.events();
    for reason in ["NetworkPolicyNotOwned", "WarmPoolNotProgressing"] {
        let event = events.iter().find(|event| event.0 == reason);
        let (_, note) = event.expect(reason);
        for words in [OF_TEMPLATE, "networkPolicyManagement: Unmanaged"] {
            assert!(note.contains(words), "{note}");
        }
    }
    let about = |event: &Value| event["regarding"]["kind"] == "SandboxClaim";
    let of_claim = cluster.api.list("events").into_iter().filter(about);
    assert_eq!(of_claim.count(), 1, "one Event");
    cluster.api.remove("networkpolicies", NS, OF_TEMPLATE);
    cluster.settle().await;
    assert_eq!(cluster.members().len(), 2);
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
}

#[tokio::test]
async fn an_edited_template_makes_no_sandbox_with_its_old_rules() {
    let cluster = Cluster::new();
    cluster.template(json!({}));
    cluster.pool(0, json!({}));
    cluster.settle().await;
    let closed = json!({"spec": {"networkPolicy": {"egress": []}}});
    cluster.edit("sandboxtemplates", "t", &closed);
    cluster.claim("c", json!({}));
    cluster.claim_pass("c").await.unwrap();
    let ready = cluster.claim_condition("c", "Ready").unwrap();
    assert_eq!(ready.1, "NetworkPolicyPending");
    assert!(cluster.api.list("sandboxes").is_empty());
    cluster.settle().await;
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
}

#[tokio::test]
async fn adopting_a_member_makes_no_request_about_network_policies() {
    let cluster = Cluster::filled(1, json!({})).await;
    cluster.claim("c", json!({}));
    cluster.sync();
    cluster.api.take_reads();
    cluster.stale_claim_pass("c").await.unwrap();
    assert_eq!(cluster.api.take_reads(), [] as [String; 0]);
    assert_eq!(
        side_by_side(cluster.writes())[..3],
        [
            "patch sandboxclaims",
            "patch sandboxes",
            "patch status sandboxclaims"
        ]
    );
}

// Sandboxes without a template.

/// Returns a cluster with a default NetworkPolicy and without the extensions.
fn isolating() -> Cluster {
    let mut settings = settings();
    settings.extensions = false;
    settings.network = NetworkSettings {
        default_policy: true,
        except: vec!["198.51.100.0/24".parse().unwrap()],
    };
    Cluster::with(settings)
}

fn plain(cluster: &Cluster, value: Option<&str>) {
    let annotations = value.map(|value| json!({LABEL: value}));
    let change = json!({"metadata": {"annotations": annotations}});
    cluster.api.create("sandboxes", sandbox(change));
}

fn label(cluster: &Cluster) -> Option<String> {
    let pod = cluster.api.get("pods", NS, "s").expect("the Pod exists");
    let label = pod["metadata"]["labels"][LABEL].as_str();
    label.map(str::to_owned)
}

#[tokio::test]
async fn a_sandbox_without_a_template_gets_the_namespaces_policy_before_its_pod() {
    let cluster = isolating();
    plain(&cluster, None);
    cluster.sandbox_passes().await;
    let writes = cluster.writes();
    let at = |what: &str| writes.iter().position(|write| write == what);
    assert!(at("create networkpolicies").unwrap() < at("create pods").unwrap());
    let policy = cluster.api.get("networkpolicies", NS, DEFAULT).unwrap();
    assert_eq!(policy["metadata"].get("ownerReferences"), None);
    assert_eq!(
        policy["spec"]["podSelector"]["matchLabels"],
        json!({LABEL: "default"})
    );
    let blocked = &policy["spec"]["egress"][0]["to"][0]["ipBlock"]["except"];
    assert!(
        blocked
            .as_array()
            .unwrap()
            .contains(&json!("198.51.100.0/24"))
    );
    assert_eq!(label(&cluster).as_deref(), Some("default"));
    let pod = cluster.api.get("pods", NS, "s").unwrap();
    assert_eq!(pod["spec"]["dnsPolicy"], "None");
    assert_eq!(
        pod["spec"].get("automountServiceAccountToken"),
        None,
        "as upstream"
    );
    cluster.settle().await;
    let other = sandbox(json!({"metadata": {"name": "other"}}));
    cluster.api.create("sandboxes", other);
    cluster.settle().await;
    assert_eq!(
        cluster.api.list("networkpolicies").len(),
        1,
        "one per namespace"
    );
}

#[tokio::test]
async fn without_the_flag_a_sandbox_is_as_upstreams() {
    let mut settings = settings();
    settings.extensions = false;
    let cluster = Cluster::with(settings);
    plain(&cluster, None);
    cluster.settle().await;
    assert!(cluster.api.list("networkpolicies").is_empty());
    assert_eq!(label(&cluster), None);
}

#[tokio::test]
async fn a_sandbox_can_opt_out_of_the_default_policy_and_back_in() {
    let cluster = isolating();
    plain(&cluster, Some("none"));
    cluster.settle().await;
    assert!(cluster.api.list("networkpolicies").is_empty());
    assert_eq!(label(&cluster).as_deref(), Some("none"));
    let annotation = |value: Value| json!({"metadata": {"annotations": {LABEL: value}}});
    for (value, expected) in [
        (json!("default"), "default"),
        (json!("none"), "none"),
        (json!("of"), "default"),
    ] {
        cluster.api.edit("sandboxes", NS, "s", &annotation(value));
        cluster.settle().await;
        assert_eq!(label(&cluster).as_deref(), Some(expected));
        let policies = cluster.api.list("networkpolicies");
        assert_eq!(policies.iter().map(name).collect::<Vec<_>>(), [DEFAULT]);
    }
}

#[tokio::test]
async fn a_foreign_policy_of_that_name_keeps_the_pod_from_being_made() {
    let cluster = isolating();
    cluster.api.create("networkpolicies", foreign(DEFAULT));
    plain(&cluster, None);
    cluster.sandbox_passes().await;
    cluster.sandbox_passes().await;
    assert!(cluster.api.get("pods", NS, "s").is_none());
    let (status, reason, message) =
        crate::cluster::condition_of(&cluster.get_sandbox("s"), "Ready").unwrap();
    assert_eq!((&*status, &*reason), ("False", "ReconcilerError"));
    assert!(
        message.contains(DEFAULT) && message.contains("Delete"),
        "{message}"
    );
    cluster.api.remove("networkpolicies", NS, DEFAULT);
    cluster.settle().await;
    assert_eq!(label(&cluster).as_deref(), Some("default"));
}

#[tokio::test]
async fn the_default_policy_is_restored() {
    let cluster = isolating();
    plain(&cluster, None);
    cluster.settle().await;
    let policy = || cluster.api.get("networkpolicies", NS, DEFAULT);
    let wanted = policy().unwrap()["spec"].clone();
    let open = json!({"spec": {"egress": [{}]}});
    cluster.api.edit("networkpolicies", NS, DEFAULT, &open);
    cluster.settle().await;
    assert_eq!(policy().unwrap()["spec"], wanted);
    let queue = &cluster.context.queues.sandboxes;
    waiting(queue).await;
    cluster.api.remove("networkpolicies", NS, DEFAULT);
    cluster.sync();
    assert_eq!(waiting(queue).await, ["s"], "woken by its end");
    cluster.settle().await;
    assert_eq!(policy().unwrap()["spec"], wanted);
}

#[tokio::test]
async fn a_pod_created_before_the_flag_keeps_its_network_until_it_is_recreated() {
    let mut before = settings();
    before.extensions = false;
    let cluster = Cluster::with(before);
    plain(&cluster, None);
    cluster.settle().await;
    let mut after = cluster.context.settings.clone();
    after.network.default_policy = true;
    let context = crate::cluster::context(&cluster.api, after, Duration::from_secs(20));
    let cluster = Cluster {
        api: cluster.api.clone(),
        context: Arc::clone(&context),
    };
    cluster.settle().await;
    assert_eq!(label(&cluster), None);
    cluster.api.remove("pods", NS, "s");
    cluster.settle().await;
    assert_eq!(label(&cluster).as_deref(), Some("default"));
}

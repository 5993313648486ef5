//! Tests that large objects, which the caches hold as outlines only, are served like others.

use serde_json::{Value, json};
use torpor_controller::outline::is_outline;

use crate::{
    cluster::{Cluster, name},
    objects::{NS, torpor_sandbox},
    world::World,
};

fn large() -> String {
    "x".repeat(40_000)
}

fn large_pod() -> Value {
    json!({"spec": {"podTemplate": {"spec": {"containers": [{
        "name": "c", "image": "img", "env": [{"name": "A", "value": large()}],
    }]}}}})
}

#[tokio::test]
async fn a_large_sandbox_gets_the_pod_that_it_asks_for() {
    let world = World::new();
    world.api.create("sandboxes", torpor_sandbox(large_pod()));
    world.sync();
    let cached = world.context.caches.sandboxes.get(NS, "s").unwrap();
    assert!(is_outline(&*cached));
    let context = std::sync::Arc::clone(&world.context);
    torpor_controller::sandbox::reconcile(cached, context)
        .await
        .unwrap();
    let pod = world.pod().unwrap();
    assert_eq!(pod["spec"]["containers"][0]["env"][0]["value"], large());
    // The cache holds the written status, but not the rest of the response.
    let cached = world.context.caches.sandboxes.get(NS, "s").unwrap();
    assert!(is_outline(&*cached) && cached.status.is_some());
}

#[tokio::test]
async fn claims_and_pools_of_a_large_template_are_served_like_others() {
    let cluster = Cluster::new();
    cluster.template(large_pod());
    cluster.pool(2, json!({"spec": {"updateStrategy": {"type": "Recreate"}}}));
    cluster.settle().await;
    let before = cluster.members();
    assert_eq!(before.len(), 2);
    let template = cluster.context.caches.templates.get(NS, "t").unwrap();
    assert!(is_outline(&*template));
    let label = json!({"metadata": {"labels": {"sandbox.users.io/tier": "a"}}});
    let metadata = &label["metadata"];
    cluster.claim("c", json!({"spec": {"additionalPodMetadata": metadata}}));
    cluster.settle().await;
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
    let held = cluster.held_by("c").unwrap();
    assert!(before.contains(&held), "a member is taken");
    let sandbox = cluster.get_sandbox(&held);
    let template = &sandbox["spec"]["podTemplate"];
    assert_eq!(template["metadata"]["labels"]["sandbox.users.io/tier"], "a");
    assert_eq!(
        template["spec"]["containers"][0]["env"][0]["value"],
        large()
    );
    let pod = cluster.api.get("pods", NS, &held).unwrap();
    assert_eq!(pod["metadata"]["labels"]["sandbox.users.io/tier"], "a");
    // A change without a meaning replaces no member; one with a meaning replaces all.
    let members = cluster.members();
    let spelling = json!({"spec": {"podTemplate": {"metadata": {"labels": {"a": "b"}}}}});
    cluster.edit("sandboxtemplates", "t", &spelling);
    cluster.settle().await;
    assert_eq!(cluster.members(), members);
    let mut other = large_pod();
    other["spec"]["podTemplate"]["spec"]["containers"][0]["image"] = "new".into();
    cluster.edit("sandboxtemplates", "t", &other);
    cluster.settle().await;
    assert!(
        cluster
            .members()
            .iter()
            .all(|member| !members.contains(member))
    );
}

#[tokio::test]
async fn a_large_claim_starts_cold_with_all_its_settings() {
    let cluster = Cluster::new();
    cluster.template(json!({"spec": {"envVarsInjectionPolicy": "Allowed"}}));
    cluster.pool(0, json!({}));
    let env = json!([{"name": "A", "value": large()}]);
    cluster.claim("c", json!({"spec": {"env": env}}));
    cluster.settle().await;
    let claim = cluster.context.caches.claims.get(NS, "c").unwrap();
    assert!(is_outline(&*claim));
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
    let pod = cluster.api.get("pods", NS, "c").unwrap();
    assert_eq!(pod["spec"]["containers"][0]["env"], env);
}

#[tokio::test]
async fn the_policy_of_a_template_with_many_rules_is_created_and_restored() {
    let rule = |port: usize| json!({"ports": [{"port": port, "protocol": "TCP"}]});
    let rules: Vec<Value> = (1..2000).map(rule).collect();
    let cluster = Cluster::new();
    cluster.new_template(json!({"spec": {"networkPolicy": {"egress": rules}}}));
    cluster.pool(1, json!({}));
    cluster.settle().await;
    assert_eq!(cluster.members().len(), 1);
    let policies = cluster.api.list("networkpolicies");
    assert_eq!(
        policies.iter().map(name).collect::<Vec<_>>(),
        ["t-network-policy"]
    );
    assert_eq!(policies[0]["spec"]["egress"], json!(rules));
    let mut loosened = rules.clone();
    loosened[0] = json!({});
    let opened = json!({"spec": {"egress": loosened}});
    cluster
        .api
        .edit("networkpolicies", NS, "t-network-policy", &opened);
    cluster.settle().await;
    let policy = cluster.api.get("networkpolicies", NS, "t-network-policy");
    assert_eq!(policy.unwrap()["spec"]["egress"], json!(rules));
}

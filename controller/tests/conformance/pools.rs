//! Tests of templates and pools: upstream's cases of filling, rollout, replacement and scaling.

use std::time::Duration;

use rstest::rstest;
use serde_json::{Value, json};
use torpor_controller::settings::{PoolSettings, Settings};

use crate::{
    apiserver::{Fault, FaultAnswer},
    cluster::{Cluster, merged, name, settings},
    objects::{NS, condition, runtime_class, sandbox_node},
};

const POOL: &str = "agents.x-k8s.io/warm-pool-sandbox";
const SAFE_TO_EVICT: &str = "cluster-autoscaler.kubernetes.io/safe-to-evict";

fn strategy(type_: &str) -> Value {
    json!({"spec": {"updateStrategy": {"type": type_}}})
}

fn long_ago() -> Value {
    json!({"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}})
}

fn image(name: &str) -> Value {
    json!({"spec": {"podTemplate": {"spec": {"containers": [{"name": "c", "image": name}]}}}})
}

// Filling.

#[tokio::test]
async fn a_pool_is_filled_with_ready_sandboxes_and_reports_their_number() {
    let cluster = Cluster::filled(3, json!({})).await;
    assert_eq!(cluster.members().len(), 3);
    let hash = torpor_api::name_hash("p");
    let mut status = cluster.get_pool("p")["status"].clone();
    status.as_object_mut().unwrap().remove("conditions");
    assert_eq!(
        status,
        json!({
            "observedGeneration": 1, "replicas": 3, "readyReplicas": 3,
            "selector": format!("{POOL}={hash}"),
        })
    );
    let text = cluster.context.metrics.text().unwrap();
    for line in [
        r#"agent_sandbox_warmpool_size{namespace="ns",warmpool_name="p",sandbox_template="t",sandbox_status="ready"} 3"#,
        r#"agent_sandboxes{namespace="ns",ready_condition="true",expired="false",launch_type="warm",sandbox_template="t",owned_by="SandboxWarmPool",created_by="controller",operating_mode="Running"} 3"#,
    ] {
        assert!(text.contains(line), "{line}\nnot in\n{text}");
    }
    for sandbox in cluster.api.list("sandboxes") {
        assert!(name(&sandbox).starts_with("p-"));
        assert_eq!(sandbox["metadata"]["labels"][POOL], hash.as_str());
        let pod = cluster.api.get("pods", NS, name(&sandbox)).unwrap();
        assert_eq!(pod["metadata"]["labels"][POOL], hash.as_str());
        assert_eq!(pod["metadata"]["annotations"][SAFE_TO_EVICT], "true");
        assert_eq!(pod["spec"]["automountServiceAccountToken"], false);
    }
}

#[tokio::test]
async fn the_safe_to_evict_annotation_follows_the_setting_and_the_template() {
    let mut settings = settings();
    settings.pools.eviction = false;
    let without = Cluster::with(settings);
    without.template(json!({}));
    without.pool(1, json!({}));
    without.settle().await;
    let with = Cluster::new();
    with.template(
        json!({"spec": {"podTemplate": {"metadata": {"annotations": {SAFE_TO_EVICT: "false"}}}}}),
    );
    with.pool(1, json!({}));
    with.settle().await;
    let annotation = |cluster: &Cluster| {
        cluster.api.list("pods")[0]["metadata"]["annotations"][SAFE_TO_EVICT].clone()
    };
    assert_eq!(
        (annotation(&without), annotation(&with)),
        (Value::Null, json!("false"))
    );
}

#[tokio::test]
async fn a_pool_follows_its_replicas_up_and_down() {
    let cluster = Cluster::filled(2, json!({})).await;
    for replicas in [5, 1, 0, 2] {
        let scale = json!({"spec": {"replicas": replicas}});
        cluster.edit("sandboxwarmpools", "p", &scale);
        cluster.settle().await;
        assert_eq!(cluster.members().len(), replicas);
        assert_eq!(cluster.get_pool("p")["status"]["replicas"], replicas);
    }
}

#[tokio::test]
async fn a_pool_without_its_template_waits_for_it() {
    let cluster = Cluster::new();
    cluster.pool(2, json!({}));
    let again = cluster.pool_pass("p").await.unwrap();
    assert_eq!(again.unwrap().as_secs(), 60);
    assert_eq!(cluster.get_pool("p")["status"]["replicas"], 0);
    cluster.template(json!({}));
    cluster.settle().await;
    assert_eq!(cluster.members().len(), 2);
}

#[tokio::test]
async fn a_pool_does_not_overshoot_while_the_watch_is_behind() {
    let cluster = Cluster::new();
    cluster.template(json!({}));
    cluster.pool(5, json!({}));
    cluster.sync();
    for _ in 0..4 {
        cluster.stale_pool_pass("p").await.unwrap();
    }
    assert_eq!(cluster.members().len(), 5);
    assert_eq!(cluster.get_pool("p")["status"]["replicas"], 5);
}

#[tokio::test]
async fn a_member_created_and_deleted_in_a_gap_of_the_watch_is_replaced_eventually() {
    let cluster = Cluster::new();
    cluster.template(json!({}));
    cluster.pool(1, json!({}));
    cluster.sync();
    cluster.stale_pool_pass("p").await.unwrap();
    let lost = cluster.members().remove(0);
    cluster.api.remove("sandboxes", NS, &lost);
    // No event reports the loss, so the pass itself schedules the next look.
    let again = cluster.pool_pass("p").await.unwrap().unwrap();
    assert!(cluster.members().is_empty(), "it may still be there");
    assert!((295..=300).contains(&again.as_secs()), "{again:?}");
}

#[rstest]
#[case(FaultAnswer::LoseAnswer)]
#[case(FaultAnswer::Refuse(500))]
#[case(FaultAnswer::Refuse(403))]
#[tokio::test]
async fn a_create_that_fails_or_has_no_answer_neither_overshoots_nor_leaves_a_gap(
    #[case] answer: FaultAnswer,
) {
    let cluster = Cluster::new().impatient();
    cluster.template(json!({}));
    cluster.pool(4, json!({}));
    cluster.sync();
    for _ in 0..3 {
        let (verb, kind) = ("create", "sandboxes");
        cluster.api.fail(Fault { verb, kind, answer });
        cluster.stale_pool_pass("p").await.unwrap_err();
        assert!(cluster.members().len() <= 4);
    }
    for _ in 0..3 {
        let _ = cluster.stale_pool_pass("p").await;
        assert!(cluster.members().len() <= 4);
    }
    cluster.settle().await;
    assert_eq!(cluster.members().len(), 4);
}

/// The change does not requeue the pool, which would keep its surplus without a retry.
#[tokio::test]
async fn a_surplus_member_that_changed_meanwhile_is_deleted_by_a_later_pass() {
    let cluster = Cluster::filled(1, json!({})).await;
    let none = json!({"spec": {"replicas": 0}});
    cluster.edit("sandboxwarmpools", "p", &none);
    cluster.sync();
    let note = json!({"metadata": {"annotations": {"note": "x"}}});
    cluster.edit("sandboxes", &cluster.members()[0], &note);
    let again = cluster.stale_pool_pass("p").await.unwrap();
    assert_eq!(cluster.members().len(), 1);
    assert_eq!(again, Some(Duration::from_secs(1)));
    cluster.pool_pass("p").await.unwrap();
    assert!(cluster.members().is_empty());
}

#[tokio::test]
async fn a_restarted_controller_does_not_overshoot() {
    let cluster = Cluster::new();
    cluster.template(json!({}));
    cluster.pool(5, json!({}));
    cluster.pool_pass("p").await.unwrap();
    let next = cluster.another();
    next.pool_pass("p").await.unwrap();
    assert_eq!(cluster.members().len(), 5);
}

#[tokio::test]
async fn a_refill_can_be_limited_to_a_rate_and_delayed() {
    let limited = |pools: PoolSettings| {
        let settings = Settings {
            pools,
            ..settings()
        };
        let cluster = Cluster::with(settings);
        cluster.template(json!({}));
        cluster.pool(5, json!({}));
        cluster
    };
    let slow = limited(PoolSettings {
        max_refill_rate: 2.0,
        ..settings().pools
    });
    let again = slow.pool_pass("p").await.unwrap().unwrap();
    assert_eq!(slow.members().len(), 2);
    assert!(again.as_millis() <= 500, "{again:?}");
    let patient = limited(PoolSettings {
        replenish_delay: Duration::from_secs(600),
        ..settings().pools
    });
    patient.settle().await;
    patient.claim("c", json!({}));
    patient.settle().await;
    assert_eq!(patient.members().len(), 4, "it is not refilled yet");
    let again = patient.pool_pass("p").await.unwrap().unwrap();
    assert!((590..=600).contains(&again.as_secs()), "{again:?}");
}

// Rollout.

#[rstest]
#[case::by_default(json!({}), image("new"), false)]
#[case::on_replenish(strategy("OnReplenish"), image("new"), false)]
#[case::recreate(strategy("Recreate"), image("new"), true)]
#[case::recreate_but_only_metadata(strategy("Recreate"), json!({"spec": {"podTemplate": {"metadata": {"labels": {"a": "b"}}}}}), false)]
#[tokio::test]
async fn a_new_template_replaces_members_by_the_strategy(
    #[case] pool: Value,
    #[case] change: Value,
    #[case] replaced: bool,
) {
    let cluster = Cluster::filled(3, pool).await;
    let before = cluster.members();
    cluster.edit("sandboxtemplates", "t", &change);
    cluster.settle().await;
    let after = cluster.members();
    assert_eq!(after.len(), 3);
    assert_eq!(after.iter().any(|name| before.contains(name)), !replaced);
    // New members have the new template in any case.
    cluster.claim("c", json!({}));
    cluster.settle().await;
    let made = cluster
        .members()
        .into_iter()
        .find(|name| !after.contains(name))
        .unwrap();
    let template = &cluster.get_sandbox(&made)["spec"]["podTemplate"];
    for (key, value) in change["spec"]["podTemplate"].as_object().unwrap() {
        if key == "metadata" {
            assert_eq!(template["metadata"]["labels"], value["labels"]);
        } else {
            assert_eq!(template["spec"]["containers"], value["containers"]);
        }
    }
}

#[tokio::test]
async fn a_switch_to_another_template_is_rolled_over_under_recreate() {
    let cluster = Cluster::filled(2, strategy("Recreate")).await;
    let before = cluster.members();
    cluster.template(json!({"metadata": {"name": "u"}}));
    let switch = json!({"spec": {"sandboxTemplateRef": {"name": "u"}}});
    cluster.edit("sandboxwarmpools", "p", &switch);
    cluster.settle().await;
    let after = cluster.members();
    assert!(after.len() == 2 && after.iter().all(|name| !before.contains(name)));
}

#[tokio::test]
async fn pools_of_other_templates_are_left_alone() {
    let cluster = Cluster::filled(2, strategy("Recreate")).await;
    cluster.template(json!({"metadata": {"name": "u"}}));
    let other = json!({"metadata": {"name": "q"}, "spec": {
        "sandboxTemplateRef": {"name": "u"}, "updateStrategy": {"type": "Recreate"},
    }});
    cluster.pool(2, other);
    cluster.settle().await;
    let before = cluster.controlled_by(&cluster.get_pool("q"));
    cluster.edit("sandboxtemplates", "t", &image("new"));
    cluster.settle().await;
    assert_eq!(cluster.controlled_by(&cluster.get_pool("q")), before);
}

// Replacement.

#[tokio::test]
async fn members_deleted_by_a_user_are_replaced() {
    let cluster = Cluster::filled(3, json!({})).await;
    let gone = cluster.members().remove(0);
    cluster.api.delete("sandboxes", NS, &gone);
    cluster.settle().await;
    let now = cluster.members();
    assert!(now.len() == 3 && !now.contains(&gone));
}

#[tokio::test]
async fn a_stuck_member_is_replaced() {
    let cluster = Cluster::new();
    cluster.template(json!({}));
    cluster.pool(1, json!({}));
    cluster.pool_pass("p").await.unwrap();
    let stuck = cluster.members().remove(0);
    cluster.api.edit("sandboxes", NS, &stuck, &long_ago());
    cluster.pool_pass("p").await.unwrap();
    assert!(cluster.api.get("sandboxes", NS, &stuck).is_none());
    let next = cluster.members();
    assert!(next.len() <= 1 && !next.contains(&stuck));
}

/// Returns conditions of a Sandbox whose Pod is scheduled, or not for a reason.
fn scheduling(scheduled: &str, reason: &str, message: &str, ready: &str) -> Value {
    json!({"status": {"conditions": [
        condition("PodScheduled", scheduled, reason, message),
        condition("Ready", ready, "R", ""),
    ]}})
}

/// Returns a cluster with a pool whose only member has long been unscheduled for a reason, and the
/// member's name. Two passes have kept the member.
pub(crate) async fn pool_with_unscheduled_member(reason: &str, message: &str) -> (Cluster, String) {
    let cluster = Cluster::new();
    cluster.template(json!({}));
    cluster.pool(1, json!({}));
    cluster.pool_pass("p").await.unwrap();
    let member = cluster.members().remove(0);
    cluster.api.edit("sandboxes", NS, &member, &long_ago());
    let unscheduled = scheduling("False", reason, message, "False");
    cluster.api.edit("sandboxes", NS, &member, &unscheduled);
    for _ in 0..2 {
        let again = cluster.pool_pass("p").await.unwrap();
        assert_eq!(again.unwrap().as_secs(), 60);
    }
    assert_eq!(cluster.members(), std::slice::from_ref(&member));
    (cluster, member)
}

/// Runs a pass over a pool whose member has been scheduled and is Ready.
pub(crate) async fn schedule_member(cluster: &Cluster, member: &str) {
    let ready = scheduling("True", "PodScheduled", "", "True");
    cluster.api.edit("sandboxes", NS, member, &ready);
    cluster.pool_pass("p").await.unwrap();
}

#[tokio::test]
async fn a_pool_larger_than_the_cluster_reports_it_once_and_reports_its_recovery() {
    let (cluster, member) =
        pool_with_unscheduled_member("Unschedulable", "0/3 nodes are available").await;
    schedule_member(&cluster, &member).await;
    let reasons: Vec<String> = cluster
        .events()
        .into_iter()
        .map(|(reason, _)| reason)
        .collect();
    assert_eq!(reasons, ["WarmPoolNotProgressing", "WarmPoolProgressing"]);
    let note = &cluster.events()[0].1;
    for words in ["lower spec.replicas", "0/3 nodes are available"] {
        assert!(note.contains(words), "{note}");
    }
}

/// Returns a pool whose only member has long been waiting because its Pod is refused.
async fn refused() -> (Cluster, String) {
    let cluster = Cluster::new();
    cluster.template(json!({}));
    cluster.pool(1, json!({}));
    cluster.pool_pass("p").await.unwrap();
    let member = cluster.members().remove(0);
    cluster.api.edit("sandboxes", NS, &member, &long_ago());
    let (verb, kind) = ("create", "pods");
    let answer = FaultAnswer::Refuse(403);
    cluster.api.fail(Fault { verb, kind, answer });
    cluster.sandbox_passes().await;
    let mut all = cluster.get_sandbox(&member)["status"]["conditions"].clone();
    for condition in all.as_array_mut().unwrap() {
        condition["lastTransitionTime"] = "2026-01-01T00:00:00Z".into();
    }
    let refused = json!({"status": {"conditions": all}});
    cluster.api.edit("sandboxes", NS, &member, &refused);
    (cluster, member)
}

#[tokio::test]
async fn a_pool_larger_than_its_quota_keeps_its_members_and_reports_the_refusal() {
    let (cluster, member) = refused().await;
    for _ in 0..2 {
        let again = cluster.pool_pass("p").await.unwrap();
        assert_eq!(again.unwrap().as_secs(), 60);
    }
    let refusal = format!("create pods {member}: made to fail");
    let (reason, note) = cluster.events().remove(0);
    assert_eq!(reason, "WarmPoolNotProgressing");
    for words in ["a quota", "lower spec.replicas", &refusal] {
        assert!(note.contains(words), "{note}");
    }
    // The quota has room again: the same member gets its Pod.
    cluster.settle().await;
    assert_eq!(cluster.members(), [member]);
    let reasons: Vec<String> = cluster.events().into_iter().map(|event| event.0).collect();
    assert_eq!(reasons, ["WarmPoolNotProgressing", "WarmPoolProgressing"]);
}

#[tokio::test]
async fn a_template_change_is_not_reported_as_progress_too_early() {
    let (cluster, refused) = refused().await;
    cluster.pool_pass("p").await.unwrap();
    cluster.edit("sandboxtemplates", "t", &image("new"));
    for _ in 0..3 {
        cluster.pool_pass("p").await.unwrap();
    }
    let others = cluster.members();
    assert!(others.len() == 1 && !others.contains(&refused));
    let reasons = || -> Vec<String> {
        let events = cluster.events().into_iter();
        events.map(|(reason, _)| reason).collect()
    };
    assert_eq!(reasons(), ["WarmPoolNotProgressing"]);
    cluster.settle().await;
    assert_eq!(reasons(), ["WarmPoolNotProgressing", "WarmPoolProgressing"]);
}

#[tokio::test]
async fn a_pool_whose_template_names_no_runtime_class_gets_one_recommendation() {
    let cluster = Cluster::new();
    cluster.api.create("runtimeclasses", runtime_class());
    cluster.api.create("sandboxnodes", sandbox_node("n1"));
    cluster.template(json!({}));
    cluster.pool(1, json!({}));
    let named = json!({"spec": {"podTemplate": {"spec": {"runtimeClassName": "torpor"}}}});
    cluster.template(merged(json!({"metadata": {"name": "u"}}), &named));
    let other = json!({"metadata": {"name": "q"}, "spec": {"sandboxTemplateRef": {"name": "u"}}});
    cluster.pool(1, other);
    cluster.settle().await;
    cluster.edit("sandboxwarmpools", "p", &json!({"spec": {"replicas": 2}}));
    cluster.settle().await;
    let mut events = cluster.api.list("events");
    events.retain(|event| event["regarding"]["kind"] == "SandboxWarmPool");
    assert_eq!(events.len(), 1, "{events:#?}");
    assert_eq!(events[0]["reason"], "RuntimeNotNamed");
    assert_eq!(events[0]["regarding"]["name"], "p");
    let note = events[0]["note"].as_str().unwrap();
    assert!(note.contains("runtimeClassName to \"torpor\""), "{note}");
}

#[tokio::test]
async fn orphaned_members_are_adopted_again_or_deleted() {
    let cluster = Cluster::filled(2, json!({})).await;
    let orphan = cluster.members().remove(0);
    let nobodys = json!({"metadata": {"ownerReferences": null}});
    cluster.api.edit("sandboxes", NS, &orphan, &nobodys);
    cluster.settle().await;
    // The orphan was adopted again, or deleted if a new member was faster: never three.
    assert_eq!(cluster.members().len(), 2);
    assert_eq!(cluster.api.list("sandboxes").len(), 2);
    assert!(cluster.members().contains(&orphan));
}

#[tokio::test]
async fn a_deleted_pool_deletes_its_members() {
    let cluster = Cluster::filled(2, json!({})).await;
    cluster.api.delete("sandboxwarmpools", NS, "p");
    cluster.settle().await;
    assert!(cluster.api.list("sandboxes").is_empty());
}

#[tokio::test]
async fn frequent_status_changes_are_written_rarely_and_the_last_one_always() {
    let mut settings = settings();
    settings.pools.status_interval = Duration::from_secs(600);
    let cluster = Cluster::with(settings);
    cluster.template(json!({}));
    cluster.pool(3, json!({}));
    cluster.pool_pass("p").await.unwrap();
    let one_by_one = cluster.api.list("sandboxes");
    cluster.writes();
    for sandbox in &one_by_one[..2] {
        let ready = json!({"status": {"conditions": [condition("Ready", "True", "R", "")]}});
        cluster.api.edit("sandboxes", NS, name(sandbox), &ready);
        let fresh = json!({"metadata": {"creationTimestamp": jiff::Timestamp::now().to_string()}});
        cluster
            .api
            .edit("sandboxes", NS, name(&one_by_one[2]), &fresh);
        cluster.pool_pass("p").await.unwrap();
    }
    assert!(cluster.writes().is_empty());
    let ready = json!({"status": {"conditions": [condition("Ready", "True", "R", "")]}});
    cluster
        .api
        .edit("sandboxes", NS, name(&one_by_one[2]), &ready);
    cluster.pool_pass("p").await.unwrap();
    assert_eq!(cluster.get_pool("p")["status"]["readyReplicas"], 3);
}

// Templates.

#[tokio::test]
async fn the_network_policy_follows_the_template() {
    let cluster = Cluster::new();
    cluster.template(json!({}));
    cluster.settle().await;
    let policy = || cluster.api.get("networkpolicies", NS, "t-network-policy");
    let hash = torpor_api::name_hash("t");
    let label = "agents.x-k8s.io/sandbox-template-ref-hash";
    let template = cluster.api.get("sandboxtemplates", NS, "t").unwrap();
    assert_eq!(template["metadata"]["labels"][label], hash.as_str());
    let spec = policy().unwrap()["spec"].clone();
    assert_eq!(spec["podSelector"]["matchLabels"][label], hash.as_str());
    assert_eq!(
        spec["ingress"][0]["from"][0]["podSelector"]["matchLabels"]["app"],
        "sandbox-router"
    );
    let own = json!({"spec": {"networkPolicy": {"egress": [{}]}}});
    cluster.edit("sandboxtemplates", "t", &own);
    cluster.settle().await;
    assert_eq!(policy().unwrap()["spec"]["egress"], json!([{}]));
    // A user's change is reverted.
    cluster.api.edit(
        "networkpolicies",
        NS,
        "t-network-policy",
        &json!({"spec": {"egress": []}}),
    );
    cluster.settle().await;
    assert_eq!(policy().unwrap()["spec"]["egress"], json!([{}]));
    let unmanaged = json!({"spec": {"networkPolicyManagement": "Unmanaged"}});
    cluster.edit("sandboxtemplates", "t", &unmanaged);
    cluster.settle().await;
    assert!(policy().is_none());
}

#[tokio::test]
async fn a_foreign_network_policy_is_not_touched() {
    let cluster = Cluster::new();
    let foreign = json!({
        "metadata": {"name": "t-network-policy", "namespace": NS}, "spec": {"podSelector": {}},
    });
    cluster.api.create("networkpolicies", foreign);
    cluster.template(json!({}));
    let error = cluster.template_pass("t").await.unwrap_err();
    assert_eq!(error.reason(), "NotOwned");
    let policy = cluster
        .api
        .get("networkpolicies", NS, "t-network-policy")
        .unwrap();
    assert_eq!(policy["spec"], json!({"podSelector": {}}));
}

#[tokio::test]
async fn a_foreign_network_policy_is_reported_once_with_a_remedy() {
    let cluster = Cluster::new();
    let foreign = json!({
        "metadata": {"name": "t-network-policy", "namespace": NS}, "spec": {"podSelector": {}},
    });
    cluster.api.create("networkpolicies", foreign.clone());
    cluster.template(json!({}));
    for _ in 0..3 {
        cluster.template_pass("t").await.unwrap_err();
    }
    let events = cluster.api.list("events");
    assert_eq!(events.len(), 1, "{events:#?}");
    let about = (
        &events[0]["regarding"]["kind"],
        &events[0]["regarding"]["name"],
    );
    assert_eq!(about, (&json!("SandboxTemplate"), &json!("t")));
    assert_eq!(events[0]["type"], "Warning");
    assert_eq!(events[0]["reason"], "NetworkPolicyNotOwned");
    let note = events[0]["note"].as_str().unwrap();
    for words in ["\"t-network-policy\"", "networkPolicyManagement: Unmanaged"] {
        assert!(note.contains(words), "{note}");
    }
    // The policy was deleted and is created again.
    cluster
        .api
        .remove("networkpolicies", NS, "t-network-policy");
    cluster.template_pass("t").await.unwrap();
    cluster
        .api
        .remove("networkpolicies", NS, "t-network-policy");
    cluster.api.create("networkpolicies", foreign);
    cluster.template_pass("t").await.unwrap_err();
    assert_eq!(cluster.api.list("events").len(), 2);
}

//! Tests of claims without a pool member: upstream's cases for cold Sandboxes, refusals and
//! metadata.

use std::sync::Arc;

use rstest::rstest;
use serde_json::{Value, json};
use torpor_controller::{cache::Change, queue::Queue, watches::extensions};

use crate::{
    apiserver::{Fault, FaultAnswer},
    cluster::{Cluster, name},
    objects::NS,
};

/// Returns a cluster with a template, an empty pool of it and a claim "c".
pub(crate) fn cold(claim: Value) -> Cluster {
    let cluster = Cluster::new();
    cluster.template(json!({}));
    cluster.pool(0, json!({}));
    cluster.claim("c", claim);
    cluster
}

/// Sorts the first two writes of a claim, which are concurrent.
pub(crate) fn side_by_side(mut writes: Vec<String>) -> Vec<String> {
    if let Some(first) = writes.get_mut(..2) {
        first.sort();
    }
    writes
}

#[tokio::test]
async fn a_claim_that_finds_no_member_gets_a_sandbox_of_its_own_name() {
    let cluster = cold(json!({}));
    cluster.claim_pass("c").await.unwrap();
    assert_eq!(
        side_by_side(cluster.writes()),
        [
            "create sandboxes",
            "patch sandboxclaims",
            "patch status sandboxclaims"
        ]
    );
    cluster.assert_claim_ready("c", "False", "SandboxNotReady", "Sandbox is not ready");
    assert_eq!(cluster.held_by("c").as_deref(), Some("c"));
    cluster.settle().await;
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
    let claim = cluster.get_claim("c");
    assert_eq!(
        claim["status"]["sandbox"],
        json!({"name": "c", "podIPs": ["10.0.0.1"]})
    );
    let labels = &cluster.get_sandbox("c")["metadata"]["labels"];
    assert_eq!(labels["agents.x-k8s.io/launch-type"], "cold");
    assert_eq!(
        labels["agents.x-k8s.io/claim-uid"],
        claim["metadata"]["uid"]
    );
    let pod = cluster.api.get("pods", NS, "c").unwrap();
    assert_eq!(pod["spec"]["automountServiceAccountToken"], false);
    let created = ("SandboxProvisioned".into(), "Created Sandbox \"c\"".into());
    assert!(cluster.events().contains(&created));
}

#[tokio::test]
async fn a_create_conflict_with_an_invisible_sandbox_is_retried_soon() {
    let cluster = cold(json!({}));
    let (verb, kind) = ("create", "sandboxes");
    let answer = FaultAnswer::Taken;
    cluster.api.fail(Fault { verb, kind, answer });
    let again = cluster.claim_pass("c").await.unwrap();
    assert_eq!(again.unwrap().as_millis(), 200);
    assert_eq!(cluster.api.take_reads(), ["sandboxes c"]);
    let pending = "Sandbox already created; waiting for cache to converge";
    cluster.assert_claim_ready("c", "False", "SandboxCreatePending", pending);
    cluster.settle().await;
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
    assert_eq!(cluster.held_by("c").as_deref(), Some("c"));
}

#[tokio::test]
async fn the_time_of_first_readiness_is_kept_until_it_is_written() {
    let cluster = cold(json!({}));
    let fail = || {
        let (verb, kind) = ("patch", "sandboxclaims");
        let answer = FaultAnswer::Refuse(500);
        cluster.api.fail(Fault { verb, kind, answer });
    };
    let ready_at = || {
        let claim = cluster.get_claim("c");
        let at = &claim["metadata"]["annotations"]["agents.x-k8s.io/claim-first-ready-at"];
        at.as_str().map(str::to_owned)
    };
    cluster.claim_pass("c").await.unwrap();
    cluster.sandbox_passes().await;
    cluster.kubelets();
    cluster.sandbox_passes().await;
    let before = jiff::Timestamp::now();
    fail();
    let again = cluster.claim_pass("c").await.unwrap();
    let after = jiff::Timestamp::now();
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
    assert_eq!(again.unwrap().as_secs(), 5);
    assert_eq!(ready_at(), None);
    // The next write fails, too; the one after it succeeds.
    fail();
    cluster.claim_pass("c").await.unwrap();
    assert_eq!(ready_at(), None);
    cluster.claim_pass("c").await.unwrap();
    let at: jiff::Timestamp = ready_at().unwrap().parse().unwrap();
    assert!((before..=after).contains(&at), "{at} is not when it was");
}

#[tokio::test]
async fn the_times_of_observation_and_first_readiness_are_written_once() {
    let cluster = cold(json!({}));
    cluster.settle().await;
    let annotations = cluster.get_claim("c")["metadata"]["annotations"].clone();
    for key in ["controller-first-observed-at", "claim-first-ready-at"] {
        let time = annotations[format!("agents.x-k8s.io/{key}")].as_str();
        time.unwrap().parse::<jiff::Timestamp>().unwrap();
    }
    assert_eq!(annotations["agents.x-k8s.io/sandbox-name"], "c");
    let text = cluster.context.metrics.text().unwrap();
    for line in [
        r#"agent_sandbox_claim_startup_latency_ms_count{launch_type="cold",sandbox_template="t"} 1"#,
        r#"agent_sandbox_claim_controller_startup_latency_ms_count{launch_type="cold",sandbox_template="t"} 1"#,
        r#"agent_sandbox_claim_creation_total{namespace="ns",sandbox_template="t",launch_type="cold",warmpool_name="p",pod_condition="not_ready",created_by="unknown"} 1"#,
    ] {
        assert!(text.contains(line), "{line}\nnot in\n{text}");
    }
    // A return to Ready is no startup.
    cluster
        .api
        .edit("pods", NS, "c", &json!({"status": {"phase": "Pending"}}));
    cluster.settle().await;
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
    let text = cluster.context.metrics.text().unwrap();
    assert!(text.contains(
        r#"agent_sandbox_claim_startup_latency_ms_count{launch_type="cold",sandbox_template="t"} 1"#
    ));
    assert_eq!(
        cluster.get_claim("c")["metadata"]["annotations"],
        annotations
    );
}

#[tokio::test]
async fn a_controller_that_missed_a_claims_readiness_writes_an_unknown_time() {
    let cluster = cold(json!({}));
    cluster.settle().await;
    let forget =
        json!({"metadata": {"annotations": {"agents.x-k8s.io/claim-first-ready-at": null}}});
    cluster.edit("sandboxclaims", "c", &forget);
    let next = cluster.another();
    next.settle().await;
    let claim = next.get_claim("c");
    let ready_at = &claim["metadata"]["annotations"]["agents.x-k8s.io/claim-first-ready-at"];
    assert_eq!(ready_at, "unknown");
    let text = next.context.metrics.text().unwrap();
    assert!(!text.contains("claim_startup_latency_ms_count"), "{text}");
}

// Missing or forbidden objects.

#[tokio::test]
async fn a_missing_pool_or_template_is_reported_and_the_claim_continues_when_it_is_created() {
    let cluster = Cluster::new();
    cluster.claim("c", json!({}));
    let again = cluster.claim_pass("c").await.unwrap();
    assert_eq!(again.unwrap().as_secs(), 60);
    cluster.assert_claim_ready(
        "c",
        "False",
        "WarmPoolNotFound",
        "SandboxWarmPool \"p\" not found",
    );
    cluster.pool(0, json!({}));
    cluster.claim_pass("c").await.unwrap();
    cluster.assert_claim_ready(
        "c",
        "False",
        "TemplateNotFound",
        "SandboxTemplate \"t\" not found",
    );
    cluster.template(json!({}));
    cluster.settle().await;
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
}

#[tokio::test]
async fn a_pool_missing_from_the_cache_is_not_reported_as_missing() {
    let cluster = Cluster::new();
    cluster.claim("c", json!({}));
    cluster.sync();
    cluster.template(json!({}));
    cluster.pool(0, json!({}));
    cluster.stale_claim_pass("c").await.unwrap();
    assert_eq!(cluster.held_by("c").as_deref(), Some("c"));
    cluster.assert_claim_ready("c", "False", "SandboxNotReady", "Sandbox is not ready");
}

#[tokio::test]
async fn a_policy_changed_after_the_cache_applies() {
    let cluster = cold(json!({"spec": {"env": [{"name": "A", "value": "1"}]}}));
    cluster.sync();
    let open = json!({"spec": {"envVarsInjectionPolicy": "Allowed"}});
    cluster.edit("sandboxtemplates", "t", &open);
    cluster.stale_claim_pass("c").await.unwrap();
    assert_eq!(cluster.held_by("c").as_deref(), Some("c"));
}

/// Removes all queued names and returns them in their order.
pub(crate) async fn waiting(queue: &Queue) -> Vec<String> {
    let mut names = Vec::new();
    while queue.depth() > 0 {
        let key = queue.next().await;
        queue.done(&key);
        names.push(key.1);
    }
    names
}

#[tokio::test]
async fn a_changed_template_requeues_only_claims_without_a_sandbox() {
    let cluster = cold(json!({}));
    cluster.claim("d", json!({}));
    cluster.settle().await;
    // The status of "d" names a deleted Sandbox, that of "e" none.
    cluster.api.delete("sandboxes", NS, "d");
    cluster.claim("e", json!({}));
    cluster.sync();
    let queue = &cluster.context.queues.claims;
    waiting(queue).await;
    assert_eq!(cluster.held_by("d").as_deref(), Some("d"));
    let before = cluster.context.caches.templates.get(NS, "t").unwrap();
    let mut after = (*before).clone();
    after.metadata.generation = Some(2);
    let change = Change {
        before: Some(before),
        after: Some(Arc::new(after)),
    };
    extensions::template_changed(&cluster.context, &change);
    assert_eq!(waiting(queue).await, ["d", "e"]);
}

#[rstest]
#[case::and_there_is_one(true)]
#[case::and_there_is_none_either(false)]
#[tokio::test]
async fn a_pool_of_another_namespace_does_not_serve_a_claim(#[case] elsewhere: bool) {
    let cluster = Cluster::new();
    cluster.template(json!({}));
    if elsewhere {
        cluster.pool(0, json!({"metadata": {"namespace": "elsewhere"}}));
    }
    cluster.claim("c", json!({}));
    for _ in 0..3 {
        cluster.claim_pass("c").await.unwrap();
    }
    cluster.assert_claim_ready(
        "c",
        "False",
        "WarmPoolNotFound",
        "SandboxWarmPool \"p\" not found",
    );
    // One Event, with the same text in both cases: it reveals nothing about other namespaces.
    let note = "SandboxWarmPool \"p\" not found in namespace \"ns\". A claim takes members of pools in its own namespace only: create the pool there, or the claim in the namespace of the pool";
    assert_eq!(
        cluster.events(),
        [("WarmPoolNotFound".to_owned(), note.to_owned())]
    );
}

#[rstest]
#[case::label(json!({"additionalPodMetadata": {"labels": {"team": "x"}}}), "InvalidMetadata")]
#[case::env(json!({"env": [{"name": "A", "value": "1"}]}), "EnvVarsInjectionRejected")]
#[case::volumes(json!({"volumeClaimTemplates": [{"metadata": {"name": "v"}, "spec": {}}]}), "VolumeClaimTemplatesError")]
#[tokio::test]
async fn forbidden_requests_are_refused_without_a_retry(#[case] spec: Value, #[case] reason: &str) {
    let cluster = cold(json!({"spec": spec}));
    assert_eq!(cluster.claim_pass("c").await.unwrap(), None);
    assert_eq!(cluster.claim_condition("c", "Ready").unwrap().1, reason);
    assert!(cluster.api.list("sandboxes").is_empty());
    cluster.settle().await;
}

#[tokio::test]
async fn env_and_volumes_reach_the_pod_where_the_template_allows_them() {
    let cluster = Cluster::new();
    cluster.template(json!({"spec": {
        "envVarsInjectionPolicy": "Allowed", "volumeClaimTemplatesPolicy": "Allowed",
    }}));
    cluster.pool(0, json!({}));
    let spec = json!({"spec": {
        "env": [{"name": "A", "value": "1"}],
        "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"]}}],
    }});
    cluster.claim("c", spec);
    cluster.settle().await;
    let pod = cluster.api.get("pods", NS, "c").unwrap();
    assert_eq!(
        pod["spec"]["containers"][0]["env"],
        json!([{"name": "A", "value": "1"}])
    );
    let volume = &pod["spec"]["volumes"][0]["persistentVolumeClaim"];
    assert_eq!(volume["claimName"], "data-c");
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
}

#[tokio::test]
async fn a_sandbox_of_another_owner_with_the_claims_name_is_an_error_with_a_remedy() {
    let cluster = cold(json!({}));
    let foreign = crate::objects::sandbox(json!({"metadata": {"name": "c"}}));
    cluster.api.create("sandboxes", foreign);
    cluster.claim_pass("c").await.unwrap();
    let (_, reason, message) = cluster.claim_condition("c", "Ready").unwrap();
    assert_eq!(reason, "ReconcilerError");
    let advice = "Please use a different claim name or delete the sandbox manually";
    assert!(message.ends_with(advice), "{message}");
    cluster.api.remove("sandboxes", NS, "c");
    cluster.settle().await;
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
}

#[tokio::test]
async fn a_refusal_of_the_apiserver_is_shown_verbatim_and_retried() {
    let cluster = cold(json!({}));
    cluster.api.fail(Fault {
        verb: "create",
        kind: "sandboxes",
        answer: FaultAnswer::Refuse(403),
    });
    let error = cluster.claim_pass("c").await.unwrap_err();
    assert_eq!(error.reason(), "Refused");
    cluster.assert_claim_ready(
        "c",
        "False",
        "ReconcilerError",
        "Error seen: create sandboxes c: made to fail",
    );
    cluster.settle().await;
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
}

#[tokio::test]
async fn an_overloaded_apiserver_is_asked_again_after_a_pause() {
    let cluster = cold(json!({}));
    cluster.api.fail(Fault {
        verb: "create",
        kind: "sandboxes",
        answer: FaultAnswer::Refuse(429),
    });
    cluster.claim_pass("c").await.unwrap();
    let mut writes = cluster.writes();
    assert_eq!(writes.pop().as_deref(), Some("patch status sandboxclaims"));
    writes.sort();
    assert_eq!(
        writes,
        [
            "create sandboxes",
            "create sandboxes",
            "patch sandboxclaims"
        ]
    );
    assert_eq!(cluster.held_by("c").as_deref(), Some("c"));
}

// Metadata.

#[tokio::test]
async fn edits_of_the_additional_metadata_reach_the_pod() {
    let added = |labels: Value| json!({"spec": {"additionalPodMetadata": {"labels": labels}}});
    let cluster = cold(added(
        json!({"sandbox.users.io/a": "1", "sandbox.users.io/b": "1"}),
    ));
    cluster.settle().await;
    let on_pod = || {
        let pod = cluster.api.get("pods", NS, "c").unwrap();
        let labels = pod["metadata"]["labels"].clone();
        let of = |key: &str| labels[format!("sandbox.users.io/{key}")].clone();
        json!([of("a"), of("b")])
    };
    assert_eq!(on_pod(), json!(["1", "1"]));
    cluster.edit(
        "sandboxclaims",
        "c",
        &added(json!({"sandbox.users.io/a": null, "sandbox.users.io/b": "2"})),
    );
    cluster.settle().await;
    assert_eq!(on_pod(), json!([null, "2"]));
    // A forbidden label is reported; the Sandbox stays unchanged.
    cluster.edit("sandboxclaims", "c", &added(json!({"team": "x"})));
    cluster.settle().await;
    assert_eq!(
        cluster.claim_condition("c", "Ready").unwrap().1,
        "InvalidMetadata"
    );
    assert_eq!(on_pod(), json!([null, "2"]));
    assert_eq!(cluster.held_by("c").as_deref(), Some("c"));
}

// Deletion.

#[tokio::test]
async fn a_sandbox_that_a_user_deletes_is_replaced() {
    let cluster = cold(json!({}));
    cluster.settle().await;
    let uid = cluster.get_sandbox("c")["metadata"]["uid"].clone();
    cluster.api.delete("sandboxes", NS, "c");
    cluster.kubelets();
    cluster.settle().await;
    assert_ne!(cluster.get_sandbox("c")["metadata"]["uid"], uid);
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
}

#[tokio::test]
async fn a_claim_that_is_being_deleted_is_left_alone() {
    let cluster = cold(json!({"metadata": {"finalizers": ["example.com/x"]}}));
    cluster.api.delete("sandboxclaims", NS, "c");
    cluster.claim_pass("c").await.unwrap();
    assert!(cluster.writes().is_empty());
}

#[tokio::test]
async fn the_network_policy_of_an_old_controller_is_deleted_and_a_foreign_one_stays() {
    let cluster = cold(json!({}));
    cluster.claim("d", json!({}));
    let uid = cluster.get_claim("c")["metadata"]["uid"].clone();
    for (policy, owner) in [("c-network-policy", uid.clone()), ("d-network-policy", uid)] {
        cluster.api.create(
            "networkpolicies",
            json!({
                "metadata": {"name": policy, "namespace": NS, "ownerReferences": [{
                    "apiVersion": "extensions.agents.x-k8s.io/v1alpha1", "kind": "SandboxClaim",
                    "name": "c", "uid": owner, "controller": true,
                }]},
            }),
        );
    }
    cluster.settle().await;
    let left = cluster.api.list("networkpolicies");
    let names: Vec<&str> = left.iter().map(name).collect();
    assert_eq!(names, ["d-network-policy", "t-network-policy"]);
}

// Crashes and lost responses.

#[rstest]
#[case("create", "sandboxes")]
#[case("patch status", "sandboxclaims")]
#[case("patch", "sandboxclaims")]
#[tokio::test]
async fn a_lost_response_creates_no_second_sandbox(
    #[case] verb: &'static str,
    #[case] kind: &'static str,
) {
    let cluster = cold(json!({})).impatient();
    cluster.api.fail(Fault {
        verb,
        kind,
        answer: FaultAnswer::LoseAnswer,
    });
    for _ in 0..4 {
        let _ = cluster.claim_pass("c").await;
        cluster.sandbox_passes().await;
        cluster.kubelets();
    }
    cluster.settle().await;
    assert_eq!(cluster.controlled_by(&cluster.get_claim("c")), ["c"]);
    assert_eq!(cluster.api.list("sandboxes").len(), 1);
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
}

//! Tests of claims that take a pool member: number of writes, choice of the member, races between
//! controllers, and crashes.

use std::sync::Arc;

use rstest::rstest;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::{
    apiserver::{Fault, FaultAnswer},
    claims::side_by_side,
    cluster::{Cluster, controller, name, nameless, ready_at},
    objects::NS,
    schedules::run_until_blocked,
};

const POOL: &str = "agents.x-k8s.io/warm-pool-sandbox";

// Steps of a claim.

#[tokio::test]
async fn a_claim_is_ready_after_two_sequential_writes_and_complete_after_six() {
    let cluster = Cluster::filled(3, json!({})).await;
    cluster.claim("c", json!({}));
    cluster.writes();
    cluster.api.take_reads();
    cluster.claim_pass("c").await.unwrap();
    let writes = side_by_side(cluster.writes_with_events());
    assert_eq!(
        writes[..3],
        [
            "patch sandboxclaims",
            "patch sandboxes",
            "patch status sandboxclaims"
        ],
        "the claim is annotated with its Sandbox while that is assigned"
    );
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
    let mut rest = writes[3..].to_vec();
    rest.sort();
    assert_eq!(rest, ["create events", "patch sandboxclaims"]);
    assert_eq!(cluster.api.take_reads(), Vec::<String>::new());
    // Later writes except those of the pool's refill: the Pod loses the pool's label.
    for _ in 0..3 {
        cluster.sandbox_passes().await;
        cluster.claim_pass("c").await.unwrap();
    }
    assert_eq!(cluster.writes_with_events(), ["patch pods"]);
    assert_eq!(cluster.api.take_reads(), Vec::<String>::new());
}

#[tokio::test]
async fn a_late_watch_causes_no_second_write() {
    let cluster = Cluster::filled(1, json!({})).await;
    cluster.claim("c", json!({}));
    cluster.sync();
    cluster.writes();
    for _ in 0..3 {
        cluster.stale_claim_pass("c").await.unwrap();
        cluster.stale_sandbox_passes().await;
    }
    assert_eq!(
        side_by_side(cluster.writes()),
        [
            "patch sandboxclaims",
            "patch sandboxes",
            "patch status sandboxclaims",
            "patch sandboxclaims",
            "patch pods"
        ]
    );
}

#[tokio::test]
async fn a_claimed_sandbox_is_owned_by_the_claim_and_keeps_its_name() {
    let cluster = Cluster::filled(2, json!({})).await;
    let before = cluster.members();
    cluster.claim(
        "c",
        json!({"metadata": {"labels": {"agents.x-k8s.io/created-by": "python-client"}}}),
    );
    cluster.claim_pass("c").await.unwrap();
    cluster.sandbox_passes().await;
    let held = cluster.held_by("c").unwrap();
    assert!(before.contains(&held));
    let (claim, sandbox) = (cluster.get_claim("c"), cluster.get_sandbox(&held));
    let owners = sandbox["metadata"]["ownerReferences"].as_array().unwrap();
    assert_eq!(owners.len(), 1);
    assert_eq!(owners[0]["uid"], claim["metadata"]["uid"]);
    let labels = &sandbox["metadata"]["labels"];
    for (label, value) in [
        (POOL, Value::Null),
        ("agents.x-k8s.io/sandbox-template-hash", Value::Null),
        ("agents.x-k8s.io/sandbox-pod-template-hash", Value::Null),
        ("agents.x-k8s.io/launch-type", json!("warm")),
        ("agents.x-k8s.io/created-by", json!("python-client")),
        (
            "agents.x-k8s.io/claim-uid",
            claim["metadata"]["uid"].clone(),
        ),
    ] {
        assert_eq!(labels[label], value, "{label}");
    }
    assert_eq!(
        sandbox["metadata"]["generation"], 1,
        "the spec is as it was"
    );
    let pod = cluster.api.get("pods", NS, &held).unwrap();
    assert_eq!(pod["metadata"]["labels"][POOL], Value::Null);
    let evict = "cluster-autoscaler.kubernetes.io/safe-to-evict";
    assert_eq!(pod["metadata"]["annotations"][evict], Value::Null);
    assert_eq!(
        claim["status"]["sandbox"]["podIPs"],
        sandbox["status"]["podIPs"]
    );
    let adopted = format!("Adopted warm pool Sandbox {held:?}");
    assert!(
        cluster
            .events()
            .contains(&("SandboxAdopted".into(), adopted))
    );
    let text = cluster.context.metrics.text().unwrap();
    let counted = r#"agent_sandbox_claim_creation_total{namespace="ns",sandbox_template="t",launch_type="warm",warmpool_name="p",pod_condition="ready",created_by="python-client"} 1"#;
    assert!(text.contains(counted), "{text}");
    let held = cluster.held_by("c");
    cluster.settle().await;
    assert_eq!(cluster.members().len(), 2, "refilled");
    assert_eq!(cluster.held_by("c"), held);
}

#[tokio::test]
async fn events_and_annotations_can_be_turned_off() {
    let mut settings = crate::cluster::settings();
    settings.claims.events = false;
    settings.claims.observability = false;
    let cluster = Cluster::with(settings);
    cluster.template(json!({}));
    cluster.pool(1, json!({}));
    cluster.settle().await;
    cluster.claim("c", json!({}));
    cluster.writes();
    cluster.claim_pass("c").await.unwrap();
    assert_eq!(
        side_by_side(cluster.writes_with_events()),
        [
            "patch sandboxclaims",
            "patch sandboxes",
            "patch status sandboxclaims",
            "patch sandboxclaims"
        ]
    );
    // As with upstream, the setting covers only the time of observation, not the annotations that
    // others read.
    let claim = cluster.get_claim("c");
    let value =
        |key: &str| claim["metadata"]["annotations"][format!("agents.x-k8s.io/{key}")].as_str();
    assert_eq!(value("sandbox-name"), cluster.held_by("c").as_deref());
    assert!(value("claim-first-ready-at").is_some());
    assert_eq!(value("controller-first-observed-at"), None);
    cluster.claim_pass("c").await.unwrap();
    assert!(cluster.writes_with_events().is_empty(), "once");
}

#[tokio::test]
async fn additional_metadata_of_the_claim_reaches_the_running_pod() {
    let cluster = Cluster::filled(1, json!({})).await;
    cluster.claim(
        "c",
        json!({"spec": {"additionalPodMetadata": {
            "labels": {"sandbox.users.io/team": "a"}, "annotations": {"note": "x"},
        }}}),
    );
    cluster.settle().await;
    let held = cluster.held_by("c").unwrap();
    let pod = cluster.api.get("pods", NS, &held).unwrap();
    assert_eq!(pod["metadata"]["labels"]["sandbox.users.io/team"], "a");
    assert_eq!(pod["metadata"]["annotations"]["note"], "x");
    let gone = json!({"spec": {"additionalPodMetadata": null}});
    cluster.edit("sandboxclaims", "c", &gone);
    cluster.settle().await;
    let pod = cluster.api.get("pods", NS, &held).unwrap();
    assert_eq!(pod["metadata"]["labels"].get("sandbox.users.io/team"), None);
    assert_eq!(pod["metadata"]["annotations"].get("note"), None);
}

#[tokio::test]
async fn each_member_serves_one_claim_and_further_claims_start_cold() {
    let cluster = Cluster::filled(5, json!({})).await;
    let before = cluster.members();
    for number in 0..8 {
        cluster.claim(&format!("c{number}"), json!({}));
    }
    cluster.sync();
    let passes = (0..8).map(|number| {
        let cluster = &cluster;
        async move { cluster.stale_claim_pass(&format!("c{number}")).await }
    });
    for result in futures::future::join_all(passes).await {
        result.unwrap();
    }
    let held: std::collections::BTreeSet<String> = (0..8)
        .map(|number| cluster.held_by(&format!("c{number}")).unwrap())
        .collect();
    assert_eq!(held.len(), 8, "no Sandbox twice");
    assert!(before.iter().all(|member| held.contains(member)));
}

// Candidates.

#[tokio::test]
async fn claims_are_spread_over_the_nodes() {
    let cluster = Cluster::filled(6, json!({})).await;
    for number in 0..3 {
        let claim = format!("c{number}");
        cluster.claim(&claim, json!({}));
        cluster.claim_pass(&claim).await.unwrap();
    }
    let nodes: std::collections::BTreeSet<String> = (0..3)
        .map(|number| {
            let held = cluster.held_by(&format!("c{number}")).unwrap();
            let sandbox = cluster.get_sandbox(&held);
            sandbox["status"]["nodeName"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(nodes.len(), 3);
}

#[tokio::test]
async fn a_claim_waits_briefly_for_members_in_creation_and_then_starts_cold() {
    let cluster = Cluster::new();
    cluster.template(json!({}));
    cluster.pool(1, json!({}));
    cluster.pool_pass("p").await.unwrap();
    cluster.claim("c", json!({}));
    let again = cluster.claim_pass("c").await.unwrap();
    assert_eq!(again.unwrap().as_millis(), 500);
    cluster.assert_claim_ready("c", "False", "SandboxMissing", "Sandbox does not exist");
    let old = json!({"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}});
    cluster.api.edit("sandboxclaims", NS, "c", &old);
    cluster.claim_pass("c").await.unwrap();
    assert_eq!(cluster.held_by("c").as_deref(), Some("c"));
}

#[tokio::test]
async fn an_unready_member_is_taken_without_an_alternative_and_ready_follows() {
    let cluster = Cluster::filled(1, json!({})).await;
    let member = cluster.members().remove(0);
    let unready = json!({"status": {"conditions": [
        crate::objects::condition("Ready", "False", "", ""),
    ]}});
    cluster.api.edit("pods", NS, &member, &unready);
    cluster.sandbox_passes().await;
    cluster.claim("c", json!({}));
    cluster.claim_pass("c").await.unwrap();
    assert_eq!(cluster.held_by("c"), Some(member.clone()));
    cluster.assert_claim_ready(
        "c",
        "False",
        "DependenciesNotReady",
        "Pod is Running but not Ready",
    );
    cluster.api.edit("pods", NS, &member, &ready_at(0));
    cluster.settle().await;
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
}

#[rstest]
#[case::on_replenish("OnReplenish", true)]
#[case::recreate("Recreate", false)]
#[tokio::test]
async fn stale_members_are_handed_out_only_under_on_replenish(
    #[case] strategy: &str,
    #[case] handed_out: bool,
) {
    let cluster = Cluster::filled(2, json!({"spec": {"updateStrategy": {"type": strategy}}})).await;
    let before = cluster.members();
    let new =
        json!({"spec": {"podTemplate": {"spec": {"containers": [{"name": "c", "image": "new"}]}}}});
    cluster.edit("sandboxtemplates", "t", &new);
    cluster.claim("c", json!({}));
    cluster.claim_pass("c").await.unwrap();
    assert_eq!(before.contains(&cluster.held_by("c").unwrap()), handed_out);
}

// Races.

#[tokio::test]
async fn a_member_that_changed_meanwhile_is_read_again_and_taken() {
    let cluster = Cluster::filled(1, json!({})).await;
    cluster.claim("c", json!({}));
    cluster.sync();
    let member = cluster.members().remove(0);
    let note = json!({"metadata": {"annotations": {"note": "x"}}});
    cluster.api.edit("sandboxes", NS, &member, &note);
    cluster.stale_claim_pass("c").await.unwrap();
    assert_eq!(cluster.held_by("c"), Some(member));
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
}

#[tokio::test]
async fn a_member_assigned_by_another_controller_is_left_to_its_claim() {
    let cluster = Cluster::filled(2, json!({})).await;
    let other = cluster.another();
    cluster.claim("c", json!({}));
    cluster.claim("d", json!({}));
    cluster.sync();
    other.sync();
    other.stale_claim_pass("d").await.unwrap();
    cluster.stale_claim_pass("c").await.unwrap();
    let (c, d) = (cluster.held_by("c").unwrap(), cluster.held_by("d").unwrap());
    assert_ne!(c, d);
    for (claim, held) in [("c", c), ("d", d)] {
        assert_eq!(cluster.controlled_by(&cluster.get_claim(claim)), [held]);
    }
}

#[tokio::test]
async fn two_controllers_give_one_claim_one_sandbox() {
    let cluster = Cluster::filled(4, json!({})).await;
    let other = cluster.another();
    cluster.claim("c", json!({}));
    cluster.sync();
    other.sync();
    // The other controller prefers another member, because the first one is reserved in its
    // process.
    let first = cluster.members().remove(0);
    let taken = other.context.candidates.take_named(
        cluster.get_pool("p")["metadata"]["uid"].as_str().unwrap(),
        &first,
    );
    let both = tokio::join!(cluster.stale_claim_pass("c"), other.stale_claim_pass("c"));
    drop(taken);
    let _ = both;
    let held = cluster.held_by("c").unwrap();
    for _ in 0..3 {
        cluster.passes().await;
        other.passes().await;
    }
    assert_eq!(
        cluster.held_by("c").as_ref(),
        Some(&held),
        "it never changes"
    );
    assert_eq!(cluster.controlled_by(&cluster.get_claim("c")), [held]);
}

#[tokio::test]
async fn a_pool_whose_members_were_all_taken_by_others_is_reported() {
    let cluster = Cluster::filled(4, json!({})).await;
    cluster.claim("c", json!({}));
    cluster.sync();
    for _ in 0..12 {
        cluster.api.fail(Fault {
            verb: "patch",
            kind: "sandboxes",
            answer: FaultAnswer::Refuse(409),
        });
    }
    let again = cluster.stale_claim_pass("c").await.unwrap();
    assert_eq!(again.unwrap().as_millis(), 200);
    cluster.assert_claim_ready(
        "c",
        "False",
        "AdoptionConflict",
        "3 pool members were taken by others; the next pass retries from a converged view",
    );
    cluster.api.forget_faults();
    cluster.settle().await;
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
}

// Crashes.

#[rstest]
#[case::before_the_first_write("patch", "sandboxes", FaultAnswer::Refuse(500))]
#[case::after_the_first_write("patch", "sandboxes", FaultAnswer::LoseAnswer)]
#[case::before_the_second_write("patch status", "sandboxclaims", FaultAnswer::Refuse(500))]
#[case::after_the_second_write("patch status", "sandboxclaims", FaultAnswer::LoseAnswer)]
#[case::before_the_third_write("patch", "sandboxclaims", FaultAnswer::Refuse(500))]
#[tokio::test]
async fn a_controller_continues_a_claim_of_a_crashed_one(
    #[case] verb: &'static str,
    #[case] kind: &'static str,
    #[case] answer: FaultAnswer,
) {
    let cluster = Cluster::filled(3, json!({})).await.impatient();
    cluster.claim("c", json!({}));
    cluster.api.fail(Fault { verb, kind, answer });
    let _ = cluster.claim_pass("c").await;
    let assigned = cluster.controlled_by(&cluster.get_claim("c"));
    for follower in [cluster.another(), cluster.impatient()] {
        follower.settle().await;
        let claim = follower.get_claim("c");
        let held = follower.held_by("c").unwrap();
        let has = follower.controlled_by(&claim);
        assert_eq!(has, [held]);
        assert!(
            assigned.is_empty() || assigned == has,
            "what was assigned stays"
        );
        follower.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
        assert_eq!(follower.members().len(), 3);
    }
}

#[tokio::test]
async fn an_assignment_without_a_response_is_verified_before_another_is_made() {
    let cluster = Cluster::filled(3, json!({})).await.impatient();
    cluster.claim("c", json!({}));
    cluster.sync();
    cluster.api.fail(Fault {
        verb: "patch",
        kind: "sandboxes",
        answer: FaultAnswer::LoseAnswer,
    });
    let error = cluster.stale_claim_pass("c").await.unwrap_err();
    assert_eq!(error.reason(), "OutcomeUnknown");
    // The watch has not shown the assignment yet.
    cluster.stale_claim_pass("c").await.unwrap();
    let held = cluster.held_by("c").unwrap();
    assert_eq!(cluster.controlled_by(&cluster.get_claim("c")), [held]);
}

#[tokio::test]
async fn an_assignment_begun_by_upstreams_controller_is_completed() {
    let cluster = Cluster::filled(3, json!({})).await;
    let noted = cluster.members().remove(2);
    cluster.claim(
        "c",
        json!({"metadata": {"annotations": {"agents.x-k8s.io/sandbox-name": noted}}}),
    );
    cluster.claim_pass("c").await.unwrap();
    assert_eq!(cluster.held_by("c"), Some(noted));
    // An annotation that names a missing Sandbox is ignored and corrected.
    cluster.claim(
        "d",
        json!({"metadata": {"annotations": {"agents.x-k8s.io/sandbox-name": "nowhere"}}}),
    );
    cluster.settle().await;
    let held = cluster.held_by("d");
    let claim = cluster.get_claim("d");
    let note = &claim["metadata"]["annotations"]["agents.x-k8s.io/sandbox-name"];
    assert_eq!(note.as_str(), held.as_deref());
}

#[tokio::test]
async fn a_surplus_is_deleted_only_once_another_is_committed() {
    let cluster = Cluster::filled(2, json!({})).await;
    cluster.claim("c", json!({}));
    let claim = cluster.get_claim("c");
    // Two controllers have each assigned a Sandbox and crashed.
    for sandbox in cluster.api.list("sandboxes") {
        let owner = json!({"metadata": {"labels": {POOL: null}, "ownerReferences": [{
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
            "name": "c", "uid": claim["metadata"]["uid"], "controller": true,
        }]}});
        cluster.api.edit("sandboxes", NS, name(&sandbox), &owner);
    }
    cluster.writes();
    cluster.claim_pass("c").await.unwrap();
    let writes = cluster.writes();
    let before = ["patch sandboxclaims", "patch status sandboxclaims"];
    assert_eq!(writes[..2], before, "{writes:?}");
    cluster.settle().await;
    let held = cluster.held_by("c").unwrap();
    assert_eq!(cluster.controlled_by(&cluster.get_claim("c")), [held]);
}

#[tokio::test]
async fn a_claimed_sandbox_that_a_user_deletes_is_replaced_from_the_pool() {
    let cluster = Cluster::filled(2, json!({})).await;
    cluster.claim("c", json!({}));
    cluster.settle().await;
    let first = cluster.held_by("c").unwrap();
    cluster.api.delete("sandboxes", NS, &first);
    cluster.settle().await;
    let second = cluster.held_by("c").unwrap();
    assert_ne!(first, second);
    let sandbox = cluster.get_sandbox(&second);
    assert_eq!(
        sandbox["metadata"]["annotations"]["torpor.dev/replaces"],
        first
    );
    assert_eq!(
        controller(&sandbox).unwrap()["uid"],
        cluster.get_claim("c")["metadata"]["uid"]
    );
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
}

#[tokio::test]
async fn a_deleted_claim_deletes_its_sandbox_and_the_pool_stays() {
    let cluster = Cluster::filled(2, json!({})).await;
    cluster.claim("c", json!({}));
    cluster.settle().await;
    let held = cluster.held_by("c").unwrap();
    cluster.api.delete("sandboxclaims", NS, "c");
    cluster.settle().await;
    assert!(cluster.api.get("sandboxes", NS, &held).is_none());
    assert_eq!(cluster.members().len(), 2);
}

// States before Ready.

#[tokio::test]
async fn ready_never_precedes_the_name_of_the_pod() {
    let cluster = Cluster::filled(1, json!({})).await;
    let member = cluster.members().remove(0);
    cluster.api.edit("sandboxes", NS, &member, &nameless());
    cluster.claim("c", json!({}));
    let gate = Arc::new(Semaphore::new(0));
    let gated = cluster.gated(&gate);
    gated.sync();
    // Releases one call at a time and checks all claims in between.
    let looks = async {
        loop {
            run_until_blocked().await;
            cluster.check_claims();
            gate.add_permits(1);
        }
    };
    tokio::select! {
        biased;
        pass = gated.stale_claim_pass("c") => drop(pass.unwrap()),
        never = looks => never,
    }
    cluster.check_claims();
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
    let held = cluster.get_sandbox(&member);
    let named = &held["metadata"]["annotations"]["agents.x-k8s.io/pod-name"];
    assert_eq!(named.as_str(), Some(member.as_str()));
}

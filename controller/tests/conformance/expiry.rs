//! Tests of the end of claims: expiry, the end of their Sandbox, and events that must not end them.

use rstest::rstest;
use serde_json::{Value, json};

use crate::{
    claims::cold,
    cluster::{Cluster, condition_of, is_terminating},
    objects::{NS, condition, mode},
};

fn past(policy: &str) -> Value {
    json!({"spec": {"lifecycle": {"shutdownTime": "2026-01-01T00:00:00Z", "shutdownPolicy": policy}}})
}

/// Returns the notes of the Events of a claim's expiry.
fn expiry_events(cluster: &Cluster) -> Vec<String> {
    let expired = cluster.events().into_iter();
    expired
        .filter(|(reason, _)| reason == "ClaimExpired")
        .map(|(_, note)| note)
        .collect()
}

#[tokio::test]
async fn an_expired_claim_reports_its_expiry_before_its_sandbox_is_deleted() {
    let cluster = cold(json!({}));
    cluster.settle().await;
    cluster.edit("sandboxclaims", "c", &past("Retain"));
    let again = cluster.claim_pass("c").await.unwrap();
    assert_eq!(again.unwrap().as_millis(), 1);
    cluster.assert_claim_ready(
        "c",
        "False",
        "ClaimExpired",
        "Claim expired. Sandbox cleanup initiated.",
    );
    assert_eq!(cluster.api.list("sandboxes").len(), 1);
    assert!(
        cluster
            .events()
            .iter()
            .any(|(reason, _)| reason == "ClaimExpired")
    );
    cluster.settle().await;
    assert!(cluster.api.list("sandboxes").is_empty());
    assert_eq!(cluster.get_claim("c")["status"].get("sandbox"), None);
    assert_eq!(expiry_events(&cluster), ["Claim expired"]);
}

#[rstest]
#[case("Delete")]
#[case("DeleteForeground")]
#[tokio::test]
async fn an_expired_claim_is_deleted_with_its_sandbox(#[case] policy: &str) {
    let cluster = cold(json!({}));
    cluster.settle().await;
    cluster.edit("sandboxclaims", "c", &past(policy));
    cluster.settle().await;
    assert!(cluster.api.list("sandboxclaims").is_empty());
    assert!(cluster.api.list("sandboxes").is_empty());
    let deleting = format!("Deleting Claim (ShutdownPolicy={policy})");
    assert_eq!(expiry_events(&cluster), ["Claim expired", &deleting]);
}

#[tokio::test]
async fn a_claim_deleted_in_the_foreground_exists_until_its_pod_is_gone() {
    let cluster = cold(past("DeleteForeground"));
    let later = json!({"spec": {"lifecycle": {"shutdownTime": "2100-01-01T00:00:00Z"}}});
    cluster.edit("sandboxclaims", "c", &later);
    cluster.settle().await;
    cluster.edit("sandboxclaims", "c", &past("DeleteForeground"));
    cluster.claim_pass("c").await.unwrap();
    cluster.claim_pass("c").await.unwrap();
    assert!(is_terminating(&cluster.get_claim("c")));
    cluster.kubelets();
    assert_eq!(cluster.api.list("pods").len(), 1);
    assert_eq!(cluster.api.list("sandboxclaims").len(), 1);
    cluster.kubelets();
    assert!(cluster.api.list("sandboxclaims").is_empty());
}

#[tokio::test]
async fn a_finished_claim_is_kept_for_its_ttl() {
    let ttl = |seconds: u32| json!({"spec": {"lifecycle": {"ttlSecondsAfterFinished": seconds, "shutdownPolicy": "Delete"}}});
    let cluster = cold(ttl(3600));
    cluster.settle().await;
    let succeeded = json!({"status": {"phase": "Succeeded"}});
    cluster.api.edit("pods", NS, "c", &succeeded);
    cluster.settle().await;
    let finished = cluster.claim_condition("c", "Finished").unwrap();
    assert_eq!(
        (finished.0.as_str(), finished.1.as_str()),
        ("True", "PodSucceeded")
    );
    let again = cluster.claim_pass("c").await.unwrap().unwrap();
    assert!((3590..=3600).contains(&again.as_secs()), "{again:?}");
    cluster.edit("sandboxclaims", "c", &ttl(0));
    cluster.settle().await;
    assert!(cluster.api.list("sandboxclaims").is_empty());
}

#[tokio::test]
async fn finished_survives_the_sandbox_of_a_claim_that_is_retained() {
    let cluster = cold(json!({"spec": {"lifecycle": {"ttlSecondsAfterFinished": 0}}}));
    cluster.settle().await;
    cluster
        .api
        .edit("pods", NS, "c", &json!({"status": {"phase": "Failed"}}));
    cluster.settle().await;
    assert!(cluster.api.list("sandboxes").is_empty());
    assert_eq!(
        cluster.claim_condition("c", "Finished").unwrap().1,
        "PodFailed"
    );
    assert_eq!(
        cluster.claim_condition("c", "Ready").unwrap().1,
        "ClaimExpired"
    );
}

/// Runs passes until nothing changes and checks that the claim and its Sandbox never have Finished.
async fn settles_unfinished(cluster: &Cluster) {
    for _ in 0..20 {
        cluster.api.take_writes();
        cluster.passes().await;
        assert_eq!(cluster.claim_condition("c", "Finished"), None);
        let sandbox = cluster.get_sandbox("c");
        assert_eq!(condition_of(&sandbox, "Finished"), None);
        let ready = condition_of(&sandbox, "Ready").unwrap();
        assert!(!ready.1.starts_with("Pod"), "{ready:?}");
        let changed = cluster.kubelets();
        if cluster.api.take_writes().is_empty() && !changed {
            return;
        }
    }
    panic!("it never settles");
}

#[rstest]
#[case::delete("Delete")]
#[case::delete_foreground("DeleteForeground")]
#[case::retain("Retain")]
#[tokio::test]
async fn a_pod_that_is_deleted_or_evicted_ends_no_claim(#[case] policy: &str) {
    let cluster = cold(json!({"spec": {"lifecycle": {
        "ttlSecondsAfterFinished": 0, "shutdownPolicy": policy,
    }}}));
    cluster.settle().await;
    let uid = cluster.get_sandbox("c")["metadata"]["uid"].clone();
    let wish = |wish: &str| cluster.edit("sandboxes", "c", &mode(wish));
    // The Sandbox is suspended and resumed.
    wish("Suspended");
    settles_unfinished(&cluster).await;
    assert!(cluster.api.list("pods").is_empty());
    cluster.assert_claim_ready("c", "False", "SandboxSuspended", "Sandbox is suspended");
    wish("Running");
    settles_unfinished(&cluster).await;
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
    // The Sandbox is resumed while its Pod terminates and has its final phase.
    wish("Suspended");
    cluster.passes().await;
    assert!(cluster.kubelets());
    let phase = cluster.api.get("pods", NS, "c").unwrap()["status"]["phase"].clone();
    assert_eq!(phase, "Failed");
    wish("Running");
    settles_unfinished(&cluster).await;
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
    // The Pod is evicted.
    cluster.api.delete("pods", NS, "c");
    settles_unfinished(&cluster).await;
    // The Pod's node is gone: the Pod garbage collector marks the Pod as failed and then deletes
    // it.
    let collected = json!({"status": {"phase": "Failed", "conditions": [
        condition("DisruptionTarget", "True", "DeletionByPodGC", "no node"),
    ]}});
    cluster.api.edit("pods", NS, "c", &collected);
    for _ in 0..3 {
        cluster.passes().await;
    }
    cluster.api.delete("pods", NS, "c");
    settles_unfinished(&cluster).await;
    cluster.assert_claim_ready("c", "True", "DependenciesReady", "Pod is Ready");
    assert_eq!(cluster.get_sandbox("c")["metadata"]["uid"], uid);
    // A Pod that ends by itself finishes the claim.
    let failed = json!({"status": {"phase": "Failed"}});
    cluster.api.edit("pods", NS, "c", &failed);
    cluster.settle().await;
    assert!(cluster.api.list("sandboxes").is_empty());
    assert_eq!(
        cluster.api.list("sandboxclaims").len(),
        usize::from(policy == "Retain")
    );
}

#[tokio::test]
async fn a_sandbox_whose_pod_its_kubelet_ended_asleep_ends_no_claim() {
    let cluster = cold(json!({"spec": {"lifecycle": {
        "ttlSecondsAfterFinished": 0, "shutdownPolicy": "Delete",
    }}}));
    cluster.settle().await;
    let asleep = condition("torpor.dev/Hibernated", "True", "Hibernated", "asleep");
    let by_kubelet = condition(
        "DisruptionTarget",
        "True",
        "TerminationByKubelet",
        "shutdown",
    );
    let ended = json!({"status": {
        "phase": "Failed", "reason": "Terminated", "conditions": [asleep, by_kubelet],
    }});
    cluster.api.edit("pods", NS, "c", &ended);
    settles_unfinished(&cluster).await;
    assert_eq!(cluster.api.list("sandboxclaims").len(), 1);
    let pod = cluster.api.get("pods", NS, "c").unwrap();
    assert!(
        !is_terminating(&pod),
        "it goes once its image is kept: {pod:#}"
    );
    assert_eq!(cluster.api.list("sandboxsnapshots").len(), 1);
}

#[tokio::test]
async fn a_finished_sandbox_keeps_finished_while_its_pod_terminates() {
    let cluster = cold(json!({}));
    cluster.settle().await;
    let succeeded = json!({"status": {"phase": "Succeeded"}});
    cluster.api.edit("pods", NS, "c", &succeeded);
    cluster.settle().await;
    let finished = cluster.claim_condition("c", "Finished");
    assert_eq!(finished.as_ref().unwrap().1, "PodSucceeded");
    cluster.edit("sandboxes", "c", &mode("Suspended"));
    cluster.passes().await;
    cluster.passes().await;
    assert!(is_terminating(&cluster.api.get("pods", NS, "c").unwrap()));
    assert_eq!(cluster.claim_condition("c", "Finished"), finished);
    cluster.settle().await;
    assert_eq!(cluster.claim_condition("c", "Finished"), None);
}

#[tokio::test]
async fn a_sandbox_that_expires_independently_of_its_claim_is_reported() {
    let cluster = cold(json!({}));
    cluster.settle().await;
    let past = json!({"spec": {"shutdownTime": "2026-01-01T00:00:00Z"}});
    cluster.edit("sandboxes", "c", &past);
    cluster.settle().await;
    cluster.assert_claim_ready(
        "c",
        "False",
        "SandboxExpired",
        "Underlying Sandbox resource has expired independently of the Claim.",
    );
}

//! How claims end: their time, the end of their Sandbox, and what is no end.

use rstest::rstest;
use serde_json::{Value, json};

use crate::{
    claims::cold,
    cluster::{Cluster, is_going, said},
    objects::{NS, condition, mode},
};

fn past(policy: &str) -> Value {
    json!({"spec": {"lifecycle": {"shutdownTime": "2026-01-01T00:00:00Z", "shutdownPolicy": policy}}})
}

/// What the Events say of the end of a claim.
fn expiry_events(cluster: &Cluster) -> Vec<String> {
    let expired = cluster.events().into_iter();
    expired
        .filter(|(reason, _)| reason == "ClaimExpired")
        .map(|(_, note)| note)
        .collect()
}

#[tokio::test]
async fn an_expired_claim_says_so_first_and_then_its_sandbox_goes() {
    let cluster = cold(json!({}));
    cluster.settle().await;
    cluster.edit("sandboxclaims", "c", &past("Retain"));
    let again = cluster.claim_pass("c").await.unwrap();
    assert_eq!(again.unwrap().as_millis(), 1);
    cluster.assert_claim_says(
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
async fn an_expired_claim_goes_with_its_sandbox(#[case] policy: &str) {
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
async fn a_claim_deleted_in_the_foreground_is_seen_until_its_pod_is_gone() {
    let cluster = cold(past("DeleteForeground"));
    let later = json!({"spec": {"lifecycle": {"shutdownTime": "2100-01-01T00:00:00Z"}}});
    cluster.edit("sandboxclaims", "c", &later);
    cluster.settle().await;
    cluster.edit("sandboxclaims", "c", &past("DeleteForeground"));
    cluster.claim_pass("c").await.unwrap();
    cluster.claim_pass("c").await.unwrap();
    assert!(is_going(&cluster.get_claim("c")));
    cluster.kubelets();
    assert_eq!(cluster.api.list("pods").len(), 1);
    assert_eq!(cluster.api.list("sandboxclaims").len(), 1);
    cluster.kubelets();
    assert!(cluster.api.list("sandboxclaims").is_empty());
}

#[tokio::test]
async fn a_finished_claim_lives_as_long_as_it_says() {
    let ttl = |seconds: u32| json!({"spec": {"lifecycle": {"ttlSecondsAfterFinished": seconds, "shutdownPolicy": "Delete"}}});
    let cluster = cold(ttl(3600));
    cluster.settle().await;
    let succeeded = json!({"status": {"phase": "Succeeded"}});
    cluster.api.edit("pods", NS, "c", &succeeded);
    cluster.settle().await;
    let finished = cluster.claim_says("c", "Finished").unwrap();
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
    assert_eq!(cluster.claim_says("c", "Finished").unwrap().1, "PodFailed");
    assert_eq!(cluster.claim_says("c", "Ready").unwrap().1, "ClaimExpired");
}

/// Passes until nothing changes; whoever looks at any moment sees no Finished.
async fn settles_unfinished(cluster: &Cluster) {
    for _ in 0..20 {
        cluster.api.take_writes();
        cluster.passes().await;
        assert_eq!(cluster.claim_says("c", "Finished"), None);
        let sandbox = cluster.get_sandbox("c");
        assert_eq!(said(&sandbox, "Finished"), None);
        let ready = said(&sandbox, "Ready").unwrap();
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
async fn a_pod_that_ends_because_it_is_taken_away_ends_no_claim(#[case] policy: &str) {
    let cluster = cold(json!({"spec": {"lifecycle": {
        "ttlSecondsAfterFinished": 0, "shutdownPolicy": policy,
    }}}));
    cluster.settle().await;
    let uid = cluster.get_sandbox("c")["metadata"]["uid"].clone();
    let wish = |wish: &str| cluster.edit("sandboxes", "c", &mode(wish));
    // Suspended, and resumed.
    wish("Suspended");
    settles_unfinished(&cluster).await;
    assert!(cluster.api.list("pods").is_empty());
    cluster.assert_claim_says("c", "False", "SandboxSuspended", "Sandbox is suspended");
    wish("Running");
    settles_unfinished(&cluster).await;
    cluster.assert_claim_says("c", "True", "DependenciesReady", "Pod is Ready");
    // Resumed while the Pod is still going, and has said how it ended.
    wish("Suspended");
    cluster.passes().await;
    assert!(cluster.kubelets());
    let phase = cluster.api.get("pods", NS, "c").unwrap()["status"]["phase"].clone();
    assert_eq!(phase, "Failed");
    wish("Running");
    settles_unfinished(&cluster).await;
    cluster.assert_claim_says("c", "True", "DependenciesReady", "Pod is Ready");
    // Evicted.
    cluster.api.delete("pods", NS, "c");
    settles_unfinished(&cluster).await;
    // Its node is gone: the garbage collector of Pods says that it failed, and deletes it then.
    let collected = json!({"status": {"phase": "Failed", "conditions": [
        condition("DisruptionTarget", "True", "DeletionByPodGC", "no node"),
    ]}});
    cluster.api.edit("pods", NS, "c", &collected);
    for _ in 0..3 {
        cluster.passes().await;
    }
    cluster.api.delete("pods", NS, "c");
    settles_unfinished(&cluster).await;
    cluster.assert_claim_says("c", "True", "DependenciesReady", "Pod is Ready");
    assert_eq!(cluster.get_sandbox("c")["metadata"]["uid"], uid);
    // What ends by itself has finished.
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
    assert!(!is_going(&pod), "it goes once its image is kept: {pod:#}");
    assert_eq!(cluster.api.list("sandboxsnapshots").len(), 1);
}

#[tokio::test]
async fn a_sandbox_that_has_finished_says_so_while_its_pod_goes() {
    let cluster = cold(json!({}));
    cluster.settle().await;
    let succeeded = json!({"status": {"phase": "Succeeded"}});
    cluster.api.edit("pods", NS, "c", &succeeded);
    cluster.settle().await;
    let finished = cluster.claim_says("c", "Finished");
    assert_eq!(finished.as_ref().unwrap().1, "PodSucceeded");
    cluster.edit("sandboxes", "c", &mode("Suspended"));
    cluster.passes().await;
    cluster.passes().await;
    assert!(is_going(&cluster.api.get("pods", NS, "c").unwrap()));
    assert_eq!(cluster.claim_says("c", "Finished"), finished);
    cluster.settle().await;
    assert_eq!(cluster.claim_says("c", "Finished"), None);
}

#[tokio::test]
async fn a_sandbox_that_expires_by_itself_is_told_apart() {
    let cluster = cold(json!({}));
    cluster.settle().await;
    let past = json!({"spec": {"shutdownTime": "2026-01-01T00:00:00Z"}});
    cluster.edit("sandboxes", "c", &past);
    cluster.settle().await;
    cluster.assert_claim_says(
        "c",
        "False",
        "SandboxExpired",
        "Underlying Sandbox resource has expired independently of the Claim.",
    );
}

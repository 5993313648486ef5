use std::sync::Arc;

use rstest::rstest;

use super::*;
use crate::claim::plan::Refusal;

fn now() -> Timestamp {
    "2026-01-01T00:00:00Z".parse().unwrap()
}

fn claim(status: Value) -> SandboxClaim {
    serde_json::from_value(json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
        "metadata": {"name": "c", "namespace": "ns", "uid": "u-c", "generation": 3, "resourceVersion": "9"},
        "spec": {"warmPoolRef": {"name": "p"}}, "status": status,
    }))
    .unwrap()
}

fn condition(type_: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({
        "type": type_, "status": status, "reason": reason, "message": message,
        "observedGeneration": 8, "lastTransitionTime": "2025-01-01T00:00:00Z",
    })
}

fn sandbox(conditions: Value) -> Arc<Sandbox> {
    sandbox_with(conditions, json!({}))
}

fn sandbox_with(conditions: Value, change: Value) -> Arc<Sandbox> {
    let mut whole = json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {"name": "x", "annotations": {"agents.x-k8s.io/pod-name": "x"}},
        "spec": {"podTemplate": {"spec": {"containers": []}}},
        "status": {"podIPs": ["10.0.0.1"], "conditions": conditions},
    });
    merge_patch::apply(&mut whole, &change);
    Arc::new(serde_json::from_value(whole).unwrap())
}

fn ready() -> Value {
    condition("Ready", "True", "DependenciesReady", "Pod is Ready")
}

/// Returns status, reason and message of Ready.
fn ready_of(status: &SandboxClaimStatus) -> (String, String, String) {
    let ready = conditions::find(&status.conditions, "Ready").unwrap();
    assert_eq!(ready.observed_generation, Some(3));
    (
        ready.status.clone(),
        ready.reason.clone(),
        ready.message.clone(),
    )
}

#[rstest]
#[case::as_the_sandbox(Outlook::Sandbox(sandbox(json!([ready()]))), "True", "DependenciesReady", "Pod is Ready")]
#[case::as_a_sandbox_that_is_not_ready(Outlook::Sandbox(sandbox(json!([condition("Ready", "False", "SandboxSuspended", "Sandbox is suspended")]))), "False", "SandboxSuspended", "Sandbox is suspended")]
#[case::no_condition_yet(Outlook::Sandbox(sandbox(json!([]))), "False", "SandboxNotReady", "Sandbox is not ready")]
#[case::no_name_of_the_pod(Outlook::Sandbox(sandbox_with(json!([ready()]), json!({"metadata": {"annotations": null}}))), "False", "SandboxNotReady", "Sandbox is not ready")]
#[case::sandbox_expired(Outlook::Sandbox(sandbox_with(json!([ready()]), json!({"spec": {"shutdownTime": "2025-12-31T00:00:00Z"}}))), "False", "SandboxExpired", "Underlying Sandbox resource has expired independently of the Claim.")]
#[case::none(
    Outlook::NoSandbox,
    "False",
    "SandboxMissing",
    "Sandbox does not exist"
)]
#[case::refused(Outlook::Refused { why: Refusal::PoolNotFound("p".into()), sandbox: None }, "False", "WarmPoolNotFound", "SandboxWarmPool \"p\" not found")]
#[case::pending(Outlook::Refused { why: Refusal::CreatePending, sandbox: None }, "False", "SandboxCreatePending", "Sandbox already created; waiting for cache to converge")]
#[case::name_taken(Outlook::Refused { why: Refusal::NameTaken("c".into()), sandbox: None }, "False", "ReconcilerError", "Error seen: Sandbox \"c\" exists and is not controlled by this claim. Please use a different claim name or delete the sandbox manually")]
#[case::failed(Outlook::Failed { message: "quota".into(), sandbox: None }, "False", "ReconcilerError", "Error seen: quota")]
#[case::expired(Outlook::Expired { sandbox: None, foreign: None }, "False", "ClaimExpired", "Claim expired. Sandbox cleanup initiated.")]
#[case::expired_and_foreign(Outlook::Expired { sandbox: None, foreign: Some("x".into()) }, "False", "ClaimExpired", "Claim expired. Sandbox \"x\" is not owned by this claim; deletion skipped.")]
fn ready_is_upstreams(
    #[case] outlook: Outlook,
    #[case] status: &str,
    #[case] reason: &str,
    #[case] message: &str,
) {
    let after = next(&claim(Value::Null), &outlook, now());
    let expected = (status.to_owned(), reason.to_owned(), message.to_owned());
    assert_eq!(ready_of(&after), expected);
}

#[test]
fn ready_name_and_addresses_are_one_write_on_the_version_that_was_seen() {
    let claim = claim(Value::Null);
    let after = next(&claim, &Outlook::Sandbox(sandbox(json!([ready()]))), now());
    let patch = patch(&claim, &SandboxClaimStatus::default(), &after).unwrap();
    assert_eq!(patch["metadata"], json!({"resourceVersion": "9"}));
    assert_eq!(
        patch["status"]["sandbox"],
        json!({"name": "x", "podIPs": ["10.0.0.1"]})
    );
    assert_eq!(patch["status"]["conditions"][0]["status"], "True");
}

#[test]
fn an_unchanged_status_is_not_written() {
    let outlook = Outlook::Sandbox(sandbox(json!([ready()])));
    let first = next(&claim(Value::Null), &outlook, now());
    let claim = claim(json!(first));
    assert_eq!(patch(&claim, &first, &next(&claim, &outlook, now())), None);
}

#[test]
fn finished_is_copied_removed_with_the_sandboxs_and_kept_when_the_sandbox_is_gone() {
    let finished = condition(
        "Finished",
        "True",
        "PodSucceeded",
        "Pod completed successfully",
    );
    let done = Outlook::Sandbox(sandbox(json!([finished])));
    let after = next(&claim(Value::Null), &done, now());
    assert!(conditions::is_true(&after.conditions, "Finished"));
    let held = claim(json!(after));
    let again = next(&held, &Outlook::Sandbox(sandbox(json!([]))), now());
    assert!(conditions::find(&again.conditions, "Finished").is_none());
    let expired = Outlook::Expired {
        sandbox: None,
        foreign: None,
    };
    let after = next(&held, &expired, now());
    assert!(conditions::is_true(&after.conditions, "Finished"));
    assert_eq!(after.sandbox, None);
}

#[test]
fn the_name_of_a_lost_sandbox_stays_without_its_addresses() {
    let held = claim(json!({"sandbox": {"name": "x", "podIPs": ["10.0.0.1"]}}));
    let after = next(&held, &Outlook::NoSandbox, now());
    assert_eq!(json!(after.sandbox), json!({"name": "x"}));
}

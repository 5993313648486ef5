use rstest::rstest;
use serde_json::{Value, json};

use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

/// Returns a condition; `since`: second of its last transition.
fn condition_of(type_: &str, status: &str, reason: &str, since: i64) -> Value {
    json!({
        "type": type_, "status": status, "reason": reason, "message": "",
        "lastTransitionTime": at(since).to_string(),
    })
}

fn sandbox(conditions: &[Value]) -> Sandbox {
    let whole = json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {"name": "m", "namespace": "ns"},
        "spec": {"podTemplate": {"spec": {"containers": []}}},
        "status": {"conditions": conditions},
    });
    serde_json::from_value(whole).unwrap()
}

/// Returns a claim that was created in this second.
fn claim(second: i64) -> SandboxClaim {
    let whole = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
        "metadata": {"name": "c", "creationTimestamp": at(second).to_string()},
        "spec": {"warmPoolRef": {"name": "p"}},
    });
    serde_json::from_value(whole).unwrap()
}

fn asleep(status: &str) -> Value {
    condition_of(conditions::HIBERNATED, status, "Idle", 1)
}

fn ready(status: &str, since: i64) -> Value {
    condition_of(conditions::READY, status, "Ready", since)
}

fn restored(reason: &str, since: i64) -> Value {
    let status = if reason == COLD_STARTED {
        "False"
    } else {
        "True"
    };
    condition_of(conditions::RESTORED, status, reason, since)
}

/// Returns Restored of a sandbox that sleeps on, as its image cannot be read.
fn failed(since: i64) -> Value {
    condition_of(conditions::RESTORED, "False", "ImageCorrupt", since)
}

#[rstest]
#[case::it_never_slept(&[ready("True", 1)], None)]
#[case::it_sleeps(&[ready("True", 1), asleep("True")], Some(7))]
#[case::it_dozes(&[ready("True", 1), condition_of(conditions::HIBERNATED, "False", hibernated::DOZING, 2)], Some(7))]
#[case::it_wakes(&[ready("True", 1), condition_of(conditions::HIBERNATED, "False", hibernated::WAKING, 2)], Some(7))]
#[case::it_is_put_to_sleep(&[ready("True", 1), condition_of(conditions::HIBERNATED, "False", hibernated::SAVING, 2)], Some(7))]
#[case::it_woke(&[ready("True", 1), asleep("False")], None)]
#[case::its_wake_failed(&[ready("True", 1), asleep("False"), restored(COLD_STARTED, 12)], Some(2))]
#[case::its_wake_failed_a_while_ago(&[ready("True", 1), asleep("False"), restored(COLD_STARTED, 2)], None)]
#[case::it_starts_cold(&[ready("False", 3), restored(COLD_STARTED, 2)], None)]
#[case::it_has_started_cold(&[ready("True", 3), restored(COLD_STARTED, 2)], None)]
fn a_claim_waits_for_a_member_that_sleeps(
    #[case] conditions: &[Value],
    #[case] seconds: Option<u64>,
) {
    let left = patience(&sandbox(conditions), &claim(2), Some(at(10)), at(13));
    assert_eq!(left, seconds.map(Duration::from_secs));
}

#[test]
fn a_claim_waits_ten_seconds_at_most() {
    let left = |since, now| patience(&sandbox(&[asleep("True")]), &claim(1), since, now);
    assert_eq!(left(Some(at(10)), at(20)), None);
    assert_eq!(left(Some(at(10)), at(9)), Some(PATIENCE));
    assert_eq!(left(None, at(30)), Some(PATIENCE));
}

#[rstest]
#[case::never_restored(&[ready("False", 3)], false)]
#[case::restored(&[ready("True", 1), restored("Restored", 2)], false)]
#[case::cold_and_not_ready(&[ready("False", 1), restored(COLD_STARTED, 2)], true)]
#[case::cold_and_ready_as_it_slept(&[ready("True", 1), restored(COLD_STARTED, 2)], true)]
#[case::cold_and_ready_in_the_same_second(&[ready("True", 2), restored(COLD_STARTED, 2)], true)]
#[case::cold_and_ready_since(&[ready("True", 3), restored(COLD_STARTED, 2)], false)]
#[case::cold_without_ready(&[restored(COLD_STARTED, 2)], true)]
#[case::cold_before_the_claim(&[ready("True", 1), restored(COLD_STARTED, 1)], false)]
#[case::asleep_for_good(&[ready("True", 1), asleep("True"), failed(12)], true)]
#[case::awake_all_the_same(&[ready("True", 1), asleep("False"), failed(12)], false)]
fn a_wake_has_failed_until_the_sandbox_is_ready_again(
    #[case] conditions: &[Value],
    #[case] expected: bool,
) {
    assert_eq!(has_failed(&sandbox(conditions), &claim(7)), expected);
}

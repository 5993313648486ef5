use rstest::rstest;

use super::*;

fn snapshot(value: Value) -> SandboxSnapshot {
    let mut whole = json!({
        "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
        "metadata": {"name": "m", "namespace": "ns"}, "spec": {"sandboxName": "s"},
    });
    crate::merge_patch::apply(&mut whole, &value);
    serde_json::from_value(whole).unwrap()
}

fn committed(status: &str, reason: &str) -> Value {
    json!({"status": {"conditions": [{
        "type": "Committed", "status": status, "reason": reason, "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]}})
}

/// Snapshot that a node's agent has adopted, with this reason of Committed.
fn adopted(reason: &str, spec: Value) -> Value {
    let mut adopted = committed("False", reason);
    adopted["metadata"] = json!({"finalizers": ["torpor.dev/image"]});
    adopted["spec"] = spec;
    adopted
}

fn of_a_pod() -> Value {
    json!({"podUID": "u-p", "nodeName": "n1"})
}

fn now() -> Timestamp {
    "2026-01-01T00:10:00Z".parse().unwrap()
}

const NO_SANDBOX: Observed = Observed {
    sandbox_exists: false,
    node_exists: None,
};
const WITH_SANDBOX: Observed = Observed {
    sandbox_exists: true,
    node_exists: None,
};

#[test]
fn a_snapshot_of_an_unknown_sandbox_reports_that() {
    let Plan::SetCommitted(draft) = plan(&snapshot(json!({})), NO_SANDBOX, now()) else {
        panic!("the condition is to be written")
    };
    assert_eq!(
        (&*draft.status, &*draft.reason),
        ("False", "SandboxNotFound")
    );
    assert_eq!(draft.message, "Sandbox \"s\" does not exist");
}

#[test]
fn once_the_sandbox_exists_the_snapshot_waits_for_the_agent() {
    let plan = plan(
        &snapshot(committed("False", "SandboxNotFound")),
        WITH_SANDBOX,
        now(),
    );
    assert!(matches!(plan, Plan::SetCommitted(draft) if draft.reason == "Pending"));
}

#[rstest]
#[case::already_reported(committed("False", "SandboxNotFound"), NO_SANDBOX)]
#[case::reported_by_the_agent(committed("False", "Saving"), WITH_SANDBOX)]
#[case::nothing_reported_yet(json!({}), WITH_SANDBOX)]
#[case::committed_outlives_its_sandbox(committed("True", "Committed"), NO_SANDBOX)]
#[case::its_pod_is_gone_and_the_agent_reported_it(
    adopted("SandboxNotFound", of_a_pod()),
    WITH_SANDBOX
)]
#[case::a_pod_without_a_sandbox_is_saved(adopted("Saving", of_a_pod()), NO_SANDBOX)]
fn nothing_is_written(#[case] content: Value, #[case] observed: Observed) {
    assert_eq!(plan(&snapshot(content), observed, now()), Plan::Nothing);
}

#[test]
fn an_adopted_snapshot_without_a_pod_uid_reports_that_its_sandbox_is_gone() {
    let saving = snapshot(adopted("Saving", json!({})));
    let plan = plan(&saving, NO_SANDBOX, now());
    assert!(matches!(plan, Plan::SetCommitted(draft) if draft.reason == "SandboxNotFound"));
}

fn deleted_at(time: &str) -> SandboxSnapshot {
    snapshot(json!({
        "metadata": {"deletionTimestamp": time, "finalizers": ["torpor.dev/image"]},
        "spec": {"podUID": "u-p"}, "status": {"nodeName": "n1"},
    }))
}

#[rstest]
#[case::its_agent_died_before_its_first_report(of_a_pod(), json!({}), true)]
#[case::no_node_is_known(json!({}), json!({}), true)]
#[case::its_pod_is_gone_and_was_never_named(json!({}), json!({"nodeName": "n1"}), true)]
#[case::an_agent_has_it(of_a_pod(), json!({"nodeName": "n1"}), false)]
#[case::saved(json!({}), json!({"nodeName": "n1", "podUID": "u-p"}), false)]
fn a_deleted_snapshot_that_no_agent_adopted_is_released_though_its_node_exists(
    #[case] spec: Value,
    #[case] status: Value,
    #[case] let_go: bool,
) {
    let deleted = |time: &str| {
        snapshot(json!({
            "metadata": {"deletionTimestamp": time, "finalizers": ["torpor.dev/image"]},
            "spec": spec, "status": status,
        }))
    };
    let observed = Observed {
        sandbox_exists: true,
        node_exists: Some(true),
    };
    let expected = match let_go {
        true => Plan::Release,
        false => Plan::Requeue(NODE_GRACE),
    };
    let old = deleted("2026-01-01T00:00:00Z");
    assert_eq!(plan(&old, observed, now()), expected);
    // The agent may be about to report.
    let fresh = deleted("2026-01-01T00:09:50Z");
    let wait = Plan::Requeue(Duration::from_secs(50));
    assert_eq!(plan(&fresh, observed, now()), wait);
}

#[test]
fn an_image_is_given_up_only_when_its_node_is_gone_and_stayed_gone() {
    let old = deleted_at("2026-01-01T00:00:00Z");
    let fresh = deleted_at("2026-01-01T00:09:50Z");
    let with = |exists| Observed {
        sandbox_exists: true,
        node_exists: Some(exists),
    };
    assert_eq!(
        plan(&old, with(false), now()),
        Plan::Abandon { node: "n1".into() }
    );
    assert_eq!(plan(&old, with(true), now()), Plan::Requeue(NODE_GRACE));
    let wait = Duration::from_secs(50);
    assert_eq!(plan(&fresh, with(false), now()), Plan::Requeue(wait));
}

#[test]
fn a_foreign_finalizer_is_left_alone() {
    let snapshot = snapshot(json!({
        "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["x/y"]},
        "status": {"nodeName": "n1"},
    }));
    let observed = Observed {
        sandbox_exists: true,
        node_exists: Some(false),
    };
    assert_eq!(plan(&snapshot, observed, now()), Plan::Nothing);
}

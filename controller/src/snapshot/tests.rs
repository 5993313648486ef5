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

/// One that the agent of a node has adopted, and that says this.
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

const NOBODY: Around = Around {
    sandbox_exists: false,
    node_exists: None,
};
const SOMEBODY: Around = Around {
    sandbox_exists: true,
    node_exists: None,
};

#[test]
fn a_snapshot_of_an_unknown_sandbox_says_so() {
    let Plan::SetCommitted(draft) = plan(&snapshot(json!({})), NOBODY, now()) else {
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
        SOMEBODY,
        now(),
    );
    assert!(matches!(plan, Plan::SetCommitted(draft) if draft.reason == "Pending"));
}

#[rstest]
#[case::already_said(committed("False", "SandboxNotFound"), NOBODY)]
#[case::the_agents_business(committed("False", "Saving"), SOMEBODY)]
#[case::nothing_said_yet(json!({}), SOMEBODY)]
#[case::committed_outlives_its_sandbox(committed("True", "Committed"), NOBODY)]
#[case::its_pod_is_gone_and_the_agent_said_so(adopted("SandboxNotFound", of_a_pod()), SOMEBODY)]
#[case::a_pod_without_a_sandbox_is_saved(adopted("Saving", of_a_pod()), NOBODY)]
fn nothing_is_written(#[case] content: Value, #[case] around: Around) {
    assert_eq!(plan(&snapshot(content), around, now()), Plan::Nothing);
}

#[test]
fn of_one_that_names_no_pod_no_agent_tells_any_more_when_its_sandbox_is_gone() {
    let saving = snapshot(adopted("Saving", json!({})));
    let plan = plan(&saving, NOBODY, now());
    assert!(matches!(plan, Plan::SetCommitted(draft) if draft.reason == "SandboxNotFound"));
}

fn deleted_at(time: &str) -> SandboxSnapshot {
    snapshot(json!({
        "metadata": {"deletionTimestamp": time, "finalizers": ["torpor.dev/image"]},
        "spec": {"podUID": "u-p"}, "status": {"nodeName": "n1"},
    }))
}

#[rstest]
#[case::its_agent_died_before_it_said_a_word(of_a_pod(), json!({}), true)]
#[case::nobody_said_where(json!({}), json!({}), true)]
#[case::its_pod_is_gone_and_was_never_named(json!({}), json!({"nodeName": "n1"}), true)]
#[case::an_agent_has_it(of_a_pod(), json!({"nodeName": "n1"}), false)]
#[case::saved(json!({}), json!({"nodeName": "n1", "podUID": "u-p"}), false)]
fn one_that_no_agent_knows_of_is_let_go_though_its_node_is_there(
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
    let around = Around {
        sandbox_exists: true,
        node_exists: Some(true),
    };
    let expected = match let_go {
        true => Plan::Release,
        false => Plan::LookAgain(NODE_GRACE),
    };
    let old = deleted("2026-01-01T00:00:00Z");
    assert_eq!(plan(&old, around, now()), expected);
    // Its agent may be about to.
    let fresh = deleted("2026-01-01T00:09:50Z");
    let wait = Plan::LookAgain(Duration::from_secs(50));
    assert_eq!(plan(&fresh, around, now()), wait);
}

#[test]
fn an_image_is_given_up_only_when_its_node_is_gone_and_stayed_gone() {
    let old = deleted_at("2026-01-01T00:00:00Z");
    let fresh = deleted_at("2026-01-01T00:09:50Z");
    let with = |exists| Around {
        sandbox_exists: true,
        node_exists: Some(exists),
    };
    assert_eq!(
        plan(&old, with(false), now()),
        Plan::Abandon { node: "n1".into() }
    );
    assert_eq!(plan(&old, with(true), now()), Plan::LookAgain(NODE_GRACE));
    let wait = Duration::from_secs(50);
    assert_eq!(plan(&fresh, with(false), now()), Plan::LookAgain(wait));
}

#[test]
fn a_foreign_finalizer_is_left_alone() {
    let snapshot = snapshot(json!({
        "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["x/y"]},
        "status": {"nodeName": "n1"},
    }));
    let around = Around {
        sandbox_exists: true,
        node_exists: Some(false),
    };
    assert_eq!(plan(&snapshot, around, now()), Plan::Nothing);
}

use rstest::rstest;

use super::*;

fn status(value: Value) -> SandboxStatus {
    serde_json::from_value(value).unwrap()
}

fn ready(status: &str) -> Value {
    json!([{
        "type": "Ready", "status": status, "reason": "R", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }])
}

#[rstest]
#[case::nothing_changed(json!({"nodeName": "n"}), json!({"nodeName": "n"}), None)]
#[case::only_the_node_while_not_ready(
    json!({"conditions": ready("False")}),
    json!({"conditions": ready("False"), "nodeName": "n"}),
    None
)]
#[case::only_the_node_while_ready(
    json!({"conditions": ready("True")}),
    json!({"conditions": ready("True"), "nodeName": "n"}),
    Some(json!({"status": {"nodeName": "n"}}))
)]
#[case::the_node_with_another_change(
    json!({"conditions": ready("False")}),
    json!({"conditions": ready("False"), "nodeName": "n", "podIPs": ["1"]}),
    Some(json!({"status": {"nodeName": "n", "podIPs": ["1"]}}))
)]
#[case::a_removed_field_is_set_to_null(
    json!({"podIPs": ["1"], "service": "s"}),
    json!({"service": "s"}),
    Some(json!({"status": {"podIPs": null}}))
)]
fn only_changed_fields_are_written(
    #[case] old: Value,
    #[case] new: Value,
    #[case] expected: Option<Value>,
) {
    assert_eq!(patch(Some(&status(old)), &status(new)), expected);
}

#[test]
fn a_first_status_is_written_whole() {
    let new = status(json!({"selector": "x=y"}));
    assert_eq!(
        patch(None, &new),
        Some(json!({"status": {"selector": "x=y"}}))
    );
}

fn member(owner: &str) -> Sandbox {
    serde_json::from_value(json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {
            "name": "m", "creationTimestamp": "2026-01-01T00:00:00Z",
            "ownerReferences": [{
                "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": owner, "name": "o",
                "uid": "u", "controller": true,
            }],
        },
        "spec": {"podTemplate": {"spec": {"containers": []}}},
    }))
    .unwrap()
}

#[rstest]
#[case::starting("SandboxWarmPool", json!({}), json!({"conditions": ready("False")}), 1, Some(4))]
#[case::starting_for_long("SandboxWarmPool", json!({}), json!({"conditions": ready("False")}), 5, None)]
#[case::ready("SandboxWarmPool", json!({}), json!({"conditions": ready("True")}), 1, None)]
#[case::no_longer_ready("SandboxWarmPool", json!({"conditions": ready("True")}), json!({"conditions": ready("False")}), 1, None)]
#[case::an_address("SandboxWarmPool", json!({}), json!({"conditions": ready("False"), "podIPs": ["1"]}), 1, None)]
#[case::nothing_to_write("SandboxWarmPool", json!({}), json!({"nodeName": "n"}), 1, None)]
#[case::claimed("SandboxClaim", json!({}), json!({"conditions": ready("False")}), 1, None)]
fn the_status_of_a_starting_member_may_wait(
    #[case] owner: &str,
    #[case] before: Value,
    #[case] after: Value,
    #[case] age: i64,
    #[case] expected: Option<u64>,
) {
    let now = Timestamp::from_second(1_767_225_600 + age).unwrap();
    let wait = write_delay(&member(owner), &status(before), &status(after), now);
    assert_eq!(wait, expected.map(Duration::from_secs));
}

#[test]
fn a_pod_that_terminates_is_not_ready() {
    let pod = |change: Value| -> Pod {
        let mut whole = json!({
            "metadata": {"name": "s"},
            "status": {
                "phase": "Running", "podIPs": [{"ip": "10.0.0.1"}],
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        });
        crate::merge_patch::apply(&mut whole, &change);
        serde_json::from_value(whole).unwrap()
    };
    assert_eq!(
        pod_readiness(Some(&pod(json!({})))),
        (true, "Pod is Ready".to_owned())
    );
    let going = pod(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    assert_eq!(
        pod_readiness(Some(&going)),
        (false, "Pod is terminating".to_owned())
    );
}

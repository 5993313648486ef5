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
#[case::the_node_rides_along(
    json!({"conditions": ready("False")}),
    json!({"conditions": ready("False"), "nodeName": "n", "podIPs": ["1"]}),
    Some(json!({"status": {"nodeName": "n", "podIPs": ["1"]}}))
)]
#[case::what_went_is_set_to_null(
    json!({"podIPs": ["1"], "service": "s"}),
    json!({"service": "s"}),
    Some(json!({"status": {"podIPs": null}}))
)]
fn only_what_changed_is_written(
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

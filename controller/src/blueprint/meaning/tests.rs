use rstest::rstest;

use super::*;

fn container(fields: Value) -> Value {
    json!({"containers": [fields]})
}

fn volume(fields: Value) -> Value {
    json!({"volumes": [fields]})
}

/// Pairs of a spec as the user wrote it and as Go's types serialize it.
#[rstest]
#[case::an_empty_struct(container(json!({"name": "c"})), container(json!({"name": "c", "resources": {}})))]
#[case::empty_maps_in_a_struct(container(json!({"resources": {"limits": {}}})), container(json!({"resources": {}})))]
#[case::an_empty_text(container(json!({"env": [{"name": "A", "value": ""}]})), container(json!({"env": [{"name": "A"}]})))]
#[case::false_of_a_container(container(json!({"stdin": false, "tty": false})), container(json!({})))]
#[case::false_of_a_mount(container(json!({"volumeMounts": [{"name": "v", "readOnly": false, "subPath": ""}]})), container(json!({"volumeMounts": [{"name": "v"}]})))]
#[case::false_of_a_pod(json!({"hostNetwork": false, "hostname": "", "priorityClassName": ""}), json!({}))]
#[case::zero_of_a_probe(container(json!({"livenessProbe": {"initialDelaySeconds": 0, "exec": {"command": ["a"]}}})), container(json!({"livenessProbe": {"exec": {"command": ["a"]}}})))]
#[case::a_port_of_the_host(container(json!({"ports": [{"containerPort": 1, "hostPort": 0}]})), container(json!({"ports": [{"containerPort": 1}]})))]
#[case::a_divisor(
    container(json!({"env": [{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}]})),
    container(json!({"env": [{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "0"}}}]}))
)]
#[case::the_medium_of_a_volume(volume(json!({"emptyDir": {"medium": ""}})), volume(json!({"emptyDir": {}})))]
#[case::a_claim_of_a_volume(
    volume(json!({"ephemeral": {"volumeClaimTemplate": {"spec": {"accessModes": ["A"]}}}})),
    volume(json!({"ephemeral": {"volumeClaimTemplate": {"metadata": {"creationTimestamp": null}, "spec": {"accessModes": ["A"], "resources": {}}}}}))
)]
#[case::a_toleration(json!({"tolerations": [{"operator": "Exists", "key": "", "effect": ""}]}), json!({"tolerations": [{"operator": "Exists"}]}))]
#[case::maps_of_drivers(volume(json!({"csi": {"driver": "d", "volumeAttributes": {}}})), volume(json!({"csi": {"driver": "d"}})))]
fn a_zero_that_go_holds_by_value_equals_an_absent_field(#[case] user: Value, #[case] go: Value) {
    assert!(mean_the_same(&user, &go), "{user} {go}");
}

/// Pairs of specs with different meanings.
#[rstest]
#[case::a_pods_own_resources(json!({"resources": {}}), json!({}))]
#[case::an_empty_volume(volume(json!({"name": "v", "emptyDir": {}})), volume(json!({"name": "v"})))]
#[case::a_security_context(json!({"securityContext": {}}), json!({}))]
#[case::may_be_root(json!({"securityContext": {"runAsNonRoot": false}}), json!({"securityContext": {}}))]
#[case::is_root(json!({"securityContext": {"runAsUser": 0}}), json!({"securityContext": {}}))]
#[case::no_token(json!({"automountServiceAccountToken": false}), json!({}))]
#[case::no_links(json!({"enableServiceLinks": false}), json!({}))]
#[case::killed_at_once(json!({"terminationGracePeriodSeconds": 0}), json!({}))]
#[case::no_priority(json!({"priority": 0}), json!({}))]
#[case::read_only_of_a_driver(volume(json!({"csi": {"readOnly": false}})), volume(json!({"csi": {}})))]
#[case::a_size_of_nothing(volume(json!({"emptyDir": {"sizeLimit": "0"}})), volume(json!({"emptyDir": {}})))]
#[case::an_optional_key(
    container(json!({"envFrom": [{"secretRef": {"name": "s", "optional": false}}]})),
    container(json!({"envFrom": [{"secretRef": {"name": "s"}}]}))
)]
#[case::an_option_of_the_resolver(json!({"dnsConfig": {"options": [{"name": "a", "value": ""}]}}), json!({"dnsConfig": {"options": [{"name": "a"}]}}))]
#[case::an_empty_label(json!({"nodeSelector": {"role": ""}}), json!({}))]
#[case::an_empty_label_among_others(json!({"nodeSelector": {"role": "", "a": "b"}}), json!({"nodeSelector": {"a": "b"}}))]
#[case::a_label_to_select_by(json!({"labelSelector": {"matchLabels": {"name": ""}}}), json!({"labelSelector": {}}))]
#[case::a_limit_of_nothing(container(json!({"resources": {"limits": {"cpu": "0"}}})), container(json!({})))]
#[case::a_divisor_of_its_own(json!({"divisor": "1"}), json!({}))]
#[case::what_is_not_known(json!({"fieldOfTomorrow": false}), json!({}))]
fn a_zero_behind_a_pointer_or_in_a_users_map_is_a_value(#[case] one: Value, #[case] other: Value) {
    assert!(!mean_the_same(&one, &other), "{one} {other}");
}

#[rstest]
#[case("1", Some(1000))]
#[case("0.5", Some(500))]
#[case("100m", Some(100))]
#[case("1Ki", Some(1_024_000))]
#[case("1.5Gi", Some(1_610_612_736_000))]
#[case("2k", Some(2_000_000))]
#[case("0.0001", None)]
#[case("x", None)]
#[case("", None)]
fn quantities_are_read_exactly(#[case] text: &str, #[case] expected: Option<i128>) {
    assert_eq!(thousandths(text), expected);
}

use rstest::rstest;
use serde_json::{Value, json};

use super::*;

fn node() -> NodeFacts {
    let node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": "n1", "labels": {"disk": "ssd", "cores": "8"}},
        "spec": {"taints": [
            {"key": "gpu", "value": "a", "effect": "NoSchedule"},
            {"key": "slow", "effect": "PreferNoSchedule"},
        ]},
    });
    NodeFacts::of(serde_json::from_value(node).unwrap())
}

fn pod(mut spec: Value) -> PodSpec {
    spec["containers"] = json!([]);
    serde_json::from_value(spec).unwrap()
}

fn class(scheduling: Value) -> RuntimeClass {
    let class = json!({
        "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass",
        "metadata": {"name": "torpor"}, "handler": "torpor", "scheduling": scheduling,
    });
    serde_json::from_value(class).unwrap()
}

fn requiring(terms: Value) -> Value {
    let required = json!({"nodeSelectorTerms": terms});
    let name = "requiredDuringSchedulingIgnoredDuringExecution";
    json!({"affinity": {"nodeAffinity": {name: required}}})
}

fn expression(key: &str, operator: &str, values: Value) -> Value {
    requiring(json!([{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]))
}

#[rstest]
#[case::anywhere(json!({}), true)]
#[case::its_label(json!({"nodeSelector": {"disk": "ssd"}}), true)]
#[case::another_value(json!({"nodeSelector": {"disk": "hdd"}}), false)]
#[case::in_a_list(expression("disk", "In", json!(["hdd", "ssd"])), true)]
#[case::not_in_a_list(expression("disk", "NotIn", json!(["ssd"])), false)]
#[case::a_missing_key_is_in_no_list(expression("zone", "NotIn", json!(["a"])), true)]
#[case::a_label_exists(expression("disk", "Exists", json!([])), true)]
#[case::a_label_does_not_exist(expression("disk", "DoesNotExist", json!([])), false)]
#[case::greater(expression("cores", "Gt", json!(["4"])), true)]
#[case::less(expression("cores", "Lt", json!(["4"])), false)]
#[case::no_number(expression("disk", "Gt", json!(["4"])), false)]
#[case::an_unknown_operator(expression("disk", "Near", json!(["ssd"])), false)]
#[case::its_name(requiring(json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}])), true)]
#[case::another_name(requiring(json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}])), false)]
#[case::an_empty_term(requiring(json!([{}])), false)]
#[case::one_of_two_terms(requiring(json!([{}, {"matchExpressions": [{"key": "disk", "operator": "Exists"}]}])), true)]
fn a_node_is_selected_by_the_schedulers_rules(#[case] spec: Value, #[case] expected: bool) {
    assert_eq!(is_selected(&pod(spec), None, &node()), expected);
}

#[rstest]
#[case::without(json!([]), false)]
#[case::that_value(json!([{"key": "gpu", "value": "a", "effect": "NoSchedule"}]), true)]
#[case::any_effect(json!([{"key": "gpu", "operator": "Equal", "value": "a"}]), true)]
#[case::another_value(json!([{"key": "gpu", "value": "b"}]), false)]
#[case::another_effect(json!([{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}]), false)]
#[case::that_key(json!([{"key": "gpu", "operator": "Exists"}]), true)]
#[case::another_key(json!([{"key": "cpu", "operator": "Exists"}]), false)]
#[case::everything(json!([{"operator": "Exists"}]), true)]
#[case::no_key_and_no_operator(json!([{"value": "a"}]), false)]
#[case::an_unknown_operator(json!([{"key": "gpu", "operator": "Lt", "value": "5"}]), false)]
fn a_taint_keeps_pods_off_that_do_not_tolerate_it(
    #[case] tolerations: Value,
    #[case] expected: bool,
) {
    let pod_spec = pod(json!({"tolerations": tolerations}));
    assert_eq!(is_open(&pod_spec, None, &node()), expected);
    let class = class(json!({"tolerations": tolerations}));
    assert_eq!(is_open(&pod(json!({})), Some(&class), &node()), expected);
    let cordoned = NodeFacts {
        is_cordoned: true,
        ..node()
    };
    assert!(!is_open(&pod_spec, None, &cordoned));
}

#[test]
fn a_runtime_class_selects_nodes_too() {
    for (value, expected) in [("ssd", true), ("hdd", false)] {
        let class = class(json!({"nodeSelector": {"disk": value}}));
        assert_eq!(
            is_selected(&pod(json!({})), Some(&class), &node()),
            expected
        );
    }
}

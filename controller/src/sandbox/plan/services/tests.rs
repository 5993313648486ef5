use rstest::rstest;
use serde_json::{Value, json};

use super::*;

fn ports_of(spec: Value) -> Vec<String> {
    let spec: PodSpec = serde_json::from_value(spec).unwrap();
    service_ports(&spec)
        .iter()
        .map(|port| {
            let (name, protocol) = (
                port.name.as_deref().unwrap(),
                port.protocol.as_deref().unwrap(),
            );
            assert_eq!(port.target_port, Some(IntOrString::Int(port.port)));
            format!("{name} {}/{protocol}", port.port)
        })
        .collect()
}

fn container(ports: Value) -> Value {
    json!({"containers": [{"name": "c", "ports": ports}]})
}

#[rstest]
#[case::none(json!([]), &[])]
#[case::a_name_is_made_up(json!([{"containerPort": 80}]), &["p-80-tcp 80/TCP"])]
#[case::an_explicit_name_is_kept(json!([{"containerPort": 80, "name": "web"}]), &["web 80/TCP"])]
#[case::ordered_by_port_then_protocol(
    json!([{"containerPort": 90}, {"containerPort": 53, "protocol": "UDP"}, {"containerPort": 53}]),
    &["p-53-tcp 53/TCP", "p-53-udp 53/UDP", "p-90-tcp 90/TCP"]
)]
#[case::one_per_port_and_protocol_with_the_first_name(
    json!([{"containerPort": 80}, {"containerPort": 80, "name": "a"}, {"containerPort": 80, "name": "b"}]),
    &["a 80/TCP"]
)]
#[case::a_name_that_is_taken_is_not_given_twice(
    json!([{"containerPort": 80, "name": "web"}, {"containerPort": 81, "name": "web"}]),
    &["web 80/TCP", "p-81-tcp 81/TCP"]
)]
#[case::a_made_up_name_gives_way_to_an_explicit_one(
    json!([{"containerPort": 80}, {"containerPort": 81, "name": "p-80-tcp"}]),
    &["p-80-tcp-2 80/TCP", "p-80-tcp 81/TCP"]
)]
#[case::port_zero_is_no_port(json!([{"containerPort": 0}]), &[])]
fn ports_of_one_container(#[case] ports: Value, #[case] expected: &[&str]) {
    assert_eq!(ports_of(container(ports)), expected);
}

#[test]
fn only_init_containers_that_keep_running_count() {
    let spec = json!({
        "containers": [{"name": "c", "ports": [{"containerPort": 80}]}],
        "initContainers": [
            {"name": "once", "ports": [{"containerPort": 1}]},
            {"name": "sidecar", "restartPolicy": "Always", "ports": [{"containerPort": 2}]},
        ],
    });
    assert_eq!(ports_of(spec), ["p-2-tcp 2/TCP", "p-80-tcp 80/TCP"]);
}

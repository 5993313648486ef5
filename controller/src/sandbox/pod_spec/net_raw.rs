//! Finds the containers of a Pod spec that add the capability NET_RAW. The node cannot tell,
//! because containerd gives it to each container by default.

use serde_json::{Map, Value};

/// Returns the comma-separated names of the containers that add NET_RAW or are privileged, or
/// `None` if there are none.
pub(super) fn containers(spec: &Map<String, Value>) -> Option<String> {
    let lists = ["initContainers", "containers"].map(|list| spec.get(list)?.as_array());
    let all = lists.into_iter().flatten().flatten();
    let adding = all.filter(|container| adds_net_raw(container));
    let names: Vec<&str> = adding.filter_map(|one| one["name"].as_str()).collect();
    (!names.is_empty()).then(|| names.join(","))
}

fn adds_net_raw(container: &Value) -> bool {
    let context = &container["securityContext"];
    let added = context["capabilities"]["add"].as_array();
    let mut added = added.into_iter().flatten().filter_map(Value::as_str);
    context["privileged"] == true || added.any(is_net_raw)
}

/// Compares the name as containerd does: in any case, with or without the prefix.
fn is_net_raw(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    matches!(
        name.strip_prefix("CAP_").unwrap_or(&name),
        "NET_RAW" | "ALL"
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn named(contexts: &[Value]) -> Option<String> {
        let all = contexts.iter().enumerate().map(
            |(index, context)| json!({ "name": format!("c{index}"), "securityContext": context }),
        );
        let spec = json!({
            "initContainers": [{ "name": "setup", "securityContext": { "privileged": true } }],
            "containers": all.collect::<Vec<_>>(),
        });
        containers(spec.as_object().expect("an object"))
    }

    #[test]
    fn containers_that_add_net_raw_are_named() {
        let adds = |name: &str| json!({ "capabilities": { "add": ["CHOWN", name] } });
        let found = named(&[
            adds("NET_RAW"),
            adds("NET_ADMIN"),
            adds("cap_net_raw"),
            adds("ALL"),
            json!({ "capabilities": { "drop": ["NET_RAW"] } }),
            json!(null),
        ]);
        assert_eq!(found.as_deref(), Some("setup,c0,c2,c3"));
    }

    #[test]
    fn a_pod_spec_without_net_raw_names_no_container() {
        for spec in [json!({}), json!({ "containers": [{ "name": "c" }] })] {
            assert_eq!(containers(spec.as_object().expect("an object")), None);
        }
    }
}

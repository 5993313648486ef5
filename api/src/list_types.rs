//! List types of the Kubernetes types that our types embed (pod spec, claim spec, network rules).
//!
//! k8s-openapi's schemas lack them. Server-side apply merges lists by these types, so they must
//! equal those of the Kubernetes API.

use serde_json::{Map, Value, json};

/// Lists that merge by key: property name and keys of an item. All other lists are atomic.
const MAPS: [(&str, &[&str]); 14] = [
    ("claims", &["name"]),
    ("containers", &["name"]),
    ("env", &["name"]),
    ("ephemeralContainers", &["name"]),
    ("hostAliases", &["ip"]),
    ("imagePullSecrets", &["name"]),
    ("initContainers", &["name"]),
    ("ports", &["containerPort", "protocol"]),
    ("resourceClaims", &["name"]),
    ("schedulingGates", &["name"]),
    (
        "topologySpreadConstraints",
        &["topologyKey", "whenUnsatisfiable"],
    ),
    ("volumeDevices", &["devicePath"]),
    ("volumeMounts", &["mountPath"]),
    ("volumes", &["name"]),
];

/// Adds the list type to the schema of one array property of an embedded Kubernetes type.
///
/// A map key must be required or have a default, so the API's own default is added where the key is
/// optional.
pub fn mark(property: &str, schema: &mut Map<String, Value>) {
    let keys = MAPS
        .iter()
        .find(|(name, keys)| *name == property && has_keys(schema, keys));
    let Some((_, keys)) = keys else {
        schema.insert("x-kubernetes-list-type".into(), "atomic".into());
        return;
    };
    schema.insert("x-kubernetes-list-type".into(), "map".into());
    schema.insert("x-kubernetes-list-map-keys".into(), json!(keys));
    let Some(items) = schema.get_mut("items").and_then(Value::as_object_mut) else {
        return;
    };
    let required: Vec<String> = items
        .get("required")
        .and_then(Value::as_array)
        .map(|all| {
            all.iter()
                .filter_map(Value::as_str)
                .map(str::to_owned)
                .collect()
        })
        .unwrap_or_default();
    for key in keys
        .iter()
        .filter(|key| !required.iter().any(|name| name == *key))
    {
        if let Some(Value::Object(property)) = items["properties"].get_mut(key) {
            let default = if *key == "protocol" { "TCP" } else { "" };
            property.insert("default".into(), default.into());
        }
    }
}

/// Reports whether the list's items have all the keys. The keys distinguish the `ports` of a
/// container from those of a network rule.
fn has_keys(schema: &Map<String, Value>, keys: &[&str]) -> bool {
    let properties = schema
        .get("items")
        .and_then(|items| items.get("properties"));
    keys.iter()
        .all(|key| properties.is_some_and(|properties| properties.get(key).is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marked(property: &str, schema: Value) -> Value {
        let Value::Object(mut schema) = schema else {
            panic!("an object")
        };
        mark(property, &mut schema);
        schema.into()
    }

    #[test]
    fn container_ports_merge_by_port_and_protocol_and_protocol_has_its_default() {
        let ports = json!({"items": {
            "properties": {"containerPort": {}, "protocol": {}}, "required": ["containerPort"],
        }});
        let ports = marked("ports", ports);
        assert_eq!(ports["x-kubernetes-list-type"], "map");
        assert_eq!(
            ports["x-kubernetes-list-map-keys"],
            json!(["containerPort", "protocol"])
        );
        assert_eq!(ports["items"]["properties"]["protocol"]["default"], "TCP");
        assert_eq!(
            ports["items"]["properties"]["containerPort"].get("default"),
            None
        );
    }

    #[test]
    fn ports_of_a_network_rule_are_atomic() {
        let ports = json!({"items": {"properties": {"port": {}, "protocol": {}}}});
        assert_eq!(marked("ports", ports)["x-kubernetes-list-type"], "atomic");
    }

    #[test]
    fn unlisted_lists_are_atomic() {
        assert_eq!(
            marked("command", json!({"items": {}}))["x-kubernetes-list-type"],
            "atomic"
        );
    }
}

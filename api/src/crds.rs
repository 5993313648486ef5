//! The CustomResourceDefinitions as YAML, made from the types of this crate.
//!
//! What the derived schemas lack is put right here, in one walk: no `nullable` (the API's own kinds have none, and a null is dropped by the apiserver), no
//! prose of embedded Kubernetes types (it is three quarters of the size, and `kubectl apply` keeps a copy in an annotation of at most 256 KiB), list types, and
//! the usual form of int-or-string.

use kube::CustomResourceExt;
use serde_json::{Map, Value, json};

use crate::{
    PodSnapshot, PodSnapshotManualTrigger, Sandbox, SandboxClaim, SandboxNode, SandboxSnapshot,
    SandboxTemplate, SandboxWarmPool, SnapshotClass, list_types,
};

/// A quantity such as `1.5Gi`, as the Kubernetes API's generators write it.
const QUANTITY: &str = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$";

/// Where Kubernetes types are embedded in ours: path of property names.
const EMBEDDED: [&[&str]; 4] = [
    &["podTemplate", "spec"],
    &["volumeClaimTemplates", "spec"],
    &["networkPolicy", "egress"],
    &["networkPolicy", "ingress"],
];

/// A definition cannot be written as YAML.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the definition {name} as YAML")]
pub struct NotWritable {
    name: String,
    source: serde_saphyr::ser::Error,
}

/// Definitions by the name of their file, `<group>_<plural>.yaml`; the same bytes each time.
pub fn files(definitions: Vec<Value>) -> Result<Vec<(String, String)>, NotWritable> {
    let mut files = Vec::new();
    for crd in definitions {
        let group = crd["spec"]["group"].as_str().unwrap_or_default();
        let plural = crd["spec"]["names"]["plural"].as_str().unwrap_or_default();
        let name = format!("{group}_{plural}.yaml");
        let yaml = serde_saphyr::to_string(&crd).map_err(|source| NotWritable {
            name: name.clone(),
            source,
        })?;
        let text = format!(
            "# Generated from the types of the crate torpor-api. To change it:\n\
             # cargo run -p torpor-api --bin torpor-crds -- deploy\n{yaml}"
        );
        files.push((name, text));
    }
    files.sort();
    Ok(files)
}

/// The definitions that Torpor cannot do without, as JSON, ready for an apiserver.
pub fn definitions() -> Vec<Value> {
    let derived = [
        json!(Sandbox::crd()),
        json!(SandboxClaim::crd()),
        json!(SandboxTemplate::crd()),
        json!(SandboxWarmPool::crd()),
        json!(SandboxSnapshot::crd()),
        json!(SandboxNode::crd()),
        json!(SnapshotClass::crd()),
    ];
    derived.into_iter().map(finished).collect()
}

/// The definitions of GKE's kinds, for clusters that are not GKE; the same way.
pub fn pod_snapshot_definitions() -> Vec<Value> {
    let derived = [
        json!(PodSnapshot::crd()),
        json!(PodSnapshotManualTrigger::crd()),
    ];
    derived.into_iter().map(finished).collect()
}

fn finished(mut crd: Value) -> Value {
    let kind = crd["spec"]["names"]["kind"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    crd["spec"]["names"]["listKind"] = format!("{kind}List").into();
    if let Some(versions) = crd["spec"]["versions"].as_array_mut() {
        for version in versions {
            finish_schema(&mut version["schema"]["openAPIV3Schema"], &mut Vec::new());
        }
    }
    sorted(crd)
}

/// Puts one schema right, then those below it. `path` holds the names of the properties above.
fn finish_schema(schema: &mut Value, path: &mut Vec<String>) {
    let Value::Object(node) = schema else { return };
    node.remove("nullable");
    int_or_string(node);
    if is_embedded(path) {
        node.remove("description");
        if node.get("type") == Some(&json!("array")) {
            list_types::mark(path.last().map_or("", String::as_str), node);
        }
    }
    for (key, below) in node.iter_mut() {
        match (key.as_str(), below) {
            ("properties", Value::Object(properties)) => {
                for (name, property) in properties {
                    path.push(name.clone());
                    finish_schema(property, path);
                    path.pop();
                }
            }
            ("items" | "additionalProperties", below) => finish_schema(below, path),
            _ => {}
        }
    }
}

fn is_embedded(path: &[String]) -> bool {
    EMBEDDED.iter().any(|entry| {
        path.windows(entry.len())
            .any(|part| part.iter().zip(*entry).all(|(a, b)| a == b))
    })
}

fn int_or_string(node: &mut Map<String, Value>) {
    if node.get("x-kubernetes-int-or-string") != Some(&json!(true)) {
        return;
    }
    // k8s-openapi gives a quantity and an int-or-string the same schema; only the prose tells them apart.
    let prose = node
        .get("description")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if prose.contains("Quantity") {
        node.insert("pattern".into(), QUANTITY.into());
    }
    node.insert(
        "anyOf".into(),
        json!([{"type": "integer"}, {"type": "string"}]),
    );
}

/// The same value with the keys of every object in order, whatever serde_json's map is.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<(String, Value)> = map.into_iter().collect();
            entries.sort_by(|a, b| a.0.cmp(&b.0));
            entries
                .into_iter()
                .map(|(key, value)| (key, sorted(value)))
                .collect()
        }
        Value::Array(list) => list.into_iter().map(sorted).collect(),
        // Limits come as floating point out of the definition's type; whole ones are written whole.
        Value::Number(number) if number.as_f64() == Some(0.0) => 0.into(),
        other => other,
    }
}

#[cfg(test)]
mod tests;

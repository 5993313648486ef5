//! Generates the CustomResourceDefinitions as YAML from the types of this crate.
//!
//! One walk over the derived schemas makes four corrections:
//! - It removes `nullable`: the API's own kinds have none, and the apiserver drops a null.
//! - It removes descriptions of embedded Kubernetes types: they are three quarters of the size, and
//!   `kubectl apply` keeps a copy in an annotation of at most 256 KiB.
//! - It adds list types.
//! - It gives int-or-string its usual form.

use kube::CustomResourceExt;
use serde_json::{Map, Value, json};

use crate::{
    PodSnapshot, PodSnapshotManualTrigger, Sandbox, SandboxClaim, SandboxNode, SandboxSnapshot,
    SandboxTemplate, SandboxWarmPool, SnapshotClass, list_types,
};

/// Pattern of a quantity such as `1.5Gi`, as the Kubernetes API's generators write it.
const QUANTITY: &str = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$";

/// Paths of property names at which our types embed Kubernetes types.
const EMBEDDED: [&[&str]; 4] = [
    &["podTemplate", "spec"],
    &["volumeClaimTemplates", "spec"],
    &["networkPolicy", "egress"],
    &["networkPolicy", "ingress"],
];

/// Failure to write a definition as YAML.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the definition {name} as YAML")]
pub struct NotWritable {
    name: String,
    source: serde_saphyr::ser::Error,
}

/// Returns each definition's file name, `<group>_<plural>.yaml`, and text. The output is
/// deterministic.
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

/// Returns the definitions that Torpor requires, as JSON that an apiserver accepts.
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

/// Returns the definitions of GKE's kinds, for clusters outside GKE, in the same form.
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

/// Corrects one schema and those below it. `path` holds the names of the properties above.
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
    // k8s-openapi gives a quantity and an int-or-string the same schema; only their descriptions
    // differ.
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

/// Sorts the keys of every object, independent of serde_json's map type.
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
        // The definition's type holds limits as floating point; whole numbers are written without a
        // point.
        Value::Number(number) if number.as_f64() == Some(0.0) => 0.into(),
        other => other,
    }
}

#[cfg(test)]
mod tests;

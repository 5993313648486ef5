//! SandboxNode: what one node can do with sandboxes, and what it holds. Group `torpor.dev/v1alpha1`, written by the node's agent.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::{conditions, snapshot::Fingerprint};

/// Nothing to wish for yet: a SandboxNode is a report.
#[derive(
    CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema,
)]
#[kube(
    group = "torpor.dev",
    version = "v1alpha1",
    kind = "SandboxNode",
    plural = "sandboxnodes",
    status = "SandboxNodeStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "SandboxNode reports what one node can do with sandboxes and what it holds. Its name is the node's.",
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].status"
    ),
    printcolumn(
        name = "Running",
        type_ = "integer",
        json_path = ".status.counts.running"
    ),
    printcolumn(
        name = "Hibernated",
        type_ = "integer",
        json_path = ".status.counts.hibernated"
    ),
    printcolumn(
        name = "Images",
        type_ = "integer",
        json_path = ".status.storage.images"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
pub struct SandboxNodeSpec {}

/// What the agent reports.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxNodeStatus {
    /// Version of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,
    /// Current conditions: Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions::list_schema")]
    pub conditions: Vec<Condition>,
    /// How many sandboxes are in which state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counts: Option<SandboxCounts>,
    /// What images of this node are made with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<Fingerprint>,
    /// When the agent last reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heartbeat_time: Option<Time>,
    /// The containerd runtime handlers, each with what was probed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "runtimes_schema")]
    pub runtimes: Vec<NodeRuntime>,
    /// The local store of images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<ImageStorage>,
}

/// One containerd runtime handler of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NodeRuntime {
    /// What it can do.
    #[serde(default)]
    pub capabilities: RuntimeCapabilities,
    /// Name of the handler, as a RuntimeClass names it.
    pub handler: String,
    /// What kind of runtime it is.
    #[serde(default)]
    #[schemars(schema_with = "runtime_kind_schema")]
    pub kind: RuntimeKind,
    /// Why something is missing.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// What a runtime can do, as probed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RuntimeCapabilities {
    /// Restore that runs while memory is still being read.
    #[serde(default)]
    pub background_restore: bool,
    /// Pause an idle sandbox and push its memory into swap.
    #[serde(default)]
    pub doze: bool,
    /// Pause and continue.
    #[serde(default)]
    pub freeze: bool,
    /// Save to an image and end the processes.
    #[serde(default)]
    pub hibernate: bool,
    /// Start from an image.
    #[serde(default)]
    pub restore: bool,
}

/// Kind of a runtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RuntimeKind {
    #[serde(rename = "gVisor")]
    GVisor,
    #[default]
    Other,
}

/// Sandboxes of a node by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SandboxCounts {
    #[serde(default)]
    pub dozing: i32,
    #[serde(default)]
    pub hibernated: i32,
    #[serde(default)]
    pub paused: i32,
    #[serde(default)]
    pub running: i32,
}

/// The local store of images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageStorage {
    /// Bytes free in the file system.
    #[serde(default)]
    pub available_bytes: i64,
    /// Bytes that images take.
    #[serde(default)]
    pub bytes: i64,
    /// Bytes of the file system.
    #[serde(default)]
    pub capacity_bytes: i64,
    /// Number of images.
    #[serde(default)]
    pub images: i32,
}

impl SandboxNode {
    /// What the node can do for a handler; nothing when it does not know the handler.
    pub fn capabilities(&self, handler: &str) -> RuntimeCapabilities {
        self.status
            .iter()
            .flat_map(|status| &status.runtimes)
            .find(|runtime| runtime.handler == handler)
            .map_or_else(RuntimeCapabilities::default, |runtime| runtime.capabilities)
    }
}

fn runtime_kind_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": ["gVisor", "Other"]})
}

fn runtimes_schema(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": NodeRuntime::json_schema(generator),
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["handler"],
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn capabilities_are_those_of_the_named_handler_only() {
        let node: SandboxNode = serde_json::from_value(json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxNode",
            "metadata": {"name": "n1"}, "spec": {},
            "status": {"runtimes": [
                {"handler": "runc", "kind": "Other"},
                {"handler": "torpor", "kind": "gVisor", "capabilities": {"hibernate": true}},
            ]},
        }))
        .unwrap();
        assert!(node.capabilities("torpor").hibernate);
        assert!(!node.capabilities("torpor").freeze);
        assert!(!node.capabilities("runc").hibernate);
        assert!(!node.capabilities("kata").hibernate);
    }
}

//! SandboxNode: what one node can do with sandboxes, and what it holds. Group `torpor.dev/v1alpha1`, written by the node's agent.

use std::collections::BTreeSet;

use jiff::Timestamp;
use k8s_openapi::{
    api::node::v1::RuntimeClass,
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
};
use kube::{CustomResource, KubeSchema, ResourceExt};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::{conditions, install, snapshot::Fingerprint};

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
        name = "Dozing",
        type_ = "integer",
        json_path = ".status.counts.dozing"
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
    /// Current conditions: Ready, Pressure, RunscRevoked.
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
    /// The sandboxes of the node, by Pod UID: what no condition of their Pods says. At most 1024; those beyond are left out.
    // Written also when empty: a merge patch takes nothing away that it does not name.
    #[serde(default)]
    #[schemars(schema_with = "sandboxes_schema")]
    pub sandboxes: Vec<SandboxReport>,
    /// Whether `sandboxes` names all memory that the node holds in images: its store could be read, and the agent has looked at each Pod of which it holds images.
    /// While it is false the absence of a Pod says nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandboxes_complete: Option<bool>,
    /// The local store of images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<ImageStorage>,
}

/// Most entries of `status.sandboxes`: with some 500 bytes each they stay far below what an object may have.
pub const MAX_REPORTED: usize = 1024;

/// What the agent knows of one sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxReport {
    /// Since when it sleeps in place, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asleep_since: Option<Time>,
    /// Bytes of the image that holds the sandbox's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_bytes: Option<i64>,
    /// Name of the image that holds the sandbox's memory, `<pod UID>.<n>`; none while the sandbox is awake.
    #[serde(default, rename = "imageID", skip_serializing_if = "Option::is_none")]
    pub image_id: Option<String>,
    /// How it last woke in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_wake: Option<LastWake>,
    /// Working set of the Pod's cgroup in bytes, right after the sandbox last fell asleep in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_asleep_bytes: Option<i64>,
    /// The same right before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_awake_bytes: Option<i64>,
    /// Namespace of the Pod.
    #[serde(default)]
    pub namespace: String,
    /// Name of the Pod.
    #[serde(default)]
    pub pod_name: String,
    /// When the agent found that the API has the Pod no more. Its image is then unclaimed: it is kept for a grace time, in which a
    /// SandboxSnapshot that names the Pod claims it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_gone_since: Option<Time>,
    /// UID of the Pod.
    #[serde(rename = "podUID")]
    pub pod_uid: String,
    /// Why the agent does what it does with the sandbox, in the order in which it decided.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<PlanReason>,
    /// Name of the Sandbox, in the Pod's namespace.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sandbox_name: String,
}

/// The words of [`LastWake::cause`].
pub const WAKE_CAUSES: [&str; 9] = [
    "Asked",
    "Clock",
    "Exec",
    "Forward",
    "Signal",
    "Container",
    "Typed",
    "Packet",
    "Called",
];

/// A wake in place: the Pod stayed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastWake {
    /// When it was over.
    pub at: Time,
    /// Who asked: `Asked` (through the API), `Clock` (a time that was set), `Exec`, `Forward` (a port-forward), `Signal`, `Container` (one that was added), `Typed` (into an attach), `Packet`, or `Called` (an exec, a port-forward or a signal, as older versions say it).
    #[serde(default)]
    pub cause: String,
    /// From its beginning until the sandbox ran, in microseconds.
    #[serde(default)]
    pub duration_micros: i64,
    /// How deep it slept: `Dozing` or `Hibernated`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub from: String,
}

/// One reason of the agent's planner.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlanReason {
    /// What it is about: an image, a time.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
    /// Its name, in CamelCase.
    pub reason: String,
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
    Kata,
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

/// Most entries of `status.storage.namespaces`.
pub const MAX_NAMESPACES: usize = 32;

/// What the images of one namespace take on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NamespaceStorage {
    /// Bytes of its images.
    #[serde(default)]
    pub bytes: i64,
    /// Whether they take all that one namespace may (`--store-per-namespace`): saves that can wait are refused.
    #[serde(default)]
    pub limited: bool,
    /// Name of the namespace.
    pub name: String,
}

/// The local store of images.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
    /// The namespaces whose images take most, largest first. At most 32; those beyond are left out.
    // Written also when empty: a merge patch takes nothing away that it does not name.
    #[serde(default)]
    #[schemars(schema_with = "namespaces_schema")]
    pub namespaces: Vec<NamespaceStorage>,
}

impl SandboxNode {
    /// What the agent says of the sandbox of a Pod.
    pub fn sandbox(&self, pod_uid: &str) -> Option<&SandboxReport> {
        let status = self.status.as_ref()?;
        status
            .sandboxes
            .iter()
            .find(|report| report.pod_uid == pod_uid)
    }

    /// Whether nothing was heard of its agent for too long.
    pub fn is_silent(&self, now: Timestamp) -> bool {
        let status = self.status.as_ref();
        let heard = status.and_then(|status| status.heartbeat_time.as_ref());
        heard.is_some_and(|heard| is_silence(heard.0, now))
    }

    /// What the node can do for a handler; nothing when it does not know the handler.
    pub fn capabilities(&self, handler: &str) -> RuntimeCapabilities {
        self.status
            .iter()
            .flat_map(|status| &status.runtimes)
            .find(|runtime| runtime.handler == handler)
            .map_or_else(RuntimeCapabilities::default, |runtime| runtime.capabilities)
    }
}

/// Whether an agent that was heard of at these two times, and not between them, was away meanwhile.
pub fn is_silence(heard: Timestamp, again: Timestamp) -> bool {
    again.duration_since(heard).as_secs() > install::SILENT_AFTER_SECONDS
}

/// Name of a RuntimeClass whose Pods some node can hibernate; Torpor's own before others.
pub fn hibernating_class<'a>(
    classes: impl IntoIterator<Item = &'a RuntimeClass>,
    nodes: impl IntoIterator<Item = &'a SandboxNode>,
) -> Option<String> {
    let statuses = nodes.into_iter().filter_map(|node| node.status.as_ref());
    let capable: BTreeSet<&str> = statuses
        .flat_map(|status| &status.runtimes)
        .filter(|runtime| runtime.capabilities.hibernate)
        .map(|runtime| runtime.handler.as_str())
        .collect();
    let fitting = classes
        .into_iter()
        .filter(|class| capable.contains(class.handler.as_str()))
        .map(ResourceExt::name_any);
    fitting.min_by_key(|name| (name != install::RUNTIME_CLASS, name.clone()))
}

fn runtime_kind_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": ["gVisor", "Kata", "Other"]})
}

fn runtimes_schema(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": NodeRuntime::json_schema(generator),
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["handler"],
    })
}

fn namespaces_schema(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": MAX_NAMESPACES,
        "items": NamespaceStorage::json_schema(generator),
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["name"],
    })
}

fn sandboxes_schema(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": MAX_REPORTED,
        "items": SandboxReport::json_schema(generator),
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["podUID"],
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn class(name: &str, handler: &str) -> RuntimeClass {
        serde_json::from_value(json!({"metadata": {"name": name}, "handler": handler})).unwrap()
    }

    fn node(handler: &str, hibernate: bool) -> SandboxNode {
        serde_json::from_value(json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxNode",
            "metadata": {"name": "n1"}, "spec": {},
            "status": {"runtimes": [
                {"handler": handler, "kind": "gVisor", "capabilities": {"hibernate": hibernate}},
            ]},
        }))
        .unwrap()
    }

    #[test]
    fn the_class_to_name_is_one_that_keeps_memory() {
        let own = class("torpor", "h");
        let others = [class("b", "h"), class("a", "h"), class("torpor", "i")];
        let (can, cannot) = (node("h", true), node("h", false));
        let of = |classes: &[RuntimeClass], nodes: &[&SandboxNode]| {
            hibernating_class(classes, nodes.iter().copied())
        };
        let found = of(&[class("a", "h"), own.clone()], &[&cannot, &can]);
        assert_eq!(found.as_deref(), Some("torpor"), "our own first");
        assert_eq!(of(&others, &[&can]).as_deref(), Some("a"));
        assert_eq!(of(std::slice::from_ref(&own), &[&cannot]), None);
        assert_eq!(of(&[own], &[]), None, "no node");
        assert_eq!(of(&[], &[&can]), None, "no class");
    }

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

//! SandboxNode: capabilities of one node and the sandboxes and images on it. Group
//! `torpor.dev/v1alpha1`, written by the node's agent.

use std::collections::BTreeSet;

use jiff::Timestamp;
use k8s_openapi::{
    api::node::v1::RuntimeClass,
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
};
use kube::{CustomResource, KubeSchema, ResourceExt};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::{
    conditions, install,
    snapshot::{Fingerprint, SandboxSnapshot},
};

/// Desired state of a SandboxNode: empty, since a SandboxNode is a report.
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
    doc = "SandboxNode reports the capabilities of one node and the sandboxes and images on it. Its name is the node's.",
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

/// Observed state of a node, written by its agent.
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
    /// Number of sandboxes by state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counts: Option<SandboxCounts>,
    /// Images that this node fetches for Pods of its own, from a repository or another node. An
    /// entry exists before the Pod can be restored from the image, and as long as a SandboxSnapshot
    /// names the image.
    // Left out when empty: the agent writes this list apart from the rest of the status.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "fetched_schema")]
    pub fetched: Vec<FetchedImage>,
    /// Runtime and processor properties with which this node makes images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<Fingerprint>,
    /// Time of the agent's last report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heartbeat_time: Option<Time>,
    /// Server of this node's images for the agents of other nodes; unset if the agent has none.
    // Written also when unset: a merge patch removes nothing that it does not name.
    #[serde(default)]
    pub image_server: Option<ImageServer>,
    /// Builds of runsc on the node that are not revoked: `blake3:` and the first 12 hex digits of
    /// each digest. The node restores the images that each of them has made. Empty if the agent
    /// cannot tell.
    // Written also when empty: a merge patch removes nothing that it does not name.
    #[serde(default)]
    pub runsc_builds: Vec<String>,
    /// Runtime handlers of containerd, each with its probed capabilities.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "runtimes_schema")]
    pub runtimes: Vec<NodeRuntime>,
    /// Sandboxes of the node, by Pod UID, with facts that no condition of their Pods contains. At
    /// most 1024; those beyond are left out.
    // Written also when empty: a merge patch removes nothing that it does not name.
    #[serde(default)]
    #[schemars(schema_with = "sandboxes_schema")]
    pub sandboxes: Vec<SandboxReport>,
    /// True if `sandboxes` lists all memory that the node holds in images: the agent could read the
    /// node's store and has examined each Pod with images in it. While it is false, the absence of
    /// a Pod proves nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandboxes_complete: Option<bool>,
    /// Local store of images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<ImageStorage>,
}

/// Server of a node's images.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageServer {
    /// IP address and port, such as `10.0.0.1:9646` or `[fd00::1]:9646`.
    pub address: String,
    /// SHA-256 of the certificate (DER) with which the agent serves images and asks other agents
    /// for theirs, in hex digits. The agent makes a new certificate at each start.
    pub certificate: String,
}

/// Image that a node has fetched for a Pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FetchedImage {
    /// Name of the image, `<pod UID>.<n>`.
    #[serde(rename = "imageID")]
    pub image_id: String,
    /// Namespace of the image and of the Pod.
    pub namespace: String,
    /// UID of the Pod.
    #[serde(rename = "podUID")]
    pub pod_uid: String,
    /// Use of the image by the Pod.
    #[serde(default)]
    pub state: FetchState,
}

/// Use of a fetched image by its Pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum FetchState {
    /// The Pod may be restored from the image.
    #[default]
    Claimed,
    /// The Pod is gone, and it ran from the image.
    Consumed,
    /// The Pod is gone, and it never ran from the image.
    Released,
}

/// Hex digits of a digest in `status.runscBuilds`, as in the name of the build's file.
pub const BUILD_DIGITS: usize = 12;
/// Most CPU features that a message names.
const NAMED_FEATURES: usize = 8;

/// Most entries of `status.fetched`.
pub const MAX_FETCHED: usize = 512;

/// Most entries of `status.sandboxes`. With some 500 bytes each they stay far below the size limit
/// of an object.
pub const MAX_REPORTED: usize = 1024;

/// Facts of the agent about one sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxReport {
    /// Time since which the sandbox sleeps in place; unset while it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asleep_since: Option<Time>,
    /// Bytes of the image that holds the sandbox's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_bytes: Option<i64>,
    /// Name of the image that holds the sandbox's memory, `<pod UID>.<n>`; unset while the sandbox
    /// is awake.
    #[serde(default, rename = "imageID", skip_serializing_if = "Option::is_none")]
    pub image_id: Option<String>,
    /// Last wake in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_wake: Option<LastWake>,
    /// Working set of the Pod's cgroup in bytes, right after the sandbox last fell asleep in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_asleep_bytes: Option<i64>,
    /// Working set of the Pod's cgroup in bytes, right before the sandbox last fell asleep in
    /// place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_awake_bytes: Option<i64>,
    /// Namespace of the Pod.
    #[serde(default)]
    pub namespace: String,
    /// Name of the Pod.
    #[serde(default)]
    pub pod_name: String,
    /// Time at which the agent found that the API no longer has the Pod. The Pod's image is then
    /// unclaimed: it is kept for a grace time, in which a SandboxSnapshot that names the Pod claims
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_gone_since: Option<Time>,
    /// UID of the Pod.
    #[serde(rename = "podUID")]
    pub pod_uid: String,
    /// Reasons for the agent's handling of the sandbox, in the order of its decisions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<PlanReason>,
    /// Name of the Sandbox, in the Pod's namespace.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sandbox_name: String,
}

/// Values of [`LastWake::cause`].
pub const WAKE_CAUSES: [&str; 8] = [
    "Asked",
    "Clock",
    "Exec",
    "Forward",
    "Signal",
    "Container",
    "Typed",
    "Packet",
];

/// Wake in place, in which the Pod stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastWake {
    /// Time at which the wake was complete.
    pub at: Time,
    /// Cause of the wake: `Asked` (through the API), `Clock` (a time that was set), `Exec`,
    /// `Forward` (a port-forward), `Signal`, `Container` (one was added to the Pod), `Typed` (input
    /// to an attach) or `Packet`.
    #[serde(default)]
    pub cause: String,
    /// Time from the beginning of the wake until the sandbox ran, in microseconds.
    #[serde(default)]
    pub duration_micros: i64,
    /// State before the wake: `Dozing` or `Hibernated`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub from: String,
}

/// Reason of the agent's planner.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlanReason {
    /// Subject of the reason, such as an image or a time.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
    /// Name of the reason, in CamelCase.
    pub reason: String,
}

/// Runtime handler of containerd on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NodeRuntime {
    /// Probed capabilities of the runtime.
    #[serde(default)]
    pub capabilities: RuntimeCapabilities,
    /// Name of the handler, as a RuntimeClass names it.
    pub handler: String,
    /// Kind of the runtime.
    #[serde(default)]
    #[schemars(schema_with = "runtime_kind_schema")]
    pub kind: RuntimeKind,
    /// Reason for a missing capability.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// Capabilities of a runtime, as probed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RuntimeCapabilities {
    /// Can run a restored sandbox while its memory is still being read.
    #[serde(default)]
    pub background_restore: bool,
    /// Can pause an idle sandbox and push its memory into swap.
    #[serde(default)]
    pub doze: bool,
    /// Can pause a sandbox and resume it.
    #[serde(default)]
    pub freeze: bool,
    /// Can save a sandbox to an image and end its processes.
    #[serde(default)]
    pub hibernate: bool,
    /// Can start a sandbox from an image.
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

/// Number of a node's sandboxes by state.
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

/// Storage that the images of one namespace take on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NamespaceStorage {
    /// Bytes of the namespace's images.
    #[serde(default)]
    pub bytes: i64,
    /// True if the images take all that one namespace may use (`--store-per-namespace`). The agent
    /// then refuses saves that can wait.
    #[serde(default)]
    pub limited: bool,
    /// Name of the namespace.
    pub name: String,
}

/// Local store of images.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageStorage {
    /// Free bytes of the file system.
    #[serde(default)]
    pub available_bytes: i64,
    /// Bytes of all images.
    #[serde(default)]
    pub bytes: i64,
    /// Bytes of the file system.
    #[serde(default)]
    pub capacity_bytes: i64,
    /// Number of images.
    #[serde(default)]
    pub images: i32,
    /// Namespaces whose images take most, largest first. At most 32; those beyond are left out.
    // Written also when empty: a merge patch removes nothing that it does not name.
    #[serde(default)]
    #[schemars(schema_with = "namespaces_schema")]
    pub namespaces: Vec<NamespaceStorage>,
}

impl SandboxNode {
    /// Returns the agent's report about the sandbox of a Pod.
    pub fn sandbox(&self, pod_uid: &str) -> Option<&SandboxReport> {
        let status = self.status.as_ref()?;
        status
            .sandboxes
            .iter()
            .find(|report| report.pod_uid == pod_uid)
    }

    /// Returns the needs of a snapshot's image that this node does not meet, for people; empty if
    /// the node can restore the image, as far as is known.
    ///
    /// The node makes the same comparison before a restore. The kernel and the text of runsc's
    /// version are for people only.
    pub fn lacks(&self, snapshot: &SandboxSnapshot) -> Vec<String> {
        let made_with = snapshot.status.as_ref();
        let made_with = made_with.and_then(|status| status.fingerprint.as_ref());
        let Some((image, status)) = made_with.zip(self.status.as_ref()) else {
            return Vec::new();
        };
        let Some(node) = &status.fingerprint else {
            return Vec::new();
        };
        let build = &image.runsc_digest;
        let mut builds = [&node.runsc_digest].into_iter().chain(&status.runsc_builds);
        // An agent from before 2026-11-28 lists none, and the node that made the image keeps its
        // builds.
        let is_unknown = status.runsc_builds.is_empty()
            && made_on(snapshot).is_some_and(|made_on| *made_on == self.name_any());
        let has_build = is_unknown || builds.any(|one| selects(one, build));
        let lacks = [
            (!has_build).then(|| format!("build {build} of runsc (not installed, or revoked)")),
            (image.platform != node.platform).then(|| format!("platform {}", image.platform)),
            (image.flags != node.flags).then(|| format!("flags {}", image.flags.join(" "))),
            missing_features(image, node),
        ];
        lacks.into_iter().flatten().collect()
    }

    /// Reports whether the node starts sandboxes with the build of runsc that made a snapshot's
    /// image, as far as is known.
    pub fn starts_with_build_of(&self, snapshot: &SandboxSnapshot) -> bool {
        let image = snapshot.status.as_ref();
        let image = image.and_then(|status| status.fingerprint.as_ref());
        let node = self.status.as_ref();
        let node = node.and_then(|status| status.fingerprint.as_ref());
        let both = image.zip(node);
        both.is_none_or(|(image, node)| image.runsc_digest == node.runsc_digest)
    }

    /// Returns the Pods for which this node has fetched the image.
    pub fn fetched<'a>(
        &'a self,
        namespace: &'a str,
        image_id: &'a str,
    ) -> impl Iterator<Item = &'a FetchedImage> {
        let fetched = self.status.iter().flat_map(|status| &status.fetched);
        fetched.filter(move |one| one.namespace == namespace && one.image_id == image_id)
    }

    /// Reports whether the agent's last heartbeat is too old. False without a heartbeat.
    pub fn is_silent(&self, now: Timestamp) -> bool {
        let status = self.status.as_ref();
        let heartbeat = status.and_then(|status| status.heartbeat_time.as_ref());
        heartbeat.is_some_and(|heartbeat| is_silence(heartbeat.0, now))
    }

    /// Reports whether the node gives its images to other nodes that do so too. A node without a
    /// server has no certificate with which it could ask another one.
    pub fn serves_images(&self) -> bool {
        let status = self.status.as_ref();
        status.is_some_and(|status| status.image_server.is_some())
    }

    /// Returns the capabilities of a runtime handler; none for an unknown handler.
    pub fn capabilities(&self, handler: &str) -> RuntimeCapabilities {
        self.status
            .iter()
            .flat_map(|status| &status.runtimes)
            .find(|runtime| runtime.handler == handler)
            .map_or_else(RuntimeCapabilities::default, |runtime| runtime.capabilities)
    }
}

/// Returns the node that made a snapshot's image.
fn made_on(snapshot: &SandboxSnapshot) -> Option<&String> {
    snapshot.status.as_ref()?.node_name.as_ref()
}

/// Reports whether `build` is the build with this digest: a whole digest, or an entry of
/// `runscBuilds`.
fn selects(build: &str, digest: &str) -> bool {
    let digits = build.strip_prefix("blake3:").unwrap_or_default();
    build == digest || (digits.len() == BUILD_DIGITS && digest.starts_with(build))
}

/// Returns the CPU features that the node lacks, for people; none if it has all. Without lists only
/// the digests are compared.
fn missing_features(image: &Fingerprint, node: &Fingerprint) -> Option<String> {
    if image.cpu_features_digest == node.cpu_features_digest {
        return None;
    }
    let (needed, had) = (&image.cpu_features, &node.cpu_features);
    if needed.is_empty() || had.is_empty() {
        let digest = &image.cpu_features_digest;
        return Some(format!("the set of CPU features with digest {digest}"));
    }
    let had: BTreeSet<&str> = had.split_whitespace().collect();
    let needed = needed.split_whitespace();
    let missing: Vec<&str> = needed.filter(|feature| !had.contains(feature)).collect();
    let (named, more) = missing.split_at(missing.len().min(NAMED_FEATURES));
    match (named.join(" "), more.len()) {
        (_, 0) if named.is_empty() => None,
        (named, 0) => Some(format!("CPU features {named}")),
        (named, more) => Some(format!("CPU features {named} and {more} more")),
    }
}

/// Reports whether an agent was absent between two consecutive heartbeats, or a heartbeat and now.
pub fn is_silence(last: Timestamp, next: Timestamp) -> bool {
    next.duration_since(last).as_secs() > install::SILENT_AFTER_SECONDS
}

/// Returns the name of a RuntimeClass whose Pods some node can hibernate; Torpor's own comes first.
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

fn fetched_schema(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": MAX_FETCHED,
        "items": FetchedImage::json_schema(generator),
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["namespace", "imageID", "podUID"],
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

    /// A node with this fingerprint and the builds `blake3:0123456789ab` and `blake3:`.
    fn offering(fingerprint: serde_json::Value) -> SandboxNode {
        let mut node = node("h", true);
        let status = node.status.as_mut().unwrap();
        status.fingerprint = serde_json::from_value(fingerprint).unwrap();
        status.runsc_builds = vec!["blake3:0123456789ab".into(), "blake3:".into()];
        node
    }

    fn image_of(fingerprint: serde_json::Value) -> SandboxSnapshot {
        serde_json::from_value(json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": {"name": "s"}, "spec": {"sandboxName": "s"},
            "status": {"fingerprint": fingerprint},
        }))
        .unwrap()
    }

    const NEW: &str = "blake3:ffffffffffff00";

    #[test]
    fn a_node_restores_the_images_of_its_older_builds_and_of_lesser_processors() {
        let node = offering(json!({
            "runscDigest": NEW, "platform": "systrap", "flags": ["-a"], "kernel": "6.6",
            "cpuFeatures": "avx avx2 fpu", "cpuFeaturesDigest": "3",
        }));
        let fits = |change: serde_json::Value| {
            let mut image = json!({
                "runscDigest": NEW, "platform": "systrap", "flags": ["-a"], "kernel": "6.1",
                "cpuFeatures": "avx avx2 fpu", "cpuFeaturesDigest": "3",
            });
            let changes = change.as_object().unwrap().clone();
            image.as_object_mut().unwrap().extend(changes);
            node.lacks(&image_of(image)).join("; ")
        };
        assert_eq!(fits(json!({})), "");
        assert_eq!(fits(json!({"runscDigest": "blake3:0123456789abcdef"})), "");
        let unknown = "blake3:9123456789abcdef";
        let lacks = fits(json!({"runscDigest": unknown}));
        assert_eq!(
            lacks,
            format!("build {unknown} of runsc (not installed, or revoked)")
        );
        let features = |cpu: &str| fits(json!({"cpuFeatures": cpu, "cpuFeaturesDigest": "2"}));
        assert_eq!(features("avx fpu"), "");
        assert_eq!(features("amx avx avx512f"), "CPU features amx avx512f");
        let many = features("a b c d e f g h i j");
        assert_eq!(many, "CPU features a b c d e f g h and 2 more");
        assert_eq!(features(""), "the set of CPU features with digest 2");
        let other = fits(json!({"platform": "kvm", "flags": ["-a", "-b"]}));
        assert_eq!(other, "platform kvm; flags -a -b");
    }

    #[test]
    fn only_the_node_of_an_image_may_have_a_build_that_its_older_agent_does_not_list() {
        let mut node = offering(json!({"runscDigest": NEW}));
        node.status.as_mut().unwrap().runsc_builds.clear();
        let mut image = image_of(json!({"runscDigest": "blake3:0123456789abcdef"}));
        assert_eq!(node.lacks(&image).len(), 1);
        image.status.as_mut().unwrap().node_name = Some("n1".to_owned());
        assert!(node.lacks(&image).is_empty());
    }

    #[test]
    fn a_node_without_a_report_lacks_nothing_that_is_known() {
        let image = image_of(json!({"runscDigest": NEW}));
        assert!(node("h", true).lacks(&image).is_empty());
        let without = image_of(serde_json::Value::Null);
        assert!(
            offering(json!({"runscDigest": NEW}))
                .lacks(&without)
                .is_empty()
        );
    }

    #[test]
    fn the_recommended_runtime_class_can_hibernate() {
        let own = class("torpor", "h");
        let others = [class("b", "h"), class("a", "h"), class("torpor", "i")];
        let (can, cannot) = (node("h", true), node("h", false));
        let of = |classes: &[RuntimeClass], nodes: &[&SandboxNode]| {
            hibernating_class(classes, nodes.iter().copied())
        };
        let found = of(&[class("a", "h"), own.clone()], &[&cannot, &can]);
        assert_eq!(found.as_deref(), Some("torpor"), "Torpor's own first");
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

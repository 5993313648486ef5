//! SandboxSnapshot and SnapshotClass: the memory of a sandbox, kept. Group `torpor.dev/v1alpha1`.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::{annotations, conditions, reasons};

/// Desired state of a SandboxSnapshot. Users write `sandboxName` alone.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "torpor.dev",
    version = "v1alpha1",
    kind = "SandboxSnapshot",
    plural = "sandboxsnapshots",
    shortname = "sbsnap",
    namespaced,
    status = "SandboxSnapshotStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "SandboxSnapshot is one image of a sandbox's memory, processes and files. Making one takes the snapshot; deleting it deletes the bytes.",
    printcolumn(name = "Sandbox", type_ = "string", json_path = ".spec.sandboxName"),
    printcolumn(name = "Node", type_ = "string", json_path = ".status.nodeName"),
    printcolumn(name = "Size", type_ = "integer", json_path = ".status.sizeBytes"),
    printcolumn(
        name = "Committed",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Committed')].status"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Committed')].reason"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[x_kube(validation = Rule::new("self == oldSelf").message("spec is immutable"))]
#[serde(rename_all = "camelCase")]
pub struct SandboxSnapshotSpec {
    /// Node of the Pod, when only that Pod is meant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "object_name_schema")]
    pub node_name: Option<String>,
    /// UID of the Pod, when only that Pod is meant.
    #[serde(default, rename = "podUID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub pod_uid: Option<String>,
    /// Why the snapshot is taken: Suspend (the controller, for operatingMode Suspended) or Manual.
    #[serde(default)]
    #[schemars(schema_with = "snapshot_reason_schema")]
    pub reason: SnapshotReason,
    /// The Sandbox to take a snapshot of, in the same namespace.
    #[schemars(schema_with = "object_name_schema")]
    pub sandbox_name: String,
}

/// Why a snapshot is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SnapshotReason {
    Suspend,
    #[default]
    Manual,
}

/// Observed state of a SandboxSnapshot. The agent of the node writes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxSnapshotStatus {
    /// When the image was complete and durable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub committed_at: Option<Time>,
    /// Containers that had ended when the image was taken.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub completed_containers: Vec<CompletedContainer>,
    /// Current conditions: Committed, Consumed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions::list_schema")]
    pub conditions: Vec<Condition>,
    /// UID of the Pod that continued from the image.
    #[serde(
        default,
        rename = "consumedByPodUID",
        skip_serializing_if = "Option::is_none"
    )]
    pub consumed_by_pod_uid: Option<String>,
    /// Containers in the image, each with the digest of its root file system's image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub containers: Vec<SavedContainer>,
    /// Digest of the image's manifest, `blake3:<hex>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// What the image was made with; it is restored only by the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<Fingerprint>,
    /// Name of the image in the node's store, `<pod UID>.<n>`.
    #[serde(default, rename = "imageID", skip_serializing_if = "Option::is_none")]
    pub image_id: Option<String>,
    /// Node that holds the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// Name of the Pod that was saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<String>,
    /// UID of the Pod that was saved.
    #[serde(default, rename = "podUID", skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// Bytes of the image on disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<i64>,
}

/// A container in an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SavedContainer {
    /// The runtime's reference of the container image: `repository@sha256:…` or a bare `sha256:…`.
    #[serde(default, rename = "imageID")]
    pub image_id: String,
    /// Name of the container.
    pub name: String,
}

/// A container that had ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CompletedContainer {
    /// Its exit code.
    #[serde(default)]
    pub exit_code: i32,
    /// Name of the container.
    pub name: String,
}

/// What an image was made with, and what a node offers. An image is restored only where it is equal, kernel and version text
/// aside.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Fingerprint {
    /// Digest of the CPU features that the sandbox sees.
    #[serde(default)]
    pub cpu_features_digest: String,
    /// Flags of the runtime that matter for an image.
    #[serde(default)]
    pub flags: Vec<String>,
    /// Release of the kernel.
    #[serde(default)]
    pub kernel: String,
    /// How the runtime runs the program: systrap, kvm, ptrace.
    #[serde(default)]
    pub platform: String,
    /// Digest of the runtime's binary.
    #[serde(default)]
    pub runsc_digest: String,
    /// Version that the runtime reports.
    #[serde(default)]
    pub runsc_version: String,
}

impl Fingerprint {
    /// Names of the fields that differ, in API spelling; empty when an image of `self` restores on `node`.
    pub fn differs_in(&self, node: &Self) -> Vec<&'static str> {
        // What is there for people (kernel, version text) is not what an image depends on.
        let Self {
            cpu_features_digest,
            flags,
            kernel: _,
            platform,
            runsc_digest,
            runsc_version: _,
        } = self;
        [
            (
                "cpuFeaturesDigest",
                *cpu_features_digest == node.cpu_features_digest,
            ),
            ("flags", *flags == node.flags),
            ("platform", *platform == node.platform),
            ("runscDigest", *runsc_digest == node.runsc_digest),
        ]
        .into_iter()
        .filter_map(|(field, equal)| (!equal).then_some(field))
        .collect()
    }
}

impl SandboxSnapshot {
    /// The conditions, none before the first status.
    pub fn conditions(&self) -> &[Condition] {
        self.status
            .as_ref()
            .map_or(&[], |status| &status.conditions)
    }

    /// Whether an agent has promised to keep bytes for it.
    pub fn is_adopted(&self) -> bool {
        let mut finalizers = self.metadata.finalizers.iter().flatten();
        finalizers.any(|name| name == annotations::IMAGE_FINALIZER)
    }

    /// Whether its Committed condition is an agent's alone: one has adopted it, and it is about one Pod, of which that agent also says when it is gone. Of all others the
    /// controller says whether there is a Sandbox of that name: whose Pod is meant is open until one is saved, and an agent speaks only while there is one.
    pub fn is_told_by_agent(&self) -> bool {
        let saved = self.status.as_ref().is_some_and(|s| s.pod_uid.is_some());
        self.is_adopted() && (saved || self.spec.pod_uid.is_some())
    }

    /// Whether the image is complete and durable.
    pub fn is_committed(&self) -> bool {
        conditions::is_true(self.conditions(), conditions::COMMITTED)
    }

    /// Whether its image was whole once and cannot be found on its node now. It may come back: a disk that is mounted late, a name that is
    /// put right.
    pub fn is_missing(&self) -> bool {
        let known = self.status.as_ref().is_some_and(|s| s.image_id.is_some());
        let said = conditions::find(self.conditions(), conditions::COMMITTED);
        known && said.is_some_and(|c| c.reason == reasons::snapshot::IMAGE_MISSING)
    }

    /// Whether the sandbox went on without the image, so that only a restore by name may use it.
    pub fn is_consumed(&self) -> bool {
        conditions::is_true(self.conditions(), conditions::CONSUMED)
    }

    /// Whether a save was tried and failed. The agent tries again by itself.
    pub fn save_failed(&self) -> bool {
        conditions::find(self.conditions(), conditions::COMMITTED).is_some_and(|condition| {
            condition.status == "False" && condition.reason == reasons::snapshot::SAVE_FAILED
        })
    }
}

/// Name of the snapshot that suspends this Pod of this Sandbox: `<sandbox>-<first 8 of the pod UID>`, at most 253 characters.
pub fn suspend_snapshot_name(sandbox_name: &str, pod_uid: &str) -> String {
    let uid: String = pod_uid.chars().take(8).collect();
    let room = 253 - 1 - uid.len();
    // Names are ASCII (the apiserver checked), so that bytes are characters; a cut must not leave a separator at the end.
    let name = sandbox_name
        .get(..room)
        .unwrap_or(sandbox_name)
        .trim_end_matches(['-', '.']);
    format!("{name}-{uid}")
}

/// Where and how images are kept.
#[derive(
    CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema,
)]
#[kube(
    group = "torpor.dev",
    version = "v1alpha1",
    kind = "SnapshotClass",
    plural = "snapshotclasses",
    derive = "Default",
    derive = "PartialEq",
    doc = "SnapshotClass says where and how images of sandboxes are kept.",
    printcolumn(
        name = "Provisioner",
        type_ = "string",
        json_path = ".spec.provisioner"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotClassSpec {
    /// What happens to the bytes when the SandboxSnapshot is deleted.
    #[serde(default)]
    #[schemars(schema_with = "deletion_policy_schema")]
    pub deletion_policy: DeletionPolicy,
    /// Settings of the provisioner.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub parameters: BTreeMap<String, String>,
    /// Who keeps the images. `node.torpor.dev` keeps them on the node that made them.
    #[serde(default = "node_provisioner")]
    #[schemars(schema_with = "provisioner_schema")]
    pub provisioner: String,
}

/// What happens to the bytes of a deleted SandboxSnapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DeletionPolicy {
    #[default]
    Delete,
    Retain,
}

/// The provisioner that keeps images on the node that made them.
pub const NODE_PROVISIONER: &str = "node.torpor.dev";

fn node_provisioner() -> String {
    NODE_PROVISIONER.to_owned()
}

fn object_name_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "minLength": 1,
        "maxLength": 253,
        "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
    })
}

fn snapshot_reason_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": ["Suspend", "Manual"], "default": "Manual"})
}

fn deletion_policy_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": ["Delete", "Retain"], "default": "Delete"})
}

fn provisioner_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "minLength": 1, "maxLength": 253, "default": NODE_PROVISIONER})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suspend_snapshot_names_fit_and_stay_valid() {
        let uid = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9";
        assert_eq!(suspend_snapshot_name("s1", uid), "s1-0a1b2c3d");
        let long = suspend_snapshot_name(&"a".repeat(253), uid);
        assert_eq!(long.len(), 253);
        assert!(crate::annotations::is_dns_subdomain(&long));
        let cut_at_a_dot = format!("{}.{}", "a".repeat(243), "b".repeat(9));
        let name = suspend_snapshot_name(&cut_at_a_dot, uid);
        assert!(crate::annotations::is_dns_subdomain(&name), "{name}");
    }

    #[test]
    fn a_fingerprint_names_every_field_that_differs_and_no_kernel() {
        let image = Fingerprint {
            kernel: "6.1".into(),
            platform: "systrap".into(),
            ..Default::default()
        };
        assert!(image.differs_in(&image).is_empty());
        let node = Fingerprint {
            kernel: "6.6".into(),
            flags: vec!["x".into()],
            platform: "kvm".into(),
            ..image.clone()
        };
        assert_eq!(image.differs_in(&node), ["flags", "platform"]);
    }
}

//! SandboxSnapshot and SnapshotClass: saved memory of a sandbox, and its storage. Group
//! `torpor.dev/v1alpha1`.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::{annotations, conditions, reasons};

/// Desired state of a SandboxSnapshot. Users set only `sandboxName`.
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
    doc = "SandboxSnapshot is one image of a sandbox's memory, processes and files. Its creation takes the snapshot; its deletion deletes the bytes.",
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
        name = "Uploaded",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Uploaded')].status"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[x_kube(validation = Rule::new("self == oldSelf").message("spec is immutable"))]
#[x_kube(
    validation = Rule::new("(has(self.reason) && self.reason == 'Archive') == has(self.archive)")
        .message("reason Archive needs archive, and no other reason has it")
)]
#[x_kube(
    validation = Rule::new("!has(self.archive) || has(self.snapshotClassName)")
        .message("an archive needs snapshotClassName, whose repository has it")
)]
#[serde(rename_all = "camelCase")]
pub struct SandboxSnapshotSpec {
    /// Archive of a repository that the snapshot names. Required for reason Archive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub archive: Option<ArchiveSource>,
    /// Node of the Pod. Set if only one particular Pod may be saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "object_name_schema")]
    pub node_name: Option<String>,
    /// UID of the Pod. Set if only that Pod may be saved.
    #[serde(default, rename = "podUID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub pod_uid: Option<String>,
    /// Reason for the snapshot: Suspend (the controller, for operatingMode Suspended), Manual, or
    /// Archive (an archived Sandbox).
    #[serde(default)]
    #[schemars(schema_with = "snapshot_reason_schema")]
    pub reason: SnapshotReason,
    /// Sandbox to take a snapshot of, in the same namespace.
    #[schemars(schema_with = "object_name_schema")]
    pub sandbox_name: String,
    /// SnapshotClass that says where the image is kept. Without one it is kept on the node alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "object_name_schema")]
    pub snapshot_class_name: Option<String>,
}

/// Reason for a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SnapshotReason {
    Suspend,
    #[default]
    Manual,
    Archive,
}

/// Archive in a repository.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ArchiveSource {
    /// Cluster that made the archive: the UID of its namespace kube-system.
    #[schemars(schema_with = "object_name_schema")]
    pub cluster: String,
    /// Name of the archived image, `<pod UID>.<n>`.
    #[serde(rename = "imageID")]
    #[schemars(schema_with = "object_name_schema")]
    pub image_id: String,
}

/// Observed state of a SandboxSnapshot, written by the agent of the node; that of an archive, by
/// the controller.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxSnapshotStatus {
    /// Time at which the image was complete and durable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub committed_at: Option<Time>,
    /// Containers that had ended when the image was taken.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub completed_containers: Vec<CompletedContainer>,
    /// Current conditions: Committed, Uploaded, Consumed.
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
    /// Runtime and processor properties with which the image was made. Only a node that has them
    /// restores it.
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
    /// Upload of the image to the repository of its SnapshotClass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload: Option<Upload>,
}

/// Upload of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Upload {
    /// Bytes of the image that are in the repository.
    #[serde(default)]
    pub done_bytes: i64,
    /// Bytes that were sent: compressed, and without parts that an earlier image has there.
    #[serde(default)]
    pub sent_bytes: i64,
    /// Bytes of the image.
    #[serde(default)]
    pub total_bytes: i64,
    /// URL of the repository.
    #[serde(default)]
    pub url: String,
}

/// Container in an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SavedContainer {
    /// Runtime's reference of the container image: `repository@sha256:…` or a bare `sha256:…`.
    #[serde(default, rename = "imageID")]
    pub image_id: String,
    /// Name of the container.
    pub name: String,
}

/// Container that had ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CompletedContainer {
    /// Exit code of the container.
    #[serde(default)]
    pub exit_code: i32,
    /// Name of the container.
    pub name: String,
}

/// Runtime and processor properties of an image or of a node.
///
/// A node restores an image with the same flags and platform, if it has the build of runsc that
/// made the image and all CPU features of it (`SandboxNode::lacks`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Fingerprint {
    /// CPU features that the sandbox sees: names as in /proc/cpuinfo, sorted, with a space between
    /// two. Empty in reports of agents from before 2026-11-28.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cpu_features: String,
    /// Digest of the CPU features that the sandbox sees.
    #[serde(default)]
    pub cpu_features_digest: String,
    /// Flags of the runtime that matter for an image.
    #[serde(default)]
    pub flags: Vec<String>,
    /// Release of the kernel.
    #[serde(default)]
    pub kernel: String,
    /// Platform of the runtime: systrap, kvm or ptrace.
    #[serde(default)]
    pub platform: String,
    /// Digest of the runtime's binary.
    #[serde(default)]
    pub runsc_digest: String,
    /// Version that the runtime reports.
    #[serde(default)]
    pub runsc_version: String,
}

impl SandboxSnapshot {
    /// Reports whether the snapshot is an archive. Agents have no part in those.
    pub fn is_archive(&self) -> bool {
        self.spec.reason == SnapshotReason::Archive
    }

    /// Returns the conditions; empty before the first status.
    pub fn conditions(&self) -> &[Condition] {
        self.status
            .as_ref()
            .map_or(&[], |status| &status.conditions)
    }

    /// Reports whether an agent has set its finalizer and thus keeps the image's bytes.
    pub fn is_adopted(&self) -> bool {
        let mut finalizers = self.metadata.finalizers.iter().flatten();
        finalizers.any(|name| name == annotations::IMAGE_FINALIZER)
    }

    /// Reports whether an agent alone writes the Committed condition.
    ///
    /// The agent must have adopted the snapshot, and the snapshot must be about one Pod: the agent
    /// then also reports the deletion of that Pod. For all other snapshots the controller reports
    /// whether a Sandbox of that name exists. Their Pod is undetermined until one is saved, and
    /// agents report only while there is one.
    pub fn is_told_by_agent(&self) -> bool {
        let saved = self.status.as_ref().is_some_and(|s| s.pod_uid.is_some());
        self.is_adopted() && (saved || self.spec.pod_uid.is_some())
    }

    /// Returns when the image was complete and durable.
    pub fn committed_at(&self) -> Option<Timestamp> {
        Some(self.status.as_ref()?.committed_at.as_ref()?.0)
    }

    /// Reports whether the image is complete and durable.
    pub fn is_committed(&self) -> bool {
        conditions::is_true(self.conditions(), conditions::COMMITTED)
    }

    /// Reports whether the image is whole in the repository of its SnapshotClass, so that other
    /// nodes can restore it.
    pub fn is_uploaded(&self) -> bool {
        conditions::is_true(self.conditions(), conditions::UPLOADED)
    }

    /// Returns the reason of the condition Uploaded; none for an image that is not to be uploaded.
    pub fn upload_reason(&self) -> Option<&str> {
        let uploaded = conditions::find(self.conditions(), conditions::UPLOADED)?;
        Some(&uploaded.reason)
    }

    /// Reports whether the image was complete once and cannot be found on its node now.
    ///
    /// The image may reappear, for instance when a disk is mounted late or a name is corrected.
    pub fn is_missing(&self) -> bool {
        let known = self.status.as_ref().is_some_and(|s| s.image_id.is_some());
        let committed = conditions::find(self.conditions(), conditions::COMMITTED);
        known && committed.is_some_and(|c| c.reason == reasons::snapshot::IMAGE_MISSING)
    }

    /// Reports whether the sandbox continued without the image, so that only a restore by name may
    /// use it.
    pub fn is_consumed(&self) -> bool {
        conditions::is_true(self.conditions(), conditions::CONSUMED)
    }

    /// Reports whether a save failed. The agent retries by itself.
    pub fn save_failed(&self) -> bool {
        conditions::find(self.conditions(), conditions::COMMITTED).is_some_and(|condition| {
            condition.status == "False" && condition.reason == reasons::snapshot::SAVE_FAILED
        })
    }
}

/// Returns the name of the snapshot that suspends this Pod of this Sandbox: `<sandbox>-<first 8 of
/// the pod UID>`, at most 253 characters.
pub fn suspend_snapshot_name(sandbox_name: &str, pod_uid: &str) -> String {
    let uid: String = pod_uid.chars().take(8).collect();
    name_with(sandbox_name, &format!("-{uid}"))
}

/// Returns the name of the backup of a sandbox that has been asleep in place since a time:
/// `<sandbox>-backup-<hash>`, at most 253 characters.
pub fn backup_name(sandbox_name: &str, pod_uid: &str, asleep_since: &str) -> String {
    let sleep = crate::name_hash(&format!("{pod_uid}/{asleep_since}"));
    name_with(sandbox_name, &format!("-backup-{sleep}"))
}

/// Returns a name with a suffix, cut to the 253 characters that the apiserver takes.
pub(crate) fn name_with(name: &str, suffix: &str) -> String {
    let room = 253 - suffix.len();
    // Names are ASCII (the apiserver checks them), so bytes are characters. A cut name must not end
    // with a separator.
    let cut = name.get(..room).unwrap_or(name);
    format!("{}{suffix}", cut.trim_end_matches(['-', '.']))
}

/// Desired state of a SnapshotClass.
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
    doc = "SnapshotClass selects where and how images of sandboxes are kept.",
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
    /// Action on the image's bytes when the SandboxSnapshot is deleted.
    #[serde(default)]
    #[schemars(schema_with = "deletion_policy_schema")]
    pub deletion_policy: DeletionPolicy,
    /// Settings of the provisioner.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub parameters: BTreeMap<String, String>,
    /// Provisioner that keeps the images. `node.torpor.dev` keeps them on the node that made them;
    /// `repository.torpor.dev` also keeps them in an object store.
    #[serde(default = "node_provisioner")]
    #[schemars(schema_with = "provisioner_schema")]
    pub provisioner: String,
}

/// Action on the bytes of a deleted SandboxSnapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DeletionPolicy {
    #[default]
    Delete,
    Retain,
}

/// Provisioner that keeps images on the node that made them.
pub const NODE_PROVISIONER: &str = "node.torpor.dev";

/// Provisioner that keeps images on the node that made them and in an object store, from which
/// other nodes restore them.
pub const REPOSITORY_PROVISIONER: &str = "repository.torpor.dev";

/// Provisioners that exist.
pub const PROVISIONERS: [&str; 2] = [NODE_PROVISIONER, REPOSITORY_PROVISIONER];

/// Parameters of a SnapshotClass of [`REPOSITORY_PROVISIONER`].
pub const REPOSITORY_PARAMETERS: [&str; 7] = [
    "url",
    "endpoint",
    "region",
    "allowHTTP",
    "encryption",
    "archivesOf",
    "maxSizePerNamespace",
];

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
    json_schema!({"type": "string", "enum": ["Suspend", "Manual", "Archive"], "default": "Manual"})
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
    fn each_sleep_of_a_sandbox_has_a_backup_of_its_own_name() {
        let since = "2026-01-01T00:00:00Z";
        let name = backup_name("s1", "u", since);
        assert!(name.starts_with("s1-backup-"), "{name}");
        assert_ne!(name, backup_name("s1", "u", "2026-01-01T00:00:01Z"));
        assert_ne!(name, backup_name("s1", "v", since));
        assert_eq!(backup_name(&"a".repeat(253), "u", since).len(), 253);
    }
}

//! The manifest of an image: its identity, its files and its needs for a restore.
//!
//! `manifest.json` is one line of JSON and a newline, at most 1 MiB:
//! ```text
//! {"digest":"blake3:<64 hex>","manifest":{"magic":"torpor-image","version":1,...}}
//! ```
//! `digest` is the digest of the bytes of `manifest` in the file. A manifest has exactly one
//! encoding: fields in the order of [`Manifest`], no spaces. The decoder reads the manifest,
//! encodes it again and compares the bytes, and so finds every changed byte in the file, even an
//! added space. The decoder checks the version before the other fields and refuses an unknown one.
//! A new field requires a new version.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use torpor_core::{ContainerName, ImageId, Namespace, PodUid};

use crate::digest::Digest;

/// The manifest's file name.
pub const MANIFEST: &str = "manifest.json";
/// Name of the file with the UID of the Pod that was restored from the image.
pub const CONSUMED: &str = "consumed";
/// Value of `magic`, the first field of every manifest.
pub const MAGIC: &str = "torpor-image";
/// Version of the format that is written, and the only one that is read.
pub const VERSION: u32 = 1;
/// Largest manifest file, in bytes.
pub const MAX_BYTES: usize = 1 << 20;
/// Most files, containers, flags and CPU features in one manifest.
pub const MAX_FILES: usize = 16;
pub const MAX_CONTAINERS: usize = 256;
pub const MAX_FLAGS: usize = 256;
pub const MAX_CPU_FEATURES: usize = 4096;
/// Text of [`SavedName::Root`].
pub const ROOT_NAME: &str = "__root__";
/// Longest file name in an image, in bytes.
const MAX_FILE_NAME: usize = 64;

/// Name of a container of the saved Pod. In Kubernetes the pause container has no name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum SavedName {
    /// The pause container, written `__root__` (`""` is read as well).
    Root,
    Named(ContainerName),
}

/// Purpose of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveReason {
    /// In-place hibernation.
    Hibernate,
    Suspend,
    Manual,
}

/// Properties of a node's runtime on which an image depends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprint {
    /// Digest of the runsc binary, `<algorithm>:<hex>`. Must be equal for a restore.
    pub runsc_digest: String,
    /// Output of `runsc --version`, for messages.
    pub runsc_version: String,
    /// gVisor's platform: systrap, kvm, ptrace. Must be equal for a restore.
    pub platform: String,
    /// Global flags of the sandbox's runsc, without paths. Must be equal for a restore.
    pub flags: Vec<String>,
    /// Digest of `cpu_features`. If the digests are equal, the lists are not compared.
    pub cpu_features_digest: String,
    /// CPU features, sorted. A node needs all features of the image's node. If the list is empty,
    /// the digests must be equal.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cpu_features: Vec<String>,
    /// Output of `uname -r`, for people. An image does not depend on it.
    pub kernel: String,
}

/// A file of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// `[a-z0-9][a-z0-9._-]*`, at most 64 bytes, neither `manifest.json` nor `consumed`.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Digest of the whole file.
    pub blake3: Digest,
}

/// A container of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedContainer {
    pub name: SavedName,
    /// The container image's id as CRI reports it (`sha256:...` or `repo@sha256:...`); empty for
    /// the pause container.
    pub image_id: String,
    /// Digest of the distilled OCI spec. The driver defines the parts of the distilled spec.
    pub spec_digest: Digest,
}

/// A container that ended before the save.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompletedContainer {
    pub name: ContainerName,
    pub exit_code: i32,
}

/// The manifest without the image's id and files: the input of a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestDraft {
    pub pod_name: String,
    pub sandbox_name: String,
    pub reason: SaveReason,
    pub created_at: Timestamp,
    pub fingerprint: Fingerprint,
    /// Containers in the order of restore, [`SavedName::Root`] first.
    pub containers: Vec<SavedContainer>,
    pub completed: Vec<CompletedContainer>,
    /// Image from which the saved sandbox was restored.
    pub parent: Option<ImageId>,
}

/// A manifest. The module's documentation describes its encoding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    magic: String,
    version: u32,
    pub image_id: ImageId,
    pub namespace: Namespace,
    pub pod_uid: PodUid,
    pub pod_name: String,
    pub sandbox_name: String,
    pub reason: SaveReason,
    pub created_at: Timestamp,
    pub fingerprint: Fingerprint,
    pub files: Vec<FileEntry>,
    /// Containers in the order of restore, [`SavedName::Root`] first.
    pub containers: Vec<SavedContainer>,
    pub completed: Vec<CompletedContainer>,
    pub parent: Option<ImageId>,
}

/// Spec digest of a container that is to be restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerSpecDigest {
    pub name: SavedName,
    pub digest: Digest,
}

/// Error of decoding or encoding a manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("the manifest has {found} bytes, at most {MAX_BYTES} are allowed")]
    TooLarge { found: u64 },
    #[error("the manifest is not what was written: {0}")]
    Malformed(String),
    #[error("this is not an image manifest: its magic is {found:?}")]
    Magic { found: String },
    #[error(
        "the manifest has version {found}, this program reads version {VERSION}; restore it with a newer torpor"
    )]
    Version { found: u32 },
    #[error("the manifest does not match its digest (expected {expected}, found {found})")]
    Digest { expected: Digest, found: Digest },
    #[error("the manifest breaks a rule of the format: {0}")]
    Rule(String),
}

/// Error: the image cannot be restored on this node or into this Pod.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    #[error(
        "the image was made by runsc {image} and this node has runsc {node}; restore it on a node with the same build, or start cold"
    )]
    Runsc { image: String, node: String },
    #[error(
        "the image was made on platform {image} and this node uses {node}; restore it on a node with the same platform, or start cold"
    )]
    Platform { image: String, node: String },
    #[error(
        "the image was made with runsc flags [{image}] and this node uses [{node}]; give the node the same flags, or start cold"
    )]
    Flags { image: String, node: String },
    #[error(
        "this node's CPU lacks {missing}, which the image may use; restore it on a node with these features, or start cold"
    )]
    CpuFeatures { missing: String },
    #[error(
        "container {name} is not in the image; the Pod must have the containers that were saved, or start cold"
    )]
    ContainerAdded { name: SavedName },
    #[error(
        "container {name} of the image is not in the Pod; the Pod must have the containers that were saved, or start cold"
    )]
    ContainerMissing { name: SavedName },
    #[error(
        "container {name} has another spec than when it was saved; undo the change of its command, user, capabilities or mounts, or start cold"
    )]
    Spec { name: SavedName },
}

impl Mismatch {
    /// Returns the reason for conditions: FingerprintMismatch or SpecMismatch.
    pub fn reason(&self) -> &'static str {
        match self {
            Mismatch::Runsc { .. }
            | Mismatch::Platform { .. }
            | Mismatch::Flags { .. }
            | Mismatch::CpuFeatures { .. } => "FingerprintMismatch",
            Mismatch::ContainerAdded { .. }
            | Mismatch::ContainerMissing { .. }
            | Mismatch::Spec { .. } => "SpecMismatch",
        }
    }
}

mod check;
mod codec;

/// Reports whether an image may have a file with this name: see [`FileEntry::name`].
pub(crate) fn is_file_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b);
    (1..=MAX_FILE_NAME).contains(&name.len())
        && name.bytes().all(plain)
        && !name.starts_with(['.', '-', '_'])
        && !matches!(name, MANIFEST | CONSUMED)
}

impl SavedName {
    /// Returns `__root__` or the container's name.
    pub fn as_str(&self) -> &str {
        match self {
            SavedName::Root => ROOT_NAME,
            SavedName::Named(name) => name.as_str(),
        }
    }
}

impl fmt::Display for SavedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl TryFrom<String> for SavedName {
    type Error = torpor_core::InvalidId;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        match text.as_str() {
            "" | ROOT_NAME => Ok(SavedName::Root),
            _ => ContainerName::new(text).map(SavedName::Named),
        }
    }
}

impl From<SavedName> for String {
    fn from(name: SavedName) -> String {
        name.as_str().to_owned()
    }
}

#[cfg(test)]
mod tests;

//! The manifest of an image: what it is, what it is made of, what it needs to be restored.
//!
//! `manifest.json` is one line of JSON and a newline, at most 1 MiB:
//! ```text
//! {"digest":"blake3:<64 hex>","manifest":{"magic":"torpor-image","version":1,...}}
//! ```
//! `digest` is that of the bytes of `manifest` as they stand in the file. There is one encoding of a manifest: fields in the
//! order of [`Manifest`], no spaces. The decoder reads, encodes again and compares, so a changed byte anywhere in the file is
//! found, a space included. A version that this program does not know is refused before anything else is looked at; fields are
//! only ever added together with a new version.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use torpor_core::{ContainerName, ImageId, Namespace, PodUid};

use crate::digest::Digest;

/// The first field of every manifest.
pub const MAGIC: &str = "torpor-image";
/// The version written; the only one read so far.
pub const VERSION: u32 = 1;
/// Largest manifest file, in bytes.
pub const MAX_BYTES: usize = 1 << 20;
/// Most files, containers, flags and CPU features in one manifest.
pub const MAX_FILES: usize = 16;
pub const MAX_CONTAINERS: usize = 256;
pub const MAX_FLAGS: usize = 256;
pub const MAX_CPU_FEATURES: usize = 4096;
/// How [`SavedName::Root`] is written.
pub const ROOT_NAME: &str = "__root__";

/// A container of the saved Pod: the pause container has no name in Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum SavedName {
    /// The pause container, written `__root__` (`""` is read as well).
    Root,
    Named(ContainerName),
}

/// Why an image was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveReason {
    /// In-place hibernation.
    Hibernate,
    Suspend,
    Manual,
}

/// What the runtime of a node is, as far as an image depends on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprint {
    /// Of the runsc binary, `<algorithm>:<hex>`. Must be equal.
    pub runsc_digest: String,
    /// What `runsc --version` says, for people.
    pub runsc_version: String,
    /// systrap, kvm, ptrace. Must be equal.
    pub platform: String,
    /// The global flags that the sandbox was started with, without paths. Must be equal.
    pub flags: Vec<String>,
    /// Digest of `cpu_features`. Equal digests need no comparison of the lists.
    pub cpu_features_digest: String,
    /// CPU features, sorted. The node must have all that the image's node had; empty: the digests must be equal.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cpu_features: Vec<String>,
    /// `uname -r`, for people: an image does not depend on it.
    pub kernel: String,
}

/// One file of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// `[a-z0-9][a-z0-9._-]*`, at most 64, neither `manifest.json` nor `consumed`.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Of all its bytes.
    pub blake3: Digest,
}

/// One container of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedContainer {
    pub name: SavedName,
    /// The container image's id as CRI reports it (`sha256:...` or `repo@sha256:...`); empty for the pause container.
    pub image_id: String,
    /// Of the distilled OCI spec; the driver defines what goes into it.
    pub spec_digest: Digest,
}

/// A container that had ended before the save.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompletedContainer {
    pub name: ContainerName,
    pub exit_code: i32,
}

/// All of an image but its files: what the caller of a commit knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestDraft {
    pub pod_name: String,
    pub sandbox_name: String,
    pub reason: SaveReason,
    pub created_at: Timestamp,
    pub fingerprint: Fingerprint,
    /// In the order of restore, [`SavedName::Root`] first.
    pub containers: Vec<SavedContainer>,
    pub completed: Vec<CompletedContainer>,
    /// The image that this sandbox was restored from.
    pub parent: Option<ImageId>,
}

/// A manifest. See the module for its encoding.
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
    /// In the order of restore, [`SavedName::Root`] first.
    pub containers: Vec<SavedContainer>,
    pub completed: Vec<CompletedContainer>,
    pub parent: Option<ImageId>,
}

/// The spec of one container that is to be restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerSpecDigest {
    pub name: SavedName,
    pub digest: Digest,
}

/// Why bytes are not a manifest.
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

/// Why an image cannot be restored here.
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
    /// FingerprintMismatch or SpecMismatch.
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

pub(crate) use codec::is_file_name;

impl SavedName {
    /// `__root__` or the container's name.
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

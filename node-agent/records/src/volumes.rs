//! Directories of the host that gVisor keeps inside a sandbox.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A directory of the host that gVisor keeps inside the sandbox, and therefore in its images: an
/// emptyDir or /dev/shm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SandboxVolume {
    pub name: String,
    pub source: PathBuf,
    /// True if its files count as memory (medium Memory). Otherwise they lie in a file in `source`.
    pub memory: bool,
    /// Owner, mode and size of the kubelet's directory. Records of Pods from before 2026-11-27 have
    /// none; gVisor's defaults apply to them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<VolumeDirectory>,
}

/// Attributes of a directory of the host that the sandbox replaces by a directory of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeDirectory {
    /// Permissions with set-user-ID, set-group-ID and sticky bit (inode(7)). For `fsGroup` the
    /// kubelet sets the group and the set-group-ID bit.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Size in bytes of a directory in memory: the kubelet mounts it with `sizeLimit` or with the
    /// memory that the Pod may use.
    pub size: Option<u64>,
}

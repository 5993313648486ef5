//! Directories of the host that gVisor keeps inside a sandbox.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A directory of the host that gVisor keeps inside the sandbox (and so in its images): an emptyDir, or /dev/shm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SandboxVolume {
    pub name: String,
    pub source: PathBuf,
    /// Whether its files count as memory (medium Memory) or lie in a file in `source`.
    pub memory: bool,
    /// Owner, mode and size that the kubelet gave the directory. Records of Pods from before
    /// 2026-11-27 have none: gVisor's defaults hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<VolumeDirectory>,
}

/// The directory of the host in place of which the sandbox has one of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeDirectory {
    /// Permissions with set-user-ID, set-group-ID and sticky bit (inode(7)). The kubelet sets the
    /// group and its bit for `fsGroup`.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Bytes that fit into it, if it is in memory: the kubelet mounts it with `sizeLimit`, or what
    /// the Pod may use.
    pub size: Option<u64>,
}

//! Records of a pod, its containers, its sandbox's state and its last restore.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use torpor_core::RolledBack;
use torpor_core::ids::{ContainerId, ImageId, Namespace, PodUid, SandboxId};
use torpor_core::transition::Origin;
use torpor_snapshots::Digest;

use crate::volumes::SandboxVolume;

/// Role of a container in its pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The pause container: the root container of the gVisor sandbox.
    Sandbox,
    Container,
}

/// Settings of the links of a network namespace, without loopback: netlink messages (rtnetlink(7))
/// in hexadecimal.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Addresses {
    pub addresses: Vec<String>,
    pub routes: Vec<String>,
    /// Permanent neighbours, such as a gateway that answers no ARP. The kernel removes them
    /// together with a link's last IPv4 address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub neighbours: Vec<String>,
}

/// A pod, as its pause container's spec describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodRecord {
    pub sandbox: SandboxId,
    pub pod_uid: PodUid,
    pub namespace: Namespace,
    pub name: String,
    /// Path of the runsc that runs this pod until its end. A newer runsc would not understand the
    /// sandbox.
    pub runsc: PathBuf,
    pub runsc_digest: String,
    /// Path of the network namespace; none for a pod on the host's network.
    pub network_namespace: Option<PathBuf>,
    /// Settings that runsc removes from the pod's interfaces.
    pub addresses: Addresses,
    /// The leaf cgroup of the sandbox's processes, relative to each hierarchy's root.
    pub cgroup: PathBuf,
    pub volumes: Vec<SandboxVolume>,
    /// True for `torpor.dev/on-restore-failure: ColdStart`.
    pub cold_start_on_failure: bool,
}

/// A container, as its spec describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContainerRecord {
    pub id: ContainerId,
    pub sandbox: SandboxId,
    #[serde(with = "role")]
    pub role: Role,
    /// Name in the pod; empty for the pause container.
    pub name: String,
    pub terminal: bool,
    /// The container's own cgroup, relative to each hierarchy's root.
    pub cgroup: PathBuf,
    pub spec_digest: Digest,
    pub keeper_pid: u32,
    /// True: the keeper is a thread of the pod's shim, and `keeper_pid` is that of the shim. False:
    /// the keeper is a process, as 0.1 made it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_shim: bool,
    /// Exit code of a container that ran to its end before the image was saved. Its keeper ends
    /// with this code and does not run the container again.
    pub completed: Option<u8>,
}

impl ContainerRecord {
    /// Reports whether the kubelet made this container in place of `other`: a Pod has one container
    /// of a name at a time.
    pub fn supersedes(&self, other: &Self) -> bool {
        self.role == Role::Container
            && other.role == Role::Container
            && self.sandbox == other.sandbox
            && self.name == other.name
            && self.id != other.id
    }
}

mod role {
    use crate::pod::Role;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(role: &Role, to: S) -> Result<S::Ok, S::Error> {
        matches!(role, Role::Sandbox).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Role, D::Error> {
        let sandbox = bool::deserialize(from)?;
        Ok(if sandbox {
            Role::Sandbox
        } else {
            Role::Container
        })
    }
}

/// State of a pod's sandbox, as its last change left it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", deny_unknown_fields)]
pub enum SandboxState {
    /// gVisor runs the sandbox or holds it paused. If gVisor does neither, the sandbox crashed.
    Running,
    /// The image is the sandbox. There is no process of it; the shim stays.
    Hibernated {
        image: ImageId,
        /// Present if the sandbox has not run since it was made.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        unstarted: Option<Origin>,
    },
    /// A new Pod continues `image`. No program runs before every container of the image has been
    /// started.
    Restoring {
        image: ImageId,
        started: Vec<ContainerId>,
    },
}

/// Reason why the image that a Pod continues from was not fetched from its repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FetchFailure {
    /// Reason for conditions.
    pub reason: String,
    pub message: String,
    /// True if the Pod is being deleted: it neither waits nor starts cold.
    pub pod_ends: bool,
}

/// Result of a Pod's last restore. The agent reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", deny_unknown_fields)]
pub enum RestoreReport {
    Restored {
        image: ImageId,
        /// Present if the sandbox had run on after this image and then crashed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rolled_back: Option<RolledBack>,
    },
    ColdStarted {
        /// None if there was no image to restore.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        image: Option<ImageId>,
        reason: String,
        message: String,
    },
    Failed {
        image: ImageId,
        reason: String,
        message: String,
    },
}

//! What is known of the pods on this node, under the state directory (a tmpfs: it dies with the node's uptime).
//!
//! ```text
//! pods/<sandbox id>/pod.json        the pod, written once
//! pods/<sandbox id>/state.json      what its sandbox is doing now ([`SandboxState`]); of one that hibernates, since when it stands still: the time of the file
//! pods/<sandbox id>/pause.json      whether it is paused ([`PauseMark`])
//! pods/<sandbox id>/doze.json       there while it is paused because it was idle ([`DozeNote`]): whoever needs it resumes it
//! pods/<sandbox id>/quotas.json     limits of processor time that are lifted while it wakes
//! pods/<sandbox id>/room.json       limits of memory that are wider while it wakes
//! pods/<sandbox id>/wake.json       how long the last wake took ([`WakeNote`]); when: the time of the file
//! pods/<sandbox id>/restore.json    how long its restore took that its containers' starts began ([`RestoreNote`]); when: the time of the file
//! pods/<sandbox id>/sleep.json      what the pod's memory was before and after its last sleep began ([`SleepNote`])
//! pods/<sandbox id>/runsc.json      what runsc recorded of its sandbox when that last ran ([`torpor_runsc_direct::Kept`]); there if Torpor may begin it by itself
//! pods/<sandbox id>/lock            held by whoever changes the sandbox
//! pods/<sandbox id>/sessions        locked (shared) by every process that exec runs in the sandbox; its time: when one last began or ended
//! pods/<sandbox id>/forwards        a pipe, open for reading by whoever forwards a connection ([`torpor_runsc::forward`])
//! pods/<sandbox id>/not-forwarded   why connections to the pod's loopback are not taken
//! pods/<sandbox id>/not-watched     why packets do not wake the pod
//! pods/<sandbox id>/traffic.json    where the times of its packets are ([`torpor_link::traffic`]), or why there are none
//! pods/<sandbox id>/unacknowledged.json  where its connections with something on its way are ([`torpor_link::unacknowledged`]); may be missing
//! pods/<sandbox id>/probes.json     what the kubelet probes, as the agent has read it from the Pod ([`Probes`])
//! pods/<sandbox id>/probing         locked (shared) by every process that a probe runs in the sandbox
//! pods/<sandbox id>/probed.json     what exec probes have taken ([`ProbeNote`])
//! pods/<sandbox id>/probed          locked by whoever adds to that
//! pods/<sandbox id>/execs           there if exec has started a process since the sandbox began or was restored
//! pods/<sandbox id>/left.json       the names of processes that exec has left behind, as they were last looked for ([`torpor_runsc::left`])
//! pods/<sandbox id>/called          when an exec or a signal last woke the sandbox: the time of the file
//! pods/<sandbox id>/containers/     the names of its containers, an empty file each ([`Records::containers_of`])
//! reports/<pod UID>.json            how the last restore of this Pod ended ([`RestoreReport`])
//! reports/<pod UID>.suspends        there while this Pod is being suspended
//! containers/<id>/container.json    the container, written once
//! containers/<id>/config.json       its OCI spec as runsc gets it: the directory is runsc's bundle
//! containers/<id>/keeper.sock       its keeper
//! ```
//! Files are replaced by rename: a reader sees the old one or the new one.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use torpor_core::RolledBack;
use torpor_core::ids::{ContainerId, ImageId, Namespace, PodUid, SandboxId};
use torpor_snapshots::Digest;

use torpor_cgroup::Quota;
use torpor_cgroup::room::Room;

pub mod config;
mod files;
pub mod locks;
mod members;
mod notes;
mod reports;
mod runsc;
mod volumes;

use files::{
    list, make_dir, modified, read_if_there, read_json, remove_dir, remove_file, write_error,
    write_json, write_json_as_of,
};
pub use notes::{
    Depth, DozeNote, PauseMark, ProbeNote, Probes, RestoreNote, Session, SleepNote, TrafficMap,
    UnacknowledgedMap, UnknownCause, WakeCause, WakeNote,
};
pub use runsc::RunscRecord;
pub use volumes::{SandboxVolume, VolumeDirectory};

use config::Config;

/// Why a record could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no record {0}: this pod was not started by Torpor, or is gone")]
    Missing(PathBuf),
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot write {path}")]
    Write {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot parse {path}")]
    Parse {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("cannot lock {path}")]
    Lock {
        path: PathBuf,
        #[source]
        source: nix::Error,
    },
}

/// A container's part in its pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The pause container: the root of the gVisor sandbox.
    Sandbox,
    Container,
}

/// What is set on the links of a network namespace, loopback aside: netlink messages (rtnetlink(7))
/// in hexadecimal.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Addresses {
    pub addresses: Vec<String>,
    pub routes: Vec<String>,
    /// Permanent neighbours, such as a gateway that answers no ARP. The kernel forgets them with a
    /// link's last IPv4 address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub neighbours: Vec<String>,
}

/// A pod, as its pause container's spec tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodRecord {
    pub sandbox: SandboxId,
    pub pod_uid: PodUid,
    pub namespace: Namespace,
    pub name: String,
    /// The runsc that runs this pod, to its end: a newer one would not understand it.
    pub runsc: PathBuf,
    pub runsc_digest: String,
    /// Path of the network namespace; none on the host's network.
    pub network_namespace: Option<PathBuf>,
    /// What runsc takes off the pod's interfaces.
    pub addresses: Addresses,
    /// The leaf cgroup of the sandbox' processes, below each hierarchy's root.
    pub cgroup: PathBuf,
    pub volumes: Vec<SandboxVolume>,
    /// `torpor.dev/on-restore-failure: ColdStart`.
    pub cold_start_on_failure: bool,
}

/// A container, as its spec tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContainerRecord {
    pub id: ContainerId,
    pub sandbox: SandboxId,
    #[serde(with = "role")]
    pub role: Role,
    /// Name in the pod; the pause container's is empty.
    pub name: String,
    pub terminal: bool,
    /// The container's own cgroup, below each hierarchy's root.
    pub cgroup: PathBuf,
    pub spec_digest: Digest,
    pub keeper_pid: u32,
    /// It ran to its end before the image was saved: the keeper ends with this code instead of running it again.
    pub completed: Option<u8>,
}

impl ContainerRecord {
    /// Whether the kubelet made this one in the other's place: a Pod has one container of a name at a time.
    pub fn supersedes(&self, other: &Self) -> bool {
        self.role == Role::Container
            && other.role == Role::Container
            && self.sandbox == other.sandbox
            && self.name == other.name
            && self.id != other.id
    }
}

mod role {
    use super::Role;
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

/// What a pod's sandbox is doing, as the last one who changed it left it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", deny_unknown_fields)]
pub enum SandboxState {
    /// gVisor runs it, or holds it paused; if it does neither, it crashed.
    Running,
    /// The image is the sandbox: no process is left but the keepers.
    Hibernated { image: ImageId },
    /// A new Pod that continues `image`: nothing runs before every container of the image has been started.
    Restoring {
        image: ImageId,
        started: Vec<ContainerId>,
    },
}

/// How the last restore ended, for the agent to report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", deny_unknown_fields)]
pub enum RestoreReport {
    Restored {
        image: ImageId,
        /// The sandbox had left the image behind when it crashed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rolled_back: Option<RolledBack>,
    },
    ColdStarted {
        /// None where there was none to start from.
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

/// The lock of one pod, held until dropped. Whoever dies gives it back.
#[derive(Debug)]
pub struct PodLock(Flock<File>);

impl AsFd for PodLock {
    /// A process that inherits this descriptor shares the lock.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The records of this node.
#[derive(Debug, Clone)]
pub struct Records {
    pods: PathBuf,
    containers: PathBuf,
    reports: PathBuf,
}

impl Records {
    pub fn new(config: &Config) -> Self {
        Self {
            pods: config.pods_dir(),
            containers: config.containers_dir(),
            reports: config.state_dir.join("reports"),
        }
    }

    /// Directory of a pod.
    pub fn pod_dir(&self, sandbox: &SandboxId) -> PathBuf {
        self.pods.join(sandbox.as_str())
    }

    /// Directory of a container; runsc's bundle.
    pub fn container_dir(&self, container: &ContainerId) -> PathBuf {
        self.containers.join(container.as_str())
    }

    /// Makes a container's directory.
    pub fn create_container_dir(&self, container: &ContainerId) -> Result<(), Error> {
        make_dir(&self.container_dir(container))
    }

    /// Waits for the pod's lock, for changing what its sandbox does.
    pub fn lock(&self, sandbox: &SandboxId) -> Result<PodLock, Error> {
        let (path, file) = self.file_to_lock(sandbox, "lock")?;
        loop {
            match Flock::lock(
                file.try_clone().map_err(|e| write_error(&path, e))?,
                FlockArg::LockExclusive,
            ) {
                Ok(lock) => return Ok(PodLock(lock)),
                Err((_, nix::Error::EINTR)) => {}
                Err((_, source)) => return Err(Error::Lock { path, source }),
            }
        }
    }

    /// Takes the pod's lock unless somebody holds it.
    pub fn try_lock(&self, sandbox: &SandboxId) -> Result<Option<PodLock>, Error> {
        let (path, file) = self.file_to_lock(sandbox, "lock")?;
        let lock = locks::try_exclusive(file).map_err(|source| Error::Lock { path, source })?;
        Ok(lock.map(PodLock))
    }

    fn file_to_lock(
        &self,
        sandbox: &SandboxId,
        name: &'static str,
    ) -> Result<(PathBuf, File), Error> {
        let dir = self.pod_dir(sandbox);
        if !dir.is_dir() {
            return Err(Error::Missing(dir));
        }
        let path = dir.join(name);
        let file = locks::open(&path).map_err(|source| write_error(&path, source))?;
        Ok((path, file))
    }

    pub fn write_pod(&self, pod: &PodRecord) -> Result<(), Error> {
        write_json(&self.pod_dir(&pod.sandbox).join("pod.json"), pod)
    }

    pub fn pod(&self, sandbox: &SandboxId) -> Result<PodRecord, Error> {
        read_json(&self.pod_dir(sandbox).join("pod.json"))
    }

    pub fn write_state(&self, sandbox: &SandboxId, state: &SandboxState) -> Result<(), Error> {
        write_json(&self.pod_dir(sandbox).join("state.json"), state)
    }

    /// From now on the image is the sandbox. It sleeps since it was to be paused for that, and the time of the file says so: whoever
    /// asked for it meanwhile asked for one that sleeps. (A keeper that is older than this takes a field that it does not know for a
    /// sandbox that is dead.)
    pub fn write_hibernated(&self, sandbox: &SandboxId, image: &ImageId) -> Result<(), Error> {
        let since = self.asleep_since(sandbox);
        let state = SandboxState::Hibernated {
            image: image.clone(),
        };
        write_json_as_of(&self.pod_dir(sandbox).join("state.json"), &state, since)
    }

    pub fn state(&self, sandbox: &SandboxId) -> Result<SandboxState, Error> {
        read_json(&self.pod_dir(sandbox).join("state.json"))
    }

    pub fn container(&self, container: &ContainerId) -> Result<ContainerRecord, Error> {
        read_json(&self.container_dir(container).join("container.json"))
    }

    /// Writes the spec that runsc reads from the container's directory.
    pub fn write_spec(
        &self,
        container: &ContainerId,
        spec: &serde_json::Value,
    ) -> Result<(), Error> {
        write_json(&self.container_dir(container).join("config.json"), spec)
    }

    /// The spec that [`Self::write_spec`] wrote.
    pub fn spec(&self, container: &ContainerId) -> Result<serde_json::Value, Error> {
        read_json(&self.container_dir(container).join("config.json"))
    }

    /// The note of a pause; see [`torpor_runsc::pause`].
    pub fn pause_mark(&self, sandbox: &SandboxId) -> Result<Option<PauseMark>, Error> {
        read_if_there(&self.pause_path(sandbox))
    }

    /// Whether the note says paused, for counting: see [`torpor_runsc::pause::is_paused`] for certainty.
    pub fn is_noted_paused(&self, sandbox: &SandboxId) -> bool {
        matches!(self.pause_mark(sandbox), Ok(Some(PauseMark::Paused)))
    }

    /// Since when the note of a pause holds, if there is one.
    pub fn pause_began(&self, sandbox: &SandboxId) -> Option<std::time::SystemTime> {
        modified(&self.pause_path(sandbox))
    }

    /// Replaces the note of a pause, which is dated: without a time, now.
    pub fn note_pause(
        &self,
        sandbox: &SandboxId,
        mark: PauseMark,
        since: Option<std::time::SystemTime>,
    ) -> Result<(), Error> {
        write_json_as_of(&self.pause_path(sandbox), &mark, since)
    }

    /// Removes the note of a pause. A sandbox that was ended or restored is not paused.
    pub fn forget_pause(&self, sandbox: &SandboxId) -> Result<(), Error> {
        remove_file(&self.pause_path(sandbox))
    }

    fn pause_path(&self, sandbox: &SandboxId) -> PathBuf {
        self.pod_dir(sandbox).join("pause.json")
    }

    /// Notes the limits that are lifted for the time of a wake; what an interrupted wake has noted stays.
    pub fn note_quotas(&self, sandbox: &SandboxId, quotas: &[Quota]) -> Result<(), Error> {
        let path = self.pod_dir(sandbox).join("quotas.json");
        if path.exists() {
            Ok(())
        } else {
            write_json(&path, &quotas)
        }
    }

    /// The limits that are lifted, and that are to be put back.
    pub fn quotas(&self, sandbox: &SandboxId) -> Result<Vec<Quota>, Error> {
        let noted = read_if_there(&self.pod_dir(sandbox).join("quotas.json"))?;
        Ok(noted.unwrap_or_default())
    }

    /// The limits are back.
    pub fn forget_quotas(&self, sandbox: &SandboxId) -> Result<(), Error> {
        remove_file(&self.pod_dir(sandbox).join("quotas.json"))
    }

    /// Notes the limits of memory that are wider for the time of a wake, in place of those noted before. By who holds the pod's lock.
    pub fn note_room(&self, sandbox: &SandboxId, rooms: &[Room]) -> Result<(), Error> {
        let path = self.pod_dir(sandbox).join("room.json");
        match rooms.is_empty() {
            true => remove_file(&path),
            false => write_json(&path, &rooms),
        }
    }

    /// The limits of memory that are wider, and that are to be put back.
    pub fn room(&self, sandbox: &SandboxId) -> Result<Vec<Room>, Error> {
        let noted = read_if_there(&self.pod_dir(sandbox).join("room.json"))?;
        Ok(noted.unwrap_or_default())
    }

    /// Since when the sandbox sleeps, if it hibernates or stands still.
    pub fn asleep_since(&self, sandbox: &SandboxId) -> Option<std::time::SystemTime> {
        match self.state(sandbox).ok()? {
            SandboxState::Restoring { .. } => None,
            _ if self.is_noted_paused(sandbox) => self.pause_began(sandbox),
            SandboxState::Hibernated { .. } => modified(&self.pod_dir(sandbox).join("state.json")),
            SandboxState::Running => None,
        }
    }

    /// When the pod's record was written.
    pub fn made_at(&self, sandbox: &SandboxId) -> Option<std::time::SystemTime> {
        modified(&self.pod_dir(sandbox).join("pod.json"))
    }

    /// The pods of this node. Directories that are being made or taken away are passed over.
    pub fn pods(&self) -> Result<Vec<PodRecord>, Error> {
        let ids = self.sandboxes()?.into_iter();
        Ok(ids.filter_map(|id| self.pod(&id).ok()).collect())
    }

    /// All that have a directory, with a record or without.
    pub fn sandboxes(&self) -> Result<Vec<SandboxId>, Error> {
        let names = list(&self.pods)?.into_iter();
        Ok(names
            .filter_map(|name| SandboxId::try_from(name).ok())
            .collect())
    }

    /// When a file of the pod's was last made, replaced or taken away: whatever happens to a sandbox that sleeps is noted so.
    pub fn changed_at(&self, sandbox: &SandboxId) -> Option<std::time::SystemTime> {
        modified(&self.pod_dir(sandbox))
    }

    /// Forgets a pod.
    pub fn remove_pod(&self, sandbox: &SandboxId) -> Result<(), Error> {
        remove_dir(&self.pod_dir(sandbox))
    }
}

#[cfg(test)]
pub(crate) mod tests;

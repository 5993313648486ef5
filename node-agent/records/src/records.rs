//! The records of this node: locks, specs, states and the limits that a wake changes.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::SystemTime;

use nix::fcntl::{Flock, FlockArg};
use torpor_cgroup::Quota;
use torpor_cgroup::room::Room;
use torpor_core::ids::{ContainerId, ImageId, SandboxId};

use crate::config::Config;
use crate::error::Error;
use crate::files::{
    list, make_dir, modified, read_if_there, read_json, remove_dir, remove_file, write_error,
    write_json, write_json_as_of,
};
use crate::locks;
use crate::pod::{ContainerRecord, PodRecord, SandboxState};

/// The lock of one pod, held until it is dropped. The kernel releases the lock of a process that
/// dies.
#[derive(Debug)]
pub struct PodLock(pub(crate) Flock<File>);

impl AsFd for PodLock {
    /// The lock's descriptor. A process that inherits the descriptor shares the lock.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The records of this node.
#[derive(Debug, Clone)]
pub struct Records {
    pods: PathBuf,
    pub(crate) containers: PathBuf,
    pub(crate) reports: PathBuf,
}

impl Records {
    pub fn new(config: &Config) -> Self {
        Self {
            pods: config.pods_dir(),
            containers: config.containers_dir(),
            reports: config.state_dir.join("reports"),
        }
    }

    /// Returns the directory of a pod.
    pub fn pod_dir(&self, sandbox: &SandboxId) -> PathBuf {
        self.pods.join(sandbox.as_str())
    }

    /// Returns the directory of a container, which is runsc's bundle.
    pub fn container_dir(&self, container: &ContainerId) -> PathBuf {
        self.containers.join(container.as_str())
    }

    /// Makes a container's directory.
    pub fn create_container_dir(&self, container: &ContainerId) -> Result<(), Error> {
        make_dir(&self.container_dir(container))
    }

    /// Waits for the pod's lock and takes it. A process that changes the sandbox's state holds the
    /// lock.
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

    /// Takes the pod's lock; returns none if another process holds it.
    pub fn try_lock(&self, sandbox: &SandboxId) -> Result<Option<PodLock>, Error> {
        let (path, file) = self.file_to_lock(sandbox, "lock")?;
        let lock = locks::try_exclusive(file).map_err(|source| Error::Lock { path, source })?;
        Ok(lock.map(PodLock))
    }

    pub(crate) fn file_to_lock(
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

    /// Records that the sandbox is hibernated: from now on the image is the sandbox.
    ///
    /// The sandbox sleeps since the decision to pause it for the save, and the file gets that time.
    /// A use between the decision and this call is therefore a use of a sleeping sandbox. The time
    /// is not a field of the state: the shim of an older pod takes a state with an unknown field
    /// for a dead sandbox.
    pub fn write_hibernated(&self, sandbox: &SandboxId, image: &ImageId) -> Result<(), Error> {
        let since = self.asleep_since(sandbox);
        let state = SandboxState::Hibernated {
            image: image.clone(),
            unstarted: None,
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

    /// Reads the spec that [`Self::write_spec`] wrote.
    pub fn spec(&self, container: &ContainerId) -> Result<serde_json::Value, Error> {
        read_json(&self.container_dir(container).join("config.json"))
    }

    /// Records the limits that are lifted during a wake. The record of an interrupted wake stays
    /// unchanged.
    pub fn note_quotas(&self, sandbox: &SandboxId, quotas: &[Quota]) -> Result<(), Error> {
        let path = self.pod_dir(sandbox).join("quotas.json");
        if path.exists() {
            Ok(())
        } else {
            write_json(&path, &quotas)
        }
    }

    /// Reads the limits of processor time that are lifted and must be restored.
    pub fn quotas(&self, sandbox: &SandboxId) -> Result<Vec<Quota>, Error> {
        let noted = read_if_there(&self.pod_dir(sandbox).join("quotas.json"))?;
        Ok(noted.unwrap_or_default())
    }

    /// Removes the record of lifted limits, after they are restored.
    pub fn forget_quotas(&self, sandbox: &SandboxId) -> Result<(), Error> {
        remove_file(&self.pod_dir(sandbox).join("quotas.json"))
    }

    /// Records the limits of memory that are raised during a wake, in place of those recorded
    /// before. The caller holds the pod's lock.
    pub fn note_room(&self, sandbox: &SandboxId, rooms: &[Room]) -> Result<(), Error> {
        let path = self.pod_dir(sandbox).join("room.json");
        match rooms.is_empty() {
            true => remove_file(&path),
            false => write_json(&path, &rooms),
        }
    }

    /// Reads the limits of memory that are raised and must be restored.
    pub fn room(&self, sandbox: &SandboxId) -> Result<Vec<Room>, Error> {
        let noted = read_if_there(&self.pod_dir(sandbox).join("room.json"))?;
        Ok(noted.unwrap_or_default())
    }

    /// Returns the time since which the sandbox is hibernated or paused; none if it is neither.
    pub fn asleep_since(&self, sandbox: &SandboxId) -> Option<SystemTime> {
        match self.state(sandbox).ok()? {
            SandboxState::Restoring { .. } => None,
            _ if self.is_noted_paused(sandbox) => self.pause_began(sandbox),
            SandboxState::Hibernated { .. } => modified(&self.pod_dir(sandbox).join("state.json")),
            SandboxState::Running => None,
        }
    }

    /// Returns the time at which the pod's record was written.
    pub fn made_at(&self, sandbox: &SandboxId) -> Option<SystemTime> {
        modified(&self.pod_dir(sandbox).join("pod.json"))
    }

    /// Returns the pods of this node, without directories that are being made or removed.
    pub fn pods(&self) -> Result<Vec<PodRecord>, Error> {
        let ids = self.sandboxes()?.into_iter();
        Ok(ids.filter_map(|id| self.pod(&id).ok()).collect())
    }

    /// Returns all sandboxes that have a directory, with a pod's record or without.
    pub fn sandboxes(&self) -> Result<Vec<SandboxId>, Error> {
        let names = list(&self.pods)?.into_iter();
        Ok(names
            .filter_map(|name| SandboxId::try_from(name).ok())
            .collect())
    }

    /// Returns the time at which a file of the pod's directory was last made, replaced or removed.
    /// Every event of a sleeping sandbox changes such a file.
    pub fn changed_at(&self, sandbox: &SandboxId) -> Option<SystemTime> {
        modified(&self.pod_dir(sandbox))
    }

    /// Removes the records of a pod.
    pub fn remove_pod(&self, sandbox: &SandboxId) -> Result<(), Error> {
        remove_dir(&self.pod_dir(sandbox))
    }
}

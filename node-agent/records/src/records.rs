//! The records of this node: locks, specs, states and the limits that a wake changes.

use std::fs::{File, OpenOptions, Permissions};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::fcntl::{Flock, FlockArg};
use torpor_cgroup::Quota;
use torpor_cgroup::room::Room;
use torpor_core::ids::{ContainerId, ImageId, SandboxId};

use crate::config::Config;
use crate::error::Error;
use crate::files::{
    list, make_dir, modified, read_if_there, read_json, remove_dir, remove_file, write_error,
    write_json, write_json_as_of, write_private_json,
};
use crate::locks;
use crate::pod::{ContainerRecord, PodRecord, SandboxState};

/// Modes of directories of records: the agent reads them, or writes to them.
pub(crate) const READABLE: u32 = 0o750;
pub(crate) const OF_AGENT: u32 = 0o770;
/// Name of a container's record.
pub(crate) const CONTAINER: &str = "container.json";

/// Accepts a file or directory that was removed meanwhile.
fn if_there<T>(result: std::io::Result<T>) -> std::io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// Lets everyone that reaches a record of root read it. A link to a file elsewhere is left: the
/// agent may have made it.
fn make_readable(path: &Path) -> std::io::Result<()> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK);
    let file = options.open(path)?;
    let found = file.metadata()?;
    if found.is_file() && found.uid() == 0 && found.nlink() == 1 {
        file.set_permissions(Permissions::from_mode(0o644))?;
    }
    Ok(())
}

/// Sets the mode of a directory and of those below it down to `depth`, and lets the agent read
/// their records of this name; none: all.
fn hand_over(dir: &Path, mode: u32, depth: u32, records: Option<&str>) -> std::io::Result<()> {
    if if_there(locks::share(dir, mode))?.is_none() {
        return Ok(());
    }
    for entry in if_there(std::fs::read_dir(dir))?.into_iter().flatten() {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        let name = entry.file_name();
        let is_record = path.extension().is_some_and(|end| end == "json")
            && records.is_none_or(|record| name == record);
        if kind.is_dir() && depth > 0 {
            hand_over(&path, mode, depth - 1, records)?;
        } else if kind.is_file() && is_record {
            if_there(make_readable(&path))?;
        }
    }
    Ok(())
}

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
        Self::below(&config.state_dir)
    }

    /// Returns the records below a directory of state.
    pub fn below(state_dir: &Path) -> Self {
        Self {
            pods: state_dir.join("pods"),
            containers: state_dir.join("containers"),
            reports: state_dir.join("reports"),
        }
    }

    /// Lets the agent read the records of Pods of an earlier version, which only root could read.
    pub fn hand_over(&self) -> std::io::Result<()> {
        // Below a pod's directory is the list of its containers.
        hand_over(&self.pods, READABLE, 2, None)?;
        hand_over(&self.containers, READABLE, 1, Some(CONTAINER))?;
        hand_over(&self.reports, OF_AGENT, 0, None)
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
        read_json(&self.container_dir(container).join(CONTAINER))
    }

    /// Writes the spec that runsc reads from the container's directory. The agent cannot read it:
    /// it has the program's environment.
    pub fn write_spec(
        &self,
        container: &ContainerId,
        spec: &serde_json::Value,
    ) -> Result<(), Error> {
        write_private_json(&self.container_dir(container).join("config.json"), spec)
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

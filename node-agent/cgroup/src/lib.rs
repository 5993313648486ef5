//! The cgroups of a pod, for all runtimes of Torpor. [`reclaim`] pushes the memory of a cgroup into
//! swap, [`swap`] finds the cgroups that forbid swap, [`limits`] reads the Pod's limits, [`room`]
//! raises its limit of memory for a wake, and [`meminfo`] reads the machine's memory.
//!
//! runsc runs with `--ignore-cgroups`. This crate places the pod's processes, in the same way on
//! cgroup v1, v2 and the hybrid of both:
//! - The sandbox (sentry, gofers, stubs) is in `<pod cgroup>/torpor-<sandbox id>`, a leaf beside
//!   the containers' cgroups: the pod's limits are set one level above, and on v2 the pod's cgroup
//!   itself may contain no process.
//! - The cgroup of each container contains no process of the sandbox. That of the pause container
//!   contains the commands that forward connections.
//! - The pod's shim stays in the cgroup in which containerd has started it.
//!
//! The kernel counts the processes of each memory cgroup that it has killed for want of memory. At
//! a container's end the shim reads the sandbox' count ([`Hierarchies::oom_kills`]), and so reports
//! an OOM kill.

use std::io::Write;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

mod held;
pub mod limits;
pub mod meminfo;
mod oom;
pub mod reclaim;
pub mod room;
pub mod swap;

/// Error of making, joining, reading or removing a cgroup.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the cgroup hierarchies below {root}")]
    Hierarchies {
        root: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("no cgroup hierarchy is mounted below {0}")]
    None(PathBuf),
    #[error("{0:?} is not a cgroup path")]
    BadPath(String),
    #[error("cannot create the cgroup {path}")]
    Create {
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
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot remove the cgroup {path}")]
    Remove {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

/// Returns the path of `linux.cgroupsPath` relative to a hierarchy's root.
///
/// With the cgroupfs driver `linux.cgroupsPath` is a path. With the systemd driver it is
/// `slice:prefix:name` and means `<expanded slice>/<prefix>-<name>.scope`. The name of a slice
/// contains its parents: `kubepods-burstable-podX.slice` lies in
/// `kubepods.slice/kubepods-burstable.slice`.
pub fn relative_path(cgroups_path: &str) -> Result<PathBuf, Error> {
    let bad = || Error::BadPath(cgroups_path.to_owned());
    let parts: Vec<&str> = cgroups_path.split(':').collect();
    let path = match parts.as_slice() {
        [slice, prefix, name] if !prefix.contains('/') && !name.contains('/') => {
            let stem = slice.strip_suffix(".slice").ok_or_else(bad)?;
            let mut path = PathBuf::new();
            let mut spelled = String::new();
            for part in stem.split('-') {
                if !spelled.is_empty() {
                    spelled.push('-');
                }
                spelled.push_str(part);
                path.push(format!("{spelled}.slice"));
            }
            path.join(format!("{prefix}-{name}.scope"))
        }
        [path] => PathBuf::from(path.trim_start_matches('/')),
        _ => return Err(bad()),
    };
    let plain = path
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    if plain && path.components().next().is_some() {
        Ok(path)
    } else {
        Err(bad())
    }
}

/// Returns the leaf cgroup of the sandbox's processes, from the pause container's
/// `linux.cgroupsPath`.
pub fn sandbox_path(pause_cgroups_path: &str, sandbox: &str) -> Result<PathBuf, Error> {
    Ok(beside(&relative_path(pause_cgroups_path)?, sandbox))
}

/// Returns the leaf cgroup of the sandbox's processes, from the cgroup of any container of the pod.
pub fn beside(container: &Path, sandbox: &str) -> PathBuf {
    let pod = container
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(container);
    let short = sandbox.get(..12).unwrap_or(sandbox);
    pod.join(format!("{SANDBOX_PREFIX}{short}"))
}

/// Prefix of the names of the sandboxes' leaf cgroups.
const SANDBOX_PREFIX: &str = "torpor-";

/// The cgroup hierarchies of this machine: one on v2, several on v1.
#[derive(Debug, Clone)]
pub struct Hierarchies {
    roots: Vec<PathBuf>,
}

impl Hierarchies {
    /// Finds the hierarchies that are mounted below `root` (`/sys/fs/cgroup`).
    pub fn find(root: &Path) -> Result<Self, Error> {
        if root.join("cgroup.controllers").exists() {
            return Ok(Self {
                roots: vec![root.into()],
            });
        }
        let entries = std::fs::read_dir(root).map_err(|source| Error::Hierarchies {
            root: root.into(),
            source,
        })?;
        let mut roots: Vec<PathBuf> = entries
            .filter_map(Result::ok)
            // On v1 `cpu` may be a link to `cpu,cpuacct`, which is the same hierarchy.
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .map(|entry| entry.path())
            .filter(|path| path.join("cgroup.procs").exists())
            .collect();
        roots.sort();
        if roots.is_empty() {
            Err(Error::None(root.into()))
        } else {
            Ok(Self { roots })
        }
    }

    /// Makes the cgroup in each hierarchy in which its parent exists. The kubelet does not use the
    /// other hierarchies, and they stay unchanged.
    pub fn create(&self, relative: &Path) -> Result<(), Error> {
        for path in self.with_parent(relative) {
            if let Some(parent) = path.parent() {
                count_memory_below(parent);
            }
            match std::fs::create_dir(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(source) => return Err(Error::Create { path, source }),
            }
            inherit_cpuset(&path)?;
        }
        Ok(())
    }

    /// Moves a process into the cgroup. Children that the process starts later are in it, too. On
    /// v1 only the hierarchies that limit or count a resource are used: each move costs a grace
    /// period of the kernel's RCU.
    pub fn place(&self, relative: &Path, pid: u32) -> Result<(), Error> {
        let roots = self.roots.iter().filter(|root| limits_or_counts(root));
        for path in roots
            .map(|root| root.join(relative))
            .filter(|path| path.is_dir())
        {
            write(&path.join("cgroup.procs"), &pid.to_string())?;
        }
        Ok(())
    }

    /// Returns the pids of all processes in the cgroup, from all hierarchies.
    pub fn pids(&self, relative: &Path) -> Result<Vec<i32>, Error> {
        let mut found = Vec::new();
        for path in self.existing(relative) {
            let path = path.join("cgroup.procs");
            match std::fs::read_to_string(&path) {
                Ok(text) => found.extend(text.lines().filter_map(|line| line.parse::<i32>().ok())),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(source) => return Err(Error::Read { path, source }),
            }
        }
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Removes the cgroup. A missing cgroup is no error, a cgroup with processes is one.
    pub fn remove(&self, relative: &Path) -> Result<(), Error> {
        for path in self.existing(relative) {
            match std::fs::remove_dir(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(source) => return Err(Error::Remove { path, source }),
            }
        }
        Ok(())
    }

    /// Returns the cgroup's limits of processor time; empty if it has none.
    pub fn quotas(&self, relative: &Path) -> Vec<Quota> {
        self.existing(relative)
            .flat_map(|path| [path.join("cpu.cfs_quota_us"), path.join("cpu.max")])
            .filter_map(|path| {
                let value = std::fs::read_to_string(&path).ok()?.trim().to_owned();
                let unlimited = unlimited(&value)?;
                (value != unlimited).then_some(Quota {
                    path,
                    value,
                    unlimited,
                })
            })
            .collect()
    }

    /// Reports whether the machine has cgroup v2 alone.
    pub fn is_unified(&self) -> bool {
        let one = |root: &PathBuf| root.join("cgroup.controllers").exists();
        self.roots.len() == 1 && self.roots.iter().all(one)
    }

    /// Returns the cgroup's working set in bytes, as the kubelet computes it: memory in use without
    /// inactive file cache. None if the kernel does not count the cgroup's memory.
    pub fn working_set(&self, relative: &Path) -> Option<u64> {
        self.existing(relative).find_map(|path| {
            let used = ["memory.current", "memory.usage_in_bytes"]
                .iter()
                .find_map(|file| std::fs::read_to_string(path.join(file)).ok())?;
            let used: u64 = used.trim().parse().ok()?;
            let stat = std::fs::read_to_string(path.join("memory.stat")).unwrap_or_default();
            Some(used.saturating_sub(idle_cache(&stat)))
        })
    }

    /// Reports whether the process is in the cgroup or in a cgroup below it, in the hierarchy of
    /// the memory controller. A missing cgroup has no processes.
    pub fn holds(&self, relative: &Path, pid: u32) -> Result<bool, Error> {
        let Some(group) = self.memory(relative) else {
            return Ok(false);
        };
        let pid = pid.to_string();
        let mut remaining = vec![group.path().to_owned()];
        while let Some(path) = remaining.pop() {
            let failed = |source| Error::Read {
                path: path.clone(),
                source,
            };
            let listed = match std::fs::read_to_string(path.join("cgroup.procs")) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                listed => listed.map_err(failed)?,
            };
            if listed.lines().any(|line| line == pid) {
                return Ok(true);
            }
            let entries = std::fs::read_dir(&path).map_err(failed)?;
            let directories = entries
                .filter_map(Result::ok)
                .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            remaining.extend(directories.map(|entry| entry.path()));
        }
        Ok(false)
    }

    /// Returns the processor time that the cgroup and the cgroups below it have used since they
    /// were made. None if the kernel does not count it.
    pub fn processor_time(&self, relative: &Path) -> Option<Duration> {
        self.existing(relative).find_map(|path| {
            let v1 = std::fs::read_to_string(path.join("cpuacct.usage"));
            let nanos = v1.ok().and_then(|text| text.trim().parse().ok());
            nanos.map(Duration::from_nanos).or_else(|| {
                let stat = std::fs::read_to_string(path.join("cpu.stat")).ok()?;
                let micros = stat
                    .lines()
                    .find_map(|line| line.strip_prefix("usage_usec "));
                Some(Duration::from_micros(micros?.trim().parse().ok()?))
            })
        })
    }

    /// Returns the cgroup in the hierarchy of the memory controller; none if the kernel neither
    /// limits nor counts memory.
    pub(crate) fn memory(&self, relative: &Path) -> Option<MemoryGroup> {
        let group = |root: &Path| {
            let name = root.file_name().unwrap_or_default().to_string_lossy();
            if name.split(',').any(|controller| controller == "memory") {
                return Some(MemoryGroup::V1(root.join(relative)));
            }
            self.is_unified().then(|| MemoryGroup::V2 {
                root: root.to_path_buf(),
                group: root.join(relative),
            })
        };
        self.roots.iter().find_map(|root| group(root))
    }

    fn with_parent(&self, relative: &Path) -> impl Iterator<Item = PathBuf> {
        self.roots
            .iter()
            .map(move |root| root.join(relative))
            .filter(|path| path.parent().is_some_and(Path::is_dir))
    }

    fn existing(&self, relative: &Path) -> impl Iterator<Item = PathBuf> {
        self.roots
            .iter()
            .map(move |root| root.join(relative))
            .filter(|path| path.is_dir())
    }
}

/// A cgroup of the memory controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MemoryGroup {
    V1(PathBuf),
    V2 { root: PathBuf, group: PathBuf },
}

impl MemoryGroup {
    fn path(&self) -> &Path {
        match self {
            Self::V1(group) | Self::V2 { group, .. } => group,
        }
    }
}

/// Reports whether a hierarchy limits or counts a pod's resources. The name of a v1 hierarchy lists
/// its controllers; the only hierarchy of v2 has all of them.
fn limits_or_counts(root: &Path) -> bool {
    let name = root.file_name().unwrap_or_default().to_string_lossy();
    root.join("cgroup.controllers").exists() && name != "unified"
        || name.split(',').any(|controller| {
            matches!(controller, "cpu" | "cpuacct" | "cpuset" | "memory" | "pids")
        })
}

/// A limit of processor time: its file, its value, and the text that means no limit.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quota {
    path: PathBuf,
    value: String,
    unlimited: String,
}

impl Quota {
    /// Removes the limit from the cgroup.
    pub fn lift(&self) -> Result<(), Error> {
        write(&self.path, &self.unlimited)
    }

    /// Restores the limit, unless another process (the kubelet) has set another limit meanwhile.
    pub fn put_back(&self) -> Result<(), Error> {
        match std::fs::read_to_string(&self.path) {
            Ok(now) if now.trim() == self.unlimited => write(&self.path, &self.value),
            // Another limit is set, or the cgroup does not exist any more.
            _ => Ok(()),
        }
    }
}

/// Returns the bytes of inactive file cache of the cgroup and the cgroups below it, from
/// `memory.stat` of v1 or v2.
fn idle_cache(stat: &str) -> u64 {
    // On v1 `inactive_file` does not include the cgroups below.
    counted(stat, "total_inactive_file")
        .or_else(|| counted(stat, "inactive_file"))
        .unwrap_or(0)
}

/// Returns the number of a key in `memory.stat`.
fn counted(stat: &str, key: &str) -> Option<u64> {
    stat.lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.parse().ok())
}

/// Returns the text that means "no limit" in place of `value`: on v1 a number, on v2 `max` and the
/// period. None if `value` is no limit's text.
fn unlimited(value: &str) -> Option<String> {
    match value.split_once(' ') {
        Some((_, period)) => Some(format!("max {period}")),
        None => value.parse::<i64>().ok().map(|_| "-1".to_owned()),
    }
}

/// Enables the memory controller for the cgroups below `parent` on v2.
///
/// On v2 a cgroup has the controllers that its parent enables for it. The kubelet enables none for
/// the containers' cgroups in a Pod's cgroup and leaves that to the runtime. It must happen before
/// the sandbox has memory, because pages stay counted in the cgroup in which they were allocated.
/// If the kernel refuses it, the sandbox runs nevertheless, and its doze reports that its memory
/// cannot be pushed out.
fn count_memory_below(parent: &Path) {
    let controllers = std::fs::read_to_string(parent.join("cgroup.controllers"));
    let has_memory = |names: String| names.split_whitespace().any(|name| name == "memory");
    if controllers.is_ok_and(has_memory) {
        let _ = write(&parent.join("cgroup.subtree_control"), "+memory");
    }
}

/// Copies the parent's cpuset to a new cgroup on v1: a new cpuset is empty, and the kernel accepts
/// no process in an empty one.
fn inherit_cpuset(path: &Path) -> Result<(), Error> {
    let Some(parent) = path.parent() else {
        return Ok(());
    };
    for file in ["cpuset.cpus", "cpuset.mems"] {
        let own = path.join(file);
        // v2 has the same file names, but an empty file means the parent's value.
        if path.join("cgroup.controllers").exists() || !own.exists() {
            continue;
        }
        let read = |path: &Path| {
            std::fs::read_to_string(path).map_err(|source| Error::Read {
                path: path.into(),
                source,
            })
        };
        if read(&own)?.trim().is_empty() {
            write(&own, read(&parent.join(file))?.trim())?;
        }
    }
    Ok(())
}

pub(crate) fn write(path: &Path, text: &str) -> Result<(), Error> {
    let written = std::fs::OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|source| Error::Write {
        path: path.into(),
        source,
    })
}

#[cfg(test)]
mod tests;

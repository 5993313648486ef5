//! runsc's own records: a state file and a lock file for each container, in runsc's root directory.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::process;

/// Why one of runsc's state files could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read runsc's record {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot write runsc's record {path}")]
    Write {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

/// Bytes that are read of a state. A state holds the container's whole OCI spec.
const MAX_RECORD: u64 = 16 << 20;

/// Bytes that most states have at most, so that one call reads them. The wake of a dozing sandbox
/// waits for this.
const USUAL_RECORD: usize = 32 << 10;

/// Returns the path of runsc's state of a container of the sandbox.
pub(crate) fn state_path(root: &Path, id: &str, sandbox: &str) -> PathBuf {
    root.join(format!("{id}_sandbox:{sandbox}.state"))
}

/// Time between two attempts to take a lock that another process holds.
const LOCK_PERIOD: Duration = Duration::from_millis(2);

/// The part of a root container's state that is read.
#[derive(serde::Deserialize)]
struct RunscState {
    sandbox: RunscSandbox,
}

#[derive(serde::Deserialize)]
struct RunscSandbox {
    /// The sentry's process id.
    #[serde(default)]
    pid: i32,
    #[serde(default)]
    uid: u32,
    #[serde(default)]
    gid: u32,
}

/// The part of a container's state that is read.
#[derive(serde::Deserialize)]
struct RunscContainer {
    /// 0: the container has no gofer.
    #[serde(rename = "goferPid", default)]
    gofer_pid: i32,
}

impl RunscContainer {
    /// Returns the process id of the container's gofer, which may have ended.
    fn gofer(&self) -> Option<i32> {
        Some(self.gofer_pid).filter(|pid| *pid > 0)
    }
}

/// Reports whether runsc has a state of the container.
pub fn is_known(root: &Path, id: &str, sandbox: &str) -> bool {
    state_path(root, id, sandbox).exists()
}

/// Returns the paths of runsc's files of the sandbox' containers: a state and a lock each.
pub(crate) fn files_of(root: &Path, sandbox: &str) -> Result<Vec<PathBuf>, Error> {
    let part = format!("_sandbox:{sandbox}.");
    records(root, |name| name.contains(&part))
}

/// Returns the states of the container `id`, each with its sandbox' id: one or none, unless a
/// killed runsc has left more.
pub(crate) fn states_of(root: &Path, id: &str) -> Result<Vec<(PathBuf, String)>, Error> {
    let part = format!("{id}_sandbox:");
    let states = |name: &str| name.starts_with(&part) && name.ends_with(".state");
    let with_sandbox = |path: PathBuf| {
        let sandbox = path.file_stem()?.to_str()?.strip_prefix(&part)?.to_owned();
        Some((path, sandbox))
    };
    let found = records(root, states)?.into_iter();
    Ok(found.filter_map(with_sandbox).collect())
}

/// Reports whether each of the sandbox' gofers lives. gVisor kills a container that has lost its
/// gofer as soon as the container may run, unless the sandbox was restored.
pub(crate) fn has_all_gofers(root: &Path, sandbox: &str) -> Result<bool, Error> {
    Ok(gofers(root, sandbox)?.into_iter().all(process::goes_on))
}

/// Reports whether the container's gofer has certainly ended. False for a container that never had
/// a gofer.
pub(crate) fn has_lost_gofer(root: &Path, id: &str, sandbox: &str) -> Result<bool, Error> {
    let record: RunscContainer = read_record(&state_path(root, id, sandbox))?;
    Ok(record.gofer().is_some_and(process::is_gone))
}

/// Returns the user and group ids of the sandbox' processes.
pub(crate) fn user(root: &Path, sandbox: &str) -> Result<(u32, u32), Error> {
    let RunscSandbox { uid, gid, .. } = of_sandbox(root, sandbox)?;
    Ok((uid, gid))
}

/// Reads the sandbox' part of its root container's state.
fn of_sandbox(root: &Path, sandbox: &str) -> Result<RunscSandbox, Error> {
    let path = state_path(root, sandbox, sandbox);
    Ok(read_record::<RunscState>(&path)?.sandbox)
}

/// Returns the process id of the sandbox' sentry, by runsc's own record.
pub fn sentry(root: &Path, sandbox: &str) -> Result<i32, Error> {
    Ok(of_sandbox(root, sandbox)?.pid)
}

/// Returns the process ids of the gofers of the sandbox' containers, by runsc's own records. The
/// processes may have ended.
pub(crate) fn gofers(root: &Path, sandbox: &str) -> Result<Vec<i32>, Error> {
    let end = format!("_sandbox:{sandbox}.state");
    let mut found = Vec::new();
    for path in records(root, |name| name.ends_with(&end))? {
        match read_record::<RunscContainer>(&path) {
            Ok(container) => found.extend(container.gofer()),
            // The container was deleted meanwhile.
            Err(Error::Read { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Reports whether the container's gofer lives, by runsc's own record. True for a container that
/// never had a gofer.
pub fn gofer_goes_on(root: &Path, id: &str, sandbox: &str) -> Result<bool, Error> {
    let record: RunscContainer = read_record(&state_path(root, id, sandbox))?;
    Ok(record.gofer().is_none_or(process::goes_on))
}

/// Returns runsc's record of the container. None where runsc has none.
pub fn of_container(
    root: &Path,
    id: &str,
    sandbox: &str,
) -> Result<Option<serde_json::Value>, Error> {
    match read_record(&state_path(root, id, sandbox)) {
        Err(Error::Read { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        record => record.map(Some),
    }
}

/// Writes the record of a container that runsc has not started. The whole file takes its place at
/// once, because other commands of runsc read the record.
pub fn write(
    root: &Path,
    id: &str,
    sandbox: &str,
    record: &serde_json::Value,
) -> Result<(), Error> {
    let path = state_path(root, id, sandbox);
    let unfinished = path.with_extension("state.new");
    let bytes = record.to_string();
    let written = || -> std::io::Result<()> {
        let mut file = std::fs::File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o640)
            .open(&unfinished)?;
        file.write_all(bytes.as_bytes())?;
        std::fs::rename(&unfinished, &path)
    };
    written().map_err(|source| Error::Write {
        path: path.clone(),
        source,
    })
}

/// Takes runsc's lock of the container, until the deadline. The kernel releases the lock when the
/// file is closed.
///
/// runsc holds the lock while it makes a container, and again while it starts the container. It
/// holds the lock of a sandbox' first container until the sandbox has the image. Its commands for
/// the other containers wait for that lock. So they run after the sandbox exists and has the image
/// (gVisor, `runsc/container/state_file.go`).
pub fn lock(
    root: &Path,
    id: &str,
    sandbox: &str,
    deadline: Instant,
) -> Result<std::fs::File, Error> {
    let path = state_path(root, id, sandbox).with_extension("lock");
    let locked = || -> std::io::Result<std::fs::File> {
        let file = std::fs::File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)?;
        // Another holder of the lock checks whether a record is whole, or is a command that should
        // have been killed with the sandbox.
        let at_once = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        loop {
            match rustix::fs::flock(&file, at_once) {
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                    std::thread::sleep(LOCK_PERIOD);
                }
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(ErrorKind::TimedOut.into()),
                locked => return Ok(locked.map(|()| file)?),
            }
        }
    };
    locked().map_err(|source| Error::Write {
        path: path.clone(),
        source,
    })
}

/// Returns the paths of the files of a root directory whose names are `wanted`.
pub(crate) fn records(root: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>, Error> {
    let failed = |source| Error::Read {
        path: root.to_owned(),
        source,
    };
    let entries = match std::fs::read_dir(root) {
        // No runsc has run yet.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default();
        if wanted(&name.to_string_lossy()) {
            found.push(path);
        }
    }
    Ok(found)
}

pub(crate) fn remove(path: &Path) -> Result<(), Error> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != ErrorKind::NotFound => Err(Error::Read {
            path: path.to_owned(),
            source,
        }),
        _ => Ok(()),
    }
}

/// Reports whether a killed runsc has left the state half written. A runsc that writes the state
/// holds the lock beside it.
pub(crate) fn is_torn(state: &Path) -> Result<bool, Error> {
    let lock = std::fs::File::open(state.with_extension("lock"));
    if let Ok(lock) = &lock
        && rustix::fs::flock(lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err()
    {
        return Ok(false);
    }
    match read_record::<serde::de::IgnoredAny>(state) {
        Err(Error::Read { source, .. }) => match source.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::InvalidData => Ok(true),
            ErrorKind::NotFound => Ok(false),
            _ => Err(Error::Read {
                path: state.to_owned(),
                source,
            }),
        },
        read => read.map(|_| false),
    }
}

/// Reads one of runsc's own records.
fn read_record<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, Error> {
    let record = |source| Error::Read {
        path: path.to_owned(),
        source,
    };
    let file = std::fs::File::open(path).map_err(record)?;
    let mut bytes = Vec::with_capacity(USUAL_RECORD);
    file.take(MAX_RECORD)
        .read_to_end(&mut bytes)
        .map_err(record)?;
    serde_json::from_slice(&bytes).map_err(|error| record(error.into()))
}

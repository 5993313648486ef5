//! runsc's own records: a state and a lock for each container, in its root directory.

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

/// A state holds the container's whole OCI spec.
const MAX_RECORD: u64 = 16 << 20;

/// What most of them have, and so are read by one call: a sandbox that dozes waits for it.
const USUAL_RECORD: usize = 32 << 10;

/// runsc's record of a container of the sandbox.
pub(crate) fn state_path(root: &Path, id: &str, sandbox: &str) -> PathBuf {
    root.join(format!("{id}_sandbox:{sandbox}.state"))
}

/// How often a lock is asked for that somebody has.
const LOCK_PERIOD: Duration = Duration::from_millis(2);

/// What is read of runsc's record of a sandbox.
#[derive(serde::Deserialize)]
struct RunscState {
    sandbox: RunscSandbox,
}

#[derive(serde::Deserialize)]
struct RunscSandbox {
    /// Of the sentry.
    #[serde(default)]
    pid: i32,
    #[serde(default)]
    uid: u32,
    #[serde(default)]
    gid: u32,
}

/// What is read of runsc's record of a container.
#[derive(serde::Deserialize)]
struct RunscContainer {
    /// 0: it has none.
    #[serde(rename = "goferPid", default)]
    gofer_pid: i32,
}

impl RunscContainer {
    /// The process that serves its files, which may have ended.
    fn gofer(&self) -> Option<i32> {
        Some(self.gofer_pid).filter(|pid| *pid > 0)
    }
}

/// Whether runsc has a state of the container.
pub fn is_known(root: &Path, id: &str, sandbox: &str) -> bool {
    state_path(root, id, sandbox).exists()
}

/// What runsc keeps of the sandbox' containers: a state and a lock each.
pub(crate) fn files_of(root: &Path, sandbox: &str) -> Result<Vec<PathBuf>, Error> {
    let part = format!("_sandbox:{sandbox}.");
    records(root, |name| name.contains(&part))
}

/// The states of containers of this name, each with its sandbox: one or none, unless a killed runsc
/// has left more.
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

/// Whether each of the sandbox' gofers lives. gVisor kills a container that has lost its gofer as
/// soon as it may run, unless the sandbox was restored.
pub(crate) fn has_all_gofers(root: &Path, sandbox: &str) -> Result<bool, Error> {
    Ok(gofers(root, sandbox)?.into_iter().all(process::goes_on))
}

/// Whether the container's gofer has certainly ended. A container that never had one has lost none.
pub(crate) fn has_lost_gofer(root: &Path, id: &str, sandbox: &str) -> Result<bool, Error> {
    let record: RunscContainer = read_record(&state_path(root, id, sandbox))?;
    Ok(record.gofer().is_some_and(process::is_gone))
}

/// User and group of the sandbox' processes.
pub(crate) fn user(root: &Path, sandbox: &str) -> Result<(u32, u32), Error> {
    let RunscSandbox { uid, gid, .. } = of_sandbox(root, sandbox)?;
    Ok((uid, gid))
}

/// What runsc, whose root directory this is, has recorded of the sandbox.
fn of_sandbox(root: &Path, sandbox: &str) -> Result<RunscSandbox, Error> {
    let path = state_path(root, sandbox, sandbox);
    Ok(read_record::<RunscState>(&path)?.sandbox)
}

/// The sandbox' first process, by runsc's own record.
pub fn sentry(root: &Path, sandbox: &str) -> Result<i32, Error> {
    Ok(of_sandbox(root, sandbox)?.pid)
}

/// The processes that serve the files of the sandbox' containers, by runsc's own records: they may have ended.
pub(crate) fn gofers(root: &Path, sandbox: &str) -> Result<Vec<i32>, Error> {
    let end = format!("_sandbox:{sandbox}.state");
    let mut found = Vec::new();
    for path in records(root, |name| name.ends_with(&end))? {
        match read_record::<RunscContainer>(&path) {
            Ok(container) => found.extend(container.gofer()),
            // Its container was deleted meanwhile.
            Err(Error::Read { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Whether the process that serves the container's files goes on, by runsc's own record. A
/// container that never had one counts as well.
pub fn gofer_goes_on(root: &Path, id: &str, sandbox: &str) -> Result<bool, Error> {
    let record: RunscContainer = read_record(&state_path(root, id, sandbox))?;
    Ok(record.gofer().is_none_or(process::goes_on))
}

/// What runsc has recorded of the container. None where it has nothing.
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

/// Writes that record, where runsc has not begun the container: in its place when it is whole, because other commands of runsc's look for it.
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

/// What runsc holds while it makes a container and again while it starts it; of a sandbox' first one until that has the image. Its commands for the other containers
/// wait for that, and so come neither before there is a sandbox nor before that has the image (gVisor, `runsc/container/state_file.go`). The kernel gives it back with the file.
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
        // Who has it looks whether a record is whole, or is one that should have been killed with the sandbox.
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

/// Whether a killed runsc has left it half written. One that writes has the lock beside it.
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

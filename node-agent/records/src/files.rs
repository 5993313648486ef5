//! Reads, replaces and removes the files of records.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::Error;
use crate::locks;

/// Most bytes of a record. The OCI spec of a pod with thousands of mounts is below a megabyte.
const MAX_RECORD: u64 = 8 << 20;

pub(super) fn modified(path: &Path) -> Option<std::time::SystemTime> {
    std::fs::metadata(path).ok()?.modified().ok()
}

pub(super) fn write_error(path: &Path, source: std::io::Error) -> Error {
    Error::Write {
        path: path.into(),
        source,
    }
}

pub(super) fn make_dir(path: &Path) -> Result<(), Error> {
    locks::make_dir(path).map_err(|source| write_error(path, source))
}

/// Makes a directory in which the agent may make and remove files.
pub(super) fn make_dir_of_agent(path: &Path) -> Result<(), Error> {
    locks::make_dir_of_agent(path).map_err(|source| write_error(path, source))
}

/// Removes a directory with its files. Tries again if another process makes a file while the
/// directory is being emptied: a process that inspects a pod without the pod's lock may make a file
/// to lock.
pub(super) fn remove_dir(path: &Path) -> Result<(), Error> {
    const TRIES: u32 = 100;
    for _ in 1..TRIES {
        match std::fs::remove_dir_all(path) {
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {}
            other => return removed(path, other),
        }
    }
    removed(path, std::fs::remove_dir_all(path))
}

pub(super) fn remove_file(path: &Path) -> Result<(), Error> {
    removed(path, std::fs::remove_file(path))
}

/// Accepts a file or directory that does not exist as removed.
fn removed(path: &Path, result: std::io::Result<()>) -> Result<(), Error> {
    match result {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(write_error(path, error)),
        _ => Ok(()),
    }
}

pub(super) fn list(dir: &Path) -> Result<Vec<String>, Error> {
    match std::fs::read_dir(dir) {
        Ok(entries) => Ok(entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(Error::Read {
            path: dir.into(),
            source,
        }),
    }
}

/// Mode of records. Only root and the agent's group reach their directories.
const READABLE: u32 = 0o644;
/// Mode of records that are not for the agent.
const PRIVATE: u32 = 0o600;

pub(super) fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), Error> {
    write_json_as_of(path, value, None)
}

/// Replaces a file by `value` as JSON and sets the file's time; `None`: the time stays now.
pub(super) fn write_json_as_of<T: Serialize>(
    path: &Path,
    value: &T,
    time: Option<std::time::SystemTime>,
) -> Result<(), Error> {
    write_json_with(path, value, time, READABLE)
}

/// Replaces a file by `value` as JSON. The agent cannot read it.
pub(super) fn write_private_json<T: Serialize>(path: &Path, value: &T) -> Result<(), Error> {
    write_json_with(path, value, None, PRIVATE)
}

fn write_json_with<T: Serialize>(
    path: &Path,
    value: &T,
    time: Option<std::time::SystemTime>,
    mode: u32,
) -> Result<(), Error> {
    let bytes = serde_json::to_vec(value).map_err(|source| Error::Parse {
        path: path.into(),
        source,
    })?;
    let temporary = temporary_for(path);
    let written = make_new(&temporary)
        .and_then(|mut file| {
            file.set_permissions(Permissions::from_mode(mode))?;
            file.write_all(&bytes)?;
            time.map_or(Ok(()), |time| file.set_modified(time))
        })
        .and_then(|()| std::fs::rename(&temporary, path));
    written.map_err(|source| write_error(path, source))
}

/// Makes a file in a directory in which another user may have put something of this name. A file of
/// a process with the same number, which died while it wrote, is replaced.
fn make_new(path: &Path) -> std::io::Result<File> {
    let make = || {
        let mut options = OpenOptions::new();
        options.create_new(true).write(true).mode(PRIVATE);
        options.open(path)
    };
    match make() {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            std::fs::remove_file(path)?;
            make()
        }
        made => made,
    }
}

/// Makes an empty file.
pub(super) fn make_empty(path: &Path) -> std::io::Result<()> {
    make_new(path).map(drop)
}

/// Returns a name beside `path` that no other write of this or another process uses now.
fn temporary_for(path: &Path) -> PathBuf {
    static WRITES: AtomicU64 = AtomicU64::new(0);
    let write = WRITES.fetch_add(1, Ordering::Relaxed);
    path.with_extension(format!("tmp{}-{write}", std::process::id()))
}

/// Reads a file of JSON; returns none if it does not exist.
pub(super) fn read_if_there<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, Error> {
    match read_json(path) {
        Ok(value) => Ok(Some(value)),
        Err(Error::Missing(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, Error> {
    let mut options = OpenOptions::new();
    // The directory may be the agent's: no link is followed, and no pipe waited for.
    let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
    let file = match options.read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(Error::Missing(path.into()));
        }
        Err(source) => {
            return Err(Error::Read {
                path: path.into(),
                source,
            });
        }
    };
    // Most records are smaller than 4096 bytes, so that one call reads them.
    let mut bytes = Vec::with_capacity(4096);
    file.take(MAX_RECORD)
        .read_to_end(&mut bytes)
        .map_err(|source| Error::Read {
            path: path.into(),
            source,
        })?;
    serde_json::from_slice(&bytes).map_err(|source| Error::Parse {
        path: path.into(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use crate::Session;
    use crate::tests::one_pod;

    #[test]
    fn a_pod_is_removed_even_while_its_records_are_read() {
        let (_dir, records, sandbox) = one_pod();
        for _ in 0..50 {
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    // Until the directory is removed.
                    while records.has_sessions(&sandbox, Session::Probe).is_ok() {}
                });
                records.remove_pod(&sandbox).expect("removed");
                reader.join().expect("looked");
            });
            assert!(!records.pod_dir(&sandbox).exists());
            records.create_pod_dir(&sandbox).expect("made");
        }
    }
}

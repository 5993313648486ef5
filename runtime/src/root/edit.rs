//! Changes below the root: creation, moves and removal of files and directories, as by upstream's
//! sandboxd.

use std::{
    ffi::CStr,
    os::fd::{AsFd as _, BorrowedFd},
};

use rustix::{
    fs::{AtFlags, Dir, Mode},
    io::Errno,
};

use super::{Error, Existing, Root, Upload, Walk, is_directory, rename, stat, tree::READ};
use crate::path;

/// Maximum number of passes over a directory that gets new entries while it is emptied.
const PASSES: usize = 8;

impl Root {
    /// Begins a file with these permissions, and creates missing directories on the way.
    ///
    /// The file replaces any entry except a directory.
    pub fn put(&self, path: &str, mode: u32, existing: Existing) -> Result<Upload, Error> {
        let location = self.walk(path, Walk::Make)?;
        match stat(location.directory.as_fd(), &location.name) {
            Ok(stat) if is_directory(stat.st_mode) => return Err(Error::IsADirectory),
            Ok(_) if existing == Existing::Keep => return Err(Error::Exists),
            Ok(_) | Err(Error::Missing) => {}
            Err(error) => return Err(error),
        }
        self.begin_at(location, Some(Mode::from_raw_mode(mode & 0o777)))
    }

    /// Creates a directory with these permissions, and missing directories on the way.
    ///
    /// An existing directory stays unchanged.
    pub fn make_directory(&self, path: &str, mode: u32) -> Result<(), Error> {
        let location = self.walk(path, Walk::Make)?;
        let mode = Mode::from_raw_mode(mode & 0o777);
        make_one(location.directory.as_fd(), &location.name, mode)
    }

    /// Moves an entry, and creates missing directories on the way to its new path.
    ///
    /// A link itself is moved. An existing directory is replaced only if it is empty, and only by
    /// a directory.
    pub fn rename(&self, from: &str, to: &str, existing: Existing) -> Result<(), Error> {
        let (from, to) = (path::clean(from)?, path::clean(to)?);
        if from.is_empty() {
            return Err(Error::IsRoot);
        }
        // Checked before directories are created in the source.
        if to
            .strip_prefix(&from)
            .is_some_and(|rest| rest.starts_with('/'))
        {
            return Err(Error::IntoItself);
        }
        let source = self
            .walk(&from, Walk::NoFollow)
            .map_err(Error::for_source)?;
        stat(source.directory.as_fd(), &source.name)?;
        let target = self.target(&to, existing)?;
        rename(source.directory.as_fd(), &source.name, &target, existing)
    }

    /// Removes a file, a link or a directory.
    ///
    /// A directory that is not empty is removed only if `recursive`. The root itself stays; only
    /// its content is removed.
    pub fn remove(&self, path: &str, recursive: bool) -> Result<(), Error> {
        let path = path::clean(path)?;
        let location = self.walk(&path, Walk::NoFollow)?;
        let at = location.directory.as_fd();
        match (path.is_empty(), recursive) {
            (true, true) => empty(at, c".", 0),
            (true, false) => Err(Error::NotEmpty),
            (false, true) => remove_all(at, &location.name, 0),
            (false, false) => remove_one(at, &location.name),
        }
    }
}

/// Creates a directory with these permissions, whatever the umask is.
///
/// An existing directory stays unchanged.
pub(super) fn make_one(at: BorrowedFd<'_>, name: &CStr, mode: Mode) -> Result<(), Error> {
    match rustix::fs::mkdirat(at, name, Mode::RWXU) {
        Ok(()) => {
            let directory = rustix::fs::openat(at, name, READ, Mode::empty())?;
            Ok(rustix::fs::fchmod(directory, mode)?)
        }
        Err(Errno::EXIST) => match is_directory(stat(at, name)?.st_mode) {
            true => Ok(()),
            false => Err(Error::FileThere),
        },
        Err(errno) => Err(errno.into()),
    }
}

fn remove_one(at: BorrowedFd<'_>, name: &CStr) -> Result<(), Error> {
    let flags = match is_directory(stat(at, name)?.st_mode) {
        true => AtFlags::REMOVEDIR,
        false => AtFlags::empty(),
    };
    match rustix::fs::unlinkat(at, name, flags) {
        // Some file systems answer EXIST for a directory that is not empty.
        Err(Errno::EXIST) => Err(Error::NotEmpty),
        other => Ok(other?),
    }
}

pub(super) fn remove_all(at: BorrowedFd<'_>, name: &CStr, depth: usize) -> Result<(), Error> {
    if is_directory(stat(at, name)?.st_mode) {
        // Each directory on the way is held open, as in a walk.
        if depth == path::MAX_COMPONENTS {
            return Err(Error::TooDeep);
        }
        empty(at, name, depth + 1)?;
    }
    remove_one(at, name)
}

/// Removes the entries of a directory.
///
/// A directory that gets entries faster than they are removed is not emptied.
fn empty(at: BorrowedFd<'_>, name: &CStr, depth: usize) -> Result<(), Error> {
    let directory = rustix::fs::openat(at, name, READ, Mode::empty())?;
    for _ in 0..PASSES {
        let mut removed = false;
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            if matches!(entry.file_name().to_bytes(), b"." | b"..") {
                continue;
            }
            match remove_all(directory.as_fd(), entry.file_name(), depth) {
                Ok(()) => removed = true,
                // Another process has removed the entry.
                Err(Error::Missing) => {}
                Err(error) => return Err(error),
            }
        }
        if !removed {
            break;
        }
    }
    Ok(())
}

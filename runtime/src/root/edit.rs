//! Changes below the root that upstream's sandboxd makes: files and directories with those they
//! need, moves and removal.

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

/// How often a directory is read anew because something came into it while it was emptied.
const PASSES: usize = 8;

impl Root {
    /// Begins a file with these permissions, and makes the directories that it needs. It takes the place of anything but a directory.
    pub fn put(&self, path: &str, mode: u32, existing: Existing) -> Result<Upload, Error> {
        let place = self.walk(path, Walk::Make)?;
        match stat(place.directory.as_fd(), &place.name) {
            Ok(stat) if is_directory(stat.st_mode) => return Err(Error::IsADirectory),
            Ok(_) if existing == Existing::Keep => return Err(Error::Exists),
            Ok(_) | Err(Error::Missing) => {}
            Err(error) => return Err(error),
        }
        self.begin_at(place, Some(Mode::from_raw_mode(mode & 0o777)))
    }

    /// Makes a directory with these permissions, and those on the way. One that is there stays as
    /// it is.
    pub fn make_directory(&self, path: &str, mode: u32) -> Result<(), Error> {
        let place = self.walk(path, Walk::Make)?;
        let mode = Mode::from_raw_mode(mode & 0o777);
        make_one(place.directory.as_fd(), &place.name, mode)
    }

    /// Moves what has this name, were it a link, and makes the directories that its new place
    /// needs. Of directories an empty one alone is replaced, and by a directory alone.
    pub fn rename(&self, from: &str, to: &str, existing: Existing) -> Result<(), Error> {
        let (from, to) = (path::clean(from)?, path::clean(to)?);
        if from.is_empty() {
            return Err(Error::IsRoot);
        }
        // Before directories are made in it.
        if to
            .strip_prefix(&from)
            .is_some_and(|rest| rest.starts_with('/'))
        {
            return Err(Error::IntoItself);
        }
        let source = self.walk(&from, Walk::NoFollow).map_err(Error::of_source)?;
        stat(source.directory.as_fd(), &source.name)?;
        let target = self.free(&to, existing)?;
        rename(source.directory.as_fd(), &source.name, &target, existing)
    }

    /// Removes a file, a link, or a directory: an empty one, or with all that is in it. Of the root only the content is removed.
    pub fn remove(&self, path: &str, recursive: bool) -> Result<(), Error> {
        let path = path::clean(path)?;
        let place = self.walk(&path, Walk::NoFollow)?;
        let at = place.directory.as_fd();
        match (path.is_empty(), recursive) {
            (true, true) => empty(at, c".", 0),
            (true, false) => Err(Error::NotEmpty),
            (false, true) => remove_all(at, &place.name, 0),
            (false, false) => remove_one(at, &place.name),
        }
    }
}

/// Makes a directory with these permissions, whatever the umask is. One that is there stays as it is.
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
        // What some file systems answer.
        Err(Errno::EXIST) => Err(Error::NotEmpty),
        other => Ok(other?),
    }
}

pub(super) fn remove_all(at: BorrowedFd<'_>, name: &CStr, depth: usize) -> Result<(), Error> {
    if is_directory(stat(at, name)?.st_mode) {
        // Every directory on the way is held open, as in a walk.
        if depth == path::MAX_COMPONENTS {
            return Err(Error::TooDeep);
        }
        empty(at, name, depth + 1)?;
    }
    remove_one(at, name)
}

/// Removes what is in a directory. A directory that is filled faster than it is emptied stays.
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
                // Somebody else removed it.
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

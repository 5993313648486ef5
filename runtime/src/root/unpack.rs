//! Creation of an archive's entries: files, directories and links below one directory.
//!
//! No link is followed, neither one of the archive nor one that existed before.

use std::{
    ffi::{CStr, CString},
    io::Read,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use rustix::{
    fs::{AtFlags, Mode},
    io::Errno,
};

use super::{
    DIRECTORY, Error, Location, NEW_DIRECTORY, Root, budget::Budget, edit::make_one, is_directory,
    regular, stat,
};

/// Target directory of an archive.
#[derive(Debug)]
pub struct Unpacking<'a> {
    root: &'a Root,
    directory: OwnedFd,
    pub budget: Budget,
}

impl Root {
    /// Begins to unpack into a directory, which is created if it is missing.
    pub fn unpack(&self, path: &str, budget: Budget) -> Result<Unpacking<'_>, Error> {
        self.make_directory(path, NEW_DIRECTORY.as_raw_mode())?;
        Ok(Unpacking {
            root: self,
            directory: self.directory(path)?,
            budget,
        })
    }
}

impl Unpacking<'_> {
    /// Creates a directory. An existing one stays unchanged.
    pub fn directory(&mut self, names: &[CString], mode: u32) -> Result<(), Error> {
        let Some(location) = self.location(names)? else {
            return Ok(());
        };
        // The owner needs all permissions for the entries below.
        let mode = Mode::from_raw_mode(mode & 0o777) | Mode::RWXU;
        make_one(location.directory.as_fd(), &location.name, mode)
    }

    /// Creates a file, which appears when it is complete. It replaces any entry except a directory.
    pub fn file(
        &mut self,
        names: &[CString],
        mode: u32,
        size: u64,
        content: &mut dyn Read,
    ) -> Result<(), Error> {
        let location = self.target(names)?;
        let mode = Mode::from_raw_mode(mode & 0o777);
        let upload = self.root.begin_at(location, Some(mode))?;
        let copied = self.budget.copy(content, &mut &upload.file)?;
        if copied != size {
            return Err(Error::BrokenOff);
        }
        upload.finish()
    }

    /// Creates a link without a check of its target. It replaces any entry except a directory.
    pub fn link(&mut self, names: &[CString], target: &CStr) -> Result<(), Error> {
        let location = self.target(names)?;
        let at = location.directory.as_fd();
        remove(at, &location.name)?;
        Ok(rustix::fs::symlinkat(target, at, &location.name)?)
    }

    /// Creates a hard link to a file below the archive's directory.
    pub fn hard_link(&mut self, names: &[CString], target: &[CString]) -> Result<(), Error> {
        let source = self.location(target)?.ok_or(Error::NotAFile)?;
        regular(&stat(source.directory.as_fd(), &source.name)?)?;
        let location = self.target(names)?;
        if names == target {
            return Ok(());
        }
        remove(location.directory.as_fd(), &location.name)?;
        // Without AT_SYMLINK_FOLLOW: a target that has become a link is not followed.
        Ok(rustix::fs::linkat(
            &source.directory,
            &source.name,
            &location.directory,
            &location.name,
            AtFlags::empty(),
        )?)
    }

    /// Returns the location of a new entry, at which no directory must be.
    fn target(&mut self, names: &[CString]) -> Result<Location, Error> {
        let location = self.location(names)?.ok_or(Error::IsADirectory)?;
        match self.kind(&location)? {
            Some(mode) if is_directory(mode) => Err(Error::IsADirectory),
            _ => Ok(location),
        }
    }

    fn kind(&self, location: &Location) -> Result<Option<u32>, Error> {
        match stat(location.directory.as_fd(), &location.name) {
            Ok(stat) => Ok(Some(stat.st_mode)),
            Err(Error::Missing) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the location of a path; `None` for the directory itself.
    ///
    /// Missing directories on the way are created, and count as entries.
    fn location(&mut self, names: &[CString]) -> Result<Option<Location>, Error> {
        let Some((last, above)) = names.split_last() else {
            return Ok(None);
        };
        let clone = self.directory.try_clone();
        let mut here = clone.map_err(|_| Error::Io(Errno::MFILE))?;
        for name in above {
            let opened = match rustix::fs::openat(&here, name, DIRECTORY, Mode::empty()) {
                Err(Errno::NOENT) => {
                    self.budget.entry()?;
                    match rustix::fs::mkdirat(&here, name, NEW_DIRECTORY) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(errno) => return Err(errno.into()),
                    }
                    rustix::fs::openat(&here, name, DIRECTORY, Mode::empty())
                }
                other => other,
            };
            here = opened?;
        }
        Ok(Some(Location {
            directory: here,
            name: last.clone(),
        }))
    }
}

fn remove(at: BorrowedFd<'_>, name: &CStr) -> Result<(), Error> {
    match rustix::fs::unlinkat(at, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

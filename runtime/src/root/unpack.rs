//! What an archive's entries become: files, directories and links below one directory. Nothing is
//! reached through a link, be it the archive's own or one that was there.

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
    DIRECTORY, Error, NEW_DIRECTORY, Place, Root, budget::Budget, edit::make_one, is_directory,
    regular, stat,
};

/// A directory that an archive goes into.
#[derive(Debug)]
pub struct Unpacking<'a> {
    root: &'a Root,
    directory: OwnedFd,
    pub budget: Budget,
}

impl Root {
    /// Begins to unpack into a directory, which is made if it is missing.
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
    /// Makes a directory. One that is there stays as it is.
    pub fn directory(&mut self, names: &[CString], mode: u32) -> Result<(), Error> {
        let Some(place) = self.place(names)? else {
            return Ok(());
        };
        // Its owner puts more into it.
        let mode = Mode::from_raw_mode(mode & 0o777) | Mode::RWXU;
        make_one(place.directory.as_fd(), &place.name, mode)
    }

    /// Makes a file, in place of anything but a directory. It appears when all of it has come.
    pub fn file(
        &mut self,
        names: &[CString],
        mode: u32,
        size: u64,
        content: &mut dyn Read,
    ) -> Result<(), Error> {
        let place = self.free(names)?;
        let mode = Mode::from_raw_mode(mode & 0o777);
        let upload = self.root.begin_at(place, Some(mode))?;
        let copied = self.budget.copy(content, &mut &upload.file)?;
        if copied != size {
            return Err(Error::BrokenOff);
        }
        upload.finish()
    }

    /// Makes a link, in place of anything but a directory. Where it leads is not looked at.
    pub fn link(&mut self, names: &[CString], target: &CStr) -> Result<(), Error> {
        let place = self.free(names)?;
        let at = place.directory.as_fd();
        remove(at, &place.name)?;
        Ok(rustix::fs::symlinkat(target, at, &place.name)?)
    }

    /// Gives a file of the archive's directory another name.
    pub fn hard_link(&mut self, names: &[CString], target: &[CString]) -> Result<(), Error> {
        let source = self.place(target)?.ok_or(Error::NotAFile)?;
        regular(&stat(source.directory.as_fd(), &source.name)?)?;
        let place = self.free(names)?;
        if names == target {
            return Ok(());
        }
        remove(place.directory.as_fd(), &place.name)?;
        // The name itself is linked, should it have become a link.
        Ok(rustix::fs::linkat(
            &source.directory,
            &source.name,
            &place.directory,
            &place.name,
            AtFlags::empty(),
        )?)
    }

    /// Where something is to be put that replaces no directory.
    fn free(&mut self, names: &[CString]) -> Result<Place, Error> {
        let place = self.place(names)?.ok_or(Error::IsADirectory)?;
        match self.kind(&place)? {
            Some(mode) if is_directory(mode) => Err(Error::IsADirectory),
            _ => Ok(place),
        }
    }

    fn kind(&self, place: &Place) -> Result<Option<u32>, Error> {
        match stat(place.directory.as_fd(), &place.name) {
            Ok(stat) => Ok(Some(stat.st_mode)),
            Err(Error::Missing) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The place of a name; none for the directory itself. Directories on the way are made, and count
    /// as entries.
    fn place(&mut self, names: &[CString]) -> Result<Option<Place>, Error> {
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
        Ok(Some(Place {
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

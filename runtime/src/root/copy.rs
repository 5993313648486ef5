//! Copies of files and directories.

use std::{
    ffi::{CStr, CString},
    fs::File,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};

use super::{
    Error, Existing, Location, Root, Walk,
    budget::Budget,
    edit::remove_all,
    is_directory, open_file, rename, stat,
    tree::{READ, names},
};
use crate::path;

impl Root {
    /// Copies the file or directory at `from` to `to` atomically.
    ///
    /// Missing directories on the way to `to` are created. Links in a directory are copied and not
    /// followed. Permission bits are copied, without set-user-ID, set-group-ID and sticky bit. An
    /// existing directory is replaced only if it is empty.
    pub fn copy(
        &self,
        from: &str,
        to: &str,
        existing: Existing,
        budget: &mut Budget,
    ) -> Result<(), Error> {
        let source = self.resolve(from).map_err(Error::for_source)?;
        let (at, name) = (source.directory.as_fd(), source.name.as_c_str());
        let kind = stat(at, name).map_err(Error::for_source)?;
        match FileType::from_raw_mode(kind.st_mode) {
            FileType::RegularFile | FileType::Directory => {}
            _ => return Err(Error::Special),
        }
        let target = self.target(to, existing)?;
        if is_directory(kind.st_mode) {
            let source = rustix::fs::openat(at, name, READ, Mode::empty())?;
            let mut staged = self.stage(target)?;
            let copying = Copying {
                staged: identity(&rustix::fs::fstat(&staged.directory)?),
            };
            let at = staged.directory.as_fd();
            staged.made = copying.directory(source.as_fd(), at, budget, 0)?;
            staged.finish(permissions(&kind), existing)
        } else {
            let upload = self.begin_at(target, Some(permissions(&kind)))?;
            let (mut source, _) = open_file(at, name)?;
            budget.copy(&mut source, &mut &upload.file)?;
            upload.finish_as(existing)
        }
    }

    /// Returns the target location, which must not be the root, nor exist for [`Existing::Keep`].
    pub(super) fn target(&self, to: &str, existing: Existing) -> Result<Location, Error> {
        let to = path::clean(to)?;
        if to.is_empty() {
            return Err(Error::IsRoot);
        }
        let target = self.walk(&to, Walk::MakeNoFollow)?;
        match stat(target.directory.as_fd(), &target.name) {
            Ok(_) if existing == Existing::Keep => Err(Error::Exists),
            Ok(_) | Err(Error::Missing) => Ok(target),
            Err(error) => Err(error),
        }
    }

    /// Creates a temporary directory beside its target location.
    fn stage(&self, location: Location) -> Result<Staged, Error> {
        let at = location.directory.as_fd();
        let (temporary, directory) = self.create_temporary(|name| {
            rustix::fs::mkdirat(at, name, Mode::RWXU)?;
            rustix::fs::openat(at, name, READ, Mode::empty()).inspect_err(|_| {
                // The error of the open is returned.
                let _ = rustix::fs::unlinkat(at, name, AtFlags::REMOVEDIR);
            })
        })?;
        Ok(Staged {
            location,
            directory,
            temporary: Some(temporary),
            made: Vec::new(),
        })
    }
}

/// Directory that is being filled under a temporary name.
///
/// [`Staged::finish`] moves it to its location; dropping it before removes the directory.
struct Staged {
    location: Location,
    directory: OwnedFd,
    temporary: Option<CString>,
    made: Vec<CopiedDirectory>,
}

/// Directory within a copy.
///
/// Until the copy is complete the directory is writable for its owner, so that its entries can be
/// removed again.
struct CopiedDirectory {
    name: CString,
    /// Permissions that the directory gets at the end.
    permissions: Mode,
    below: Vec<CopiedDirectory>,
}

impl Staged {
    fn finish(mut self, permissions: Mode, existing: Existing) -> Result<(), Error> {
        if let Some(temporary) = &self.temporary {
            permit(self.directory.as_fd(), &self.made)?;
            rustix::fs::fchmod(&self.directory, permissions)?;
            let at = self.location.directory.as_fd();
            rename(at, temporary, &self.location, existing)?;
        }
        self.temporary = None;
        Ok(())
    }

    fn remove(&self, temporary: &CStr) -> Result<(), Error> {
        rustix::fs::fchmod(&self.directory, Mode::RWXU)?;
        make_writable(self.directory.as_fd(), &self.made)?;
        remove_all(self.location.directory.as_fd(), temporary, 0)
    }
}

/// Sets the final permissions of directories, the deepest first.
fn permit(at: BorrowedFd<'_>, made: &[CopiedDirectory]) -> Result<(), Error> {
    for one in made {
        let directory = rustix::fs::openat(at, &one.name, READ, Mode::empty())?;
        permit(directory.as_fd(), &one.below)?;
        rustix::fs::fchmod(&directory, one.permissions)?;
    }
    Ok(())
}

/// Makes directories writable for their owner again, for a removal.
fn make_writable(at: BorrowedFd<'_>, made: &[CopiedDirectory]) -> Result<(), Error> {
    for one in made {
        let directory = rustix::fs::openat(at, &one.name, READ, Mode::empty())?;
        rustix::fs::fchmod(&directory, Mode::RWXU)?;
        make_writable(directory.as_fd(), &one.below)?;
    }
    Ok(())
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary
            && let Err(error) = self.remove(temporary)
        {
            tracing::warn!(%error, "cannot remove an incomplete copy");
        }
    }
}

/// Copy of a directory.
struct Copying {
    /// Device and inode of the target, to detect a copy into itself.
    staged: (u64, u64),
}

impl Copying {
    /// Copies the entries of a directory, and returns the directories that it created.
    fn directory(
        &self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        budget: &mut Budget,
        depth: usize,
    ) -> Result<Vec<CopiedDirectory>, Error> {
        let mut made = Vec::new();
        for name in names(from, budget)? {
            let kind = match stat(from, &name) {
                // The entry has been removed meanwhile.
                Err(Error::Missing) => continue,
                kind => kind?,
            };
            match FileType::from_raw_mode(kind.st_mode) {
                FileType::RegularFile => file(from, to, &name, budget)?,
                FileType::Symlink => {
                    let target = rustix::fs::readlinkat(from, &name, Vec::new())?;
                    rustix::fs::symlinkat(target, to, &name)?;
                }
                FileType::Directory if identity(&kind) == self.staged => {
                    return Err(Error::IntoItself);
                }
                FileType::Directory => {
                    // Checked before the creation: a deeper directory could not be removed again.
                    Budget::depth(depth + 1)?;
                    let source = rustix::fs::openat(from, &name, READ, Mode::empty())?;
                    rustix::fs::mkdirat(to, &name, Mode::RWXU)?;
                    let target = rustix::fs::openat(to, &name, READ, Mode::empty())?;
                    let below =
                        self.directory(source.as_fd(), target.as_fd(), budget, depth + 1)?;
                    made.push(CopiedDirectory {
                        name,
                        permissions: permissions(&kind),
                        below,
                    });
                }
                _ => return Err(Error::Special),
            }
        }
        Ok(made)
    }
}

fn file(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    name: &CStr,
    budget: &mut Budget,
) -> Result<(), Error> {
    let (mut source, kind) = open_file(from, name)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let target = rustix::fs::openat(to, name, flags, Mode::RUSR | Mode::WUSR)?;
    let target = File::from(target);
    budget.copy(&mut source, &mut &target)?;
    Ok(rustix::fs::fchmod(&target, permissions(&kind))?)
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

fn permissions(stat: &Stat) -> Mode {
    Mode::from_raw_mode(stat.st_mode & 0o777)
}

//! Copies, of a file or of a directory with all that is in it.

use std::{
    ffi::{CStr, CString},
    fs::File,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};

use super::{
    Error, Existing, Place, Root, Walk,
    budget::Budget,
    edit::remove_all,
    is_directory, open_file, rename, stat,
    tree::{READ, names},
};
use crate::path;

impl Root {
    /// Copies what `from` leads to, to `to`, where it appears whole or not at all; directories on
    /// the way there are made. Links in a directory are copied, and not followed. Permission bits
    /// go along, set-user-ID and the like do not. Of directories an empty one alone is replaced.
    pub fn copy(
        &self,
        from: &str,
        to: &str,
        existing: Existing,
        budget: &mut Budget,
    ) -> Result<(), Error> {
        let source = self.resolve(from).map_err(Error::of_source)?;
        let (at, name) = (source.directory.as_fd(), source.name.as_c_str());
        let kind = stat(at, name).map_err(Error::of_source)?;
        match FileType::from_raw_mode(kind.st_mode) {
            FileType::RegularFile | FileType::Directory => {}
            _ => return Err(Error::Special),
        }
        let target = self.free(to, existing)?;
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

    /// Where something is to be put: not the root, and not taken if what is there is to be kept.
    pub(super) fn free(&self, to: &str, existing: Existing) -> Result<Place, Error> {
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

    /// A new directory beside its place.
    fn stage(&self, place: Place) -> Result<Staged, Error> {
        let at = place.directory.as_fd();
        let (temporary, directory) = self.unfinished(|name| {
            rustix::fs::mkdirat(at, name, Mode::RWXU)?;
            rustix::fs::openat(at, name, READ, Mode::empty()).inspect_err(|_| {
                // The first error is the one that is told.
                let _ = rustix::fs::unlinkat(at, name, AtFlags::REMOVEDIR);
            })
        })?;
        Ok(Staged {
            place,
            directory,
            temporary: Some(temporary),
            made: Vec::new(),
        })
    }
}

/// A directory that is being filled. It takes its place by [`Staged::finish`], or leaves nothing.
struct Staged {
    place: Place,
    directory: OwnedFd,
    temporary: Option<CString>,
    made: Vec<Made>,
}

/// A directory within a copy. It is its owner's alone until the copy is whole: what it holds could
/// not be removed again from one without the right to write.
struct Made {
    name: CString,
    /// What it is to have.
    permissions: Mode,
    below: Vec<Made>,
}

impl Staged {
    fn finish(mut self, permissions: Mode, existing: Existing) -> Result<(), Error> {
        if let Some(temporary) = &self.temporary {
            permit(self.directory.as_fd(), &self.made)?;
            rustix::fs::fchmod(&self.directory, permissions)?;
            let at = self.place.directory.as_fd();
            rename(at, temporary, &self.place, existing)?;
        }
        self.temporary = None;
        Ok(())
    }

    fn remove(&self, temporary: &CStr) -> Result<(), Error> {
        rustix::fs::fchmod(&self.directory, Mode::RWXU)?;
        restrict(self.directory.as_fd(), &self.made)?;
        remove_all(self.place.directory.as_fd(), temporary, 0)
    }
}

/// Gives directories their permissions, the deepest first.
fn permit(at: BorrowedFd<'_>, made: &[Made]) -> Result<(), Error> {
    for one in made {
        let directory = rustix::fs::openat(at, &one.name, READ, Mode::empty())?;
        permit(directory.as_fd(), &one.below)?;
        rustix::fs::fchmod(&directory, one.permissions)?;
    }
    Ok(())
}

/// Takes them back, for the removal.
fn restrict(at: BorrowedFd<'_>, made: &[Made]) -> Result<(), Error> {
    for one in made {
        let directory = rustix::fs::openat(at, &one.name, READ, Mode::empty())?;
        rustix::fs::fchmod(&directory, Mode::RWXU)?;
        restrict(directory.as_fd(), &one.below)?;
    }
    Ok(())
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary
            && let Err(error) = self.remove(temporary)
        {
            tracing::warn!(%error, "a copy that did not end is left behind");
        }
    }
}

/// A copy of a directory under way.
struct Copying {
    /// What it goes into.
    staged: (u64, u64),
}

impl Copying {
    /// Fills a directory, and answers which directories it has got.
    fn directory(
        &self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        budget: &mut Budget,
        depth: usize,
    ) -> Result<Vec<Made>, Error> {
        let mut made = Vec::new();
        for name in names(from, budget)? {
            let kind = match stat(from, &name) {
                // It went away meanwhile.
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
                    // Before it is made: what is deeper could not be removed again.
                    Budget::depth(depth + 1)?;
                    let source = rustix::fs::openat(from, &name, READ, Mode::empty())?;
                    rustix::fs::mkdirat(to, &name, Mode::RWXU)?;
                    let target = rustix::fs::openat(to, &name, READ, Mode::empty())?;
                    let below =
                        self.directory(source.as_fd(), target.as_fd(), budget, depth + 1)?;
                    made.push(Made {
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

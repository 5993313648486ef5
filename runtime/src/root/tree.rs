//! Listing of a directory with all entries below it.

use std::os::fd::{AsFd as _, BorrowedFd};

use rustix::{
    ffi::CString,
    fs::{Dir, Mode, OFlags},
};

use super::{Entry, Error, Root, budget::Budget};

/// Maximum size of all names of a listing in bytes: a name may be as long as a path.
const MAX_NAMES: u64 = 32 << 20;

impl Root {
    /// Returns all entries below a directory, with names relative to it (`sub/file`), sorted.
    ///
    /// A link is described by its target, and not followed.
    pub fn tree(&self, path: &str, budget: &mut Budget) -> Result<Vec<Entry>, Error> {
        let location = self.resolve(path)?;
        let mut tree = Tree {
            root: self,
            budget,
            names: MAX_NAMES,
            entries: Vec::new(),
        };
        let (at, name) = (location.directory.as_fd(), location.name.as_c_str());
        let directory = rustix::fs::openat(at, name, READ, Mode::empty())?;
        tree.descend(directory.as_fd(), path, "", 0)?;
        let mut entries = tree.entries;
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }
}

/// Flags to open a directory for reading, without following a link.
pub(super) const READ: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Returns the names in a directory.
///
/// No iterator stays open, because the descriptors of all directories above are open.
pub(super) fn names(at: BorrowedFd<'_>, budget: &mut Budget) -> Result<Vec<CString>, Error> {
    let mut names = Vec::new();
    for entry in Dir::read_from(at)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            budget.entry()?;
            names.push(entry.file_name().to_owned());
        }
    }
    Ok(names)
}

struct Tree<'a> {
    root: &'a Root,
    budget: &'a mut Budget,
    names: u64,
    entries: Vec<Entry>,
}

impl Tree<'_> {
    /// Adds the entries of a directory, recursively.
    ///
    /// `path` is the directory relative to the root, to resolve links; `from` is relative to the
    /// listed directory.
    fn descend(
        &mut self,
        at: BorrowedFd<'_>,
        path: &str,
        from: &str,
        depth: usize,
    ) -> Result<(), Error> {
        Budget::depth(depth)?;
        for name in names(at, self.budget)? {
            // The resolution of a link may take long.
            self.budget.check_cancelled()?;
            let mut entry = match self.root.examine(at, path, &name) {
                // The entry has been removed meanwhile.
                Err(Error::Missing) => continue,
                examined => examined?,
            };
            let path = format!("{path}/{}", entry.name);
            if !from.is_empty() {
                entry.name = format!("{from}/{}", entry.name);
            }
            let left = self.names.checked_sub(entry.name.len() as u64);
            self.names = left.ok_or(Error::TooMany)?;
            let (from, is_directory) = (entry.name.clone(), entry.is_directory);
            self.entries.push(entry);
            if is_directory {
                match rustix::fs::openat(at, &name, READ, Mode::empty()).map_err(Error::from) {
                    Ok(directory) => self.descend(directory.as_fd(), &path, &from, depth + 1)?,
                    // A link to a directory, or an entry that has changed meanwhile.
                    Err(Error::NotADirectory | Error::Missing) => {}
                    Err(Error::Io(rustix::io::Errno::LOOP)) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

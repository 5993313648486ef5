//! The root directory of clients, and the resolution of paths below it.
//!
//! A path is walked component by component on open directory descriptors. This walk reads and
//! follows links, never the kernel. `..` goes back to the descriptor of the directory above, so
//! that a concurrent rename cannot lead out of the root. `openat2` with `RESOLVE_BENEATH` would do
//! the same in one call, but gVisor, where this runs, answers it with ENOSYS.

use std::{
    ffi::{CStr, CString},
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, Stat},
    io::Errno,
};

use crate::path::{self, Component};
use tree::READ;

/// Maximum number of links in the resolution of a path, as in the kernel.
const MAX_LINKS: u32 = 40;
/// Maximum number of entries of a listing.
pub const MAX_ENTRIES: usize = 100_000;
/// Maximum number of temporary names that are tried.
const MAX_TEMPORARY_NAMES: u32 = 1000;
/// Permissions of directories that are created for a file, as in upstream.
const NEW_DIRECTORY: Mode = Mode::from_bits_retain(0o755);
const DIRECTORY: OFlags = OFlags::PATH
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Failure to resolve a path, or to use the file at it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The path leads out of the root.
    #[error("access denied")]
    Denied,
    #[error("no such file or directory")]
    Missing,
    #[error("not a regular file")]
    NotAFile,
    #[error("not a directory")]
    NotADirectory,
    #[error("is a directory")]
    IsADirectory,
    #[error("directory not empty")]
    NotEmpty,
    #[error("the path exists already")]
    Exists,
    /// A file or link is in place of the directory to create.
    #[error("a file or link exists at the path")]
    FileThere,
    /// The operation is not possible on the root itself.
    #[error("the path is the root")]
    IsRoot,
    #[error("a directory cannot be put into itself")]
    IntoItself,
    #[error("the path is on another file system")]
    OtherFileSystem,
    #[error("neither a file, nor a directory, nor a link")]
    Special,
    #[error("more than {0} bytes")]
    TooLarge(u64),
    /// The data to write is shorter than its size.
    #[error("the content is incomplete")]
    BrokenOff,
    #[error("more than {MAX_ENTRIES} entries")]
    TooMany,
    #[error("more than {} directories deep", path::MAX_COMPONENTS)]
    TooDeep,
    /// The path of an entry of a listing is too long to resolve.
    #[error("the path of a link is too long to follow it")]
    LinkTooDeep,
    #[error("{}", io::Error::from(*.0))]
    Io(Errno),
}

impl Error {
    /// Returns the error for a path that is read: a path below a file does not exist.
    #[must_use]
    pub fn for_source(self) -> Self {
        match self {
            Self::NotADirectory => Self::Missing,
            other => other,
        }
    }
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::NOENT => Self::Missing,
            Errno::NOTDIR => Self::NotADirectory,
            Errno::NOTEMPTY => Self::NotEmpty,
            Errno::EXIST => Self::Exists,
            Errno::XDEV => Self::OtherFileSystem,
            other => Self::Io(other),
        }
    }
}

impl From<path::Error> for Error {
    fn from(error: path::Error) -> Self {
        match error {
            path::Error::Escape | path::Error::Nul => Self::Denied,
            path::Error::Long => Self::Io(Errno::NAMETOOLONG),
        }
    }
}

/// Entry of a listing.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub name: String,
    pub size: u64,
    pub is_directory: bool,
    /// Time of the last change, in seconds since 1970.
    pub mod_time: f64,
    /// Permission bits.
    pub mode: u32,
    /// The entry is a link to nothing or out of the root; the other fields then describe the link.
    pub dangling: bool,
}

impl Entry {
    fn new(name: String, stat: &Stat, dangling: bool) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "a time as upstream writes it")]
        let mod_time = stat.st_mtime as f64 + stat.st_mtime_nsec as f64 / 1e9;
        Self {
            name,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            is_directory: is_directory(stat.st_mode),
            mod_time,
            mode: stat.st_mode & 0o777,
            dangling,
        }
    }
}

/// Root directory of clients.
#[derive(Debug)]
pub struct Root {
    directory: OwnedFd,
    path: PathBuf,
    uploads: AtomicU64,
}

/// Treatment of an existing entry at the target path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    Replace,
    Keep,
}

/// Mode of the resolution of a path.
#[derive(Clone, Copy)]
enum Walk {
    /// Follow a link at the end.
    Follow,
    /// Follow a link at the end, and create missing directories on the way.
    Make,
    /// Do not follow a link at the end.
    NoFollow,
    /// Do not follow a link at the end, and create missing directories on the way.
    MakeNoFollow,
}

impl Walk {
    fn makes(self) -> bool {
        matches!(self, Self::Make | Self::MakeNoFollow)
    }

    fn follows(self) -> bool {
        matches!(self, Self::Follow | Self::Make)
    }
}

/// Directory at or below the root and a name in it; `.` is the directory itself.
struct Location {
    directory: OwnedFd,
    name: CString,
}

impl Root {
    /// Opens the directory, which must exist.
    pub fn open(path: &Path) -> io::Result<Self> {
        let path = path.canonicalize()?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(&path, flags, Mode::empty())?;
        Ok(Self {
            directory,
            path,
            uploads: AtomicU64::new(0),
        })
    }

    /// Returns the absolute path of the root.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a regular file for reading; returns the file and its size in bytes.
    pub fn read(&self, path: &str) -> Result<(File, u64), Error> {
        let location = self.resolve(path)?;
        // The type is checked before: opening a device may have side effects.
        regular(&stat(location.directory.as_fd(), &location.name)?)?;
        let (file, stat) = open_file(location.directory.as_fd(), &location.name)?;
        Ok((file, u64::try_from(stat.st_size).unwrap_or(0)))
    }

    /// Reports whether a path exists. A link to nothing does not exist.
    pub fn exists(&self, path: &str) -> Result<bool, Error> {
        match self
            .resolve(path)
            .and_then(|location| stat(location.directory.as_fd(), &location.name))
        {
            Ok(_) => Ok(true),
            Err(Error::Denied) => Err(Error::Denied),
            Err(_) => Ok(false),
        }
    }

    /// Returns the entries of a directory, sorted by name.
    pub fn list(&self, path: &str) -> Result<Vec<Entry>, Error> {
        let location = self.resolve(path)?;
        let directory =
            rustix::fs::openat(&location.directory, &location.name, READ, Mode::empty())?;
        let mut entries = Vec::new();
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            if entries.len() == MAX_ENTRIES {
                return Err(Error::TooMany);
            }
            match self.examine(directory.as_fd(), path, name) {
                Ok(entry) => entries.push(entry),
                // The entry has been removed meanwhile.
                Err(Error::Missing) => {}
                Err(error) => return Err(error),
            }
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Returns the entry at a path, under the path's last name.
    pub fn stat(&self, path: &str) -> Result<Entry, Error> {
        let location = self.resolve(path)?;
        let stat = stat(location.directory.as_fd(), &location.name)?;
        let clean = path::clean(path)?;
        let name = match clean.rsplit('/').next() {
            None | Some("") => "/",
            Some(name) => name,
        };
        Ok(Entry::new(name.to_owned(), &stat, false))
    }

    fn examine(&self, at: BorrowedFd<'_>, parent: &str, name: &CStr) -> Result<Entry, Error> {
        let own = stat(at, name)?;
        let is_link = FileType::from_raw_mode(own.st_mode) == FileType::Symlink;
        let target = match name.to_str() {
            // A link is described by its target, unless the target is missing or outside.
            Ok(name) if is_link => {
                let path = format!("{parent}/{name}");
                if path::components(&path) == Err(path::Error::Long) {
                    return Err(Error::LinkTooDeep);
                }
                self.resolve(&path)
                    .and_then(|location| stat(location.directory.as_fd(), &location.name))
                    .ok()
            }
            _ => None,
        };
        let dangling = is_link && target.is_none();
        let stat = target.unwrap_or(own);
        let name = name.to_string_lossy().into_owned();
        Ok(Entry::new(name, &stat, dangling))
    }

    /// Opens a directory as a working directory or for a watch.
    pub fn directory(&self, path: &str) -> Result<OwnedFd, Error> {
        let location = self.resolve(path)?;
        let opened = rustix::fs::openat(
            &location.directory,
            &location.name,
            DIRECTORY,
            Mode::empty(),
        );
        Ok(opened?)
    }

    /// Opens a directory, unless the path's last name is a link.
    pub fn directory_itself(&self, path: &str) -> Result<OwnedFd, Error> {
        let location = self.walk(path, Walk::NoFollow)?;
        let opened = rustix::fs::openat(
            &location.directory,
            &location.name,
            DIRECTORY,
            Mode::empty(),
        );
        Ok(opened?)
    }

    /// Begins a file that replaces the one at `path` when it is complete.
    ///
    /// The new file gets the permissions of a file that it replaces.
    pub fn begin(&self, path: &str) -> Result<Upload, Error> {
        let location = self.resolve(path)?;
        let mode = match stat(location.directory.as_fd(), &location.name) {
            Ok(stat) => {
                regular(&stat)?;
                // Without set-user-ID: the owner of the new file is this process' user.
                Some(Mode::from_raw_mode(stat.st_mode & 0o777))
            }
            Err(Error::Missing) => None,
            Err(error) => return Err(error),
        };
        self.begin_at(location, mode)
    }

    fn begin_at(&self, location: Location, mode: Option<Mode>) -> Result<Upload, Error> {
        let (temporary, file) = self.temporary(location.directory.as_fd())?;
        let upload = Upload {
            location,
            temporary: Some(temporary),
            file: File::from(file),
        };
        // A script that is rewritten stays executable, as in upstream.
        if let Some(mode) = mode {
            rustix::fs::fchmod(&upload.file, mode)?;
        }
        Ok(upload)
    }

    fn temporary(&self, at: BorrowedFd<'_>) -> Result<(CString, OwnedFd), Error> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let wanted = Mode::from_raw_mode(0o666);
        self.create_temporary(|name| rustix::fs::openat(at, name, flags, wanted))
    }

    /// Creates a file or directory under a temporary name.
    ///
    /// An earlier process with the same id may have left files of such names, as the first process
    /// of a container that was restarted.
    fn create_temporary<T>(
        &self,
        make: impl Fn(&CStr) -> Result<T, Errno>,
    ) -> Result<(CString, T), Error> {
        let mut result = Err(Error::Io(Errno::EXIST));
        for _ in 0..MAX_TEMPORARY_NAMES {
            let number = self.uploads.fetch_add(1, Ordering::Relaxed);
            let name = format!(".torpor-upload-{}-{number}", std::process::id());
            let name = CString::new(name).map_err(|_| Error::Denied)?;
            result = match make(&name) {
                Err(Errno::EXIST) => continue,
                Ok(made) => Ok((name, made)),
                Err(errno) => Err(errno.into()),
            };
            break;
        }
        result
    }

    fn resolve(&self, path: &str) -> Result<Location, Error> {
        self.walk(path, Walk::Follow)
    }

    fn walk(&self, path: &str, walk: Walk) -> Result<Location, Error> {
        let mut ahead = path::components(path)?;
        ahead.reverse();
        let mut above: Vec<OwnedFd> = Vec::new();
        let mut links = 0;
        while let Some(step) = ahead.pop() {
            let Component::Name(name) = step else {
                above.pop().ok_or(Error::Denied)?;
                continue;
            };
            let here = above
                .last()
                .map_or_else(|| self.directory.as_fd(), AsFd::as_fd);
            match rustix::fs::readlinkat(here, &name, Vec::new()) {
                Ok(_) if ahead.is_empty() && !walk.follows() => {
                    let directory = here.try_clone_to_owned().map_err(|_| Errno::MFILE)?;
                    return Ok(Location { directory, name });
                }
                Ok(target) => {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err(Error::Io(Errno::LOOP));
                    }
                    self.follow(target.as_bytes(), &mut ahead, &mut above)?;
                }
                // Not a link. The last name need not exist nor be a directory.
                Err(Errno::INVAL | Errno::NOENT) if ahead.is_empty() => {
                    let directory = here.try_clone_to_owned().map_err(|_| Errno::MFILE)?;
                    return Ok(Location { directory, name });
                }
                Err(Errno::NOENT) if walk.makes() => {
                    match rustix::fs::mkdirat(here, &name, NEW_DIRECTORY) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(errno) => return Err(errno.into()),
                    }
                    // `DIRECTORY` does not follow a link that another process has put there.
                    above.push(rustix::fs::openat(here, &name, DIRECTORY, Mode::empty())?);
                }
                Err(Errno::INVAL) => {
                    above.push(rustix::fs::openat(here, &name, DIRECTORY, Mode::empty())?);
                }
                Err(errno) => return Err(errno.into()),
            }
        }
        let here = above
            .last()
            .map_or_else(|| self.directory.as_fd(), AsFd::as_fd);
        let directory = here.try_clone_to_owned().map_err(|_| Errno::MFILE)?;
        Ok(Location {
            directory,
            name: c".".to_owned(),
        })
    }

    /// Inserts the components of a link before those that are left.
    ///
    /// An absolute link has to begin with the path of the root.
    fn follow(
        &self,
        target: &[u8],
        ahead: &mut Vec<Component>,
        above: &mut Vec<OwnedFd>,
    ) -> Result<(), Error> {
        let rest = match target {
            [b'/', ..] => {
                let target = Path::new(std::ffi::OsStr::from_bytes(target));
                let rest = target.strip_prefix(&self.path).map_err(|_| Error::Denied)?;
                above.clear();
                rest.as_os_str().as_bytes()
            }
            relative => relative,
        };
        ahead.extend(path::split(rest)?.into_iter().rev());
        if ahead.len() + above.len() > 2 * path::MAX_COMPONENTS {
            return Err(Error::Io(Errno::NAMETOOLONG));
        }
        Ok(())
    }
}

/// File that is being written under a temporary name.
///
/// [`Upload::finish`] moves the file to its path; dropping it before removes the file.
#[derive(Debug)]
pub struct Upload {
    location: Location,
    temporary: Option<CString>,
    file: File,
}

impl Upload {
    /// Returns the file for writing.
    pub fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Moves the file to its path atomically, and replaces an existing file.
    pub fn finish(self) -> Result<(), Error> {
        self.finish_as(Existing::Replace)
    }

    /// Moves the file to its path atomically, and treats an existing entry as `existing` says.
    pub fn finish_as(mut self, existing: Existing) -> Result<(), Error> {
        if let Some(temporary) = &self.temporary {
            let directory = self.location.directory.as_fd();
            rename(directory, temporary, &self.location, existing)?;
        }
        self.temporary = None;
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary
            && let Err(errno) =
                rustix::fs::unlinkat(&self.location.directory, temporary, AtFlags::empty())
        {
            tracing::warn!(%errno, "cannot remove the temporary file of an incomplete upload");
        }
    }
}

impl std::fmt::Debug for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Location")
            .field("name", &self.name)
            .finish()
    }
}

/// Moves an entry to a location atomically.
fn rename(at: BorrowedFd<'_>, name: &CStr, to: &Location, existing: Existing) -> Result<(), Error> {
    let replace = || rustix::fs::renameat(at, name, &to.directory, &to.name);
    let renamed = match existing {
        Existing::Replace => replace(),
        Existing::Keep => {
            let flags = RenameFlags::NOREPLACE;
            match rustix::fs::renameat_with(at, name, &to.directory, &to.name, flags) {
                // The file system does not support NOREPLACE, or the target is within the source.
                Err(Errno::INVAL | Errno::NOSYS) => match stat(to.directory.as_fd(), &to.name) {
                    Ok(_) => return Err(Error::Exists),
                    Err(Error::Missing) => replace(),
                    Err(error) => return Err(error),
                },
                other => other,
            }
        }
    };
    renamed.map_err(|errno| match errno {
        Errno::INVAL => Error::IntoItself,
        Errno::ISDIR => Error::IsADirectory,
        // Some file systems answer EXIST for a directory that is not empty.
        Errno::EXIST if existing == Existing::Replace => Error::NotEmpty,
        other => other.into(),
    })
}

fn is_directory(mode: u32) -> bool {
    FileType::from_raw_mode(mode) == FileType::Directory
}

fn stat(at: BorrowedFd<'_>, name: &CStr) -> Result<Stat, Error> {
    Ok(rustix::fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Opens a regular file for reading.
fn open_file(at: BorrowedFd<'_>, name: &CStr) -> Result<(File, Stat), Error> {
    // Without NONBLOCK, opening a pipe without a writer would block forever.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(at, name, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    regular(&stat)?;
    Ok((File::from(file), stat))
}

fn regular(stat: &Stat) -> Result<(), Error> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(()),
        _ => Err(Error::NotAFile),
    }
}

pub mod budget;
mod copy;
mod edit;
#[cfg(test)]
mod tests;
mod tree;
pub mod unpack;

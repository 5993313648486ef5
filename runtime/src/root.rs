//! The directory that clients see, and nothing outside of it.
//!
//! A path is walked step by step on directory descriptors that are held open, links read and followed by this walk and never by the kernel. `openat2` with `RESOLVE_BENEATH` would do the same in one call, but gVisor answers it with ENOSYS, and gVisor is where this runs. `..` goes back to the descriptor one came by, so that no rename on the way leads out.

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

/// Most links of one path, as in the kernel.
const MAX_LINKS: u32 = 40;
/// Most entries of a listing.
pub const MAX_ENTRIES: usize = 100_000;
/// How many names of unfinished uploads are passed over.
const MAX_LEFT_BEHIND: u32 = 1000;
/// Permissions of directories that are made for a file, as upstream has them.
const NEW_DIRECTORY: Mode = Mode::from_bits_retain(0o755);
const DIRECTORY: OFlags = OFlags::PATH
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// A path was not resolved, or what is there could not be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It would lead out of the root.
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
    #[error("something is there already")]
    Exists,
    /// In the place of a directory, and not to be replaced by one.
    #[error("a file or a link is there")]
    FileThere,
    /// The request cannot be done to the root itself.
    #[error("it is the root")]
    IsRoot,
    #[error("a directory cannot be put into itself")]
    IntoItself,
    #[error("it is on another file system")]
    OtherFileSystem,
    #[error("neither a file, nor a directory, nor a link")]
    Special,
    #[error("more than {0} bytes")]
    TooLarge(u64),
    /// The data to write ended too early.
    #[error("its content broke off")]
    BrokenOff,
    #[error("more than {MAX_ENTRIES} entries")]
    TooMany,
    #[error("more than {} directories deep", path::MAX_COMPONENTS)]
    TooDeep,
    /// Of an entry of a listing.
    #[error("the path of a link is too long to follow it")]
    LinkTooDeep,
    #[error("{}", io::Error::from(*.0))]
    Io(Errno),
}

impl Error {
    /// Of a path from which something is taken: below a file there is nothing.
    #[must_use]
    pub fn of_source(self) -> Self {
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

/// What a listing says of an entry.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub name: String,
    pub size: u64,
    pub is_directory: bool,
    /// Seconds since 1970.
    pub mod_time: f64,
    /// Permission bits.
    pub mode: u32,
    /// A link that leads to nothing, or outside; then the rest is of the link itself.
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

/// The directory that clients see.
#[derive(Debug)]
pub struct Root {
    directory: OwnedFd,
    path: PathBuf,
    uploads: AtomicU64,
}

/// Fate of an entry in whose place another is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    Replace,
    Keep,
}

/// How the end of a path is looked for.
#[derive(Clone, Copy)]
enum Walk {
    /// What the path leads to.
    Follow,
    /// The same, and directories on the way that are missing are made.
    Make,
    /// What has the path's last name, were it a link.
    NoFollow,
    /// The same, and directories on the way that are missing are made.
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

/// A name in a directory that is below the root; `.` is the directory itself.
struct Place {
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

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a regular file for reading, and says how long it is.
    pub fn read(&self, path: &str) -> Result<(File, u64), Error> {
        let place = self.resolve(path)?;
        // Looked at first: to open a device may do things.
        regular(&stat(place.directory.as_fd(), &place.name)?)?;
        let (file, stat) = open_file(place.directory.as_fd(), &place.name)?;
        Ok((file, u64::try_from(stat.st_size).unwrap_or(0)))
    }

    /// Whether something is there. A link that leads nowhere is nothing.
    pub fn exists(&self, path: &str) -> Result<bool, Error> {
        match self
            .resolve(path)
            .and_then(|place| stat(place.directory.as_fd(), &place.name))
        {
            Ok(_) => Ok(true),
            Err(Error::Denied) => Err(Error::Denied),
            Err(_) => Ok(false),
        }
    }

    /// The entries of a directory, by name.
    pub fn list(&self, path: &str) -> Result<Vec<Entry>, Error> {
        let place = self.resolve(path)?;
        let directory = rustix::fs::openat(&place.directory, &place.name, READ, Mode::empty())?;
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
                // It went away meanwhile.
                Err(Error::Missing) => {}
                Err(error) => return Err(error),
            }
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Entry that a path leads to, under the path's last name.
    pub fn stat(&self, path: &str) -> Result<Entry, Error> {
        let place = self.resolve(path)?;
        let stat = stat(place.directory.as_fd(), &place.name)?;
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
            // A link is described by what it leads to, unless that is nothing or outside.
            Ok(name) if is_link => {
                let path = format!("{parent}/{name}");
                if path::components(&path) == Err(path::Error::Long) {
                    return Err(Error::LinkTooDeep);
                }
                self.resolve(&path)
                    .and_then(|place| stat(place.directory.as_fd(), &place.name))
                    .ok()
            }
            _ => None,
        };
        let dangling = is_link && target.is_none();
        let stat = target.unwrap_or(own);
        let name = name.to_string_lossy().into_owned();
        Ok(Entry::new(name, &stat, dangling))
    }

    /// Opens a directory to be named by its descriptor, as a place to work in or to watch.
    pub fn directory(&self, path: &str) -> Result<OwnedFd, Error> {
        let place = self.resolve(path)?;
        let opened = rustix::fs::openat(&place.directory, &place.name, DIRECTORY, Mode::empty());
        Ok(opened?)
    }

    /// The same, unless the path's last name is a link.
    pub fn directory_itself(&self, path: &str) -> Result<OwnedFd, Error> {
        let place = self.walk(path, Walk::NoFollow)?;
        let opened = rustix::fs::openat(&place.directory, &place.name, DIRECTORY, Mode::empty());
        Ok(opened?)
    }

    /// Begins a file that takes the place of what is at `path` when it is whole. One that is replaced hands on its permissions.
    pub fn begin(&self, path: &str) -> Result<Upload, Error> {
        let place = self.resolve(path)?;
        let mode = match stat(place.directory.as_fd(), &place.name) {
            Ok(stat) => {
                regular(&stat)?;
                // Not set-user-ID: the new file is this process's, whoever's the old one was.
                Some(Mode::from_raw_mode(stat.st_mode & 0o777))
            }
            Err(Error::Missing) => None,
            Err(error) => return Err(error),
        };
        self.begin_at(place, mode)
    }

    fn begin_at(&self, place: Place, mode: Option<Mode>) -> Result<Upload, Error> {
        let (temporary, file) = self.temporary(place.directory.as_fd())?;
        let upload = Upload {
            place,
            temporary: Some(temporary),
            file: File::from(file),
        };
        // A script that is written anew stays executable, as it does with upstream.
        if let Some(mode) = mode {
            rustix::fs::fchmod(&upload.file, mode)?;
        }
        Ok(upload)
    }

    fn temporary(&self, at: BorrowedFd<'_>) -> Result<(CString, OwnedFd), Error> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let wanted = Mode::from_raw_mode(0o666);
        self.unfinished(|name| rustix::fs::openat(at, name, flags, wanted))
    }

    /// Makes something new under a name of its own. Another process of this number may have left
    /// one behind, as the first of a container that was started again.
    fn unfinished<T>(
        &self,
        make: impl Fn(&CStr) -> Result<T, Errno>,
    ) -> Result<(CString, T), Error> {
        let mut result = Err(Error::Io(Errno::EXIST));
        for _ in 0..MAX_LEFT_BEHIND {
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

    fn resolve(&self, path: &str) -> Result<Place, Error> {
        self.walk(path, Walk::Follow)
    }

    fn walk(&self, path: &str, walk: Walk) -> Result<Place, Error> {
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
                    return Ok(Place { directory, name });
                }
                Ok(target) => {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err(Error::Io(Errno::LOOP));
                    }
                    self.follow(target.as_bytes(), &mut ahead, &mut above)?;
                }
                // Not a link. The last name need not exist, nor be a directory.
                Err(Errno::INVAL | Errno::NOENT) if ahead.is_empty() => {
                    let directory = here.try_clone_to_owned().map_err(|_| Errno::MFILE)?;
                    return Ok(Place { directory, name });
                }
                Err(Errno::NOENT) if walk.makes() => {
                    match rustix::fs::mkdirat(here, &name, NEW_DIRECTORY) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(errno) => return Err(errno.into()),
                    }
                    // What somebody else put there meanwhile is followed by nobody.
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
        Ok(Place {
            directory,
            name: c".".to_owned(),
        })
    }

    /// Puts the steps of a link before those that are left. An absolute link may lead to the root by its name.
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

/// A file that is being written. It takes its place by [`Upload::finish`], or leaves nothing.
#[derive(Debug)]
pub struct Upload {
    place: Place,
    temporary: Option<CString>,
    file: File,
}

impl Upload {
    /// The file, to write to.
    pub fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Puts the file in its place, in one step.
    pub fn finish(self) -> Result<(), Error> {
        self.finish_as(Existing::Replace)
    }

    /// The same, or refuses if something is there by now.
    pub fn finish_as(mut self, existing: Existing) -> Result<(), Error> {
        if let Some(temporary) = &self.temporary {
            let directory = self.place.directory.as_fd();
            rename(directory, temporary, &self.place, existing)?;
        }
        self.temporary = None;
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary
            && let Err(errno) =
                rustix::fs::unlinkat(&self.place.directory, temporary, AtFlags::empty())
        {
            tracing::warn!(%errno, "an upload that did not end is left behind");
        }
    }
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Place").field("name", &self.name).finish()
    }
}

/// Gives something its place, in one step.
fn rename(at: BorrowedFd<'_>, name: &CStr, to: &Place, existing: Existing) -> Result<(), Error> {
    let replace = || rustix::fs::renameat(at, name, &to.directory, &to.name);
    let renamed = match existing {
        Existing::Replace => replace(),
        Existing::Keep => {
            let flags = RenameFlags::NOREPLACE;
            match rustix::fs::renameat_with(at, name, &to.directory, &to.name, flags) {
                // Some file systems cannot refuse in the same step. Or it is to go into itself.
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
        // What some file systems answer where it is to replace a directory.
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
    // Without NONBLOCK a pipe without a writer would hold this thread for good.
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

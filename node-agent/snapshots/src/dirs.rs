//! Opens, makes, reads and removes directories and files below an open directory. No link is
//! followed.
//!
//! Two users write to the store: root, as whom the shims run, and the agent. What either makes, the
//! other may use: directories are writable for the agent's group.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

pub(crate) const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);
/// Resolve beneath the given directory, through no link of any kind.
const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS);
/// User and group of the agent. No distribution and no systemd gives out the numbers from 65520 to
/// 65533 (systemd's UIDS-GIDS), so that no other program of a node has them.
pub const AGENT_ID: u32 = 65_525;
/// Mode of directories, once they belong to the agent's group.
const SHARED_DIR: Mode = Mode::RWXU.union(Mode::RWXG);
const PRIVATE_DIR: Mode = Mode::RWXU;
const PRIVATE_FILE: Mode = Mode::RUSR.union(Mode::WUSR);
/// Mode of the files of images, once they belong to the agent's group.
const READABLE_FILE: Mode = PRIVATE_FILE.union(Mode::RGRP);
/// Mode of files to which both users write, once they belong to the agent's group.
const SHARED_FILE: Mode = READABLE_FILE.union(Mode::WGRP);
/// Most levels of directories in a removal. Images are flat; a runtime may have made one level.
const MAX_DEPTH: u32 = 8;

/// Error of a system call on a path.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} {}", path.display())]
pub struct PathError {
    pub doing: &'static str,
    pub path: PathBuf,
    pub source: io::Error,
}

impl PathError {
    pub(crate) fn new(doing: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self {
            doing,
            path: path.to_owned(),
            source: source.into(),
        }
    }
}

/// Error: an entry of the store has the wrong type or owner, or other users may write to it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} is {fault}; the store must belong to root and the agent alone", path.display())]
pub struct Unsafe {
    pub path: PathBuf,
    pub fault: Fault,
}

/// Fault of a file or directory of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("a symbolic link, or reached through one")]
    Link,
    #[error("not a directory")]
    NotADirectory,
    #[error("not a plain file")]
    NotAFile,
    #[error("owned by user {0}")]
    Owner(u32),
    #[error("writable for others than its owner and the agent (mode {0:o})")]
    Writable(u32),
}

/// Error of opening an entry of the store.
#[derive(Debug)]
pub(crate) enum OpenError {
    Path(PathError),
    Unsafe(Unsafe),
}

impl From<PathError> for OpenError {
    fn from(error: PathError) -> Self {
        OpenError::Path(error)
    }
}

impl From<Unsafe> for OpenError {
    fn from(error: Unsafe) -> Self {
        OpenError::Unsafe(error)
    }
}

impl OpenError {
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, OpenError::Path(e) if e.source.kind() == io::ErrorKind::NotFound)
    }
}

/// Result of a removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removed {
    Done,
    /// There was nothing to remove.
    Already,
}

/// Returns an error if another user than this process', root and the agent owns the entry or may
/// write to it.
pub(crate) fn check_private(fd: BorrowedFd<'_>, path: &Path) -> Result<(), OpenError> {
    let stat = rustix::fs::fstat(fd).map_err(|e| PathError::new("examine", path, e))?;
    let unsafe_path = |fault| Unsafe {
        path: path.to_owned(),
        fault,
    };
    let own = rustix::process::geteuid().as_raw();
    if ![own, 0, AGENT_ID].contains(&stat.st_uid) {
        return Err(unsafe_path(Fault::Owner(stat.st_uid)).into());
    }
    let others = match stat.st_gid {
        AGENT_ID => Mode::WOTH,
        _ => Mode::WGRP | Mode::WOTH,
    };
    if Mode::from_raw_mode(stat.st_mode).intersects(others) {
        return Err(unsafe_path(Fault::Writable(stat.st_mode & 0o7777)).into());
    }
    Ok(())
}

/// Makes a directory durably, or makes an existing directory durable: the process that made the
/// directory may have died before its sync.
pub(crate) fn make_dir(at: BorrowedFd<'_>, name: &str, path: &Path) -> Result<(), PathError> {
    match rustix::fs::mkdirat(at, name, PRIVATE_DIR) {
        Ok(()) => share_dir(at, name, path)?,
        Err(Errno::EXIST) => {}
        Err(errno) => return Err(PathError::new("create", path, errno)),
    }
    sync_dir(at, path)
}

/// Gives a directory that this process has made to the agent's group.
fn share_dir(at: BorrowedFd<'_>, name: &str, path: &Path) -> Result<(), PathError> {
    let opened = rustix::fs::openat2(
        at,
        name,
        DIRECTORY | OFlags::NOFOLLOW,
        Mode::empty(),
        BENEATH,
    );
    let shared = opened.and_then(|dir| share(dir.as_fd(), SHARED_DIR));
    shared.map_err(|e| PathError::new("set the group of", path, e))
}

/// Gives a directory or file to the agent's group, with this mode. A process that is neither root
/// nor the agent keeps it for itself.
pub(crate) fn share(file: BorrowedFd<'_>, mode: Mode) -> Result<(), Errno> {
    match rustix::process::geteuid().as_raw() {
        0 => {
            let agent = rustix::fs::Gid::from_raw(AGENT_ID);
            rustix::fs::fchown(file, None, Some(agent))?;
            rustix::fs::fchmod(file, mode)
        }
        AGENT_ID => rustix::fs::fchmod(file, mode),
        _ => Ok(()),
    }
}

/// Gives the directories and files of a store to the agent's group, where root alone may use them:
/// earlier versions kept them for root. A file with several names may be one of another directory,
/// and stays as it is.
pub(crate) fn hand_over(dir: BorrowedFd<'_>, path: &Path, depth: u32) -> Result<(), PathError> {
    for name in names(dir, path)? {
        let at = path.join(&name);
        let failed = |e: Errno| PathError::new("set the group of", &at, e);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = match rustix::fs::openat2(dir, name.as_str(), flags, Mode::empty(), BENEATH) {
            Ok(file) => file,
            // A link, or removed meanwhile.
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => continue,
            Err(errno) => return Err(failed(errno)),
        };
        let stat = rustix::fs::fstat(&file).map_err(failed)?;
        let is_private = stat.st_uid == 0 && stat.st_mode & 0o077 == 0;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                if is_private {
                    share(file.as_fd(), SHARED_DIR).map_err(failed)?;
                }
                if depth > 0 {
                    hand_over(file.as_fd(), &at, depth - 1)?;
                }
            }
            FileType::RegularFile if is_private && stat.st_nlink == 1 => {
                share(file.as_fd(), SHARED_FILE).map_err(failed)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// Makes a directory that must not exist yet and opens it.
pub(crate) fn make_fresh_dir(
    at: BorrowedFd<'_>,
    name: &str,
    path: &Path,
) -> Result<OwnedFd, OpenError> {
    rustix::fs::mkdirat(at, name, PRIVATE_DIR).map_err(|e| PathError::new("create", path, e))?;
    share_dir(at, name, path)?;
    open_dir(at, name, path)
}

/// Makes the changes in a directory durable.
pub(crate) fn sync_dir(dir: BorrowedFd<'_>, path: &Path) -> Result<(), PathError> {
    rustix::fs::fsync(dir).map_err(|e| PathError::new("make durable the changes in", path, e))
}

/// Opens a directory and checks its owner and mode.
pub(crate) fn open_dir(at: BorrowedFd<'_>, name: &str, path: &Path) -> Result<OwnedFd, OpenError> {
    let flags = DIRECTORY | OFlags::NOFOLLOW;
    match rustix::fs::openat2(at, name, flags, Mode::empty(), BENEATH) {
        Ok(dir) => {
            check_private(dir.as_fd(), path)?;
            Ok(dir)
        }
        Err(Errno::LOOP | Errno::XDEV) => Err(link(path)),
        Err(Errno::NOTDIR) if is_link(at, name) => Err(link(path)),
        Err(Errno::NOTDIR) => Err(Unsafe {
            path: path.to_owned(),
            fault: Fault::NotADirectory,
        }
        .into()),
        Err(errno) => Err(PathError::new("open", path, errno).into()),
    }
}

/// Opens a directory like [`open_dir`]. Returns none if it does not exist or is refused: a listing
/// contains only images.
pub(crate) fn open_dir_if_any(
    at: BorrowedFd<'_>,
    name: &str,
    path: &Path,
) -> Result<Option<OwnedFd>, PathError> {
    match open_dir(at, name, path) {
        Ok(dir) => Ok(Some(dir)),
        Err(OpenError::Unsafe(_)) => Ok(None),
        Err(error) if error.is_not_found() => Ok(None),
        Err(OpenError::Path(error)) => Err(error),
    }
}

/// Opens a plain file for reading and checks its owner and mode. Never blocks, not even on a pipe.
pub(crate) fn open_plain(
    at: BorrowedFd<'_>,
    name: &str,
    path: &Path,
) -> Result<OwnedFd, OpenError> {
    open_checked(at, name, path, OFlags::RDONLY)
}

/// Opens a file like [`open_plain`], with other flags: the access mode, and CREATE to make a
/// missing file.
pub(crate) fn open_checked(
    at: BorrowedFd<'_>,
    name: &str,
    path: &Path,
    flags: OFlags,
) -> Result<OwnedFd, OpenError> {
    let mode = match flags.contains(OFlags::CREATE) {
        true => PRIVATE_FILE,
        false => Mode::empty(),
    };
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let not_a_file = || Unsafe {
        path: path.to_owned(),
        fault: Fault::NotAFile,
    };
    let file = match rustix::fs::openat2(at, name, flags, mode, BENEATH) {
        Ok(file) => file,
        Err(Errno::LOOP | Errno::XDEV) => return Err(link(path)),
        Err(Errno::ISDIR | Errno::NXIO) => return Err(not_a_file().into()),
        Err(errno) => return Err(PathError::new("open", path, errno).into()),
    };
    let stat = rustix::fs::fstat(&file).map_err(|e| PathError::new("examine", path, e))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(not_a_file().into());
    }
    check_private(file.as_fd(), path)?;
    let is_new = flags.contains(OFlags::CREATE) && stat.st_mode & 0o7777 == PRIVATE_FILE.bits();
    if is_new {
        share(file.as_fd(), SHARED_FILE)
            .map_err(|e| PathError::new("set the group of", path, e))?;
    }
    Ok(file)
}

/// Makes a file that must not exist yet and opens it for reading and writing.
pub(crate) fn create_plain(
    at: BorrowedFd<'_>,
    name: &str,
    path: &Path,
) -> Result<OwnedFd, PathError> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = rustix::fs::openat2(at, name, flags, PRIVATE_FILE, BENEATH);
    let file = made.map_err(|e| PathError::new("create", path, e))?;
    let shared = share(file.as_fd(), READABLE_FILE);
    shared.map_err(|e| PathError::new("set the group of", path, e))?;
    Ok(file)
}

fn link(path: &Path) -> OpenError {
    Unsafe {
        path: path.to_owned(),
        fault: Fault::Link,
    }
    .into()
}

fn is_link(at: BorrowedFd<'_>, name: &str) -> bool {
    let stat = rustix::fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW);
    stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink)
}

/// Reads a file of at most `limit` bytes. Returns `Err(size)` if the file has more.
pub(crate) fn read_limited(
    file: BorrowedFd<'_>,
    limit: usize,
    path: &Path,
) -> Result<Result<Vec<u8>, u64>, PathError> {
    let stat = rustix::fs::fstat(file).map_err(|e| PathError::new("examine", path, e))?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if size > limit as u64 {
        return Ok(Err(size));
    }
    // The buffer has one byte more than allowed, to detect a file that grows during the read.
    let mut bytes = vec![0; limit.min(usize::try_from(size).unwrap_or(limit)) + 1];
    let mut have = 0;
    while have < bytes.len() {
        match rustix::io::pread(file, &mut bytes[have..], have as u64) {
            Ok(0) => break,
            Ok(read) => have += read,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(PathError::new("read", path, errno)),
        }
    }
    if have == bytes.len() && have > limit {
        return Ok(Err(have as u64));
    }
    bytes.truncate(have);
    Ok(Ok(bytes))
}

/// Returns the names in a directory, sorted. Names that are not UTF-8 get replacement characters.
pub(crate) fn names(dir: BorrowedFd<'_>, path: &Path) -> Result<Vec<String>, PathError> {
    let failed = |e: Errno| PathError::new("list", path, e);
    let mut names = Vec::new();
    for entry in Dir::read_from(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name: &CStr = entry.file_name();
        if name.to_bytes() != b"." && name.to_bytes() != b".." {
            names.push(name.to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Returns the size of the plain files in a directory, in bytes. Directories that share a file by
/// links each have an equal part of its size.
pub(crate) fn size(dir: BorrowedFd<'_>, path: &Path) -> Result<u64, PathError> {
    let mut sum = 0_u64;
    for name in names(dir, path)? {
        // A file that disappears meanwhile is being removed and is not counted.
        if let Ok(stat) = rustix::fs::statat(dir, name.as_str(), AtFlags::SYMLINK_NOFOLLOW)
            && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        {
            let size = u64::try_from(stat.st_size).unwrap_or(0);
            sum = sum.saturating_add(size / stat.st_nlink.max(1));
        }
    }
    Ok(sum)
}

/// Removes a file, a link or a directory with its contents. Links are not followed. A missing entry
/// is no error.
pub(crate) fn remove_all(at: BorrowedFd<'_>, name: &CStr, path: &Path) -> Result<(), PathError> {
    remove_level(at, name, path, MAX_DEPTH)
}

fn remove_level(at: BorrowedFd<'_>, name: &CStr, path: &Path, depth: u32) -> Result<(), PathError> {
    let failed = |e: Errno| PathError::new("remove", path, e);
    match rustix::fs::unlinkat(at, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR) if depth > 0 => {}
        Err(errno) => return Err(failed(errno)),
    }
    let flags = DIRECTORY | OFlags::NOFOLLOW;
    let dir = match rustix::fs::openat2(at, name, flags, Mode::empty(), BENEATH) {
        Ok(dir) => dir,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(failed(errno)),
    };
    for entry in Dir::read_from(&dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            remove_level(dir.as_fd(), entry.file_name(), path, depth - 1)?;
        }
    }
    crate::failpoint::hit("remove:emptied");
    match rustix::fs::unlinkat(at, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(failed(errno)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    /// Uses a descriptor (O_PATH) with which the kernel makes directories but refuses fsync.
    #[test]
    fn a_directory_that_was_there_already_is_made_durable_too() {
        let dir = tempfile::tempdir().expect("a directory");
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let unsynced = rustix::fs::open(dir.path(), flags, Mode::empty()).expect("opened");
        std::fs::create_dir(dir.path().join("there")).expect("made");
        for name in ["fresh", "there"] {
            make_dir(unsynced.as_fd(), name, dir.path()).expect_err(name);
        }
    }

    #[test]
    fn files_of_root_alone_are_handed_over_to_the_agent_and_links_are_left_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let image = dir.path().join("images/ns/pod-a.1");
        std::fs::create_dir_all(&image).expect("made");
        let (file, twice) = (image.join("pages.img"), image.join("twice"));
        let elsewhere = dir.path().join("elsewhere");
        for path in [&file, &twice, &elsewhere] {
            std::fs::write(path, "").expect("written");
        }
        std::fs::hard_link(&twice, dir.path().join("images/other")).expect("linked");
        std::os::unix::fs::symlink(&elsewhere, image.join("link")).expect("linked");
        for path in [&image, &file, &twice, &elsewhere] {
            let private = std::fs::Permissions::from_mode(0o600);
            std::fs::set_permissions(path, private).expect("set");
        }
        let images = dir.path().join("images");
        let top = rustix::fs::open(&images, DIRECTORY, Mode::empty()).expect("opened");
        hand_over(top.as_fd(), &images, 3).expect("handed over");
        let access = |path: &Path| {
            let found = std::fs::metadata(path).expect("there");
            (found.mode() & 0o777, found.gid())
        };
        assert_eq!(access(&image), (0o770, AGENT_ID));
        assert_eq!(access(&file), (0o660, AGENT_ID));
        assert_eq!(access(&twice), (0o600, 0));
        assert_eq!(access(&elsewhere), (0o600, 0));
    }

    #[test]
    fn an_entry_of_another_user_or_writable_for_others_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("entry");
        std::fs::write(&path, "").expect("written");
        let refused = |mode: u32, owner: Option<(u32, u32)>| {
            if let Some((user, group)) = owner {
                std::os::unix::fs::chown(&path, Some(user), Some(group)).expect("set");
            }
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("set");
            let file = std::fs::File::open(&path).expect("opened");
            check_private(file.as_fd(), &path).is_err()
        };
        assert!(!refused(0o600, None));
        assert!(refused(0o602, None));
        if rustix::process::geteuid().is_root() {
            assert!(refused(0o660, Some((0, 0))), "the group is not the agent's");
            assert!(!refused(0o660, Some((0, AGENT_ID))));
            assert!(!refused(0o600, Some((AGENT_ID, AGENT_ID))));
            assert!(refused(0o662, Some((AGENT_ID, AGENT_ID))));
            assert!(refused(0o600, Some((1000, AGENT_ID))));
        }
    }
}

//! Lock files. A process holds the lock of such a file while it works or waits. The kernel releases
//! the locks of a process that dies.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use torpor_snapshots::AGENT_ID;

use crate::records::{OF_AGENT, READABLE};

/// Makes a directory for lock files or records, with its parents. The agent's group may read it.
pub fn make_dir(path: &Path) -> io::Result<()> {
    make_dir_with(path, READABLE)
}

/// Makes a directory in which the agent may make and remove files.
pub(crate) fn make_dir_of_agent(path: &Path) -> io::Result<()> {
    make_dir_with(path, OF_AGENT)
}

fn make_dir_with(path: &Path, mode: u32) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        make_dir(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => share(path, mode),
        // Another process was faster.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// Gives a directory of root to the agent's group, with this mode. A process that is not root keeps
/// its directories for itself.
pub fn share(path: &Path, mode: u32) -> io::Result<()> {
    if nix::unistd::geteuid().is_root() {
        chown(path, None, Some(AGENT_ID))?;
        std::fs::set_permissions(path, Permissions::from_mode(mode))?;
    }
    Ok(())
}

/// Opens a lock file and makes it if it does not exist. A symbolic link is an error.
pub fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600);
    options.custom_flags(nix::libc::O_NOFOLLOW).open(path)
}

/// Opens a lock file that exists, also for a process that may only read it. A symbolic link is an
/// error.
pub fn open_existing(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    options.custom_flags(nix::libc::O_NOFOLLOW).open(path)
}

/// Takes the exclusive lock of a file; returns none if another process holds a lock of it.
pub fn try_exclusive(file: File) -> Result<Option<Flock<File>>, Errno> {
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EAGAIN)) => Ok(None),
        Err((_, errno)) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_taken_unless_another_process_holds_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("made").join("lock");
        assert!(open(&path).is_err(), "there is no directory");
        make_dir(path.parent().expect("one")).expect("made");
        let file = || open(&path).expect("opened");
        for mode in [FlockArg::LockShared, FlockArg::LockExclusive] {
            let held = Flock::lock(file(), mode).expect("locked");
            assert!(try_exclusive(file()).expect("tried").is_none());
            drop(held);
            assert!(try_exclusive(file()).expect("tried").is_some());
        }
    }

    #[test]
    fn a_file_to_lock_is_not_looked_for_behind_a_link() {
        let dir = tempfile::tempdir().expect("a directory");
        let link = dir.path().join("lock");
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), &link).expect("linked");
        open(&link).expect_err("it is a link");
        assert!(!dir.path().join("elsewhere").exists());
    }
}

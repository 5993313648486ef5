//! Lock files. A process holds the lock of such a file while it works or waits. The kernel releases
//! the locks of a process that dies.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// Makes a directory for lock files or records, with its parents.
pub fn make_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Opens a lock file and makes it if it does not exist. A symbolic link is an error.
pub fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600);
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
    fn a_lock_is_had_unless_somebody_has_it() {
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

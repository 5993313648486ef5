//! Files that are there to be locked: who holds the lock of one is at work, or waits. The kernel takes it back from a process that dies.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// Makes a directory for such files, or for records, with all that is above it.
pub fn make_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// The file, made if there is none. A link is not followed.
pub fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600);
    options.custom_flags(nix::libc::O_NOFOLLOW).open(path)
}

/// The file's lock, for its holder alone; none where somebody has it.
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

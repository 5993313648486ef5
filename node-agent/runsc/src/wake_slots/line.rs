//! The line of those who wait for a turn: a file for each, named after its place, which is locked for as long as it waits.
//!
//! A name that is there is nobody else's, so that of two who come at once one takes the next place. A file that nobody holds is left of one
//! that was killed; it is removed by whoever finds it before itself, who holds its lock then. Whoever finds his own file removed, because
//! somebody came between its making and its locking, comes again.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::Duration;

use nix::fcntl::Flock;
use torpor_core::ids::Namespace;
use torpor_core::wake_line::Place;

use torpor_records::locks;

/// Others come at the same moment, but not for ever.
const TRIES: u32 = 1000;
const TRY_AGAIN: Duration = Duration::from_micros(100);
/// Nobody waits for so long ([`super::Patience`]): who is still there stands still.
const OVERDUE: Duration = Duration::from_secs(45);

/// The line of this node.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) dir: PathBuf,
}

/// A place in the line, given up when dropped.
#[derive(Debug)]
pub(super) struct Waiting {
    place: Place,
    path: PathBuf,
    /// Held until the file is gone.
    _lock: Flock<File>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // What is left is passed over by the others.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Line {
    /// Takes the next place; none where no line can be kept.
    pub(super) fn join(&self, namespace: &Namespace, patient: bool) -> Option<Waiting> {
        locks::make_dir(&self.dir).ok()?;
        for _ in 0..TRIES {
            let still = |place: &Place| self.stands_still(place);
            let place = Place::behind(&self.places(), namespace, patient, still);
            if let Some(waiting) = self.take(place).ok()? {
                return Some(waiting);
            }
            std::thread::sleep(TRY_AGAIN);
        }
        None
    }

    /// None where somebody else was faster.
    fn take(&self, place: Place) -> Result<Option<Waiting>, Error> {
        let path = self.dir.join(place.to_string());
        let mut options = OpenOptions::new();
        options.create_new(true).write(true).mode(0o600);
        let file = match options.open(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(None),
            other => other?,
        };
        match locks::try_exclusive(file) {
            Ok(Some(lock)) if is_there(&lock) => Ok(Some(Waiting {
                place,
                path,
                _lock: lock,
            })),
            Ok(_) => Ok(None),
            Err(errno) => {
                // It would be taken for one that was left, and is.
                let _ = std::fs::remove_file(&path);
                Err(errno.into())
            }
        }
    }

    /// How many are before it, as far as that matters where there are so many turns.
    pub(super) fn ahead(&self, waiting: &Waiting, turns: usize) -> usize {
        let waits = |place: &Place| self.is_held(place) && !self.stands_still(place);
        waiting.place.ahead(self.places(), turns, waits)
    }

    /// Whether somebody is there for longer than anybody waits. The place stays its own.
    fn stands_still(&self, place: &Place) -> bool {
        let came = std::fs::metadata(self.dir.join(place.to_string()));
        let came = came.and_then(|file| file.modified()).ok();
        came.and_then(|came| came.elapsed().ok())
            .is_some_and(|since| since > OVERDUE)
    }

    pub(super) fn places(&self) -> Vec<Place> {
        let entries = std::fs::read_dir(&self.dir).into_iter().flatten();
        entries
            .filter_map(|entry| Place::parse(entry.ok()?.file_name().to_str()?))
            .collect()
    }

    /// Whether somebody waits there. What nobody holds is removed.
    fn is_held(&self, place: &Place) -> bool {
        let path = self.dir.join(place.to_string());
        let Ok(file) = File::open(&path) else {
            return false;
        };
        match locks::try_exclusive(file) {
            Ok(Some(left)) => {
                // Of one that is gone the name may be another's by now.
                if is_there(&left) {
                    let _ = std::fs::remove_file(&path);
                }
                false
            }
            Ok(None) => true,
            Err(_) => false,
        }
    }
}

/// Whether the file has a name still: only who holds its lock takes it away.
fn is_there(file: &File) -> bool {
    file.metadata().is_ok_and(|metadata| metadata.nlink() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wake_slots::tests::namespace;

    fn line() -> (tempfile::TempDir, Line) {
        let dir = tempfile::tempdir().expect("a directory");
        let line = Line {
            dir: dir.path().join("line"),
        };
        (dir, line)
    }

    #[test]
    fn all_that_come_at_once_have_places_of_their_own() {
        let (_dir, line) = line();
        let join = |n: usize| line.join(&namespace(["a", "b"][n % 2]), false);
        let waiting: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..20).map(|n| scope.spawn(move || join(n))).collect();
            let ended = threads.into_iter().map(|thread| thread.join());
            ended.map(|one| one.expect("no panic")).collect()
        });
        let waiting: Vec<Waiting> = waiting.into_iter().flatten().collect();
        assert_eq!(waiting.len(), 20);
        let mut ahead: Vec<usize> = waiting.iter().map(|one| line.ahead(one, 1)).collect();
        ahead.sort_unstable();
        assert_eq!(ahead, (0..20).collect::<Vec<_>>());
        drop(waiting);
        assert_eq!(line.places(), []);
    }

    #[test]
    fn what_is_left_of_one_that_was_killed_is_removed_and_nothing_that_is_held() {
        let (_dir, line) = line();
        let first = line.join(&namespace("a"), false).expect("a place");
        let second = line.join(&namespace("b"), false).expect("a place");
        assert_eq!(line.ahead(&second, 1), 1);
        // The kernel takes the lock of one that is killed, and leaves its file.
        let killed = first.place.clone();
        let copy = line.dir.join("copy");
        std::fs::rename(&first.path, &copy).expect("moved");
        std::fs::write(&first.path, b"").expect("written");
        assert_eq!(line.ahead(&second, 1), 0);
        assert_eq!(line.places(), std::slice::from_ref(&second.place));
        assert!(!line.is_held(&killed) && line.is_held(&second.place));
    }

    #[test]
    fn who_is_there_for_longer_than_anybody_waits_is_passed_over_and_keeps_its_place() {
        let (_dir, line) = line();
        let still = line.join(&namespace("a"), false).expect("a place");
        let second = line.join(&namespace("a"), false).expect("a place");
        assert_eq!(line.ahead(&second, 2), 1);
        let long_ago = std::time::SystemTime::now() - OVERDUE * 2;
        still._lock.set_modified(long_ago).expect("set");
        assert_eq!(line.ahead(&second, 2), 0);
        let third = line.join(&namespace("b"), false).expect("a place");
        assert_eq!(third.place.to_string(), "called-2-b");
        assert_eq!(line.places().len(), 3);
    }

    #[test]
    fn where_no_files_can_be_made_there_is_no_line() {
        let (dir, line) = line();
        std::fs::write(dir.path().join("line"), b"no directory").expect("written");
        assert!(line.join(&namespace("a"), false).is_none());
    }
}

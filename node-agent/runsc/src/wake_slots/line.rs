//! The line of the restores that wait for a turn. Each has a file that is named after its place,
//! and locks the file while it waits.
//!
//! A file is created only where none of its name exists. So of two restores that come at once one
//! takes the next place. An unlocked file is left of a killed process. A restore behind it takes
//! its lock and removes it. Another process may do that to a new file between its creation and its
//! locking: a restore that finds its own file removed takes another place.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::Duration;

use nix::fcntl::Flock;
use torpor_core::ids::Namespace;
use torpor_core::wake_line::Place;

use torpor_records::locks;

/// Attempts to take a place, which fail where other restores come at the same moment.
const TRIES: u32 = 1000;
const RETRY: Duration = Duration::from_micros(100);
/// Age of a place whose process must be stopped: no restore waits so long ([`super::WaitLimits`]).
const OVERDUE: Duration = Duration::from_secs(45);

/// The line of this node.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) dir: PathBuf,
}

/// A place in the line. Dropping it leaves the line.
#[derive(Debug)]
pub(super) struct Waiting {
    place: Place,
    path: PathBuf,
    /// Held until the file is gone.
    _lock: Flock<File>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // Other restores skip a file that is left.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Line {
    /// Takes the next place. `courteous`: behind the restores for waiting clients. None where no
    /// line can be kept.
    pub(super) fn join(&self, namespace: &Namespace, courteous: bool) -> Option<Waiting> {
        locks::make_dir(&self.dir).ok()?;
        for _ in 0..TRIES {
            let overdue = |place: &Place| self.is_overdue(place);
            let place = Place::behind(&self.places(), namespace, courteous, overdue);
            if let Some(waiting) = self.take(place).ok()? {
                return Some(waiting);
            }
            std::thread::sleep(RETRY);
        }
        None
    }

    /// Creates and locks the file of a place. None where another process was faster.
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
                // An unlocked file counts as left of a killed process.
                let _ = std::fs::remove_file(&path);
                Err(errno.into())
            }
        }
    }

    /// Returns the number of restores ahead in the line, as far as it matters with so many turns.
    pub(super) fn ahead(&self, waiting: &Waiting, turns: usize) -> usize {
        let waits = |place: &Place| self.is_held(place) && !self.is_overdue(place);
        waiting.place.ahead(self.places(), turns, waits)
    }

    /// Reports whether the place is older than any restore waits. Its process keeps the place.
    fn is_overdue(&self, place: &Place) -> bool {
        let file = std::fs::metadata(self.dir.join(place.to_string()));
        let created = file.and_then(|file| file.modified()).ok();
        created
            .and_then(|created| created.elapsed().ok())
            .is_some_and(|age| age > OVERDUE)
    }

    pub(super) fn places(&self) -> Vec<Place> {
        let entries = std::fs::read_dir(&self.dir).into_iter().flatten();
        entries
            .filter_map(|entry| Place::parse(entry.ok()?.file_name().to_str()?))
            .collect()
    }

    /// Reports whether a process holds the place's lock. Removes a file that no process holds.
    fn is_held(&self, place: &Place) -> bool {
        let path = self.dir.join(place.to_string());
        let Ok(file) = File::open(&path) else {
            return false;
        };
        match locks::try_exclusive(file) {
            Ok(Some(left)) => {
                // The name of a removed file may be another process' by now.
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

/// Reports whether the file still has a name. Only the holder of its lock removes the file.
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
    fn processes_that_join_at_once_have_places_of_their_own() {
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
    fn the_place_of_a_killed_process_is_removed_and_no_held_place() {
        let (_dir, line) = line();
        let first = line.join(&namespace("a"), false).expect("a place");
        let second = line.join(&namespace("b"), false).expect("a place");
        assert_eq!(line.ahead(&second, 1), 1);
        // The kernel releases the lock of a killed process, and leaves its file.
        let killed = first.place.clone();
        let copy = line.dir.join("copy");
        std::fs::rename(&first.path, &copy).expect("moved");
        std::fs::write(&first.path, b"").expect("written");
        assert_eq!(line.ahead(&second, 1), 0);
        assert_eq!(line.places(), std::slice::from_ref(&second.place));
        assert!(!line.is_held(&killed) && line.is_held(&second.place));
    }

    #[test]
    fn an_overdue_process_is_passed_over_and_keeps_its_place() {
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

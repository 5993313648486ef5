//! The busy mark: a file in the Pod's emptyDir `torpor` that keeps the sandbox awake.
//!
//! Torpor's agent does not let an idle sandbox sleep while the file exists; it reads nothing else
//! of the file. A program may create its own file `busy` there. The file of this module stands for
//! calls and is removed at the end of the requested time. Time in which the sandbox sleeps (a user
//! may hibernate it) does not count.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, CWD, Mode, OFlags, fstat, openat, statat, unlinkat},
    io::Errno,
};
use tokio::{sync::Notify, time::Instant};

/// Name of the file, also in the agent's `node-agent/src/idle.rs`.
const FILE: &str = "busy-call";
/// Maximum time of one call. A client that is busy for longer calls again; one that has died does
/// not.
pub const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// Time of a call that names none.
pub const DEFAULT: Duration = Duration::from_secs(60);

/// Failure to create the mark.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(
        "no volume is mounted at {0}: mount an emptyDir of the name torpor there, or set SANDBOX_BUSY_DIR to its mount point"
    )]
    NoVolume(String),
    #[error("cannot create the file {FILE} in {directory}: {errno}")]
    Io { directory: String, errno: Errno },
}

/// Mark of all clients of this process. It lasts until the latest requested time.
#[derive(Debug)]
pub struct Mark {
    directory: PathBuf,
    file: Mutex<Option<MarkFile>>,
    changed: Notify,
}

/// Existing file.
#[derive(Debug)]
struct MarkFile {
    until: Instant,
    volume: OwnedFd,
}

impl Mark {
    /// Returns the mark in `directory`, the mount point of the emptyDir.
    ///
    /// A file of an earlier process is removed, because its remaining time is unknown.
    pub fn new(directory: PathBuf) -> Arc<Self> {
        let mark = Self {
            directory,
            file: Mutex::new(None),
            changed: Notify::new(),
        };
        if let Ok(volume) = mark.volume() {
            remove(&volume);
        }
        Arc::new(mark)
    }

    /// Marks the sandbox as busy for at least `time` from now, and returns the time left.
    pub fn set(&self, time: Duration) -> Result<Duration, Error> {
        self.set_in(self.volume()?, time)
    }

    fn set_in(&self, volume: OwnedFd, time: Duration) -> Result<Duration, Error> {
        let mut file = self.lock();
        // Opening a FIFO would block, and a link could lead out of the volume.
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let mode = Mode::from_raw_mode(0o644);
        openat(&volume, FILE, flags | OFlags::CLOEXEC, mode).map_err(|errno| self.failed(errno))?;
        let now = Instant::now();
        let earlier = file.as_ref().map_or(now, |file| file.until);
        let until = earlier.max(now + time);
        *file = Some(MarkFile { until, volume });
        drop(file);
        self.changed.notify_one();
        Ok(until - now)
    }

    /// Removes the mark of all clients.
    pub fn clear(&self) {
        let mut file = self.lock();
        if let Some(file) = file.take() {
            remove(&file.volume);
        }
    }

    /// Returns the time left; `None` if the sandbox is not marked.
    pub fn left(&self) -> Option<Duration> {
        let until = self.until()?;
        Some(until.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
    }

    fn until(&self) -> Option<Instant> {
        self.lock().as_ref().map(|file| file.until)
    }

    /// Removes the mark at the end of its time; never returns.
    pub async fn keep(&self) {
        loop {
            match self.until() {
                None => self.changed.notified().await,
                // The next iteration reads a changed time.
                Some(until) => tokio::select! {
                    () = self.changed.notified() => {}
                    () = tokio::time::sleep_until(until) => self.expire(),
                },
            }
        }
    }

    /// Removes the mark, unless a client has extended its time meanwhile.
    fn expire(&self) {
        let mut file = self.lock();
        let over = |file: &mut MarkFile| file.until <= Instant::now();
        if let Some(file) = file.take_if(over) {
            remove(&file.volume);
        }
    }

    /// Opens the directory, if a volume is mounted on it.
    ///
    /// The agent does not read a file outside of the volume.
    fn volume(&self) -> Result<OwnedFd, Error> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let opened = openat(CWD, self.directory.as_path(), flags, Mode::empty());
        let volume = match opened {
            Err(Errno::NOENT | Errno::NOTDIR) => return Err(self.missing()),
            other => other.map_err(|errno| self.failed(errno))?,
        };
        let own = fstat(&volume).map_err(|errno| self.failed(errno))?;
        let parent = statat(&volume, "..", AtFlags::empty());
        let parent = parent.map_err(|errno| self.failed(errno))?;
        match own.st_dev == parent.st_dev {
            true => Err(self.missing()),
            false => Ok(volume),
        }
    }

    fn missing(&self) -> Error {
        Error::NoVolume(shown(&self.directory))
    }

    fn failed(&self, errno: Errno) -> Error {
        Error::Io {
            directory: shown(&self.directory),
            errno,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<MarkFile>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn remove(volume: &OwnedFd) {
    if let Err(error) = unlinkat(volume, FILE, AtFlags::empty())
        && error != Errno::NOENT
    {
        tracing::warn!(%error, "cannot remove the busy mark; the sandbox stays awake");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a mark in a directory that stands for a volume.
    fn marked(directory: &Path, seconds: &[u64]) -> Arc<Mark> {
        let mark = Mark::new(directory.into());
        for second in seconds {
            let time = Duration::from_secs(*second);
            mark.set_in(open(directory), time).unwrap();
        }
        mark
    }

    fn open(directory: &Path) -> OwnedFd {
        openat(CWD, directory, OFlags::DIRECTORY, Mode::empty()).unwrap()
    }

    #[test]
    fn without_a_volume_nothing_is_marked() {
        let directory = tempfile::tempdir().unwrap();
        let mark = Mark::new(directory.path().into());
        let refused = mark.set(DEFAULT).unwrap_err();
        assert!(refused.to_string().contains("emptyDir"), "{refused}");
        assert!(!directory.path().join(FILE).exists());
        let mark = Mark::new(directory.path().join("nowhere"));
        assert!(matches!(mark.set(DEFAULT), Err(Error::NoVolume(_))));
        assert_eq!(mark.left(), None);
    }

    #[tokio::test]
    async fn the_latest_requested_time_counts() {
        let directory = tempfile::tempdir().unwrap();
        for (asked, most) in [
            (vec![500], 500),
            (vec![500, 6000], 6000),
            (vec![6000, 500], 6000),
        ] {
            let mark = marked(directory.path(), &asked);
            let left = mark.left().unwrap().as_secs();
            assert!((most - 400..=most).contains(&left), "{asked:?}: {left}");
            assert!(directory.path().join(FILE).exists());
        }
    }

    #[tokio::test]
    async fn a_mark_is_removed_at_the_latest_requested_time() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join(FILE);
        let mark = marked(directory.path(), &[]);
        let soon = Duration::from_millis(20);
        mark.set_in(open(directory.path()), soon).unwrap();
        mark.set_in(open(directory.path()), DEFAULT).unwrap();
        // Longer than the first requested time.
        let kept = tokio::time::timeout(10 * soon, mark.keep()).await;
        assert!(kept.is_err() && file.exists());
        assert!(mark.left().is_some());

        mark.clear();
        assert!(!file.exists());
        mark.set_in(open(directory.path()), soon).unwrap();
        let gone = async {
            while file.exists() {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = mark.keep() => unreachable!("keep never returns"),
            () = gone => {}
        }
        assert_eq!(mark.left(), None);
    }

    #[tokio::test]
    async fn a_fifo_or_a_link_in_place_of_the_mark_does_not_block_and_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("target");
        std::os::unix::fs::symlink(&target, directory.path().join(FILE)).unwrap();
        let mark = Mark::new(directory.path().into());
        mark.set_in(open(directory.path()), DEFAULT).unwrap_err();
        assert!(!target.exists());
        std::fs::remove_file(directory.path().join(FILE)).unwrap();
        rustix::fs::mknodat(
            CWD,
            directory.path().join(FILE),
            rustix::fs::FileType::Fifo,
            Mode::from_raw_mode(0o644),
            0,
        )
        .unwrap();
        // The FIFO has no reader: without NONBLOCK the open would block forever.
        let refused = mark.set_in(open(directory.path()), DEFAULT).unwrap_err();
        assert!(
            matches!(
                refused,
                Error::Io {
                    errno: Errno::NXIO,
                    ..
                }
            ),
            "{refused}"
        );
    }
}

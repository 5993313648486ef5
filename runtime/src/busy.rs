//! The busy mark: a file in the Pod's emptyDir `torpor`, by which Torpor's agent knows that the sandbox is not to fall asleep although nothing is seen of what it does.
//!
//! A program may make a file of its own there, `busy`; this is the other one, which stands for calls: it goes by itself when the time that was asked for is over. The agent sees that it is there, and nothing else of it.
//! The time that passes while the sandbox sleeps (somebody may put it to sleep by hand) does not count.

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

/// Name of the file; the agent's `node-agent/src/idle.rs` knows it too.
const FILE: &str = "busy-call";
/// The longest time that one call may ask for: who is busy for longer says so again, and who has died does not.
pub const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// What a call asks for that says nothing.
pub const DEFAULT: Duration = Duration::from_secs(60);

/// The mark could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(
        "no volume is mounted at {0}: mount an emptyDir of the name torpor there, or say in SANDBOX_BUSY_DIR where it is"
    )]
    NoVolume(String),
    #[error("cannot make the file {FILE} in {directory}: {errno}")]
    Io { directory: String, errno: Errno },
}

/// The mark of this process' callers: it is there until the latest of the times that they asked for.
#[derive(Debug)]
pub struct Mark {
    directory: PathBuf,
    made: Mutex<Option<Made>>,
    changed: Notify,
}

/// The file is there.
#[derive(Debug)]
struct Made {
    until: Instant,
    volume: OwnedFd,
}

impl Mark {
    /// The mark in `directory`, where the emptyDir is mounted. What an earlier process has left there is taken away: nobody knows any more how long it was to stay.
    pub fn new(directory: PathBuf) -> Arc<Self> {
        let mark = Self {
            directory,
            made: Mutex::new(None),
            changed: Notify::new(),
        };
        if let Ok(volume) = mark.volume() {
            remove(&volume);
        }
        Arc::new(mark)
    }

    /// Busy for so long from now on, at least; answers for how long.
    pub fn set(&self, time: Duration) -> Result<Duration, Error> {
        self.set_in(self.volume()?, time)
    }

    fn set_in(&self, volume: OwnedFd, time: Duration) -> Result<Duration, Error> {
        let mut made = self.lock();
        // A FIFO of that name would be waited for, and a link would lead elsewhere.
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let mode = Mode::from_raw_mode(0o644);
        openat(&volume, FILE, flags | OFlags::CLOEXEC, mode).map_err(|errno| self.failed(errno))?;
        let now = Instant::now();
        let earlier = made.as_ref().map_or(now, |made| made.until);
        let until = earlier.max(now + time);
        *made = Some(Made { until, volume });
        drop(made);
        self.changed.notify_one();
        Ok(until - now)
    }

    /// No longer, whoever asked.
    pub fn clear(&self) {
        let mut made = self.lock();
        if let Some(made) = made.take() {
            remove(&made.volume);
        }
    }

    /// For how long it is busy yet.
    pub fn left(&self) -> Option<Duration> {
        let until = self.until()?;
        Some(until.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
    }

    fn until(&self) -> Option<Instant> {
        self.lock().as_ref().map(|made| made.until)
    }

    /// Takes the mark away when its time is over; never ends.
    pub async fn keep(&self) {
        loop {
            match self.until() {
                None => self.changed.notified().await,
                // Both only wait: a later time is seen in the next round.
                Some(until) => tokio::select! {
                    () = self.changed.notified() => {}
                    () = tokio::time::sleep_until(until) => self.expire(),
                },
            }
        }
    }

    /// After the wait somebody may have asked for more.
    fn expire(&self) {
        let mut made = self.lock();
        let over = |made: &mut Made| made.until <= Instant::now();
        if let Some(made) = made.take_if(over) {
            remove(&made.volume);
        }
    }

    /// The directory, if a volume is mounted on it: a file anywhere else would say nothing to anybody.
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

    fn lock(&self) -> MutexGuard<'_, Option<Made>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn remove(volume: &OwnedFd) {
    if let Err(error) = unlinkat(volume, FILE, AtFlags::empty())
        && error != Errno::NOENT
    {
        tracing::warn!(%error, "the busy mark stays, and with it the sandbox awake");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mark in a directory that stands for a volume.
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
    fn where_no_volume_is_mounted_nothing_is_marked() {
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
    async fn the_latest_of_the_times_that_were_asked_for_counts() {
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
    async fn a_mark_goes_when_its_time_is_over_and_not_before_more_that_was_asked_for() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join(FILE);
        let mark = marked(directory.path(), &[]);
        let soon = Duration::from_millis(20);
        mark.set_in(open(directory.path()), soon).unwrap();
        mark.set_in(open(directory.path()), DEFAULT).unwrap();
        // Longer than the first would have had it.
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
            () = mark.keep() => unreachable!("it never ends"),
            () = gone => {}
        }
        assert_eq!(mark.left(), None);
    }

    #[tokio::test]
    async fn a_fifo_or_a_link_in_its_place_blocks_nobody_and_is_not_followed() {
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
        // Nobody reads from it: opened without NONBLOCK this would never end.
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

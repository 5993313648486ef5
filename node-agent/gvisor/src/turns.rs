//! How many sandboxes of this node are restored at once, and who comes first.
//!
//! Restores are done by processes that know nothing of each other (a keeper that has seen a packet, an exec, the agent), so
//! their limit is a set of locked files below the state directory: `turns/wake-0`, `turns/wake-1` and so on. Whoever restores
//! holds one of them. The kernel takes a lock back from a process that dies, so nothing is left of one that was killed.
//!
//! Somebody who waits for an answer comes before what was asked of the API or happens after a reboot: as long as such a one
//! waits or restores, it holds `turns/called` (shared), and the others try again later.
//!
//! A turn is for speed and not for safety: nobody waits longer than [`Patience`] says, and then restores without one. Whoever
//! has a turn waits for nobody who waits for one: it holds its own pod's lock and needs no other.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};

use crate::record::WakeCause;

/// Between two tries. A restore takes some fifty times as long, and fifty that wait cost one processor a hundredth.
const TRY_AGAIN: Duration = Duration::from_millis(5);

/// How long one waits for its turn at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// For those who wait for an answer to be served.
    pub courtesy: Duration,
    /// For a free turn.
    pub in_all: Duration,
}

impl Patience {
    /// The kubelet gives an exec and the making of a container two minutes.
    pub fn of(cause: WakeCause) -> Self {
        Self {
            courtesy: match is_waited_for(cause) {
                true => Duration::ZERO,
                false => Duration::from_secs(10),
            },
            in_all: Duration::from_secs(30),
        }
    }
}

/// Whether somebody waits for the sandbox' answer: everybody but the API, which wants it to run from now on.
fn is_waited_for(cause: WakeCause) -> bool {
    cause != WakeCause::Asked
}

/// The right to restore now; given back when dropped.
#[derive(Debug)]
pub struct Turn {
    _called: Option<Flock<File>>,
    _slot: Option<Flock<File>>,
}

enum Slot {
    Mine(Flock<File>),
    /// There is no limit, or none that can be kept here.
    Unneeded,
    AllTaken,
}

/// The turns of this node.
#[derive(Debug)]
pub struct Turns {
    dir: PathBuf,
    /// None: as many as want to.
    limit: Option<u32>,
}

impl Turns {
    /// `limit`: restores at once; 0 for as many as want to.
    pub fn new(state_dir: &Path, limit: u32) -> Self {
        Self {
            dir: state_dir.join("turns"),
            limit: (limit > 0).then_some(limit),
        }
    }

    /// Waits for a turn. Where files cannot be locked everybody has one.
    pub fn take(&self, cause: WakeCause) -> Turn {
        self.take_within(cause, Patience::of(cause))
    }

    fn take_within(&self, cause: WakeCause, patience: Patience) -> Turn {
        let began = Instant::now();
        let called = is_waited_for(cause).then(|| self.say_waiting()).flatten();
        let slot = loop {
            let waited = began.elapsed();
            let courteous = !is_waited_for(cause) && waited < patience.courtesy;
            if !(courteous && self.is_somebody_waiting()) {
                match self.slot() {
                    Slot::Mine(slot) => break Some(slot),
                    Slot::Unneeded => break None,
                    Slot::AllTaken if waited >= patience.in_all => break None,
                    Slot::AllTaken => {}
                }
            }
            std::thread::sleep(TRY_AGAIN);
        };
        Turn {
            _called: called,
            _slot: slot,
        }
    }

    /// Whether somebody who waits for an answer restores, or waits for a turn to.
    pub fn is_somebody_waiting(&self) -> bool {
        // Only a lock that somebody has says so; that there is no file, or none that can be locked, does not.
        let Some(file) = self.open("called") else {
            return false;
        };
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(_) => false,
            Err((_, errno)) => errno == nix::Error::EAGAIN,
        }
    }

    /// Who looks whether anybody waits has the file for a moment.
    fn say_waiting(&self) -> Option<Flock<File>> {
        let mut file = self.open("called")?;
        for _ in 0..100 {
            match Flock::lock(file, FlockArg::LockSharedNonblock) {
                Ok(lock) => return Some(lock),
                Err((same, _)) => file = same,
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        None
    }

    fn slot(&self) -> Slot {
        let Some(limit) = self.limit else {
            return Slot::Unneeded;
        };
        for slot in 0..limit {
            let Some(file) = self.open(&format!("wake-{slot}")) else {
                return Slot::Unneeded;
            };
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Slot::Mine(lock),
                Err((_, nix::Error::EAGAIN)) => {}
                Err(_) => return Slot::Unneeded,
            }
        }
        Slot::AllTaken
    }

    fn open(&self, name: &str) -> Option<File> {
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).write(true).mode(0o600);
        options.custom_flags(nix::libc::O_NOFOLLOW);
        let path = self.dir.join(name);
        match options.open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let mut dir = DirBuilder::new();
                dir.recursive(true).mode(0o700).create(&self.dir).ok()?;
                options.open(&path).ok()
            }
            other => other.ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const SHORT: Patience = Patience {
        courtesy: Duration::from_millis(50),
        in_all: Duration::from_millis(100),
    };
    /// Longer than any test waits.
    const LONG: Patience = Patience {
        courtesy: Duration::from_secs(60),
        in_all: Duration::from_secs(60),
    };

    fn turns(limit: u32) -> (tempfile::TempDir, Turns) {
        let dir = tempfile::tempdir().expect("a directory");
        let turns = Turns::new(dir.path(), limit);
        (dir, turns)
    }

    #[test]
    fn no_more_restore_at_once_than_the_limit_says_and_all_come_to_their_turn() {
        let (_dir, turns) = turns(3);
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for n in 0..20 {
                let (turns, now, most) = (&turns, &now, &most);
                let cause = [WakeCause::Called, WakeCause::Asked][n % 2];
                scope.spawn(move || {
                    let turn = turns.take_within(cause, LONG);
                    assert!(turn._slot.is_some());
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(2));
                    now.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        assert!(most.into_inner() <= 3);
    }

    #[test]
    fn without_a_limit_nobody_waits() {
        let (_dir, turns) = turns(0);
        let _held: Vec<Turn> = (0..50)
            .map(|_| turns.take_within(WakeCause::Called, LONG))
            .collect();
        assert!(turns.is_somebody_waiting());
    }

    #[test]
    fn where_nothing_can_be_locked_nobody_waits() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("turns"), b"no directory").expect("written");
        let turn = Turns::new(dir.path(), 1).take_within(WakeCause::Called, LONG);
        assert!(turn._slot.is_none() && turn._called.is_none());
    }

    #[test]
    fn who_waits_too_long_goes_without_a_turn() {
        let (_dir, turns) = turns(1);
        let _held = turns.take(WakeCause::Asked);
        let late = turns.take_within(WakeCause::Called, SHORT);
        assert!(late._slot.is_none());
    }

    #[test]
    fn who_waits_for_an_answer_comes_before_what_the_api_asks_for() {
        let (_dir, turns) = turns(1);
        let held = turns.take(WakeCause::Asked);
        let order = std::sync::Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let waits = |cause| {
                let (turns, order) = (&turns, &order);
                scope.spawn(move || {
                    let turn = turns.take_within(cause, LONG);
                    order.lock().expect("no panic").push(cause);
                    drop(turn);
                });
            };
            waits(WakeCause::Asked);
            waits(WakeCause::Called);
            while !turns.is_somebody_waiting() {
                std::thread::yield_now();
            }
            drop(held);
        });
        let order = order.into_inner().expect("no panic");
        assert_eq!(order, [WakeCause::Called, WakeCause::Asked]);
        assert!(!turns.is_somebody_waiting());
    }

    #[test]
    fn what_the_api_asks_for_does_not_wait_for_ever_for_those_who_wait_for_an_answer() {
        let (_dir, turns) = turns(2);
        let _called = turns.take(WakeCause::Called);
        let asked = turns.take_within(WakeCause::Asked, SHORT);
        assert!(asked._slot.is_some());
    }
}

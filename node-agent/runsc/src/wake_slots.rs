//! How many sandboxes of this node are restored at once, and who comes first.
//!
//! Restores are done by processes that know nothing of each other (a keeper that has seen a packet, an exec, the agent), so
//! their limit is a set of locked files below the state directory: `turns/wake-0`, `turns/wake-1` and so on. Whoever restores
//! holds one of them. The kernel takes a lock back from a process that dies, so nothing is left of one that was killed.
//!
//! Somebody who waits for an answer comes before what was asked of the API or happens after a reboot: as long as such a one
//! waits or restores, it holds `turns/called` (shared), and the others try again later.
//!
//! Whoever waits stands in a line, `turns/line`, in which namespaces take turns ([`torpor_core::wake_line`]): a tenant who needs a hundred
//! sandboxes at once holds up his own. Only the locked files limit; the line says who may try to lock one, and leaves one free for each that
//! is before. So one that stands still before the others keeps one turn from them, and no more, for as long as it could be waiting.
//!
//! A turn is for speed and not for safety: nobody waits longer than [`Patience`] says, and then restores without one. Whoever
//! has a turn waits for nobody who waits for one: it holds its own pod's lock and needs no other.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use torpor_core::ids::Namespace;

use torpor_records::WakeCause;
use torpor_records::locks;

mod line;
use line::{Line, Waiting};

/// Between two tries of those that are next. A restore takes some ten times as long, and those that have their turns need the processors: each try
/// reads the line.
const TRY_AGAIN: Duration = Duration::from_millis(20);
/// Of those that are behind, for each restore that has to end before: less than half of what the fastest takes, so that nothing is lost. Each try
/// reads the line, and who restores needs the processors.
const A_RESTORE: Duration = Duration::from_millis(50);
/// And at most: those before it may all be gone.
const TRY_AGAIN_LATER: Duration = Duration::from_millis(500);

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
            courtesy: match cause.is_waited_for() {
                true => Duration::ZERO,
                false => Duration::from_secs(10),
            },
            in_all: Duration::from_secs(30),
        }
    }
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
    line: Line,
    /// None: as many as want to.
    limit: Option<usize>,
}

impl Turns {
    /// `limit`: restores at once; 0 for as many as want to.
    pub fn new(state_dir: &Path, limit: u32) -> Self {
        let dir = state_dir.join("turns");
        Self {
            line: Line {
                dir: dir.join("line"),
            },
            dir,
            limit: usize::try_from(limit).ok().filter(|limit| *limit > 0),
        }
    }

    /// Waits for a turn to restore a sandbox of this namespace. Where files cannot be locked everybody has one.
    pub fn take(&self, cause: WakeCause, namespace: &Namespace) -> Turn {
        self.take_within(cause, namespace, Patience::of(cause))
    }

    fn take_within(&self, cause: WakeCause, namespace: &Namespace, patience: Patience) -> Turn {
        let began = Instant::now();
        let mut courteous = !cause.is_waited_for();
        let called = (!courteous).then(|| self.say_waiting()).flatten();
        let mut waiting = self.join(namespace, courteous);
        let slot = loop {
            let waited = began.elapsed();
            if courteous && waited >= patience.courtesy {
                courteous = false;
                drop(waiting);
                waiting = self.join(namespace, courteous);
            }
            // Whoever has no place in the line goes when it can: one that cannot be kept keeps nobody waiting.
            let turns = self.limit.unwrap_or(usize::MAX);
            let ahead = (waiting.as_ref()).map_or(0, |waiting| self.line.ahead(waiting, turns));
            if !(courteous && self.is_somebody_waiting()) {
                match self.slot(ahead) {
                    Slot::Mine(slot) => break Some(slot),
                    Slot::Unneeded => break None,
                    Slot::AllTaken if waited >= patience.in_all => break None,
                    Slot::AllTaken => {}
                }
            }
            std::thread::sleep(self.between_tries(ahead));
        };
        Turn {
            _called: called,
            _slot: slot,
        }
    }

    fn join(&self, namespace: &Namespace, patient: bool) -> Option<Waiting> {
        self.limit.and_then(|_| self.line.join(namespace, patient))
    }

    fn between_tries(&self, ahead: usize) -> Duration {
        let restores = ahead / self.limit.unwrap_or(usize::MAX);
        let restores = u32::try_from(restores).unwrap_or(u32::MAX);
        let wait = A_RESTORE.saturating_mul(restores);
        wait.clamp(TRY_AGAIN, TRY_AGAIN_LATER)
    }

    /// Whether somebody who waits for an answer restores, or waits for a turn to.
    pub fn is_somebody_waiting(&self) -> bool {
        // Only a lock that somebody has says so; that there is no file, or none that can be locked, does not.
        let Some(file) = self.open("called") else {
            return false;
        };
        matches!(locks::try_exclusive(file), Ok(None))
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

    /// A turn, if more than `ahead` are free.
    fn slot(&self, ahead: usize) -> Slot {
        let Some(limit) = self.limit else {
            return Slot::Unneeded;
        };
        if ahead >= limit {
            return Slot::AllTaken;
        }
        // Held for a moment only: whoever is before looks again soon.
        let mut left = Vec::new();
        for slot in 0..limit {
            let Some(file) = self.open(&format!("wake-{slot}")) else {
                return Slot::Unneeded;
            };
            match locks::try_exclusive(file) {
                Ok(Some(lock)) if left.len() == ahead => return Slot::Mine(lock),
                Ok(Some(lock)) => left.push(lock),
                Ok(None) => {}
                Err(_) => return Slot::Unneeded,
            }
        }
        Slot::AllTaken
    }

    fn open(&self, name: &str) -> Option<File> {
        let path = self.dir.join(name);
        match locks::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                locks::make_dir(&self.dir).ok()?;
                locks::open(&path).ok()
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

    pub(super) fn namespace(name: &str) -> Namespace {
        Namespace::new(name).expect("a name")
    }

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
                let of = namespace(["a", "b", "c"][n % 3]);
                scope.spawn(move || {
                    let turn = turns.take_within(cause, &of, LONG);
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
            .map(|_| turns.take_within(WakeCause::Called, &namespace("a"), LONG))
            .collect();
        assert!(turns.is_somebody_waiting());
    }

    #[test]
    fn where_nothing_can_be_locked_nobody_waits() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("turns"), b"no directory").expect("written");
        let turns = Turns::new(dir.path(), 1);
        let turn = turns.take_within(WakeCause::Called, &namespace("a"), LONG);
        assert!(turn._slot.is_none() && turn._called.is_none());
    }

    #[test]
    fn who_waits_too_long_goes_without_a_turn() {
        let (_dir, turns) = turns(1);
        let _held = turns.take(WakeCause::Asked, &namespace("a"));
        let late = turns.take_within(WakeCause::Called, &namespace("a"), SHORT);
        assert!(late._slot.is_none());
    }

    #[test]
    fn who_waits_for_an_answer_comes_before_what_the_api_asks_for() {
        let (_dir, turns) = turns(1);
        let held = turns.take(WakeCause::Asked, &namespace("a"));
        let order = std::sync::Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let waits = |cause| {
                let (turns, order) = (&turns, &order);
                scope.spawn(move || {
                    let turn = turns.take_within(cause, &namespace("a"), LONG);
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
        let _called = turns.take(WakeCause::Called, &namespace("a"));
        let asked = turns.take_within(WakeCause::Asked, &namespace("a"), SHORT);
        assert!(asked._slot.is_some());
    }

    #[test]
    fn a_namespace_that_needs_many_sandboxes_does_not_keep_another_waiting() {
        let (_dir, turns) = turns(1);
        let held = turns.take(WakeCause::Called, &namespace("many"));
        let order = std::sync::Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let names = ["many", "many", "many", "many", "one"];
            for (place, name) in names.into_iter().enumerate() {
                let (turns, order) = (&turns, &order);
                scope.spawn(move || {
                    let turn = turns.take_within(WakeCause::Called, &namespace(name), LONG);
                    order.lock().expect("no panic").push(name);
                    drop(turn);
                });
                while turns.line.places().len() <= place {
                    std::thread::yield_now();
                }
            }
            drop(held);
        });
        let order = order.into_inner().expect("no panic");
        assert_eq!(order, ["many", "many", "one", "many", "many"]);
        assert_eq!(turns.line.places(), []);
    }

    #[test]
    fn one_that_stands_still_before_the_others_keeps_one_turn_from_them_and_no_more() {
        let (_dir, turns) = turns(2);
        let still = turns.line.join(&namespace("still"), false);
        let take = |patience| turns.take_within(WakeCause::Called, &namespace("a"), patience);
        let first = take(LONG);
        assert!(first._slot.is_some());
        let late = take(SHORT);
        assert!(late._slot.is_none(), "who waits too long goes all the same");
        drop(still);
        let second = take(LONG);
        assert!(second._slot.is_some());
    }

    #[test]
    fn nobody_waits_for_an_answer_of_who_is_woken_by_the_api_or_the_clock() {
        for cause in WakeCause::ALL {
            let for_itself = matches!(cause, WakeCause::Asked | WakeCause::Clock);
            let courtesy = Patience::of(cause).courtesy;
            assert_eq!(courtesy > Duration::ZERO, for_itself, "{cause:?}");
        }
    }

    #[test]
    fn those_who_were_killed_while_they_waited_keep_nobody_waiting() {
        let (_dir, turns) = turns(1);
        std::fs::create_dir_all(&turns.line.dir).expect("made");
        for left in ["called-0-gone", "called-1-gone", "asked-0-gone"] {
            std::fs::write(turns.line.dir.join(left), b"").expect("written");
        }
        for cause in [WakeCause::Called, WakeCause::Asked] {
            let turn = turns.take_within(cause, &namespace("lives"), LONG);
            assert!(turn._slot.is_some(), "{cause:?}");
        }
        assert_eq!(turns.line.places(), []);
    }
}

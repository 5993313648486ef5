//! The limit on concurrent restores of this node's sandboxes, and their order.
//!
//! Restores are done by processes that do not communicate: commands of the pods' shims, after a
//! packet, for an exec or for the agent. So the limit is a set of locked files below the state
//! directory: `turns/wake-0`, `turns/wake-1` and so on. A process holds one of the locks while it
//! restores: its turn. The kernel releases a lock when its process dies, so a killed process leaves
//! nothing behind.
//!
//! A restore for a waiting client comes before a restore that the API requests or that follows a
//! reboot. Such a restore holds `turns/called` (shared) while it waits and runs, and the other
//! restores try again later.
//!
//! Waiting restores stand in a line, `turns/line`, in which namespaces take turns
//! ([`torpor_core::wake_line`]). So a tenant with a hundred restores at once delays only its own.
//! The locked files alone limit. The line gives the order: a restore takes a lock only where as
//! many others are free as restores are ahead of it. So a stopped process at the front of the line
//! keeps one turn from the others, and no more, for as long as it counts as waiting.
//!
//! Turns are for speed and not for safety: a restore waits no longer than its [`WaitLimits`], and
//! then goes on without a turn. A process with a turn never waits for a process without one: it
//! holds its own pod's lock and needs no other.

use std::fs::{File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use torpor_core::ids::Namespace;

use torpor_records::WakeCause;
use torpor_records::locks;

mod line;
use line::{Line, Waiting};

/// Time between two attempts of a restore at the front of the line. A restore takes some ten times
/// as long. Each attempt reads the line, and running restores need the processors.
const MIN_RETRY: Duration = Duration::from_millis(20);
/// Time between two attempts of a restore further behind, for each restore that has to end before.
/// It is less than half of the fastest restore, so that no time is lost.
const RETRY_PER_RESTORE: Duration = Duration::from_millis(50);
/// Longest time between two attempts: the restores ahead may all be gone.
const MAX_RETRY: Duration = Duration::from_millis(500);

/// The limits on a restore's wait for its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitLimits {
    /// Time for which the restore lets restores for waiting clients pass.
    pub courtesy: Duration,
    /// Time for the whole wait.
    pub in_all: Duration,
}

impl WaitLimits {
    /// Returns the limits for a cause. The kubelet allows two minutes for an exec and for the
    /// creation of a container.
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

/// The right to restore now. Dropping it releases the right.
#[derive(Debug)]
pub struct WakeSlot {
    _called: Option<Flock<File>>,
    _slot: Option<Flock<File>>,
}

/// Result of an attempt to get a turn.
enum Slot {
    Taken(Flock<File>),
    /// There is no limit, or its files cannot be locked here.
    Unneeded,
    NoneFree,
}

/// The turns of this node.
#[derive(Debug)]
pub struct WakeSlots {
    dir: PathBuf,
    line: Line,
    /// Concurrent restores. None: no limit.
    limit: Option<usize>,
}

impl WakeSlots {
    /// `limit`: concurrent restores; 0 for no limit.
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

    /// Waits for a turn to restore a sandbox of this namespace. Returns at once where files cannot
    /// be locked.
    pub fn take(&self, cause: WakeCause, namespace: &Namespace) -> WakeSlot {
        self.take_within(cause, namespace, WaitLimits::of(cause))
    }

    fn take_within(
        &self,
        cause: WakeCause,
        namespace: &Namespace,
        patience: WaitLimits,
    ) -> WakeSlot {
        let began = Instant::now();
        let mut courteous = !cause.is_waited_for();
        let called = (!courteous).then(|| self.lock_called()).flatten();
        let mut waiting = self.join(namespace, courteous);
        let slot = loop {
            let waited = began.elapsed();
            if courteous && waited >= patience.courtesy {
                courteous = false;
                drop(waiting);
                waiting = self.join(namespace, courteous);
            }
            // A restore without a place in the line goes when a turn is free: a line that cannot be
            // kept delays no restore.
            let turns = self.limit.unwrap_or(usize::MAX);
            let ahead = (waiting.as_ref()).map_or(0, |waiting| self.line.ahead(waiting, turns));
            if !(courteous && self.is_client_waiting()) {
                match self.slot(ahead) {
                    Slot::Taken(slot) => break Some(slot),
                    Slot::Unneeded => break None,
                    Slot::NoneFree if waited >= patience.in_all => break None,
                    Slot::NoneFree => {}
                }
            }
            std::thread::sleep(self.between_tries(ahead));
        };
        WakeSlot {
            _called: called,
            _slot: slot,
        }
    }

    /// Takes a place in the line. None where there is no limit, or no line can be kept.
    fn join(&self, namespace: &Namespace, courteous: bool) -> Option<Waiting> {
        self.limit
            .and_then(|_| self.line.join(namespace, courteous))
    }

    fn between_tries(&self, ahead: usize) -> Duration {
        let restores = ahead / self.limit.unwrap_or(usize::MAX);
        let restores = u32::try_from(restores).unwrap_or(u32::MAX);
        let wait = RETRY_PER_RESTORE.saturating_mul(restores);
        wait.clamp(MIN_RETRY, MAX_RETRY)
    }

    /// Reports whether a restore for a waiting client runs, or waits for its turn.
    pub fn is_client_waiting(&self) -> bool {
        // Only a held lock means that. A missing file, or a file that cannot be locked, does not.
        let file = locks::open_existing(&self.dir.join("called"));
        file.is_ok_and(|file| matches!(locks::try_exclusive(file), Ok(None)))
    }

    /// Takes the shared lock of a restore for a waiting client. [`Self::is_client_waiting`] of
    /// another process holds the lock for a moment, so this tries several times.
    fn lock_called(&self) -> Option<Flock<File>> {
        let mut file = self.open("called")?;
        // The agent reads whether it is locked.
        file.set_permissions(Permissions::from_mode(0o644)).ok()?;
        for _ in 0..100 {
            match Flock::lock(file, FlockArg::LockSharedNonblock) {
                Ok(lock) => return Some(lock),
                Err((same, _)) => file = same,
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        None
    }

    /// Takes a turn where more than `ahead` turns are free.
    fn slot(&self, ahead: usize) -> Slot {
        let Some(limit) = self.limit else {
            return Slot::Unneeded;
        };
        if ahead >= limit {
            return Slot::NoneFree;
        }
        // Locks for the restores ahead, which try again soon: held for a moment only.
        let mut left_free = Vec::new();
        for slot in 0..limit {
            let Some(file) = self.open(&format!("wake-{slot}")) else {
                return Slot::Unneeded;
            };
            match locks::try_exclusive(file) {
                Ok(Some(lock)) if left_free.len() == ahead => return Slot::Taken(lock),
                Ok(Some(lock)) => left_free.push(lock),
                Ok(None) => {}
                Err(_) => return Slot::Unneeded,
            }
        }
        Slot::NoneFree
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

    const SHORT: WaitLimits = WaitLimits {
        courtesy: Duration::from_millis(50),
        in_all: Duration::from_millis(100),
    };
    /// Longer than any test waits.
    const LONG: WaitLimits = WaitLimits {
        courtesy: Duration::from_secs(60),
        in_all: Duration::from_secs(60),
    };

    pub(super) fn namespace(name: &str) -> Namespace {
        Namespace::new(name).expect("a name")
    }

    fn turns(limit: u32) -> (tempfile::TempDir, WakeSlots) {
        let dir = tempfile::tempdir().expect("a directory");
        let turns = WakeSlots::new(dir.path(), limit);
        (dir, turns)
    }

    #[test]
    fn no_more_sandboxes_restore_at_once_than_the_limit_and_each_gets_its_turn() {
        let (_dir, turns) = turns(3);
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for n in 0..20 {
                let (turns, now, most) = (&turns, &now, &most);
                let cause = [WakeCause::Exec, WakeCause::Asked][n % 2];
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
    fn without_a_limit_no_wake_waits() {
        let (_dir, turns) = turns(0);
        let _held: Vec<WakeSlot> = (0..50)
            .map(|_| turns.take_within(WakeCause::Exec, &namespace("a"), LONG))
            .collect();
        assert!(turns.is_client_waiting());
    }

    #[test]
    fn without_lockable_files_no_wake_waits() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("turns"), b"no directory").expect("written");
        let turns = WakeSlots::new(dir.path(), 1);
        let turn = turns.take_within(WakeCause::Exec, &namespace("a"), LONG);
        assert!(turn._slot.is_none() && turn._called.is_none());
    }

    #[test]
    fn a_wake_that_waits_too_long_goes_on_without_a_turn() {
        let (_dir, turns) = turns(1);
        let _held = turns.take(WakeCause::Asked, &namespace("a"));
        let late = turns.take_within(WakeCause::Exec, &namespace("a"), SHORT);
        assert!(late._slot.is_none());
    }

    #[test]
    fn a_wake_for_a_caller_comes_before_a_wake_that_the_api_requests() {
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
            waits(WakeCause::Exec);
            while !turns.is_client_waiting() {
                std::thread::yield_now();
            }
            drop(held);
        });
        let order = order.into_inner().expect("no panic");
        assert_eq!(order, [WakeCause::Exec, WakeCause::Asked]);
        assert!(!turns.is_client_waiting());
    }

    #[test]
    fn a_wake_that_the_api_requests_waits_for_wakes_of_callers_within_a_limit() {
        let (_dir, turns) = turns(2);
        let _called = turns.take(WakeCause::Exec, &namespace("a"));
        let asked = turns.take_within(WakeCause::Asked, &namespace("a"), SHORT);
        assert!(asked._slot.is_some());
    }

    #[test]
    fn a_namespace_that_needs_many_sandboxes_does_not_keep_another_waiting() {
        let (_dir, turns) = turns(1);
        let held = turns.take(WakeCause::Exec, &namespace("many"));
        let order = std::sync::Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            let names = ["many", "many", "many", "many", "one"];
            for (place, name) in names.into_iter().enumerate() {
                let (turns, order) = (&turns, &order);
                scope.spawn(move || {
                    let turn = turns.take_within(WakeCause::Exec, &namespace(name), LONG);
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
    fn a_stalled_process_in_the_line_takes_one_turn_and_no_more() {
        let (_dir, turns) = turns(2);
        let still = turns.line.join(&namespace("still"), false);
        let take = |patience| turns.take_within(WakeCause::Exec, &namespace("a"), patience);
        let first = take(LONG);
        assert!(first._slot.is_some());
        let late = take(SHORT);
        assert!(late._slot.is_none(), "who waits too long goes all the same");
        drop(still);
        let second = take(LONG);
        assert!(second._slot.is_some());
    }

    #[test]
    fn only_wakes_by_the_api_or_the_clock_give_way_to_callers() {
        for cause in WakeCause::ALL {
            let for_itself = matches!(cause, WakeCause::Asked | WakeCause::Clock);
            let courtesy = WaitLimits::of(cause).courtesy;
            assert_eq!(courtesy > Duration::ZERO, for_itself, "{cause:?}");
        }
    }

    #[test]
    fn processes_killed_in_the_line_keep_no_wake_waiting() {
        let (_dir, turns) = turns(1);
        std::fs::create_dir_all(&turns.line.dir).expect("made");
        for left in ["called-0-gone", "called-1-gone", "asked-0-gone"] {
            std::fs::write(turns.line.dir.join(left), b"").expect("written");
        }
        for cause in [WakeCause::Exec, WakeCause::Asked] {
            let turn = turns.take_within(cause, &namespace("lives"), LONG);
            assert!(turn._slot.is_some(), "{cause:?}");
        }
        assert_eq!(turns.line.places(), []);
    }
}

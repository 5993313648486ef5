//! The life of a container's first process, or of an exec'd one, as containerd sees it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

/// The end of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exit {
    pub(crate) code: u8,
    pub(crate) at: SystemTime,
}

/// How far a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Created,
    Started,
    Ended(Exit),
}

/// Time between two looks whether a caller still waits: each wait holds a thread.
const LOOK_INTERVAL: Duration = Duration::from_secs(60);

/// The stage of a process, whose end can be waited for.
#[derive(Debug)]
pub(crate) struct Life {
    stage: Mutex<Stage>,
    ended: Condvar,
}

impl Life {
    pub(crate) fn new() -> Self {
        Self {
            stage: Mutex::new(Stage::Created),
            ended: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stage(&self) -> Stage {
        *self.lock()
    }

    pub(crate) fn exit(&self) -> Option<Exit> {
        match self.stage() {
            Stage::Ended(exit) => Some(exit),
            Stage::Created | Stage::Started => None,
        }
    }

    /// Records the start, unless the process has ended.
    pub(crate) fn start(&self) {
        let mut stage = self.lock();
        if *stage == Stage::Created {
            *stage = Stage::Started;
        }
    }

    /// Records the end; returns it. The first end stays.
    pub(crate) fn end(&self, code: u8) -> Exit {
        let mut stage = self.lock();
        if let Stage::Ended(exit) = *stage {
            return exit;
        }
        let at = SystemTime::now();
        let exit = Exit { code, at };
        *stage = Stage::Ended(exit);
        self.ended.notify_all();
        exit
    }

    /// Waits for the end.
    pub(crate) fn wait(&self) -> Exit {
        loop {
            if let Some(exit) = self.wait_unless(|| false) {
                return exit;
            }
        }
    }

    /// Waits for the end; none once `is_over`, which is asked from time to time.
    pub(crate) fn wait_unless(&self, is_over: impl Fn() -> bool) -> Option<Exit> {
        let mut stage = self.lock();
        loop {
            if let Stage::Ended(exit) = *stage {
                return Some(exit);
            }
            if is_over() {
                return None;
            }
            let woken = self.ended.wait_timeout(stage, LOOK_INTERVAL);
            stage = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_waiters_get_the_first_end_of_a_process() {
        let life = Life::new();
        assert_eq!(life.stage(), Stage::Created);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| life.wait());
            life.start();
            assert_eq!((life.stage(), life.exit()), (Stage::Started, None));
            let exit = life.end(3);
            assert_eq!(life.end(137), exit);
            assert_eq!(waits.join().expect("no panic"), exit);
        });
        life.start();
        assert_eq!(
            life.exit().map(|exit| exit.code),
            Some(3),
            "an end is final"
        );
    }
}

//! The life of a container's first process, or of an exec'd one, as containerd sees it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

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
        let mut stage = self.lock();
        loop {
            if let Stage::Ended(exit) = *stage {
                return exit;
            }
            let woken = self.ended.wait(stage);
            stage = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_end_is_the_one_that_all_see() {
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

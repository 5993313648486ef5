//! The processes that execs have started in the container. Each has a waiter, which the shim takes for it, and kills when it takes too long (a probe). The
//! kernel ends the waiter alone, so that somebody else has to see it and end the process in the sandbox.
//!
//! Waiter and keeper have a pipe: the waiter leaves a byte in it when the process has ended, and one that was killed leaves none.

use std::os::fd::{AsFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// A descriptor each. More at once are not looked after: the keeper needs some for what else is asked of it.
const MOST_EXECS: usize = 256;

#[derive(Debug)]
struct Exec {
    /// In the sandbox.
    pid: i32,
    /// Its waiter has the other end.
    end: OwnedFd,
}

#[derive(Debug, Default)]
pub(super) struct Execs(Vec<Exec>);

impl Execs {
    /// `end`: of the pipe into which the waiter of process `pid` writes.
    pub(super) fn add(&mut self, pid: i32, end: OwnedFd) {
        if self.0.len() < MOST_EXECS {
            self.0.push(Exec { pid, end });
        }
    }

    pub(super) fn interests(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.0.iter().map(Exec::interest)
    }

    /// The processes whose waiters were killed since the last call.
    pub(super) fn abandoned(&mut self) -> Vec<i32> {
        let over = self.0.extract_if(.., |exec| exec.is_over());
        over.filter(Exec::was_abandoned)
            .map(|exec| exec.pid)
            .collect()
    }
}

impl Exec {
    fn interest(&self) -> PollFd<'_> {
        PollFd::new(self.end.as_fd(), PollFlags::POLLIN)
    }

    fn is_over(&self) -> bool {
        // What cannot be looked at is looked at again.
        poll(&mut [self.interest()], PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// Of one that is over: whether nobody has said that the process has ended.
    fn was_abandoned(&self) -> bool {
        matches!(rustix::io::read(&self.end, &mut [0_u8; 1]), Ok(0))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_process_whose_waiter_was_killed_is_told_once_and_one_that_ended_never() {
        let mut execs = Execs::default();
        let mut begin = |pid| {
            let (end, waiter) = std::io::pipe().expect("a pipe");
            execs.add(pid, end.into());
            waiter
        };
        let (mut ended, killed, runs) = (begin(1), begin(2), begin(3));
        assert_eq!(execs.abandoned(), [0; 0]);
        ended.write_all(&[0]).expect("said");
        drop(ended);
        drop(killed);
        let mut fds: Vec<PollFd<'_>> = execs.interests().collect();
        assert_eq!(poll(&mut fds, PollTimeout::from(10_000_u16)), Ok(2));
        assert_eq!(execs.abandoned(), [2]);
        assert_eq!(execs.abandoned(), [0; 0]);
        drop(runs);
        assert_eq!(execs.abandoned(), [3]);
        assert_eq!(execs.interests().count(), 0);
    }

    #[test]
    fn no_number_of_execs_takes_all_descriptors() {
        let mut execs = Execs::default();
        for pid in 0..300 {
            let (end, _waiter) = std::io::pipe().expect("a pipe");
            execs.add(pid, end.into());
        }
        assert_eq!(execs.interests().count(), MOST_EXECS);
    }
}

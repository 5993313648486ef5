//! The processes that execs have started in the container.
//!
//! The shim watches a waiter in place of each process, and kills the waiter if the process takes
//! too long (a probe). The kernel then ends the waiter alone, so the keeper has to detect that and
//! end the process in the sandbox.
//!
//! A pipe connects waiter and keeper. The waiter writes a byte once the process has ended. A waiter
//! that was killed has written none.

use std::os::fd::{AsFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// The largest number of execs in the list. Each takes a descriptor, and the keeper needs some for
/// other requests. The keeper does not watch further execs.
const MAX_EXECS: usize = 256;

#[derive(Debug)]
struct Exec {
    /// In the sandbox.
    pid: i32,
    /// The reading end of the pipe; the waiter has the other one.
    pipe: OwnedFd,
}

#[derive(Debug, Default)]
pub(super) struct Execs(Vec<Exec>);

impl Execs {
    /// Adds a process. `pipe`: the reading end of its waiter's pipe.
    pub(super) fn add(&mut self, pid: i32, pipe: OwnedFd) {
        if self.0.len() < MAX_EXECS {
            self.0.push(Exec { pid, pipe });
        }
    }

    pub(super) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.0.iter().map(Exec::poll_fd)
    }

    /// Returns the processes whose waiters were killed since the last call. Removes all execs that
    /// are over.
    pub(super) fn abandoned(&mut self) -> Vec<i32> {
        let over = self.0.extract_if(.., |exec| exec.is_over());
        over.filter(Exec::was_abandoned)
            .map(|exec| exec.pid)
            .collect()
    }
}

impl Exec {
    fn poll_fd(&self) -> PollFd<'_> {
        PollFd::new(self.pipe.as_fd(), PollFlags::POLLIN)
    }

    fn is_over(&self) -> bool {
        // If poll fails, the next call polls again.
        poll(&mut [self.poll_fd()], PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// Reports whether the waiter of an exec that is over was killed: the pipe has no byte.
    fn was_abandoned(&self) -> bool {
        matches!(rustix::io::read(&self.pipe, &mut [0_u8; 1]), Ok(0))
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
            let (pipe, waiter) = std::io::pipe().expect("a pipe");
            execs.add(pid, pipe.into());
            waiter
        };
        let (mut ended, killed, runs) = (begin(1), begin(2), begin(3));
        assert_eq!(execs.abandoned(), [0; 0]);
        ended.write_all(&[0]).expect("said");
        drop(ended);
        drop(killed);
        let mut fds: Vec<PollFd<'_>> = execs.poll_fds().collect();
        assert_eq!(poll(&mut fds, PollTimeout::from(10_000_u16)), Ok(2));
        assert_eq!(execs.abandoned(), [2]);
        assert_eq!(execs.abandoned(), [0; 0]);
        drop(runs);
        assert_eq!(execs.abandoned(), [3]);
        assert_eq!(execs.poll_fds().count(), 0);
    }

    #[test]
    fn no_number_of_execs_takes_all_descriptors() {
        let mut execs = Execs::default();
        for pid in 0..300 {
            let (pipe, _waiter) = std::io::pipe().expect("a pipe");
            execs.add(pid, pipe.into());
        }
        assert_eq!(execs.poll_fds().count(), MAX_EXECS);
    }
}

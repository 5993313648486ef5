//! The programs that a keeper has started: commands of the shim.
//!
//! The keeper detects their ends at once. It removes them from the process table, unless the shim's
//! reaper was faster.

use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;

use nix::poll::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// The purpose of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A wake because of a packet or of input.
    Wake,
    /// One forwarded connection.
    Forward,
}

#[derive(Debug)]
struct Program {
    purpose: Purpose,
    child: Child,
    /// Readable when the program has ended. `None` if no descriptor was left: then the end is
    /// detected at the next event.
    pidfd: Option<OwnedFd>,
}

/// The programs that run, or have ended since the last [`Children::reap`].
///
/// The keeper polls a descriptor for each and not a signal: the shim's reaper handles SIGCHLD, and
/// a blocked SIGCHLD would be blocked in all processes that these programs run, too.
#[derive(Debug, Default)]
pub(super) struct Children(Vec<Program>);

impl Children {
    pub(super) fn add(&mut self, purpose: Purpose, child: Child) {
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).ok();
        self.0.push(Program {
            purpose,
            child,
            pidfd,
        });
    }

    pub(super) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let pidfds = self.0.iter().filter_map(|program| program.pidfd.as_ref());
        pidfds.map(|pidfd| PollFd::new(pidfd.as_fd(), PollFlags::POLLIN))
    }

    /// Removes the programs that have ended, and returns their purposes.
    ///
    /// Their exit codes do not matter: each program sends its own answer, and its results are in
    /// the pod's records.
    pub(super) fn reap(&mut self) -> Vec<Purpose> {
        let mut ended = Vec::new();
        self.0.retain_mut(|program| {
            let runs = matches!(program.child.try_wait(), Ok(None));
            if !runs {
                ended.push(program.purpose);
            }
            runs
        });
        ended
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the number of forwarded connections.
    pub(super) fn forwards(&self) -> usize {
        let programs = self.0.iter();
        programs
            .filter(|program| program.purpose == Purpose::Forward)
            .count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollTimeout, poll};
    use std::process::{Command, Stdio};

    #[test]
    fn the_end_of_a_child_is_seen_and_no_zombie_stays() {
        let mut children = Children::default();
        let mut waiting = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("cat runs");
        let (input, pid) = (waiting.stdin.take(), waiting.id());
        children.add(Purpose::Forward, waiting);
        assert_eq!(children.reap(), [], "it runs");
        assert_eq!(children.forwards(), 1);
        drop(input);
        let mut fds: Vec<PollFd<'_>> = children.poll_fds().collect();
        assert_eq!(poll(&mut fds, PollTimeout::from(10_000_u16)), Ok(1));
        assert_eq!(children.reap(), [Purpose::Forward]);
        assert_eq!(children.forwards(), 0);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}

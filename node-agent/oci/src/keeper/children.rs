//! The programs that a keeper has started: seen to end at once, and cleaned out of the process table.

use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;

use nix::poll::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// What a program was started for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A wake or an end, for the agent.
    Verb,
    /// A wake because of a packet.
    Rouse,
    /// One forwarded connection.
    Forward,
}

#[derive(Debug)]
struct Running {
    purpose: Purpose,
    child: Child,
    /// Can be read from when the program has ended. Without it (there were no descriptors left) the end is seen at the
    /// next event.
    end: Option<OwnedFd>,
}

/// A descriptor per program and not a signal: a blocked SIGCHLD would be blocked in all that these programs run.
#[derive(Debug, Default)]
pub(super) struct Children(Vec<Running>);

impl Children {
    pub(super) fn add(&mut self, purpose: Purpose, child: Child) {
        let end = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).ok();
        self.0.push(Running {
            purpose,
            child,
            end,
        });
    }

    pub(super) fn interests(&self) -> impl Iterator<Item = PollFd<'_>> {
        let ends = self.0.iter().filter_map(|running| running.end.as_ref());
        ends.map(|end| PollFd::new(end.as_fd(), PollFlags::POLLIN))
    }

    /// What those were for that have ended. How they ended does not matter: their answers are their own, and what they have
    /// done is in the pod's records.
    pub(super) fn reap(&mut self) -> Vec<Purpose> {
        let mut ended = Vec::new();
        self.0.retain_mut(|running| {
            let runs = matches!(running.child.try_wait(), Ok(None));
            if !runs {
                ended.push(running.purpose);
            }
            runs
        });
        ended
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn forwards(&self) -> usize {
        let forwards = self.0.iter();
        forwards
            .filter(|running| running.purpose == Purpose::Forward)
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
        let mut fds: Vec<PollFd<'_>> = children.interests().collect();
        assert_eq!(poll(&mut fds, PollTimeout::from(10_000_u16)), Ok(1));
        assert_eq!(children.reap(), [Purpose::Forward]);
        assert_eq!(children.forwards(), 0);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}

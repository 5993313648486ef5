//! The keepers of the pod's other containers, as the pause container's keeper sees them: there, or gone.

use std::os::fd::{AsFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use torpor_core::ids::ContainerId;

#[derive(Debug)]
struct Other {
    container: ContainerId,
    /// Can be read from when its keeper has ended.
    end: OwnedFd,
}

#[derive(Debug, Default)]
pub(super) struct Others(Vec<Other>);

impl Others {
    /// `end`: a pidfd of the container's keeper.
    pub(super) fn add(&mut self, container: ContainerId, end: OwnedFd) {
        self.0.push(Other { container, end });
    }

    pub(super) fn interests(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.0.iter().map(Other::interest)
    }

    /// The containers that have lost their keepers since the last call.
    pub(super) fn gone(&mut self) -> Vec<ContainerId> {
        let gone = self.0.extract_if(.., |other| other.has_ended());
        gone.map(|other| other.container).collect()
    }
}

impl Other {
    fn interest(&self) -> PollFd<'_> {
        PollFd::new(self.end.as_fd(), PollFlags::POLLIN)
    }

    fn has_ended(&self) -> bool {
        // What cannot be looked at is looked at again.
        poll(&mut [self.interest()], PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    #[test]
    fn whoever_is_gone_is_told_once() {
        let mut child = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("cat runs");
        let end = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).expect("a pidfd");
        let container = ContainerId::try_from("c".repeat(64)).expect("an id");
        let mut others = Others::default();
        others.add(container.clone(), end);
        assert_eq!(others.gone(), []);
        drop(child.stdin.take());
        let mut fds: Vec<PollFd<'_>> = others.interests().collect();
        assert_eq!(poll(&mut fds, PollTimeout::from(10_000_u16)), Ok(1));
        assert_eq!(others.gone(), [container]);
        assert_eq!(others.gone(), []);
        child.wait().expect("it is reaped");
    }
}

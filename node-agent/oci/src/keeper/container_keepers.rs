//! The keepers of the pod's other containers, which the pause container's keeper watches.

use std::os::fd::{AsFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use torpor_core::ids::ContainerId;

#[derive(Debug)]
struct ContainerKeeper {
    container: ContainerId,
    /// Readable when the keeper has ended.
    pidfd: OwnedFd,
}

#[derive(Debug, Default)]
pub(super) struct ContainerKeepers(Vec<ContainerKeeper>);

impl ContainerKeepers {
    /// Adds a container. `pidfd`: of the container's keeper.
    pub(super) fn add(&mut self, container: ContainerId, pidfd: OwnedFd) {
        self.0.push(ContainerKeeper { container, pidfd });
    }

    pub(super) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.0.iter().map(ContainerKeeper::poll_fd)
    }

    /// Removes the keepers that have ended, and returns their containers.
    pub(super) fn remove_ended(&mut self) -> Vec<ContainerId> {
        let ended = self.0.extract_if(.., |keeper| keeper.has_ended());
        ended.map(|keeper| keeper.container).collect()
    }
}

impl ContainerKeeper {
    fn poll_fd(&self) -> PollFd<'_> {
        PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)
    }

    fn has_ended(&self) -> bool {
        // If poll fails, the next call polls again.
        poll(&mut [self.poll_fd()], PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
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
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).expect("a pidfd");
        let container = ContainerId::try_from("c".repeat(64)).expect("an id");
        let mut keepers = ContainerKeepers::default();
        keepers.add(container.clone(), pidfd);
        assert_eq!(keepers.remove_ended(), []);
        drop(child.stdin.take());
        let mut fds: Vec<PollFd<'_>> = keepers.poll_fds().collect();
        assert_eq!(poll(&mut fds, PollTimeout::from(10_000_u16)), Ok(1));
        assert_eq!(keepers.remove_ended(), [container]);
        assert_eq!(keepers.remove_ended(), []);
        child.wait().expect("it is reaped");
    }
}

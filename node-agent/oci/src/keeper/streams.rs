//! The standard streams of a container.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Standard streams. Those of a container with a terminal are the ends of the shim's connection to
/// its clients: there standard error is not used.
#[derive(Debug)]
pub struct Streams {
    pub stdin: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
}

impl Streams {
    /// Returns copies of this process' own streams.
    pub(super) fn own() -> std::io::Result<Self> {
        Ok(Self {
            stdin: std::io::stdin().as_fd().try_clone_to_owned()?,
            stdout: std::io::stdout().as_fd().try_clone_to_owned()?,
            stderr: std::io::stderr().as_fd().try_clone_to_owned()?,
        })
    }

    /// Returns all three, in the order of their numbers.
    pub fn fds(&self) -> [BorrowedFd<'_>; 3] {
        [self.stdin.as_fd(), self.stdout.as_fd(), self.stderr.as_fd()]
    }
}

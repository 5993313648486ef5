//! The standard streams of a container.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Standard streams. Those of a container with a terminal are pipes to its clients: there standard
/// error is not used.
#[derive(Debug)]
pub(crate) struct Streams {
    pub(crate) stdin: OwnedFd,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
}

impl Streams {
    /// Returns all three, in the order of their numbers.
    pub(crate) fn fds(&self) -> [BorrowedFd<'_>; 3] {
        [self.stdin.as_fd(), self.stdout.as_fd(), self.stderr.as_fd()]
    }
}

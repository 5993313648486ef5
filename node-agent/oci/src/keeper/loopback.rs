//! Connections to the loopback of the pod's network namespace: each gets a program of its own (see `crate::forward`), so
//! that the keeper never waits for one.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};
use torpor_core::ids::SandboxId;

/// A browser opens half a dozen connections at once. Each one more is a process of two megabytes.
pub(super) const MOST_FORWARDS: usize = 32;

pub(super) struct Loopback {
    listener: OwnedFd,
    /// Keeps the connections coming.
    _link: OwnedFd,
}

/// What came of looking for a connection.
pub(super) enum Arrival {
    Connection(OwnedFd),
    /// The one who dialled has given up.
    Nobody,
    /// This machine has no descriptor or no memory left.
    Exhausted,
}

impl Loopback {
    pub(super) fn new(listener: OwnedFd, link: OwnedFd) -> Self {
        Self {
            listener,
            _link: link,
        }
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// A connection that nobody clears of it is reset when it is closed, so that who dialled sees an error.
    pub(super) fn accept(&self) -> Arrival {
        match accept_with(&self.listener, SocketFlags::CLOEXEC) {
            Ok(connection) => {
                let now = Some(Duration::ZERO);
                // One that could not be marked would be closed without an error, which is no harm to anybody else.
                let _ = sockopt::set_socket_linger(&connection, now);
                Arrival::Connection(connection)
            }
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => Arrival::Exhausted,
            Err(_) => Arrival::Nobody,
        }
    }
}

/// The connection is the program's standard input. Why one failed goes where the pause container's errors go.
pub(super) fn forward(sandbox: &SandboxId, connection: OwnedFd) -> std::io::Result<Child> {
    Command::new("/proc/self/exe")
        .arg0("torpor-forward")
        .arg("forward")
        .arg(sandbox.as_str())
        .current_dir("/")
        .stdin(connection)
        .stdout(Stdio::null())
        .spawn()
}

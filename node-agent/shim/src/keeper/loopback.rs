//! Connections to the loopback of the pod's network namespace.
//!
//! Each connection gets a command of its own (see `crate::commands::forward`), so that the keeper
//! never waits for one.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};
use torpor_core::ids::SandboxId;

use crate::commands;

/// The largest number of forwarded connections at once. A browser opens half a dozen, and each one
/// is a process of two megabytes.
pub(super) const MAX_FORWARDS: usize = 32;

pub(super) struct Loopback {
    listener: OwnedFd,
    /// Keeps the BPF program attached that directs the connections to `listener`.
    _link: OwnedFd,
}

/// The result of [`Loopback::accept`].
pub(super) enum Accepted {
    Connection(OwnedFd),
    /// The client has closed its connection.
    Nothing,
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

    /// Accepts a connection, and sets a linger time of zero (SO_LINGER): the connection is reset
    /// when it is closed, so that the client sees an error. A command that has delivered all bytes
    /// removes the setting.
    pub(super) fn accept(&self) -> Accepted {
        match accept_with(&self.listener, SocketFlags::CLOEXEC) {
            Ok(connection) => {
                let now = Some(Duration::ZERO);
                // A connection without the setting closes without an error. That affects only its
                // client.
                let _ = sockopt::set_socket_linger(&connection, now);
                Accepted::Connection(connection)
            }
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => Accepted::Exhausted,
            Err(_) => Accepted::Nothing,
        }
    }
}

/// Starts the command for a connection, which becomes its standard input. The command reports
/// errors on the shim's standard error, containerd's log.
pub(super) fn forward(sandbox: &SandboxId, connection: OwnedFd) -> std::io::Result<Child> {
    commands::child("forward")
        .arg(sandbox.as_str())
        .stdin(connection)
        .stdout(Stdio::null())
        .spawn()
}

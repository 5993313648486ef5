//! Terminals of containers and of exec'd processes.
//!
//! Each hibernation ends gVisor's own terminal of a container. The container's keeper carries bytes
//! between the terminal and the pipes to its clients, and takes another terminal after a wake.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;

use anyhow::Context;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use torpor_runsc::command::Runsc;

use crate::node::COMMAND_LIMIT;

/// Both ends of a terminal of the host.
#[derive(Debug)]
pub struct Terminal {
    /// The end that the shim keeps.
    pub master: OwnedFd,
    /// The end of the process in the sandbox.
    pub slave: OwnedFd,
}

impl Terminal {
    pub fn open() -> anyhow::Result<Self> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).context("cannot open a terminal")?;
        grantpt(&master).context("cannot grant the terminal")?;
        unlockpt(&master).context("cannot unlock the terminal")?;
        let name = ptsname(&master, Vec::new()).context("cannot name the terminal")?;
        let flags =
            rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY | rustix::fs::OFlags::CLOEXEC;
        let slave = rustix::fs::open(name, flags, rustix::fs::Mode::empty())
            .context("cannot open the terminal's other side")?;
        Ok(Self { master, slave })
    }
}

/// Runs `runsc create` for a container with a terminal; returns the master of gVisor's terminal.
pub fn create_with_console(runsc: &Runsc, id: &str, bundle: &Path) -> anyhow::Result<OwnedFd> {
    let path = bundle.join("console.sock");
    // An earlier try may have left its socket.
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path)
        .with_context(|| format!("cannot listen on {}", path.display()))?;
    runsc.create(id, bundle, Some(&path), COMMAND_LIMIT)?;
    listener.set_nonblocking(true)?;
    // runsc connects and sends before it returns. A connection that is not here now never comes.
    let (peer, _) = listener.accept().context("runsc sent no console")?;
    let (_, fds) = torpor_messages::wire::receive(&peer.into()).context("runsc sent no console")?;
    std::fs::remove_file(&path)?;
    fds.into_iter().next().context("runsc sent no console")
}

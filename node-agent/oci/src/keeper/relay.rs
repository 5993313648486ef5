//! Carries bytes between the terminal that the shim holds and the one that gVisor made for the
//! container.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::Context;
use nix::poll::{PollFd, PollFlags};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize};

const CHUNK: usize = 4096;

/// Makes the keeper's standard input its controlling terminal, so that the kernel reports new
/// window sizes (SIGWINCH).
pub(super) fn own_terminal() -> anyhow::Result<()> {
    // Only the leader of a session may have a controlling terminal.
    rustix::process::setsid().context("cannot start a session")?;
    rustix::process::ioctl_tiocsctty(std::io::stdin()).context("cannot take the terminal")
}

/// One pair of terminals: the shim's (the keeper's standard input) and gVisor's.
pub(super) struct Relay {
    console: OwnedFd,
    resized: SignalFd,
    /// Bytes from the shim's side that gVisor's terminal has not taken yet.
    to_container: Vec<u8>,
    /// Bytes from gVisor's side that the shim's terminal has not taken yet.
    to_shim: Vec<u8>,
    /// The last [`Relay::carry`] has read bytes from the shim's side.
    has_input: bool,
}

impl Relay {
    /// Begins to carry bytes to and from `console`, gVisor's terminal.
    ///
    /// `mode`: the settings of the terminal before this one, if the same program continues with it.
    pub(super) fn new(console: OwnedFd, mode: Option<Termios>) -> anyhow::Result<Self> {
        if let Some(mode) = mode {
            tcsetattr(&console, OptionalActions::Now, &mode)
                .context("cannot set the terminal's mode")?;
        }
        let stdin = std::io::stdin();
        // The line discipline is that of gVisor's terminal. The shim's terminal only passes bytes.
        let mut raw = tcgetattr(&stdin).context("cannot read the terminal's mode")?;
        raw.make_raw();
        tcsetattr(&stdin, OptionalActions::Now, &raw).context("cannot make the terminal raw")?;
        for fd in [stdin.as_fd(), console.as_fd()] {
            let flags = rustix::fs::fcntl_getfl(fd)?;
            rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        }
        let mut mask = SigSet::empty();
        mask.add(Signal::SIGWINCH);
        mask.thread_block().context("cannot block SIGWINCH")?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let resized = SignalFd::with_flags(&mask, flags).context("cannot watch for SIGWINCH")?;
        let relay = Self {
            console,
            resized,
            to_container: Vec::new(),
            to_shim: Vec::new(),
            has_input: false,
        };
        relay.copy_size();
        Ok(relay)
    }

    pub(super) fn poll_fds(&self) -> Vec<PollFd<'_>> {
        let stdin = borrow_stdin();
        let wanted = |can_read: bool, has_output: bool| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::POLLIN, can_read);
            flags.set(PollFlags::POLLOUT, has_output);
            flags
        };
        vec![
            PollFd::new(
                stdin,
                wanted(self.to_container.is_empty(), !self.to_shim.is_empty()),
            ),
            PollFd::new(
                self.console.as_fd(),
                wanted(self.to_shim.is_empty(), !self.to_container.is_empty()),
            ),
            PollFd::new(self.resized.as_fd(), PollFlags::POLLIN),
        ]
    }

    /// Carries the available bytes and the window size.
    ///
    /// Returns false if gVisor's terminal is gone: the sandbox sleeps or has ended.
    pub(super) fn carry(&mut self) -> anyhow::Result<bool> {
        while self
            .resized
            .read_signal()
            .context("cannot read a signal")?
            .is_some()
        {
            self.copy_size();
        }
        let stdin = borrow_stdin();
        // The shim's side ends only with the shim. A client that detaches leaves it open.
        let reads = self.to_container.is_empty();
        if reads && !fill(stdin, &mut self.to_container) {
            return Ok(false);
        }
        self.has_input = reads && !self.to_container.is_empty();
        if self.to_shim.is_empty() && !fill(self.console.as_fd(), &mut self.to_shim) {
            flush(stdin, &mut self.to_shim);
            return Ok(false);
        }
        flush(self.console.as_fd(), &mut self.to_container);
        flush(stdin, &mut self.to_shim);
        Ok(true)
    }

    /// Reports whether the last [`Relay::carry`] has read input of a client.
    pub(super) fn has_input(&self) -> bool {
        self.has_input
    }

    /// Carries the rest of the container's output, after the container has ended.
    pub(super) fn drain(&mut self) {
        let stdin = borrow_stdin();
        loop {
            flush(stdin, &mut self.to_shim);
            if !self.to_shim.is_empty() {
                return;
            }
            if !fill(self.console.as_fd(), &mut self.to_shim) || self.to_shim.is_empty() {
                return;
            }
        }
    }

    /// Returns the settings that the program has made for its terminal.
    pub(super) fn mode(&self) -> Option<Termios> {
        tcgetattr(&self.console).ok()
    }

    fn copy_size(&self) {
        if let Ok(size) = tcgetwinsize(std::io::stdin()) {
            // A failure means that the terminal is gone. Then it needs no size.
            let _ = tcsetwinsize(&self.console, size);
        }
    }
}

#[allow(unsafe_code)]
pub(super) fn borrow_stdin() -> std::os::fd::BorrowedFd<'static> {
    // SAFETY: descriptor 0 is open for the whole life of the keeper.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(0) }
}

/// Reads one chunk. Returns false at the end of the file, or after an error other than EAGAIN and
/// EINTR.
fn fill(from: std::os::fd::BorrowedFd<'_>, into: &mut Vec<u8>) -> bool {
    let mut chunk = [0; CHUNK];
    match rustix::io::read(from, &mut chunk) {
        Ok(0) => false,
        Ok(count) => {
            into.extend_from_slice(&chunk[..count]);
            true
        }
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => true,
        Err(_) => false,
    }
}

fn flush(to: std::os::fd::BorrowedFd<'_>, from: &mut Vec<u8>) {
    while !from.is_empty() {
        match rustix::io::write(to, from) {
            Ok(count) => drop(from.drain(..count)),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

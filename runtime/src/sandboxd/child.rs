//! Setup of a child process between fork and exec.
#![allow(unsafe_code)]

use std::{
    fs::File,
    io,
    os::fd::{BorrowedFd, OwnedFd},
    process::Stdio,
};

use nix::sys::signal::{SigHandler, Signal, signal};
use tokio::process::Command;

/// Sets an open directory as the working directory of the command, whatever its path is by then.
pub fn start_in(command: &mut Command, directory: OwnedFd) -> &mut Command {
    // SAFETY: the closure makes one system call only, without allocation or lock.
    unsafe { command.pre_exec(move || Ok(rustix::process::fchdir(&directory)?)) }
}

/// Gives the command a terminal as its standard streams, in a new session.
///
/// SIGHUP is set to its default. A runtime that was started by nohup ignores SIGHUP, and its
/// children would inherit that.
pub fn attach(command: &mut Command, terminal: OwnedFd) -> io::Result<()> {
    let terminal = File::from(terminal);
    command.stdin(Stdio::from(terminal.try_clone()?));
    command.stdout(Stdio::from(terminal.try_clone()?));
    command.stderr(Stdio::from(terminal));
    let controlling = || {
        rustix::process::setsid()?;
        // SAFETY: only the default action is set, and no handler of this process is replaced.
        unsafe { signal(Signal::SIGHUP, SigHandler::SigDfl)? };
        // SAFETY: standard input is open: in the child it is the terminal.
        let terminal = unsafe { BorrowedFd::borrow_raw(0) };
        Ok(rustix::process::ioctl_tiocsctty(terminal)?)
    };
    // SAFETY: the closure makes three system calls only, without allocation or lock.
    unsafe { command.pre_exec(controlling) };
    Ok(())
}

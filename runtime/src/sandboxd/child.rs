//! What a child does between fork and exec.
#![allow(unsafe_code)]

use std::{
    fs::File,
    io,
    os::fd::{BorrowedFd, OwnedFd},
    process::Stdio,
};

use nix::sys::signal::{SigHandler, Signal, signal};
use tokio::process::Command;

/// Starts the command in a directory that is open, wherever its name leads by then.
pub fn start_in(command: &mut Command, directory: OwnedFd) -> &mut Command {
    // SAFETY: one system call, and nothing else: no allocation, no lock.
    unsafe { command.pre_exec(move || Ok(rustix::process::fchdir(&directory)?)) }
}

/// Gives the command a terminal as its input and output, in a session of its own. It hears when the terminal hangs up, also
/// where the runtime was started by something that ignores that (nohup): a program inherits what is ignored.
pub fn attach(command: &mut Command, terminal: OwnedFd) -> io::Result<()> {
    let terminal = File::from(terminal);
    command.stdin(Stdio::from(terminal.try_clone()?));
    command.stdout(Stdio::from(terminal.try_clone()?));
    command.stderr(Stdio::from(terminal));
    let controlling = || {
        rustix::process::setsid()?;
        // SAFETY: no handler of ours is taken away, the default one is set.
        unsafe { signal(Signal::SIGHUP, SigHandler::SigDfl)? };
        // SAFETY: the child's standard input is open: it is the terminal by now.
        let terminal = unsafe { BorrowedFd::borrow_raw(0) };
        Ok(rustix::process::ioctl_tiocsctty(terminal)?)
    };
    // SAFETY: three system calls, and nothing else: no allocation, no lock.
    unsafe { command.pre_exec(controlling) };
    Ok(())
}

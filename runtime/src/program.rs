//! The user's program that the runtime starts: signals, terminal, exit code.
//!
//! The container behaves as if the program had been started alone: signals to the first process
//! reach the program, and the container ends with the program and its exit code.

use std::{
    ffi::OsString, future, io, os::unix::process::ExitStatusExt as _, process::ExitStatus,
    sync::Arc, task::Poll,
};

use rustix::{
    io::Errno,
    process::{Pid, Signal},
};
use tokio::{
    process::{Child, Command},
    signal::unix,
};

use crate::orphans::Children;

/// Signals that are forwarded to the program.
///
/// These are all named signals that a process can catch, except those of faults of the process
/// itself and those by which a terminal stops background processes.
const FORWARDED: [Signal; 15] = [
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::USR1,
    Signal::USR2,
    Signal::ALARM,
    Signal::TERM,
    Signal::CONT,
    Signal::URG,
    Signal::XCPU,
    Signal::VTALARM,
    Signal::PROF,
    Signal::WINCH,
    Signal::IO,
    Signal::POWER,
];

/// Failure to start or to follow the program.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot catch signals")]
    Signals(#[source] io::Error),
    #[error("cannot start {program:?}")]
    Start {
        program: OsString,
        #[source]
        source: io::Error,
    },
    #[error("cannot wait for the program")]
    Wait(#[source] io::Error),
}

impl Error {
    /// Returns the exit code that shells use for the failure.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Start { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            Self::Start { .. } => 126,
            Self::Signals(_) | Self::Wait(_) => 1,
        }
    }
}

/// Running program.
#[derive(Debug)]
pub struct Program {
    child: Child,
    id: Pid,
    children: Arc<Children>,
}

impl Program {
    /// Starts the program with this process' standard streams.
    ///
    /// The program gets its own process group in the foreground of the terminal, if there is one.
    /// A key such as Ctrl-C then reaches the program once, and not a second time by a forwarded
    /// signal.
    pub fn start(words: &[OsString], children: &Arc<Children>) -> Result<Self, Error> {
        let program = words.first().cloned().unwrap_or_default();
        let mut command = Command::new(&program);
        command.args(words.iter().skip(1)).process_group(0);
        let (child, id) = children
            .start(&mut command)
            .map_err(|source| Error::Start { program, source })?;
        match to_foreground(id) {
            Ok(()) | Err(Errno::NOTTY) => {}
            Err(errno) => tracing::warn!(%errno, "cannot give the terminal to the program"),
        }
        Ok(Self {
            child,
            id,
            children: Arc::clone(children),
        })
    }

    /// Signals the program alone, not its group, as a container runtime does.
    pub fn send(&self, signal: Signal) {
        if let Err(errno) = rustix::process::kill_process(self.id, signal) {
            tracing::debug!(%errno, ?signal, "cannot forward a signal");
        }
    }

    /// Waits for the end of the program.
    pub async fn wait(&mut self) -> Result<ExitStatus, Error> {
        self.child.wait().await.map_err(Error::Wait)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.children.release(self.id);
    }
}

/// Gives the terminal on standard input to a process group.
fn to_foreground(group: Pid) -> Result<(), Errno> {
    rustix::termios::tcsetpgrp(io::stdin(), group)?;
    // A process that used the terminal before it was in the foreground has been stopped.
    rustix::process::kill_process_group(group, Signal::CONT)
}

/// Stream of caught signals.
#[derive(Debug)]
pub struct Signals(Vec<(Signal, unix::Signal)>);

impl Signals {
    /// Installs handlers for the signals that are forwarded.
    pub fn catch() -> Result<Self, Error> {
        let caught = FORWARDED.map(|kind| {
            let arrivals = unix::signal(unix::SignalKind::from_raw(kind.as_raw()))?;
            Ok((kind, arrivals))
        });
        let caught: Result<_, io::Error> = caught.into_iter().collect();
        caught.map(Self).map_err(Error::Signals)
    }

    /// Returns the next signal.
    pub async fn next(&mut self) -> Signal {
        future::poll_fn(|context| {
            let next = self.0.iter_mut().find_map(|(kind, arrivals)| {
                let arrived = arrivals.poll_recv(context) == Poll::Ready(Some(()));
                arrived.then_some(*kind)
            });
            next.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

/// Returns the container's exit code: the program's, or 128 + n if signal n ended the program, as
/// container runtimes do.
pub fn exit_code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok())
        .unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(0x0000, 0)]
    #[case(0x0300, 3)]
    #[case(0xff00, 255)]
    #[case(15, 143)]
    #[case(9, 137)]
    #[case(0x80 | 11, 139)]
    fn the_exit_code_is_that_of_container_runtimes(#[case] wait_status: i32, #[case] code: u8) {
        assert_eq!(exit_code(ExitStatus::from_raw(wait_status)), code);
    }

    #[rstest]
    #[case(io::ErrorKind::NotFound, 127)]
    #[case(io::ErrorKind::PermissionDenied, 126)]
    fn a_program_that_does_not_start_has_the_exit_code_of_shells(
        #[case] kind: io::ErrorKind,
        #[case] code: u8,
    ) {
        let error = Error::Start {
            program: "p".into(),
            source: kind.into(),
        };
        assert_eq!(error.exit_code(), code);
    }
}

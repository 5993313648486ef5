//! The user's program, where the runtime is put around it: its signals, its terminal, its exit code.
//!
//! To the container it is as if the program had been started alone: what is sent to the first process reaches it, and the container ends when it does, with its code.

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

/// What is passed on: every named signal that a process can catch, but for those that the kernel sends to a process for what it did itself, and those by which a terminal stops background processes.
const PASSED_ON: [Signal; 15] = [
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

/// The program did not come up, or got lost.
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
    /// The exit code that shells give for it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Start { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            Self::Start { .. } => 126,
            Self::Signals(_) | Self::Wait(_) => 1,
        }
    }
}

/// The program, running.
#[derive(Debug)]
pub struct Program {
    child: Child,
    id: Pid,
    children: Arc<Children>,
}

impl Program {
    /// Starts it with this process' standard streams, in a process group of its own, in the foreground of the terminal if there is one: a key such as Ctrl-C then reaches it once, and not through this process again.
    pub fn start(words: &[OsString], children: &Arc<Children>) -> Result<Self, Error> {
        let program = words.first().cloned().unwrap_or_default();
        let mut command = Command::new(&program);
        command.args(words.iter().skip(1)).process_group(0);
        let (child, id) = children
            .start(&mut command)
            .map_err(|source| Error::Start { program, source })?;
        match to_foreground(id) {
            Ok(()) | Err(Errno::NOTTY) => {}
            Err(errno) => tracing::warn!(%errno, "the program does not have the terminal"),
        }
        Ok(Self {
            child,
            id,
            children: Arc::clone(children),
        })
    }

    /// Passes a signal on. To the program alone, as the container runtime would.
    pub fn send(&self, signal: Signal) {
        if let Err(errno) = rustix::process::kill_process(self.id, signal) {
            tracing::debug!(%errno, ?signal, "not passed on");
        }
    }

    /// Waits for its end.
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
    // It may have asked for the terminal before it had it, which stops a process.
    rustix::process::kill_process_group(group, Signal::CONT)
}

/// Signals as they come.
#[derive(Debug)]
pub struct Signals(Vec<(Signal, unix::Signal)>);

impl Signals {
    /// Catches, from now on, what is passed on to the program.
    pub fn catch() -> Result<Self, Error> {
        let caught = PASSED_ON.map(|kind| {
            let arrivals = unix::signal(unix::SignalKind::from_raw(kind.as_raw()))?;
            Ok((kind, arrivals))
        });
        let caught: Result<_, io::Error> = caught.into_iter().collect();
        caught.map(Self).map_err(Error::Signals)
    }

    /// The next one.
    pub async fn next(&mut self) -> Signal {
        future::poll_fn(|context| {
            let came = self.0.iter_mut().find_map(|(kind, arrivals)| {
                let came = arrivals.poll_recv(context) == Poll::Ready(Some(()));
                came.then_some(*kind)
            });
            came.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

/// The container's exit code: the program's own, or 128 and the number of the signal that ended it, as container runtimes have it.
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
    fn the_exit_code_is_what_a_container_runtime_would_tell(
        #[case] wait_status: i32,
        #[case] code: u8,
    ) {
        assert_eq!(exit_code(ExitStatus::from_raw(wait_status)), code);
    }

    #[rstest]
    #[case(io::ErrorKind::NotFound, 127)]
    #[case(io::ErrorKind::PermissionDenied, 126)]
    fn a_program_that_does_not_start_has_the_code_of_shells(
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

//! Processes that Torpor runs in a sandbox for its own purposes, and waits for.

use std::fs::{File, OpenOptions};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::Signal;
use serde_json::Value;
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_runsc::control::{Control, Error, SignalScope, WaitStatus};

use crate::node::{CALL_LIMIT, Node};

/// Limit for the end of a killed process, which takes less than a millisecond.
const END_LIMIT: Duration = Duration::from_secs(3);

/// Opens `/dev/null`, for use as a standard stream.
pub fn nothing() -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/null")
}

/// Opens the file of this program, to be run in the sandbox. The file is open for reading
/// only: gVisor runs no file that a program in the sandbox could write to.
pub fn own_program() -> anyhow::Result<File> {
    File::open("/proc/self/exe").context("cannot open the own program")
}

/// A process in a container of a sandbox.
#[derive(Debug)]
pub struct Process {
    container: ContainerId,
    pid: i32,
    /// The connection on which the sandbox reports the end of the process.
    waiting: Control,
}

impl Process {
    /// Starts a process. `args`: gVisor's control.ExecArgs. `files`: the process' three standard
    /// streams, followed by its program's file, unless the program is a file of the container.
    pub fn begin(
        node: &Node,
        sandbox: &SandboxId,
        container: &ContainerId,
        args: &Value,
        files: &[BorrowedFd<'_>],
    ) -> Result<Self, Error> {
        // Both connections exist before the process starts, so that its end can be waited for.
        let mut control = node.runsc.connect(sandbox)?;
        let mut waiting = node.runsc.connect(sandbox)?;
        let pid = control.execute(args, files, CALL_LIMIT)?;
        waiting.begin_wait_pid(container.as_str(), pid)?;
        Ok(Self {
            container: container.clone(),
            pid,
            waiting,
        })
    }

    /// Waits for the end of the process, at most for `limit`; returns its status.
    pub fn wait(&mut self, limit: Duration) -> Result<WaitStatus, Error> {
        self.waiting.wait_result_within(limit)
    }

    /// Kills the process and waits for its end. gVisor cannot be saved before that end, and keeps
    /// the status of an ended process until a caller has waited for it.
    pub fn end(mut self, node: &Node, sandbox: &SandboxId) {
        let (container, scope) = (self.container.as_str(), SignalScope::Process);
        // A process that has ended by itself, or with its sandbox, needs no signal.
        let _ = node.runsc.connect(sandbox).and_then(|mut control| {
            control.signal(
                container,
                self.pid,
                Signal::SIGKILL as i32,
                scope,
                END_LIMIT,
            )
        });
        let _ = self.wait(END_LIMIT);
    }
}

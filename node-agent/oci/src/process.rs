//! Processes that this program runs in a sandbox for itself, and waits for.

use std::fs::{File, OpenOptions};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::Signal;
use serde_json::Value;
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_runsc::control::{Control, Error, SignalScope, WaitStatus};

use crate::node::{CALL_LIMIT, Node};

/// A process that was killed is gone within a millisecond.
const END_LIMIT: Duration = Duration::from_secs(3);

/// A standard stream that leads nowhere.
pub(crate) fn nothing() -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/null")
}

/// The file of this program, for a helper in the sandbox. Read-only: gVisor runs nothing that a
/// program in the sandbox could write to.
pub(crate) fn own_program() -> anyhow::Result<File> {
    File::open("/proc/self/exe").context("cannot open the own program")
}

/// A process in a container.
pub(crate) struct Process {
    container: ContainerId,
    pid: i32,
    /// Told of its end.
    waiting: Control,
}

impl Process {
    /// Begins it. `args`: gVisor's control.ExecArgs; `files`: its standard streams, and its program
    /// where that is none of the container's.
    pub(crate) fn begin(
        node: &Node,
        sandbox: &SandboxId,
        container: &ContainerId,
        args: &Value,
        files: &[BorrowedFd<'_>],
    ) -> Result<Self, Error> {
        // Both connections before the process: what has begun can be waited for.
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

    /// How it ended, within `limit`.
    pub(crate) fn wait(&mut self, limit: Duration) -> Result<WaitStatus, Error> {
        self.waiting.wait_result_within(limit)
    }

    /// Ends it and waits for its end: gVisor cannot be saved before, and keeps the status of one
    /// that nobody waits for.
    pub(crate) fn end(mut self, node: &Node, sandbox: &SandboxId) {
        let (container, scope) = (self.container.as_str(), SignalScope::Process);
        // One that has ended by itself, or with its sandbox, needs no signal.
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

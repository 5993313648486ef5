//! Processes that Torpor runs in a sandbox for its own purposes, and waits for.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::Signal;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;
use serde_json::Value;
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_inside::PROGRAM;
use torpor_runsc::control::{Control, Error, SignalScope, WaitStatus};

use crate::node::{CALL_LIMIT, Node};

/// Limit for the end of a killed process, which takes less than a millisecond.
const END_LIMIT: Duration = Duration::from_secs(3);

/// Opens `/dev/null`, for use as a standard stream.
pub fn nothing() -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/null")
}

/// Returns the helper's program, to be run in the sandbox: a copy in memory that cannot be changed,
/// so that the sandbox gets no file of the host. It is open for reading only: gVisor runs no file
/// that a program in the sandbox could write to.
pub fn helper() -> anyhow::Result<File> {
    let path = std::env::current_exe()?.with_file_name(PROGRAM);
    sealed(&path).with_context(|| format!("cannot copy {} into memory", path.display()))
}

/// Returns a copy of a file that cannot be changed.
fn sealed(path: &Path) -> std::io::Result<File> {
    let mut file = File::open(path)?;
    let mut copy: File = memfd()?.into();
    std::io::copy(&mut file, &mut copy)?;
    let all = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    fcntl_add_seals(&copy, all)?;
    File::open(format!("/proc/self/fd/{}", copy.as_raw_fd()))
}

/// Makes a memfd for a program. A kernel before 6.3 does not know the flag for that, and needs none
/// (memfd_create(2), `MFD_EXEC`).
fn memfd() -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match memfd_create(PROGRAM, flags | MemfdFlags::EXEC) {
        Err(Errno::INVAL) => memfd_create(PROGRAM, flags),
        made => made,
    }
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

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn a_sealed_copy_has_the_files_bytes_and_cannot_be_written_by_any_way_to_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("program");
        std::fs::write(&path, "bytes").expect("written");
        let mut copy = sealed(&path).expect("copied");
        let mut text = String::new();
        copy.read_to_string(&mut text).expect("read");
        assert_eq!(text, "bytes");
        copy.write_all(b"x").expect_err("it is open for reading");
        let again = format!("/proc/self/fd/{}", copy.as_raw_fd());
        let again = OpenOptions::new().write(true).open(again);
        let written = again.and_then(|mut again| again.write_all(b"x"));
        written.expect_err("it is sealed");
        std::fs::write(&path, "other").expect("written");
        let mut text = String::new();
        let copy = format!("/proc/self/fd/{}", copy.as_raw_fd());
        let copy = File::open(copy).and_then(|mut copy| copy.read_to_string(&mut text));
        assert_eq!((copy.expect("read"), text.as_str()), (5, "bytes"));
    }
}

//! The restore of a sandbox' other containers without runsc's command.
//!
//! For each of them `runsc restore` executes runsc four times: itself, the gofer (the process that
//! serves the container's files), that process once more without capabilities, and a helper that
//! unmounts `/proc` for it. This module makes the gofer as runsc makes it, and executes runsc once.
//! A gofer needs nothing of the sandbox, and so begins beside it. The gofer is confined as runsc
//! confines it, which `begun.rs` of the e2e tests compares: the seccomp filter is its own, and
//! namespaces, root, mounts and capabilities are made here ([`root`]).
//!
//! gVisor gets the container over the control socket, by the calls of the release
//! (runsc/container/container.go, `startImpl`; runsc/sandbox/sandbox.go, `RestoreSubcontainer`).

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::unistd::{Gid, Uid, fchown};
use rustix::fs::MemfdFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde_json::{Value, json};

use super::begin::Beginning;
use super::error::{Error, cannot_open, prepare};
use super::files::{append_only, open};
use super::limit::Limit;
use super::message::Message;
use super::record::{GOFERS, lowest_oom_score};
use torpor_records::RunscRecord;
use torpor_runsc::command::{self, Runsc, Stdio3, can_be_read};
use torpor_runsc::control::Control;
use torpor_runsc::state;

use plan::Plan;
pub use plan::filestore;

pub(super) mod plan;
pub(super) mod process;
mod root;

/// Bytes that are read of a gofer's list of mounts, which is as long as the spec's list.
const MAX_MOUNTS: u64 = 1 << 20;

/// Settings that `runsc restore` passes to gVisor with [`command::SANDBOX_FLAGS`], in all releases
/// that are known here, but for two paths (runsc/config/config.go, `Config`, in Go's JSON).
const SETTINGS: &str = include_str!("gofer/settings.json");

/// The restore of one container.
#[derive(Debug)]
pub struct ContainerStart<'a> {
    runsc: &'a Runsc,
    kept: &'a RunscRecord,
    plan: Plan,
    id: &'a str,
    sandbox: &'a str,
    /// Directory of the container's `config.json`.
    bundle: PathBuf,
}

/// The process that serves a container's files, and its files for gVisor.
#[derive(Debug)]
pub struct Gofer {
    pid: i32,
    /// A connection for each file system that the gofer serves.
    connections: Vec<OwnedFd>,
    /// Files in which gVisor keeps writes: to other file systems, or over the served ones.
    filestores: Vec<OwnedFd>,
    /// Pipe into which the gofer writes the places of its mounts.
    mounts: OwnedFd,
    log: File,
}

impl<'a> ContainerStart<'a> {
    /// `spec`: content of `config.json`. None where runsc must restore the container.
    pub fn new(
        runsc: &'a Runsc,
        kept: &'a RunscRecord,
        id: &'a str,
        sandbox: &'a str,
        bundle: PathBuf,
        spec: &Value,
    ) -> Option<Self> {
        let plan = Plan::new(kept.containers.get(id)?, spec, sandbox)?;
        runsc.is_plain().then_some(Self {
            runsc,
            kept,
            plan,
            id,
            sandbox,
            bundle,
        })
    }

    /// Begins the container's gofer, which needs nothing of the sandbox. The gofer ends by itself
    /// when no process holds the returned files.
    pub fn begin_gofer(&self, limit: Duration) -> Result<Gofer, Error> {
        let until = Limit::new(limit);
        Gofer::begin(self.runsc, &self.plan, self.id, &self.bundle, until)
    }

    /// Restores the container in its sandbox, which has the image already. The call for the
    /// sandbox' last container does the work, and returns when the sandbox runs.
    pub fn restore(&self, gofer: Gofer, stdio: Stdio3, limit: Duration) -> Result<(), Error> {
        let until = Limit::new(limit);
        let (root, sandbox) = (self.runsc.root(), self.sandbox);
        if gofer.mounts(until)? != self.plan.record()["spec"]["mounts"] {
            return Err(Error::Moved(self.id.to_owned()));
        }
        let _no_other_command = state::lock(root, self.id, sandbox, until.end)?;
        let mut control = Control::connect_to_new(root, sandbox)?;
        let create = "containerManager.CreateSubcontainer";
        control.call::<Value>(create, &json!({ "CID": self.id }), &[], until.left())?;
        let stdio = [stdio.stdin, stdio.stdout, stdio.stderr];
        self.own(&stdio)?;
        // All steps that can fail come before the call after which the last container runs.
        let sentry = state::sentry(root, sandbox)?;
        let record = self.plan.served(gofer.pid, sentry);
        state::write(root, self.id, sandbox, &record)?;
        gofer.set_oom_score(&self.plan)?;
        set_oom_score(sentry, lowest_oom_score(self.kept))?;
        let files: Vec<BorrowedFd<'_>> = (stdio.iter())
            .chain(&gofer.filestores)
            .chain(&gofer.connections)
            .map(AsFd::as_fd)
            .collect();
        let restore = "containerManager.RestoreSubcontainer";
        control.call::<Value>(restore, &self.told()?, &files, until.left())?;
        Ok(())
    }

    /// Returns gVisor's `StartArgs` for the container (runsc/boot/controller.go). The call also has
    /// files, in this order: the standard streams, the files that gVisor writes to, the connections
    /// to the gofer.
    pub fn told(&self) -> Result<Value, Error> {
        let record = self.plan.record();
        Ok(json!({
            "Spec": record["spec"],
            "Conf": self.settings()?,
            "CID": self.id,
            "NumGoferFilestoreFDs": self.plan.filestores(),
            "IsDevIoFilePresent": false,
            "GoferMountConfs": record[GOFERS],
            "IsRootfsUpperTarFilePresent": false,
        }))
    }

    /// Makes the user of the sandbox' processes the owner of the container's standard streams.
    fn own(&self, stdio: &[OwnedFd; 3]) -> Result<(), Error> {
        let (uid, gid) = self.plan.user;
        for stream in stdio {
            match fchown(stream, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid))) {
                // The file system does not allow a change of the owner.
                Ok(()) | Err(Errno::EINVAL | Errno::EPERM | Errno::EROFS) => {}
                Err(errno) => {
                    return Err(prepare("change the owner of the standard streams")(errno));
                }
            }
        }
        Ok(())
    }

    fn settings(&self) -> Result<Value, Error> {
        let settings = serde_json::from_str::<Value>(SETTINGS);
        let mut settings = settings.map_err(prepare("read runsc's settings"))?;
        settings["RootDir"] = json!(self.runsc.root());
        Ok(settings)
    }
}

impl Gofer {
    pub(super) fn begin(
        runsc: &Runsc,
        plan: &Plan,
        id: &str,
        bundle: &Path,
        until: Limit,
    ) -> Result<Self, Error> {
        let log: File = command::memory_file("gofer", MemfdFlags::CLOEXEC)?.into();
        let (mounts, mounts_writer) = std::io::pipe().map_err(prepare("make a pipe"))?;
        // Only a gofer that makes its own root uses this connection.
        let (_unused, rpc) = connection()?;
        let program = File::open(runsc.path()).map_err(cannot_open(runsc.path()))?;
        let mut files: Vec<OwnedFd> = vec![
            program.into(),
            append_only(&log)?,
            open(&bundle.join("config.json"))?,
            mounts_writer.into(),
            rpc,
        ];
        let mut connections = Vec::new();
        for _ in 0..plan.file_systems() {
            let (ours, theirs) = connection()?;
            connections.push(ours);
            files.push(theirs);
        }
        let borrowed: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        let begun = Beginning {
            name: "torpor-gofer",
            id,
            message: Message::Serve(plan.serve_args(runsc.flags(), bundle, id)),
            files: &borrowed,
            uid_map: &plan.uid_map,
            gid_map: &plan.gid_map,
        }
        .begin(until)?;
        if begun.filestores.len() != plan.filestores() {
            return Err(Error::Failed("it ended before it served files".to_owned()));
        }
        Ok(Self {
            pid: begun.pid,
            connections,
            filestores: begun.filestores,
            mounts: mounts.into(),
            log,
        })
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// Returns the numbers of files among [`Self::files`]: of connections, and of files that gVisor
    /// writes to.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.connections.len(), self.filestores.len())
    }

    /// Returns the gofer's files for a sandbox' first process. The last is the pipe of its mounts.
    pub(super) fn files(&self) -> Vec<BorrowedFd<'_>> {
        let all = self.connections.iter().chain(&self.filestores);
        all.chain([&self.mounts]).map(AsFd::as_fd).collect()
    }

    pub(super) fn set_oom_score(&self, plan: &Plan) -> Result<(), Error> {
        set_oom_score(self.pid, plan.oom_score)
    }

    /// Reads the gofer's list of the spec's mounts, whose destinations have their links resolved.
    fn mounts(&self, until: Limit) -> Result<Value, Error> {
        let mut bytes = Vec::new();
        let mut pipe = File::from(self.mounts.try_clone().map_err(Error::Talk)?).take(MAX_MOUNTS);
        let mut part = [0; 16 << 10];
        loop {
            if !can_be_read(&self.mounts, until.end).map_err(Error::Talk)? {
                return Err(until.exceeded(&self.last_words()));
            }
            match pipe.read(&mut part).map_err(Error::Talk)? {
                0 => break,
                read => bytes.extend_from_slice(&part[..read]),
            }
        }
        match serde_json::from_slice(&bytes) {
            Ok(mounts @ Value::Array(_)) => Ok(mounts),
            _ => Err(Error::GoferEnded(self.last_words())),
        }
    }

    fn last_words(&self) -> String {
        match self.log.try_clone() {
            Ok(log) => command::last_words(log),
            Err(error) => error.to_string(),
        }
    }
}

/// Returns the two ends of a connection between gVisor and the gofer.
fn connection() -> Result<(OwnedFd, OwnedFd), Error> {
    let (unix, stream, cloexec) = (
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
    );
    socketpair(unix, stream, cloexec, None).map_err(prepare("make a socket"))
}

/// Sets a process' `oom_score_adj`, as runsc does. Does nothing for an ended process.
fn set_oom_score(pid: i32, score: Option<i64>) -> Result<(), Error> {
    let Some(score) = score else {
        return Ok(());
    };
    let failed = prepare("set the OOM score");
    match std::fs::write(format!("/proc/{pid}/oom_score_adj"), score.to_string()) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        set => set.map_err(failed),
    }
}

#[cfg(test)]
mod tests;

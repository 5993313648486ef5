//! The restore of a sandbox' other containers without runsc's command.
//!
//! For each of them `runsc restore` executes runsc four times: itself, the gofer (the process that serves the container's files), that process once more
//! without capabilities, and a helper that unmounts `/proc` for it. Here the gofer is made as runsc makes it, and executes runsc once; it needs nothing of the sandbox, and so begins
//! beside it. What it may do is what runsc leaves it, as `begun.rs` of the e2e tests compares: the seccomp filter is its own, and namespaces, root, mounts and
//! capabilities are made here ([`root`]).
//!
//! gVisor is told of the container over the control socket, in the words of the release (runsc/container/container.go, `startImpl`; runsc/sandbox/sandbox.go, `RestoreSubcontainer`).

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
use super::plan::lowest_oom_score;
use super::process::Word;
use super::{Error, Limit, append_only, open, prepare};
use torpor_records::RunscRecord;
use torpor_runsc::command::{self, Runsc, Stdio3, can_be_read};
use torpor_runsc::control::Control;
use torpor_runsc::state;

pub use plan::filestore;
pub(super) use plan::{GOFERS, Plan, ServeArgs};

mod plan;
pub(super) mod process;
mod root;

/// A gofer's list of mounts is as long as the part of the spec that it has them from.
const MAX_MOUNTS: u64 = 1 << 20;

/// What `runsc restore` tells gVisor of its own settings with [`command::SANDBOX_FLAGS`], of all releases that are known here, but for
/// two paths (runsc/config/config.go, `Config`, in Go's JSON).
const SETTINGS: &str = include_str!("gofer/settings.json");

/// The restore of one container.
#[derive(Debug)]
pub struct ContainerStart<'a> {
    runsc: &'a Runsc,
    kept: &'a RunscRecord,
    plan: Plan,
    id: &'a str,
    sandbox: &'a str,
    /// `config.json` lies there.
    bundle: PathBuf,
}

/// The process that serves a container's files, and what gVisor gets of it.
#[derive(Debug)]
pub struct Gofer {
    pid: i32,
    /// One for each file system that it serves.
    connections: Vec<OwnedFd>,
    /// What is written to others, or over them, is kept there.
    filestores: Vec<OwnedFd>,
    /// It says there where its mounts are.
    mounts: OwnedFd,
    log: File,
}

impl<'a> ContainerStart<'a> {
    /// `spec`: what `config.json` says. None where runsc must do it.
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

    /// Begins the container's gofer, which needs nothing of the sandbox. It ends by itself when nobody holds what is answered.
    pub fn begin_gofer(&self, limit: Duration) -> Result<Gofer, Error> {
        let until = Limit::new(limit);
        Gofer::begin(self.runsc, &self.plan, self.id, &self.bundle, until)
    }

    /// Restores the container in its sandbox, which has the image already. The last one of its containers does the work, and
    /// returns when the sandbox runs.
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
        // All that can fail comes before the last container is there and runs.
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

    /// What gVisor is told of the container, beside its standard streams, the files that it writes to and connections to its gofer, in this order
    /// (runsc/boot/controller.go, `StartArgs`).
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

    /// What the container reads and writes belongs to who its sandbox runs as.
    fn own(&self, stdio: &[OwnedFd; 3]) -> Result<(), Error> {
        let (uid, gid) = self.plan.user;
        for stream in stdio {
            match fchown(stream, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid))) {
                // Of a file system where nothing changes hands.
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
        let (mounts, tells_mounts) = std::io::pipe().map_err(prepare("make a pipe"))?;
        // For calls of a gofer that makes its own root.
        let (_nobody, rpc) = connection()?;
        let program = File::open(runsc.path()).map_err(super::cannot_open(runsc.path()))?;
        let mut files: Vec<OwnedFd> = vec![
            program.into(),
            append_only(&log)?,
            open(&bundle.join("config.json"))?,
            tells_mounts.into(),
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
            word: Word::Serve(plan.serve_args(runsc.flags(), bundle, id)),
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

    /// Of [`Self::files`]: connections, then files that are written to.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.connections.len(), self.filestores.len())
    }

    /// What a sandbox' first process gets of it; the last one tells it the mounts.
    pub(super) fn files(&self) -> Vec<BorrowedFd<'_>> {
        let all = self.connections.iter().chain(&self.filestores);
        all.chain([&self.mounts]).map(AsFd::as_fd).collect()
    }

    pub(super) fn set_oom_score(&self, plan: &Plan) -> Result<(), Error> {
        set_oom_score(self.pid, plan.oom_score)
    }

    /// What it says of the spec's mounts: where it has found them, following links.
    fn mounts(&self, until: Limit) -> Result<Value, Error> {
        let mut said = Vec::new();
        let mut pipe = File::from(self.mounts.try_clone().map_err(Error::Talk)?).take(MAX_MOUNTS);
        let mut part = [0; 16 << 10];
        loop {
            if !can_be_read(&self.mounts, until.end).map_err(Error::Talk)? {
                return Err(until.is_over(&self.last_words()));
            }
            match pipe.read(&mut part).map_err(Error::Talk)? {
                0 => break,
                read => said.extend_from_slice(&part[..read]),
            }
        }
        match serde_json::from_slice(&said) {
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

/// Two ends of which gVisor gets one and the gofer the other.
fn connection() -> Result<(OwnedFd, OwnedFd), Error> {
    let (unix, stream, cloexec) = (
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
    );
    socketpair(unix, stream, cloexec, None).map_err(prepare("make a socket"))
}

/// As runsc leaves it; whoever has ended needs none.
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

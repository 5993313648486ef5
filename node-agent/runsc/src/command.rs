//! The runsc commands. Each runs with a time limit; one that does not end in time is killed and its effect unknown.

use std::io::{Read, Seek};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use torpor_core::ids::SandboxId;

use crate::control::{self, Control};
use crate::sigstop;
use crate::state;
use torpor_records::Records;
use torpor_records::config::Config;

pub mod flags;
mod states;

/// What of a command's log is read for an error message.
const KEPT_OUTPUT: u64 = 16 << 10;
/// What of a help text is read.
const PRINTED_OUTPUT: u64 = 256 << 10;

/// How `runsc --version` begins.
const VERSION_PREFIX: &str = "runsc version ";
/// What it says of a build that was given no version (gVisor, `runsc/version`).
const NO_VERSION: &str = "VERSION_MISSING";

/// Flags that shape a sandbox. An image is restored only by a runsc with the same ones: they are in its fingerprint.
/// `--ignore-cgroups`: cgroups are ours (see `torpor-cgroup`). `--allow-connected-on-save`: established TCP survives a
/// save that leaves the sandbox running.
pub const SANDBOX_FLAGS: [&str; 3] = [
    "--ignore-cgroups",
    "--network=sandbox",
    "--allow-connected-on-save",
];

/// gVisor only warns where a container that is restored has another spec than the one that was
/// saved. What has to be the same is compared before, by [`crate::spec::digest`]; gVisor compares
/// more, so that a Pod with another request of memory (`oomScoreAdj`) could not go on.
const RESTORE_SPEC_VALIDATION: &str = "--restore-spec-validation=warning";

/// gVisor takes NET_RAW from each container otherwise. [`crate::spec::rewrite`] leaves it to those
/// whose Pod adds it. An image does not depend on the flag.
const NET_RAW: &str = "--net-raw";

/// Why a runsc command failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot run {path}")]
    Spawn {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error(transparent)]
    State(#[from] state::Error),
    #[error("cannot wait for runsc {command}")]
    Wait {
        command: String,
        #[source]
        source: std::io::Error,
    },
    #[error("runsc {command} ended with {status}: {output}")]
    Failed {
        command: String,
        status: ExitStatus,
        output: String,
    },
    /// The effect is unknown: observe again.
    #[error("runsc {command} did not end within {limit:?} and was stopped")]
    TimedOut { command: String, limit: Duration },
}

/// stdin, stdout and stderr of a container, handed to the command that starts it.
#[derive(Debug)]
pub struct Stdio3 {
    pub stdin: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
}

/// The runsc of this node with its flags, and the root directories of its sandboxes.
#[derive(Debug, Clone)]
pub struct NodeRunsc {
    /// With the base as its root.
    runsc: Runsc,
    records: Records,
}

impl NodeRunsc {
    pub fn new(config: &Config) -> Self {
        let runsc = Runsc {
            path: config.runsc.clone(),
            own_flags: flags::of(&config.runsc),
            root: config.runsc_base(),
            platform: config.platform.clone(),
            debug_log_dir: config.debug_log_dir.clone(),
        };
        Self {
            runsc,
            records: Records::new(config),
        }
    }

    /// `runsc --root` for a sandbox.
    ///
    /// A restore goes through the names of its root directory several times, each time by patterns: with the records of 300 sandboxes in one
    /// it took a fifth longer. So they are spread by the beginning of their ids, but for those of a Pod that was made before 2026-11-25:
    /// its keepers run the program of then for as long as it lives, and look in the base.
    pub fn root_of(&self, sandbox: &SandboxId) -> PathBuf {
        let base = &self.runsc.root;
        if self.records.is_spread(sandbox) {
            // Short: the path of a socket has room for 107 bytes, and its name takes 74.
            base.join(&sandbox.as_str()[..states::SPREAD])
        } else {
            base.clone()
        }
    }

    /// The runsc for one sandbox and its containers.
    pub fn of(&self, sandbox: &SandboxId) -> Runsc {
        Runsc {
            root: self.root_of(sandbox),
            ..self.runsc.clone()
        }
    }

    /// The way to the sandbox, which goes on if it was stopped.
    pub fn connect(&self, sandbox: &SandboxId) -> Result<Control, control::Error> {
        Control::connect(&self.root_of(sandbox), sandbox.as_str())
    }

    /// Whether the sandbox' processes were stopped while it dozes.
    pub fn is_halted(&self, sandbox: &SandboxId) -> bool {
        sigstop::is_halted(&self.root_of(sandbox), sandbox.as_str())
    }

    /// First line of `runsc --version`, without its prefix.
    pub fn version(&self, limit: Duration) -> Result<String, Error> {
        let text = self.capture("--version", &[], limit)?;
        let line = text.lines().next().unwrap_or_default();
        Ok(line
            .strip_prefix(VERSION_PREFIX)
            .unwrap_or(line)
            .trim()
            .to_owned())
    }

    /// What a command that only prints text prints, stdout and stderr together.
    pub fn capture(&self, name: &str, args: &[&str], limit: Duration) -> Result<String, Error> {
        capture(&self.runsc.path, name, args, limit)
    }
}

/// The release that a program says to be of gVisor; none where it is no runsc, or built without a version.
pub fn release(path: &Path, limit: Duration) -> Result<Option<String>, Error> {
    let text = capture(path, "--version", &[], limit)?;
    Ok(release_in(&text).map(str::to_owned))
}

fn release_in(version: &str) -> Option<&str> {
    let line = version.lines().next()?;
    let release = line.strip_prefix(VERSION_PREFIX)?.trim();
    (!release.is_empty() && release != NO_VERSION).then_some(release)
}

fn capture(path: &Path, name: &str, args: &[&str], limit: Duration) -> Result<String, Error> {
    let output = memory_file(name, MemfdFlags::CLOEXEC)?;
    let mut command = Command::new(path);
    command.arg(name).args(args).stdin(Stdio::null());
    write_to(&mut command, name, &output)?;
    let status = finish(name, command, limit)?;
    let text = read_head(output.into(), PRINTED_OUTPUT);
    if status.success() {
        Ok(text)
    } else {
        Err(Error::Failed {
            command: name.to_owned(),
            status,
            output: text,
        })
    }
}

/// The runsc of a sandbox, with its root directory and flags.
#[derive(Debug, Clone)]
pub struct Runsc {
    path: PathBuf,
    /// Of this build alone, see [`flags`].
    own_flags: Vec<String>,
    root: PathBuf,
    platform: String,
    debug_log_dir: Option<PathBuf>,
}

impl Runsc {
    /// The same with the build that runs a given pod.
    #[must_use]
    pub fn build(&self, path: &Path) -> Self {
        let own_flags = match path == self.path {
            true => self.own_flags.clone(),
            false => flags::of(path),
        };
        Self {
            path: path.into(),
            own_flags,
            ..self.clone()
        }
    }

    /// `runsc --root`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether its flags are all that a sandbox' process is told of it: another platform has more, and debug logs have files.
    pub fn is_plain(&self) -> bool {
        self.debug_log_dir.is_none() && self.platform == "systrap"
    }

    /// Of all commands and processes of the sandbox.
    pub fn flags(&self) -> Vec<String> {
        let mut flags = vec![
            "--log-format=json".to_owned(),
            format!("--root={}", self.root.display()),
        ];
        flags.extend(SANDBOX_FLAGS.map(str::to_owned));
        flags.extend(self.own_flags.iter().cloned());
        flags.push(format!("--platform={}", self.platform));
        flags.push(NET_RAW.to_owned());
        flags.push(RESTORE_SPEC_VALIDATION.to_owned());
        flags
    }

    /// runsc writes why it failed to its stderr, which may be the container's own; its log takes the same words.
    fn command(&self, name: &str, log: &OwnedFd) -> Command {
        let mut command = Command::new(&self.path);
        command.arg(format!("--log=/proc/self/fd/{}", log.as_raw_fd()));
        command.args(self.flags());
        if let Some(dir) = &self.debug_log_dir {
            command
                .arg("--debug")
                .arg(format!("--debug-log={}/", dir.display()));
        }
        command.arg(name).stdin(Stdio::null());
        command
    }

    /// Creates a container from the bundle directory; for a root container this starts the sandbox's processes.
    pub fn create(
        &self,
        id: &str,
        bundle: &Path,
        console_socket: Option<&Path>,
        limit: Duration,
    ) -> Result<(), Error> {
        self.run("create", None, limit, |command| {
            command.arg("--bundle").arg(bundle);
            if let Some(socket) = console_socket {
                command.arg("--console-socket").arg(socket);
            }
            command.arg(id);
        })
    }

    /// Starts a created container with `stdio` as its standard streams.
    pub fn start(&self, id: &str, stdio: Option<Stdio3>, limit: Duration) -> Result<(), Error> {
        self.run("start", stdio, limit, |command| {
            command.arg(id);
        })
    }

    /// Restores a container from the image directory, and creates it where it is not there: with a root container, the sandbox. The last container of an image does the work and returns
    /// when the sandbox runs; the others return at once.
    pub fn restore(
        &self,
        id: &str,
        bundle: &Path,
        image: &Path,
        stdio: Option<Stdio3>,
        limit: Duration,
    ) -> Result<(), Error> {
        self.run("restore", stdio, limit, |command| {
            command.arg("--detach").arg("--bundle").arg(bundle);
            command.arg("--image-path").arg(image).arg(id);
        })
    }

    /// Removes a container, killing what is left of it. A container that is not known is a success.
    ///
    /// runsc goes through all it has to do, its own record of the container included, and fails at the end for whatever was in the way: a sandbox that
    /// died while it was told, a file that its bundle took along (gVisor, `runsc/container.Container.Destroy`). So it is asked once more, and
    /// says then whether anything is left.
    pub fn delete(&self, id: &str, limit: Duration) -> Result<(), Error> {
        match self.delete_once(id, limit) {
            Err(Error::Failed { .. }) => self.delete_once(id, limit),
            deleted => deleted,
        }
    }

    fn delete_once(&self, id: &str, limit: Duration) -> Result<(), Error> {
        self.forget_torn(id, limit)?;
        for (_, sandbox) in state::states_of(&self.root, id)? {
            // runsc talks to one that lives, and waits for one that is stopped.
            let _ = Control::connect(&self.root, &sandbox);
        }
        self.run("delete", None, limit, |command| {
            command.arg("--force").arg(id);
        })
    }

    /// Output goes to memory files and not to pipes: runsc's long-lived children inherit it, and a pipe would never end.
    fn run(
        &self,
        name: &str,
        stdio: Option<Stdio3>,
        limit: Duration,
        arguments: impl FnOnce(&mut Command),
    ) -> Result<(), Error> {
        // Not close-on-exec: runsc opens its log through /proc/self/fd.
        let log = memory_file(name, MemfdFlags::empty())?;
        let mut command = self.command(name, &log);
        arguments(&mut command);
        match stdio {
            Some(stdio) => {
                command
                    .stdin(stdio.stdin)
                    .stdout(stdio.stdout)
                    .stderr(stdio.stderr);
            }
            None => {
                command.stdout(Stdio::null()).stderr(Stdio::null());
            }
        }
        let status = finish(name, command, limit)?;
        if status.success() {
            return Ok(());
        }
        Err(Error::Failed {
            command: name.to_owned(),
            status,
            output: last_words(log.into()),
        })
    }
}

/// Why it failed, by its log.
pub fn last_words(log: std::fs::File) -> String {
    last_message(&read_head(log, KEPT_OUTPUT))
}

/// The last JSON line's `msg`: what runsc calls its fatal error, without the stack traces that may follow it. Falls back
/// to the whole text.
fn last_message(log: &str) -> String {
    log.lines()
        .rev()
        .find_map(|line| {
            let value: serde_json::Value = serde_json::from_str(line).ok()?;
            let message = value.get("msg")?.as_str()?;
            Some(crate::control::without_stack(message).to_owned())
        })
        .unwrap_or_else(|| log.to_owned())
}

/// For what runsc has to say.
pub fn memory_file(name: &str, flags: MemfdFlags) -> Result<OwnedFd, Error> {
    rustix::fs::memfd_create("runsc-output", flags).map_err(|errno| Error::Wait {
        command: name.to_owned(),
        source: errno.into(),
    })
}

fn write_to(command: &mut Command, name: &str, output: &OwnedFd) -> Result<(), Error> {
    let duplicate = || {
        output.try_clone().map_err(|source| Error::Wait {
            command: name.to_owned(),
            source,
        })
    };
    command.stdout(duplicate()?).stderr(duplicate()?);
    Ok(())
}

fn finish(name: &str, mut command: Command, limit: Duration) -> Result<ExitStatus, Error> {
    let path = PathBuf::from(command.get_program());
    let child = command
        .spawn()
        .map_err(|source| Error::Spawn { path, source })?;
    wait_within(child, limit)
        .map_err(|source| Error::Wait {
            command: name.to_owned(),
            source,
        })?
        .ok_or_else(|| Error::TimedOut {
            command: name.to_owned(),
            limit,
        })
}

fn read_head(mut file: std::fs::File, kept: u64) -> String {
    let mut bytes = Vec::new();
    // An unreadable message must not hide the failure that it would have explained.
    if file.rewind().is_err() || file.take(kept).read_to_end(&mut bytes).is_err() {
        return "(its output could not be read)".to_owned();
    }
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

/// Waits through a pidfd, so that the end is seen at once and no thread is needed.
fn wait_within(mut child: Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let pid = rustix::process::Pid::from_child(&child);
    let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?;
    if !can_be_read(&pidfd, Instant::now() + limit)? {
        child.kill()?;
        child.wait()?;
        return Ok(None);
    }
    child.wait().map(Some)
}

/// Waits until there is something to read, or the other end is closed; false when it is too late.
pub fn can_be_read(fd: impl AsFd, deadline: Instant) -> std::io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runsc_that_is(program: &str) -> Runsc {
        Runsc {
            path: program.into(),
            own_flags: Vec::new(),
            root: "/nonexistent".into(),
            platform: "systrap".into(),
            debug_log_dir: None,
        }
    }

    fn node_runsc(runsc: Runsc) -> NodeRunsc {
        let node = NodeRunsc::new(&crate::testing::on(Path::new("/nonexistent")));
        NodeRunsc { runsc, ..node }
    }

    #[test]
    fn a_command_that_does_not_end_is_stopped_and_its_effect_unknown() {
        let limit = Duration::from_millis(50);
        let error = node_runsc(runsc_that_is("sleep"))
            .capture("60", &[], limit)
            .expect_err("too slow");
        assert!(matches!(error, Error::TimedOut { .. }));
    }

    #[test]
    fn a_release_is_what_runsc_says_and_nothing_else() {
        assert_eq!(
            release_in("runsc version release-20260905.0\nspec: 1.2.0\n"),
            Some("release-20260905.0")
        );
        for other in [
            "",
            "runsc version \n",
            "runsc version VERSION_MISSING\n",
            "runc version 1.4.3\n",
        ] {
            assert_eq!(release_in(other), None, "{other:?}");
        }
    }

    #[test]
    fn a_failure_carries_what_the_command_printed() {
        let limit = Duration::from_secs(5);
        let error = node_runsc(runsc_that_is("ls"))
            .capture("/does-not-exist", &[], limit)
            .expect_err("fails");
        assert!(error.to_string().contains("does-not-exist"), "{error}");
    }

    #[test]
    fn who_could_not_be_told_at_its_end_is_removed_all_the_same() {
        let program = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/runsc-that-fails");
        for (fails, calls, removed) in [(0, 1, true), (1, 2, true), (2, 2, false)] {
            let dir = tempfile::tempdir().expect("a directory");
            std::fs::write(dir.path().join("fails"), fails.to_string()).expect("written");
            let runsc = Runsc {
                root: dir.path().to_owned(),
                ..runsc_that_is(program)
            };
            let deleted = runsc.delete("c", Duration::from_secs(10));
            assert_eq!(deleted.is_ok(), removed, "{fails}: {deleted:?}");
            let told = std::fs::read_to_string(dir.path().join("calls")).expect("called");
            assert_eq!(told.lines().count(), calls, "{fails}: {told}");
            let all = told.lines().all(|line| line.ends_with("delete --force c"));
            assert!(all, "{told}");
        }
    }

    #[test]
    fn the_last_message_of_a_json_log_is_the_reason() {
        let log = "{\"msg\":\"a warning\"}\n{\"msg\":\"cannot create gofer\\n\"}\n";
        assert_eq!(last_message(log), "cannot create gofer");
        assert_eq!(last_message("plain words"), "plain words");
        let panic = r#"{"msg":"no file:\ngoroutine 3 [running]:\nmain()"}"#;
        assert_eq!(last_message(panic), "no file");
    }
}

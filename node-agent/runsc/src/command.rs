//! The runsc commands. Each runs with a time limit. A command that does not end in time is killed,
//! and its effect is unknown.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::MemfdFlags;
use torpor_core::ids::SandboxId;

use crate::control::{self, Control};
use crate::sigstop;
use crate::state;
use torpor_records::config::Config;

pub mod flags;
mod run;
mod states;

pub use run::{Error, can_be_read, last_words, memory_file};
use run::{capture, finish};

/// Beginning of the output of `runsc --version`.
const VERSION_PREFIX: &str = "runsc version ";
/// Version of a build that was made without one (gVisor, `runsc/version`).
const NO_VERSION: &str = "VERSION_MISSING";

/// Leading digits of a sandbox' hexadecimal id that name its root directory: 256 directories.
const SPREAD: usize = 2;

/// Flags that shape a sandbox. They are in an image's fingerprint: an image is restored only by a
/// runsc with the same flags. `--ignore-cgroups`: Torpor makes the cgroups (see `torpor-cgroup`).
/// `--allow-connected-on-save`: established TCP connections survive a save that leaves the sandbox
/// running.
pub const SANDBOX_FLAGS: [&str; 3] = [
    "--ignore-cgroups",
    "--network=sandbox",
    "--allow-connected-on-save",
];

/// Flag by which gVisor only warns where the spec of a restored container differs from the saved
/// one. [`crate::spec::digest`] compares the parts that have to be the same before a restore.
/// gVisor compares more parts: a Pod with another request of memory (`oomScoreAdj`) could not
/// continue.
const RESTORE_SPEC_VALIDATION: &str = "--restore-spec-validation=warning";

/// Flag without which gVisor takes NET_RAW from every container. [`crate::spec::rewrite`] leaves
/// NET_RAW to the containers whose Pod adds it. An image does not depend on the flag.
const NET_RAW: &str = "--net-raw";

/// stdin, stdout and stderr of a container, passed to the command that starts the container.
#[derive(Debug)]
pub struct Stdio3 {
    pub stdin: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
}

/// The runsc of this node with its flags, and the root directories of its sandboxes.
#[derive(Debug, Clone)]
pub struct NodeRunsc {
    /// Its root is the base directory.
    runsc: Runsc,
}

impl NodeRunsc {
    pub fn new(config: &Config) -> Self {
        let runsc = Runsc {
            path: config.runsc.clone(),
            own_flags: flags::of_build(&config.runsc),
            root: config.runsc_base(),
            platform: config.platform.clone(),
            debug_log_dir: config.debug_log_dir.clone(),
        };
        Self { runsc }
    }

    /// Returns `runsc --root` for a sandbox.
    ///
    /// A restore matches the names in its root directory against patterns several times. With the
    /// records of 300 sandboxes in one directory a restore took a fifth longer. So sandboxes are
    /// spread over directories by the beginning of their ids.
    pub fn root_of(&self, sandbox: &SandboxId) -> PathBuf {
        // Short: the path of a socket has room for 107 bytes, and the socket's name takes 74.
        self.runsc.root.join(&sandbox.as_str()[..SPREAD])
    }

    /// Returns the runsc for one sandbox and its containers.
    pub fn of(&self, sandbox: &SandboxId) -> Runsc {
        Runsc {
            root: self.root_of(sandbox),
            ..self.runsc.clone()
        }
    }

    /// Connects to the sandbox' control socket. Stopped processes of the sandbox continue first.
    pub fn connect(&self, sandbox: &SandboxId) -> Result<Control, control::Error> {
        Control::connect(&self.root_of(sandbox), sandbox.as_str())
    }

    /// Reports whether the processes of a dozing sandbox are stopped (SIGSTOP).
    pub fn is_stopped_by_signal(&self, sandbox: &SandboxId) -> bool {
        sigstop::is_stopped_by_signal(&self.root_of(sandbox), sandbox.as_str())
    }

    /// Returns the first line of `runsc --version`, without its prefix.
    pub fn version(&self, limit: Duration) -> Result<String, Error> {
        let text = self.capture("--version", &[], limit)?;
        let line = text.lines().next().unwrap_or_default();
        Ok(line
            .strip_prefix(VERSION_PREFIX)
            .unwrap_or(line)
            .trim()
            .to_owned())
    }

    /// Returns the text that a command prints, stdout and stderr together.
    pub fn capture(&self, name: &str, args: &[&str], limit: Duration) -> Result<String, Error> {
        capture(&self.runsc.path, name, args, limit)
    }
}

/// Returns the release of gVisor that the program at `path` reports. None: the program is no runsc,
/// or was built without a version.
pub fn release(path: &Path, limit: Duration) -> Result<Option<String>, Error> {
    let text = capture(path, "--version", &[], limit)?;
    Ok(release_in(&text).map(str::to_owned))
}

fn release_in(version: &str) -> Option<&str> {
    let line = version.lines().next()?;
    let release = line.strip_prefix(VERSION_PREFIX)?.trim();
    (!release.is_empty() && release != NO_VERSION).then_some(release)
}

/// The runsc of a sandbox, with its root directory and flags.
#[derive(Debug, Clone)]
pub struct Runsc {
    path: PathBuf,
    /// Flags of this build alone, see [`flags`].
    own_flags: Vec<String>,
    root: PathBuf,
    platform: String,
    debug_log_dir: Option<PathBuf>,
}

impl Runsc {
    /// Returns a copy that runs the build at `path`: the build of a given pod.
    #[must_use]
    pub fn build(&self, path: &Path) -> Self {
        let own_flags = match path == self.path {
            true => self.own_flags.clone(),
            false => flags::of_build(path),
        };
        Self {
            path: path.into(),
            own_flags,
            ..self.clone()
        }
    }

    /// Returns the directory of `runsc --root`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reports whether [`Self::flags`] are all that a sandbox' process gets from runsc. Another
    /// platform adds arguments, and debug logs add files.
    pub fn is_plain(&self) -> bool {
        self.debug_log_dir.is_none() && self.platform == "systrap"
    }

    /// Returns the flags of all commands and processes of the sandbox.
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

    /// Returns a command whose log is `log`. runsc writes the reason of a failure to its log and to
    /// its stderr, which may be the container's own stream.
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

    /// Creates a container from the bundle directory. A root container's creation starts the
    /// sandbox's processes.
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

    /// Restores a container from the image directory. A container that does not exist is created; a
    /// root container's creation makes the sandbox. The call for an image's last container does the
    /// work and returns when the sandbox runs. The other calls return at once.
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

    /// Removes a container and kills its remaining processes. An unknown container is a success.
    ///
    /// runsc does all steps of the removal, its own record of the container included. It fails at
    /// the end where a step failed: the sandbox died during the call, or a file went away with the
    /// bundle (gVisor, `runsc/container.Container.Destroy`). So a failed removal is done once more.
    /// The second call fails only where something is left.
    pub fn delete(&self, id: &str, limit: Duration) -> Result<(), Error> {
        match self.delete_once(id, limit) {
            Err(Error::Failed { .. }) => self.delete_once(id, limit),
            deleted => deleted,
        }
    }

    fn delete_once(&self, id: &str, limit: Duration) -> Result<(), Error> {
        self.remove_torn_states(id, limit)?;
        for (_, sandbox) in state::states_of(&self.root, id)? {
            // runsc calls a live sandbox, and would wait for a stopped one.
            let _ = Control::connect(&self.root, &sandbox);
        }
        self.run("delete", None, limit, |command| {
            command.arg("--force").arg(id);
        })
    }

    /// Runs a command and returns an error with its log's last message where it fails. Output goes
    /// to files in memory and not to pipes: runsc's long-lived children inherit it, and a pipe
    /// would never end.
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
        NodeRunsc { runsc }
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
    fn the_release_is_read_only_from_runscs_version_line() {
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
    fn a_failed_delete_is_tried_once_more() {
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
            let log = std::fs::read_to_string(dir.path().join("calls")).expect("called");
            assert_eq!(log.lines().count(), calls, "{fails}: {log}");
            let all = log.lines().all(|line| line.ends_with("delete --force c"));
            assert!(all, "{log}");
        }
    }
}

//! Restarts containerd and waits until it serves again.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use torpor_runsc::process::{self, Stat};

use super::error::Error;
use super::host::HostRoot;
use crate::args::{ContainerdArgs, ContainerdRestart};

/// Interval of polls of a state that gives no notice of its changes.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The time by which a restart must be complete.
#[derive(Debug, Clone, Copy)]
struct Deadline {
    at: Instant,
    limit: Duration,
}

impl Deadline {
    fn new(limit: Duration) -> Self {
        Self {
            at: Instant::now() + limit,
            limit,
        }
    }

    /// Polls until `poll` returns a value, and returns that value. After the deadline returns
    /// [`Error::RestartUnknown`] with the last error of `poll`.
    fn wait<T>(
        self,
        what: impl FnOnce() -> String,
        mut poll: impl FnMut() -> io::Result<Option<T>>,
    ) -> Result<T, Error> {
        let mut last_error = None;
        loop {
            match poll() {
                Ok(Some(value)) => return Ok(value),
                Ok(None) => {}
                Err(error) => last_error = Some(error),
            }
            if Instant::now() >= self.at {
                let cause = last_error.map(|error| format!(" ({error})"));
                let cause = cause.unwrap_or_default();
                let what = what() + &cause;
                return Err(Error::RestartUnknown {
                    what,
                    seconds: self.limit.as_secs(),
                });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Restarts containerd. Returns whether a restart was observed; false if an administrator must
/// restart containerd ([`ContainerdRestart::None`]).
pub(super) fn restart(host: &HostRoot, containerd: &ContainerdArgs) -> Result<bool, Error> {
    let deadline = Deadline::new(containerd.containerd_restart_timeout);
    match &containerd.containerd_restart {
        ContainerdRestart::None => return Ok(false),
        ContainerdRestart::Systemd(unit) => systemd(unit, deadline)?,
        ContainerdRestart::Pidfile(path) => pidfile(&host.path(path)?, deadline)?,
    }
    let socket = host.path(&containerd.containerd_socket)?;
    deadline.wait(
        || format!("containerd did not answer at {}", socket.display()),
        || UnixStream::connect(&socket).map(Some),
    )?;
    Ok(true)
}

/// One run of a process. A later process may have an equal id, but not with an equal start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    pid: Pid,
    /// Start time in clock ticks since the machine started.
    started: u64,
}

/// Returns the containerd that a pidfile names, if that process lives. After a crash the pidfile
/// may name an unrelated process; the result is then None.
fn named_run(pidfile: &Path) -> io::Result<Option<Run>> {
    let text = match fs::read_to_string(pidfile) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text?,
    };
    // The file is empty until containerd writes its id.
    let Ok(pid) = text.trim().parse::<i32>() else {
        return Ok(None);
    };
    let started = process::stat(pid).and_then(|stat| living(&stat, "containerd"));
    Ok(started.map(|started| Run {
        pid: Pid::from_raw(pid),
        started,
    }))
}

/// Returns the start time of the process; None if the process has ended or has another name.
fn living(stat: &Stat, name: &str) -> Option<u64> {
    (stat.comm == name && !process::has_ended(stat)).then_some(stat.starttime)
}

fn pidfile(path: &Path, deadline: Deadline) -> Result<(), Error> {
    let before = named_run(path).map_err(|source| Error::Read {
        path: path.into(),
        source,
    })?;
    if let Some(run) = before {
        match kill(run.pid, Signal::SIGTERM) {
            // ESRCH: the process has ended meanwhile. Its successor is all that counts.
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(errno) => {
                return Err(Error::Signal {
                    pid: run.pid.as_raw(),
                    source: errno.into(),
                });
            }
        }
    }
    deadline.wait(
        || format!("{} did not name a new containerd process", path.display()),
        || named_run(path).map(|run| run.filter(|run| Some(*run) != before)),
    )?;
    Ok(())
}

/// Runs `systemctl restart` on the host, in a thread of its own: only a thread that does not share
/// its root and working directory may change its mount namespace (setns(2)).
fn systemd(unit: &str, deadline: Deadline) -> Result<(), Error> {
    let unit = unit.to_owned();
    let thread = std::thread::Builder::new()
        .name("host-systemctl".to_owned())
        .spawn(move || {
            enter_host().map_err(Error::EnterHost)?;
            systemctl(&unit, deadline)
        })
        .map_err(Error::EnterHost)?;
    match thread.join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn enter_host() -> io::Result<()> {
    unshare(CloneFlags::CLONE_FS)?;
    let mounts = File::open("/proc/1/ns/mnt")?;
    setns(mounts, CloneFlags::CLONE_NEWNS)?;
    Ok(())
}

fn systemctl(unit: &str, deadline: Deadline) -> Result<(), Error> {
    let mut child = Command::new("systemctl")
        .args(["restart", "--", unit])
        .env(
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        )
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(Error::NoSystemctl)?;
    let what = || format!("systemctl did not restart {unit}");
    let status = match deadline.wait(what, || child.try_wait()) {
        Ok(status) => status,
        Err(error) => {
            end(&mut child);
            return Err(error);
        }
    };
    if status.success() {
        return Ok(());
    }
    let mut message = String::new();
    if let Some(stderr) = child.stderr.take() {
        // The output is only for people: a part of it is better than none.
        let _ = stderr.take(4096).read_to_string(&mut message);
    }
    let message = format!("{status}: {}", message.trim().replace('\n', "; "));
    Err(Error::Systemctl {
        unit: unit.to_owned(),
        message,
    })
}

/// Ends the `systemctl` process. The job that `systemctl` has requested from systemd continues.
fn end(child: &mut Child) {
    // `kill` fails only for a process that has ended.
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(name: &str, state: char) -> Stat {
        let line = format!(
            "42 ({name}) {state} 1 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 9 0 123456 99 1 1 0 0 0 0 0 0 0 0 0 0 0 0 17 1"
        );
        process::stat_in(line.as_bytes()).expect("understood")
    }

    #[test]
    fn a_process_is_containerd_only_by_name_and_while_it_lives() {
        assert_eq!(
            living(&stat("containerd", 'S'), "containerd"),
            Some(123_456)
        );
        assert_eq!(living(&stat("containerd", 'Z'), "containerd"), None);
        assert_eq!(living(&stat("sshd", 'S'), "containerd"), None);
        assert_eq!(living(&stat("a) S (containerd", 'S'), "containerd"), None);
    }

    #[test]
    fn a_pidfile_of_an_ended_or_unknown_process_names_no_process() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("containerd.pid");
        assert_eq!(named_run(&path).expect("looked"), None);
        for content in ["", "x", "2147483646\n", &std::process::id().to_string()] {
            fs::write(&path, content).expect("write");
            assert_eq!(named_run(&path).expect("looked"), None, "{content:?}");
        }
    }
}

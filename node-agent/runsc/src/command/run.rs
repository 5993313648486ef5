//! Running one command of runsc with a time limit, and reading its output.

use std::io::{Read, Seek};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;

use crate::control::without_stack;
use crate::state;

/// Bytes of a command's log that are read for an error message.
const MAX_LOG: u64 = 16 << 10;
/// Bytes of a help text that are read.
const MAX_PRINTED: u64 = 256 << 10;

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

/// Returns the text, stdout and stderr together, that a command of the program at `path` prints.
pub(super) fn capture(
    path: &Path,
    name: &str,
    args: &[&str],
    limit: Duration,
) -> Result<String, Error> {
    let output = memory_file(name, MemfdFlags::CLOEXEC)?;
    let mut command = Command::new(path);
    command.arg(name).args(args).stdin(Stdio::null());
    write_to(&mut command, name, &output)?;
    let status = finish(name, command, limit)?;
    let text = read_head(output.into(), MAX_PRINTED);
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

/// Returns the reason of a failure from runsc's log in JSON.
pub fn last_words(log: std::fs::File) -> String {
    last_message(&read_head(log, MAX_LOG))
}

/// Returns the `msg` of the last JSON line, without the stack traces that may follow. runsc logs
/// its fatal error there. Returns the whole text where no line is JSON with a `msg`.
fn last_message(log: &str) -> String {
    log.lines()
        .rev()
        .find_map(|line| {
            let value: serde_json::Value = serde_json::from_str(line).ok()?;
            let message = value.get("msg")?.as_str()?;
            Some(without_stack(message).to_owned())
        })
        .unwrap_or_else(|| log.to_owned())
}

/// Makes a file in memory for the output of the runsc command `name`.
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

/// Starts the command and waits for its end. A command that exceeds `limit` is killed.
pub(super) fn finish(
    name: &str,
    mut command: Command,
    limit: Duration,
) -> Result<ExitStatus, Error> {
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
    // An unreadable message must not hide the failure that the message would have explained.
    if file.rewind().is_err() || file.take(kept).read_to_end(&mut bytes).is_err() {
        return "(its output could not be read)".to_owned();
    }
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

/// Waits for the end of the child, and kills the child at the limit: then it returns None. The wait
/// uses a pidfd: the end is noticed at once, and no thread is needed.
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

/// Waits until `fd` has bytes to read, or its other end is closed. Returns false at the deadline.
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

    #[test]
    fn the_last_message_of_a_json_log_is_the_reason() {
        let log = "{\"msg\":\"a warning\"}\n{\"msg\":\"cannot create gofer\\n\"}\n";
        assert_eq!(last_message(log), "cannot create gofer");
        assert_eq!(last_message("plain words"), "plain words");
        let panic = r#"{"msg":"no file:\ngoroutine 3 [running]:\nmain()"}"#;
        assert_eq!(last_message(panic), "no file");
    }
}

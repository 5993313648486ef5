//! Commands of this program on the sandbox, run as children of the shim.
//!
//! Each prints its answer. Its exit code is not used: the shim's reaper may have taken it.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail};
use containerd_shim::TtrpcContext;
use crossbeam::channel::TryRecvError;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use torpor_core::ids::ContainerId;
use torpor_messages::keeper::Answer;
use torpor_messages::wire::{MAX_MESSAGE, receive};

use crate::commands::child;
use crate::keeper::Handover;

/// The client of a call, which gives the call up when it ends. A client whose limit of time is over
/// is not noticed: the limits of the commands are below the kubelet's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller<'a>(pub(crate) &'a TtrpcContext);

impl Caller<'_> {
    /// Reports whether nobody waits for the answer any more.
    pub(crate) fn is_gone(self) -> bool {
        // The library closes the channel with the connection.
        self.0.cancel_rx.try_recv() == Err(TryRecvError::Disconnected)
    }
}

/// The answer of a command that has failed.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Refused {
    pub(crate) reason: String,
    message: String,
}

/// Runs a command to its end, also if its caller is gone.
pub(crate) fn run(name: &str, args: &[&str]) -> anyhow::Result<()> {
    finish(name, child(name).args(args), None)
}

/// Runs a command, and kills it if its caller is gone. containerd takes a container whose start it
/// has not seen for one that has not started, and ends it: a program that was restored meanwhile
/// would lose its memory.
pub(crate) fn run_for(caller: Caller<'_>, name: &str, args: &[&str]) -> anyhow::Result<()> {
    finish(name, child(name).args(args), Some(caller))
}

/// Runs a command that continues when the caller of this process kills this process.
pub(crate) fn run_detached(name: &str, args: &[&str]) -> anyhow::Result<()> {
    finish(name, child(name).args(args).process_group(0), None)
}

fn finish(name: &str, command: &mut Command, caller: Option<Caller<'_>>) -> anyhow::Result<()> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run the command {name}"))?;
    let mut text = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        if let Some(caller) = caller {
            kill_without_caller(&child, stdout.as_fd(), caller)?;
        }
        let limit = MAX_MESSAGE as u64;
        stdout.take(limit).read_to_end(&mut text)?;
    }
    // The reaper may have waited for it.
    let _ = child.wait();
    succeeded(name, &text).map(drop)
}

/// Time between two looks whether the caller of a command is still there.
const LOOK_INTERVAL: u16 = 20;

/// Waits until the command answers, and kills it if its caller is gone before.
fn kill_without_caller(
    child: &Child,
    answer: BorrowedFd<'_>,
    caller: Caller<'_>,
) -> anyhow::Result<()> {
    // A command that has ended already has answered.
    let Ok(command) = pidfd_open(Pid::from_child(child), PidfdFlags::empty()) else {
        return Ok(());
    };
    loop {
        let mut fds = [PollFd::new(answer, PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::from(LOOK_INTERVAL)) {
            Ok(0) if caller.is_gone() => {
                // A command that has just ended needs no signal.
                let _ = pidfd_send_signal(&command, Signal::KILL);
                return Ok(());
            }
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error).context("cannot wait for a command"),
        }
    }
}

fn succeeded(name: &str, text: &[u8]) -> anyhow::Result<Answer> {
    if text.is_empty() {
        bail!("the command {name} has ended without an answer");
    }
    let answer: Answer = serde_json::from_slice(text)
        .with_context(|| format!("cannot parse the answer of the command {name}"))?;
    match answer.ok {
        true => Ok(answer),
        false => Err(anyhow::Error::new(Refused {
            reason: answer.reason,
            message: answer.message,
        })),
    }
}

/// Creates a container; returns what its keeper gets.
pub(crate) fn create(
    caller: Caller<'_>,
    bundle: &Path,
    id: &ContainerId,
) -> anyhow::Result<(Handover, Vec<OwnedFd>)> {
    let name = "create";
    let (unix, packets) = (AddressFamily::Unix, SockType::SeqPacket);
    let (own, far) = socketpair(unix, packets, None, SockFlag::SOCK_CLOEXEC)
        .context("cannot make a pair of sockets")?;
    let bundle = bundle.to_str().context("the bundle's path is not UTF-8")?;
    // The child's end is the only other one from here on.
    let mut child = child(name)
        .args([bundle, id.as_str()])
        .stdout(far)
        .spawn()
        .context("cannot run the command create")?;
    kill_without_caller(&child, own.as_fd(), caller)?;
    let received = receive(&own).context("cannot receive the new container's descriptors");
    let _ = child.wait();
    let (text, files) = received?;
    let answer = succeeded(name, &text)?;
    Ok((serde_json::from_value(answer.detail)?, files))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_without_an_answer_has_failed() {
        let error = succeeded("start", b"").expect_err("no answer");
        assert_eq!(
            error.to_string(),
            "the command start has ended without an answer"
        );
        let text = br#"{"ok":false,"reason":"Failed","message":"no room"}"#;
        let error = succeeded("start", text).expect_err("a refusal");
        assert_eq!(error.to_string(), "no room");
        let refused = error
            .downcast_ref::<Refused>()
            .expect("the command's reason");
        assert_eq!(refused.reason, "Failed");
        succeeded("start", br#"{"ok":true}"#).expect("an answer");
    }
}

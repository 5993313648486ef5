//! Commands of this program on the sandbox, run as children of the shim.
//!
//! Each prints its answer. Its exit code is not used: the shim's reaper may have taken it.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use torpor_core::ids::ContainerId;
use torpor_oci::keeper::Handover;
use torpor_runsc::keeper::{Answer, MAX_MESSAGE, receive};

/// Returns a command of this program, which runs in the root directory with this name.
fn command(name: &str, args: &[&str]) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0(format!("torpor-{name}"));
    command.arg(name).args(args).current_dir("/");
    command.stdin(Stdio::null());
    command
}

/// Runs a command on a container to its end.
pub(crate) fn run(name: &str, args: &[&str]) -> anyhow::Result<()> {
    finish(name, command(name, args).arg("--answer"))
}

/// Runs a command that continues when the caller of this process kills this process.
pub(crate) fn run_detached(name: &str, args: &[&str]) -> anyhow::Result<()> {
    finish(name, command(name, args).arg("--answer").process_group(0))
}

fn finish(name: &str, command: &mut Command) -> anyhow::Result<()> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run the command {name}"))?;
    let mut text = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        let limit = MAX_MESSAGE as u64;
        stdout.take(limit).read_to_end(&mut text)?;
    }
    // The reaper may have waited for it.
    let _ = child.wait();
    succeeded(name, &text).map(drop)
}

fn succeeded(name: &str, text: &[u8]) -> anyhow::Result<Answer> {
    if text.is_empty() {
        bail!("the command {name} has ended without an answer");
    }
    let answer: Answer = serde_json::from_slice(text)
        .with_context(|| format!("cannot parse the answer of the command {name}"))?;
    if !answer.ok {
        bail!(answer.message);
    }
    Ok(answer)
}

/// Creates a container; returns what its keeper gets.
pub(crate) fn create(bundle: &Path, id: &ContainerId) -> anyhow::Result<(Handover, Vec<OwnedFd>)> {
    let name = "create-in-shim";
    let (unix, packets) = (AddressFamily::Unix, SockType::SeqPacket);
    let (own, far) = socketpair(unix, packets, None, SockFlag::SOCK_CLOEXEC)
        .context("cannot make a pair of sockets")?;
    let bundle = bundle.to_str().context("the bundle's path is not UTF-8")?;
    let mut command = command(name, &[bundle, id.as_str()]);
    let mut child = command
        .stdout(far)
        .spawn()
        .context("cannot run the command create-in-shim")?;
    // The child's end is the only other one from here on.
    drop(command);
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
        succeeded("start", br#"{"ok":true}"#).expect("an answer");
    }
}

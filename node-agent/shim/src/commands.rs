//! Work on a sandbox that runs in a process of its own: it must survive the shim's death, hold the
//! pod's lock to its end, or put its children into the pod's cgroup.

use std::os::unix::process::CommandExt;
use std::process::{self, ExitCode, Stdio};

use anyhow::ensure;
use clap::Parser;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use serde_json::Value;
use torpor_messages::keeper::Answer;
use torpor_sandbox::node::Node;
use torpor_sandbox::restore::transitions;
use torpor_sandbox::{doze, log_line, restore};

use crate::args::{Cli, Command};
use crate::rootfs;

mod create;
mod delete;
mod forward;
mod kill;
mod pause;
mod start;
mod steps;

pub(crate) use kill::FINISHED;

/// Reason of a failed command whose error has none.
const FAILED: &str = "Failed";

/// Returns a command of this program to run as a child: in the root directory, with this name, and
/// without input.
pub(crate) fn child(name: &str) -> process::Command {
    let mut command = process::Command::new("/proc/self/exe");
    command.arg0(format!("torpor-{name}")).arg(name);
    command.current_dir("/").stdin(Stdio::null());
    command
}

/// Runs the command that this process' arguments name.
pub(crate) fn run() -> ExitCode {
    let command = Cli::parse().command;
    match with_descriptors(&command) {
        Some(Ok(code)) => code,
        Some(Err(error)) => {
            log_line!("{error:#}");
            ExitCode::FAILURE
        }
        None => restore::answer(FAILED, answered(&command)),
    }
}

/// Has this process killed when the shim ends: containerd takes the containers of a dead shim for
/// ended.
fn end_with_shim() -> anyhow::Result<()> {
    let shim = getppid();
    set_parent_process_death_signal(Some(Signal::KILL))?;
    ensure!(getppid() == shim, "the shim has ended");
    Ok(())
}

/// Runs a command whose standard input or output is a connection.
fn with_descriptors(command: &Command) -> Option<anyhow::Result<ExitCode>> {
    let done = match command {
        Command::Create { bundle, id } => end_with_shim()
            .and_then(|()| Node::load())
            .and_then(|node| create::create(&node, bundle, id)),
        Command::Forward { sandbox } => Node::load()
            .and_then(|node| forward::forward(&node, sandbox))
            .map(|()| ExitCode::SUCCESS),
        Command::Steps { sandbox } => Node::load()
            .and_then(|node| steps::take(&node, sandbox))
            .map(|()| ExitCode::SUCCESS),
        Command::SandboxProcess { .. } => torpor_runsc_direct::become_process()
            .map(|()| ExitCode::SUCCESS)
            .map_err(anyhow::Error::new),
        _ => return None,
    };
    Some(done)
}

/// Runs a command that prints its answer.
fn answered(command: &Command) -> anyhow::Result<Answer> {
    let node = &Node::load()?;
    if let Command::Start { .. } | Command::WakeUp { .. } = command {
        end_with_shim()?;
    }
    match command {
        Command::Start { id } => start::start(node, id)?,
        Command::Kill { id, signal, all } => kill::kill(node, id, *signal, *all)?,
        Command::Delete { id, force, bundle } => {
            delete::delete(node, id, *force)?;
            if let Some(bundle) = bundle {
                rootfs::unmount(bundle);
            }
        }
        Command::Pause { id } => pause::pause(node, id)?,
        Command::Resume { id } => pause::resume(node, id)?,
        Command::WakeUp { sandbox, cause } => {
            transitions::lock_awake(node, sandbox, *cause).map(drop)?;
        }
        Command::Wake { sandbox, cause } => doze::wake(node, sandbox, *cause)?,
        Command::Create { .. }
        | Command::Forward { .. }
        | Command::Steps { .. }
        | Command::SandboxProcess { .. } => {}
    }
    Ok(Answer::ok(Value::Null))
}

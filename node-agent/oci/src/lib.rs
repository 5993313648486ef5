//! The commands on a container of a pod of the RuntimeClass `torpor`, and its keeper.
//!
//! All containers of a pod, the pause container too, run in one gVisor sandbox. Each container has
//! a keeper, which containerd watches in place of the container's first process. So the sandbox can
//! be hibernated while containerd, the kubelet and the user see a running Pod.
//!
//! Two programs have this code. Torpor's shim runs the keepers as its threads and each command as a
//! child process. torpor-oci is the OCI runtime for containerd's stock `io.containerd.runc.v2`
//! shim: there each keeper is a process.

mod args;
mod create;
mod delete;
pub mod exec;
mod forward;
pub mod keeper;
mod kill;
mod start;
mod state;
mod writer;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use torpor_records::{Session, WakeCause};
use torpor_runsc::keeper::Answer;

use crate::args::{Cli, Command};
use torpor_sandbox::node::Node;
use torpor_sandbox::restore::transitions;
use torpor_sandbox::{doze, generation, restore};

/// Reason of a failed command that has no other.
const FAILED: &str = "Failed";

/// Runs the command that this process' arguments name.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    if cli.answer {
        let done = run(&cli).map(|_| Answer::ok(serde_json::Value::Null));
        return restore::answer(FAILED, done);
    }
    match run(&cli) {
        Ok(code) => code,
        Err(error) => {
            report(&cli, "error", &error);
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> anyhow::Result<ExitCode> {
    if let Command::Features = cli.command {
        println!("{}", state::features());
        return Ok(ExitCode::SUCCESS);
    }
    if let Command::ProbeAnswer = cli.command {
        return Ok(ExitCode::SUCCESS);
    }
    if let Command::ForwardInside { port } = cli.command {
        // This command runs in the sandbox, where there are no files of the node.
        forward::inside(port)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Command::SetGeneration { generation } = &cli.command {
        generation::set(generation)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Command::SandboxProcess { .. } = cli.command {
        // The process uses only what the wake sends to it, and no other files of the node.
        torpor_runsc_direct::become_process()?;
        return Ok(ExitCode::SUCCESS);
    }
    let node = Node::load()?;
    match &cli.command {
        Command::Create(args) => {
            for warning in create::create(&node, args)? {
                report(cli, "warning", &warning);
            }
        }
        Command::CreateInShim { bundle, id } => return create::create_in_shim(&node, bundle, id),
        Command::Start { id } => start::start(&node, id)?,
        Command::State { id } => println!("{}", state::state(&node, id)?),
        Command::Kill { id, signal, all } => kill::kill(&node, id, signal, *all)?,
        Command::Delete { id, force: true } => delete::delete_by_force(id)?,
        Command::Delete { id, force: false } => delete::delete(&node, id, false)?,
        Command::Remove { id } => delete::delete(&node, id, true)?,
        Command::Bereave { id } => kill::handle_lost_keeper(&node, id)?,
        Command::EndExec { id, pid } => exec::end(&node, id, *pid),
        Command::Exec(args) => exec::exec(&node, args)?,
        Command::Pause { id } => state::pause(&node, id)?,
        Command::Resume { id } => state::resume(&node, id)?,
        Command::Ps { id, .. } => println!("{}", state::processes(&node, id)?),
        // The kubelet sets limits on the pod's cgroup: see docs/architecture.md "Cgroups".
        Command::Update { id, .. } => node.container(id).map(drop)?,
        Command::Wake {
            sandbox,
            image,
            cause,
        } => {
            let woken = match image {
                Some(image) => {
                    let cause = cause.unwrap_or(WakeCause::Asked);
                    restore::wake(&node, sandbox, image, cause)
                }
                None => doze::wake(&node, sandbox, cause.unwrap_or(WakeCause::Packet)),
            };
            return Ok(restore::answer("WakeFailed", woken));
        }
        Command::WakeUp { sandbox, cause } => {
            transitions::lock_awake(&node, sandbox, *cause).map(drop)?;
        }
        Command::Doze { sandbox, image } => {
            let dozes = doze::doze(&node, sandbox, image);
            return Ok(restore::answer("DozeFailed", dozes));
        }
        Command::End { sandbox, image } => {
            let ended = restore::end(&node, sandbox, image);
            return Ok(restore::answer("EndFailed", ended));
        }
        Command::Traffic { sandbox } => {
            let traffic = state::traffic(&node, sandbox);
            return Ok(restore::answer("TrafficUnknown", traffic));
        }
        Command::Measure { sandbox } => {
            let measured = writer::measure(&node, sandbox);
            return Ok(restore::answer("MeasureFailed", measured));
        }
        Command::ForceEnd { sandbox } => {
            let ended = writer::force_end(&node, sandbox);
            return Ok(restore::answer("EndFailed", ended));
        }
        Command::ExecWaiter {
            sandbox,
            id,
            pid,
            terminal,
            probe,
            used_micros,
        } => {
            if *probe {
                return exec::wait_for_probe(&node, sandbox, id, *pid, *used_micros);
            }
            return exec::wait(&node, sandbox, id, *pid, *terminal, Session::Use);
        }
        Command::Keeper(args) => return keeper::run(&node, args),
        Command::Forward { sandbox } => forward::forward(&node, sandbox)?,
        Command::Features
        | Command::ProbeAnswer
        | Command::SandboxProcess { .. }
        | Command::ForwardInside { .. }
        | Command::SetGeneration { .. } => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the message to standard error and, if `--log` is given, to the log file. The shim reads
/// the reason of a failure from the log file, and the kubelet shows it in `kubectl describe pod`.
fn report(cli: &Cli, level: &str, error: &anyhow::Error) {
    let message = format!("torpor-oci: {error:#}");
    if let Some(path) = &cli.log {
        let line = serde_json::json!({ "level": level, "msg": message }).to_string();
        let file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path);
        // The message goes to standard error in any case.
        let _ = file.and_then(|mut file| writeln!(file, "{line}"));
    }
    // The parent of this process may have been killed, and its end of the pipe closed.
    let _ = writeln!(std::io::stderr(), "{message}");
}

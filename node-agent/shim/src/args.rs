//! The commands that the shim and keepers run as child processes.

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_records::WakeCause;

/// containerd's shim for Kubernetes Pods in gVisor sandboxes that can be hibernated.
///
/// containerd starts it with flags (-namespace, -id and others). With the name of a command it does
/// one piece of work on a sandbox, for a shim that runs.
#[derive(Debug, Parser)]
#[command(
    name = "containerd-shim-torpor-v1",
    version = concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("TORPOR_GIT_COMMIT"), ")"),
    about
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Each command prints a JSON answer, unless its description says otherwise.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create a container whose keeper is a thread of the parent process, the shim. Standard output
    /// is a socket to the shim, for the answer and the keeper's descriptors
    Create { bundle: PathBuf, id: ContainerId },
    /// Start a created container
    Start { id: ContainerId },
    /// Send a signal to a container
    Kill {
        id: ContainerId,
        signal: i32,
        /// Send it to all of the container's processes
        #[arg(long)]
        all: bool,
    },
    /// Remove a container
    Delete {
        id: ContainerId,
        /// Its shim is dead. Succeed if it does not exist
        #[arg(long)]
        force: bool,
        /// Its bundle, whose root file system is unmounted afterwards
        #[arg(long)]
        bundle: Option<PathBuf>,
    },
    /// Pause the pod's sandbox
    Pause { id: ContainerId },
    /// Resume the pod's sandbox
    Resume { id: ContainerId },
    /// Wake a sandbox for a caller that needs it
    WakeUp {
        sandbox: SandboxId,
        /// Cause of the wake
        #[arg(long)]
        cause: WakeCause,
    },
    /// Wake a hibernated or dozing sandbox
    Wake {
        sandbox: SandboxId,
        /// Cause of the wake
        #[arg(long)]
        cause: WakeCause,
    },
    /// Take the steps of the agent's plan, which standard input has. Standard output is a socket to
    /// the agent, for the outcome of each step
    Steps { sandbox: SandboxId },
    /// Wake the sandbox and carry one connection to the pod's loopback into it. Standard input is
    /// the connection; prints nothing
    Forward { sandbox: SandboxId },
    /// Become a sandbox's first process, or a container's gofer. Standard input is the connection
    /// to the wake; prints nothing
    #[command(name = torpor_runsc_direct::COMMAND)]
    SandboxProcess {
        /// Id of the container, shown in the machine's list of processes
        id: ContainerId,
    },
}

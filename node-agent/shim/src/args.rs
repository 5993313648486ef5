//! The commands that the shim and keepers run as child processes.

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use torpor_core::ids::{ClaimUid, ContainerId, ImageId, SandboxId};
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
    /// Wake a hibernated or dozing sandbox. With an image: for the agent, which writes the ledger;
    /// standard input holds the pod's lock
    Wake {
        sandbox: SandboxId,
        image: Option<ImageId>,
        /// Cause of the wake
        #[arg(long)]
        cause: Option<WakeCause>,
    },
    /// Push the memory of a dozing sandbox into swap (standard input holds the pod's lock)
    Doze { sandbox: SandboxId, image: ImageId },
    /// End the processes of a sandbox whose image is committed (standard input holds the pod's
    /// lock)
    End { sandbox: SandboxId, image: ImageId },
    /// Print when the pod's links last carried a packet (standard input holds the pod's lock)
    Traffic { sandbox: SandboxId },
    /// Print the size of the files in which gVisor keeps the containers' writes (standard input
    /// holds the pod's lock)
    Measure { sandbox: SandboxId },
    /// Bring a claim into a sandbox that runs (standard input holds the pod's lock)
    Bind {
        sandbox: SandboxId,
        /// UID of the claim
        #[arg(long)]
        claim: ClaimUid,
    },
    /// End every process of a sandbox that still writes an image after its save was stopped
    /// (standard input holds the pod's lock)
    ForceEnd { sandbox: SandboxId },
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
    /// Write the generation of the container in which this command runs (run in the sandbox after a
    /// restore); prints nothing
    SetGeneration { generation: String },
    /// Succeed if the container in which this command runs has the mark of the claim; prints
    /// nothing
    HasClaim { claim: ClaimUid },
    /// Mark the container in which this command runs: the claim has arrived; prints nothing
    SetClaim { claim: ClaimUid },
    /// Connect to a port in the sandbox and carry its bytes to and from standard input (the part of
    /// forward that runs in the sandbox)
    ForwardInside { port: u16 },
}

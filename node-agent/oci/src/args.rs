//! The command line that go-runc, the shim's library, uses.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use torpor_core::ids::{ContainerId, ImageId, SandboxId};
use torpor_records::WakeCause;

/// OCI runtime that runs a Kubernetes Pod in one gVisor sandbox and can hibernate it.
#[derive(Debug, Parser)]
#[command(
    name = "torpor-oci",
    version = concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("TORPOR_GIT_COMMIT"), ")"),
    about
)]
pub(crate) struct Cli {
    /// Accepted and ignored: torpor-oci.json names the state directory.
    #[arg(long)]
    root: Option<PathBuf>,
    /// File for the reason of a failure, in JSON lines.
    #[arg(long)]
    pub(crate) log: Option<PathBuf>,
    /// Accepted and ignored: the log is JSON.
    #[arg(long)]
    log_format: Option<String>,
    /// Accepted and ignored: both forms of cgroup paths work without it.
    #[arg(long)]
    systemd_cgroup: bool,
    /// Accepted and ignored.
    #[arg(long)]
    debug: bool,
    /// Print a JSON answer to standard output (for the shim)
    #[arg(long, hide = true, global = true)]
    pub(crate) answer: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create a container
    Create(CreateArgs),
    /// Create a container whose keeper is a thread of the parent process, the shim. Standard output
    /// is a socket to it, for a JSON answer and the keeper's descriptors
    #[command(hide = true)]
    CreateInShim { bundle: PathBuf, id: ContainerId },
    /// Start a created container
    Start { id: ContainerId },
    /// Print the state of a container
    State { id: ContainerId },
    /// Send a signal to a container
    Kill {
        id: ContainerId,
        #[arg(default_value = "TERM")]
        signal: String,
        /// Send it to all of the container's processes
        #[arg(long, short)]
        all: bool,
    },
    /// Remove a container
    Delete {
        id: ContainerId,
        /// Kill the container first; succeed if it does not exist
        #[arg(long, short)]
        force: bool,
    },
    /// Remove a container by force, however long it takes (run by delete --force)
    #[command(hide = true)]
    Remove { id: ContainerId },
    /// Run a process in a container; wakes a hibernated one
    Exec(ExecArgs),
    /// Pause the pod's sandbox
    Pause { id: ContainerId },
    /// Resume the pod's sandbox
    Resume { id: ContainerId },
    /// List the processes that stand for a container on the host
    Ps {
        #[arg(long, short)]
        format: Option<String>,
        id: ContainerId,
    },
    /// Accept new limits
    Update {
        #[arg(long, short)]
        resources: Option<PathBuf>,
        id: ContainerId,
    },
    /// Print what this runtime supports
    Features,
    /// Wake a hibernated or dozing sandbox and print a JSON answer (run by a keeper). With an
    /// image: for the agent, which writes the ledger; standard input holds the pod's lock
    #[command(hide = true)]
    Wake {
        sandbox: SandboxId,
        image: Option<ImageId>,
        /// Cause of the wake
        #[arg(long)]
        cause: Option<WakeCause>,
    },
    /// Wake a sandbox for a caller that needs it
    #[command(hide = true)]
    WakeUp {
        sandbox: SandboxId,
        /// Cause of the wake
        #[arg(long)]
        cause: WakeCause,
    },
    /// Push the memory of a dozing sandbox into swap, and print a JSON answer (run by a keeper;
    /// standard input holds the pod's lock)
    #[command(hide = true)]
    Doze { sandbox: SandboxId, image: ImageId },
    /// End the processes of a sandbox whose image is committed, and print a JSON answer (run by a
    /// keeper; standard input holds the pod's lock)
    #[command(hide = true)]
    End { sandbox: SandboxId, image: ImageId },
    /// Handle a container whose keeper has ended and cannot report the end of its program (run by
    /// the pause container's keeper)
    #[command(hide = true)]
    Bereave { id: ContainerId },
    /// End a process that exec started, and whose waiter was killed (run by its container's keeper)
    #[command(hide = true)]
    EndExec {
        id: ContainerId,
        /// Process id in the sandbox
        pid: i32,
    },
    /// Print as a JSON answer when the pod's links last carried a packet (run by a keeper; standard
    /// input holds the pod's lock)
    #[command(hide = true)]
    Traffic { sandbox: SandboxId },
    /// Print as a JSON answer the size of the files in which gVisor keeps what the containers write
    /// (run by a keeper; standard input holds the pod's lock)
    #[command(hide = true)]
    Measure { sandbox: SandboxId },
    /// End every process of a sandbox that still writes an image after its save was stopped, and
    /// print a JSON answer (run by a keeper; standard input holds the pod's lock)
    #[command(hide = true)]
    ForceEnd { sandbox: SandboxId },
    /// Run as the waiter of a process that exec started (run by exec)
    #[command(hide = true)]
    ExecWaiter {
        sandbox: SandboxId,
        id: ContainerId,
        /// Process id in the sandbox
        pid: i32,
        /// Standard input is the process's terminal
        #[arg(long)]
        terminal: bool,
        /// The process is one of the kubelet's probes
        #[arg(long)]
        probe: bool,
        /// Processor time of the sandbox when the probe began
        #[arg(long)]
        used_micros: Option<u64>,
    },
    /// Run as the process of a probe of a sleeping sandbox, and succeed (run by exec)
    #[command(hide = true)]
    ProbeAnswer,
    /// Run as the keeper of a container (run by create)
    #[command(hide = true)]
    Keeper(KeeperArgs),
    /// Become a sandbox's first process, or a container's gofer (run by a wake; standard input is
    /// the connection to it)
    #[command(hide = true, name = torpor_runsc_direct::COMMAND)]
    SandboxProcess {
        /// Id of the container, shown in the machine's list of processes
        id: ContainerId,
    },
    /// Wake the sandbox and carry one connection to the pod's loopback into it (run by a keeper;
    /// standard input is the connection)
    #[command(hide = true)]
    Forward { sandbox: SandboxId },
    /// Write the generation of the container in which this command runs (run in the sandbox after a
    /// restore)
    #[command(hide = true)]
    SetGeneration { generation: String },
    /// Connect to a port in the sandbox and carry its bytes to and from standard input (the part of
    /// forward that runs in the sandbox)
    #[command(hide = true)]
    ForwardInside { port: u16 },
}

#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    #[arg(long, short)]
    pub(crate) bundle: PathBuf,
    #[arg(long)]
    pub(crate) pid_file: Option<PathBuf>,
    #[arg(long)]
    pub(crate) console_socket: Option<PathBuf>,
    /// Accepted and ignored: gVisor does not pivot.
    #[arg(long)]
    pub(crate) no_pivot: bool,
    /// Accepted and ignored.
    #[arg(long)]
    pub(crate) no_new_keyring: bool,
    pub(crate) id: ContainerId,
}

/// The numbers are those of inherited descriptors.
#[derive(Debug, Args)]
pub(crate) struct KeeperArgs {
    pub(crate) id: ContainerId,
    /// Socket that listens for requests
    #[arg(long)]
    pub(crate) socket: i32,
    /// Socket that listens on the loopback of the pod's network namespace
    #[arg(long, requires = "loopback_link")]
    pub(crate) loopback: Option<i32>,
    /// BPF link that brings that loopback's connections to the socket
    #[arg(long, requires = "loopback")]
    pub(crate) loopback_link: Option<i32>,
}

#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// File of the OCI process to run
    #[arg(long, short)]
    pub(crate) process: PathBuf,
    #[arg(long)]
    pub(crate) pid_file: Option<PathBuf>,
    #[arg(long)]
    pub(crate) console_socket: Option<PathBuf>,
    /// Return when the process runs. The shim always sets it.
    #[arg(long, short)]
    pub(crate) detach: bool,
    pub(crate) id: ContainerId,
}

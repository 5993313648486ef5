//! Errors of an installation and of an uninstallation.

use std::io;
use std::path::PathBuf;

/// The reason for which an installation or an uninstallation stopped. Each message names the file
/// concerned and the remedy, if there is one. Paths are those of the installer's container, below
/// the mount point of the host's root.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot write {path}: is the host's root mounted read-write at --host-root?")]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot prepare the directory of images")]
    Store(#[source] torpor_snapshots::SaveError),
    #[error("cannot remove {path}")]
    Remove {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot read {path} to install it: does --payload-dir name the right directory?")]
    Payload {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "{path}, which --runsc names, cannot be installed as runsc: {why}; nothing was installed"
    )]
    Runsc { path: PathBuf, why: String },
    #[error("{path} changed while it was installed; try again")]
    Changed { path: PathBuf },
    #[error(
        "{path} cannot create a zram device: load the kernel module zram on this node, or omit --doze-swap"
    )]
    NoZram { path: PathBuf },
    #[error("cannot turn swap on {path} on or off")]
    Swap {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} leads through too many symbolic links")]
    SymlinkLoop { path: PathBuf },
    #[error(
        "another torpor-agent install or uninstall runs on this node (it holds {path}); try again when it has ended"
    )]
    Busy { path: PathBuf },
    #[error(
        "{path} is not the record that torpor-agent install wrote; move it away to continue without it"
    )]
    Record {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error(
        "the directory {path} does not exist: name this node's containerd configuration with --containerd-config"
    )]
    NoContainerd { path: PathBuf },
    #[error(
        "{path} line {line} is not TOML ({message}); correct it, then try again: nothing was changed"
    )]
    Syntax {
        path: PathBuf,
        line: usize,
        message: String,
    },
    #[error("{path}: {key} is not {expected}; correct it, then try again: nothing was changed")]
    Shape {
        path: PathBuf,
        key: &'static str,
        expected: &'static str,
    },
    #[error(
        "{path} cannot take the runtime handler {handler} ({message}): the file defines the handler already, or its parents are \
         inline tables; remove the handler or rewrite the parents as [sections], then try again: nothing was changed"
    )]
    NoRoom {
        path: PathBuf,
        handler: String,
        message: String,
    },
    #[error("pods of this runtime still run on the node: {pods}; delete them, or use --force")]
    PodsRunning { pods: String },
    #[error(
        "cannot enter the host's mount namespace: the container must be privileged and have hostPID"
    )]
    EnterHost(#[source] io::Error),
    #[error(
        "cannot run systemctl on the host: without systemd use --containerd-restart=pidfile:<path> or none"
    )]
    NoSystemctl(#[source] io::Error),
    #[error("systemctl could not restart {unit} ({message}); see its log on the host")]
    Systemctl { unit: String, message: String },
    #[error("cannot signal containerd (process {pid})")]
    Signal {
        pid: i32,
        #[source]
        source: io::Error,
    },
    #[error(
        "{what} within {seconds} s; the restart may still happen, and the next run tries it again"
    )]
    RestartUnknown { what: String, seconds: u64 },
}

impl Error {
    /// Returns the stable name of the kind of failure, for logs.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Runsc { .. } => "RunscRefused",
            Self::Changed { .. } => "PayloadChanged",
            Self::NoZram { .. } => "NoZram",
            Self::Swap { .. } => "SwapNotChanged",
            Self::Read { .. } => "ReadFailed",
            Self::Write { .. } | Self::Store(_) => "WriteFailed",
            Self::Remove { .. } => "RemoveFailed",
            Self::Payload { .. } => "PayloadMissing",
            Self::SymlinkLoop { .. } => "SymlinkLoop",
            Self::Busy { .. } => "Busy",
            Self::Record { .. } => "RecordCorrupt",
            Self::NoContainerd { .. } => "ContainerdNotFound",
            Self::Syntax { .. } | Self::Shape { .. } => "ContainerdConfigInvalid",
            Self::NoRoom { .. } => "RuntimeHandlerTaken",
            Self::PodsRunning { .. } => "PodsRunning",
            Self::EnterHost(_) => "HostNotReachable",
            Self::NoSystemctl(_) => "NoSystemd",
            Self::Systemctl { .. } | Self::Signal { .. } => "RestartFailed",
            Self::RestartUnknown { .. } => "RestartUnknown",
        }
    }
}

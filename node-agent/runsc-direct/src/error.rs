//! Errors of the start of a sandbox.

use std::path::{Path, PathBuf};
use std::time::Duration;

use torpor_link::net;
use torpor_runsc::command;
use torpor_runsc::control;
use torpor_runsc::state;

/// Why a sandbox was not begun.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot open {path} for the sandbox")]
    Open {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot {what} for the sandbox")]
    Prepare {
        what: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot communicate with the process that becomes the sandbox or a gofer")]
    Talk(#[source] std::io::Error),
    #[error("the process that becomes the sandbox or a gofer failed: {0}")]
    Failed(String),
    #[error("gVisor's kernel ended while it started: {0}")]
    Ended(String),
    #[error("gVisor's gofer ended while it started: {0}")]
    GoferEnded(String),
    #[error("a mount source of container {0} is no longer at its path")]
    Moved(String),
    /// gVisor may still start. A caller that continues must end the sandbox first. `said`: the last
    /// message of its log.
    #[error("gVisor did not start within {limit:?}: {said}")]
    TimedOut { limit: Duration, said: String },
    #[error(transparent)]
    Record(#[from] state::Error),
    #[error(transparent)]
    Runsc(#[from] command::Error),
    #[error(transparent)]
    Network(#[from] net::Error),
    #[error(transparent)]
    Control(#[from] control::Error),
}

/// Returns a conversion of an error of the machine. `what`: the failed preparation.
pub(crate) fn prepare<E: Into<std::io::Error>>(what: &'static str) -> impl Fn(E) -> Error {
    move |error| Error::Prepare {
        what,
        source: error.into(),
    }
}

/// Returns a conversion of an error of opening `path`.
pub(crate) fn cannot_open(path: &Path) -> impl Fn(std::io::Error) -> Error {
    move |source| Error::Open {
        path: path.to_owned(),
        source,
    }
}

use std::path::PathBuf;

/// Why a network namespace could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot open the network namespace {path}")]
    Namespace {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot enter the network namespace {path}")]
    Enter {
        path: PathBuf,
        #[source]
        source: nix::Error,
    },
    #[error("cannot communicate with the kernel's routing socket")]
    Socket(#[source] std::io::Error),
    #[error("the kernel refused {what}")]
    Refused {
        what: String,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot parse the kernel's answer: {0}")]
    BadAnswer(String),
    #[error("cannot parse the recorded address or route: {0}")]
    BadRecord(String),
    #[error("the thread that entered the network namespace panicked")]
    Panicked,
}

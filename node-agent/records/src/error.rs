//! Error of a record.

use std::path::PathBuf;

/// Error of reading or writing a record.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no record {0}: this pod was not started by Torpor, or is gone")]
    Missing(PathBuf),
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot write {path}")]
    Write {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot parse {path}")]
    Parse {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("cannot lock {path}")]
    Lock {
        path: PathBuf,
        #[source]
        source: nix::Error,
    },
}

//! Reading a paused sandbox' memory into a partial image.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use torpor_core::ids::SandboxId;
use torpor_snapshots::{Partial, SaveError};

use crate::control::{self, Control};

/// gVisor's names of an image's files, as `runsc restore` looks for them.
pub const FILES: [&str; 3] = ["checkpoint.img", "pages_meta.img", "pages.img"];

/// Why a checkpoint was not made. The sandbox is as it was, unless the control socket gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] SaveError),
    #[error("gVisor cannot save the sandbox")]
    Control(#[from] control::Error),
}

impl Error {
    /// CamelCase, for conditions and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Store(error) => error.reason(),
            Self::Control(control::Error::NotRunning { .. }) => "SandboxGone",
            Self::Control(control::Error::Refused { message, .. })
                if message.contains("no space left") =>
            {
                "DiskFull"
            }
            Self::Control(_) => "CheckpointFailed",
        }
    }

    /// Whether the checkpoint may have been made, or still be going on.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Control(error) if error.is_unknown())
    }
}

/// Writes the sandbox into fresh files of `partial`; the caller makes them durable. The sandbox must be paused and stays so.
pub fn checkpoint(
    runsc_root: &Path,
    sandbox: &SandboxId,
    partial: &Partial,
    limit: Duration,
) -> Result<(), Error> {
    let files: Vec<OwnedFd> = FILES
        .iter()
        .map(|name| partial.open_file(name))
        .collect::<Result<_, _>>()?;
    let mut control = Control::connect(runsc_root, sandbox.as_str())?;
    let [state, metadata, pages] = [&files[0], &files[1], &files[2]].map(AsFd::as_fd);
    control.checkpoint([state, metadata, pages], limit)?;
    Ok(())
}

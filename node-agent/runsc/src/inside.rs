//! Reading a sandbox' files through its control socket (gVisor, `pkg/sentry/control/fs.go`, since
//! September 2026).

use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::{Value, json};

use crate::control::{self, Control};

/// Why a file of a sandbox could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Control(#[from] control::Error),
    /// The deadline is over: the sandbox answers late, or its files cause many reads.
    #[error("the files of container {container} could not be read in time")]
    Late { container: String },
    #[error("cannot read {path} of container {container}")]
    Read {
        container: String,
        path: String,
        #[source]
        source: std::io::Error,
    },
}

/// Reads at most `most` bytes of the file at `path` in the container, from its beginning, before
/// `deadline`. The container controls the content and the duration, so a caller uses one deadline
/// for all its reads. None where the container has ended, or the file cannot be opened.
pub(crate) fn read(
    control: &mut Control,
    container: &str,
    path: &str,
    most: u64,
    deadline: Instant,
) -> Result<Option<Vec<u8>>, Error> {
    let timeout = deadline.saturating_duration_since(Instant::now());
    if timeout.is_zero() {
        return Err(Error::Late {
            container: container.to_owned(),
        });
    }
    let failed = |source: std::io::Error| Error::Read {
        container: container.to_owned(),
        path: path.to_owned(),
        source,
    };
    let output =
        memfd_create("inside", MemfdFlags::CLOEXEC).map_err(|errno| failed(errno.into()))?;
    let arg = json!({ "container_id": container, "path": path, "offset": 0, "size": most });
    match control.call::<Value>("Fs.Read", &arg, &[output.as_fd()], timeout) {
        Err(control::Error::Refused { .. }) => return Ok(None),
        answer => answer?,
    };
    let mut file = File::from(output);
    file.rewind().map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes).map_err(failed)?;
    Ok(Some(bytes))
}

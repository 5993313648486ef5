//! Opening of files for a process of a sandbox.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::libc;

use super::error::{Error, cannot_open};

/// Opens a file for reading. The file must not be a link.
pub(crate) fn open(path: &Path) -> Result<OwnedFd, Error> {
    let opened = File::options()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path);
    opened.map(Into::into).map_err(cannot_open(path))
}

/// Opens the log once more, for a process that only appends to it. The position of `log` is not
/// shared with that process.
pub(crate) fn append_only(log: &File) -> Result<OwnedFd, Error> {
    let path = PathBuf::from(format!("/proc/self/fd/{}", log.as_raw_fd()));
    let opened = File::options().append(true).open(&path);
    Ok(opened.map_err(cannot_open(&path))?.into())
}

//! Messages of the shim in containerd's log.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;

use nix::libc::O_NONBLOCK;

/// The named pipe that containerd makes in the directory in which it starts a shim.
const PIPE: &str = "log";

/// Makes containerd's pipe this process' standard error. Without the pipe there are no messages.
///
/// The pipe is open for reading, too, so that a write does not fail while containerd restarts. A
/// message that finds the pipe full is dropped.
pub(crate) fn begin() {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(O_NONBLOCK);
    if let Ok(pipe) = options.open(PIPE) {
        // On failure the messages go where they went before.
        let _ = rustix::stdio::dup2_stderr(pipe);
    }
}

//! Messages between a wake and a process that it begins.

use std::os::fd::{BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

use super::gofer::plan::ServeArgs;
use super::plan::BootArgs;
use torpor_messages::wire::{receive, send};

/// A message on the connection between the process and the wake that begins it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Message {
    /// To the process: execute the sandbox' first process. Beside the message are
    /// [`super::process::FILES`] files, then the files that [`BootArgs`] counts.
    Boot(BootArgs),
    /// To the process: execute a container's gofer. Beside the message are
    /// [`super::gofer::process::FILES`] files, then the gofer's connections.
    Serve(ServeArgs),
    /// From the process: it has its own namespaces. Its user namespace has no users yet.
    Unshared,
    /// To the process: its users are mapped.
    Mapped,
    /// From the process: it has a child, which is the first process of the new PID namespace and
    /// executes runsc.
    Forked { pid: i32 },
    /// From a gofer's process: beside the message are the files that gVisor writes to.
    Filestores,
    /// From the process: a step failed, and runsc is not executed. After [`Message::Forked`] the
    /// end of the connection without this message is success: the execution of runsc closes it.
    Failed { message: String },
}

/// Sends a message with files beside it.
pub(super) fn send_message(
    to: &OwnedFd,
    message: &Message,
    files: &[BorrowedFd<'_>],
) -> std::io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    Ok(send(to, &bytes, files)?)
}

/// Receives a message and the files beside it. None when the other end is closed.
pub(super) fn receive_message(from: &OwnedFd) -> std::io::Result<Option<(Message, Vec<OwnedFd>)>> {
    let (bytes, files) = receive(from)?;
    if bytes.is_empty() {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&bytes)?, files)))
}

//! Requests to a keeper: the thread of a pod's shim that stands for a container's first process.
//!
//! The keeper listens on a sequenced-packet socket in the container's directory, which only root
//! may enter. A connection carries one request: one JSON message with files beside it, and one JSON
//! answer.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use torpor_records::Rules;

use crate::wire::{self, Unsent, receive};

/// The socket's name in the container's directory.
pub const SOCKET: &str = "keeper.sock";

/// Why a keeper could not be reached, or did not do what was requested.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no keeper listens on {path}")]
    Gone {
        path: PathBuf,
        #[source]
        source: nix::Error,
    },
    #[error("cannot communicate with the keeper at {path}")]
    Talk {
        path: PathBuf,
        #[source]
        source: nix::Error,
    },
    #[error("cannot parse the answer of the keeper at {path}")]
    BadAnswer { path: PathBuf },
    #[error("{message}")]
    Refused { reason: String, message: String },
}

/// A request to a keeper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum Request {
    /// Send copies of the container's standard streams.
    Stdio,
    /// Carry the bytes of the container's new console, which is beside the message, to and from the
    /// clients of the container's terminal.
    Console,
    /// Wait for the container's end: the sandbox runs (again). Give the sandbox the packets and the
    /// input that arrived meanwhile.
    Attach,
    /// From now on hold the packets that arrive for the pod: its memory is about to be written.
    /// Wake the sandbox, by the rules that came last, when it sleeps and a peer waits for an
    /// answer.
    Hold,
    /// As [`Request::Hold`], and the sandbox sleeps from now on: it is paused, and its processes
    /// still exist.
    Watch,
    /// As [`Request::Hold`], and the sandbox sleeps: it has no process, and had none since it was
    /// made.
    Hibernated,
    /// Answer the pod's probes and never wake the sandbox: it is paused for as long as its user
    /// wishes, and its memory is in no image. Other packets reach its network stack, which runs.
    Freeze,
    /// Wake the sandbox for bytes that are written to the container's standard input: the sandbox
    /// dozes and reads nothing.
    Doze,
    /// To the pause container's keeper: answer for the pod's address until [`Request::Release`].
    /// The dozing sandbox' processes are about to be stopped, and its network stack with them. A
    /// keeper that does not watch the pod refuses.
    Halt,
    /// Continue the processes that were stopped after [`Request::Halt`], so that the sandbox
    /// answers: the caller may not signal them. The sandbox stays paused.
    GoOn,
    /// Replace the rules by which packets are held and wake the sandbox.
    Rules(Rules),
    /// Hold the pod's outgoing packets until [`Request::Attach`]: the sandbox is about to be
    /// restored. Files come beside the answer, two for each link: they block the pod's packets in
    /// both directions, and copies of them keep the block when the shim dies.
    HoldEgress,
    /// Release held packets: the sandbox was not put to sleep after all.
    Release,
    /// Set the size of the container's terminal, also of the terminals that later wakes make.
    Resize { rows: u16, columns: u16 },
    /// End with this code.
    Exit { code: u8 },
}

/// The answer of a keeper, or of a command of the shim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    pub ok: bool,
    #[serde(default)]
    pub reason: String,
    #[serde(default)]
    pub message: String,
    /// Details of the result, in the command's own form (stage timings of a wake).
    #[serde(default)]
    pub detail: Value,
}

impl Answer {
    pub fn ok(detail: Value) -> Self {
        Self {
            ok: true,
            reason: String::new(),
            message: String::new(),
            detail,
        }
    }

    pub fn refused(reason: &str, message: String) -> Self {
        Self {
            ok: false,
            reason: reason.to_owned(),
            message,
            detail: Value::Null,
        }
    }
}

/// Sends `request` to the keeper of the container whose directory is `container_dir`. Returns its
/// answer and the files beside the answer.
pub fn ask(
    container_dir: &Path,
    request: &Request,
    files: &[BorrowedFd<'_>],
    timeout: Duration,
) -> Result<(Answer, Vec<OwnedFd>), Error> {
    let path = container_dir.join(SOCKET);
    let bad_answer = |_| Error::BadAnswer { path: path.clone() };
    let talk = |source| Error::Talk {
        path: path.clone(),
        source,
    };
    let bytes = serde_json::to_vec(request).map_err(bad_answer)?;
    let sent = wire::request(&path, &bytes, files, timeout);
    let peer = sent.map_err(|unsent| match unsent {
        Unsent::NotListening(source) => Error::Gone {
            path: path.clone(),
            source,
        },
        Unsent::Failed(source) => talk(source),
    })?;
    let (bytes, fds) = receive(&peer).map_err(talk)?;
    let answer: Answer = serde_json::from_slice(&bytes).map_err(bad_answer)?;
    if answer.ok {
        Ok((answer, fds))
    } else {
        Err(Error::Refused {
            reason: answer.reason,
            message: answer.message,
        })
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::SockType;

    use super::*;
    use crate::wire::tests::unresponsive;

    #[test]
    fn a_keeper_that_takes_no_connections_is_not_taken_for_gone() {
        let dir = tempfile::tempdir().expect("a directory");
        let limit = Duration::from_millis(50);
        let ask = || ask(dir.path(), &Request::Release, &[], limit).expect_err("no answer");
        assert!(matches!(ask(), Error::Gone { .. }));
        let _listener = unresponsive(&dir.path().join(SOCKET), SockType::SeqPacket);
        assert!(matches!(ask(), Error::Talk { .. }));
    }
}

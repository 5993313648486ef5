//! Requests to a keeper: the thread of a pod's shim that stands for a container's first process.
//!
//! The keeper listens on a sequenced-packet socket in the container's directory, which only root
//! may enter. A connection carries one request: one JSON message with files beside it, and one JSON
//! answer.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType,
    UnixAddr, recvmsg, sendmsg, setsockopt, sockopt,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use torpor_core::ids::{ClaimUid, ImageId};
use torpor_core::wake_on::WakeOn;

use crate::dial::{dial, is_not_listening, time_val};
use torpor_records::WakeCause;

/// The socket's name in the container's directory.
pub const SOCKET: &str = "keeper.sock";
/// Most bytes of a message. A request has a few hundred; an answer carries at most an error chain.
pub const MAX_MESSAGE: usize = 64 << 10;

/// Why a keeper could not be reached, or did not do what was requested.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no keeper listens on {path}")]
    Gone {
        path: PathBuf,
        #[source]
        source: nix::Error,
    },
    #[error("cannot listen on {path}")]
    Listen {
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
    /// Wake the sandbox when it sleeps and a peer waits for an answer.
    Hold(Rules),
    /// As [`Request::Hold`], and the sandbox sleeps from now on: it is paused, and its processes
    /// still exist.
    Watch(Rules),
    /// As [`Request::Hold`], by the rules that the keeper got last, and the sandbox sleeps: it has
    /// no process, and had none since it was made.
    Hibernated,
    /// Answer the pod's probes and never wake the sandbox: it is paused for as long as its user
    /// wishes, and its memory is in no image. Other packets reach its network stack, which runs.
    Freeze(Rules),
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
    /// Replace the rules by which packets are held and wake the sandbox, if any are held.
    Rules(Rules),
    /// Hold the pod's outgoing packets until [`Request::Attach`]: the sandbox is about to be
    /// restored. Files come beside the answer, two for each link: they block the pod's packets in
    /// both directions, and copies of them keep the block when the shim dies.
    #[serde(rename = "mute")]
    HoldEgress,
    /// Release held packets: the sandbox was not put to sleep after all.
    Release,
    /// Set the size of the container's terminal, also of the terminals that later wakes make.
    Resize { rows: u16, columns: u16 },
    /// End with this code.
    Exit { code: u8 },
    /// Run a command on the host, as a child of the pod's shim, and answer with its answer. The
    /// pod's lock comes beside the message. The command holds the lock to its end, also when the
    /// caller dies.
    Run(Run),
}

/// A command of the shim for a keeper to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    pub verb: Verb,
    /// The image to wake from or to end with. The other verbs need none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageId>,
    /// Cause of a wake; none: a request of the API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<WakeCause>,
    /// The claim to bring into the sandbox. The other verbs need none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<ClaimUid>,
}

impl From<Verb> for Run {
    fn from(verb: Verb) -> Self {
        Self {
            verb,
            image: None,
            cause: None,
            claim: None,
        }
    }
}

/// Rules by which a keeper holds packets for a sleeping pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rules {
    /// TCP ports at which the keeper answers the kubelet's probes for the pod.
    pub probes: Vec<u16>,
    /// More such ports, at which the kubelet makes some probes over TLS.
    #[serde(default)]
    pub tls_probes: Vec<u16>,
    /// Ports of `probes` and `tls_probes` to which the kubelet also makes the request of a hook,
    /// once the Pod is being deleted. The kubelet makes no probes then.
    #[serde(default)]
    pub hooks: Vec<u16>,
    /// True: the sandbox continues from its image in another Pod. Its containers do not run their
    /// hooks now, so the keeper answers hooks as it answers probes.
    #[serde(default)]
    pub suspends: bool,
    /// Packets that wake the sandbox.
    #[serde(default)]
    pub wake_on: WakeOn,
}

impl Rules {
    /// Returns the rules for a keeper that answers probes over TLS like all other probes: their
    /// ports are among `probes`.
    #[must_use]
    pub fn with_tls(mut self) -> Self {
        self.probes.append(&mut self.tls_probes);
        self
    }
}

/// A command that a keeper runs for the agent, because it must run in the host's namespaces and not
/// in the agent's container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verb {
    Wake,
    End,
    /// Push the memory of a dozing sandbox out of main memory. From then on the keeper may watch
    /// for packets that need the sandbox.
    Doze,
    /// Report when the pod's links last carried traffic; see [`torpor_link::traffic`].
    Traffic,
    /// Report the sizes of the files in which gVisor keeps the containers' writes.
    Measure,
    /// Bring a claim into the sandbox, which runs.
    Bind,
    /// End every process of a sandbox that still writes an image after its save was stopped.
    ForceEnd,
}

impl Verb {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Wake => "wake",
            Self::End => "end",
            Self::Doze => "doze",
            Self::Traffic => "traffic",
            Self::Measure => "measure",
            Self::Bind => "bind",
            Self::ForceEnd => "force-end",
        }
    }
}

/// The answer of a keeper, or of the command that it ran.
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

/// Returns a sequenced-packet socket that listens on the path.
pub fn listen(path: &Path) -> Result<OwnedFd, Error> {
    let opened = || -> nix::Result<OwnedFd> {
        let (unix, packets) = (AddressFamily::Unix, SockType::SeqPacket);
        let listener = nix::sys::socket::socket(unix, packets, SockFlag::SOCK_CLOEXEC, None)?;
        nix::sys::socket::bind(listener.as_raw_fd(), &UnixAddr::new(path)?)?;
        nix::sys::socket::listen(&listener, Backlog::new(16)?)?;
        Ok(listener)
    };
    opened().map_err(|source| Error::Listen {
        path: path.into(),
        source,
    })
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
    let talk = |source| Error::Talk {
        path: path.clone(),
        source,
    };
    let dialled = dial(&path, SockType::SeqPacket, timeout);
    let peer = dialled.map_err(|source| match is_not_listening(source) {
        true => Error::Gone {
            path: path.clone(),
            source,
        },
        false => talk(source),
    })?;
    setsockopt(&peer, sockopt::ReceiveTimeout, &time_val(timeout)).map_err(talk)?;
    let bytes = serde_json::to_vec(request).map_err(|_| Error::BadAnswer { path: path.clone() })?;
    send(&peer, &bytes, files).map_err(talk)?;
    let (bytes, fds) = receive(&peer).map_err(talk)?;
    let answer: Answer =
        serde_json::from_slice(&bytes).map_err(|_| Error::BadAnswer { path: path.clone() })?;
    if answer.ok {
        Ok((answer, fds))
    } else {
        Err(Error::Refused {
            reason: answer.reason,
            message: answer.message,
        })
    }
}

/// Sends one message with files.
pub fn send(peer: &OwnedFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> nix::Result<()> {
    let fds: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&fds)];
    let cmsgs: &[ControlMessage<'_>] = if fds.is_empty() { &[] } else { &rights };
    let flags = MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(peer.as_raw_fd(), &[IoSlice::new(bytes)], cmsgs, flags, None).map(drop)
}

/// Most files beside a message: the kernel's limit (`SCM_MAX_FD`, unix(7)).
const MOST_FILES: usize = 253;

/// Receives one message with its files. An empty message means that the peer has closed the
/// connection.
pub fn receive(peer: &OwnedFd) -> nix::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let mut space = nix::cmsg_space!([RawFd; MOST_FILES]);
    let mut buffers = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(peer.as_raw_fd(), &mut buffers, Some(&mut space), flags)?;
    let length = message.bytes;
    let mut fds = Vec::new();
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = part {
            fds.extend(raw.into_iter().map(own));
        }
    }
    bytes.truncate(length);
    Ok((bytes, fds))
}

#[allow(unsafe_code)]
fn own(raw: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just made this descriptor for this process in recvmsg; nothing else
    // owns it.
    unsafe { OwnedFd::from_raw_fd(raw) }
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn a_keeper_that_takes_no_connections_is_not_taken_for_gone() {
        let dir = tempfile::tempdir().expect("a directory");
        let limit = Duration::from_millis(50);
        let ask = || ask(dir.path(), &Request::Release, &[], limit).expect_err("no answer");
        assert!(matches!(ask(), Error::Gone { .. }));
        let _listener =
            crate::dial::tests::unresponsive(&dir.path().join(SOCKET), SockType::SeqPacket);
        assert!(matches!(ask(), Error::Talk { .. }));
    }

    #[test]
    fn a_keeper_does_what_agents_of_the_last_version_ask_and_is_told_why_by_those_of_this() {
        let run = |cause| {
            Request::Run(Run {
                cause,
                ..Run::from(Verb::Wake)
            })
        };
        for (text, request) in [
            (r#"{"do":"run","verb":"wake"}"#, run(None)),
            (
                r#"{"do":"run","verb":"wake","cause":"Clock"}"#,
                run(Some(WakeCause::Clock)),
            ),
            // A version ignores fields that it does not know.
            (r#"{"do":"run","verb":"wake","moon":"full"}"#, run(None)),
        ] {
            let parsed: Request = serde_json::from_str(text).expect(text);
            assert_eq!(parsed, request, "{text}");
        }
        let text = serde_json::to_string(&run(Some(WakeCause::Clock))).expect("words");
        assert_eq!(text, r#"{"do":"run","verb":"wake","cause":"Clock"}"#);
    }

    #[test]
    fn rules_reach_keepers_of_this_and_of_the_next_version() {
        let rules = Rules {
            probes: vec![80],
            tls_probes: vec![443],
            hooks: vec![80],
            suspends: true,
            wake_on: WakeOn::Only {
                tcp: true,
                udp: false,
                icmp: false,
                ports: vec![80..=89],
            },
        };
        for request in [
            Request::Hold(rules.clone()),
            Request::Watch(Rules::default()),
            Request::Freeze(rules.clone()),
            Request::Rules(rules),
        ] {
            let text = serde_json::to_string(&request).expect("words");
            let parsed: Request = serde_json::from_str(&text).expect(&text);
            assert_eq!(parsed, request, "{text}");
        }
        // The request of an agent whose version has no rule but `probes`.
        let text = r#"{"do":"hold","probes":[80]}"#;
        let parsed: Request = serde_json::from_str(text).expect("heard");
        let probes = vec![80];
        let rules = Rules {
            probes,
            ..Rules::default()
        };
        assert_eq!(parsed, Request::Hold(rules));
    }

    #[test]
    fn who_speaks_tls_answers_at_all_ports_and_who_does_not_is_not_told_of_those_with_it() {
        let rules = Rules {
            probes: vec![80],
            tls_probes: vec![443],
            ..Rules::default()
        };
        let json = serde_json::to_value(&rules).expect("words");
        assert_eq!(json["probes"], serde_json::json!([80]));
        let rules = rules.with_tls();
        assert_eq!((rules.probes, rules.tls_probes), (vec![80, 443], vec![]));
    }
}

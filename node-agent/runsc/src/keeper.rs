//! Talking to a keeper: the process that the shim watches in place of a container's first process.
//!
//! A sequenced-packet socket in the container's directory (which only root may enter). One request per connection:
//! one JSON message, files beside it, one JSON answer.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockType, recvmsg, sendmsg, setsockopt, sockopt,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use torpor_core::ids::{ContainerId, ImageId};
use torpor_core::wake_on::WakeOn;

use crate::dial::{dial, is_nobody, time_val};
use torpor_records::WakeCause;

/// The socket's name in the container's directory.
pub const SOCKET: &str = "keeper.sock";
/// A message is a few hundred bytes; an answer carries at most an error chain.
pub const MAX_MESSAGE: usize = 64 << 10;

/// Why a keeper could not be reached or did not do as asked.
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

/// What can be asked of a keeper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum Request {
    /// Send copies of the container's standard streams.
    Stdio,
    /// The container's new console, beside the message: carry its bytes to and from the terminal that the shim holds.
    Console,
    /// The sandbox runs (again): wait for the container's end, and give it what arrived meanwhile.
    Attach,
    /// The pod's memory is about to be written: from now on hold what arrives for it, and wake it when it sleeps and
    /// somebody wants an answer.
    Hold(Rules),
    /// The sandbox stands still with its memory: as for [`Request::Hold`], and it sleeps from now on.
    Watch(Rules),
    /// The sandbox stands still for as long as its user wishes, and its memory is in no image: answer its probes, wake it for nobody, and let all
    /// else reach it: its network stack runs.
    Freeze(Rules),
    /// The sandbox stands still because it was idle, and reads nothing: wake it for what is written to the container's standard input.
    Doze,
    /// To the pause container's keeper: the processes of the sandbox, which dozes, are about to be stopped, and its network stack with them. Speak for it
    /// until [`Request::Release`]. One that does not watch the pod, or is of an older version, refuses.
    Halt,
    /// Let the processes go on that were stopped after [`Request::Halt`], so that the sandbox answers: who asks may not signal them. It stands still.
    GoOn,
    /// Other rules for what is held and wakes, if anything is.
    Rules(Rules),
    /// The sandbox is about to be restored: what it says waits until [`Request::Attach`]. Beside the answer comes what keeps the pod from hearing
    /// and being heard, of which copies serve when the keeper has died. Two for each link; a keeper of an older version sends none.
    #[serde(rename = "mute")]
    HoldEgress,
    /// The sandbox was not put to sleep after all.
    Release,
    /// End with this code.
    Exit { code: u8 },
    /// To the pause container's keeper, with a pidfd of that container's keeper beside it: when that one is gone, see to what is left.
    Mind { container: ContainerId },
    /// To a container's keeper, with one end of a pipe beside it: an exec has started this process in the container, and whoever has the other end stands for
    /// it. He writes a byte once it has ended. If he is gone without, he was killed, and the process is to end as well.
    Exec { pid: i32 },
    /// Run torpor-oci on the host, as a child of the pod's shim; its answer is the answer. The pod's lock comes beside
    /// the message, and the program holds it to its end, whatever becomes of who asked.
    Run {
        verb: Verb,
        /// What to wake or to end; the other verbs need none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        image: Option<ImageId>,
        /// Of a wake; none: the API asks. A keeper of an older version does not hear it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cause: Option<WakeCause>,
    },
}

/// What a keeper goes by that holds packets for a sleeping pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rules {
    /// TCP ports at which the kubelet's probes are answered for the pod.
    pub probes: Vec<u16>,
    /// More of them, at which some probes are made over TLS. A keeper of an older version would take such a probe and never answer it; it does not hear of
    /// these ports, and is as it was: the probe wakes the sandbox.
    #[serde(default)]
    pub tls_probes: Vec<u16>,
    /// Those of both to which the kubelet also makes the request of a hook, once the Pod is being deleted. Then they are not
    /// probed any more.
    #[serde(default)]
    pub hooks: Vec<u16>,
    /// The sandbox goes on from its image in another Pod. What its containers would do at their end they do not do now: hooks
    /// are answered as probes are.
    #[serde(default)]
    pub suspends: bool,
    /// Which packets wake it.
    #[serde(default)]
    pub wake_on: WakeOn,
}

impl Rules {
    /// As one goes by them who answers probes over TLS like all others.
    #[must_use]
    pub fn with_tls(mut self) -> Self {
        self.probes.append(&mut self.tls_probes);
        self
    }
}

/// What a keeper runs for the agent: what must live in the host's namespaces and not in the agent's container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verb {
    Wake,
    End,
    /// Push the memory of a dozing sandbox out of main memory; from then on the keeper may look out for who needs it.
    Doze,
    /// Say when the pod's links last carried something; see [`torpor_link::traffic`].
    Traffic,
    /// Say how large the files are in which gVisor keeps what the containers write.
    Measure,
    /// End every process of a sandbox that goes on writing an image after its save was stopped.
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
            Self::ForceEnd => "force-end",
        }
    }
}

/// What a keeper, or the torpor-oci that it ran, answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    pub ok: bool,
    #[serde(default)]
    pub reason: String,
    #[serde(default)]
    pub message: String,
    /// What was done, in the words of who did it (stage timings of a wake).
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

/// Sends `request` to the keeper of the container whose directory is `container_dir`.
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
    let peer = dialled.map_err(|source| match is_nobody(source) {
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

/// One message with files.
pub fn send(peer: &OwnedFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> nix::Result<()> {
    let fds: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&fds)];
    let cmsgs: &[ControlMessage<'_>] = if fds.is_empty() { &[] } else { &rights };
    let flags = MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(peer.as_raw_fd(), &[IoSlice::new(bytes)], cmsgs, flags, None).map(drop)
}

/// The most files that come beside a message: as many as the kernel takes (`SCM_MAX_FD`, unix(7)).
const MOST_FILES: usize = 253;

/// One message with its files; an empty one when the peer has gone.
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
    // SAFETY: the kernel has just made this descriptor for us in recvmsg; nobody else owns it.
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
        let _listener = crate::dial::tests::deaf(&dir.path().join(SOCKET), SockType::SeqPacket);
        assert!(matches!(ask(), Error::Talk { .. }));
    }

    #[test]
    fn a_keeper_does_what_agents_of_the_last_version_ask_and_is_told_why_by_those_of_this() {
        let run = |cause| Request::Run {
            verb: Verb::Wake,
            image: None,
            cause,
        };
        for (said, request) in [
            (r#"{"do":"run","verb":"wake"}"#, run(None)),
            (
                r#"{"do":"run","verb":"wake","cause":"Clock"}"#,
                run(Some(WakeCause::Clock)),
            ),
            // What a version does not know it does not hear.
            (r#"{"do":"run","verb":"wake","moon":"full"}"#, run(None)),
        ] {
            let heard: Request = serde_json::from_str(said).expect(said);
            assert_eq!(heard, request, "{said}");
        }
        let said = serde_json::to_string(&run(Some(WakeCause::Clock))).expect("words");
        assert_eq!(said, r#"{"do":"run","verb":"wake","cause":"Clock"}"#);
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
            let said = serde_json::to_string(&request).expect("words");
            let heard: Request = serde_json::from_str(&said).expect(&said);
            assert_eq!(heard, request, "{said}");
        }
        // As an agent says it that knows of nothing but probes.
        let heard: Request = serde_json::from_str(r#"{"do":"hold","probes":[80]}"#).expect("heard");
        let probes = vec![80];
        let known = Rules {
            probes,
            ..Rules::default()
        };
        assert_eq!(heard, Request::Hold(known));
    }

    #[test]
    fn who_speaks_tls_answers_at_all_ports_and_who_does_not_is_not_told_of_those_with_it() {
        let rules = Rules {
            probes: vec![80],
            tls_probes: vec![443],
            ..Rules::default()
        };
        let said = serde_json::to_value(&rules).expect("words");
        assert_eq!(said["probes"], serde_json::json!([80]));
        let rules = rules.with_tls();
        assert_eq!((rules.probes, rules.tls_probes), (vec![80, 443], vec![]));
    }
}

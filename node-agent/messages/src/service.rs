//! The service of a pod's shim for the agent.
//!
//! The agent decides, the shim acts. The agent may be replaced or taken over, so it gets no
//! descriptor and no path from the shim, and gives none: each request names what is to be done, and
//! the shim does it to its own pod only. The shim takes the pod's lock for a request and releases
//! it with the answer.
//!
//! A connection carries one request. Every request has one answer, except [`Request::Steps`]: it
//! has one [`Answer::Step`] for each step that was tried, and [`Answer::Ended`].

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use nix::errno::Errno;
use serde::{Deserialize, Serialize};
use torpor_core::ids::ContainerName;
use torpor_core::image_size::Figures;
use torpor_core::state::Live;
use torpor_core::steps::{Outcome, Step};
use torpor_records::{Probes, Rules, WakeCause};
use torpor_snapshots::{Digest, Fingerprint};

use crate::wire::{self, MAX_MESSAGE, Unsent, receive, send};

/// Name of the socket in the pod's directory.
pub const SOCKET: &str = "agent.sock";
/// The version of this service. A shim serves only its own: an agent of another version is told so
/// ([`REASON_VERSION`]).
pub const VERSION: u32 = 1;
/// Reason of a refusal: the shim serves another version.
pub const REASON_VERSION: &str = "ShimVersion";
/// Reason of a refusal: another process changes the sandbox, or too many requests are under way.
pub const REASON_BUSY: &str = "Busy";
/// Most steps of a request. The longest plan has six.
pub const MOST_STEPS: usize = 32;

/// Why a shim was not reached, or gave no answer that can be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no shim listens on {path}")]
    Gone {
        path: PathBuf,
        #[source]
        source: nix::Error,
    },
    #[error("cannot communicate with the shim at {path}")]
    Talk {
        path: PathBuf,
        #[source]
        source: nix::Error,
    },
    #[error("the request for the shim has {size} bytes, and {MAX_MESSAGE} at most can be sent")]
    TooLarge { size: usize },
    #[error("the shim at {path} gave an answer that does not belong to the request")]
    BadAnswer { path: PathBuf },
    #[error("{message}")]
    Refused { reason: String, message: String },
}

impl Error {
    /// Reports whether the shim has ended: it was not there, or closed the connection.
    pub fn is_end(&self) -> bool {
        matches!(
            self,
            Self::Gone { .. }
                | Self::Talk {
                    source: Errno::ECONNRESET | Errno::EPIPE,
                    ..
                }
        )
    }
}

/// A request with the version of the service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope {
    pub version: u32,
    pub request: Request,
}

/// A request of the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum Request {
    /// Report the state of the sandbox. `idle`: also the figures by which the agent decides whether
    /// the sandbox is idle. The answer is [`Answer::Observed`].
    Observe { idle: bool },
    /// Report the last use of the running sandbox by packets, and its program's busy mark. The
    /// answer is [`Answer::Inquired`].
    Inquire,
    /// Report the sizes that an image of the sandbox may have. The answer is [`Answer::Measured`].
    Measure,
    /// Follow these rules when the sandbox sleeps, and tell these probes from uses of the sandbox.
    Rules { rules: Rules, probes: Probes },
    /// Wake the sandbox for packets and input: it dozes, and the process that paused it may have
    /// died before it asked for that.
    Watch,
    /// Take the steps of a plan.
    Steps(Box<Steps>),
}

/// The state of a sandbox that a plan was made for. The steps of the plan are not taken if the
/// state has changed since.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Basis {
    pub live: Live,
    /// The sandbox is paused for idleness.
    pub dozes: bool,
    /// A process of exec runs in it, a user's or a probe's.
    pub in_session: bool,
    /// Digest of the ids of the containers on record.
    pub containers: Digest,
}

/// Figures of a running sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Use {
    /// Processor time by the sandbox' own count.
    pub cpu: Duration,
    /// A user's exec or a forwarded connection is open.
    pub in_use: bool,
}

/// The state of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Observed {
    /// Another process changes the sandbox at the moment.
    pub busy: bool,
    pub basis: Basis,
    /// The containers that have started in a sandbox that is not asleep.
    pub started: BTreeSet<ContainerName>,
    /// The containers whose keepers live. The record of an ended container stays for a moment, or
    /// for longer if containerd has lost the container.
    pub kept: BTreeSet<ContainerName>,
    /// None: not asked for, or the sandbox does not run. `Err`: the cause why it is not known.
    pub used: Option<Result<Use, String>>,
}

/// Steps of a plan, with all that they need.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Steps {
    pub steps: Vec<Step>,
    /// Index of the step that needs room on the disk, for which the plan stops the running sandbox.
    /// Without room that step fails, and no other is taken.
    pub stops_for: Option<usize>,
    pub basis: Basis,
    /// The plan puts the sandbox to sleep without a request for it.
    pub by_itself: bool,
    /// When the plan was made. A use of the sandbox after that time is a use of a sandbox that the
    /// plan has put to sleep.
    pub decided: Timestamp,
    /// The cause of the wake, if the plan wakes the sandbox.
    pub cause: WakeCause,
    /// Percent of the images' disk that stay free.
    pub reserve: u8,
    /// Most bytes of the images of the Pod's namespace; none: no limit.
    pub namespace_limit: Option<u64>,
    /// The rules that the shim follows from now on; none for a Pod that the API does not have.
    pub rules: Option<(Rules, Probes)>,
    /// For the manifest of an image; none if no step makes one.
    pub pod: Option<PodFacts>,
}

/// Facts of the API about a Pod, for the manifest of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodFacts {
    /// The Sandbox of the Pod; none: the Pod has none.
    pub sandbox_name: Option<String>,
    pub containers: Vec<ContainerFacts>,
    /// The needs of an image that this node makes, with the node's own build of runsc.
    pub fingerprint: Fingerprint,
}

/// Report of the kubelet about a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerFacts {
    pub name: String,
    /// With the runtime's scheme before it; empty before the first start.
    pub container_id: String,
    pub image_id: String,
    /// Set if the container has ended.
    pub exit_code: Option<i32>,
}

/// An answer of the shim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "kebab-case")]
pub enum Answer {
    Done,
    Observed(Observed),
    /// Milliseconds since the last packet that was no probe, none without one; a file in the
    /// sandbox says that it is busy.
    #[serde(rename_all = "camelCase")]
    Inquired {
        packet_millis: Option<u64>,
        busy: bool,
    },
    Measured(Figures),
    /// The outcome of the step with this index.
    Step {
        index: usize,
        outcome: Outcome,
        took: Duration,
    },
    /// No more steps are taken. `written`: bytes of images that the steps wrote, committed or not.
    Ended {
        written: u64,
    },
    Refused {
        reason: String,
        message: String,
    },
}

impl Answer {
    pub fn refused(reason: &str, message: impl Into<String>) -> Self {
        Self::Refused {
            reason: reason.to_owned(),
            message: message.into(),
        }
    }

    /// Sends the answer to the node agent. A failure is ignored: an agent that has hung up asks
    /// again.
    pub fn send(&self, peer: &OwnedFd) {
        if let Ok(bytes) = serde_json::to_vec(self) {
            let _ = send(peer, &bytes, &[]);
        }
    }
}

/// A connection to a shim.
struct Connection {
    path: PathBuf,
    peer: OwnedFd,
}

impl Connection {
    /// Sends the request to the shim of the pod whose directory is `pod_dir`. `limit`: for each
    /// answer.
    fn open(pod_dir: &Path, request: Request, limit: Duration) -> Result<Self, Error> {
        let path = pod_dir.join(SOCKET);
        let envelope = Envelope {
            version: VERSION,
            request,
        };
        let bytes = serde_json::to_vec(&envelope);
        let bytes = bytes.map_err(|_| Error::BadAnswer { path: path.clone() })?;
        if bytes.len() > MAX_MESSAGE {
            return Err(Error::TooLarge { size: bytes.len() });
        }
        match wire::request(&path, &bytes, &[], limit) {
            Ok(peer) => Ok(Self { path, peer }),
            Err(Unsent::NotListening(source)) => Err(Error::Gone { path, source }),
            Err(Unsent::Failed(source)) => Err(Error::Talk { path, source }),
        }
    }

    fn receive(&self) -> Result<Answer, Error> {
        let received = receive(&self.peer).and_then(|(bytes, _)| match bytes.is_empty() {
            true => Err(Errno::ECONNRESET),
            false => Ok(bytes),
        });
        let bytes = received.map_err(|source| Error::Talk {
            path: self.path.clone(),
            source,
        })?;
        match serde_json::from_slice(&bytes) {
            Ok(Answer::Refused { reason, message }) => Err(Error::Refused { reason, message }),
            Ok(answer) => Ok(answer),
            Err(_) => Err(self.bad_answer()),
        }
    }

    fn bad_answer(&self) -> Error {
        Error::BadAnswer {
            path: self.path.clone(),
        }
    }
}

/// Sends a request to the shim of the pod whose directory is `pod_dir`, and returns its answer.
pub fn ask(pod_dir: &Path, request: Request, limit: Duration) -> Result<Answer, Error> {
    Connection::open(pod_dir, request, limit)?.receive()
}

/// Has the shim of the pod whose directory is `pod_dir` take steps, and passes the index, outcome
/// and duration of each to `report`. Returns how many bytes of images the steps have written.
/// `limit`: for each step.
///
/// After an error the outcome of the step that was not reported is not known. The shim takes the
/// steps also when this process ends.
pub fn run(
    pod_dir: &Path,
    steps: Steps,
    limit: Duration,
    mut report: impl FnMut(usize, Outcome, Duration),
) -> Result<u64, Error> {
    let connection = Connection::open(pod_dir, Request::Steps(Box::new(steps)), limit)?;
    loop {
        match connection.receive()? {
            Answer::Step {
                index,
                outcome,
                took,
            } => report(index, outcome, took),
            Answer::Ended { written } => return Ok(written),
            _ => return Err(connection.bad_answer()),
        }
    }
}

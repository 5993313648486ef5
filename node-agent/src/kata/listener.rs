//! A listener for the packets to a Kata sandbox: a packet socket on the host's end of its link.
//!
//! The listener neither holds nor answers packets, because the guest's kernel runs while its
//! programs are paused. The kernel itself answers what a kernel answers, and buffers the data for
//! the programs. So a packet only causes the sandbox's resume, and a packet that the listener
//! misses waits in the guest.

#![allow(unsafe_code)]

use std::collections::HashSet;
use std::fmt;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use torpor_core::wake_on::WakeOn;
use torpor_link::net;
use torpor_link::owner::{Kubelet, Owner, is_of_this_machine};
use torpor_link::packet::{Ends, Meaning, Segment, meaning, segment};
use torpor_link::tap::{self, Tap, ethernet};
use torpor_records::Probes;
use torpor_records::Rules;

/// Frames in a row after which the reader rests. So a flood of packets that wake no
/// sandbox cannot take the agent's processor.
const FRAMES_A_BATCH: usize = 256;
/// The rest between two batches. Meanwhile the socket drops frames for which it has no room; their
/// senders send them again. A packet that wakes the sandbox waits no longer than this.
const REST: Duration = Duration::from_millis(20);
/// Most connections of the kubelet that are remembered. The kubelet opens one for each probe.
const MOST_PROBES: usize = 256;

/// The reason why a Pod's links have no listener.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the Pod has no address yet")]
    NoAddress,
    #[error(transparent)]
    Namespace(#[from] net::Error),
    #[error("the Pod's link has no end on the host (only veth pairs have one)")]
    NoPair,
    #[error(transparent)]
    Tap(#[from] tap::Error),
    #[error("cannot wait for packets")]
    Wait(#[source] std::io::Error),
}

/// The Pod of a listener.
pub(crate) struct Target {
    /// The Pod's network namespace.
    pub(crate) namespace: PathBuf,
    /// The Pod's addresses.
    pub(crate) own: Vec<IpAddr>,
    pub(crate) kubelet_port: u16,
}

/// A listener at all links of one Pod. The drop ends it.
#[derive(Debug)]
pub(crate) struct PacketListener {
    shared: Arc<Mutex<Shared>>,
    began: Timestamp,
    tasks: Vec<AbortHandle>,
}

/// A function that the first packet calls that wakes the sandbox.
type Call = Box<dyn FnOnce() + Send>;

/// The state that a listener shares with the readers of its links.
#[derive(Default)]
struct Shared {
    /// When the last packet came that used the sandbox.
    last: Timestamp,
    wake_on: WakeOn,
    /// Ports that the kubelet probes.
    probed: Vec<u16>,
    call: Option<Call>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Shared");
        text.field("last", &self.last)
            .field("armed", &self.call.is_some())
            .finish_non_exhaustive()
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PacketListener {
    /// Starts a listener at all links of the Pod. The caller is in the node's network namespace.
    pub(crate) fn open(runtime: &Handle, target: &Target, now: Timestamp) -> Result<Self, Error> {
        if target.own.is_empty() {
            return Err(Error::NoAddress);
        }
        let pairs = net::pairs(&target.namespace)?;
        if pairs.is_empty() {
            return Err(Error::NoPair);
        }
        let mut listener = Self {
            shared: Arc::default(),
            began: now,
            tasks: Vec::new(),
        };
        let _inside = runtime.enter();
        for pair in pairs {
            let tap = polled(Tap::open(pair.host)?)?;
            let reader = LinkReader {
                classifier: Classifier::new(target),
                shared: listener.shared.clone(),
            };
            let task = runtime.spawn(reader.run(tap));
            listener.tasks.push(task.abort_handle());
        }
        Ok(listener)
    }

    pub(crate) fn began(&self) -> Timestamp {
        self.began
    }

    /// Returns when the last packet came that used the sandbox; the epoch if none did.
    pub(crate) fn last(&self) -> Timestamp {
        lock(&self.shared).last
    }

    pub(crate) fn set_rules(&self, rules: &Rules, probes: &Probes) {
        let mut shared = lock(&self.shared);
        shared.wake_on = rules.wake_on.clone();
        shared.probed = probes.ports.iter().copied().collect();
    }

    /// Sets the function that the next packet calls that wakes the sandbox.
    pub(crate) fn arm(&self, call: Call) {
        lock(&self.shared).call = Some(call);
    }

    pub(crate) fn disarm(&self) {
        lock(&self.shared).call = None;
    }
}

impl Drop for PacketListener {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// A tap with the raw file descriptor that tokio needs to poll it.
struct Polled(Tap);

impl AsRawFd for Polled {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// Registers the tap with tokio. The caller has entered the runtime.
fn polled(tap: Tap) -> Result<AsyncFd<Polled>, Error> {
    // SAFETY: a tap owns its socket, never exchanges it, and closes it at its drop. The AsyncFd
    // deregisters the socket before that.
    let registered = unsafe { AsyncFd::register_with_interest(Polled(tap), Interest::READABLE) };
    registered.map_err(|error| Error::Wait(error.into()))
}

/// A source of frames.
trait Frames {
    /// Returns the next frame with its header; none if no frame is there.
    fn receive(&mut self) -> Result<Option<&[u8]>, tap::Error>;
}

impl Frames for Tap {
    fn receive(&mut self) -> Result<Option<&[u8]>, tap::Error> {
        Tap::receive(self)
    }
}

/// The end of a batch of frames.
#[derive(Debug, PartialEq, Eq)]
enum Batch {
    /// All frames have been read.
    Drained,
    /// More frames may be there.
    More,
}

/// The reader of one link.
struct LinkReader {
    classifier: Classifier,
    shared: Arc<Mutex<Shared>>,
}

impl LinkReader {
    async fn run(mut self, mut tap: AsyncFd<Polled>) {
        loop {
            let Ok(mut ready) = tap.readable_mut().await else {
                return;
            };
            let batch = self.read_batch(&mut ready.get_inner_mut().0);
            match batch {
                Ok(Batch::Drained) => ready.clear_ready(),
                Ok(Batch::More) => tokio::time::sleep(REST).await,
                // The link is gone, and the Pod with it.
                Err(_) => return,
            }
        }
    }

    fn read_batch(&mut self, frames: &mut impl Frames) -> Result<Batch, tap::Error> {
        for _ in 0..FRAMES_A_BATCH {
            match frames.receive()? {
                Some(frame) => self.receive(ethernet(frame)),
                None => return Ok(Batch::Drained),
            }
        }
        Ok(Batch::More)
    }

    fn receive(&mut self, frame: &[u8]) {
        let mut shared = lock(&self.shared);
        let Some(meaning) = self.classifier.use_of(frame, &shared.probed) else {
            return;
        };
        shared.last = Timestamp::now();
        let wakes = meaning.for_pod_that_wakes_on(&shared.wake_on);
        if matches!(wakes, Meaning::Wakes(_))
            && let Some(call) = shared.call.take()
        {
            call();
        }
    }
}

/// A filter for the frames that are a use of the sandbox.
struct Classifier {
    own: Vec<IpAddr>,
    kubelet: Kubelet,
    /// Open connections of the kubelet's probes.
    probes: HashSet<Ends>,
}

impl Classifier {
    fn new(target: &Target) -> Self {
        Self {
            own: target.own.clone(),
            kubelet: Kubelet::at(target.kubelet_port),
            probes: HashSet::new(),
        }
    }

    /// Returns the meaning of a frame that uses the sandbox. None for a probe, and for a frame that
    /// needs no answer of a program.
    fn use_of(&mut self, frame: &[u8], probed: &[u16]) -> Option<Meaning> {
        if let Some(segment) = segment(frame, &self.own)
            && self.is_of_probe(&segment, probed)
        {
            return None;
        }
        let meaning = meaning(frame, &self.own);
        matches!(meaning, Meaning::Wakes(_)).then_some(meaning)
    }

    /// Returns whether the segment belongs to a connection of the kubelet to a port that it probes.
    /// If the owner of the connection cannot be determined, the segment counts as a use of the
    /// sandbox.
    ///
    /// The guest answers at once, so the kubelet may have closed the connection before its owner is
    /// looked up. A connection that is closed by then counts as a probe at its begin, but
    /// data on it counts as a use.
    fn is_of_probe(&mut self, segment: &Segment, probed: &[u16]) -> bool {
        if !probed.contains(&segment.ends.local_port) {
            return false;
        }
        if !segment.begins() {
            return self.probes.contains(&segment.ends);
        }
        self.probes.remove(&segment.ends);
        if !is_of_this_machine(segment.ends.remote) {
            return false;
        }
        let owner = self.kubelet.owner_of(&segment.ends);
        if matches!(owner, Ok(Owner::Kubelet)) {
            if self.probes.len() >= MOST_PROBES {
                self.probes.clear();
            }
            self.probes.insert(segment.ends);
        }
        matches!(owner, Ok(Owner::Kubelet | Owner::Kernel | Owner::Nobody))
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn segment(ends: Ends, syn: bool, length: usize) -> Segment {
        Segment {
            ends,
            sequence: 1,
            acknowledgment: 0,
            window: 1000,
            syn,
            fin: false,
            rst: false,
            ack: !syn,
            length,
            timestamps: None,
            other_options: false,
        }
    }

    /// A connection of this process to a port that takes the place of a port in the Pod.
    struct Connected {
        server: TcpListener,
        stream: TcpStream,
        ends: Ends,
    }

    impl Connected {
        fn new() -> Self {
            let server = TcpListener::bind("127.0.0.1:0").expect("listens");
            let at = server.local_addr().expect("an address");
            let stream = TcpStream::connect(at).expect("connects");
            let from = stream.local_addr().expect("an address");
            let ends = Ends {
                remote: from.ip(),
                remote_port: from.port(),
                local: at.ip(),
                local_port: at.port(),
            };
            Self {
                server,
                stream,
                ends,
            }
        }
    }

    fn classifier(kubelet_port: u16) -> Classifier {
        Classifier::new(&Target {
            namespace: PathBuf::new(),
            own: Vec::new(),
            kubelet_port,
        })
    }

    /// A source with so many frames.
    struct Waiting(usize);

    impl Frames for Waiting {
        fn receive(&mut self) -> Result<Option<&[u8]>, tap::Error> {
            let Some(left) = self.0.checked_sub(1) else {
                return Ok(None);
            };
            self.0 = left;
            Ok(Some(&[0; 64]))
        }
    }

    #[test]
    fn a_flood_of_frames_is_read_in_limited_batches() {
        let mut reader = LinkReader {
            classifier: classifier(unused_port()),
            shared: Arc::default(),
        };
        let mut read = |waiting: usize| {
            let mut waiting = Waiting(waiting);
            let batch = reader.read_batch(&mut waiting).expect("heard");
            (batch, waiting.0)
        };
        assert_eq!(read(0), (Batch::Drained, 0));
        assert_eq!(read(FRAMES_A_BATCH - 1), (Batch::Drained, 0));
        assert_eq!(read(10 * FRAMES_A_BATCH), (Batch::More, 9 * FRAMES_A_BATCH));
        let rest = usize::try_from(REST.as_millis()).expect("short");
        let a_second = FRAMES_A_BATCH * 1000 / rest;
        assert!(a_second < 20_000, "{a_second} frames are heard in a second");
    }

    /// Returns a port at which no process listens, so that no process counts as the kubelet.
    fn unused_port() -> u16 {
        let unused = TcpListener::bind("127.0.0.1:0").expect("listens");
        unused.local_addr().expect("an address").port()
    }

    #[test]
    fn a_probe_that_ended_before_the_look_does_not_count_as_use_and_data_does() {
        let Connected {
            server,
            stream,
            ends,
        } = Connected::new();
        drop(stream);
        let mut classifier = classifier(unused_port());
        let probed = [ends.local_port];
        assert!(classifier.is_of_probe(&segment(ends, true, 0), &probed));
        assert!(!classifier.is_of_probe(&segment(ends, false, 5), &probed));
        assert!(!classifier.is_of_probe(&segment(ends, true, 0), &[]));
        // This machine cannot know which connections another machine has closed.
        let elsewhere = Ends {
            remote: IpAddr::from([192, 0, 2, 1]),
            ..ends
        };
        assert!(!classifier.is_of_probe(&segment(elsewhere, true, 0), &probed));
        drop(server);
    }

    #[test]
    fn a_connection_of_another_process_to_a_probed_port_counts_as_use() {
        let connected = Connected::new();
        let ends = connected.ends;
        let mut classifier = classifier(unused_port());
        assert!(!classifier.is_of_probe(&segment(ends, true, 0), &[ends.local_port]));
    }

    #[test]
    fn no_packet_of_a_kubelet_connection_to_a_probed_port_counts_as_use() {
        let connected = Connected::new();
        let ends = connected.ends;
        // The process that listens on the kubelet's port is this one.
        let kubelet_port = connected.server.local_addr().expect("an address").port();
        let mut classifier = classifier(kubelet_port);
        for segment in [segment(ends, true, 0), segment(ends, false, 5)] {
            assert!(classifier.is_of_probe(&segment, &[ends.local_port]));
        }
        drop(connected.stream);
    }
}

//! Hearing who wants a Kata sandbox: a packet socket on the host's end of its link.
//!
//! Nothing is held back and nothing is answered: the guest's kernel runs while its programs stand still, answers for them what a kernel answers, and keeps
//! what it takes for them. So a packet is only heard, and the sandbox resumed; one that came while nobody heard waits in the guest.

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
use torpor_runsc::keeper::Rules;

/// Frames in a row, after which the listener rests: who floods a link with what wakes nobody does not have the agent's processor with it.
const FRAMES_A_TURN: usize = 256;
/// What the socket has no room for meanwhile is not heard; whoever wants something says it again, and a packet that wakes waits no longer than this.
const REST: Duration = Duration::from_millis(20);
/// Connections of the kubelet that are remembered; it opens one for each probe.
const MOST_PROBES: usize = 256;

/// Why a Pod's link cannot be listened to.
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

/// Which Pod it is.
pub(crate) struct Place {
    /// Its network namespace.
    pub(crate) namespace: PathBuf,
    pub(crate) own: Vec<IpAddr>,
    pub(crate) kubelet_port: u16,
}

/// Listens until it is dropped.
#[derive(Debug)]
pub(crate) struct Ear {
    heard: Arc<Mutex<Heard>>,
    began: Timestamp,
    tasks: Vec<AbortHandle>,
}

/// Called once, by the first packet that wants something.
type Call = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Heard {
    last: Timestamp,
    wake_on: WakeOn,
    probed: Vec<u16>,
    call: Option<Call>,
}

impl fmt::Debug for Heard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Heard");
        text.field("last", &self.last)
            .field("armed", &self.call.is_some())
            .finish_non_exhaustive()
    }
}

fn lock(heard: &Mutex<Heard>) -> MutexGuard<'_, Heard> {
    heard.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ear {
    /// Listens at all links of the Pod. Called from the node's own network namespace.
    pub(crate) fn open(runtime: &Handle, place: &Place, now: Timestamp) -> Result<Self, Error> {
        if place.own.is_empty() {
            return Err(Error::NoAddress);
        }
        let pairs = net::pairs(&place.namespace)?;
        if pairs.is_empty() {
            return Err(Error::NoPair);
        }
        let mut ear = Self {
            heard: Arc::default(),
            began: now,
            tasks: Vec::new(),
        };
        let _inside = runtime.enter();
        for pair in pairs {
            let tap = polled(Tap::open(pair.host)?)?;
            let listener = Listener {
                hearing: Hearing::new(place),
                heard: ear.heard.clone(),
            };
            ear.tasks
                .push(runtime.spawn(listener.listen(tap)).abort_handle());
        }
        Ok(ear)
    }

    pub(crate) fn began(&self) -> Timestamp {
        self.began
    }

    /// When the last packet came that wanted something; long ago if none did.
    pub(crate) fn last(&self) -> Timestamp {
        lock(&self.heard).last
    }

    pub(crate) fn set_rules(&self, rules: &Rules, probes: &Probes) {
        let mut heard = lock(&self.heard);
        heard.wake_on = rules.wake_on.clone();
        heard.probed = probes.ports.iter().copied().collect();
    }

    pub(crate) fn arm(&self, call: Call) {
        lock(&self.heard).call = Some(call);
    }

    pub(crate) fn disarm(&self) {
        lock(&self.heard).call = None;
    }
}

impl Drop for Ear {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// tokio polls what says its number.
struct Polled(Tap);

impl AsRawFd for Polled {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// Called within the runtime.
fn polled(tap: Tap) -> Result<AsyncFd<Polled>, Error> {
    // SAFETY: a tap owns its socket, never exchanges it, and closes it when it is dropped, which is after the AsyncFd has let go of it.
    let registered = unsafe { AsyncFd::register_with_interest(Polled(tap), Interest::READABLE) };
    registered.map_err(|error| Error::Wait(error.into()))
}

/// Where frames come from.
trait Frames {
    /// The next one, with its header; none when there is none.
    fn receive(&mut self) -> Result<Option<&[u8]>, tap::Error>;
}

impl Frames for Tap {
    fn receive(&mut self) -> Result<Option<&[u8]>, tap::Error> {
        Tap::receive(self)
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Turn {
    AllHeard,
    /// There are, or may be.
    More,
}

struct Listener {
    hearing: Hearing,
    heard: Arc<Mutex<Heard>>,
}

impl Listener {
    async fn listen(mut self, mut tap: AsyncFd<Polled>) {
        loop {
            let Ok(mut ready) = tap.readable_mut().await else {
                return;
            };
            let turn = self.turn(&mut ready.get_inner_mut().0);
            match turn {
                Ok(Turn::AllHeard) => ready.clear_ready(),
                Ok(Turn::More) => tokio::time::sleep(REST).await,
                // The link is gone, and the Pod with it.
                Err(_) => return,
            }
        }
    }

    fn turn(&mut self, frames: &mut impl Frames) -> Result<Turn, tap::Error> {
        for _ in 0..FRAMES_A_TURN {
            match frames.receive()? {
                Some(frame) => self.hear(ethernet(frame)),
                None => return Ok(Turn::AllHeard),
            }
        }
        Ok(Turn::More)
    }

    fn hear(&mut self, frame: &[u8]) {
        let mut heard = lock(&self.heard);
        let Some(meant) = self.hearing.wish(frame, &heard.probed) else {
            return;
        };
        heard.last = Timestamp::now();
        let wakes = meant.for_pod_that_wakes_on(&heard.wake_on);
        if matches!(wakes, Meaning::Wakes(_))
            && let Some(call) = heard.call.take()
        {
            call();
        }
    }
}

/// Which frames are somebody's use of the sandbox.
struct Hearing {
    own: Vec<IpAddr>,
    kubelet: Kubelet,
    probes: HashSet<Ends>,
}

impl Hearing {
    fn new(place: &Place) -> Self {
        Self {
            own: place.own.clone(),
            kubelet: Kubelet::at(place.kubelet_port),
            probes: HashSet::new(),
        }
    }

    /// What somebody wants of the sandbox by a frame; none of a probe, and of what wants nothing.
    fn wish(&mut self, frame: &[u8], probed: &[u16]) -> Option<Meaning> {
        if let Some(segment) = segment(frame, &self.own)
            && self.is_of_probe(&segment, probed)
        {
            return None;
        }
        let meant = meaning(frame, &self.own);
        matches!(meant, Meaning::Wakes(_)).then_some(meant)
    }

    /// A connection of the kubelet to a port that it probes; when the kernel does not say whose it is, it is somebody who wants the sandbox. The guest
    /// answers at once, so that the kubelet may have closed it before anybody asks: then that it was begun does not count, but what is said on it does.
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

    /// A connection of this process to a port that stands for one in the Pod.
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

    fn hearing(kubelet_port: u16) -> Hearing {
        Hearing::new(&Place {
            namespace: PathBuf::new(),
            own: Vec::new(),
            kubelet_port,
        })
    }

    /// So many frames lie there.
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
    fn a_flood_is_heard_a_part_at_a_time() {
        let mut listener = Listener {
            hearing: hearing(nobodys_port()),
            heard: Arc::default(),
        };
        let mut turn = |waiting: usize| {
            let mut waiting = Waiting(waiting);
            let turn = listener.turn(&mut waiting).expect("heard");
            (turn, waiting.0)
        };
        assert_eq!(turn(0), (Turn::AllHeard, 0));
        assert_eq!(turn(FRAMES_A_TURN - 1), (Turn::AllHeard, 0));
        assert_eq!(turn(10 * FRAMES_A_TURN), (Turn::More, 9 * FRAMES_A_TURN));
        let rest = usize::try_from(REST.as_millis()).expect("short");
        let a_second = FRAMES_A_TURN * 1000 / rest;
        assert!(a_second < 20_000, "{a_second} frames are heard in a second");
    }

    /// A port on which nobody listens, so that nobody is the kubelet.
    fn nobodys_port() -> u16 {
        let nobody = TcpListener::bind("127.0.0.1:0").expect("listens");
        nobody.local_addr().expect("an address").port()
    }

    #[test]
    fn a_probe_that_is_over_before_anybody_asks_does_not_count_and_data_does() {
        let Connected {
            server,
            stream,
            ends,
        } = Connected::new();
        drop(stream);
        let mut hearing = hearing(nobodys_port());
        let probed = [ends.local_port];
        assert!(hearing.is_of_probe(&segment(ends, true, 0), &probed));
        assert!(!hearing.is_of_probe(&segment(ends, false, 5), &probed));
        assert!(!hearing.is_of_probe(&segment(ends, true, 0), &[]));
        // Of another machine nobody knows here what it has closed.
        let elsewhere = Ends {
            remote: IpAddr::from([192, 0, 2, 1]),
            ..ends
        };
        assert!(!hearing.is_of_probe(&segment(elsewhere, true, 0), &probed));
        drop(server);
    }

    #[test]
    fn whoever_holds_a_connection_to_a_probed_port_wants_the_sandbox() {
        let connected = Connected::new();
        let ends = connected.ends;
        let mut hearing = hearing(nobodys_port());
        assert!(!hearing.is_of_probe(&segment(ends, true, 0), &[ends.local_port]));
    }

    #[test]
    fn nothing_counts_on_a_connection_of_the_kubelet_to_a_probed_port() {
        let connected = Connected::new();
        let ends = connected.ends;
        // The process that listens on the kubelet's port is this one.
        let kubelet_port = connected.server.local_addr().expect("an address").port();
        let mut hearing = hearing(kubelet_port);
        for of_it in [segment(ends, true, 0), segment(ends, false, 5)] {
            assert!(hearing.is_of_probe(&of_it, &[ends.local_port]));
        }
        drop(connected.stream);
    }
}

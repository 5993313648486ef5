//! Holds the packets that a sandbox sends during a restore until its image is recorded as stale.
//!
//! If a peer received them before and the wake failed, the image would be restored once more, and
//! the peer would meet a sandbox with older memory.
//!
//! A program at the host's end of the link drops the packets. A packet socket at the pod's end
//! receives them before, and sends them again when they are released. The program lets the frames
//! of that socket pass.

use std::os::fd::BorrowedFd;
use std::path::Path;

use torpor_link::net::{self, Pair};
use torpor_link::packet::is_tcp;
use torpor_link::packet_drop::{EgressHold, Sender};
use torpor_link::tap::{Tap, ethernet};

use super::sender::{self, with_sender};

/// The largest number of frames that are released of one link, so that the release ends also if the
/// sandbox sends without a pause. A tap holds some hundreds.
const MAX_FRAMES: usize = 2048;

/// The packets that a pod has sent since the restore began.
pub(super) struct HeldEgress {
    hold: EgressHold,
    taps: Vec<Tap>,
    /// The sender whose frames pass the hold.
    sender: Sender,
}

impl HeldEgress {
    /// Begins to hold what the pod sends on its links. Frames of `sender` pass.
    ///
    /// The host's ends of the links are in the calling thread's network namespace, and the pod's
    /// ends in the one at `namespace`.
    pub(super) fn begin(namespace: &Path, pairs: &[Pair], sender: Sender) -> anyhow::Result<Self> {
        // The hold begins before the taps: a frame that comes in between is lost, as on any link.
        // In the reverse order a peer would receive it twice.
        let hold = EgressHold::begin(pairs, sender)?;
        let open = || pairs.iter().map(|pair| Tap::of_pod(pair.pod)).collect();
        let taps: Result<Vec<Tap>, _> = net::inside(namespace, open)?;
        Ok(Self {
            hold,
            taps: taps?,
            sender,
        })
    }

    /// Returns the descriptors that keep up the hold. A process with copies of them keeps it up
    /// after this process has ended.
    pub(super) fn links(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.hold.links()
    }

    /// Discards the packets that were sent so far.
    pub(super) fn discard(&mut self) {
        for tap in &mut self.taps {
            while let Ok(Some(_)) = tap.receive() {}
        }
    }

    /// Releases the packets, in order, and ends the hold.
    pub(super) fn release(&mut self) {
        self.send_held(|_| true);
        self.hold.open();
        // Some frames came just before the hold ended. A peer may have received them already, so
        // only those of TCP are sent, which accepts a segment twice.
        self.send_held(is_tcp);
    }

    /// Sends the held frames that `is_wanted` selects.
    fn send_held(&mut self, is_wanted: impl Fn(&[u8]) -> bool) {
        let sender = self.sender;
        for tap in &mut self.taps {
            for _ in 0..MAX_FRAMES {
                let Ok(Some(frame)) = tap.receive() else {
                    break;
                };
                if has_passed(ethernet(frame), sender) || !is_wanted(ethernet(frame)) {
                    continue;
                }
                if let Some(frame) = with_sender(frame, sender) {
                    // If the frame is lost, as on any link, the sandbox repeats it if necessary.
                    let _ = tap.send(&frame);
                }
            }
        }
    }
}

/// Reports whether a frame has passed the hold: it is the keeper's own, or of a kind that passes.
fn has_passed(ethernet: &[u8], sender: Sender) -> bool {
    ethernet.get(sender::ADDRESS) == Some(&sender.address()) || EgressHold::lets_pass(ethernet)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::os::fd::OwnedFd;
    use std::path::PathBuf;
    use std::process::Command;
    use std::time::Duration;

    /// A pod and its host, each in a network namespace of its own. Needs root and iproute2, like
    /// the development cluster.
    pub(crate) struct PodAndHost {
        pub(crate) pod: String,
        host: String,
    }

    impl PodAndHost {
        /// Creates the network namespaces and a link between them. `id`: unique among the tests.
        pub(crate) fn new(id: &str) -> Self {
            let name = |role| format!("torpor-{id}-{role}-{}", std::process::id());
            let both = Self {
                pod: name("pod"),
                host: name("host"),
            };
            let (pod, host) = (&both.pod, &both.host);
            sh(&format!(
                "ip netns add {pod}; ip netns add {host}
                 ip link add eth0 netns {pod} address 02:00:00:00:00:07 type veth peer name eth0 netns {host}
                 for n in {pod} {host}; do ip -n $n link set eth0 up; done
                 ip -n {pod} addr add 10.204.0.1/24 dev eth0; ip -n {host} addr add 10.204.0.2/24 dev eth0
                 ip -n {pod} addr add fd04::1/64 dev eth0 nodad; ip -n {host} addr add fd04::2/64 dev eth0 nodad"
            ));
            both
        }

        pub(crate) fn path(name: &str) -> PathBuf {
            Path::new("/run/netns").join(name)
        }

        pub(crate) fn at_host<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
            net::inside(&Self::path(&self.host), work).expect("inside")
        }

        pub(crate) fn in_pod<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
            net::inside(&Self::path(&self.pod), work).expect("inside")
        }
    }

    impl Drop for PodAndHost {
        fn drop(&mut self) {
            let _ = Command::new("ip")
                .args(["netns", "del", &self.pod])
                .status();
            let _ = Command::new("ip")
                .args(["netns", "del", &self.host])
                .status();
        }
    }

    fn sh(script: &str) {
        let status = Command::new("sh").args(["-ec", script]).status();
        assert!(status.expect("sh runs").success(), "{script}");
    }

    /// Runs ip(8) in this thread's network namespace and returns its output.
    pub(crate) fn ip(args: &str) -> String {
        let done = Command::new("ip").args(args.split(' ')).output();
        let done = done.expect("ip runs");
        assert!(done.status.success(), "ip {args}: {done:?}");
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    /// Returns the next datagram of a [`receiver`]; none if no datagram comes in time.
    pub(crate) fn receive(socket: &UdpSocket) -> Option<String> {
        let mut datagram = [0; 16];
        let length = socket.recv(&mut datagram).ok()?;
        Some(String::from_utf8_lossy(&datagram[..length]).into_owned())
    }

    /// Returns a socket in this thread's network namespace that waits a moment for a datagram.
    pub(crate) fn receiver(address: &str) -> UdpSocket {
        let receiver = UdpSocket::bind(address).expect("bound");
        let limit = Some(Duration::from_millis(300));
        receiver.set_read_timeout(limit).expect("set");
        receiver
    }

    /// Returns a function that sends a datagram from the pod, and its receiver at the host.
    fn datagrams(both: &PodAndHost) -> (impl Fn(&str), UdpSocket) {
        let receiver = both.at_host(|| receiver("10.204.0.2:0"));
        let to = receiver.local_addr().expect("an address");
        let socket = both.in_pod(|| UdpSocket::bind("10.204.0.1:0").expect("bound"));
        let send = move |datagram: &str| {
            socket.send_to(datagram.as_bytes(), to).expect("sent");
        };
        (send, receiver)
    }

    #[test]
    fn held_packets_of_a_pod_are_sent_in_order_at_the_end_or_discarded() {
        let both = PodAndHost::new("muted");
        let pod = PodAndHost::path(&both.pod);
        let (send, receiver) = datagrams(&both);
        send("before");
        assert_eq!(receive(&receiver).as_deref(), Some("before"));

        let sender = Sender::random();
        let pairs = both.at_host(|| net::pairs(&pod)).expect("pairs");
        let mut held = both
            .at_host(|| HeldEgress::begin(&pod, &pairs, sender))
            .expect("muted");
        send("given up");
        held.discard();
        for datagram in ["a", "b", "c", "c"] {
            send(datagram);
        }
        assert_eq!(receive(&receiver), None);
        held.release();
        send("after");
        let received: Vec<_> = std::iter::from_fn(|| receive(&receiver)).collect();
        assert_eq!(received, ["a", "b", "c", "c", "after"]);
    }

    /// The shim may be killed while a sandbox already runs that is about to be ended and restored
    /// once more.
    #[test]
    fn the_restoring_process_keeps_the_egress_hold_when_the_keeper_ends() {
        let both = PodAndHost::new("outlived");
        let pod = PodAndHost::path(&both.pod);
        let (send, receiver) = datagrams(&both);
        let pairs = both.at_host(|| net::pairs(&pod)).expect("pairs");
        let held = both
            .at_host(|| HeldEgress::begin(&pod, &pairs, Sender::random()))
            .expect("muted");
        let copies: Vec<OwnedFd> = held
            .links()
            .map(|link| link.try_clone_to_owned().expect("copied"))
            .collect();
        assert_eq!(copies.len(), pairs.len());
        // All descriptors of the keeper are closed, as at the shim's death.
        drop(held);
        send("from a life that is taken back");
        assert_eq!(receive(&receiver), None);
        drop(copies);
        send("after");
        assert_eq!(receive(&receiver).as_deref(), Some("after"));
    }
}

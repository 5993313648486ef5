//! What a sandbox says while it is restored waits until it is recorded that its image is stale: somebody who had heard it could otherwise
//! meet an older one, when the wake is given up and the image restored once more.
//!
//! A packet socket on the pod's end of the link sees what leaves, before it is dropped at the host's end; what it sends again is let
//! through there.

use std::os::fd::BorrowedFd;
use std::path::Path;

use torpor_link::net::{self, Pair};
use torpor_link::packet::is_tcp;
use torpor_link::packet_drop::{EgressHold, Sender};
use torpor_link::tap::{Tap, ethernet};

use super::watch::{SENDER, sent_by};

/// A sandbox that never stops talking is heard all the same. A tap holds some hundreds.
const MOST_FRAMES: usize = 2048;

pub(super) struct Muted {
    mute: EgressHold,
    taps: Vec<Tap>,
    /// Is heard.
    known: Sender,
}

impl Muted {
    /// Called in the host's network namespace; the pod's is at `namespace`.
    pub(super) fn begin(namespace: &Path, pairs: &[Pair], known: Sender) -> anyhow::Result<Self> {
        // In this order: what comes in between is lost as on any link. The other way round it would be heard twice.
        let mute = EgressHold::begin(pairs, known)?;
        let open = || pairs.iter().map(|pair| Tap::of_pod(pair.pod)).collect();
        let taps: Result<Vec<Tap>, _> = net::inside(namespace, open)?;
        Ok(Self {
            mute,
            taps: taps?,
            known,
        })
    }

    /// Whoever has copies of these keeps the pod mute, also when this process has ended.
    pub(super) fn links(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.mute.links()
    }

    /// Nobody will hear what was said so far.
    pub(super) fn forget(&mut self) {
        for tap in &mut self.taps {
            while let Ok(Some(_)) = tap.receive() {}
        }
    }

    /// All that was said is heard now, in order.
    pub(super) fn end(&mut self) {
        self.hand_over(|_| true);
        self.mute.open();
        // What was said in the instant before. It may have been heard: TCP takes a segment twice.
        self.hand_over(is_tcp);
    }

    fn hand_over(&mut self, which: impl Fn(&[u8]) -> bool) {
        let known = self.known;
        for tap in &mut self.taps {
            for _ in 0..MOST_FRAMES {
                let Ok(Some(frame)) = tap.receive() else {
                    break;
                };
                if was_heard(ethernet(frame), known) || !which(ethernet(frame)) {
                    continue;
                }
                if let Some(frame) = sent_by(frame, known) {
                    // As on any link: what is lost is said again by who wants to be heard.
                    let _ = tap.send(&frame);
                }
            }
        }
    }
}

/// The keeper's own words, and what is let through.
fn was_heard(ethernet: &[u8], known: Sender) -> bool {
    ethernet.get(SENDER) == Some(&known.address()) || EgressHold::lets_pass(ethernet)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::os::fd::OwnedFd;
    use std::path::PathBuf;
    use std::process::Command;
    use std::time::Duration;

    /// A pod and its host, in network namespaces of their own. Needs root and iproute2, as the development cluster does.
    pub(crate) struct Pair {
        pub(crate) pod: String,
        host: String,
    }

    impl Pair {
        /// `word`: of no other pair.
        pub(crate) fn new(word: &str) -> Self {
            let of = |what| format!("torpor-{word}-{what}-{}", std::process::id());
            let pair = Self {
                pod: of("pod"),
                host: of("host"),
            };
            let (pod, host) = (&pair.pod, &pair.host);
            sh(&format!(
                "ip netns add {pod}; ip netns add {host}
                 ip link add eth0 netns {pod} address 02:00:00:00:00:07 type veth peer name eth0 netns {host}
                 for n in {pod} {host}; do ip -n $n link set eth0 up; done
                 ip -n {pod} addr add 10.204.0.1/24 dev eth0; ip -n {host} addr add 10.204.0.2/24 dev eth0
                 ip -n {pod} addr add fd04::1/64 dev eth0 nodad; ip -n {host} addr add fd04::2/64 dev eth0 nodad"
            ));
            pair
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

    impl Drop for Pair {
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

    /// In this thread's network namespace; what it says.
    pub(crate) fn ip(args: &str) -> String {
        let done = Command::new("ip").args(args.split(' ')).output();
        let done = done.expect("ip runs");
        assert!(done.status.success(), "ip {args}: {done:?}");
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    pub(crate) fn said(socket: &UdpSocket) -> Option<String> {
        let mut word = [0; 16];
        let length = socket.recv(&mut word).ok()?;
        Some(String::from_utf8_lossy(&word[..length]).into_owned())
    }

    /// Waits a moment for a word, in the network namespace in which it was made.
    pub(crate) fn listener(address: &str) -> UdpSocket {
        let hears = UdpSocket::bind(address).expect("bound");
        let limit = Some(Duration::from_millis(300));
        hears.set_read_timeout(limit).expect("set");
        hears
    }

    /// Says a word in the pod, and who hears it at its host.
    fn speech(pair: &Pair) -> (impl Fn(&str), UdpSocket) {
        let hears = pair.at_host(|| listener("10.204.0.2:0"));
        let to = hears.local_addr().expect("an address");
        let says = pair.in_pod(|| UdpSocket::bind("10.204.0.1:0").expect("bound"));
        let say = move |word: &str| {
            says.send_to(word.as_bytes(), to).expect("sent");
        };
        (say, hears)
    }

    #[test]
    fn what_is_said_while_muted_is_heard_at_its_end_in_order_or_never() {
        let pair = Pair::new("muted");
        let pod = Pair::path(&pair.pod);
        let (say, hears) = speech(&pair);
        say("before");
        assert_eq!(said(&hears).as_deref(), Some("before"));

        let known = Sender::random();
        let pairs = pair.at_host(|| net::pairs(&pod)).expect("pairs");
        let mut muted = pair
            .at_host(|| Muted::begin(&pod, &pairs, known))
            .expect("muted");
        say("given up");
        muted.forget();
        for word in ["a", "b", "c", "c"] {
            say(word);
        }
        assert_eq!(said(&hears), None);
        muted.end();
        say("after");
        let heard: Vec<_> = std::iter::from_fn(|| said(&hears)).collect();
        assert_eq!(heard, ["a", "b", "c", "c", "after"]);
    }

    /// The keeper may be killed while a sandbox that is about to be ended, and restored once more, runs already.
    #[test]
    fn who_restores_keeps_the_pod_mute_when_its_keeper_dies() {
        let pair = Pair::new("outlived");
        let pod = Pair::path(&pair.pod);
        let (say, hears) = speech(&pair);
        let pairs = pair.at_host(|| net::pairs(&pod)).expect("pairs");
        let muted = pair
            .at_host(|| Muted::begin(&pod, &pairs, Sender::random()))
            .expect("muted");
        let copies: Vec<OwnedFd> = muted
            .links()
            .map(|link| link.try_clone_to_owned().expect("copied"))
            .collect();
        assert_eq!(copies.len(), pairs.len());
        // All that it had is closed, as at its death.
        drop(muted);
        say("from a life that is taken back");
        assert_eq!(said(&hears), None);
        drop(copies);
        say("after");
        assert_eq!(said(&hears).as_deref(), Some("after"));
    }
}

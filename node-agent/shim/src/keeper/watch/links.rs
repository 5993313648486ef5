//! The links of a pod, and the answers that the keeper sends from their ends in the pod.

use std::net::IpAddr;
use std::path::Path;
use std::time::Instant;

use anyhow::ensure;
use torpor_link::doubt::UndecidedConnections;
use torpor_link::net::{self, Pair};
use torpor_link::packet::Ends;
use torpor_link::packet_drop::Sender;
use torpor_link::probes::Responder;
use torpor_link::tap::{FrameSender, Tap, ethernet};
use torpor_link::unacknowledged::NOT_OF_SANDBOX;
use torpor_records::Rules;

use crate::keeper::sender::set_sender;

/// One of the pod's links.
pub(super) struct Link {
    pub(super) pair: Pair,
    pub(super) tap: Tap,
    pub(super) pod_end: PodEnd,
}

/// The pod's end of a link. The keeper answers there in the pod's name.
pub(super) struct PodEnd {
    pub(super) socket: FrameSender,
    /// The Ethernet address of the pod on this link.
    pub(super) address: [u8; 6],
    /// The sender of the keeper's frames while the pod's packets are held.
    pub(super) sender: Option<Sender>,
    pub(super) probes: Responder,
    pub(super) doubts: UndecidedConnections,
}

impl PodEnd {
    /// Begins to answer a probe, whose first frame this is. Returns false if there is no room.
    pub(super) fn begin_probe(&mut self, ends: &Ends, frame: &[u8], now: Instant) -> bool {
        let begun = self.probes.begin(ends, ethernet(frame), now);
        if begun {
            self.probes.hear(ethernet(frame), now);
        }
        begun
    }

    /// Sends the answers to probes, and handles their timers.
    pub(super) fn answer_probes(&mut self, now: Instant) {
        self.probes.turn(now);
        while let Some(frame) = self.probes.says() {
            self.send(frame);
        }
    }

    /// Sends a frame in the pod's name. If the frame is lost, the peer repeats its request.
    pub(super) fn send(&self, mut frame: Vec<u8>) {
        if let Some(sender) = self.sender {
            set_sender(&mut frame, sender);
        }
        let _ = self.socket.send(&frame);
    }
}

/// Opens the links of the pod whose network namespace is at `namespace`.
pub(super) fn links(
    namespace: &Path,
    pod_ips: &[IpAddr],
    rules: &Rules,
) -> anyhow::Result<Vec<Link>> {
    let pairs = net::pairs(namespace)?;
    ensure!(
        !pairs.is_empty(),
        "the pod's link has no end on the host (only veth pairs have one)"
    );
    ensure!(
        !pairs.iter().any(|pair| pair.is_bypassed),
        "packets reach the pod without passing the host's end of its link, where Torpor watches them: let the CNI plugin pass them through it \
         (Cilium: bpf.hostLegacyRouting=true; Calico: bpfRedirectToPeer: Disabled), and recreate the pod"
    );
    let links = pairs.into_iter().map(|pair| {
        let mut probes = Responder::new(pod_ips, Instant::now());
        probes.answer_hooks(rules.suspends);
        Ok(Link {
            pair,
            tap: Tap::open(pair.host)?,
            pod_end: PodEnd {
                sender: None,
                address: pair.pod_address,
                socket: net::inside(namespace, || FrameSender::open(pair.pod, NOT_OF_SANDBOX))??,
                probes,
                doubts: UndecidedConnections::default(),
            },
        })
    });
    links.collect()
}

//! The gap between the kubelet's probes, in which a sandbox is paused. A probe that is under way at
//! that moment gets no answer: neither from the sandbox, which is paused, nor from its keeper,
//! which answers only connections that begin later. The Pod may allow only one failure.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use torpor_core::ids::SandboxId;
use torpor_link::net;
use torpor_link::owner::Kubelet;
use torpor_records::PodRecord;

use crate::idle::packets;
use crate::node::Node;

/// Time without a packet after which a probe is over. Within a probe there are breaks of 40 ms,
/// where one end delays its acknowledgements and the other waits for them (measured with gRPC;
/// TCP_DELACK_MIN of Linux).
const SILENCE: Duration = Duration::from_millis(60);
/// Longest wait for a gap: a container may be probed without one.
pub(super) const LIMIT: Duration = Duration::from_secs(1);
/// Time in which the keeper answers a probe that began after the pause, with a reserve for a busy
/// machine. The kubelet gives a probe a second or more.
const ANSWERED: Duration = Duration::from_millis(200);
/// Time between two looks for the kubelet's connections.
const LOOK: Duration = Duration::from_millis(10);

/// The kubelet's probes of a pod over its network.
pub(super) struct Probes<'a> {
    node: &'a Node,
    sandbox: &'a SandboxId,
    pod: Vec<IpAddr>,
    ports: Vec<u16>,
    kubelet: Kubelet,
    began: Instant,
}

impl<'a> Probes<'a> {
    /// The caller holds the lock.
    pub(super) fn of(node: &'a Node, record: &'a PodRecord) -> Self {
        let probes = node.records.probes(&record.sandbox).unwrap_or_default();
        Self {
            node,
            sandbox: &record.sandbox,
            pod: net::ips(&record.addresses).unwrap_or_default(),
            ports: probes.ports.into_iter().collect(),
            kubelet: Kubelet::at(node.config.kubelet_port),
            began: Instant::now(),
        }
    }

    /// Reports whether the time to wait for a gap is over.
    pub(super) fn is_over(&self) -> bool {
        self.began.elapsed() >= LIMIT
    }

    /// Waits for a gap. Without information about packets and connections there is no wait.
    pub(super) fn wait_for_gap(&mut self) {
        while !self.ports.is_empty() {
            let last = packets(self.node, self.sandbox).ok();
            let last = last.and_then(|ages| ages.youngest_probe(&self.ports));
            let left = left(last, self.is_connected(), self.began.elapsed());
            let Some(left) = left else { return };
            std::thread::sleep(left);
        }
    }

    /// Reports whether a probe was under way when the sandbox was paused: its connection lasts.
    pub(super) fn has_cut_one(&mut self) -> bool {
        let paused = Instant::now();
        while !self.ports.is_empty() && self.is_connected() {
            if paused.elapsed() >= ANSWERED {
                return true;
            }
            std::thread::sleep(LOOK);
        }
        false
    }

    fn is_connected(&mut self) -> bool {
        let connected = self.kubelet.is_connected_to(&self.pod, &self.ports);
        connected.unwrap_or(false)
    }
}

/// Returns how long to wait before the next look; none if the wait is over. `last`: the age of the
/// last packet of a probe.
fn left(last: Option<Duration>, is_connected: bool, waited: Duration) -> Option<Duration> {
    let silent = last.map_or(Duration::ZERO, |last| SILENCE.saturating_sub(last));
    let left = match is_connected {
        true => silent.max(LOOK),
        false => silent,
    };
    (!left.is_zero() && waited < LIMIT).then_some(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_waits_for_a_probe_that_is_under_way_with_a_limit() {
        let of = Duration::from_millis;
        let left = |last: Option<u64>, connected, waited| {
            left(last.map(of), connected, of(waited)).map(|left| left.as_millis())
        };
        assert_eq!(left(Some(0), false, 0), Some(60));
        assert_eq!(left(Some(45), false, 500), Some(15));
        assert_eq!(left(Some(60), false, 0), None);
        assert_eq!(left(None, false, 0), None);
        // A program that takes its time sends no packets meanwhile.
        assert_eq!(left(Some(700), true, 0), Some(10));
        assert_eq!(left(Some(0), true, 0), Some(60));
        assert_eq!(left(Some(700), true, 1000), None);
        assert_eq!(left(Some(0), false, 1000), None);
    }
}

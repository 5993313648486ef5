//! A wait for a gap between the kubelet's probes, in which a sandbox is paused. A probe that
//! is under way would get no answer, and the Pod may allow only one failure.

use std::time::{Duration, Instant};

use torpor_link::traffic::Ages;
use torpor_records::{PodLock, PodRecord};
use torpor_runsc::keeper::{Rules, Verb};

use crate::reconcile::node::{CALL_LIMIT, Node};

/// Time without a packet after which a probe is over. Within a probe there are breaks of 40 ms,
/// where one end delays its acknowledgements and the other waits for them (measured with gRPC;
/// TCP_DELACK_MIN of Linux).
const SILENCE: Duration = Duration::from_millis(60);
/// Longest wait: a container may be probed without a gap.
const LIMIT: Duration = Duration::from_secs(1);

/// Waits for a gap. Without information about the packets there is no wait.
pub(crate) fn wait(node: &Node, record: &PodRecord, lock: &PodLock, rules: &Rules) {
    let ports: Vec<u16> = rules
        .probes
        .iter()
        .chain(&rules.tls_probes)
        .copied()
        .collect();
    let began = Instant::now();
    let left = || {
        let last = last_probe(node, record, lock, &ports)?;
        left_of_silence(last, began.elapsed())
    };
    while !ports.is_empty()
        && let Some(left) = left()
    {
        std::thread::sleep(left);
    }
}

/// Returns the time since the last packet of a probe.
fn last_probe(node: &Node, record: &PodRecord, lock: &PodLock, ports: &[u16]) -> Option<Duration> {
    let asked = node.ask_keeper(&record.sandbox, lock, Verb::Traffic.into(), CALL_LIMIT);
    let ages: Ages = serde_json::from_value(asked.ok()?.detail).ok()?;
    ages.youngest_probe(ports)
}

/// Returns how long to wait before the next check; none if the wait is over.
fn left_of_silence(last: Duration, waited: Duration) -> Option<Duration> {
    let left = SILENCE.saturating_sub(last);
    (!left.is_zero() && waited < LIMIT).then_some(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_that_is_under_way_is_waited_for_and_not_for_ever() {
        let left = |last, waited| {
            let of = Duration::from_millis;
            left_of_silence(of(last), of(waited)).map(|left| left.as_millis())
        };
        assert_eq!(left(0, 0), Some(60));
        assert_eq!(left(45, 500), Some(15));
        assert_eq!(left(60, 0), None);
        assert_eq!(left(5000, 0), None);
        assert_eq!(left(0, 1000), None);
    }
}

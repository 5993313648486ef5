//! A moment between the kubelet's probes, in which a sandbox is put to sleep: a probe that is under way would wait for its answer in vain, and
//! one failure may be all that the Pod allows.

use std::time::{Duration, Instant};

use torpor_link::traffic::Ages;
use torpor_records::{PodLock, PodRecord};
use torpor_runsc::keeper::{Rules, Verb};

use crate::reconcile::node::{CALL_LIMIT, Node};

/// A probe that has said nothing for so long is over. Within one there are breaks of 40 ms, where one end delays its acknowledgements and the other
/// waits for them (seen with gRPC; Linux' TCP_DELACK_MIN).
const SILENCE: Duration = Duration::from_millis(60);
/// Probes of a container that is probed without end are not waited for.
const LIMIT: Duration = Duration::from_secs(1);

/// Waits for it. What cannot be found out is not waited for.
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

/// How long ago a packet of a probe was seen.
fn last_probe(node: &Node, record: &PodRecord, lock: &PodLock, ports: &[u16]) -> Option<Duration> {
    let asked = node.ask_keeper(&record.sandbox, lock, Verb::Traffic, None, None, CALL_LIMIT);
    let ages: Ages = serde_json::from_value(asked.ok()?.detail).ok()?;
    ages.youngest_probe(ports)
}

/// How long to wait before looking again.
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

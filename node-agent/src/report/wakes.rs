//! Causes of the agent's wakes, and failures of wakes by other processes.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use torpor_api::annotations::{NEXT_WAKEUP, WAKE_AT, parse_time};
use torpor_core::ledger::{LedgerState, Memory};
use torpor_core::steps::{Outcome, Step, StepKind};
use torpor_records::WakeCause;

/// Returns the cause of a wake by the agent at `now`. The cause is the clock if the time in
/// annotation [`NEXT_WAKEUP`] has come since the sandbox fell asleep. A user's request in
/// annotation [`WAKE_AT`] (`kubectl torpor wake`) takes precedence, although it is a time, too.
pub(crate) fn cause(
    pod: Option<&Pod>,
    asleep_since: Option<Timestamp>,
    now: Timestamp,
) -> WakeCause {
    let has_come = |key: &'static str| {
        let written = pod.and_then(|pod| pod.annotations().get(key));
        let at = written.and_then(|written| parse_time(key, written).ok());
        let since = asleep_since.zip(at);
        since.is_some_and(|(since, at)| since < at && at <= now)
    };
    match has_come(NEXT_WAKEUP) && !has_come(WAKE_AT) {
        true => WakeCause::Clock,
        false => WakeCause::Asked,
    }
}

/// The part of a Pod's ledger that has been searched for failed wakes. The ledger is the only place
/// where a keeper, an exec or a forwarded connection records the failure of its wake.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct FailedWakes {
    /// Sequence number up to which the ledger was searched; None before the first search. Failures
    /// before the agent's start are not counted.
    searched: Option<u64>,
}

impl FailedWakes {
    /// Returns the reason for which a wake by another process has failed, once per failure. If
    /// several wakes have failed since the last search, only the last one is returned.
    pub(crate) fn look<'a>(&mut self, ledger: &'a LedgerState) -> Option<&'a str> {
        let searched = self.searched.replace(ledger.seq);
        match &ledger.memory {
            Memory::WakeFailed { reason, .. } if searched.is_some_and(|seq| seq < ledger.seq) => {
                Some(reason.as_str())
            }
            _ => None,
        }
    }

    /// Skips the ledger entries of a failed wake by this agent, which is counted as a failed step.
    /// Such a wake has two entries: its begin and its failure.
    pub(crate) fn note(&mut self, step: &Step, outcome: &Outcome) {
        if step.action.kind() == StepKind::Wake && matches!(outcome, Outcome::Failed { .. }) {
            self.searched = Some(step.fence.ledger_seq.saturating_add(2));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use torpor_core::ids::ImageId;
    use torpor_core::steps::Action;

    use super::*;
    use crate::reconcile::steps_for_tests::step;

    fn image() -> ImageId {
        ImageId::parse("pod-a.1").expect("an image's name")
    }

    fn failed_at(seq: u64) -> LedgerState {
        LedgerState {
            seq,
            memory: Memory::WakeFailed {
                image: image(),
                reason: "RestoreFailed".to_owned(),
            },
            ..LedgerState::default()
        }
    }

    #[test]
    fn the_cause_of_a_wake_is_the_clock_unless_the_api_requested_the_wake_too() {
        let time = |text: &str| text.parse::<Timestamp>().expect("a time");
        let (since, now) = (time("2026-06-06T10:00:00Z"), time("2026-06-06T12:00:00Z"));
        let (before, within, later) = (
            "2026-06-06T09:00:00Z",
            "2026-06-06T11:00:00Z",
            "2026-06-06T13:00:00Z",
        );
        for (set, asked, expected) in [
            (within, before, WakeCause::Clock),
            (within, "soon", WakeCause::Clock),
            (within, within, WakeCause::Asked),
            (before, before, WakeCause::Asked),
            (later, before, WakeCause::Asked),
            ("soon", "soon", WakeCause::Asked),
        ] {
            let annotations = json!({ NEXT_WAKEUP: set, WAKE_AT: asked });
            let pod = json!({ "metadata": { "name": "p", "annotations": annotations } });
            let pod: Pod = serde_json::from_value(pod).expect("a Pod");
            assert_eq!(
                cause(Some(&pod), Some(since), now),
                expected,
                "{set} {asked}"
            );
            assert_eq!(cause(Some(&pod), None, now), WakeCause::Asked);
        }
        assert_eq!(cause(None, Some(since), now), WakeCause::Asked);
    }

    #[test]
    fn a_failed_wake_by_another_process_is_reported_once() {
        let mut wakes = FailedWakes::default();
        assert_eq!(wakes.look(&failed_at(5)), None, "before the agent began");
        assert_eq!(wakes.look(&failed_at(5)), None);
        assert_eq!(wakes.look(&failed_at(7)), Some("RestoreFailed"));
        assert_eq!(wakes.look(&failed_at(7)), None);
        let awake = LedgerState {
            seq: 9,
            ..LedgerState::default()
        };
        assert_eq!(wakes.look(&awake), None);
        assert_eq!(wakes.look(&failed_at(14)), Some("RestoreFailed"));
    }

    #[test]
    fn a_failed_wake_of_this_agent_is_a_failed_step_and_not_reported_again() {
        let mut wakes = FailedWakes::default();
        assert_eq!(wakes.look(&LedgerState::default()), None);
        let failed = Outcome::Failed {
            reason: "ImageCorrupt".to_owned(),
            message: String::new(),
        };
        wakes.note(&step(4, Action::Wake { image: image() }), &failed);
        assert_eq!(wakes.look(&failed_at(6)), None);
        // A later wake by another process.
        assert_eq!(wakes.look(&failed_at(8)), Some("RestoreFailed"));
        // A step that did not fail, or that was no wake, has no entry of a failed wake.
        wakes.note(&step(4, Action::Wake { image: image() }), &Outcome::Done);
        wakes.note(&step(4, Action::Pause), &failed);
        assert_eq!(wakes, FailedWakes { searched: Some(8) });
    }
}

//! One observation of a Pod on this node. Decides nothing.

use torpor_core::ids::{ImageId, PodUid};
use torpor_core::state::{Doze, Failures, ImageObserved, Observed, Record, Restore};
pub(crate) use torpor_core::steps::words;
use torpor_messages::service;
use torpor_records::{PodRecord, RestoreReport, SandboxState};

use crate::policy::swap::has_swap;
use crate::reconcile::node::Node;

/// Returns what the node has of the Pod `pod`, whose current sandbox is `record`. `seen`: the
/// report of its shim.
pub(crate) fn observe(
    node: &Node,
    pod: &PodUid,
    record: Option<&PodRecord>,
    failures: &Failures,
    seen: &service::Observed,
) -> Observed {
    let state = record.and_then(|record| node.records.state(&record.sandbox).ok());
    let hibernated = match &state {
        Some(SandboxState::Hibernated { image, .. }) => Some(Record {
            image: image.clone(),
        }),
        _ => None,
    };
    let doze = record.and_then(|record| node.records.doze(&record.sandbox).ok().flatten());
    Observed {
        sandbox: record.map(|record| record.sandbox.clone()),
        live: seen.basis.live,
        containers: seen.started.clone(),
        // `crate::reconcile::driver` adds it.
        added: None,
        record: hibernated,
        doze: doze.map(|note| Doze {
            reclaimed: note.reclaimed,
        }),
        can_doze: may_doze(node, record, doze.is_some()),
        ledger: node
            .store
            .ledger(pod)
            .and_then(|ledger| ledger.read())
            .map_err(|error| words(&error)),
        images: images(node, pod),
        capable: capable(node),
        dozes_unsaved: false,
        restore: restore(state.as_ref(), node.records.report(pod)),
        // `crate::policy::idle` adds it.
        idle_since: None,
        idle_known: Ok(()),
        // `crate::reconcile::driver` adds both.
        save_turn: false,
        held_back: false,
        // The records do not count them.
        sessions: u32::from(seen.basis.in_session),
        awake_since: timestamp(record.and_then(|record| node.records.last_call(&record.sandbox))),
        woke_at: timestamp(record.and_then(|record| node.records.woke_at(&record.sandbox))),
        left_by_exec: record
            .and_then(|record| node.records.left(&record.sandbox).ok())
            .unwrap_or_default(),
        not_watched: record.and_then(|record| node.records.not_watched(&record.sandbox)),
        asleep_since: timestamp(record.and_then(|r| node.records.asleep_since(&r.sandbox))),
        bound: record.and_then(|record| node.records.bound(&record.sandbox).ok().flatten()),
        failures: failures.clone(),
        busy: seen.busy,
    }
}

/// Checks that the sandbox may doze. A sandbox that dozes has its swap already. `Err`: the reason.
fn may_doze(node: &Node, record: Option<&PodRecord>, dozes: bool) -> Result<(), String> {
    let Some(record) = record.filter(|_| !dozes) else {
        return has_swap();
    };
    node.swap.may_doze(|| node.working_set(record))?;
    node.may_swap(record)
}

fn timestamp(time: Option<std::time::SystemTime>) -> Option<jiff::Timestamp> {
    jiff::Timestamp::try_from(time?).ok()
}

fn images(node: &Node, pod: &PodUid) -> Vec<ImageObserved> {
    // Images that cannot be listed now count as missing, like those on a disk that is not
    // mounted yet: none of them is given up.
    let listed = node.store.list_pod(pod).unwrap_or_else(|error| {
        tracing::warn!(%pod, error = words(&error), "cannot list the Pod's images");
        Vec::new()
    });
    if listed.is_empty() {
        return Vec::new();
    }
    let restoring = node.being_restored(pod);
    listed
        .into_iter()
        .map(|image| ImageObserved {
            state: image.state,
            consumed_by: image
                .consumed_by
                .filter(|by| has_gone_on(node, by, &image.id)),
            being_restored: restoring.contains(&image.id),
            id: image.id,
        })
        .collect()
}

/// Returns whether the Pod that took the image has run since. Until then, by the Pod's ledger, the
/// image is still the sandbox's memory: the restore may fail, and another Pod may continue from it.
fn has_gone_on(node: &Node, by: &PodUid, image: &ImageId) -> bool {
    let ledger = node.store.ledger(by).and_then(|ledger| ledger.read());
    !ledger.is_ok_and(|state| state.memory.image() == Some(image))
}

/// Checks that this node's runsc can hibernate. `Err`: the reason.
fn capable(node: &Node) -> Result<(), String> {
    match &node.ability {
        Ok(ability) if ability.capabilities.hibernate && ability.capabilities.restore => Ok(()),
        Ok(_) => Err("this node's runsc cannot save a sandbox and resume it".to_owned()),
        Err(why) => Err(format!("the agent cannot probe this node's runsc: {why}")),
    }
}

/// Returns the state of the Pod's restore, by the sandbox's state and the shim's report.
fn restore(
    state: Option<&SandboxState>,
    report: Result<Option<RestoreReport>, torpor_records::Error>,
) -> Restore {
    let restoring = match state {
        Some(SandboxState::Restoring { image, .. }) => Some(image),
        _ => None,
    };
    match (report, restoring) {
        // One container was refused, and the kubelet tries it again. Until then the refusal counts.
        (
            Ok(Some(RestoreReport::Failed {
                image,
                reason,
                message,
            })),
            restoring,
        ) if restoring.is_none_or(|restoring| *restoring == image) => {
            Restore::Failed { reason, message }
        }
        (_, Some(_)) => Restore::InProgress,
        (Ok(Some(RestoreReport::Restored { image, rolled_back })), None) => {
            Restore::Done { image, rolled_back }
        }
        (Ok(Some(RestoreReport::ColdStarted { message, .. })), None) => {
            Restore::ColdStarted { message }
        }
        (Ok(_), None) => Restore::NotAsked,
        (Err(error), None) => Restore::Failed {
            reason: "ReportUnreadable".to_owned(),
            message: words(&error),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(number: u32) -> ImageId {
        ImageId::parse(&format!("pod-a.{number}")).expect("an image's name")
    }

    fn failed(number: u32) -> RestoreReport {
        RestoreReport::Failed {
            image: image(number),
            reason: "SpecMismatch".to_owned(),
            message: "container a has another spec".to_owned(),
        }
    }

    fn restoring() -> SandboxState {
        SandboxState::Restoring {
            image: image(1),
            started: Vec::new(),
        }
    }

    #[test]
    fn a_refused_restore_is_reported_while_the_kubelet_tries_again() {
        let refused = restore(Some(&restoring()), Ok(Some(failed(1))));
        assert!(matches!(refused, Restore::Failed { reason, .. } if reason == "SpecMismatch"));
        let gone = restore(None, Ok(Some(failed(1))));
        assert!(matches!(gone, Restore::Failed { .. }));
    }

    #[test]
    fn a_report_on_another_image_does_not_count_during_a_restore() {
        for report in [
            None,
            Some(failed(2)),
            Some(RestoreReport::Restored {
                image: image(2),
                rolled_back: None,
            }),
        ] {
            assert_eq!(restore(Some(&restoring()), Ok(report)), Restore::InProgress);
        }
        assert_eq!(restore(None, Ok(None)), Restore::NotAsked);
    }
}

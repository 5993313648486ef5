//! One look at a Pod on this node. Decides nothing.

use std::collections::BTreeSet;

use torpor_core::ids::{ContainerName, ImageId, PodUid};
use torpor_core::state::{Doze, Failures, ImageObserved, Live, Observed, Record, Restore};
use torpor_records::PauseMark;
use torpor_records::Role;
use torpor_records::{PodRecord, RestoreReport, SandboxState, Session};
use torpor_runsc::control;
use torpor_runsc::pause;

use crate::policy::swap::has_swap;
use crate::reconcile::node::{CALL_LIMIT, Node};

/// What is on the node of the Pod `pod`, whose current sandbox is `record`. The caller holds the sandbox' lock, or says
/// that somebody else does (`busy`).
pub(crate) fn observe(
    node: &Node,
    pod: &PodUid,
    record: Option<&PodRecord>,
    failures: &Failures,
    busy: bool,
) -> Observed {
    let state = record.and_then(|record| node.records.state(&record.sandbox).ok());
    let hibernated = match &state {
        Some(SandboxState::Hibernated { image }) => Some(Record {
            image: image.clone(),
        }),
        _ => None,
    };
    let live = record.map_or(Live::None, |record| live(node, record, busy));
    let doze = record.and_then(|record| node.records.doze(&record.sandbox).ok().flatten());
    let whole = record.filter(|_| live == Live::Running || live == Live::Paused && doze.is_none());
    Observed {
        sandbox: record.map(|record| record.sandbox.clone()),
        live,
        containers: whole
            .map(|record| started(node, record))
            .unwrap_or_default(),
        // Whoever has the Pod knows: see `crate::reconcile::driver`.
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
        // Whoever holds the lock finds it out: see `crate::policy::idle`.
        idle_since: None,
        idle_known: Ok(()),
        // Whoever asks for it knows: see `crate::reconcile::driver`.
        save_turn: false,
        held_back: false,
        sessions: record.map_or(0, |record| sessions(node, record)),
        awake_since: timestamp(record.and_then(|record| node.records.last_call(&record.sandbox))),
        woke_at: timestamp(record.and_then(|record| node.records.woke_at(&record.sandbox))),
        left_by_exec: record
            .and_then(|record| node.records.left(&record.sandbox).ok())
            .unwrap_or_default(),
        not_watched: record.and_then(|record| node.records.not_watched(&record.sandbox)),
        asleep_since: timestamp(record.and_then(|r| node.records.asleep_since(&r.sandbox))),
        failures: failures.clone(),
        busy,
    }
}

/// What dozes has its swap already.
fn may_doze(node: &Node, record: Option<&PodRecord>, dozes: bool) -> Result<(), String> {
    let Some(record) = record.filter(|_| !dozes) else {
        return has_swap();
    };
    node.swap.may_doze(|| node.working_set(record))?;
    node.may_swap(record)
}

/// How many is not told: none or some.
fn sessions(node: &Node, record: &PodRecord) -> u32 {
    let runs = |session| {
        node.records
            .has_sessions(&record.sandbox, session)
            .unwrap_or(false)
    };
    u32::from(runs(Session::Use) || runs(Session::Probe))
}

fn timestamp(time: Option<std::time::SystemTime>) -> Option<jiff::Timestamp> {
    jiff::Timestamp::try_from(time?).ok()
}

/// An error with all its causes.
pub(crate) fn words(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

fn live(node: &Node, record: &PodRecord, busy: bool) -> Live {
    let sandbox = &record.sandbox;
    // It stands still, and whoever connects lets its processes go on.
    if node.runsc.is_halted(sandbox) {
        return Live::Paused;
    }
    let mut control = match node.runsc.connect(sandbox) {
        Ok(control) => control,
        Err(control::Error::NotRunning { .. }) => return Live::None,
        Err(_) => return Live::Unknown,
    };
    match control.container_state(sandbox.as_str(), CALL_LIMIT) {
        Ok(control::ContainerState::Running) => {}
        // Created and not started, or ended and about to be deleted: nothing that could be saved.
        Ok(_) => return Live::None,
        Err(_) => return Live::Unknown,
    }
    let paused = if busy {
        noted(node.records.pause_mark(sandbox))
    } else {
        pause::is_paused(&node.records, &mut control, sandbox, CALL_LIMIT).ok()
    };
    match paused {
        Some(true) => Live::Paused,
        Some(false) => Live::Running,
        None => Live::Unknown,
    }
}

/// The containers that run in the sandbox, or have run: one that was created and not started is not part of an image yet.
fn started(node: &Node, record: &PodRecord) -> BTreeSet<ContainerName> {
    let sandbox = &record.sandbox;
    let Ok(mut control) = node.runsc.connect(sandbox) else {
        return BTreeSet::new();
    };
    let recorded = node
        .records
        .containers_of(&record.sandbox)
        .unwrap_or_default();
    let mut has_started = |id: &str| match control.container_state(id, CALL_LIMIT) {
        Ok(control::ContainerState::Running | control::ContainerState::Stopped) => true,
        Ok(control::ContainerState::Creating) | Err(_) => false,
    };
    recorded
        .into_iter()
        .filter(|container| container.role == Role::Container && has_started(container.id.as_str()))
        .filter_map(|container| ContainerName::new(container.name).ok())
        .collect()
}

/// Whether the sandbox is paused, as far as its note says. One who does not hold the lock settles nothing: the pause or
/// resume that was begun is being done at this moment, and what is found out of it is wrong by the time that it is written.
fn noted(mark: Result<Option<PauseMark>, torpor_records::Error>) -> Option<bool> {
    match mark {
        Ok(None) => Some(false),
        Ok(Some(PauseMark::Paused)) => Some(true),
        Ok(Some(PauseMark::Changing)) | Err(_) => None,
    }
}

fn images(node: &Node, pod: &PodUid) -> Vec<ImageObserved> {
    // What cannot be listed now is missing, as what lies on a disk that is not mounted yet: nothing of it is given up.
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

/// Whether the Pod that took the image has run from it. As long as it has not, by its ledger, the image is still the sandbox' memory: the
/// restore may fail, and another Pod go on from it.
fn has_gone_on(node: &Node, by: &PodUid, image: &ImageId) -> bool {
    let ledger = node.store.ledger(by).and_then(|ledger| ledger.read());
    !ledger.is_ok_and(|state| state.memory.image() == Some(image))
}

fn capable(node: &Node) -> Result<(), String> {
    match &node.ability {
        Ok(ability) if ability.capabilities.hibernate && ability.capabilities.restore => Ok(()),
        Ok(_) => Err("this node's runsc cannot save a sandbox and resume it".to_owned()),
        Err(why) => Err(format!("the agent cannot probe this node's runsc: {why}")),
    }
}

/// What came of an image that the Pod was to continue from, by the pod's state and torpor-oci's report.
fn restore(
    state: Option<&SandboxState>,
    report: Result<Option<RestoreReport>, torpor_records::Error>,
) -> Restore {
    let restoring = match state {
        Some(SandboxState::Restoring { image, .. }) => Some(image),
        _ => None,
    };
    match (report, restoring) {
        // One container was refused, and the kubelet tries it again: meanwhile that is what there is to say.
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
    fn a_pause_that_somebody_else_is_at_is_not_settled() {
        assert_eq!(noted(Ok(None)), Some(false));
        assert_eq!(noted(Ok(Some(PauseMark::Paused))), Some(true));
        assert_eq!(noted(Ok(Some(PauseMark::Changing))), None);
    }

    #[test]
    fn a_refusal_is_told_while_the_kubelet_tries_again() {
        let told = restore(Some(&restoring()), Ok(Some(failed(1))));
        assert!(matches!(told, Restore::Failed { reason, .. } if reason == "SpecMismatch"));
        let gone = restore(None, Ok(Some(failed(1))));
        assert!(matches!(gone, Restore::Failed { .. }));
    }

    #[test]
    fn what_is_said_of_another_image_does_not_count_while_one_is_being_restored() {
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

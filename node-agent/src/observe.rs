//! One look at a Pod on this node. Decides nothing.

use torpor_core::ids::PodUid;
use torpor_core::state::{Failures, ImageObserved, Live, Observed, Record, Restore};
use torpor_gvisor::control::{self, Control};
use torpor_gvisor::pause;
use torpor_gvisor::record::{PodRecord, RestoreReport, SandboxState};

use crate::node::{CALL_LIMIT, Node};

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
    Observed {
        sandbox: record.map(|record| record.sandbox.clone()),
        live: record.map_or(Live::None, |record| live(node, record)),
        record: hibernated,
        ledger: node
            .store
            .ledger(pod)
            .and_then(|ledger| ledger.read())
            .map_err(|error| words(&error)),
        images: images(node, pod),
        capable: capable(node)
            .and_then(|()| record.map_or(Ok(()), |record| no_terminals(node, record))),
        restore: restore(node, pod, state.as_ref()),
        sessions: record.map_or(0, |record| sessions(node, record)),
        awake_since: record.and_then(|record| awake_since(node, record)),
        failures: failures.clone(),
        busy,
    }
}

/// How many is not told: none or some.
fn sessions(node: &Node, record: &PodRecord) -> u32 {
    u32::from(node.records.has_sessions(&record.sandbox).unwrap_or(false))
}

/// When somebody other than the agent woke the sandbox.
fn awake_since(node: &Node, record: &PodRecord) -> Option<jiff::Timestamp> {
    jiff::Timestamp::try_from(node.records.last_call(&record.sandbox)?).ok()
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

fn live(node: &Node, record: &PodRecord) -> Live {
    let sandbox = &record.sandbox;
    let mut control = match Control::connect(node.runsc.root(), sandbox.as_str()) {
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
    match pause::is_paused(&node.records, &mut control, sandbox, CALL_LIMIT) {
        Ok(true) => Live::Paused,
        Ok(false) => Live::Running,
        Err(_) => Live::Unknown,
    }
}

fn images(node: &Node, pod: &PodUid) -> Vec<ImageObserved> {
    let listed = node.store.list().unwrap_or_default();
    listed
        .into_iter()
        .filter(|image| image.id.pod() == pod)
        .map(|image| ImageObserved {
            state: image.state,
            consumed_by: image.consumed_by,
            id: image.id,
        })
        .collect()
}

fn capable(node: &Node) -> Result<(), String> {
    match &node.ability {
        Ok(ability) if ability.capabilities.hibernate && ability.capabilities.restore => Ok(()),
        Ok(_) => Err("this node's runsc cannot save a sandbox and let it run on".to_owned()),
        Err(why) => Err(format!("this node's runsc could not be probed: {why}")),
    }
}

/// gVisor gives a sub-container its terminal at its start only (runsc/boot/restore.go has no place for one): a sandbox
/// with one could be saved, and never restored.
fn no_terminals(node: &Node, record: &PodRecord) -> Result<(), String> {
    let containers = node
        .records
        .containers_of(&record.sandbox)
        .unwrap_or_default();
    match containers.iter().find(|container| container.terminal) {
        None => Ok(()),
        Some(container) => Err(format!(
            "container {} has a terminal (tty: true), which gVisor cannot restore; remove tty to keep its memory",
            container.name
        )),
    }
}

fn restore(node: &Node, pod: &PodUid, state: Option<&SandboxState>) -> Restore {
    if let Some(SandboxState::Restoring { .. }) = state {
        return Restore::InProgress;
    }
    match node.records.report(pod) {
        Ok(None) => Restore::NotAsked,
        Ok(Some(RestoreReport::Restored { image })) => Restore::Done { image },
        Ok(Some(RestoreReport::ColdStarted { message, .. })) => Restore::ColdStarted { message },
        Ok(Some(RestoreReport::Failed {
            reason, message, ..
        })) => Restore::Failed { reason, message },
        Err(error) => Restore::Failed {
            reason: "ReportUnreadable".to_owned(),
            message: words(&error),
        },
    }
}

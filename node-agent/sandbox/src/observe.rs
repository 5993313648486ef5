//! The state of a sandbox, for the agent. Decides nothing.

use std::collections::BTreeSet;
use std::time::SystemTime;

use torpor_core::ids::{ContainerName, SandboxId};
use torpor_core::state::Live;
use torpor_messages::service::{Basis, Observed, Use};
use torpor_records::{ContainerRecord, PauseMark, PodRecord, Role, Session};
use torpor_runsc::control::{self, Control};
use torpor_runsc::held_open::keeper_lives;
use torpor_runsc::{forward, pause};
use torpor_snapshots::Digest;

use crate::node::{CALL_LIMIT, Node};

/// Returns the state of the sandbox. `busy`: another process holds its lock; else the caller holds
/// it. `idle`: also the figures by which the agent decides whether the sandbox is idle.
pub fn observe(node: &Node, record: &PodRecord, busy: bool, idle: bool) -> Observed {
    let sandbox = &record.sandbox;
    let containers = node.records.containers_of(sandbox).unwrap_or_default();
    let (live, control) = live(node, record, busy);
    let basis = basis_of(node, sandbox, &containers, live);
    let is_whole = live == Live::Running || live == Live::Paused && !basis.dozes;
    let started = match is_whole {
        true => started(node, sandbox, &containers, control),
        false => BTreeSet::new(),
    };
    let idle = idle && !busy && live == Live::Running;
    Observed {
        busy,
        basis,
        started,
        kept: kept(node, &containers),
        used: idle.then(|| used(node, sandbox).map_err(|error| format!("{error:#}"))),
    }
}

/// Returns the part of the state that a plan depends on. The caller holds the lock.
pub(crate) fn basis(node: &Node, record: &PodRecord) -> Basis {
    let containers = node.records.containers_of(&record.sandbox);
    let (live, _) = live(node, record, false);
    basis_of(node, &record.sandbox, &containers.unwrap_or_default(), live)
}

fn basis_of(node: &Node, sandbox: &SandboxId, containers: &[ContainerRecord], live: Live) -> Basis {
    let ids: Vec<&str> = containers.iter().map(|one| one.id.as_str()).collect();
    Basis {
        live,
        dozes: node.records.doze(sandbox).ok().flatten().is_some(),
        in_session: in_session(node, sandbox),
        containers: Digest::of(ids.concat().as_bytes()),
    }
}

/// Returns the containers whose keepers live.
fn kept(node: &Node, containers: &[ContainerRecord]) -> BTreeSet<ContainerName> {
    names(containers, |one| keeper_lives(&node.records, one))
}

/// Returns the names of the wanted containers, without the pause container.
fn names(
    containers: &[ContainerRecord],
    mut wanted: impl FnMut(&ContainerRecord) -> bool,
) -> BTreeSet<ContainerName> {
    let wanted = containers
        .iter()
        .filter(|one| one.role == Role::Container && wanted(one));
    wanted
        .filter_map(|one| ContainerName::new(one.name.clone()).ok())
        .collect()
}

/// Reports whether a caller has used the sandbox since that time, or still does, other than by an
/// exec that runs. The caller holds the lock.
pub(crate) fn is_used_since(node: &Node, sandbox: &SandboxId, time: SystemTime) -> bool {
    let last_use = node.records.last_use(sandbox);
    last_use.is_some_and(|at| at > time)
        || forward::any_open(&node.records, sandbox).unwrap_or(false)
}

fn in_session(node: &Node, sandbox: &SandboxId) -> bool {
    let runs = |session| {
        let has = node.records.has_sessions(sandbox, session);
        has.unwrap_or(false)
    };
    runs(Session::Use) || runs(Session::Probe)
}

fn used(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Use> {
    let mut control = node.runsc.connect(sandbox)?;
    let cpu = control.processor_time(sandbox.as_str(), CALL_LIMIT)?;
    let works = node.records.has_sessions(sandbox, Session::Use)?;
    let forwards = forward::any_open(&node.records, sandbox)?;
    Ok(Use {
        cpu,
        in_use: works || forwards,
    })
}

/// Returns whether the sandbox lives, and the connection to it, if one was needed.
fn live(node: &Node, record: &PodRecord, busy: bool) -> (Live, Option<Control>) {
    let sandbox = &record.sandbox;
    // The dozing sandbox's processes are stopped. A connection would continue them.
    if node.runsc.is_stopped_by_signal(sandbox) {
        return (Live::Paused, None);
    }
    let mut control = match node.runsc.connect(sandbox) {
        Ok(control) => control,
        Err(control::Error::NotRunning { .. }) => return (Live::None, None),
        Err(_) => return (Live::Unknown, None),
    };
    let live = match control.container_state(sandbox.as_str(), CALL_LIMIT) {
        Ok(control::ContainerState::Running) => {
            match is_paused(node, &mut control, sandbox, busy) {
                Some(true) => Live::Paused,
                Some(false) => Live::Running,
                None => Live::Unknown,
            }
        }
        // The sandbox was created and not started, or it has ended and is about to be
        // deleted: there is nothing to save.
        Ok(_) => Live::None,
        Err(_) => Live::Unknown,
    };
    (live, Some(control))
}

/// Returns whether the sandbox is paused; none if that is not known, or changes at the moment.
fn is_paused(node: &Node, control: &mut Control, sandbox: &SandboxId, busy: bool) -> Option<bool> {
    match busy {
        true => paused_by_mark(node.records.pause_mark(sandbox)),
        false => pause::is_paused(&node.records, control, sandbox, CALL_LIMIT).ok(),
    }
}

/// Returns whether the sandbox is paused by its mark. None: a pause or a resume is under way.
///
/// Without the lock the state itself is not found out: the process that holds the lock is changing
/// it, so a result would be wrong by the time it is used.
fn paused_by_mark(mark: Result<Option<PauseMark>, torpor_records::Error>) -> Option<bool> {
    match mark {
        Ok(None) => Some(false),
        Ok(Some(PauseMark::Paused)) => Some(true),
        Ok(Some(PauseMark::Changing)) | Err(_) => None,
    }
}

/// Returns the containers that run or have run in the sandbox. A container that was created and not
/// started is not part of an image yet. `control`: opened if there is none.
fn started(
    node: &Node,
    sandbox: &SandboxId,
    containers: &[ContainerRecord],
    control: Option<Control>,
) -> BTreeSet<ContainerName> {
    let Some(mut control) = control.or_else(|| node.runsc.connect(sandbox).ok()) else {
        return BTreeSet::new();
    };
    names(containers, |container| {
        match control.container_state(container.id.as_str(), CALL_LIMIT) {
            Ok(control::ContainerState::Running | control::ContainerState::Stopped) => true,
            Ok(control::ContainerState::Creating) | Err(_) => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_under_way_is_neither_running_nor_paused() {
        let paused = |mark| paused_by_mark(Ok(mark));
        assert_eq!(paused(None), Some(false));
        assert_eq!(paused(Some(PauseMark::Paused)), Some(true));
        assert_eq!(paused(Some(PauseMark::Changing)), None);
    }
}

//! Kills, and whether a kill may cost a sandbox its memory.

use std::time::{Duration, Instant};

use anyhow::Context;
use torpor_core::ids::ContainerId;
use torpor_core::ledger::{LedgerState, Memory};
use torpor_records::PodRecord;

use super::commands;
use super::schedule::Victim;
use crate::agent::Agent;
use crate::machine::{self, Process};
use crate::node::{self, Node, is_in_image};

/// Time for a killed process to end: a Pod without requests gets a five-hundredth of a busy
/// processor.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Result of a kill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Struck {
    /// The client may find a program that was started anew.
    pub costs_memory: bool,
    /// Names of Pods, of this and of other sandboxes, whose memory may be lost too.
    ///
    /// containerd died while it started their containers, which were awake by then or about to be.
    /// It ends such a container when it starts (docs/guarantees.md, Limits).
    pub others: Vec<String>,
}

/// Kills the victim of a Pod, or of the node while there is no Pod.
///
/// Returns `None` if the victim does not run at this moment. `wanted`: the sandbox was asked for
/// since it fell asleep, so that it may be awake.
pub fn strike(
    node: &Node,
    uid: Option<&str>,
    victim: Victim,
    wanted: bool,
) -> anyhow::Result<Option<Struck>> {
    let found = match (victim, uid) {
        (Victim::Agent, _) => Agent::find().map(|agent| agent.process),
        (Victim::Containerd, _) => node::containerd(),
        (_, Some(uid)) => of_pod(node, uid, victim),
        (_, None) => return Ok(None),
    };
    let Ok(process) = found else { return Ok(None) };
    let read = || uid.map(|uid| node.ledger(uid)).transpose();
    let before = read()?;
    let starting = match victim {
        Victim::Containerd => starting(node)?,
        _ => Vec::new(),
    };
    if process.kill().is_err() {
        // The process ended by itself meanwhile.
        return Ok(None);
    }
    let ended = has_ended(&process);
    let after = read()?;
    let others = starting
        .into_iter()
        .filter(|pod| {
            node.ledger(pod.pod_uid.as_str())
                .is_ok_and(|now| !is_in_image(&now.memory))
        })
        .map(|pod| pod.name)
        .collect();
    // A killed start costs memory only if the program may have started.
    let started = victim == Victim::Command
        && commands::of_shim(&process.command).is_some_and(|command| command.verb == "start")
        && after.as_ref().zip(uid).is_some_and(|(after, uid)| {
            commands::may_have_started(node.state_of(uid).ok().as_ref(), after)
        });
    let seen = before.zip(after);
    let slept = ended && seen.is_some_and(|(before, after)| slept_through(&before, &after, wanted));
    Ok(Some(Struck {
        costs_memory: started || costs_memory(victim, slept),
        others,
    }))
}

/// Waits until the killed process has ended; reports whether it has.
///
/// Until then the sandbox can still be woken, and would die awake.
fn has_ended(process: &Process) -> bool {
    let began = Instant::now();
    while process.lives() {
        if began.elapsed() > END_LIMIT {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Returns the Pods with a container that is being started at this moment.
fn starting(node: &Node) -> anyhow::Result<Vec<PodRecord>> {
    let mut pods = node.records.pods()?;
    let starts: Vec<String> = machine::processes()
        .into_iter()
        .filter(|process| process.command.starts_with("torpor-start start "))
        .map(|process| process.command)
        .collect();
    let is_named = |container: &ContainerId| {
        starts
            .iter()
            .any(|start| start.ends_with(container.as_str()))
    };
    pods.retain(|pod| {
        let containers = node.records.containers_of(&pod.sandbox).unwrap_or_default();
        containers.iter().any(|container| is_named(&container.id))
    });
    Ok(pods)
}

/// Reports whether the sandbox slept before and after the kill, and does not run on before its
/// processes have been checked.
///
/// `wanted`: the sandbox was asked for.
fn slept_through(before: &LedgerState, after: &LedgerState, wanted: bool) -> bool {
    let stayed = before.seq == after.seq;
    stayed
        && match &after.memory {
            // A wake checks that all processes below the sandbox exist before the sandbox can be
            // reached.
            Memory::Asleep { .. } | Memory::WakeFailed { .. } => true,
            // The sandbox is paused, and may have been about to run on.
            Memory::Committed { .. } => !wanted,
            Memory::Live | Memory::Saving { .. } | Memory::Waking { .. } => false,
        }
}

/// Reports whether the end of the victim costs the sandbox its memory.
///
/// An awake sandbox ends with a process that it runs on; a sandbox that slept through the kill is
/// restored. A runsc command that does not start a program is repeated: what it restores cannot be
/// reached before the command has ended well.
fn costs_memory(victim: Victim, slept: bool) -> bool {
    match victim {
        // These processes are started again, and the next one completes their work.
        Victim::Agent | Victim::Containerd | Victim::Program | Victim::Runsc | Victim::Command => {
            false
        }
        Victim::Shim | Victim::Sentry | Victim::Gofer => !slept,
    }
}

fn of_pod(node: &Node, uid: &str, victim: Victim) -> anyhow::Result<Process> {
    match victim {
        Victim::Agent | Victim::Containerd => anyhow::bail!("{victim:?} is the node's"),
        Victim::Shim => node.shim(uid),
        Victim::Sentry => node.sentry(uid),
        Victim::Gofer => node.gofer(uid),
        Victim::Program => program(node, uid),
        Victim::Command => commands::find(node, uid, commands::of_shim),
        Victim::Runsc => commands::find(node, uid, commands::of_runsc),
    }
}

/// Finds the command that wakes the sandbox, or that takes the steps of a plan.
fn program(node: &Node, uid: &str) -> anyhow::Result<Process> {
    let sandbox = node.sandbox_of(uid)?.sandbox;
    let verbs = ["wake", "steps"].map(|verb| format!(" {verb} {sandbox}"));
    let found = machine::processes_naming(&verbs).into_iter().next();
    found.context("no command is at work on the sandbox")
}

#[cfg(test)]
mod tests {
    use super::*;
    use torpor_core::ids::ImageId;

    fn image() -> ImageId {
        ImageId::parse("pod-a.1").expect("an image's name")
    }

    #[test]
    fn memory_may_be_lost_only_with_a_sandbox_that_may_have_been_awake() {
        for victim in [
            Victim::Agent,
            Victim::Containerd,
            Victim::Program,
            Victim::Runsc,
            Victim::Command,
        ] {
            assert!(!costs_memory(victim, true) && !costs_memory(victim, false));
        }
        for victim in [Victim::Shim, Victim::Sentry, Victim::Gofer] {
            assert!(!costs_memory(victim, true), "{victim:?}");
            assert!(costs_memory(victim, false), "{victim:?}");
        }
    }

    #[test]
    fn a_sandbox_in_an_image_sleeps_through_a_kill_even_if_it_was_asked_for() {
        let (image, by_itself) = (image(), false);
        let at = |seq, memory: &Memory| LedgerState {
            seq,
            memory: memory.clone(),
            ..LedgerState::default()
        };
        let asleep = Memory::Asleep {
            image: image.clone(),
            by_itself,
        };
        let committed = Memory::Committed {
            image: image.clone(),
        };
        let waking = Memory::Waking { image };
        for (memory, wanted, slept) in [
            (&asleep, false, true),
            (&asleep, true, true),
            (&committed, false, true),
            (&committed, true, false),
            (&waking, false, false),
            (&Memory::Live, false, false),
        ] {
            let before = at(3, memory);
            assert_eq!(slept_through(&before, &before, wanted), slept, "{memory:?}");
            assert!(
                !slept_through(&before, &at(4, memory), wanted),
                "{memory:?}"
            );
        }
    }

    #[test]
    fn memory_is_safe_from_the_commit_until_a_wake_begins() {
        let (image, by_itself) = (image(), false);
        let reason = "RestoreFailed".to_owned();
        for (memory, safe) in [
            (Memory::Live, false),
            (
                Memory::Saving {
                    image: image.clone(),
                },
                false,
            ),
            (
                Memory::Committed {
                    image: image.clone(),
                },
                true,
            ),
            (
                Memory::Asleep {
                    image: image.clone(),
                    by_itself,
                },
                true,
            ),
            (
                Memory::Waking {
                    image: image.clone(),
                },
                false,
            ),
            (Memory::WakeFailed { image, reason }, true),
        ] {
            assert_eq!(is_in_image(&memory), safe, "{memory:?}");
        }
    }
}

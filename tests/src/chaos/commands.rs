//! Commands of short duration, found by their command lines: those that the shim runs for
//! containerd, and runsc or its substitute.

use anyhow::Context;
use torpor_core::ledger::LedgerState;
use torpor_records::SandboxState;

use crate::machine::{self, Process};
use crate::node::{Node, is_in_image};

const VERBS_OF_SHIM: [&str; 3] = ["create", "start", "delete"];
const VERBS_OF_RUNSC: [&str; 4] = ["create", "restore", "delete", torpor_runsc_direct::COMMAND];
/// Beginning of the arguments of each runsc that Torpor runs (`torpor_runsc::command`).
const LOG_OF_RUNSC: &str = "--log=/proc/self/fd/";

/// A command for one container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunningCommand<'a> {
    pub verb: &'a str,
    pub container: &'a str,
    /// The OCI bundle of a container that is created.
    bundle: Option<&'a str>,
}

/// Parses the command line of a command that the shim runs on a container.
pub fn of_shim(command: &str) -> Option<RunningCommand<'_>> {
    let mut words = command.split(' ');
    let (program, first) = (words.next()?, words.next()?);
    let is_command = program.strip_prefix("torpor-") == Some(first);
    let bundle = words.next().filter(|_| first == "create");
    let found = is_command.then(|| RunningCommand::parse(command, &VERBS_OF_SHIM))?;
    found.map(|found| RunningCommand { bundle, ..found })
}

/// Parses the command line of a runsc that Torpor runs, or of the process that begins a sandbox
/// in its place.
///
/// Processes that runsc leaves running (`runsc-sandbox`, `runsc-gofer`) do not match.
pub fn of_runsc(command: &str) -> Option<RunningCommand<'_>> {
    let mut words = command.split(' ');
    let (program, first) = (words.next()?, words.next()?);
    let stays = program.starts_with("runsc-");
    let is_runsc =
        !stays && first.starts_with(LOG_OF_RUNSC) || first == torpor_runsc_direct::COMMAND;
    is_runsc.then(|| RunningCommand::parse(command, &VERBS_OF_RUNSC))?
}

impl<'a> RunningCommand<'a> {
    /// Finds the first of `verbs` among the words; the container is always the last word.
    fn parse(command: &'a str, verbs: &[&str]) -> Option<Self> {
        let words: Vec<&str> = command.split(' ').collect();
        let verb = words.iter().copied().find(|word| verbs.contains(word))?;
        Some(Self {
            verb,
            container: words.last().copied()?,
            bundle: None,
        })
    }

    /// Reports whether the command is for a container of the Pod: a known one, or a new one whose
    /// spec names the Pod.
    fn is_for(&self, known: &[String], uid: &str) -> bool {
        let is_named = |bundle: &str| {
            let spec = std::fs::read_to_string(format!("{bundle}/config.json"));
            spec.is_ok_and(|spec| spec.contains(uid))
        };
        known.iter().any(|id| id == self.container) || self.bundle.is_some_and(is_named)
    }
}

/// Finds the first command of this kind that runs for the Pod.
pub fn find(
    node: &Node,
    uid: &str,
    of: impl Fn(&str) -> Option<RunningCommand<'_>>,
) -> anyhow::Result<Process> {
    let mut known = Vec::new();
    for pod in node.sandboxes_of(uid)? {
        let containers = node.records.containers_of(&pod.sandbox).unwrap_or_default();
        known.extend(containers.into_iter().map(|one| one.id.to_string()));
        known.push(pod.sandbox.to_string());
    }
    let is_for = |process: &Process| of(&process.command).is_some_and(|at| at.is_for(&known, uid));
    let found = machine::processes().into_iter().find(is_for);
    found.context("no such command is at work on the Pod")
}

/// Reports whether a container's start that was killed may have started its program.
///
/// The kubelet sees a failed start, ends the program and starts another. `state` is the sandbox's
/// and `ledger` the Pod's, both after the kill.
pub fn may_have_started(state: Option<&SandboxState>, ledger: &LedgerState) -> bool {
    match state {
        // No program runs before the ledger records the begin of a restore, and none is left after
        // a failed one. A Pod that continues from another Pod's image has no ledger entry before.
        Some(SandboxState::Restoring { .. }) => ledger.seq > 0 && !is_in_image(&ledger.memory),
        Some(SandboxState::Hibernated { .. }) => false,
        Some(SandboxState::Running) | None => true,
    }
}

#[cfg(test)]
mod tests {
    use torpor_core::ids::ImageId;
    use torpor_core::ledger::Memory;

    use super::*;

    #[test]
    fn a_command_is_recognized_by_its_program_and_verb() {
        let command = "torpor-create create /run/b c0ffee";
        let create = RunningCommand {
            verb: "create",
            container: "c0ffee",
            bundle: Some("/run/b"),
        };
        assert_eq!(of_shim(command), Some(create));
        assert_eq!(of_runsc(command), None);
        let runsc = "/opt/torpor/runsc --log=/proc/self/fd/5 --log-format=json --root /run/r delete --force c0ffee";
        let delete = RunningCommand {
            verb: "delete",
            container: "c0ffee",
            bundle: None,
        };
        assert_eq!(of_runsc(runsc), Some(delete));
        assert_eq!(of_shim(runsc), None);
        let begins = RunningCommand {
            verb: "sandbox-process",
            ..delete
        };
        assert_eq!(
            of_runsc("torpor-sandbox sandbox-process c0ffee"),
            Some(begins)
        );
        for other in [
            "torpor-wake-up wake-up c0ffee --cause Exec",
            "/opt/torpor/bin/containerd-shim-torpor-v1 -id c0ffee start",
            "runsc-sandbox --log=/proc/self/fd/5 --root /run/r boot --bundle /run/b c0ffee",
            "runsc-gofer --log=/proc/self/fd/5 --root /run/r gofer --bundle /run/b",
            "/opt/torpor/runsc --log=/proc/self/fd/5 --root /run/r start c0ffee",
            "/bin/rm delete c0ffee",
            "",
        ] {
            assert_eq!(of_shim(other), None, "{other}");
            assert_eq!(of_runsc(other), None, "{other}");
        }
    }

    #[test]
    fn a_command_is_for_a_pod_that_it_or_its_bundle_names() {
        let dir = tempfile::tempdir().expect("a directory");
        let spec = r#"{"annotations":{"io.kubernetes.cri.sandbox-uid":"pod-a"}}"#;
        std::fs::write(dir.path().join("config.json"), spec).expect("written");
        let bundle = dir.path().to_str().expect("words");
        let command = format!("torpor-create create {bundle} c0ffee");
        let command = of_shim(&command).expect("at work");
        assert!(command.is_for(&[], "pod-a"));
        assert!(!command.is_for(&["beef".to_owned()], "pod-b"));
        assert!(command.is_for(&["c0ffee".to_owned()], "pod-b"));
    }

    #[test]
    fn a_start_that_was_killed_costs_memory_only_where_a_program_may_run() {
        let image = || ImageId::parse("pod-a.1").expect("an image's name");
        let restoring = SandboxState::Restoring {
            image: image(),
            started: Vec::new(),
        };
        let hibernated = SandboxState::Hibernated {
            image: image(),
            unstarted: None,
        };
        let at = |seq, memory| LedgerState {
            seq,
            memory,
            ..LedgerState::default()
        };
        let failed = Memory::WakeFailed {
            image: image(),
            reason: "RestoreFailed".to_owned(),
        };
        for (state, ledger, expected) in [
            // The restore has not begun.
            (Some(&restoring), at(0, Memory::Live), false),
            (
                Some(&restoring),
                at(3, Memory::Committed { image: image() }),
                false,
            ),
            // The restore has begun and failed.
            (Some(&restoring), at(2, failed), false),
            (
                Some(&restoring),
                at(1, Memory::Waking { image: image() }),
                true,
            ),
            (Some(&restoring), at(2, Memory::Live), true),
            (Some(&hibernated), at(9, Memory::Live), false),
            (Some(&SandboxState::Running), at(0, Memory::Live), true),
            (None, at(0, Memory::Live), true),
        ] {
            assert_eq!(
                may_have_started(state, &ledger),
                expected,
                "{state:?} {ledger:?}"
            );
        }
    }
}

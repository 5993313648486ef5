//! The manifest of an image, made from a sandbox's records and the facts of its Pod.

use jiff::Timestamp;
use torpor_core::ids::ContainerName;
use torpor_messages::service::{ContainerFacts, PodFacts};
use torpor_records::{ContainerRecord, PodRecord, Role};
use torpor_snapshots::{
    CompletedContainer, Fingerprint, ManifestDraft, SaveReason, SavedContainer, SavedName,
};

/// Returns the manifest of the sandbox as it is now. It has the exit codes of the containers that
/// have ended and do not run again.
pub(crate) fn draft(
    record: &PodRecord,
    containers: &[ContainerRecord],
    pod: &PodFacts,
) -> ManifestDraft {
    let (live, completed) = live_and_completed(containers, &pod.containers);
    let sandbox_name = pod.sandbox_name.clone();
    ManifestDraft {
        pod_name: record.name.clone(),
        // The manifest of a Pod without a Sandbox has the Pod's name here.
        sandbox_name: sandbox_name.unwrap_or_else(|| record.name.clone()),
        reason: SaveReason::Hibernate,
        created_at: Timestamp::now(),
        fingerprint: Fingerprint {
            // The build that runs this sandbox may be older than the node's.
            runsc_digest: record.runsc_digest.clone(),
            ..pod.fingerprint.clone()
        },
        containers: live
            .into_iter()
            .filter_map(|container| saved_container(container, &pod.containers))
            .collect(),
        completed,
        parent: None,
    }
}

/// Returns the containers that run, and the exit codes of those that have ended with their keepers.
fn live_and_completed<'a>(
    containers: &'a [ContainerRecord],
    reported: &[ContainerFacts],
) -> (Vec<&'a ContainerRecord>, Vec<CompletedContainer>) {
    let has_ended = |container: &&ContainerRecord| {
        let mut about = reported.iter().filter(|facts| is_about(facts, container));
        about.next().is_some_and(|facts| facts.exit_code.is_some())
    };
    let live: Vec<_> = containers
        .iter()
        .filter(|container| container.completed.is_none() && !has_ended(container))
        .collect();
    let completed = reported.iter().filter_map(|facts| {
        let exit_code = facts.exit_code?;
        let name = ContainerName::new(facts.name.clone()).ok()?;
        let runs_again = live.iter().any(|container| container.name == facts.name);
        (!runs_again).then_some(CompletedContainer { name, exit_code })
    });
    let completed = completed.collect();
    (live, completed)
}

/// Returns whether the facts are about this container. The kubelet may still report the
/// container of the same name that ran before.
fn is_about(facts: &ContainerFacts, container: &ContainerRecord) -> bool {
    let id = facts.container_id.as_str();
    facts.name == container.name && (id.is_empty() || id.ends_with(container.id.as_str()))
}

/// Returns the container's name in a manifest.
pub(crate) fn saved_name(container: &ContainerRecord) -> Option<SavedName> {
    match container.role {
        Role::Sandbox => Some(SavedName::Root),
        Role::Container => ContainerName::new(container.name.clone())
            .ok()
            .map(SavedName::Named),
    }
}

fn saved_container(
    container: &ContainerRecord,
    reported: &[ContainerFacts],
) -> Option<SavedContainer> {
    let facts = reported.iter().find(|facts| facts.name == container.name);
    Some(SavedContainer {
        name: saved_name(container)?,
        image_id: facts
            .map(|facts| facts.image_id.clone())
            .unwrap_or_default(),
        spec_digest: container.spec_digest,
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use torpor_core::ids::{ContainerId, SandboxId};
    use torpor_snapshots::Digest;

    use super::*;

    fn container(id: char, name: &str, completed: Option<u8>) -> ContainerRecord {
        ContainerRecord {
            id: ContainerId::try_from(id.to_string().repeat(64)).expect("an id"),
            sandbox: SandboxId::try_from("a".repeat(64)).expect("an id"),
            role: Role::Container,
            name: name.to_owned(),
            terminal: false,
            cgroup: PathBuf::new(),
            spec_digest: Digest::of(b""),
            keeper_pid: 1,
            in_shim: false,
            completed,
        }
    }

    fn facts(name: &str, id: char, exit_code: Option<i32>) -> ContainerFacts {
        ContainerFacts {
            name: name.to_owned(),
            container_id: format!("containerd://{}", id.to_string().repeat(64)),
            image_id: String::new(),
            exit_code,
        }
    }

    #[test]
    fn a_container_that_runs_again_has_not_ended_with_the_one_before_it() {
        let containers = [
            container('1', "runs", None),
            container('2', "again", None),
            container('3', "ended", None),
            container('4', "before", Some(0)),
        ];
        let reported = [
            facts("runs", '1', None),
            facts("again", '9', Some(137)),
            facts("ended", '3', Some(3)),
            facts("before", '4', Some(0)),
            facts("gone", '5', Some(1)),
        ];
        let (live, completed) = live_and_completed(&containers, &reported);
        let names: Vec<_> = live.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["runs", "again"]);
        let codes: Vec<_> = completed
            .iter()
            .map(|one| (one.name.as_str(), one.exit_code))
            .collect();
        assert_eq!(codes, [("ended", 3), ("before", 0), ("gone", 1)]);
    }
}

//! The manifest of an image, made from a sandbox's records and its Pod.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use torpor_core::ids::{ContainerName, Namespace};
use torpor_core::status::SnapshotState;
use torpor_core::steps::Plan;
use torpor_records::Role;
use torpor_records::{ContainerRecord, PodRecord};
use torpor_runsc::held_open::keeper_lives;
use torpor_snapshots::{
    CompletedContainer, Fingerprint, ManifestDraft, SaveReason, SavedContainer, SavedName,
};

use crate::reconcile::node::Node;
use crate::reconcile::references::sandbox_name;
use crate::report::publish::SavedImage;

fn statuses(pod: Option<&Pod>) -> Vec<&ContainerStatus> {
    let Some(status) = pod.and_then(|pod| pod.status.as_ref()) else {
        return Vec::new();
    };
    let init = status.init_container_statuses.iter().flatten();
    let main = status.container_statuses.iter().flatten();
    init.chain(main).collect()
}

/// Returns the manifest of the sandbox as it is now. It has the exit codes of the containers that
/// have ended and do not run again.
pub(super) fn draft(node: &Node, record: Option<&PodRecord>, pod: Option<&Pod>) -> ManifestDraft {
    let containers = record
        .map(|record| {
            node.records
                .containers_of(&record.sandbox)
                .unwrap_or_default()
        })
        .unwrap_or_default();
    let statuses = statuses(pod);
    let (live, completed) = live_and_completed(&containers, &statuses);
    ManifestDraft {
        pod_name: record.map(|record| record.name.clone()).unwrap_or_default(),
        // The manifest of a Pod without a Sandbox has the Pod's name here.
        sandbox_name: pod
            .and_then(sandbox_name)
            .map(str::to_owned)
            .or_else(|| record.map(|record| record.name.clone()))
            .unwrap_or_default(),
        reason: SaveReason::Hibernate,
        created_at: Timestamp::now(),
        fingerprint: fingerprint(node, record),
        containers: live
            .into_iter()
            .filter_map(|container| saved_container(container, &statuses))
            .collect(),
        completed,
        parent: None,
    }
}

/// Returns the containers that run, and the exit codes of those that have ended with their keepers.
fn live_and_completed<'a>(
    containers: &'a [ContainerRecord],
    statuses: &[&ContainerStatus],
) -> (Vec<&'a ContainerRecord>, Vec<CompletedContainer>) {
    let ended = |status: &ContainerStatus| status.state.as_ref()?.terminated.clone();
    let has_ended = |container: &&ContainerRecord| {
        let own = |status: &&&ContainerStatus| is_about(status, container);
        statuses
            .iter()
            .find(own)
            .is_some_and(|s| ended(s).is_some())
    };
    let live: Vec<_> = containers
        .iter()
        .filter(|container| container.completed.is_none() && !has_ended(container))
        .collect();
    let completed = statuses.iter().filter_map(|status| {
        let exit_code = ended(status)?.exit_code;
        let name = ContainerName::new(status.name.clone()).ok()?;
        let runs_again = live.iter().any(|container| container.name == status.name);
        (!runs_again).then_some(CompletedContainer { name, exit_code })
    });
    let completed = completed.collect();
    (live, completed)
}

/// Returns whether the status is about this container. The kubelet may still report the
/// container of the same name that ran before.
fn is_about(status: &ContainerStatus, container: &ContainerRecord) -> bool {
    let id = status.container_id.as_deref().unwrap_or_default();
    status.name == container.name && (id.is_empty() || id.ends_with(container.id.as_str()))
}

/// Returns a running container that the Pod's spec does not have. `kubectl debug` adds such
/// containers, and a Pod that continues from an image would lack them.
pub(super) fn added(node: &Node, record: &PodRecord, pod: Option<&Pod>) -> Option<ContainerName> {
    let mut containers = node.records.containers_of(&record.sandbox).ok()?;
    // The record of an ended container stays for a moment, or for longer if containerd has lost the
    // container.
    containers.retain(|container| keeper_lives(&node.records, container));
    added_to(pod?, &containers)
}

fn added_to(pod: &Pod, containers: &[ContainerRecord]) -> Option<ContainerName> {
    let spec = pod.spec.as_ref()?;
    let init = spec.init_containers.iter().flatten();
    let own: Vec<&str> = init
        .chain(&spec.containers)
        .map(|container| container.name.as_str())
        .collect();
    let mut added = containers
        .iter()
        .filter(|one| one.role == Role::Container && !own.contains(&one.name.as_str()));
    ContainerName::new(added.next()?.name.clone()).ok()
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
    statuses: &[&ContainerStatus],
) -> Option<SavedContainer> {
    let name = saved_name(container)?;
    let status = statuses.iter().find(|status| status.name == container.name);
    Some(SavedContainer {
        name,
        image_id: status
            .map(|status| status.image_id.clone())
            .unwrap_or_default(),
        spec_digest: container.spec_digest,
    })
}

/// Returns the needs of an image of the sandbox. They are empty on a node that could not be probed:
/// there the planner plans no save.
fn fingerprint(node: &Node, record: Option<&PodRecord>) -> Fingerprint {
    match &node.ability {
        Ok(ability) => {
            let mut fingerprint = ability.fingerprint.clone();
            if let Some(record) = record {
                // The build that runs this sandbox may be older than the node's.
                fingerprint.runsc_digest.clone_from(&record.runsc_digest);
            }
            fingerprint
        }
        Err(_) => Fingerprint {
            runsc_digest: String::new(),
            runsc_version: String::new(),
            platform: String::new(),
            flags: Vec::new(),
            cpu_features_digest: String::new(),
            cpu_features: Vec::new(),
            kernel: String::new(),
        },
    }
}

/// Returns the images that the plan's statuses name.
pub(super) fn saved(node: &Node, namespace: &Namespace, plan: &Plan) -> Vec<SavedImage> {
    plan.status
        .snapshots
        .iter()
        .filter_map(|draft| match &draft.state {
            SnapshotState::Committed { image, .. } => node.store.image(namespace, image).ok(),
            _ => None,
        })
        .map(|image| SavedImage {
            digest: image.digest().to_string(),
            size_bytes: image.manifest().size(),
            manifest: image.manifest().clone(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;
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

    fn status(name: &str, id: char, exit_code: Option<i32>) -> ContainerStatus {
        let state = match exit_code {
            Some(code) => json!({ "terminated": { "exitCode": code } }),
            None => json!({ "running": {} }),
        };
        let id = format!("containerd://{}", id.to_string().repeat(64));
        serde_json::from_value(json!({
            "name": name, "containerID": id, "state": state,
            "image": "", "imageID": "", "ready": true, "restartCount": 0,
        }))
        .expect("a status")
    }

    #[test]
    fn a_container_that_runs_again_has_not_ended_although_the_one_before_it_is_said_to_have() {
        let containers = [
            container('1', "runs", None),
            container('2', "again", None),
            container('3', "ended", None),
            container('4', "before", Some(0)),
        ];
        let statuses = [
            status("runs", '1', None),
            status("again", '9', Some(137)),
            status("ended", '3', Some(3)),
            status("before", '4', Some(0)),
            status("gone", '5', Some(1)),
        ];
        let statuses: Vec<_> = statuses.iter().collect();
        let (live, completed) = live_and_completed(&containers, &statuses);
        let names: Vec<_> = live.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["runs", "again"]);
        let codes: Vec<_> = completed
            .iter()
            .map(|one| (one.name.as_str(), one.exit_code))
            .collect();
        assert_eq!(codes, [("ended", 3), ("before", 0), ("gone", 1)]);
    }

    #[test]
    fn who_is_not_in_the_pods_spec_was_added_by_kubectl_debug() {
        let pod: Pod = serde_json::from_value(json!({ "spec": {
            "initContainers": [{ "name": "sidecar" }],
            "containers": [{ "name": "main" }],
            "ephemeralContainers": [{ "name": "debugger-x7" }],
        } }))
        .expect("a Pod");
        let own = [
            container('1', "main", None),
            container('2', "sidecar", None),
        ];
        let mut pause = container('3', "", None);
        pause.role = Role::Sandbox;
        let mut all = own.to_vec();
        all.push(pause);
        assert_eq!(added_to(&pod, &all), None);
        all.push(container('4', "debugger-x7", None));
        let added = added_to(&pod, &all).expect("one was added");
        assert_eq!(added.as_str(), "debugger-x7");
    }
}

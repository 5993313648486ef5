//! What is written into, and read from, the manifest of an image.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use torpor_core::ids::{ContainerName, Namespace};
use torpor_core::status::SnapshotState;
use torpor_core::steps::Plan;
use torpor_gvisor::record::{ContainerRecord, PodRecord};
use torpor_gvisor::spec::Role;
use torpor_snapshots::{
    CompletedContainer, Fingerprint, ManifestDraft, SaveReason, SavedContainer, SavedName,
};

use crate::desired::sandbox_name;
use crate::node::Node;
use crate::publish::SavedImage;

fn statuses(pod: Option<&Pod>) -> Vec<&ContainerStatus> {
    let Some(status) = pod.and_then(|pod| pod.status.as_ref()) else {
        return Vec::new();
    };
    let of = |list: &'static str| match list {
        "init" => status.init_container_statuses.iter().flatten(),
        _ => status.container_statuses.iter().flatten(),
    };
    of("init").chain(of("main")).collect()
}

/// The manifest of the sandbox as it is now. Containers that ended and are not run again are part of it by their exit
/// codes.
pub(super) fn manifest(
    node: &Node,
    record: Option<&PodRecord>,
    pod: Option<&Pod>,
) -> ManifestDraft {
    let containers = record
        .map(|record| {
            node.records
                .containers_of(&record.sandbox)
                .unwrap_or_default()
        })
        .unwrap_or_default();
    let statuses = statuses(pod);
    let live: Vec<&ContainerRecord> = containers
        .iter()
        .filter(|container| container.completed.is_none())
        .filter(|container| exit_code(&statuses, &container.name).is_none())
        .collect();
    let completed = statuses
        .iter()
        .filter_map(|status| {
            let exit_code = exit_code(&statuses, &status.name)?;
            Some(CompletedContainer {
                name: ContainerName::new(status.name.clone()).ok()?,
                exit_code,
            })
        })
        .collect();
    ManifestDraft {
        pod_name: record.map(|record| record.name.clone()).unwrap_or_default(),
        // A Pod without a Sandbox goes by its own name.
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

/// Exit code of a container that has ended and whose keeper is gone with it.
fn exit_code(statuses: &[&ContainerStatus], name: &str) -> Option<i32> {
    let status = statuses.iter().find(|status| status.name == name)?;
    Some(status.state.as_ref()?.terminated.as_ref()?.exit_code)
}

/// What a manifest calls it.
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

/// A node that could not be probed saves nothing: the planner is told so.
fn fingerprint(node: &Node, record: Option<&PodRecord>) -> Fingerprint {
    match &node.ability {
        Ok(ability) => {
            let mut fingerprint = ability.fingerprint.clone();
            if let Some(record) = record {
                // The build that runs this pod, which may be older than the node's.
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

/// The images that the plan's statuses name.
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

//! Facts of a Pod for the manifests of its images, and the images that a plan names.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use torpor_core::ids::{ContainerName, Namespace};
use torpor_core::status::SnapshotState;
use torpor_core::steps::Plan;
use torpor_messages::service::{ContainerFacts, PodFacts};
use torpor_snapshots::Fingerprint;

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

/// Returns what the API knows of the Pod.
pub(super) fn facts(node: &Node, pod: Option<&Pod>) -> PodFacts {
    let container = |status: &ContainerStatus| ContainerFacts {
        name: status.name.clone(),
        container_id: status.container_id.clone().unwrap_or_default(),
        image_id: status.image_id.clone(),
        exit_code: (status.state.as_ref())
            .and_then(|state| state.terminated.as_ref())
            .map(|ended| ended.exit_code),
    };
    PodFacts {
        sandbox_name: pod.and_then(sandbox_name).map(str::to_owned),
        containers: statuses(pod).into_iter().map(container).collect(),
        fingerprint: fingerprint(node),
    }
}

/// Returns the needs of an image that this node makes. They are empty on a node that could not be
/// probed: there the planner plans no save.
fn fingerprint(node: &Node) -> Fingerprint {
    match &node.ability {
        Ok(ability) => ability.fingerprint.clone(),
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

/// Returns a running container that the Pod's spec does not have. `kubectl debug` adds such
/// containers, and a Pod that continues from an image would lack them.
pub(super) fn added(pod: &Pod, running: &BTreeSet<ContainerName>) -> Option<ContainerName> {
    let spec = pod.spec.as_ref()?;
    let init = spec.init_containers.iter().flatten();
    let own: Vec<&str> = init
        .chain(&spec.containers)
        .map(|container| container.name.as_str())
        .collect();
    let mut added = running.iter().filter(|name| !own.contains(&name.as_str()));
    added.next().cloned()
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
    use serde_json::json;

    use super::*;

    #[test]
    fn a_container_outside_the_pods_spec_was_added_by_kubectl_debug() {
        let pod: Pod = serde_json::from_value(json!({ "spec": {
            "initContainers": [{ "name": "sidecar" }],
            "containers": [{ "name": "main" }],
            "ephemeralContainers": [{ "name": "debugger-x7" }],
        } }))
        .expect("a Pod");
        let names = |names: &[&str]| {
            let name = |name: &&str| ContainerName::new(*name).expect("a name");
            names.iter().map(name).collect()
        };
        assert_eq!(added(&pod, &names(&["main", "sidecar"])), None);
        let found = added(&pod, &names(&["main", "sidecar", "debugger-x7"]));
        assert_eq!(found.expect("one was added").as_str(), "debugger-x7");
    }
}

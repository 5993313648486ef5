//! No client required. Trims watched objects to the fields that the controller reads.

use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateRunning, ContainerStatus, PersistentVolumeClaim, Pod,
    PodSpec, Service, ServiceSpec,
};
use kube::{Resource, ResourceExt};
use torpor_api::{
    Sandbox, SandboxNode, SandboxSnapshot, annotations, archive, node::SandboxReport,
};

use crate::claim::adopt;

/// Annotation with the object that kubectl applied last.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Removes metadata that the controller does not read: the managed fields, and the whole object
/// that kubectl applied last.
pub(super) fn trim<K: Resource>(object: &mut K) {
    object.meta_mut().managed_fields = None;
    forget_last_applied(object);
}

fn forget_last_applied<K: Resource>(object: &mut K) {
    if let Some(all) = &mut object.meta_mut().annotations {
        all.remove(LAST_APPLIED);
    }
}

/// Trims a Sandbox. The managed fields of server-side apply are kept: an assignment must preserve
/// them.
pub(super) fn trim_sandbox(sandbox: &mut Sandbox) {
    forget_last_applied(sandbox);
    if let Some(fields) = &mut sandbox.metadata.managed_fields {
        fields.retain(adopt::was_applied);
    }
    if sandbox.managed_fields().is_empty() {
        trim(sandbox);
    }
}

/// Trims a SandboxSnapshot. The manifest of an archive may be large, and only clients read it: its
/// hash takes its place.
pub fn trim_snapshot(snapshot: &mut SandboxSnapshot) {
    trim(snapshot);
    let annotations = snapshot.metadata.annotations.as_mut();
    if let Some(manifest) = annotations.and_then(|all| all.get_mut(annotations::ARCHIVED_SANDBOX)) {
        *manifest = archive::manifest_hash(manifest);
    }
}

/// Trims a SandboxNode to the Pods that have an image. The rest of its report about each sandbox
/// grows with the node and is for users.
pub fn trim_node(node: &mut SandboxNode) {
    trim(node);
    if let Some(status) = &mut node.status {
        let all = std::mem::take(&mut status.sandboxes);
        let with_image = all.into_iter().filter(|report| report.image_id.is_some());
        status.sandboxes = with_image
            .map(|report| SandboxReport {
                image_id: report.image_id,
                pod_uid: report.pod_uid,
                ..SandboxReport::default()
            })
            .collect();
    }
}

/// Trims a Pod to the fields that the controller reads, which removes most of it.
pub fn trim_pod(pod: &mut Pod) {
    trim(pod);
    if let Some(spec) = pod.spec.take() {
        pod.spec = Some(PodSpec {
            // The names suffice: a record of the Pod is made when the image of each container is
            // shared.
            containers: named(spec.containers),
            node_name: spec.node_name,
            runtime_class_name: spec.runtime_class_name,
            ..PodSpec::default()
        });
    }
    if let Some(status) = &mut pod.status {
        // Running containers distinguish a Pod with memory of its own from one that was refused its
        // image.
        for container in status.container_statuses.iter_mut().flatten() {
            let running = container.state.take().and_then(|state| state.running);
            *container = ContainerStatus {
                state: Some(ContainerState {
                    running: running.map(|_| ContainerStateRunning::default()),
                    ..ContainerState::default()
                }),
                ..image_of(container)
            };
        }
        for container in status.init_container_statuses.iter_mut().flatten() {
            *container = image_of(container);
        }
        status.ephemeral_container_statuses = None;
    }
}

fn named(containers: Vec<Container>) -> Vec<Container> {
    let name = |container: Container| Container {
        name: container.name,
        ..Container::default()
    };
    containers.into_iter().map(name).collect()
}

/// Returns name and image of a container from its status.
fn image_of(container: &mut ContainerStatus) -> ContainerStatus {
    ContainerStatus {
        name: std::mem::take(&mut container.name),
        image_id: std::mem::take(&mut container.image_id),
        ..ContainerStatus::default()
    }
}

/// Trims a Pod that stages images to its progress.
pub fn trim_staged(pod: &mut Pod) {
    trim(pod);
    pod.spec = None;
}

pub(super) fn trim_service(service: &mut Service) {
    trim(service);
    service.status = None;
    if let Some(spec) = service.spec.take() {
        service.spec = Some(ServiceSpec {
            cluster_ip: spec.cluster_ip,
            ports: spec.ports,
            selector: spec.selector,
            ..ServiceSpec::default()
        });
    }
}

pub(super) fn trim_claim(claim: &mut PersistentVolumeClaim) {
    trim(claim);
    claim.spec = None;
    claim.status = None;
}

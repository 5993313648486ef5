//! No client required. Builds the Pod that brings a template's images to one node.
//!
//! Its containers have the images, and run a program of Torpor's that ends at once: nothing of an
//! image is executed. The Pod is kept after that. The kubelet counts the images of ended
//! containers as used, and removes such a container only with its Pod, or when the node's disk is
//! full (kubelet 1.36, `image_gc_manager.go` and `kuberuntime_gc.go`).

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt;
use serde_json::{Map, Value, json};
use torpor_api::{SandboxTemplate, annotations, labels, name_hash};

use crate::{
    blueprint,
    golden::sandbox::forget_other_pods,
    owners::owner_reference,
    pool::member,
    sandbox::pod_spec::{self, inject},
};

/// Fields of the template's Pod that decide where the images come from and where the Pod may run.
/// The priority is not among them: no sandbox gives way to a pull.
const COPIED: [&str; 8] = [
    "affinity",
    "imagePullSecrets",
    "nodeSelector",
    "runtimeClassName",
    "schedulerName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
];
/// Age at which a Pod that has not ended takes no place from others.
const MOST: Duration = Duration::from_secs(1800);
/// Waiting reasons of a container that starts or may still start by itself without a change.
const PASSING: [&str; 2] = ["ContainerCreating", "PodInitializing"];

/// Returns the containers of a template's Pod that name an image which a kubelet may pull, one for
/// each image.
fn containers(pod: &Map<String, Value>) -> Vec<&Map<String, Value>> {
    let lists = ["initContainers", "containers"].into_iter();
    let all = lists.filter_map(|key| pod.get(key)?.as_array()).flatten();
    let mut found: Vec<&Map<String, Value>> = Vec::new();
    for container in all.filter_map(Value::as_object) {
        let image = |one: &Map<String, Value>| one.get("image").cloned().unwrap_or_default();
        let is_pulled = container
            .get("imagePullPolicy")
            .is_none_or(|policy| policy != "Never");
        let is_new = found.iter().all(|other| image(other) != image(container));
        if is_pulled && is_new && image(container).is_string() {
            found.push(container);
        }
    }
    found
}

/// Returns the images that are brought to the nodes, without repetitions.
pub(super) fn images(template: &SandboxTemplate) -> Vec<String> {
    let pod = template.spec.pod_template.spec.json();
    let image =
        |container: &Map<String, Value>| container.get("image")?.as_str().map(str::to_owned);
    containers(pod).into_iter().filter_map(image).collect()
}

/// Returns all that decides about a template's images and where they come from.
pub(super) fn version(template: &SandboxTemplate) -> String {
    let pod = blueprint::secured_pod_spec(template);
    let copied: Vec<_> = COPIED.iter().map(|key| pod.get(*key)).collect();
    json!([images(template), copied]).to_string()
}

/// Returns the name of the Pod for a node. It is another one for another version of the images.
pub(super) fn name(template: &SandboxTemplate, version: &str, node: &str) -> String {
    let suffix = format!("-images-{}", name_hash(&json!([node, version]).to_string()));
    member::shortened(&template.name_any(), suffix.len()).to_owned() + &suffix
}

/// Returns the Pod that brings the template's images to a node. `runtime`: image with the program
/// that it runs.
pub(super) fn pod(template: &SandboxTemplate, name: &str, node: &str, runtime: &str) -> Value {
    let whole = blueprint::secured_pod_spec(template);
    let copied = COPIED.iter().filter_map(|key| {
        let value = whole.get(*key)?;
        Some(((*key).to_owned(), value.clone()))
    });
    let mut spec: Map<String, Value> = copied.collect();
    forget_other_pods(&mut spec);
    pod_spec::require_nodes(&mut spec, &[node.to_owned()]);
    let resources = json!({
        "requests": {"cpu": "10m", "memory": "32Mi"},
        "limits": {"cpu": "1", "memory": "128Mi"},
    });
    let staged = containers(&whole).into_iter().enumerate();
    let staged = staged.map(|(number, container)| stage(container, number, &resources));
    let staged: Vec<Value> = staged.collect();
    for (key, value) in [
        ("automountServiceAccountToken", json!(false)),
        ("enableServiceLinks", json!(false)),
        ("restartPolicy", json!("Never")),
        ("terminationGracePeriodSeconds", json!(1)),
        (
            "initContainers",
            json!([inject::installer(runtime, resources)]),
        ),
        ("containers", json!(staged)),
        ("volumes", json!([{"name": inject::NAME, "emptyDir": {}}])),
    ] {
        spec.insert(key.to_owned(), value);
    }
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": template.namespace(),
            "labels": {labels::STAGED_IMAGES: name_hash(&template.name_any())},
            "annotations": {
                annotations::SANDBOX_TEMPLATE_REF: template.name_any(),
                annotations::DOZE_AFTER: "off",
                annotations::HIBERNATE_AFTER: "off",
                annotations::SAFE_TO_EVICT: "true",
            },
            "ownerReferences": [owner_reference(template)],
        },
        "spec": spec,
    })
}

fn stage(container: &Map<String, Value>, number: usize, resources: &Value) -> Value {
    let mut staged = json!({
        "name": format!("image-{number}"),
        "command": [inject::BINARY, "--version"],
        "resources": resources,
        "volumeMounts": [{
            "name": inject::NAME, "mountPath": inject::DIRECTORY, "readOnly": true,
        }],
    });
    for key in ["image", "imagePullPolicy", "securityContext"] {
        if let Some(value) = container.get(key) {
            staged[key] = value.clone();
        }
    }
    staged
}

/// Progress of the Pod for a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The images are on the node.
    Staged,
    Pulling,
    /// It makes no progress, with this cause. The kubelet or the scheduler tries again.
    Held(String),
    /// It ended without the images, with this cause.
    Failed(String),
}

/// Returns the progress of a Pod.
pub fn progress(pod: &Pod, now: Timestamp) -> Progress {
    let Some(status) = &pod.status else {
        return unfinished(pod, now);
    };
    let lists = [&status.init_container_statuses, &status.container_statuses];
    let containers = || lists.into_iter().flatten().flatten();
    match status.phase.as_deref() {
        Some("Succeeded") => return Progress::Staged,
        Some("Failed") => {
            let told = words(status.reason.as_ref(), status.message.as_ref());
            let causes = containers().filter_map(ended_with).chain([told]);
            let mut causes = causes.filter(|cause| !cause.is_empty());
            let unknown = || "its Pod failed".to_owned();
            return Progress::Failed(causes.next().unwrap_or_else(unknown));
        }
        _ => {}
    }
    let mut conditions = status.conditions.iter().flatten();
    let unscheduled = conditions.find(|one| one.type_ == "PodScheduled" && one.status == "False");
    let unscheduled = unscheduled.map(|one| words(one.reason.as_ref(), one.message.as_ref()));
    let cause = unscheduled.or_else(|| containers().find_map(held));
    cause.map_or_else(|| unfinished(pod, now), Progress::Held)
}

/// Returns the progress of a Pod that reports no fault.
fn unfinished(pod: &Pod, now: Timestamp) -> Progress {
    let minutes = MOST.as_secs() / 60;
    match age(pod, now) < MOST {
        true => Progress::Pulling,
        false => Progress::Held(format!("no progress after {minutes} minutes")),
    }
}

fn words(reason: Option<&String>, message: Option<&String>) -> String {
    let parts = [reason, message].into_iter().flatten();
    parts.map(String::as_str).collect::<Vec<_>>().join(": ")
}

/// Returns the age of a Pod.
pub(super) fn age(pod: &Pod, now: Timestamp) -> Duration {
    let created = pod.metadata.creation_timestamp.as_ref();
    created
        .and_then(|created| Duration::try_from(now.duration_since(created.0)).ok())
        .unwrap_or_default()
}

/// Returns why a container ended badly.
fn ended_with(container: &ContainerStatus) -> Option<String> {
    let ended = container.state.as_ref()?.terminated.as_ref()?;
    let reason = ended.reason.as_deref().unwrap_or("Error");
    let message = ended.message.as_deref().unwrap_or_default();
    let (image, code) = (&container.image, ended.exit_code);
    (code != 0).then(|| format!("image {image}: {reason} (exit code {code}): {message}"))
}

/// Returns why a container does not start.
fn held(container: &ContainerStatus) -> Option<String> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref()?;
    let message = waiting.message.as_deref().unwrap_or_default();
    let image = &container.image;
    (!PASSING.contains(&reason)).then(|| format!("image {image}: {reason}: {message}"))
}

#[cfg(test)]
mod tests;

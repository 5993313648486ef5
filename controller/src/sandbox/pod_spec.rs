//! No client required. The Pod that a Sandbox asks for, as raw JSON, so that fields of a newer Kubernetes stay in it.

use kube::ResourceExt;
use serde_json::{Map, Value, json};
use torpor_api::{
    PodRecord, Sandbox, SandboxSnapshot,
    annotations::{self, OnRestoreFailure},
    conditions::POD_RESTORE_SETTLED,
    raw::RawPodSpec,
};

use super::{dereference::claim_name, metadata, validate::owner_reference};

pub mod inject;
mod net_raw;

/// What a Pod continues from.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    pub image_id: String,
    pub node: String,
    /// The user named the image, so that a used one is accepted.
    pub copy: bool,
    pub on_failure: OnRestoreFailure,
    /// Names of the saved containers, each with the image reference that its kubelet reported, if
    /// that is recorded.
    pub containers: Vec<(String, Option<String>)>,
    /// Names of the containers that had ended before.
    pub completed: Vec<String>,
    /// Name of the Pod that was saved, which was its hostname.
    pub pod_name: Option<String>,
    /// The PodSnapshot that the Pod is asked for when it is Ready.
    pub pod_snapshot: Option<String>,
}

impl Memory {
    /// What to continue from, or `None` while the snapshot does not say where which image lies. The
    /// node and the container images are never those of the status, which an agent writes. Without
    /// a record the images are those of the template.
    pub fn of(
        snapshot: &SandboxSnapshot,
        node: &str,
        saved: Option<&PodRecord>,
        copy: bool,
        on_failure: OnRestoreFailure,
    ) -> Option<Self> {
        let status = snapshot.status.as_ref()?;
        status.node_name.as_ref()?;
        Some(Self {
            image_id: status.image_id.clone()?,
            node: node.to_owned(),
            copy,
            on_failure,
            containers: status
                .containers
                .iter()
                .map(|container| {
                    let image = saved.and_then(|saved| saved.images.get(&container.name));
                    (container.name.clone(), image.cloned())
                })
                .collect(),
            completed: status
                .completed_containers
                .iter()
                .map(|container| container.name.clone())
                .collect(),
            pod_name: saved
                .map(|saved| saved.name.clone())
                .or_else(|| status.pod_name.clone()),
            pod_snapshot: None,
        })
    }

    /// Whether the sandbox runtime had been put into the Pod that was saved.
    pub fn has_runtime(&self) -> bool {
        let running = self.containers.iter().map(|(name, _)| name);
        running
            .chain(&self.completed)
            .any(|name| name == inject::NAME)
    }
}

/// `runtimeClassName` of a template.
pub fn runtime_class_name(spec: &RawPodSpec) -> Option<String> {
    spec.json()
        .get("runtimeClassName")?
        .as_str()
        .map(str::to_owned)
}

/// The container that `kubectl exec` takes: the one that its annotation names, or the first.
pub fn default_container(sandbox: &Sandbox) -> Option<String> {
    const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";
    let template = &sandbox.spec.pod_template;
    let metadata = template.metadata.as_ref();
    let annotations = metadata.and_then(|metadata| metadata.annotations.as_ref());
    let named = annotations
        .and_then(|all| all.get(DEFAULT_CONTAINER))
        .cloned();
    let first = || {
        template
            .spec
            .json()
            .get("containers")?
            .get(0)?
            .get("name")?
            .as_str()
    };
    named.or_else(|| first().map(str::to_owned))
}

/// The Pod to create. `runtime` is the image of the sandbox runtime, where that is put in.
pub fn pod(
    sandbox: &Sandbox,
    torpor_annotations: &[(&str, String)],
    memory: Option<&Memory>,
    runtime: Option<&str>,
) -> Result<Value, inject::Error> {
    let name = sandbox.name_any();
    let (labels, mut on_pod) = metadata::for_new_pod(sandbox);
    on_pod.extend(
        torpor_annotations
            .iter()
            .map(|(key, value)| ((*key).to_owned(), value.clone())),
    );
    let mut spec = sandbox.spec.pod_template.spec.json().clone();
    mount_claims(&mut spec, sandbox);
    if let Some(image) = runtime {
        inject::inject(&mut spec, image, memory.is_none())?;
    }
    if let Some(memory) = memory {
        on_pod.insert(
            annotations::RESTORE_IMAGE.to_owned(),
            memory.image_id.clone(),
        );
        on_pod.insert(
            annotations::ON_RESTORE_FAILURE.to_owned(),
            memory.on_failure.as_str().to_owned(),
        );
        if memory.copy {
            on_pod.insert(annotations::RESTORE_COPY.to_owned(), "true".to_owned());
        }
        if let Some(snapshot) = &memory.pod_snapshot {
            on_pod.insert(annotations::POD_SNAPSHOT.to_owned(), snapshot.clone());
            wait_until_settled(&mut spec);
        }
        continue_from(&mut spec, memory, &name);
    }
    // A Pod that names no RuntimeClass is as upstream makes it.
    let of_runtime = runtime_class_name(&sandbox.spec.pod_template.spec);
    if let Some(names) = of_runtime.and_then(|_| net_raw::containers(&spec)) {
        on_pod.insert(annotations::NET_RAW.to_owned(), names);
    }
    Ok(json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": sandbox.namespace(),
            "labels": labels,
            "annotations": on_pod,
            "ownerReferences": [owner_reference(sandbox)],
        },
        "spec": spec,
    }))
}

/// The Pod is not Ready before its agent has said how its restore went.
fn wait_until_settled(spec: &mut Map<String, Value>) {
    let gate = json!({"conditionType": POD_RESTORE_SETTLED});
    let gates = spec.entry("readinessGates").or_insert_with(|| json!([]));
    if !gates.is_array() {
        *gates = json!([]);
    }
    if let Value::Array(gates) = gates
        && !gates.contains(&gate)
    {
        gates.push(gate);
    }
}

/// One volume per claim template; it replaces a volume of the same name.
fn mount_claims(spec: &mut Map<String, Value>, sandbox: &Sandbox) {
    let templates = &sandbox.spec.volume_claim_templates;
    if templates.is_empty() {
        return;
    }
    let replaced = |volume: &Value| {
        templates
            .iter()
            .any(|template| volume["name"] == template.metadata.name.as_str())
    };
    let mut volumes: Vec<Value> = spec
        .get("volumes")
        .and_then(Value::as_array)
        .map(|all| {
            all.iter()
                .filter(|volume| !replaced(volume))
                .cloned()
                .collect()
        })
        .unwrap_or_default();
    volumes.extend(templates.iter().map(|template| {
        let claim = claim_name(&template.metadata.name, &sandbox.name_any());
        json!({
            "name": template.metadata.name,
            "persistentVolumeClaim": {"claimName": claim},
        })
    }));
    spec.insert("volumes".to_owned(), volumes.into());
}

/// Sets what has to be as it was when the image was made: node, container images, and, unless it is
/// a copy, the hostname. Steps of a container's start that others wait for are not done again:
/// nothing of the sandbox runs until its last container was started.
fn continue_from(spec: &mut Map<String, Value>, memory: &Memory, name: &str) {
    require_node(spec, &memory.node);
    for list in ["containers", "initContainers"] {
        for container in spec
            .get_mut(list)
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            let named = |name: &String| container["name"] == name.as_str();
            let saved = memory.containers.iter().find(|(name, _)| named(name));
            // What had ended is not run again, but the kubelet wants its image none the less.
            if saved.is_none() && !memory.completed.iter().any(named) {
                continue;
            }
            if let Some((_, image)) = saved {
                has_started(container, list == "initContainers");
                if let Some(image) = image {
                    container["image"] = image_reference(image).into();
                }
            }
            // Pulling could only fail or bring something else; and a bare image id has no registry to pull from.
            if container["imagePullPolicy"] != "Never" {
                container["imagePullPolicy"] = "IfNotPresent".into();
            }
        }
    }
    if let Some(hostname) = memory.pod_name.as_deref().filter(|saved| *saved != name)
        && !memory.copy
        && !spec.contains_key("hostname")
    {
        let label = hostname
            .get(..63)
            .unwrap_or(hostname)
            .trim_end_matches(['-', '.']);
        spec.insert("hostname".to_owned(), label.into());
    }
}

/// Takes away what the kubelet does at a container's start: the hook, and of a sidecar the probe that it waits for before it starts the next.
fn has_started(container: &mut Value, is_sidecar: bool) {
    if let Some(hooks) = container
        .get_mut("lifecycle")
        .and_then(Value::as_object_mut)
    {
        hooks.remove("postStart");
    }
    if let Some(container) = container.as_object_mut().filter(|_| is_sidecar) {
        container.remove("startupProbe");
    }
}

/// The runtime's name of an image, as a Pod may name it: `repository@sha256:…`, or the bare `sha256:…` of an image that has no repository.
fn image_reference(image_id: &str) -> String {
    let reference = image_id
        .split_once("://")
        .map_or(image_id, |(_, reference)| reference);
    reference.to_owned()
}

/// Adds "on this node" to what the template asks of a node. Terms are alternatives, so that each one gets it.
fn require_node(spec: &mut Map<String, Value>, node: &str) {
    let rule = json!({"key": "metadata.name", "operator": "In", "values": [node]});
    let affinity = object(spec, "affinity");
    let node_affinity = object(affinity, "nodeAffinity");
    let required = object(
        node_affinity,
        "requiredDuringSchedulingIgnoredDuringExecution",
    );
    let terms = required
        .entry("nodeSelectorTerms")
        .or_insert_with(|| json!([]));
    let Value::Array(terms) = terms else { return };
    if terms.is_empty() {
        terms.push(json!({}));
    }
    for term in terms.iter_mut().filter_map(Value::as_object_mut) {
        let fields = term.entry("matchFields").or_insert_with(|| json!([]));
        if let Value::Array(fields) = fields {
            fields.push(rule.clone());
        }
    }
}

fn object<'a>(map: &'a mut Map<String, Value>, key: &str) -> &'a mut Map<String, Value> {
    let entry = map.entry(key).or_insert_with(|| json!({}));
    if !entry.is_object() {
        *entry = json!({});
    }
    match entry {
        Value::Object(map) => map,
        _ => unreachable!("it was made an object on the line above"),
    }
}

#[cfg(test)]
mod tests;

//! No client required. Builds the Pod of a Sandbox as raw JSON, which keeps fields of newer
//! Kubernetes versions.

use kube::ResourceExt;
use serde_json::{Map, Value, json};
use torpor_api::{
    PodRecord, Sandbox, SandboxSnapshot,
    annotations::{self, LateBind, OnRestoreFailure},
    conditions::POD_RESTORE_SETTLED,
};

use super::{dereference::claim_name, metadata};
use crate::{golden::images::Images, owners::owner_reference};

pub mod claim_volume;
pub mod inject;
mod net_raw;

/// Saved memory that a Pod continues from.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    pub image_id: String,
    /// Nodes that can restore the image, the preferred one first; never empty.
    pub nodes: Vec<String>,
    /// Places from which other nodes fetch the image; none if they cannot.
    pub sources: Option<Sources>,
    /// True if the user named the image; a consumed image is then accepted.
    pub copy: bool,
    pub on_failure: OnRestoreFailure,
    /// Names of the saved containers, each with the image reference that its kubelet reported, if
    /// it is recorded.
    pub containers: Vec<(String, Option<String>)>,
    /// Names of the containers that had ended before the save.
    pub completed: Vec<String>,
    /// Name of the saved Pod, which was its hostname.
    pub pod_name: Option<String>,
    /// Words for the condition of a Pod that starts from a backup.
    pub backup: Option<String>,
    /// PodSnapshot that the SDK expects the Pod to have restored once it is Ready.
    pub pod_snapshot: Option<String>,
}

/// Places from which a node fetches an image that it does not hold: a repository, or the node that
/// holds it.
#[derive(Clone, Debug, PartialEq)]
pub struct Sources {
    /// Digest of the image's manifest.
    pub digest: String,
    /// SnapshotClass of the repository that has the image.
    pub class: Option<String>,
    /// UID of the cluster that archived the image; none for an image of this cluster.
    pub cluster: Option<String>,
    /// Node that gives the image to other nodes.
    pub node: Option<String>,
}

impl Memory {
    /// Returns the memory to continue from, or `None` if the snapshot names no image or no node.
    /// No node holds an archive.
    ///
    /// The node and the container images never come from the status, which an agent writes. Without
    /// a record the images are those of the template. `server`: the node that gives the image to
    /// others.
    pub fn of(
        snapshot: &SandboxSnapshot,
        nodes: Vec<String>,
        server: Option<String>,
        saved: Option<&PodRecord>,
        copy: bool,
        on_failure: OnRestoreFailure,
    ) -> Option<Self> {
        let status = snapshot.status.as_ref()?;
        if !snapshot.is_archive() {
            status.node_name.as_ref()?;
        }
        let class = snapshot.spec.snapshot_class_name.clone();
        let class = class.filter(|_| snapshot.is_uploaded());
        let sources = |digest: String| Sources {
            digest,
            class: class.clone(),
            cluster: snapshot
                .spec
                .archive
                .as_ref()
                .map(|one| one.cluster.clone()),
            node: server.clone(),
        };
        let is_served = class.is_some() || server.is_some();
        Some(Self {
            image_id: status.image_id.clone()?,
            nodes,
            sources: status.digest.clone().filter(|_| is_served).map(sources),
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
            backup: None,
            pod_snapshot: None,
        })
    }

    /// Reports whether the saved Pod had the injected sandbox runtime.
    pub fn has_runtime(&self) -> bool {
        let running = self.containers.iter().map(|(name, _)| name);
        running
            .chain(&self.completed)
            .any(|name| name == inject::NAME)
    }
}

/// Returns the container that `kubectl exec` chooses: the one in its annotation, else the first.
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

/// Source of the memory of a new Pod.
#[derive(Clone, Copy, Debug)]
pub enum Start<'a> {
    Cold,
    Memory(&'a Memory),
    /// The golden image of its node; cold on a node that has none.
    Golden(&'a Images),
}

/// Reason why a Pod cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Inject(#[from] inject::Error),
    #[error(transparent)]
    ClaimVolume(#[from] claim_volume::Error),
}

/// Returns the Pod to create. `runtime` is the image of the sandbox runtime, if it is injected.
pub fn pod(
    sandbox: &Sandbox,
    torpor_annotations: &[(&str, String)],
    start: Start<'_>,
    runtime: Option<&str>,
) -> Result<Value, Error> {
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
        inject::inject(&mut spec, image, !matches!(start, Start::Memory(_)))?;
    }
    if annotations::binds(sandbox.annotations()) {
        let late = LateBind::of(sandbox.annotations());
        let secret = claim_volume::secret_name(&sandbox.uid().unwrap_or_default());
        let brings_files = late.files || late.identity;
        claim_volume::mount(&mut spec, brings_files.then_some(&*secret))?;
    }
    if let Start::Golden(golden) = start {
        on_pod.insert(annotations::GOLDEN_IMAGES.to_owned(), golden.ids.join(","));
        start_from(&mut spec, golden);
    }
    if let Start::Memory(memory) = start {
        on_pod.insert(
            annotations::RESTORE_IMAGE.to_owned(),
            memory.image_id.clone(),
        );
        on_pod.insert(
            annotations::ON_RESTORE_FAILURE.to_owned(),
            memory.on_failure.as_str().to_owned(),
        );
        if let Some(sources) = &memory.sources {
            let digest = Some(&sources.digest);
            for (key, value) in [
                (annotations::RESTORE_DIGEST, digest),
                (annotations::RESTORE_CLASS, sources.class.as_ref()),
                (annotations::RESTORE_CLUSTER, sources.cluster.as_ref()),
                (annotations::RESTORE_NODE, sources.node.as_ref()),
            ] {
                on_pod.extend(value.map(|value| (key.to_owned(), value.clone())));
            }
        }
        if memory.copy {
            on_pod.insert(annotations::RESTORE_COPY.to_owned(), "true".to_owned());
        }
        if let Some(words) = &memory.backup {
            on_pod.insert(annotations::RESTORE_BACKUP.to_owned(), words.clone());
        }
        if let Some(snapshot) = &memory.pod_snapshot {
            on_pod.insert(annotations::POD_SNAPSHOT.to_owned(), snapshot.clone());
            wait_until_settled(&mut spec);
        }
        continue_from(&mut spec, memory, &name);
    }
    // A Pod without a RuntimeClass is the same as upstream's.
    let of_runtime = sandbox.spec.pod_template.spec.runtime_class_name();
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

/// Adds a readiness gate, so that the Pod is not Ready before its agent has reported the restore.
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

/// Adds one volume for each claim template. It replaces a volume of the same name.
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

/// Sets the fields that must be as they were in the image: node, container images and, unless it is
/// a copy, the hostname.
///
/// It removes steps of a container's start for which other containers wait. No process of the
/// sandbox runs before its last container has started.
fn continue_from(spec: &mut Map<String, Value>, memory: &Memory, name: &str) {
    require_nodes(spec, &memory.nodes);
    if let [preferred, _, ..] = &memory.nodes[..] {
        prefer_node(spec, preferred);
    }
    for list in ["containers", "initContainers"] {
        for container in spec
            .get_mut(list)
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            let named = |name: &String| container["name"] == name.as_str();
            let saved = memory.containers.iter().find(|(name, _)| named(name));
            // An ended container does not run again, but the kubelet requires its image.
            if saved.is_none() && !memory.completed.iter().any(named) {
                continue;
            }
            if let Some((_, image)) = saved {
                remove_start_steps(container, list == "initContainers");
                if let Some(image) = image {
                    container["image"] = image_reference(image).into();
                }
            }
            // A pull could only fail or fetch another image. A bare image ID has no registry.
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

/// Prefers the nodes that hold a golden image, and sets the versions of the container images that
/// the golden sandbox had. An image of another repository, or of none, stays the template's.
fn start_from(spec: &mut Map<String, Value>, golden: &Images) {
    for node in &golden.nodes {
        prefer_node(spec, node);
    }
    for list in ["containers", "initContainers"] {
        let all = spec.get_mut(list).and_then(Value::as_array_mut);
        for container in all.into_iter().flatten() {
            let name = container["name"].as_str().unwrap_or_default();
            let image = golden
                .containers
                .get(name)
                .map(|image| image_reference(image));
            // A node reports the image. It may choose a version, and no other program.
            let own = repository(container["image"].as_str().unwrap_or_default()).to_owned();
            let Some(image) = image.filter(|image| repository(image) == own) else {
                continue;
            };
            container["image"] = image.into();
            if container["imagePullPolicy"] != "Never" {
                container["imagePullPolicy"] = "IfNotPresent".into();
            }
        }
    }
}

/// Removes the postStart hook, and the startup probe of a sidecar, for which the kubelet waits
/// before it starts the next container.
fn remove_start_steps(container: &mut Value, is_sidecar: bool) {
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

/// Returns an image reference without its tag or digest.
fn repository(reference: &str) -> &str {
    let name = reference
        .split_once('@')
        .map_or(reference, |(name, _)| name);
    match name.rsplit_once(':') {
        // A colon before a slash is that of the registry's port.
        Some((repository, tag)) if !tag.contains('/') => repository,
        _ => name,
    }
}

/// Converts the runtime's name of an image into one for a Pod: `repository@sha256:…`, or the bare
/// `sha256:…` of an image without a repository.
fn image_reference(image_id: &str) -> String {
    let reference = image_id
        .split_once("://")
        .map_or(image_id, |(_, reference)| reference);
    reference.to_owned()
}

/// Adds the nodes to the template's node affinity.
///
/// Terms are alternatives, and a field has one value in Kubernetes. So each term of the template
/// becomes one term for each node.
pub(crate) fn require_nodes(spec: &mut Map<String, Value>, nodes: &[String]) {
    let node_affinity = object(object(spec, "affinity"), "nodeAffinity");
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
    let for_each_node = |term: &Value| -> Vec<Value> {
        let of = |node: &String| on_node(term.clone(), node);
        nodes.iter().map(of).collect()
    };
    *terms = terms.iter().flat_map(for_each_node).collect();
}

/// Returns the only nodes on which a Pod may run, if each term of its required node affinity names
/// some.
pub(crate) fn named_nodes(spec: &Map<String, Value>) -> Option<Vec<String>> {
    let affinity = spec.get("affinity")?.get("nodeAffinity")?;
    let required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")?;
    let named = |term: &Value| -> Option<Vec<String>> {
        let mut fields = term.get("matchFields")?.as_array()?.iter();
        let field = fields.find(|one| one["key"] == "metadata.name" && one["operator"] == "In")?;
        let values = field["values"].as_array()?.iter();
        Some(
            values
                .filter_map(Value::as_str)
                .map(str::to_owned)
                .collect(),
        )
    };
    let terms = required.get("nodeSelectorTerms")?.as_array()?;
    let names: Option<Vec<_>> = terms.iter().map(named).collect();
    names.map(|names| names.concat())
}

/// Returns a term that also requires the node.
fn on_node(mut term: Value, node: &str) -> Value {
    if let Some(term) = term.as_object_mut() {
        let fields = term.entry("matchFields").or_insert_with(|| json!([]));
        if let Value::Array(fields) = fields {
            fields.push(is_node(node));
        }
    }
    term
}

/// Adds a preference for a node to the template's node affinity.
fn prefer_node(spec: &mut Map<String, Value>, node: &str) {
    let node_affinity = object(object(spec, "affinity"), "nodeAffinity");
    let preferred = node_affinity
        .entry("preferredDuringSchedulingIgnoredDuringExecution")
        .or_insert_with(|| json!([]));
    if let Value::Array(preferred) = preferred {
        let preference = json!({"matchFields": [is_node(node)]});
        preferred.push(json!({"weight": 100, "preference": preference}));
    }
}

fn is_node(name: &str) -> Value {
    json!({"key": "metadata.name", "operator": "In", "values": [name]})
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

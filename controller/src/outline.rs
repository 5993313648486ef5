//! Outlines: a cache keeps of a large object an outline, from which it is found, compared and woken. A pass that needs more reads the object from the apiserver. Tenants make most objects, and
//! each may have more than a megabyte: kept whole, a few hundred of them would end this process.
//!
//! An outline has one entry in `managedFields`, of an operation that the apiserver knows not: no object that was read is taken for one.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher, RandomState},
    io,
    sync::LazyLock,
};

use k8s_openapi::{
    api::networking::v1::NetworkPolicy, apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry,
};
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde_json::{Map, Value, json};
use torpor_api::{
    Sandbox, SandboxClaim, SandboxTemplate, annotations, labels, raw::RawPodSpec,
    sandbox::PodTemplate,
};

use crate::{
    blueprint,
    calls::{self, Apiserver, Namespaced},
};

/// Bytes of JSON up to which an object is kept whole.
const LARGEST: usize = 32 * 1024;
/// Longest value of an annotation in an outline.
const LONGEST_VALUE: usize = 1024;
/// The operation that marks an outline.
const OUTLINE: &str = "Outline";

/// Whether only the outline of an object is here.
pub fn is_outline<K: Resource>(object: &K) -> bool {
    digest(object).is_some()
}

/// Stands in an outline for the part that was left out, in comparisons within this process.
pub fn digest<K: Resource>(object: &K) -> Option<&str> {
    let entries = object.meta().managed_fields.iter().flatten();
    let mut marks = entries.filter(|entry| entry.operation.as_deref() == Some(OUTLINE));
    marks.next()?.manager.as_deref()
}

/// Stands for a value in comparisons within this process. Its seed differs between processes, so that nobody can make two values that have the same.
pub fn digest_of(value: &Value) -> String {
    static SEED: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    format!("{:016x}", SEED.hash_one(value.to_string()))
}

/// The object itself, read from the apiserver. `None`: it is gone, or another has its name.
pub async fn whole<K: Namespaced>(api: &Apiserver, outline: &K) -> Result<Option<K>, calls::Error> {
    let namespace = outline.namespace().unwrap_or_default();
    let found = api.get::<K>(&namespace, &outline.name_any()).await?;
    Ok(found.filter(|found| found.meta().uid == outline.meta().uid))
}

/// Keeps the outline of a Sandbox that is large.
pub fn of_sandbox(sandbox: &mut Sandbox) {
    if !is_large(sandbox) {
        return;
    }
    let digest = digest_of(&blueprint::meaning_of(sandbox));
    mark(sandbox, digest);
    outline_pod_template(&mut sandbox.spec.pod_template);
    sandbox.spec.volume_claim_templates = Vec::new();
}

/// Keeps the outline of a template that is large.
pub fn of_template(template: &mut SandboxTemplate) {
    if is_large(template) {
        mark(template, String::new());
        outline_pod_template(&mut template.spec.pod_template);
        template.spec.network_policy = None;
        template.spec.volume_claim_templates = Vec::new();
    }
}

/// Keeps the outline of a claim that is large.
pub fn of_claim(claim: &mut SandboxClaim) {
    if is_large(claim) {
        mark(claim, String::new());
        claim.spec.additional_pod_metadata = None;
        claim.spec.env = Vec::new();
        claim.spec.volume_claim_templates = Vec::new();
    }
}

/// Keeps the outline of a NetworkPolicy that is large.
pub fn of_policy(policy: &mut NetworkPolicy) {
    if is_large(policy) {
        let digest = digest_of(&blueprint::normal_form(&json!(policy.spec)));
        mark(policy, digest);
        policy.spec = None;
    }
}

fn mark<K: Resource>(object: &mut K, digest: String) {
    let meta = object.meta_mut();
    meta.managed_fields = Some(vec![ManagedFieldsEntry {
        operation: Some(OUTLINE.to_owned()),
        manager: Some(digest),
        ..ManagedFieldsEntry::default()
    }]);
    if let Some(all) = &mut meta.labels {
        all.retain(|key, _| labels::is_system(key));
    }
    keep_ours(&mut meta.annotations);
}

/// The annotations that mean something to a controller.
fn keep_ours(all: &mut Option<BTreeMap<String, String>>) {
    if let Some(all) = all {
        all.retain(|key, value| is_ours(key) && value.len() <= LONGEST_VALUE);
    }
}

fn is_ours(key: &str) -> bool {
    annotations::is_system(key) || key == annotations::SAFE_TO_EVICT
}

/// The runtime and the settings.
fn outline_pod_template(template: &mut PodTemplate) {
    if let Some(metadata) = &mut template.metadata {
        metadata.labels = None;
        keep_ours(&mut metadata.annotations);
    }
    let class = template.spec.json().get("runtimeClassName");
    let class = class.filter(|class| class.as_str().is_some_and(|name| name.len() <= 253));
    let kept = class.map(|class| ("runtimeClassName".to_owned(), class.clone()));
    template.spec = RawPodSpec::new(kept.into_iter().collect::<Map<_, _>>());
}

/// Whether an object has more than [`LARGEST`] bytes of JSON. No more than those are made.
fn is_large<K: Serialize>(object: &K) -> bool {
    let mut room = Room(LARGEST);
    serde_json::to_writer(&mut room, object).is_err()
}

/// Takes as many bytes as there is room for, and keeps none.
struct Room(usize);

impl io::Write for Room {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let left = self.0.checked_sub(bytes.len());
        self.0 = left.ok_or(io::ErrorKind::StorageFull)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;

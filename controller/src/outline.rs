//! Outlines of large objects in the caches. An outline is enough to find, compare and wake an
//! object. A pass that needs more reads the object from the apiserver. Tenants make most objects,
//! and each may exceed a megabyte: a few hundred full objects would exhaust this process's memory.
//!
//! An outline has one entry in `managedFields` with an operation that the apiserver does not know.
//! No object from the apiserver can therefore pass for an outline.

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

/// Size in bytes of JSON up to which a cache keeps the full object.
const LARGEST: usize = 32 * 1024;
/// Longest value of an annotation in an outline, in bytes.
const LONGEST_VALUE: usize = 1024;
/// Operation that marks an outline.
const OUTLINE: &str = "Outline";

/// Reports whether an object is an outline.
pub fn is_outline<K: Resource>(object: &K) -> bool {
    digest(object).is_some()
}

/// Returns the digest of the parts that an outline lacks, for comparisons within this process.
pub fn digest<K: Resource>(object: &K) -> Option<&str> {
    let entries = object.meta().managed_fields.iter().flatten();
    let mut marks = entries.filter(|entry| entry.operation.as_deref() == Some(OUTLINE));
    marks.next()?.manager.as_deref()
}

/// Returns the digest of a value, for comparisons within this process.
///
/// Its seed differs between processes, so that a tenant cannot construct two values with the same
/// digest.
pub fn digest_of(value: &Value) -> String {
    static SEED: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    format!("{:016x}", SEED.hash_one(value.to_string()))
}

/// Reads the full object from the apiserver.
///
/// Returns `None` if the object is gone or another object has its name.
pub async fn read_full<K: Namespaced>(
    api: &Apiserver,
    outline: &K,
) -> Result<Option<K>, calls::Error> {
    let namespace = outline.namespace().unwrap_or_default();
    let found = api.get::<K>(&namespace, &outline.name_any()).await?;
    Ok(found.filter(|found| found.meta().uid == outline.meta().uid))
}

/// Reduces a large Sandbox to its outline.
pub fn of_sandbox(sandbox: &mut Sandbox) {
    if !is_large(sandbox) {
        return;
    }
    let digest = digest_of(&blueprint::meaning_of(sandbox));
    mark(sandbox, digest);
    outline_pod_template(&mut sandbox.spec.pod_template);
    sandbox.spec.volume_claim_templates = Vec::new();
}

/// Reduces a large template to its outline.
pub fn of_template(template: &mut SandboxTemplate) {
    if is_large(template) {
        mark(template, String::new());
        outline_pod_template(&mut template.spec.pod_template);
        template.spec.network_policy = None;
        template.spec.volume_claim_templates = Vec::new();
    }
}

/// Reduces a large claim to its outline.
pub fn of_claim(claim: &mut SandboxClaim) {
    if is_large(claim) {
        mark(claim, String::new());
        claim.spec.additional_pod_metadata = None;
        claim.spec.env = Vec::new();
        claim.spec.volume_claim_templates = Vec::new();
    }
}

/// Reduces a large NetworkPolicy to its outline.
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

/// Keeps the annotations that a controller reads.
fn keep_ours(all: &mut Option<BTreeMap<String, String>>) {
    if let Some(all) = all {
        all.retain(|key, value| is_ours(key) && value.len() <= LONGEST_VALUE);
    }
}

fn is_ours(key: &str) -> bool {
    annotations::is_system(key) || key == annotations::SAFE_TO_EVICT
}

/// Keeps the RuntimeClass and the settings.
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

/// Reports whether an object exceeds [`LARGEST`]. It serializes no more than that.
fn is_large<K: Serialize>(object: &K) -> bool {
    let mut room = Room(LARGEST);
    serde_json::to_writer(&mut room, object).is_err()
}

/// Writer that discards bytes and fails after a limit.
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

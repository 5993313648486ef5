//! No client required. Patches that assign a Sandbox to a claim and keep it as the claim asks.
//!
//! Each patch carries uid and resourceVersion, so that it applies to exactly the version of the
//! Sandbox that it was computed from.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::ResourceExt;
use serde_json::{Map, Value, json};
use torpor_api::{Sandbox, SandboxClaim, annotations, labels, sandbox::PodMetadata};

use super::{
    late_bind::Additions,
    metadata::{self, Invalid, lists},
    sandbox_spec::created_by,
    wake,
};
use crate::{merge_patch, owners::owner_reference};

/// Labels that only an unclaimed member has.
const MEMBER_LABELS: [&str; 3] = [
    labels::WARM_POOL_SANDBOX,
    labels::SANDBOX_TEMPLATE_HASH,
    labels::SANDBOX_POD_TEMPLATE_HASH,
];

/// Annotations that only an unclaimed member has. The removal of `hibernate` wakes a member that
/// sleeps.
const MEMBER_ANNOTATIONS: [&str; 3] = [
    annotations::SAFE_TO_EVICT,
    annotations::HIBERNATE,
    annotations::GOLDEN_SANDBOX,
];

/// Returns the one patch that assigns a member of a pool to a claim. The patch changes the spec
/// only where the Pod's metadata changes: then only the metadata of the Pod has to follow.
/// `additions`: those that reach the sandbox while it runs.
pub fn assignment(
    claim: &SandboxClaim,
    member: &Sandbox,
    pod_metadata: &PodMetadata,
    additions: &Additions,
    replaces: Option<&str>,
) -> Value {
    let mut on_labels = Map::new();
    for label in MEMBER_LABELS {
        if member.labels().contains_key(label) {
            on_labels.insert(label.to_owned(), Value::Null);
        }
    }
    on_labels.insert(labels::LAUNCH_TYPE.to_owned(), "warm".into());
    on_labels.insert(labels::CLAIM_UID.to_owned(), json!(claim.uid()));
    on_labels.insert(labels::CREATED_BY.to_owned(), created_by(claim).into());
    let mut patch = fenced(member);
    patch["metadata"]["labels"] = on_labels.into();
    patch["metadata"]["annotations"] = annotations_of(claim, member, replaces);
    for (key, value) in additions.annotations() {
        patch["metadata"]["annotations"][key] = value.into();
    }
    let mut owners: Vec<_> = member.owner_references().to_vec();
    owners.retain(|owner| owner.controller != Some(true));
    owners.push(owner_reference(claim));
    patch["metadata"]["ownerReferences"] = json!(owners);
    if !has_applied_fields(member) {
        // `[{}]` makes the apiserver drop the managed fields. Until the assignment this controller
        // alone wrote the object; recomputing them from a whole Pod template is a quarter of the
        // cost of this write (docs/history/performance.md).
        patch["metadata"]["managedFields"] = json!([{}]);
    }
    set_pod_metadata(&mut patch, member, pod_metadata);
    patch
}

/// Adds to an assignment that the member wakes, if it sleeps. One that fell asleep by itself has no
/// `hibernate` whose removal would wake it.
pub fn wake(patch: &mut Value, member: &Sandbox, now: Timestamp) {
    if wake::is_asleep(member) {
        patch["metadata"]["annotations"][annotations::WAKE_AT] = now.to_string().into();
    }
}

/// Reports whether server-side apply manages fields of the Sandbox; it needs their record later.
fn has_applied_fields(sandbox: &Sandbox) -> bool {
    sandbox.managed_fields().iter().any(was_applied)
}

/// Reports whether the entry is of server-side apply.
pub fn was_applied(entry: &ManagedFieldsEntry) -> bool {
    entry.operation.as_deref() == Some("Apply")
}

fn annotations_of(claim: &SandboxClaim, member: &Sandbox, replaces: Option<&str>) -> Value {
    let mut all = Map::new();
    // No client may see the Sandbox Ready for a claim without the name of its Pod.
    if !member.annotations().contains_key(annotations::POD_NAME) {
        all.insert(annotations::POD_NAME.to_owned(), member.name_any().into());
    }
    for key in MEMBER_ANNOTATIONS {
        if member.annotations().contains_key(key) {
            all.insert(key.to_owned(), Value::Null);
        }
    }
    for (key, list) in lists(claim) {
        if let Some(list) = list {
            all.insert(key.to_owned(), list.into());
        }
    }
    if let Some(trace) = claim.annotations().get(annotations::TRACE_CONTEXT) {
        all.insert(annotations::TRACE_CONTEXT.to_owned(), trace.clone().into());
    }
    if let Some(gone) = replaces {
        all.insert(annotations::REPLACES.to_owned(), gone.into());
    }
    all.into()
}

/// Returns the patch that records on a Sandbox which one it replaces.
pub fn mark(sandbox: &Sandbox, replaces: &str) -> Value {
    let mut patch = fenced(sandbox);
    patch["metadata"]["annotations"] = json!({annotations::REPLACES: replaces});
    patch
}

/// Returns the patch that updates what the claim adds to the Pod's metadata; `None` when it is up
/// to date.
pub fn propagation(claim: &SandboxClaim, sandbox: &Sandbox) -> Result<Option<Value>, Invalid> {
    let pod_metadata = metadata::merged(Some(&metadata::without_claims(sandbox)), claim)?;
    let mut patch = fenced(sandbox);
    let mut changed = set_pod_metadata(&mut patch, sandbox, &pod_metadata);
    for (key, list) in lists(claim) {
        if sandbox.annotations().get(key) != list.as_ref() {
            patch["metadata"]["annotations"][key] = json!(list);
            changed = true;
        }
    }
    Ok(changed.then_some(patch))
}

fn fenced(sandbox: &Sandbox) -> Value {
    json!({"metadata": {
        "uid": sandbox.uid(),
        "resourceVersion": sandbox.resource_version(),
    }})
}

/// Adds a change of the Pod's metadata to the patch. Reports whether there was one.
fn set_pod_metadata(patch: &mut Value, sandbox: &Sandbox, wanted: &PodMetadata) -> bool {
    let now = sandbox
        .spec
        .pod_template
        .metadata
        .clone()
        .unwrap_or_default();
    let Some(difference) = merge_patch::difference(&json!(now), &json!(wanted)) else {
        return false;
    };
    patch["spec"] = json!({"podTemplate": {"metadata": difference}});
    true
}

#[cfg(test)]
mod tests;

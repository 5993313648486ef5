//! No client required. Computes the labels and annotations of the Pod.
//!
//! The template sets some of them, the controller the others. Two annotations list the keys that
//! came from the template. A key that the template drops can thereby be removed from an existing
//! Pod.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};
use torpor_api::{Sandbox, annotations, extensions, labels, name_hash};

use crate::merge_patch;

/// String map of labels or annotations.
pub type Strings = BTreeMap<String, String>;

/// Labels that only Sandboxes of a claim or a pool pass to their Pod.
const EXTENSION_LABELS: [&str; 2] = [labels::WARM_POOL_SANDBOX, labels::SANDBOX_TEMPLATE_REF_HASH];

/// Returns the labels and annotations of a new Pod.
pub fn for_new_pod(sandbox: &Sandbox) -> (Strings, Strings) {
    let template = &sandbox.spec.pod_template;
    let user_labels = allowed(template.labels(), labels::is_system);
    let user_annotations = wanted_annotations(sandbox);
    let mut on_pod = Strings::new();
    for (key, list) in [
        (annotations::PROPAGATED_LABELS, joined(&user_labels)),
        (
            annotations::PROPAGATED_ANNOTATIONS,
            joined(&user_annotations),
        ),
    ] {
        if !list.is_empty() {
            on_pod.insert(key.to_owned(), list);
        }
    }
    on_pod.extend(user_annotations);
    let mut pod_labels = user_labels;
    // These come after the user's labels, so that no user can join another Sandbox's Service.
    pod_labels.extend(controller_labels(sandbox));
    (pod_labels, on_pod)
}

/// Returns the merge patch that updates the metadata of an existing Pod, or `None` if it is up to
/// date.
///
/// `torpor` are Torpor's annotations; the value `None` removes one.
pub fn patch_for(pod: &Pod, sandbox: &Sandbox, torpor: &[(&str, Option<String>)]) -> Option<Value> {
    let mut pod_labels = pod.labels().clone();
    let mut on_pod = pod.annotations().clone();
    update_labels(&mut pod_labels, &on_pod, sandbox);
    update_annotations(&mut on_pod, sandbox);
    set_torpor(&mut on_pod, torpor);
    let before = json!({"labels": pod.labels(), "annotations": pod.annotations()});
    let after = json!({"labels": pod_labels, "annotations": on_pod});
    Some(json!({"metadata": merge_patch::difference(&before, &after)?}))
}

/// Returns the merge patch that changes only Torpor's annotations.
pub fn torpor_patch_for(pod: &Pod, torpor: &[(&str, Option<String>)]) -> Option<Value> {
    let mut on_pod = pod.annotations().clone();
    set_torpor(&mut on_pod, torpor);
    let difference = merge_patch::difference(&json!(pod.annotations()), &json!(on_pod))?;
    Some(json!({"metadata": {"annotations": difference}}))
}

fn set_torpor(on_pod: &mut Strings, torpor: &[(&str, Option<String>)]) {
    for (key, value) in torpor {
        match value {
            Some(value) => drop(on_pod.insert((*key).to_owned(), value.clone())),
            None => drop(on_pod.remove(*key)),
        }
    }
}

fn update_labels(pod_labels: &mut Strings, on_pod: &Strings, sandbox: &Sandbox) {
    let wanted = allowed(sandbox.spec.pod_template.labels(), labels::is_system);
    for key in listed(on_pod, annotations::PROPAGATED_LABELS) {
        // An older controller may have listed system labels. Ours are set again below.
        let stale = !wanted.contains_key(key) && key != labels::SANDBOX_NAME_HASH;
        if stale {
            pod_labels.remove(key);
        }
    }
    pod_labels.extend(wanted);
    for key in EXTENSION_LABELS.into_iter().chain([labels::CREATED_BY]) {
        pod_labels.remove(key);
    }
    pod_labels.extend(controller_labels(sandbox));
}

fn update_annotations(on_pod: &mut Strings, sandbox: &Sandbox) {
    let template = &sandbox.spec.pod_template;
    let wanted = wanted_annotations(sandbox);
    let own = [
        annotations::PROPAGATED_LABELS,
        annotations::PROPAGATED_ANNOTATIONS,
    ];
    let stale: Vec<String> = listed(on_pod, annotations::PROPAGATED_ANNOTATIONS)
        .filter(|key| !wanted.contains_key(*key) && !own.contains(key))
        // The list does not apply to Torpor's annotations, which the controller sets.
        .filter(|key| !annotations::ON_POD.contains(key))
        .map(str::to_owned)
        .collect();
    for key in stale {
        on_pod.remove(&key);
    }
    let user_labels = allowed(template.labels(), labels::is_system);
    for (key, list) in [
        (annotations::PROPAGATED_LABELS, joined(&user_labels)),
        (annotations::PROPAGATED_ANNOTATIONS, joined(&wanted)),
    ] {
        // An empty list is written only over an existing one.
        if !list.is_empty() || on_pod.contains_key(key) {
            on_pod.insert(key.to_owned(), list);
        }
    }
    on_pod.extend(wanted);
}

/// Returns the annotations of the template and, for a member of a pool, the autoscaler's permission
/// to evict the Pod.
///
/// The permission is on the Sandbox, where a claim removes it without a change of the spec.
fn wanted_annotations(sandbox: &Sandbox) -> Strings {
    let mut wanted = allowed(
        sandbox.spec.pod_template.annotations(),
        annotations::is_system,
    );
    let evictable = sandbox.annotations().get(annotations::SAFE_TO_EVICT);
    if let Some(value) = evictable
        && crate::candidates::pool_of(sandbox).is_some()
    {
        wanted
            .entry(annotations::SAFE_TO_EVICT.to_owned())
            .or_insert_with(|| value.clone());
    }
    wanted
}

/// Returns the labels that the controller owns: the name hash, the extension labels, the creator.
fn controller_labels(sandbox: &Sandbox) -> Strings {
    let mut own = extension_labels(sandbox);
    own.insert(
        labels::SANDBOX_NAME_HASH.to_owned(),
        name_hash(&sandbox.name_any()),
    );
    if let Some(creator) = sandbox
        .labels()
        .get(labels::CREATED_BY)
        .filter(|v| !v.is_empty())
    {
        own.insert(
            labels::CREATED_BY.to_owned(),
            labels::created_by(creator).to_owned(),
        );
    }
    own
}

fn extension_labels(sandbox: &Sandbox) -> Strings {
    let controller = sandbox
        .owner_references()
        .iter()
        .find(|owner| owner.controller == Some(true));
    let Some(owner) = controller else {
        return Strings::new();
    };
    let group = owner
        .api_version
        .split_once('/')
        .map_or("", |(group, _)| group);
    if group != extensions::GROUP {
        return Strings::new();
    }
    EXTENSION_LABELS
        .into_iter()
        .filter(|key| *key != labels::WARM_POOL_SANDBOX || owner.kind == "SandboxWarmPool")
        .filter_map(|key| {
            let value = sandbox
                .labels()
                .get(key)
                .filter(|value| !value.is_empty())?;
            Some((key.to_owned(), value.clone()))
        })
        .collect()
}

fn allowed(all: Option<&Strings>, is_system: fn(&str) -> bool) -> Strings {
    all.into_iter()
        .flatten()
        .filter(|(key, _)| !is_system(key))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

fn joined(map: &Strings) -> String {
    map.keys().map(String::as_str).collect::<Vec<_>>().join(",")
}

fn listed<'a>(on_pod: &'a Strings, annotation: &str) -> impl Iterator<Item = &'a str> {
    on_pod
        .get(annotation)
        .into_iter()
        .flat_map(|list| list.split(','))
        .filter(|key| !key.is_empty())
}

#[cfg(test)]
mod tests;

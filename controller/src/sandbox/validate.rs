//! No client required. Turns what was seen into what the plan works with: settings checked, the Pod's ownership settled.

use std::sync::Arc;

use k8s_openapi::{
    api::core::v1::{Pod, PodSpec},
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use kube::{Resource, ResourceExt};
use torpor_api::{OperatingMode, Sandbox, annotations::Settings, labels, name_hash, raw::NotTyped};

use super::dereference::{Observed, pod_name};

/// Who controls an object, seen from one Sandbox.
#[derive(Clone, Debug, PartialEq)]
pub enum Ownership {
    Ours,
    Nobody,
    Other(OwnerReference),
}

/// Who controls `object`. The owner's UID decides, never a name.
pub fn ownership<K: Resource>(object: &K, sandbox: &Sandbox) -> Ownership {
    let controller = object
        .meta()
        .owner_references
        .iter()
        .flatten()
        .find(|owner| owner.controller == Some(true));
    match controller {
        None => Ownership::Nobody,
        Some(owner) if Some(&owner.uid) == sandbox.metadata.uid.as_ref() => Ownership::Ours,
        Some(owner) => Ownership::Other(owner.clone()),
    }
}

/// The Pod of a Sandbox, as far as it can be told.
#[derive(Clone, Debug)]
pub enum PodState {
    Absent,
    Ours(Arc<Pod>),
    /// Has the Sandbox's Pod name but nobody controls it.
    Unowned(Arc<Pod>),
    Foreign(Arc<Pod>, OwnerReference),
    /// More than one Pod is ours; nothing is chosen.
    Several(usize),
}

/// A Sandbox, judged.
#[derive(Debug)]
pub struct Desired<'a> {
    pub sandbox: &'a Sandbox,
    pub name: String,
    pub namespace: String,
    pub uid: String,
    pub hash: String,
    pub suspended: bool,
    pub settings: Settings,
    pub pod: PodState,
    /// The Pod name annotation names another Pod than the one that is ours, or none that exists.
    pub pod_name_is_stale: bool,
    /// Typed view of the template's spec; an error says why it is none.
    pub template: Result<PodSpec, NotTyped>,
}

/// Judges what was seen.
pub fn validate(observed: &Observed) -> Desired<'_> {
    let sandbox = &*observed.sandbox;
    let (pod, pod_name_is_stale) = settle_pod(observed);
    let name = sandbox.name_any();
    Desired {
        sandbox,
        namespace: sandbox.namespace().unwrap_or_default(),
        uid: sandbox.uid().unwrap_or_default(),
        hash: name_hash(&name),
        name,
        suspended: sandbox.spec.operating_mode == OperatingMode::Suspended,
        settings: Settings::read(
            sandbox.metadata.annotations.as_ref(),
            sandbox.spec.pod_template.annotations(),
        ),
        pod,
        pod_name_is_stale,
        template: sandbox.spec.pod_template.spec.typed(),
    }
}

/// Which Pod is the Sandbox's: a Pod that it controls before any Pod that only has the right name.
fn settle_pod(observed: &Observed) -> (PodState, bool) {
    let sandbox = &*observed.sandbox;
    let name = pod_name(sandbox);
    let annotated = sandbox
        .annotations()
        .contains_key(torpor_api::annotations::POD_NAME);
    let hash = name_hash(&sandbox.name_any());
    let mut ours = observed.pods.values().filter(|pod| {
        let tracked = pod.labels().get(labels::SANDBOX_NAME_HASH) == Some(&hash);
        (tracked || pod.name_any() == name) && ownership(&***pod, sandbox) == Ownership::Ours
    });
    let named = observed.pods.get(&name);
    match (ours.next(), ours.count()) {
        (Some(_), others) if others > 0 => {
            (PodState::Several(others + 1), named.is_none() && annotated)
        }
        (Some(pod), _) => {
            let other = pod.name_any() != name;
            (PodState::Ours(Arc::clone(pod)), other && annotated)
        }
        (None, _) => match named {
            None => (PodState::Absent, annotated),
            Some(pod) => match ownership(&**pod, sandbox) {
                Ownership::Other(owner) => (PodState::Foreign(Arc::clone(pod), owner), false),
                Ownership::Nobody | Ownership::Ours => (PodState::Unowned(Arc::clone(pod)), false),
            },
        },
    }
}

/// Whether an object that nobody controls may be adopted by this Sandbox: somebody authorised it, or it carries our mark already.
pub fn may_adopt<K: ResourceExt>(object: &K, hash: &str) -> bool {
    let labels = object.labels();
    labels
        .get(labels::ADOPTABLE)
        .is_some_and(|value| value == "true")
        || labels
            .get(labels::SANDBOX_NAME_HASH)
            .is_some_and(|value| value == hash)
}

/// Owner reference of a Sandbox for what it controls.
pub fn owner_reference(sandbox: &Sandbox) -> OwnerReference {
    OwnerReference {
        api_version: Sandbox::api_version(&()).into_owned(),
        kind: Sandbox::kind(&()).into_owned(),
        name: sandbox.name_any(),
        uid: sandbox.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

//! No client required. Interprets the observed state for the plan: checks settings and determines
//! the owner of the Pod.

use std::sync::Arc;

use k8s_openapi::{
    api::core::v1::{Pod, PodSpec},
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use kube::{Resource, ResourceExt};
use torpor_api::{OperatingMode, Sandbox, annotations::Settings, labels, name_hash, raw::NotTyped};

use super::dereference::{Observed, pod_name};

/// Controller of an object, from the view of one Sandbox.
#[derive(Clone, Debug, PartialEq)]
pub enum Ownership {
    Ours,
    Nobody,
    Other(OwnerReference),
}

/// Returns the controller of `object`. The owner's UID decides, never a name.
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

/// State of a Sandbox's Pod.
#[derive(Clone, Debug)]
pub enum PodState {
    Absent,
    Ours(Arc<Pod>),
    /// The Pod has the Sandbox's Pod name but no controller.
    Unowned(Arc<Pod>),
    Foreign(Arc<Pod>, OwnerReference),
    /// The Sandbox controls more than one Pod; none is chosen.
    Several(usize),
}

/// Sandbox with its settings and the state of its Pod.
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
    /// True if the Pod name annotation names a Pod that does not exist or that the Sandbox does not
    /// control.
    pub pod_name_is_stale: bool,
    /// Typed view of the template's spec, or why there is none.
    pub template: Result<PodSpec, NotTyped>,
}

/// Interprets the observed state.
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

/// Determines the Sandbox's Pod. A Pod that it controls comes before one that only has the name.
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

/// Reports whether the Sandbox may adopt an object without a controller.
///
/// The object needs the label that authorizes it, or the Sandbox's tracking label.
pub fn may_adopt<K: ResourceExt>(object: &K, hash: &str) -> bool {
    let labels = object.labels();
    labels
        .get(labels::ADOPTABLE)
        .is_some_and(|value| value == "true")
        || labels
            .get(labels::SANDBOX_NAME_HASH)
            .is_some_and(|value| value == hash)
}

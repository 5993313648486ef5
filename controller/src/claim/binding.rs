//! No client required. Decides which Sandbox is a claim's: keeps "one claim, one Sandbox" through
//! crashes and beside other controllers.
//!
//! A Sandbox is *assigned* to a claim by the write that makes the claim its controller; the
//! precondition of that write (resourceVersion) keeps a Sandbox from being assigned twice. An
//! assignment is *committed* by the write of `status.sandbox` of the claim; the precondition of
//! that write keeps a claim from committing two. Between the two writes an assignment is found
//! again by the owner reference alone. An assigned Sandbox that loses the race to be committed is
//! surplus: no client has its name, and it is deleted.
//!
//! A committed Sandbox that is gone is replaced. The replacement carries the name of the lost
//! Sandbox in an annotation, written before the commit: a late deletion of the replacement as
//! surplus, decided on an older view, then fails at its precondition. A lost Sandbox with the
//! claim's own name is replaced only by one of the same name: the create of a name that must be
//! free is a precondition of its own.

use std::{collections::BTreeMap, sync::Arc};

use kube::ResourceExt;
use torpor_api::{Sandbox, SandboxClaim, annotations, labels};

use super::wake;
use crate::watches::extensions::controller_of;

/// Decision about a claim's Sandbox.
#[derive(Clone, Debug, PartialEq)]
pub enum Binding {
    /// The claim has this Sandbox; the others are surplus.
    Bound {
        sandbox: Arc<Sandbox>,
        surplus: Vec<Arc<Sandbox>>,
    },
    /// The claim gets this Sandbox, once it carries the name of the Sandbox that it replaces.
    Mark {
        sandbox: Arc<Sandbox>,
        replaces: String,
    },
    /// The caches do not show enough: read the Sandbox of this name from the apiserver.
    Lookup(String),
    /// The claim has no Sandbox yet. `replaces` names the lost one.
    Unbound { replaces: Option<String> },
}

/// Facts about the Sandboxes of a claim.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClaimSandboxes {
    /// Sandboxes that the claim controls, by name.
    pub owned: BTreeMap<String, Arc<Sandbox>>,
    /// Names that this pass has read from the apiserver and that are not the claim's.
    pub not_owned: std::collections::BTreeSet<String>,
    /// Sandbox of a write with an unknown outcome.
    pub unsettled: Option<String>,
}

/// Reports whether a claim controls a Sandbox, by UID and not by name.
pub fn owns(claim: &SandboxClaim, sandbox: &Sandbox) -> bool {
    controller_of(sandbox).is_some_and(|owner| Some(&owner.uid) == claim.metadata.uid.as_ref())
}

/// Returns the name of the Sandbox in the claim's status.
pub fn committed_name(claim: &SandboxClaim) -> Option<&str> {
    let sandbox = claim.status.as_ref()?.sandbox.as_ref()?;
    Some(sandbox.name.as_str()).filter(|name| !name.is_empty())
}

/// Returns the name of the Sandbox that a controller noted on the claim before the assignment.
pub fn noted_name(claim: &SandboxClaim) -> Option<&str> {
    let annotation = claim.annotations().get(annotations::SANDBOX_NAME);
    let label = claim.labels().get(labels::SANDBOX_NAME);
    annotation
        .or(label)
        .map(String::as_str)
        .filter(|name| !name.is_empty())
}

/// Decides which Sandbox is the claim's; pure.
pub fn bind(claim: &SandboxClaim, sandboxes: &ClaimSandboxes) -> Binding {
    let unsettled = sandboxes.unsettled.as_ref().filter(|name| {
        !sandboxes.owned.contains_key(*name) && !sandboxes.not_owned.contains(*name)
    });
    if let Some(name) = unsettled {
        return Binding::Lookup(name.clone());
    }
    match committed_name(claim) {
        Some(name) => bind_committed(name, claim, sandboxes),
        None => match first(claim, sandboxes) {
            // The other Sandboxes become surplus only once this one is committed.
            Some(sandbox) => Binding::Bound {
                sandbox,
                surplus: Vec::new(),
            },
            None => Binding::Unbound { replaces: None },
        },
    }
}

fn bind_committed(name: &str, claim: &SandboxClaim, sandboxes: &ClaimSandboxes) -> Binding {
    if let Some(sandbox) = sandboxes.owned.get(name) {
        let others = sandboxes.owned.values().filter(|other| {
            // A Sandbox that replaces the committed one shows that the committed one is gone.
            let replacing = other.annotations().get(annotations::REPLACES);
            other.name_any() != name
                && replacing.is_none_or(|replaced| replaced != name)
                && other.metadata.deletion_timestamp.is_none()
        });
        return Binding::Bound {
            sandbox: Arc::clone(sandbox),
            surplus: others.cloned().collect(),
        };
    }
    if !sandboxes.not_owned.contains(name) {
        return Binding::Lookup(name.to_owned());
    }
    if name == claim.name_any() {
        return Binding::Unbound {
            replaces: Some(name.to_owned()),
        };
    }
    let living = || {
        let owned = sandboxes.owned.values();
        owned.filter(|sandbox| sandbox.metadata.deletion_timestamp.is_none())
    };
    let marked = |sandbox: &&Arc<Sandbox>| {
        let replacing = sandbox.annotations().get(annotations::REPLACES);
        replacing.is_some_and(|replaced| replaced == name)
    };
    if let Some(sandbox) = living().find(marked) {
        return Binding::Bound {
            sandbox: Arc::clone(sandbox),
            surplus: Vec::new(),
        };
    }
    match living().next() {
        Some(sandbox) => Binding::Mark {
            sandbox: Arc::clone(sandbox),
            replaces: name.to_owned(),
        },
        None => Binding::Unbound {
            replaces: Some(name.to_owned()),
        },
    }
}

/// Returns the Sandbox to commit among several assigned ones: the one noted on the claim, then the
/// one with the claim's name, then the first by name. A Sandbox that is being deleted or could not
/// wake is chosen only if there is no other.
fn first(claim: &SandboxClaim, sandboxes: &ClaimSandboxes) -> Option<Arc<Sandbox>> {
    let rank = |sandbox: &Arc<Sandbox>| {
        let name = sandbox.name_any();
        (
            sandbox.metadata.deletion_timestamp.is_some(),
            wake::has_failed(sandbox, claim),
            noted_name(claim) != Some(&name),
            claim.name_any() != name,
            name,
        )
    };
    sandboxes.owned.values().min_by_key(|s| rank(s)).cloned()
}

#[cfg(test)]
mod tests;

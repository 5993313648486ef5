//! No client required. Which Sandbox is a claim's: the rule that keeps "one claim, one Sandbox" whatever dies, and whoever else is at work.
//!
//! A Sandbox is *assigned* to a claim by the write that makes the claim its controller; the fence of that write (resourceVersion) keeps a Sandbox from being assigned twice.
//! An assignment is *committed* by the write of `status.sandbox` of the claim; the fence of that write keeps a claim from committing two. Between the two writes an assignment is
//! found again by the owner reference alone. An assigned Sandbox that loses the race to be committed is surplus: nobody was told of it, and it is deleted.
//!
//! A committed Sandbox that is gone is replaced. The one that takes its place carries its name in an annotation, written before the commit: that makes a late deletion as surplus,
//! decided on an older view, fail at its fence. One that has the claim's own name is replaced by one of that name only: the create of a name that must be free is a fence of its own.

use std::{collections::BTreeMap, sync::Arc};

use kube::ResourceExt;
use torpor_api::{Sandbox, SandboxClaim, annotations, labels};

use crate::watches::extensions::controller_of;

/// Which Sandbox is the claim's.
#[derive(Clone, Debug, PartialEq)]
pub enum Binding {
    /// This one; the others are surplus.
    Bound {
        sandbox: Arc<Sandbox>,
        surplus: Vec<Arc<Sandbox>>,
    },
    /// This one, once it carries the name of the Sandbox that it replaces.
    ToMark {
        sandbox: Arc<Sandbox>,
        replaces: String,
    },
    /// The caches do not show what has to be known: ask for the Sandbox of this name.
    ToAsk(String),
    /// None yet. `replaces` names the one that is gone.
    Unbound { replaces: Option<String> },
}

/// What is known about the Sandboxes around a claim.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Known {
    /// Sandboxes that the claim controls, by name.
    pub owned: BTreeMap<String, Arc<Sandbox>>,
    /// Names that the apiserver was asked for in this pass, and that are not the claim's.
    pub not_ours: std::collections::BTreeSet<String>,
    /// A write whose outcome is unknown.
    pub unsettled: Option<String>,
}

/// Whether a claim controls a Sandbox. The UID decides, never a name.
pub fn owns(claim: &SandboxClaim, sandbox: &Sandbox) -> bool {
    controller_of(sandbox).is_some_and(|owner| Some(&owner.uid) == claim.metadata.uid.as_ref())
}

/// Name of the Sandbox that the claim's status names.
pub fn committed_name(claim: &SandboxClaim) -> Option<&str> {
    let sandbox = claim.status.as_ref()?.sandbox.as_ref()?;
    Some(sandbox.name.as_str()).filter(|name| !name.is_empty())
}

/// Name of the Sandbox that another controller noted on the claim before assigning it.
pub fn noted_name(claim: &SandboxClaim) -> Option<&str> {
    let annotation = claim.annotations().get(annotations::SANDBOX_NAME);
    let label = claim.labels().get(labels::SANDBOX_NAME);
    annotation
        .or(label)
        .map(String::as_str)
        .filter(|name| !name.is_empty())
}

/// Decides; pure.
pub fn bind(claim: &SandboxClaim, known: &Known) -> Binding {
    let unsettled = known
        .unsettled
        .as_ref()
        .filter(|name| !known.owned.contains_key(*name) && !known.not_ours.contains(*name));
    if let Some(name) = unsettled {
        return Binding::ToAsk(name.clone());
    }
    match committed_name(claim) {
        Some(name) => bind_committed(name, claim, known),
        None => match first(claim, known) {
            // The others become surplus once this one is committed, and not before.
            Some(sandbox) => Binding::Bound {
                sandbox,
                surplus: Vec::new(),
            },
            None => Binding::Unbound { replaces: None },
        },
    }
}

fn bind_committed(name: &str, claim: &SandboxClaim, known: &Known) -> Binding {
    if let Some(sandbox) = known.owned.get(name) {
        let others = known.owned.values().filter(|other| {
            // Somebody knows already that this one is gone.
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
    if !known.not_ours.contains(name) {
        return Binding::ToAsk(name.to_owned());
    }
    if name == claim.name_any() {
        return Binding::Unbound {
            replaces: Some(name.to_owned()),
        };
    }
    let living = || {
        let owned = known.owned.values();
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
        Some(sandbox) => Binding::ToMark {
            sandbox: Arc::clone(sandbox),
            replaces: name.to_owned(),
        },
        None => Binding::Unbound {
            replaces: Some(name.to_owned()),
        },
    }
}

/// Of several assigned Sandboxes the one to commit: what was noted on the claim, what is named like it, else the first by name. One that is being deleted only if there is
/// no other.
fn first(claim: &SandboxClaim, known: &Known) -> Option<Arc<Sandbox>> {
    let rank = |sandbox: &Arc<Sandbox>| {
        let name = sandbox.name_any();
        (
            sandbox.metadata.deletion_timestamp.is_some(),
            noted_name(claim) != Some(&name),
            claim.name_any() != name,
            name,
        )
    };
    known.owned.values().min_by_key(|s| rank(s)).cloned()
}

#[cfg(test)]
mod tests;

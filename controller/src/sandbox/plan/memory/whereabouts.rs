//! Where an image lies, in words, and what its user can do when nothing can be had of its node.

use std::time::Duration;

use kube::ResourceExt;
use torpor_api::{
    SandboxSnapshot, annotations,
    conditions::{self, Draft, Status},
    reasons::hibernated,
};

use super::super::Shown;
use crate::sandbox::dereference::Observed;

/// How often to look whether the node of an image that is waited for has come or gone: nodes are not watched.
pub(super) const LOOK_FOR_NODE: Duration = Duration::from_secs(60);

/// Why nothing can be had of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lost {
    /// The cluster has it no more.
    Gone,
    /// It has no SandboxNode, though it may be there.
    NoAgent,
}

impl Lost {
    /// To stand behind the node's name.
    fn clause(self) -> &'static str {
        match self {
            Self::Gone => "which is gone from the cluster",
            Self::NoAgent => "from which no agent of Torpor reports",
        }
    }

    pub(super) fn remedy(self) -> String {
        let cold = cold_start();
        match self {
            Self::Gone => format!(
                "Bring the node back to go on with the memory; to {cold}, or delete the Sandbox"
            ),
            Self::NoAgent => format!(
                "Bring the agent back to go on with the memory (`kubectl torpor doctor` looks for it); to {cold}"
            ),
        }
    }
}

/// Behind "to": how a user gives the memory up.
pub(super) fn cold_start() -> String {
    format!(
        "start without the memory, set {}: ColdStart",
        annotations::ON_RESTORE_FAILURE
    )
}

/// Whether nothing can be had of the node of an image.
pub(super) fn lost(observed: &Observed, snapshot: &SandboxSnapshot) -> Option<Lost> {
    let name = snapshot.status.as_ref()?.node_name.as_ref()?;
    if observed.gone_nodes.contains(name) {
        return Some(Lost::Gone);
    }
    (!observed.nodes.contains_key(name)).then_some(Lost::NoAgent)
}

fn node_of(snapshot: &SandboxSnapshot) -> &str {
    let status = snapshot.status.as_ref();
    let node = status.and_then(|status| status.node_name.as_deref());
    node.unwrap_or_default()
}

/// An image whose node is lost.
pub(super) fn out_of_reach(snapshot: &SandboxSnapshot, lost: Lost) -> String {
    let verb = match snapshot.is_missing() {
        true => "was missing",
        false => "is",
    };
    format!(
        "The image of SandboxSnapshot {:?} {verb} on node {:?}, {}",
        snapshot.name_any(),
        node_of(snapshot),
        lost.clause()
    )
}

/// Where an image should be that cannot be found.
pub(super) fn image_missing(observed: &Observed, snapshot: &SandboxSnapshot) -> String {
    match lost(observed, snapshot) {
        Some(lost) => format!("{}. {}", out_of_reach(snapshot, lost), lost.remedy()),
        None => format!(
            "The image of SandboxSnapshot {:?} is not on node {:?}, and is waited for (a disk that is not mounted, a directory with another name)",
            snapshot.name_any(),
            node_of(snapshot)
        ),
    }
}

pub(super) fn kept_in(observed: &Observed, snapshot: &SandboxSnapshot) -> Shown {
    let place = format!(
        "Memory is kept in SandboxSnapshot {:?} on node {:?}",
        snapshot.name_any(),
        node_of(snapshot)
    );
    let message = match lost(observed, snapshot) {
        Some(lost) => format!("{place}, {}. {}", lost.clause(), lost.remedy()),
        None => place,
    };
    let (type_, reason) = (conditions::HIBERNATED, hibernated::HIBERNATED);
    Shown::Set(Draft::new(type_, Status::True, reason, message))
}

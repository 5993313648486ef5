//! Where an image lies, in words, and what its user can do when nothing can be had of its node.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use torpor_api::{
    SandboxSnapshot, annotations,
    conditions::{self, Draft, Status},
    reasons::{hibernated, restored},
};

use super::{
    super::{AT_ONCE, Plan, Shown},
    origin::node_of_image,
    says, shown_before,
};
use crate::sandbox::{dereference::Observed, validate::Desired};

/// How often to look whether the node of an image that is waited for has come or gone: nodes are not watched.
pub(super) const LOOK_FOR_NODE: Duration = Duration::from_secs(60);

/// How long a node is waited for before memory that lies there is given up, where that is what the user wants: a machine that leaves the cluster for a moment, and an agent whose
/// SandboxNode was deleted, are back by then.
pub(super) const GIVEN_UP_AFTER: SignedDuration = SignedDuration::from_secs(60);
pub(super) const LOOK_SOON: Duration = Duration::from_secs(10);

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
    pub(super) fn clause(self) -> &'static str {
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
    lost_by_name(observed, node_of_image(observed, snapshot)?)
}

/// Whether nothing can be had of a node that is asked for memory, or nothing was heard of its agent
/// for too long.
pub(super) fn lost_node(observed: &Observed, name: &str, now: Timestamp) -> Option<Lost> {
    let node = observed.nodes.get(name);
    let is_silent = node.is_some_and(|node| node.is_silent(now));
    lost_by_name(observed, name).or_else(|| is_silent.then_some(Lost::NoAgent))
}

fn lost_by_name(observed: &Observed, name: &str) -> Option<Lost> {
    if observed.gone_nodes.contains(name) {
        return Some(Lost::Gone);
    }
    // An agent makes its SandboxNode empty, and says afterwards what it can do.
    let node = observed.nodes.get(name);
    let reports = node.is_some_and(|node| node.status.is_some());
    (!reports).then_some(Lost::NoAgent)
}

/// What the Sandbox says of its restore, if that is that it is not there.
pub(super) fn told<'a>(desired: &'a Desired<'a>) -> Option<&'a Condition> {
    let before = shown_before(desired.sandbox, conditions::RESTORED);
    before.filter(|restored| restored.status == "False")
}

/// Whether the node of an image is lost, and that has not been said for long enough.
pub(super) fn may_be_back(
    desired: &Desired<'_>,
    observed: &Observed,
    snapshot: &SandboxSnapshot,
    now: Timestamp,
) -> bool {
    let told = told(desired).filter(|told| told.reason == restored::NODE_UNAVAILABLE);
    let waited = told.map(|told| now.duration_since(told.last_transition_time.0));
    lost(observed, snapshot).is_some() && waited.is_none_or(|waited| waited < GIVEN_UP_AFTER)
}

/// Says that the node is waited for, and no longer than that.
pub(super) fn await_node(plan: &mut Plan, desired: &Desired<'_>, why: &str) {
    let of_another = told(desired).is_some_and(|told| told.reason != restored::NODE_UNAVAILABLE);
    if of_another {
        // The time of a condition is that of its status: this reason would be taken to stand there for as long as the one before it.
        plan.memory.restored = Shown::Remove;
        return plan.look_again(AT_ONCE);
    }
    let seconds = GIVEN_UP_AFTER.as_secs();
    let message = format!(
        "{why}. It is waited for, {seconds} s in all; then the Sandbox starts without the memory"
    );
    let (type_, reason) = (conditions::RESTORED, restored::NODE_UNAVAILABLE);
    plan.memory.restored = says(type_, reason, message);
    plan.look_again(LOOK_SOON);
}

fn node_of<'a>(observed: &'a Observed, snapshot: &'a SandboxSnapshot) -> &'a str {
    node_of_image(observed, snapshot).map_or("", String::as_str)
}

/// An image whose node is lost.
pub(super) fn out_of_reach(observed: &Observed, snapshot: &SandboxSnapshot, lost: Lost) -> String {
    let verb = match snapshot.is_missing() {
        true => "was missing",
        false => "is",
    };
    format!(
        "The image of SandboxSnapshot {:?} {verb} on node {:?}, {}",
        snapshot.name_any(),
        node_of(observed, snapshot),
        lost.clause()
    )
}

/// Where an image should be that cannot be found.
pub(super) fn image_missing(observed: &Observed, snapshot: &SandboxSnapshot) -> String {
    match lost(observed, snapshot) {
        Some(lost) => format!(
            "{}. {}",
            out_of_reach(observed, snapshot, lost),
            lost.remedy()
        ),
        None => format!(
            "The image of SandboxSnapshot {:?} is not on node {:?}, and is waited for (a disk that is not mounted, a directory with another name)",
            snapshot.name_any(),
            node_of(observed, snapshot)
        ),
    }
}

pub(super) fn kept_in(observed: &Observed, snapshot: &SandboxSnapshot) -> Shown {
    let place = format!(
        "Memory is kept in SandboxSnapshot {:?} on node {:?}",
        snapshot.name_any(),
        node_of(observed, snapshot)
    );
    let message = match lost(observed, snapshot) {
        Some(lost) => format!("{place}, {}. {}", lost.clause(), lost.remedy()),
        None => place,
    };
    let (type_, reason) = (conditions::HIBERNATED, hibernated::HIBERNATED);
    Shown::Set(Draft::new(type_, Status::True, reason, message))
}

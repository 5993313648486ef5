//! Messages about the location of an image, and the remedy when its node is lost.

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
    super::{AT_ONCE, ConditionChange, Plan},
    condition_false,
    origin::node_of_image,
    previous_condition,
};
use crate::sandbox::{dereference::Observed, validate::Desired};

/// Interval at which the node of an awaited image is looked for. Nodes are not watched.
pub(super) const LOOK_FOR_NODE: Duration = Duration::from_secs(60);

/// Time after which memory on a lost node is given up, where the user wants that.
///
/// A machine that leaves the cluster for a moment, and an agent whose SandboxNode was deleted,
/// return within this time.
pub(super) const GIVEN_UP_AFTER: SignedDuration = SignedDuration::from_secs(60);
pub(super) const LOOK_SOON: Duration = Duration::from_secs(10);

/// Reason why a node is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LostNode {
    /// The Node no longer exists.
    Gone,
    /// The node has no SandboxNode with a report, but may exist.
    NoAgent,
}

impl LostNode {
    /// Returns a clause to follow the node's name.
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
                "Bring the node back to continue with the memory; to {cold}, or delete the Sandbox"
            ),
            Self::NoAgent => format!(
                "Bring the agent back to continue with the memory (`kubectl torpor doctor` checks it); to {cold}"
            ),
        }
    }
}

/// Returns how a user gives up the memory, to follow "to".
pub(super) fn cold_start() -> String {
    format!(
        "start without the memory, set {}: ColdStart",
        annotations::ON_RESTORE_FAILURE
    )
}

/// Returns why the node of an image is lost, if it is.
pub(super) fn lost(observed: &Observed, snapshot: &SandboxSnapshot) -> Option<LostNode> {
    lost_by_name(observed, node_of_image(observed, snapshot)?)
}

/// Returns why a node that is asked for memory is lost, if it is. A silent agent counts as lost.
pub(super) fn lost_node(observed: &Observed, name: &str, now: Timestamp) -> Option<LostNode> {
    let node = observed.nodes.get(name);
    let is_silent = node.is_some_and(|node| node.is_silent(now));
    lost_by_name(observed, name).or_else(|| is_silent.then_some(LostNode::NoAgent))
}

fn lost_by_name(observed: &Observed, name: &str) -> Option<LostNode> {
    if observed.gone_nodes.contains(name) {
        return Some(LostNode::Gone);
    }
    // An agent creates its SandboxNode empty, and writes its capabilities afterwards.
    let node = observed.nodes.get(name);
    let reports = node.is_some_and(|node| node.status.is_some());
    (!reports).then_some(LostNode::NoAgent)
}

/// Returns the Sandbox's condition Restored, if it is False.
pub(super) fn failed_restore<'a>(desired: &'a Desired<'a>) -> Option<&'a Condition> {
    let before = previous_condition(desired.sandbox, conditions::RESTORED);
    before.filter(|restored| restored.status == "False")
}

/// Reports whether the node of an image is lost, but for less than [`GIVEN_UP_AFTER`].
pub(super) fn may_be_back(
    desired: &Desired<'_>,
    observed: &Observed,
    snapshot: &SandboxSnapshot,
    now: Timestamp,
) -> bool {
    let condition =
        failed_restore(desired).filter(|condition| condition.reason == restored::NODE_UNAVAILABLE);
    let waited = condition.map(|condition| now.duration_since(condition.last_transition_time.0));
    lost(observed, snapshot).is_some() && waited.is_none_or(|waited| waited < GIVEN_UP_AFTER)
}

/// Reports in Restored that the node is waited for, and schedules the next pass.
pub(super) fn await_node(plan: &mut Plan, desired: &Desired<'_>, why: &str) {
    let of_another = failed_restore(desired)
        .is_some_and(|condition| condition.reason != restored::NODE_UNAVAILABLE);
    if of_another {
        // A condition keeps its time while its status is unchanged. This reason would get the time
        // of the earlier one.
        plan.memory.restored = ConditionChange::Remove;
        return plan.requeue_after(AT_ONCE);
    }
    let seconds = GIVEN_UP_AFTER.as_secs();
    let message = format!(
        "{why}. The controller waits {seconds} s in all for the node; then the Sandbox starts without the memory"
    );
    let (type_, reason) = (conditions::RESTORED, restored::NODE_UNAVAILABLE);
    plan.memory.restored = condition_false(type_, reason, message);
    plan.requeue_after(LOOK_SOON);
}

fn node_of<'a>(observed: &'a Observed, snapshot: &'a SandboxSnapshot) -> &'a str {
    node_of_image(observed, snapshot).map_or("", String::as_str)
}

/// Returns the message about an image on a lost node.
pub(super) fn out_of_reach(
    observed: &Observed,
    snapshot: &SandboxSnapshot,
    lost: LostNode,
) -> String {
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

/// Returns the message about a missing image.
pub(super) fn image_missing(observed: &Observed, snapshot: &SandboxSnapshot) -> String {
    match lost(observed, snapshot) {
        Some(lost) => format!(
            "{}. {}",
            out_of_reach(observed, snapshot, lost),
            lost.remedy()
        ),
        None => format!(
            "The image of SandboxSnapshot {:?} is not on node {:?}; the controller waits for it (a disk that is not mounted, a directory with another name)",
            snapshot.name_any(),
            node_of(observed, snapshot)
        ),
    }
}

pub(super) fn hibernated_kept(observed: &Observed, snapshot: &SandboxSnapshot) -> ConditionChange {
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
    ConditionChange::Set(Draft::new(type_, Status::True, reason, message))
}

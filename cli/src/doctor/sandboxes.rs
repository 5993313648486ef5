//! Checks for Sandboxes and SandboxSnapshots that are stuck.

use std::collections::BTreeSet;

use jiff::Timestamp;
use kube::ResourceExt;
use torpor_api::annotations::IMAGE_FINALIZER;
use torpor_api::conditions::{self, COMMITTED, HIBERNATED};
use torpor_api::node::SandboxNodeStatus;
use torpor_api::reasons::hibernated;
use torpor_api::{Sandbox, SandboxNode, SandboxSnapshot, SnapshotReason};

use super::facts::Facts;
use super::{Finding, nodes};
use crate::texts;
use crate::units;
use crate::view::{self, State};

/// Time in seconds after which a short operation counts as stuck.
///
/// The controller waits as long before it gives up the image of a node that is gone.
const STUCK_AFTER: i64 = 60;
/// Time in seconds after which a save, wake or suspension counts as stuck: gigabytes take long.
const SAVE_STUCK_AFTER: i64 = 300;

fn is_longer_ago(time: Timestamp, seconds: i64, now: Timestamp) -> bool {
    now.duration_since(time).as_secs() > seconds
}

/// Checks for snapshots that are not committed, not restorable, or not deleted.
pub fn snapshots(facts: &Facts) -> Vec<Finding> {
    let snapshots = match &facts.snapshots {
        Ok(snapshots) => snapshots,
        Err(why) => return vec![Finding::unseen("SandboxSnapshots", why)],
    };
    let each = snapshots.iter();
    each.filter_map(|snapshot| check_snapshot(facts, snapshot))
        .collect()
}

fn check_snapshot(facts: &Facts, snapshot: &SandboxSnapshot) -> Option<Finding> {
    let subject = format!(
        "SandboxSnapshot {}/{}",
        snapshot.namespace().unwrap_or_default(),
        snapshot.name_any()
    );
    let status = snapshot.status.as_ref();
    let node = status.and_then(|status| status.node_name.as_deref());
    if let Some(deleted) = &snapshot.metadata.deletion_timestamp {
        let held = snapshot.finalizers().iter().any(|f| f == IMAGE_FINALIZER);
        let stuck = held && is_longer_ago(deleted.0, STUCK_AFTER, facts.now);
        return stuck.then(|| stuck_deletion(facts, subject, node, deleted.0));
    }
    if snapshot.is_committed() {
        return check_committed(facts, snapshot, subject, node?);
    }
    let Some(committed) = conditions::find(snapshot.conditions(), COMMITTED) else {
        let created = snapshot.metadata.creation_timestamp.as_ref()?.0;
        return is_longer_ago(created, STUCK_AFTER, facts.now).then(|| {
            Finding::problem(
                subject,
                "no agent has processed it",
                "check that its Sandbox exists and has a Pod, and that an agent runs on the Pod's node",
            )
        });
    };
    let remedy = texts::remedy(&committed.reason)?;
    let text = format!("{}: {}", committed.reason, committed.message);
    Some(Finding::warning(subject, text, remedy))
}

fn stuck_deletion(
    facts: &Facts,
    subject: String,
    node: Option<&str>,
    deleted: Timestamp,
) -> Finding {
    let age = units::age(deleted, facts.now);
    let (why, remedy) = match node {
        None => (
            "and no node reports its image".to_owned(),
            "see the log of the agent on the Sandbox's node".to_owned(),
        ),
        Some(node) if !has_node(facts, node) => (
            format!("and node {node} is gone; the controller should have removed the finalizer"),
            "check that a controller is the leader (above)".to_owned(),
        ),
        Some(node) if overdue_heartbeat_of(facts, node).is_some() => (
            format!("and the agent of node {node}, which has its image, does not report"),
            format!("restart the agent of {node} (above)"),
        ),
        Some(node) => (
            format!("and node {node} still has its image"),
            format!(
                "see the log of the agent on {node}; a sandbox whose memory is in the image wakes first"
            ),
        ),
    };
    Finding::problem(
        subject,
        format!("was deleted {age} ago, still has the finalizer {IMAGE_FINALIZER}, {why}"),
        remedy,
    )
}

/// Returns the age of the last heartbeat of a node's agent, if it is too old.
fn overdue_heartbeat_of(facts: &Facts, node: &str) -> Option<String> {
    let mut reports = facts.sandbox_nodes.iter().flatten();
    let report = reports.find(|report| report.name_any() == node)?;
    nodes::overdue_heartbeat(report, facts.now)
}

/// Reports whether the node exists; true if nodes cannot be listed.
fn has_node(facts: &Facts, name: &str) -> bool {
    let nodes = facts.nodes.as_ref();
    nodes.map_or(true, |nodes| {
        nodes.iter().any(|node| node.name_any() == name)
    })
}

/// Reports whether another node than the image's own can restore the image from its repository.
fn can_move(facts: &Facts, snapshot: &SandboxSnapshot) -> bool {
    let mut reports = facts.sandbox_nodes.iter().flatten();
    let fits = |node: &SandboxNode| {
        let has_fingerprint = |status: &SandboxNodeStatus| status.fingerprint.is_some();
        node.status.as_ref().is_some_and(has_fingerprint) && node.lacks(snapshot).is_empty()
    };
    snapshot.is_uploaded() && reports.any(|node| has_node(facts, &node.name_any()) && fits(node))
}

/// Checks that a node can restore the image: the one that has it, or any if it is uploaded.
fn check_committed(
    facts: &Facts,
    snapshot: &SandboxSnapshot,
    subject: String,
    node: &str,
) -> Option<Finding> {
    if can_move(facts, snapshot) {
        return None;
    }
    if !has_node(facts, node) {
        return Some(Finding::problem(
            subject,
            format!("its image is on node {node}, which is gone"),
            "bring the node back; or delete the snapshot and start without the memory (torpor.dev/on-restore-failure=ColdStart)",
        ));
    }
    let is_needed = snapshot.spec.reason == SnapshotReason::Suspend && !snapshot.is_consumed();
    let report = |n: &&SandboxNode| n.name_any() == node;
    let report = facts.sandbox_nodes.iter().flatten().find(report)?;
    let lacks = report.lacks(snapshot);
    (is_needed && !lacks.is_empty()).then(|| {
        Finding::problem(
            subject,
            format!(
                "cannot be restored on node {node}, which lacks what it was made with: {}",
                lacks.join("; ")
            ),
            "add what is missing to the node (--older-runsc of the installer brings a build of runsc), or start without the memory (torpor.dev/on-restore-failure=ColdStart)",
        )
    })
}

/// Checks for Sandboxes that do not reach the requested state.
pub fn sandboxes(facts: &Facts) -> Vec<Finding> {
    let sandboxes = match &facts.sandboxes {
        Ok(sandboxes) => sandboxes,
        Err(why) => return vec![Finding::unseen("Sandboxes", why)],
    };
    let classes: Option<BTreeSet<String>> = facts
        .runtime_classes
        .as_ref()
        .ok()
        .map(|classes| classes.iter().map(ResourceExt::name_any).collect());
    let each = sandboxes.iter();
    each.filter_map(|sandbox| check_sandbox(sandbox, classes.as_ref(), facts.now))
        .collect()
}

fn check_sandbox(
    sandbox: &Sandbox,
    classes: Option<&BTreeSet<String>>,
    now: Timestamp,
) -> Option<Finding> {
    let subject = format!(
        "Sandbox {}/{}",
        sandbox.namespace().unwrap_or_default(),
        sandbox.name_any()
    );
    let class = serde_json::to_value(&sandbox.spec.pod_template.spec).ok();
    let class = class
        .as_ref()
        .and_then(|spec| spec["runtimeClassName"].as_str());
    if let (Some(class), Some(classes)) = (class, classes)
        && !classes.contains(class)
    {
        return Some(Finding::problem(
            subject,
            format!("its pod template names the RuntimeClass {class}, which does not exist"),
            "list the classes with kubectl get runtimeclasses, and correct the pod template",
        ));
    }
    let (state, decided_by) = view::state(sandbox);
    let since = decided_by.map(|condition| condition.last_transition_time.0);
    let reason = decided_by.map_or_else(String::new, |c| format!("{}: {}", c.reason, c.message));
    let why = format!(
        "kubectl torpor why {} -n {}",
        sandbox.name_any(),
        sandbox.namespace().unwrap_or_default()
    );
    match state {
        State::Blocked => {
            let remedy = decided_by.and_then(|condition| texts::remedy(&condition.reason));
            Some(Finding::problem(subject, reason, remedy.unwrap_or(&why)))
        }
        State::Saving | State::Waking | State::Suspending
            if since.is_some_and(|since| is_longer_ago(since, SAVE_STUCK_AFTER, now)) =>
        {
            let age = since.map_or_else(String::new, |since| units::age(since, now));
            let text = format!("{state} for {age}: {reason}");
            Some(Finding::warning(subject, text, why))
        }
        _ => {
            let condition = conditions::find(view::conditions_of(sandbox), HIBERNATED)?;
            let reason = condition.reason.as_str();
            let wrong = [
                hibernated::SAVE_FAILED,
                hibernated::RUNTIME_NOT_CAPABLE,
                hibernated::IMAGE_MISSING,
                hibernated::INVALID_ANNOTATION,
                hibernated::SNAPSHOT_CLASS_NOT_SUPPORTED,
            ];
            let remedy = texts::remedy(reason).filter(|_| wrong.contains(&reason))?;
            let text = format!("{reason}: {}", condition.message);
            Some(Finding::warning(subject, text, remedy))
        }
    }
}

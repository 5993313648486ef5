//! State and figures of a sandbox, joined from the API objects. Pure.

use std::collections::HashMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use serde::Serialize;
use torpor_api::conditions::{self, FINISHED, HIBERNATED, READY, RESTORED, SUSPENDED};
use torpor_api::node::{LastWake, SandboxReport};
use torpor_api::reasons::{freeze, hibernated, restored};
use torpor_api::{OperatingMode, Sandbox, SandboxNode, SandboxSnapshot, SnapshotReason};

use crate::objects::Objects;

/// State of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum State {
    /// The Pod is not ready yet.
    Starting,
    Awake,
    /// The memory is being saved.
    Saving,
    /// Paused because it was idle, with its memory in swap and in an image.
    Dozing,
    /// The memory is in an image, and the Pod stays.
    Hibernated,
    /// The memory is being restored.
    Waking,
    /// Paused, with its memory in place.
    Frozen,
    /// A suspension is requested and not complete.
    Suspending,
    /// The Pod is deleted.
    Suspended,
    /// The memory could not be restored, and the sandbox was not started without it.
    Blocked,
    /// The program has ended.
    Finished,
    Deleting,
}

impl State {
    /// Reports whether the sandbox uses no processor time and hardly any memory.
    pub fn is_asleep(self) -> bool {
        matches!(self, Self::Dozing | Self::Hibernated | Self::Suspended)
    }
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self:?}")
    }
}

/// State and figures of one sandbox. Unknown fields are left out.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct View {
    pub namespace: String,
    pub name: String,
    pub state: State,
    /// Start of the state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Start of the sleep; only while the sandbox sleeps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asleep_since: Option<Timestamp>,
    /// Working set of the Pod in bytes before the last sleep.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_awake_bytes: Option<i64>,
    /// Working set of the Pod in bytes after the start of the last sleep; 0 while suspended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_asleep_bytes: Option<i64>,
    /// Size in bytes of the image that holds the memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_bytes: Option<i64>,
    /// The image is missing on its node.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub image_missing: bool,
    /// Node of the Pod, or of the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_wake: Option<LastWake>,
    /// Reason of the condition for the state, or of the condition for a missing image.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Message of that condition.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// Returns the Sandboxes, each joined with its Pod, image and node.
pub fn views(objects: &Objects) -> Vec<View> {
    let pods = pods_by_owner(&objects.pods);
    let viewed = objects.sandboxes.iter().map(|sandbox| {
        let pod = pod_of(&pods, sandbox);
        view(sandbox, pod, &objects.snapshots, &objects.nodes)
    });
    viewed.collect()
}

/// Returns the Pods by the UID of their controller.
pub fn pods_by_owner(pods: &[Pod]) -> HashMap<&str, &Pod> {
    let controller = |pod: &Pod| {
        let owners = pod.metadata.owner_references.as_deref();
        owners
            .unwrap_or_default()
            .iter()
            .position(|o| o.controller == Some(true))
    };
    pods.iter()
        .filter_map(|pod| {
            let at = controller(pod)?;
            let owner = pod.metadata.owner_references.as_ref()?.get(at)?;
            Some((owner.uid.as_str(), pod))
        })
        .collect()
}

/// Returns the Pod that a Sandbox controls.
pub fn pod_of<'a>(pods: &HashMap<&str, &'a Pod>, sandbox: &Sandbox) -> Option<&'a Pod> {
    pods.get(sandbox.metadata.uid.as_deref()?).copied()
}

/// Returns the conditions; none before the first status.
pub fn conditions_of(sandbox: &Sandbox) -> &[Condition] {
    let status = sandbox.status.as_ref();
    status.map_or(&[], |status| &status.conditions)
}

/// Returns the report of the node's agent for a Pod's sandbox.
pub fn report_of<'a>(pod: &Pod, nodes: &'a [SandboxNode]) -> Option<&'a SandboxReport> {
    let uid = pod.metadata.uid.as_deref()?;
    let node = pod.spec.as_ref()?.node_name.as_deref()?;
    let node = nodes.iter().find(|n| n.name_any() == node)?;
    node.sandbox(uid)
}

/// Returns the snapshot from which a suspended Sandbox resumes.
///
/// It is the newest committed one that is not consumed, even while its image is missing.
pub fn image_of<'a>(
    sandbox: &Sandbox,
    snapshots: &'a [SandboxSnapshot],
) -> Option<&'a SandboxSnapshot> {
    snapshots
        .iter()
        .filter(|s| s.namespace() == sandbox.namespace())
        .filter(|s| s.spec.sandbox_name == sandbox.name_any())
        .filter(|s| s.spec.reason == SnapshotReason::Suspend)
        .filter(|s| (s.is_committed() || s.is_missing()) && !s.is_consumed())
        .max_by_key(|s| {
            let status = s.status.as_ref();
            status.and_then(|status| status.committed_at.as_ref().map(|at| at.0))
        })
}

/// Returns the condition that reports a missing image.
fn missing_image(sandbox: &Sandbox) -> Option<&Condition> {
    let all = conditions_of(sandbox);
    let find = |type_: &str, reason: &str| {
        let found = conditions::find(all, type_);
        found.filter(|condition| condition.status == "False" && condition.reason == reason)
    };
    find(HIBERNATED, hibernated::IMAGE_MISSING).or_else(|| find(RESTORED, restored::IMAGE_MISSING))
}

/// Joins one Sandbox with its Pod, its snapshot and its node's report.
pub fn view(
    sandbox: &Sandbox,
    pod: Option<&Pod>,
    snapshots: &[SandboxSnapshot],
    nodes: &[SandboxNode],
) -> View {
    let (state, decided_by) = state(sandbox);
    let report = pod.and_then(|pod| report_of(pod, nodes));
    // With a Pod, the memory is in the sandbox, or the node reports the image.
    let snapshot = image_of(sandbox, snapshots).filter(|_| pod.is_none());
    let image = snapshot.and_then(|snapshot| snapshot.status.as_ref());
    let missing = missing_image(sandbox);
    let image_missing = missing.is_some() || snapshot.is_some_and(SandboxSnapshot::is_missing);
    // At the start of a doze the condition stays False and keeps its time; the node reports the
    // start of the doze.
    let reported = report.and_then(|report| report.asleep_since.as_ref());
    let since = match state {
        State::Dozing => reported.map(|since| since.0),
        _ => decided_by.map(|condition| condition.last_transition_time.0),
    };
    let node = pod
        .and_then(|pod| pod.spec.as_ref()?.node_name.clone())
        .or_else(|| image.and_then(|image| image.node_name.clone()));
    let (reason, message) = missing
        .or(decided_by)
        .map(|condition| (condition.reason.clone(), condition.message.clone()))
        .unwrap_or_default();
    let suspended = state == State::Suspended && pod.is_none();
    View {
        namespace: sandbox.namespace().unwrap_or_default(),
        name: sandbox.name_any(),
        state,
        since,
        asleep_since: since.filter(|_| state.is_asleep()),
        memory_awake_bytes: report.and_then(|report| report.memory_awake_bytes),
        memory_asleep_bytes: match suspended {
            true => Some(0),
            false => report.and_then(|report| report.memory_asleep_bytes),
        },
        image_bytes: report
            .and_then(|report| report.image_bytes)
            .or_else(|| image.and_then(|image| image.size_bytes))
            .filter(|_| !image_missing),
        image_missing,
        node,
        pod: pod.map(ResourceExt::name_any),
        last_wake: report.and_then(|report| report.last_wake.clone()),
        reason,
        message,
    }
}

/// Returns the state of a Sandbox, and the condition that decides it.
pub fn state(sandbox: &Sandbox) -> (State, Option<&Condition>) {
    let all = conditions_of(sandbox);
    let find = |type_| conditions::find(all, type_);
    let is_true = |type_| conditions::is_true(all, type_);
    if sandbox.metadata.deletion_timestamp.is_some() {
        return (State::Deleting, None);
    }
    if is_true(FINISHED) {
        return (State::Finished, find(FINISHED));
    }
    if sandbox.spec.operating_mode == OperatingMode::Suspended {
        return match find(SUSPENDED) {
            Some(c) if c.status == "True" && c.reason == freeze::POD_FROZEN => {
                (State::Frozen, Some(c))
            }
            Some(c) if c.status == "True" => (State::Suspended, Some(c)),
            // The condition of the save has more detail than Suspended.
            other => (State::Suspending, find(HIBERNATED).or(other)),
        };
    }
    match find(HIBERNATED) {
        // A sandbox that hibernates in place stays Ready. One that is not Ready is being resumed.
        Some(c) if c.status == "True" && is_true(READY) => return (State::Hibernated, Some(c)),
        Some(c) if c.reason == hibernated::SAVING => return (State::Saving, Some(c)),
        Some(c) if c.reason == hibernated::WAKING => return (State::Waking, Some(c)),
        Some(c) if c.reason == hibernated::FROZEN => return (State::Frozen, Some(c)),
        Some(c) if c.reason == hibernated::DOZING && is_true(READY) => {
            return (State::Dozing, Some(c));
        }
        _ => {}
    }
    if is_true(READY) {
        return (State::Awake, find(READY));
    }
    match (find(RESTORED), is_true(HIBERNATED)) {
        (Some(c), _) if c.status == "False" && c.reason != restored::COLD_STARTED => {
            (State::Blocked, Some(c))
        }
        (_, true) => (State::Waking, find(READY)),
        (_, false) => (State::Starting, find(READY)),
    }
}

#[cfg(test)]
pub(crate) mod tests;

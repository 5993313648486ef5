//! GKE's PodSnapshot and PodSnapshotManualTrigger, as far as upstream's Python SDK uses them (`k8s_agent_sandbox.gke_extensions.snapshots`, upstream 1.x). Group
//! `podsnapshot.gke.io/v1`. On GKE they are GKE's; elsewhere, where `deploy/podsnapshots` is applied, Torpor's controller serves them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::conditions;

/// The group, which is GKE's.
pub const GROUP: &str = "podsnapshot.gke.io";
/// PodSnapshot: name of the Pod that was saved. The SDK shows it.
pub const ORIGIN_POD: &str = "podsnapshot.gke.io/origin-pod";
/// Pod: the PodSnapshot that it is to start from, by name. The SDK's `restore` sets it.
pub const NAME: &str = "podsnapshot.gke.io/ps-name";
/// PodSnapshotManualTrigger: whether the snapshot was taken.
pub const TRIGGERED: &str = "Triggered";
/// Pod, written by the agent: whether it was restored from a PodSnapshot; the message names it. The SDK reads it once, when the Pod is Ready.
pub const POD_RESTORED: &str = "PodRestored";

/// Reasons of the conditions above, and of PodSnapshot's Ready.
pub mod reasons {
    pub const COMPLETE: &str = "Complete";
    pub const FAILED: &str = "Failed";
    pub const AVAILABLE: &str = "AllSnapshotsAvailable";
    pub const UNAVAILABLE: &str = "SnapshotUnavailable";
    pub const RESTORED: &str = "Restored";
    pub const NOT_RESTORED: &str = "NotRestored";
}

/// Asks for one snapshot of one Pod.
#[derive(
    CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema,
)]
#[kube(
    group = "podsnapshot.gke.io",
    version = "v1",
    kind = "PodSnapshotManualTrigger",
    plural = "podsnapshotmanualtriggers",
    namespaced,
    status = "PodSnapshotManualTriggerStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "PodSnapshotManualTrigger asks for one snapshot of one Pod, which runs on. Served by Torpor for Pods of Sandboxes.",
    printcolumn(name = "Pod", type_ = "string", json_path = ".spec.targetPod"),
    printcolumn(
        name = "Triggered",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Triggered')].status"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Triggered')].reason"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[x_kube(validation = Rule::new("self == oldSelf").message("spec is immutable"))]
#[serde(rename_all = "camelCase")]
pub struct PodSnapshotManualTriggerSpec {
    /// Name of the Pod, in the same namespace.
    #[schemars(length(min = 1, max = 253))]
    pub target_pod: String,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodSnapshotManualTriggerStatus {
    /// Current conditions: Triggered.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions::list_schema")]
    pub conditions: Vec<Condition>,
    /// The snapshot that was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_created: Option<SnapshotCreated>,
}

/// Names a PodSnapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotCreated {
    /// Its name, in the same namespace.
    pub name: String,
}

/// One snapshot of one Pod, and the SandboxSnapshot that holds it.
#[derive(
    CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema,
)]
#[kube(
    group = "podsnapshot.gke.io",
    version = "v1",
    kind = "PodSnapshot",
    plural = "podsnapshots",
    namespaced,
    status = "PodSnapshotStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "PodSnapshot is a snapshot that a PodSnapshotManualTrigger asked for. Deleting it deletes the SandboxSnapshot of its name, and the bytes.",
    printcolumn(
        name = "Pod",
        type_ = "string",
        json_path = ".metadata.annotations.podsnapshot\\.gke\\.io/origin-pod"
    ),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].status"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[x_kube(validation = Rule::new("self == oldSelf").message("spec is immutable"))]
#[serde(rename_all = "camelCase")]
pub struct PodSnapshotSpec {
    /// UID of the Pod that was saved.
    #[serde(default, rename = "podUID")]
    pub pod_uid: String,
    /// UID of the trigger that asked for it.
    #[serde(default, rename = "triggerUID")]
    pub trigger_uid: String,
}

/// Whether it can be had.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodSnapshotStatus {
    /// Current conditions: Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions::list_schema")]
    pub conditions: Vec<Condition>,
}

impl PodSnapshotManualTrigger {
    /// What came of it, once that is settled.
    pub fn outcome(&self) -> Option<&Condition> {
        let all = self.status.as_ref().map_or(&[][..], |s| &s.conditions);
        let said = conditions::find(all, TRIGGERED)?;
        let settled = matches!(
            (said.status.as_str(), said.reason.as_str()),
            ("True", reasons::COMPLETE) | ("False", reasons::FAILED)
        );
        settled.then_some(said)
    }
}

impl PodSnapshot {
    /// The conditions, none before the first status.
    pub fn conditions(&self) -> &[Condition] {
        self.status
            .as_ref()
            .map_or(&[], |status| &status.conditions)
    }

    /// Whether it can be had.
    pub fn is_ready(&self) -> bool {
        conditions::is_true(self.conditions(), conditions::READY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_is_what_upstreams_sdk_takes_for_one() {
        let says = |status: &str, reason: &str| {
            let mut trigger = PodSnapshotManualTrigger::default();
            let said = serde_json::json!({"conditions": [{
                "type": "Triggered", "status": status, "reason": reason, "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }]});
            trigger.status = serde_json::from_value(said).unwrap();
            trigger.outcome().is_some()
        };
        assert!(says("True", "Complete"));
        assert!(says("False", "Failed"));
        assert!(!says("False", "Pending"));
        assert!(PodSnapshotManualTrigger::default().outcome().is_none());
    }
}

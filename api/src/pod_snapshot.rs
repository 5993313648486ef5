//! GKE's PodSnapshot and PodSnapshotManualTrigger (`podsnapshot.gke.io/v1`), as far as upstream's
//! Python SDK uses them (`k8s_agent_sandbox.gke_extensions.snapshots`, upstream 1.x).
//!
//! GKE serves these kinds on GKE. Elsewhere Torpor's controller serves them where
//! `deploy/podsnapshots` is applied.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::conditions;

/// GKE's API group of these kinds.
pub const GROUP: &str = "podsnapshot.gke.io";
/// Annotation of a PodSnapshot: name of the Pod that was saved. The SDK displays it.
pub const ORIGIN_POD: &str = "podsnapshot.gke.io/origin-pod";
/// Annotation of a Pod: name of the PodSnapshot to start from. The SDK's `restore` sets it.
pub const NAME: &str = "podsnapshot.gke.io/ps-name";
/// Condition of a PodSnapshotManualTrigger: the snapshot was taken.
pub const TRIGGERED: &str = "Triggered";
/// Condition of a Pod, written by the agent: the Pod was restored from the PodSnapshot that the
/// message names. The SDK reads the condition once, when the Pod is Ready.
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

/// Desired state of a PodSnapshotManualTrigger: one snapshot of one Pod.
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
    doc = "PodSnapshotManualTrigger requests one snapshot of one Pod, which keeps running. Torpor serves it for Pods of Sandboxes.",
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

/// Observed state of a PodSnapshotManualTrigger.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodSnapshotManualTriggerStatus {
    /// Current conditions: Triggered.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions::list_schema")]
    pub conditions: Vec<Condition>,
    /// PodSnapshot that was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_created: Option<SnapshotCreated>,
}

/// Reference to a PodSnapshot of the same namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotCreated {
    /// Name of the PodSnapshot.
    pub name: String,
}

/// Desired state of a PodSnapshot: origin of one snapshot, which a SandboxSnapshot of the same name
/// holds.
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
    doc = "PodSnapshot is a snapshot that a PodSnapshotManualTrigger requested. Its deletion deletes the SandboxSnapshot of the same name and the image's bytes.",
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
    /// UID of the trigger that requested the snapshot.
    #[serde(default, rename = "triggerUID")]
    pub trigger_uid: String,
}

/// Observed state of a PodSnapshot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodSnapshotStatus {
    /// Current conditions: Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions::list_schema")]
    pub conditions: Vec<Condition>,
}

impl PodSnapshotManualTrigger {
    /// Returns the condition Triggered once its status is final.
    pub fn outcome(&self) -> Option<&Condition> {
        let all = self.status.as_ref().map_or(&[][..], |s| &s.conditions);
        let triggered = conditions::find(all, TRIGGERED)?;
        let settled = matches!(
            (triggered.status.as_str(), triggered.reason.as_str()),
            ("True", reasons::COMPLETE) | ("False", reasons::FAILED)
        );
        settled.then_some(triggered)
    }
}

impl PodSnapshot {
    /// Returns the conditions; empty before the first status.
    pub fn conditions(&self) -> &[Condition] {
        self.status
            .as_ref()
            .map_or(&[], |status| &status.conditions)
    }

    /// Reports whether the snapshot is available.
    pub fn is_ready(&self) -> bool {
        conditions::is_true(self.conditions(), conditions::READY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_is_what_upstreams_sdk_takes_as_final() {
        let is_final = |status: &str, reason: &str| {
            let mut trigger = PodSnapshotManualTrigger::default();
            let written = serde_json::json!({"conditions": [{
                "type": "Triggered", "status": status, "reason": reason, "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }]});
            trigger.status = serde_json::from_value(written).unwrap();
            trigger.outcome().is_some()
        };
        assert!(is_final("True", "Complete"));
        assert!(is_final("False", "Failed"));
        assert!(!is_final("False", "Pending"));
        assert!(PodSnapshotManualTrigger::default().outcome().is_none());
    }
}

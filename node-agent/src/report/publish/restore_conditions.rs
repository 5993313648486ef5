//! Conditions about a Pod's restore for clients that read them once, as soon as the Pod is Ready:
//! GKE's condition `PodRestored`, which upstream's Python SDK reads
//! (`k8s_agent_sandbox.gke_extensions.snapshots`), and the condition of the readiness gate that
//! makes the Pod wait for it.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use torpor_api::annotations;
use torpor_api::conditions::{self, POD_RESTORE_SETTLED};
use torpor_api::pod_snapshot::{self, POD_RESTORED};
use torpor_api::reasons::restored as reasons;
use torpor_core::status::{ConditionDraft, Truth};

use crate::reconcile::desired::condition;

/// Maximum length of an object's name (Kubernetes, "DNS subdomain names"). A longer text is not the
/// name of a PodSnapshot.
const LONGEST_NAME: usize = 253;

/// Returns the conditions that follow from `restored`, the draft of `torpor.dev/Restored`.
pub(super) fn derived_from(
    pod: &Pod,
    restored: &ConditionDraft,
) -> Vec<(&'static str, ConditionDraft)> {
    let mut drafts = Vec::new();
    if let Some(snapshot) = requested_snapshot(pod)
        // PodRestored is not written again once it is True: it does not show the later states of
        // the sandbox.
        && condition(pod, POD_RESTORED).is_none_or(|written| written.status != "True")
    {
        drafts.push((POD_RESTORED, pod_restored(pod, snapshot, restored)));
    }
    if is_gated(pod) && is_settled(restored) {
        let words = format!(
            "Condition {} shows the outcome of the restore",
            conditions::POD_RESTORED
        );
        let draft = ConditionDraft::new(Truth::True, &restored.reason, words);
        drafts.push((POD_RESTORE_SETTLED, draft));
    }
    drafts
}

fn requested_snapshot(pod: &Pod) -> Option<&str> {
    let name = pod.annotations().get(annotations::POD_SNAPSHOT)?;
    (name.len() <= LONGEST_NAME).then_some(name)
}

fn is_gated(pod: &Pod) -> bool {
    let gates = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.readiness_gates.as_ref());
    let mut gates = gates.into_iter().flatten();
    gates.any(|gate| gate.condition_type == POD_RESTORE_SETTLED)
}

/// Reports whether the outcome of the restore is final: the Pod was restored or started cold. A
/// failed restore is tried again, and the Pod is not Ready anyway.
fn is_settled(restored: &ConditionDraft) -> bool {
    restored.status == Truth::True || restored.reason == reasons::COLD_STARTED
}

/// Makes the draft of condition PodRestored. The SDK requests the newest PodSnapshot that existed
/// at the resume. The Pod is restored from the memory of the suspension itself, which was saved
/// after that PodSnapshot.
fn pod_restored(pod: &Pod, snapshot: &str, restored: &ConditionDraft) -> ConditionDraft {
    let no = |words: String| {
        ConditionDraft::new(Truth::False, pod_snapshot::reasons::NOT_RESTORED, words)
    };
    if let Some(chosen) = pod.annotations().get(pod_snapshot::NAME) {
        let chosen: String = chosen.chars().take(LONGEST_NAME).collect();
        return no(format!(
            "A sandbox continues from its newest memory, not from PodSnapshot {chosen:?}; annotation torpor.dev/restore-from starts another Sandbox as a copy of SandboxSnapshot {chosen:?}"
        ));
    }
    if restored.status != Truth::True {
        return no(restored.message.clone());
    }
    let is_copy = pod.annotations().contains_key(annotations::RESTORE_COPY);
    if is_copy || restored.reason == reasons::ROLLED_BACK {
        return no("The Pod was not restored with the memory of its suspension".to_owned());
    }
    let words = format!(
        "Restored with the memory that was saved when it was suspended, after PodSnapshot {snapshot:?}"
    );
    ConditionDraft::new(Truth::True, pod_snapshot::reasons::RESTORED, words)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const BY_SDK: &str = "torpor.dev/pod-snapshot";

    fn pod(annotations: &Value, gates: &Value, conditions: &Value) -> Pod {
        let pod = json!({
            "metadata": {"name": "p", "annotations": annotations},
            "spec": {"containers": [], "readinessGates": gates},
            "status": {"conditions": conditions},
        });
        serde_json::from_value(pod).expect("a Pod")
    }

    fn gate() -> Value {
        json!([{"conditionType": "torpor.dev/RestoreSettled"}])
    }

    fn restored() -> ConditionDraft {
        ConditionDraft::new(
            Truth::True,
            reasons::RESTORED,
            "The Pod goes on from image i.",
        )
    }

    fn derived(pod: &Pod, restored: &ConditionDraft) -> Vec<(&'static str, Truth, String)> {
        let all = derived_from(pod, restored);
        all.into_iter()
            .map(|(kind, draft)| (kind, draft.status, draft.message))
            .collect()
    }

    #[test]
    fn a_restore_names_the_requested_pod_snapshot_and_opens_the_readiness_gate() {
        let asked = pod(&json!({BY_SDK: "t-1"}), &gate(), &json!([]));
        let derived = derived(&asked, &restored());
        let kinds: Vec<_> = derived
            .iter()
            .map(|(kind, truth, _)| (*kind, *truth))
            .collect();
        let wanted = [
            ("PodRestored", Truth::True),
            ("torpor.dev/RestoreSettled", Truth::True),
        ];
        assert_eq!(kinds, wanted);
        assert!(derived[0].2.contains("\"t-1\""), "{derived:?}");
    }

    #[test]
    fn a_pod_that_was_not_restored_from_its_pod_snapshot_reports_this() {
        let another = "A sandbox continues from its newest memory, not from PodSnapshot \"t\"; annotation torpor.dev/restore-from starts another Sandbox as a copy of SandboxSnapshot \"t\"";
        let elsewhere = "The Pod was not restored with the memory of its suspension";
        let (yes, no) = (Truth::True, Truth::False);
        let chosen = json!({BY_SDK: "t", "podsnapshot.gke.io/ps-name": "t"});
        let copy = json!({BY_SDK: "t", "torpor.dev/restore-copy": "true"});
        let plain = json!({BY_SDK: "t"});
        let cases = [
            (
                no,
                reasons::COLD_STARTED,
                "no room",
                &plain,
                "no room",
                true,
            ),
            (no, reasons::IMAGE_CORRUPT, "a bit", &plain, "a bit", false),
            (yes, reasons::RESTORED, "", &chosen, another, true),
            (yes, reasons::ROLLED_BACK, "", &plain, elsewhere, true),
            (yes, reasons::RESTORED, "", &copy, elsewhere, true),
        ];
        for (status, reason, message, annotations, words, settled) in cases {
            let draft = ConditionDraft::new(status, reason, message);
            let derived = derived(&pod(annotations, &gate(), &json!([])), &draft);
            let expected = ("PodRestored", Truth::False, words.to_owned());
            assert_eq!(derived[0], expected);
            let count = 1 + usize::from(settled);
            assert_eq!(derived.len(), count, "{reason}: {derived:?}");
        }
    }

    #[test]
    fn a_successful_restore_is_reported_once_and_a_failed_restore_again() {
        let written = |status: &str| json!([{"type": "PodRestored", "status": status}]);
        let asked = |status: &str| pod(&json!({BY_SDK: "t"}), &json!([]), &written(status));
        assert_eq!(derived(&asked("True"), &restored()), []);
        assert_eq!(derived(&asked("False"), &restored()).len(), 1);
    }

    #[test]
    fn a_pod_without_a_requested_pod_snapshot_gets_no_condition() {
        let plain = pod(&json!({}), &json!([{"conditionType": "x"}]), &json!([]));
        assert_eq!(derived(&plain, &restored()), []);
        let too_long = pod(&json!({BY_SDK: "x".repeat(254)}), &gate(), &json!([]));
        let derived = derived(&too_long, &restored());
        assert_eq!(derived.len(), 1, "it is Ready all the same: {derived:?}");
    }
}

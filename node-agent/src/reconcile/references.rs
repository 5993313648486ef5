//! References between Sandboxes, Pods and SandboxSnapshots.

use k8s_openapi::api::core::v1::Pod;
use torpor_api::snapshot::SandboxSnapshot;
use torpor_core::ids::PodUid;

/// Kind of the owner that controls a Sandbox's Pod.
const SANDBOX_KIND: &str = "Sandbox";

/// Returns the name of the Sandbox that controls the Pod.
pub(crate) fn sandbox_name(pod: &Pod) -> Option<&str> {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    owners
        .iter()
        .find(|owner| owner.kind == SANDBOX_KIND && owner.controller == Some(true))
        .map(|owner| owner.name.as_str())
}

/// Returns the UID of the Pod that a snapshot names: in its spec, or in its status once it is
/// accepted.
pub(crate) fn named_pod(snapshot: &SandboxSnapshot) -> Option<PodUid> {
    let status = snapshot.status.as_ref();
    let accepted = || status.and_then(|status| status.pod_uid.clone());
    let named = snapshot.spec.pod_uid.clone().or_else(accepted)?;
    PodUid::new(named).ok()
}

/// Returns whether a snapshot that names only this Sandbox is about this Pod.
pub(crate) fn stands_for(pod: &Pod, namespace: Option<&str>, sandbox: &str) -> bool {
    pod.metadata.deletion_timestamp.is_none()
        && pod.metadata.namespace.as_deref() == namespace
        && sandbox_name(pod) == Some(sandbox)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::reconcile::desired::tests::pod;

    #[test]
    fn a_snapshot_that_names_only_a_sandbox_is_about_the_pod_that_stands_for_it() {
        let standing = pod(json!({}));
        assert!(stands_for(&standing, Some("n"), "s"));
        assert!(!stands_for(&standing, Some("n"), "another"));
        assert!(!stands_for(&standing, Some("of-somebody-else"), "s"));
        let mut going = standing;
        going.metadata.deletion_timestamp =
            Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).expect("a time"));
        assert!(!stands_for(&going, Some("n"), "s"));
    }
}

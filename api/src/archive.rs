//! Archived Sandboxes: their record in a repository, and manifests that are made of Sandboxes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::ResourceExt;
use serde::{Deserialize, Serialize};

use crate::annotations::{self, ArchiveAfter};
use crate::snapshot::name_with;
use crate::{OperatingMode, PodRecord, Sandbox, SandboxSnapshotStatus, labels};

/// Longest manifest of a Sandbox in an archive, in bytes. The annotations of an object have at most
/// 256 KiB.
pub const LARGEST_MANIFEST: usize = 192 << 10;

/// Annotations about the present state of one Sandbox, which its copies do not have.
const OF_STATE: [&str; 2] = [annotations::NEXT_WAKEUP, annotations::WAKE_AT];

/// Annotation of `kubectl apply`, with the manifest that was applied last.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Record of an archived Sandbox in a repository, beside the image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ArchiveRecord {
    pub archived_at: Time,
    /// Pod whose memory the image holds.
    pub pod: PodRecord,
    /// Manifest of the Sandbox.
    pub sandbox: Sandbox,
    /// The image: that part of the status that does not depend on the cluster.
    pub image: SandboxSnapshotStatus,
}

/// Failure to read a record or a manifest.
#[derive(Debug, thiserror::Error)]
#[error("it is not an archived Sandbox: {0}")]
pub struct NotAnArchive(#[from] serde_json::Error);

impl ArchiveRecord {
    pub fn decode(bytes: &[u8]) -> Result<Self, NotAnArchive> {
        Ok(serde_json::from_slice(bytes)?)
    }

    pub fn encode(&self) -> Vec<u8> {
        // Structs of strings, numbers and maps always have a JSON form.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// Returns the manifest of a Sandbox for its archive: name, labels, annotations and spec as users
/// wrote them.
pub fn manifest(sandbox: &Sandbox) -> Sandbox {
    let is_of_controller = |key: &str| {
        let written = [annotations::OF_SANDBOXES, annotations::OF_UPSTREAM];
        let mut written = written.into_iter().flatten();
        written.any(|entry| entry.value == key)
    };
    let mut manifest = Sandbox::new(&sandbox.name_any(), sandbox.spec.clone());
    let mut kept = sandbox.annotations().clone();
    kept.retain(|key, value| {
        !is_of_controller(key) && key != LAST_APPLIED && is_lasting(key, value)
    });
    manifest.metadata.annotations = Some(kept).filter(|kept| !kept.is_empty());
    manifest.metadata.labels = own_labels(sandbox);
    manifest
}

/// Returns the manifest of a Sandbox that starts as a copy of a snapshot: running, with the spec,
/// settings and labels of `origin`, and without a name.
pub fn copy(origin: &Sandbox, snapshot: &str) -> Sandbox {
    let is_setting = |key: &str| {
        let mut settings = annotations::OF_USERS.iter();
        settings.any(|entry| entry.value == key)
    };
    let mut settings = origin.annotations().clone();
    settings.retain(|key, value| is_setting(key) && is_lasting(key, value));
    starts_from(
        Sandbox {
            metadata: ObjectMeta {
                annotations: Some(settings),
                labels: own_labels(origin),
                ..ObjectMeta::default()
            },
            ..Sandbox::new("", origin.spec.clone())
        },
        snapshot,
    )
}

/// Returns the manifest of a Sandbox that continues from an archive, given the archived manifest.
/// A shutdown time that has passed at `now` is removed: the Sandbox would expire at once.
pub fn restored(archived: &Sandbox, snapshot: &str, now: jiff::Timestamp) -> Sandbox {
    // The text may come from another cluster.
    let mut restored = manifest(archived);
    let past = restored.spec.shutdown_time.as_ref();
    if past.is_some_and(|time| time.0 <= now) {
        restored.spec.shutdown_time = None;
    }
    starts_from(restored, snapshot)
}

fn starts_from(mut sandbox: Sandbox, snapshot: &str) -> Sandbox {
    let from = (annotations::RESTORE_FROM.to_owned(), snapshot.to_owned());
    sandbox.annotations_mut().extend([from]);
    sandbox.spec.operating_mode = OperatingMode::Running;
    sandbox
}

/// Reports whether an annotation is a lasting wish, and not a request to one Sandbox at one time.
fn is_lasting(key: &str, value: &str) -> bool {
    // The word "false" overrides the pod template.
    let is_sleep = key == annotations::HIBERNATE && value == "true";
    let is_archive = key == annotations::ARCHIVE_AFTER && value == ArchiveAfter::NOW;
    !is_sleep && !is_archive && !OF_STATE.contains(&key)
}

fn own_labels(sandbox: &Sandbox) -> Option<std::collections::BTreeMap<String, String>> {
    let mut own = sandbox.labels().clone();
    own.retain(|key, _| !labels::is_system(key));
    Some(own).filter(|own| !own.is_empty())
}

/// Returns the text of a manifest.
pub fn text(manifest: &Sandbox) -> String {
    // A manifest of strings, numbers and maps always has a JSON form.
    serde_json::to_string(manifest).unwrap_or_default()
}

/// Returns the hash of a manifest, by which the controller's cache stands for the whole text.
pub fn manifest_hash(manifest: &str) -> String {
    crate::name_hash(manifest)
}

/// Returns the owner that controls a Sandbox, if there is one. It would replace a Sandbox that is
/// archived.
pub fn holder(sandbox: &Sandbox) -> Option<String> {
    let mut owners = sandbox.owner_references().iter();
    let holder = owners.find(|owner| owner.controller == Some(true))?;
    Some(format!("{} {}", holder.kind, holder.name))
}

/// Returns the name of the archive of an image of a Sandbox, at most 253 characters.
pub fn name(sandbox: &str, image_id: &str) -> String {
    name_with(sandbox, &format!("-archive-{}", crate::name_hash(image_id)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn sandbox() -> Sandbox {
        serde_json::from_value(json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
            "metadata": {
                "name": "demo", "namespace": "n", "uid": "u", "resourceVersion": "7",
                "labels": {"team": "a", "agents.x-k8s.io/created-by": "go-client"},
                "annotations": {
                    "example.com/note": "x", "torpor.dev/snapshot-class": "far",
                    "torpor.dev/hibernate": "true", "torpor.dev/archive-after": "now",
                    "torpor.dev/last-pod": "{}", "agents.x-k8s.io/pod-name": "demo",
                    "agents.x-k8s.io/next-wakeup": "2026-01-01T00:00:00Z",
                    "kubectl.kubernetes.io/last-applied-configuration": "{}",
                },
            },
            "spec": {
                "operatingMode": "Suspended", "shutdownTime": "2026-01-01T00:00:00Z",
                "podTemplate": {"spec": {"containers": []}},
            },
        }))
        .unwrap()
    }

    #[test]
    fn a_manifest_has_what_users_wrote() {
        let manifest = serde_json::to_value(manifest(&sandbox())).unwrap();
        let metadata = json!({
            "name": "demo", "labels": {"team": "a"},
            "annotations": {"example.com/note": "x", "torpor.dev/snapshot-class": "far"},
        });
        assert_eq!(manifest["metadata"], metadata);
        assert_eq!(manifest["spec"]["operatingMode"], "Suspended");
    }

    #[test]
    fn a_restored_sandbox_runs_from_its_archive_and_does_not_expire_at_once() {
        let at = |time: &str| time.parse().unwrap();
        let after = restored(&manifest(&sandbox()), "s", at("2026-01-01T00:00:00Z"));
        assert_eq!(after.name_any(), "demo");
        assert_eq!(after.annotations()["torpor.dev/restore-from"], "s");
        assert_eq!(after.spec.operating_mode, OperatingMode::Running);
        assert_eq!(after.spec.shutdown_time, None);
        let before = restored(&manifest(&sandbox()), "s", at("2025-12-31T23:59:59Z"));
        assert!(before.spec.shutdown_time.is_some());
    }

    #[test]
    fn a_copy_has_settings_and_labels_only() {
        let copy = serde_json::to_value(copy(&sandbox(), "s")).unwrap();
        let metadata = json!({
            "labels": {"team": "a"},
            "annotations": {"torpor.dev/snapshot-class": "far", "torpor.dev/restore-from": "s"},
        });
        assert_eq!(copy["metadata"], metadata);
    }

    #[test]
    fn names_of_archives_fit() {
        let long = name(&"a".repeat(253), "u.1");
        assert!(
            long.len() <= 253 && annotations::is_dns_subdomain(&long),
            "{long}"
        );
        assert_ne!(name("s", "u.1"), name("s", "u.2"));
    }
}

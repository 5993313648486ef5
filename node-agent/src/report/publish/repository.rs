//! Reports about images in repositories: the condition Uploaded of a SandboxSnapshot, and the
//! progress of a fetch in the condition Restored of a Pod.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::events::{Event, EventType};
use kube::{Resource, ResourceExt};
use serde_json::json;
use torpor_api::conditions::{self, Draft};
use torpor_api::reasons;
use torpor_api::snapshot::{SandboxSnapshot, Upload};
use torpor_core::status::{ConditionDraft, Truth};

use super::{Error, Publisher, changed_condition, shortened, within};
use crate::reconcile::desired::condition;
use crate::reconcile::snapshot_index::SnapshotIndex;

/// Attempts at a write that other writes of the same object overtake.
const ATTEMPTS: usize = 5;

impl Publisher {
    /// Writes the condition Uploaded, and an Event about a failure. Returns whether the condition
    /// is written.
    pub(crate) async fn upload(
        &self,
        index: &SnapshotIndex,
        of: &SandboxSnapshot,
        draft: Draft,
        upload: Option<Upload>,
    ) -> bool {
        let mut events = index.events();
        for _ in 0..ATTEMPTS {
            let Some(snapshot) = index.latest(of) else {
                return false;
            };
            if snapshot.is_uploaded() {
                return true;
            }
            let mut status = snapshot.status.clone().unwrap_or_default();
            let before = conditions::find(&status.conditions, conditions::UPLOADED).cloned();
            let (generation, now) = (snapshot.metadata.generation, Timestamp::now());
            conditions::set(&mut status.conditions, draft.clone(), generation, now);
            status.upload = upload.clone().or(status.upload);
            if Some(&status) == snapshot.status.as_ref() {
                return true;
            }
            let name = snapshot.name_any();
            let what = format!("the upload of SandboxSnapshot {name}");
            let patch = json!({
                "metadata": { "resourceVersion": snapshot.resource_version() },
                "status": { "conditions": status.conditions, "upload": status.upload },
            });
            let (api, parameters) = (self.snapshots(&snapshot), PatchParams::default());
            let patch = Patch::Merge(patch);
            match within(what, api.patch_status(&name, &parameters, &patch)).await {
                Ok(Some(_)) => {
                    let reason = before.map(|condition| condition.reason);
                    self.upload_event(&snapshot, &draft, reason.as_deref())
                        .await;
                    return true;
                }
                Ok(None) => return false,
                Err(Error::Conflict { .. }) => {
                    // The watch delivers the other write. It may have done so already.
                    let newer = tokio::time::timeout(super::API_LIMIT, events.changed());
                    let _ = newer.await;
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot report an upload");
                    return false;
                }
            }
        }
        false
    }

    /// Writes an Event about the end of an upload, or about a failure that is new.
    async fn upload_event(&self, about: &SandboxSnapshot, draft: &Draft, before: Option<&str>) {
        let type_ = match &*draft.reason {
            reason if Some(reason) == before => return,
            reasons::snapshot::QUEUED | reasons::snapshot::UPLOADING => return,
            reasons::snapshot::UPLOADED => EventType::Normal,
            _ => EventType::Warning,
        };
        let event = Event {
            type_,
            reason: draft.reason.clone().into_owned(),
            note: Some(shortened(&draft.message)),
            action: "Upload".to_owned(),
            secondary: None,
        };
        self.publish(&event, &about.object_ref(&())).await;
    }

    /// Writes the progress or the failure of a fetch into the Pod's condition Restored, unless the
    /// condition reports the restore itself already.
    pub(crate) async fn fetch(&self, pod: &Pod, reason: &'static str, message: String) {
        let held = condition(pod, conditions::POD_RESTORED);
        let reported = held.and_then(|held| held.reason.as_deref());
        if !reported.is_none_or(is_about_fetch) {
            return;
        }
        let draft = ConditionDraft {
            status: Truth::False,
            reason: reason.to_owned(),
            message,
        };
        let Some(changed) = changed_condition(pod, conditions::POD_RESTORED, &draft) else {
            return;
        };
        let namespace = pod.namespace().unwrap_or_default();
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        let name = pod.name_any();
        let patch = json!({
            "metadata": { "uid": pod.metadata.uid },
            "status": { "conditions": [changed] },
        });
        let what = format!("the progress of Pod {namespace}/{name}");
        let (parameters, patch) = (PatchParams::default(), Patch::Strategic(patch));
        match within(what, pods.patch_status(&name, &parameters, &patch)).await {
            Err(error) => tracing::warn!(%error, "cannot report a fetch"),
            Ok(_) if reported != Some(reason) => {
                self.event(pod.object_ref(&()), &changed).await;
            }
            Ok(_) => {}
        }
    }
}

/// Returns whether the reason of a condition Restored is of a fetch, and not of the restore.
fn is_about_fetch(reason: &str) -> bool {
    matches!(
        reason,
        reasons::restored::FETCHING
            | reasons::restored::REPOSITORY_UNAVAILABLE
            | reasons::restored::REPOSITORY_DENIED
            | reasons::restored::SOURCE_NODE_UNAVAILABLE
            | reasons::restored::KEY_MISSING
            | reasons::restored::KEY_SERVICE_UNAVAILABLE
            | reasons::restored::NO_ROOM
    )
}

//! Telling the API: Pod conditions, SandboxSnapshot statuses and finalizers, Events.
//!
//! Writes only what differs from what the caches show, so that a settled node writes nothing.

use std::future::Future;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource, ResourceExt};
use serde_json::json;
use torpor_api::annotations::IMAGE_FINALIZER;
use torpor_api::conditions::{self, Draft};
use torpor_api::snapshot::{self, SandboxSnapshot, SandboxSnapshotStatus};
use torpor_api::{Sandbox, reasons};
use torpor_core::status::{ConditionDraft, SnapshotDraft, SnapshotState, StatusDraft};
use torpor_snapshots::Manifest;

use crate::reconcile::desired::condition;

mod told;

/// A call to the apiserver that takes longer is not waited for: its effect will be seen, or it is made again.
pub(crate) const API_LIMIT: Duration = Duration::from_secs(20);

/// What the apiserver takes as the message of an Event, in bytes.
const MAX_NOTE: usize = 1024;

/// Why the API could not be told.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot write {what}")]
    Api {
        what: String,
        #[source]
        source: kube::Error,
    },
    #[error("the apiserver did not answer the write of {what} within {API_LIMIT:?}")]
    Timeout { what: String },
    /// What was to be said follows from what was seen, which is so no longer.
    #[error("another client has changed {what} since the agent read it")]
    Conflict { what: String },
}

impl Error {
    /// Whether the apiserver has answered, and what is wrong is this object: another may be written all the same.
    pub(crate) fn is_of_one_object(&self) -> bool {
        const TOO_MANY_REQUESTS: u16 = 429;
        match self {
            Self::Conflict { .. } => true,
            Self::Api {
                source: kube::Error::Api(status),
                ..
            } => (400..500).contains(&status.code) && status.code != TOO_MANY_REQUESTS,
            Self::Api { .. } | Self::Timeout { .. } => false,
        }
    }
}

/// Writes statuses for the agent.
#[derive(Clone)]
pub(crate) struct Publisher {
    client: Client,
    recorder: Recorder,
    node_name: String,
}

async fn within<T>(
    what: String,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<Option<T>, Error> {
    match tokio::time::timeout(API_LIMIT, call).await {
        Err(_) => Err(Error::Timeout { what }),
        Ok(Ok(value)) => Ok(Some(value)),
        // The object was deleted meanwhile: there is nobody to tell.
        Ok(Err(kube::Error::Api(status))) if status.is_not_found() => Ok(None),
        Ok(Err(kube::Error::Api(status))) if status.is_conflict() => Err(Error::Conflict { what }),
        Ok(Err(source)) => Err(Error::Api { what, source }),
    }
}

impl Publisher {
    pub(crate) fn new(client: Client, node_name: String) -> Self {
        let reporter = Reporter {
            controller: "torpor-agent".to_owned(),
            instance: Some(node_name.clone()),
        };
        let recorder = Recorder::new(client.clone(), reporter);
        Self {
            client,
            recorder,
            node_name,
        }
    }

    /// The apiserver.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// The node that the agent runs on.
    pub(crate) fn node_name(&self) -> &str {
        &self.node_name
    }

    /// Conditions of the Pod, with an Event where one changed.
    pub(crate) async fn pod(&self, pod: &Pod, status: &StatusDraft) -> Result<(), Error> {
        let drafts = [
            (conditions::POD_HIBERNATED, &status.hibernated),
            (conditions::POD_RESTORED, &status.restored),
        ];
        let mut changed: Vec<PodCondition> = drafts
            .into_iter()
            .filter_map(|(kind, draft)| changed_condition(pod, kind, draft.as_ref()?))
            .collect();
        let with_events = changed.len();
        if let Some(restored) = &status.restored {
            let told = told::of_restore(pod, restored);
            changed.extend(
                told.iter()
                    .filter_map(|(kind, draft)| changed_condition(pod, kind, draft)),
            );
        }
        if changed.is_empty() {
            return Ok(());
        }
        let namespace = pod.namespace().unwrap_or_default();
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        // A strategic merge patch merges conditions by type and leaves the kubelet's alone.
        let patch = json!({
            "metadata": { "uid": pod.metadata.uid },
            "status": { "conditions": changed },
        });
        let name = pod.name_any();
        let what = format!("the conditions of Pod {namespace}/{name}");
        let (parameters, patch) = (PatchParams::default(), Patch::Strategic(patch));
        within(what, pods.patch_status(&name, &parameters, &patch)).await?;
        for condition in changed.iter().take(with_events) {
            self.event(pod.object_ref(&()), condition).await;
        }
        Ok(())
    }

    /// An Event that could not be written is no reason to hold up a sandbox.
    async fn event(&self, about: ObjectReference, condition: &PodCondition) {
        let reason = condition.reason.clone().unwrap_or_default();
        let Some((type_, action)) = event_of(&reason) else {
            return;
        };
        let event = Event {
            type_,
            reason,
            note: note_of(condition),
            action: action.to_owned(),
            secondary: None,
        };
        self.publish(&event, &about).await;
    }

    async fn publish(&self, event: &Event, about: &ObjectReference) {
        let published = tokio::time::timeout(API_LIMIT, self.recorder.publish(event, about));
        match published.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "cannot write an Event"),
            Err(_) => tracing::warn!("the apiserver did not answer the write of an Event in time"),
        }
    }

    /// An Event: the sandbox is put to sleep before its time, because the node is short of something.
    pub(crate) async fn node_pressure(&self, pod: &Pod, words: &str) {
        let note = format!(
            "{words}: the sandbox has been idle longest and falls asleep before its time (node {})",
            self.node_name
        );
        let event = Event {
            type_: EventType::Normal,
            reason: reasons::event::NODE_PRESSURE.to_owned(),
            note: Some(shortened(&note)),
            action: "Hibernate".to_owned(),
            secondary: None,
        };
        self.publish(&event, &pod.object_ref(&())).await;
    }

    /// An Event on a Sandbox, of which only the name may be known: its memory is lost.
    pub(crate) async fn memory_given_up(
        &self,
        namespace: String,
        sandbox: String,
        uid: Option<String>,
        words: &str,
    ) {
        let event = Event {
            type_: EventType::Warning,
            reason: reasons::event::MEMORY_GIVEN_UP.to_owned(),
            note: Some(shortened(words)),
            action: "Discard".to_owned(),
            secondary: None,
        };
        let about = ObjectReference {
            api_version: Some(Sandbox::api_version(&()).into_owned()),
            kind: Some(Sandbox::kind(&()).into_owned()),
            name: Some(sandbox),
            namespace: Some(namespace),
            uid,
            ..ObjectReference::default()
        };
        self.publish(&event, &about).await;
    }

    /// Puts our finalizer on a snapshot before the first byte is written for it.
    pub(crate) async fn adopt(&self, snapshot: &SandboxSnapshot) -> Result<(), Error> {
        let mut finalizers = snapshot.finalizers().to_vec();
        finalizers.push(IMAGE_FINALIZER.to_owned());
        self.finalizers(snapshot, finalizers).await
    }

    /// Takes our finalizer away: the bytes are gone.
    pub(crate) async fn release(&self, snapshot: &SandboxSnapshot) -> Result<(), Error> {
        let mut finalizers = snapshot.finalizers().to_vec();
        finalizers.retain(|name| name != IMAGE_FINALIZER);
        self.finalizers(snapshot, finalizers).await
    }

    async fn finalizers(
        &self,
        snapshot: &SandboxSnapshot,
        finalizers: Vec<String>,
    ) -> Result<(), Error> {
        let name = snapshot.name_any();
        let patch = json!({ "metadata": {
            "finalizers": finalizers,
            // Somebody else's finalizer must not be lost: only the version that was seen is changed.
            "resourceVersion": snapshot.resource_version(),
        }});
        let what = format!("the finalizers of SandboxSnapshot {name}");
        let patched = self.snapshots(snapshot);
        let parameters = PatchParams::default();
        let merge = Patch::Merge(patch);
        within(what, patched.patch(&name, &parameters, &merge)).await?;
        Ok(())
    }

    fn snapshots(&self, snapshot: &SandboxSnapshot) -> Api<SandboxSnapshot> {
        let namespace = snapshot.namespace().unwrap_or_default();
        Api::namespaced(self.client.clone(), &namespace)
    }

    /// Status of a snapshot, and its finalizer when nothing is kept for it any more. Answers the snapshot as it was written, if it was.
    ///
    /// Only the version that was seen is changed: the controller writes Consumed into the same list, which a merge patch replaces as a whole. Without that word an image that its
    /// sandbox has left behind would look as if it were to be resumed.
    pub(crate) async fn snapshot(
        &self,
        snapshot: &SandboxSnapshot,
        draft: &SnapshotDraft,
        manifest: Option<&SavedImage>,
    ) -> Result<Option<SandboxSnapshot>, Error> {
        if draft.state == SnapshotState::Released {
            self.release(snapshot).await?;
            return Ok(None);
        }
        let current = snapshot.status.clone().unwrap_or_default();
        let wanted = snapshot_status(
            &current,
            draft,
            manifest,
            &self.node_name,
            snapshot.metadata.generation,
            Timestamp::now(),
        );
        if wanted == current {
            return Ok(None);
        }
        let name = snapshot.name_any();
        let what = format!("the status of SandboxSnapshot {name}");
        let patch = Patch::Merge(json!({
            "metadata": { "resourceVersion": snapshot.resource_version() },
            "status": replacing(&current, &wanted),
        }));
        let api = self.snapshots(snapshot);
        let parameters = PatchParams::default();
        within(what, api.patch_status(&name, &parameters, &patch)).await
    }
}

/// The status as a merge patch has it, which takes off only what it names.
fn replacing(current: &SandboxSnapshotStatus, wanted: &SandboxSnapshotStatus) -> serde_json::Value {
    let mut status = json!(wanted);
    if current.consumed_by_pod_uid.is_some() && wanted.consumed_by_pod_uid.is_none() {
        status["consumedByPodUID"] = serde_json::Value::Null;
    }
    status
}

/// What is read of an image for its snapshot's status.
#[derive(Debug, Clone)]
pub(crate) struct SavedImage {
    pub(crate) manifest: Manifest,
    pub(crate) digest: String,
    pub(crate) size_bytes: u64,
}

fn changed_condition(pod: &Pod, kind: &str, draft: &ConditionDraft) -> Option<PodCondition> {
    let status = draft.status.to_string();
    let held = condition(pod, kind);
    let same = held.is_some_and(|held| {
        held.status == status
            && held.reason.as_deref() == Some(draft.reason.as_str())
            && held.message.as_deref().unwrap_or_default() == draft.message
    });
    if same {
        return None;
    }
    let kept = held.filter(|held| held.status == status);
    let since = kept.and_then(|held| held.last_transition_time.clone());
    Some(PodCondition {
        type_: kind.to_owned(),
        status,
        reason: Some(draft.reason.clone()),
        message: Some(draft.message.clone()),
        last_transition_time: Some(since.unwrap_or_else(|| Time(Timestamp::now()))),
        ..PodCondition::default()
    })
}

/// An Event has room for 1024 bytes of message; the condition has the whole.
fn shortened(message: &str) -> String {
    if message.len() <= MAX_NOTE {
        return message.to_owned();
    }
    let kept = message.chars().take(MAX_NOTE / 4);
    kept.chain(std::iter::once('…')).collect()
}

/// What an Event says. Those of one reason that follow each other within minutes are one, with a count and with the words of the first: of a doze, which
/// comes often, only what is true of each. The condition has the image.
fn note_of(condition: &PodCondition) -> Option<String> {
    match condition.reason.as_deref() {
        Some(reasons::hibernated::DOZING) => {
            Some("The sandbox was idle and dozes until it is needed.".to_owned())
        }
        _ => condition.message.as_deref().map(shortened),
    }
}

/// Which conditions' reasons are worth an Event, and what was being done.
fn event_of(reason: &str) -> Option<(EventType, &'static str)> {
    Some(match reason {
        reasons::hibernated::HIBERNATED => (EventType::Normal, "Hibernate"),
        reasons::hibernated::AWAKE => (EventType::Normal, "Wake"),
        reasons::hibernated::DOZING => (EventType::Normal, "Doze"),
        reasons::hibernated::FROZEN => (EventType::Normal, "Freeze"),
        reasons::hibernated::SAVE_FAILED => (EventType::Warning, "Save"),
        reasons::hibernated::RUNTIME_NOT_CAPABLE => (EventType::Warning, "Hibernate"),
        reasons::restored::RESTORED => (EventType::Normal, "Restore"),
        reasons::restored::ROLLED_BACK
        | reasons::restored::COLD_STARTED
        | reasons::restored::IMAGE_MISSING
        | reasons::restored::IMAGE_CORRUPT
        | reasons::restored::FINGERPRINT_MISMATCH
        | reasons::restored::SPEC_MISMATCH
        | reasons::restored::IMAGE_STALE
        | reasons::restored::RUNSC_REVOKED
        | reasons::restored::RESTORE_FAILED => (EventType::Warning, "Restore"),
        _ => return None,
    })
}

fn snapshot_status(
    current: &SandboxSnapshotStatus,
    draft: &SnapshotDraft,
    image: Option<&SavedImage>,
    node_name: &str,
    generation: Option<i64>,
    now: Timestamp,
) -> SandboxSnapshotStatus {
    let mut status = current.clone();
    status.node_name = Some(node_name.to_owned());
    let (truth, reason, message) = match &draft.state {
        SnapshotState::Pending { message } => (
            conditions::Status::False,
            reasons::snapshot::PENDING.to_owned(),
            message.clone(),
        ),
        SnapshotState::Saving => (
            conditions::Status::False,
            reasons::snapshot::SAVING.to_owned(),
            "The sandbox is being saved".to_owned(),
        ),
        SnapshotState::Failed { reason, message } => {
            (conditions::Status::False, reason.clone(), message.clone())
        }
        SnapshotState::Committed { image: id, .. } => (
            conditions::Status::True,
            reasons::snapshot::COMMITTED.to_owned(),
            format!("Image {id} is on node {node_name}"),
        ),
        // A snapshot that is going says nothing new.
        SnapshotState::Releasing | SnapshotState::Released => return status,
    };
    let committed = Draft::new(conditions::COMMITTED, truth, reason, message);
    conditions::set(&mut status.conditions, committed, generation, now);
    if let SnapshotState::Committed {
        image: id,
        consumed_by,
        stale,
    } = &draft.state
    {
        status.image_id = Some(id.to_string());
        if let Some(image) = image {
            describe(&mut status, image);
        }
        if let Some((pod, reason, message)) = consumption(consumed_by.as_ref(), *stale) {
            status.consumed_by_pod_uid = pod;
            let draft = Draft::new(
                conditions::CONSUMED,
                conditions::Status::True,
                reason,
                message,
            );
            conditions::set(&mut status.conditions, draft, generation, now);
        } else if status.consumed_by_pod_uid.take().is_some() {
            // The Pod that had taken it never ran.
            status.conditions.retain(|c| {
                c.type_ != conditions::CONSUMED || c.reason != reasons::snapshot::RESUMED
            });
        }
    }
    status
}

fn consumption(
    consumed_by: Option<&torpor_core::PodUid>,
    stale: bool,
) -> Option<(Option<String>, &'static str, String)> {
    match (consumed_by, stale) {
        (Some(pod), _) => Some((
            Some(pod.to_string()),
            reasons::snapshot::RESUMED,
            format!("Pod {pod} was restored from the image, which is therefore stale"),
        )),
        (None, true) => Some((
            None,
            reasons::snapshot::SUPERSEDED,
            "The sandbox ran on after the save; the image is therefore stale".to_owned(),
        )),
        (None, false) => None,
    }
}

fn describe(status: &mut SandboxSnapshotStatus, image: &SavedImage) {
    let manifest = &image.manifest;
    status.pod_uid = Some(manifest.pod_uid.to_string());
    status.pod_name = Some(manifest.pod_name.clone());
    status.size_bytes = i64::try_from(image.size_bytes).ok();
    status.digest = Some(image.digest.clone());
    status.committed_at = Some(Time(manifest.created_at));
    status.fingerprint = Some(fingerprint(&manifest.fingerprint));
    status.containers = manifest
        .containers
        .iter()
        .filter(|container| !container.image_id.is_empty())
        .map(|container| snapshot::SavedContainer {
            name: container.name.to_string(),
            image_id: container.image_id.clone(),
        })
        .collect();
    status.completed_containers = manifest
        .completed
        .iter()
        .map(|done| snapshot::CompletedContainer {
            name: done.name.to_string(),
            exit_code: done.exit_code,
        })
        .collect();
}

/// The fingerprint in the API's words.
pub(crate) fn fingerprint(of: &torpor_snapshots::Fingerprint) -> snapshot::Fingerprint {
    snapshot::Fingerprint {
        cpu_features_digest: of.cpu_features_digest.clone(),
        flags: of.flags.clone(),
        kernel: of.kernel.clone(),
        platform: of.platform.clone(),
        runsc_digest: of.runsc_digest.clone(),
        runsc_version: of.runsc_version.clone(),
    }
}

#[cfg(test)]
mod tests;

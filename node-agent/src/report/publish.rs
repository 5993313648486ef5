//! Writes to the API: Pod conditions, SandboxSnapshot statuses and finalizers, Events.
//!
//! The agent writes only values that differ from those in its caches. A settled node therefore
//! writes nothing.

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

mod repository;
mod restore_conditions;

/// Time limit of a call to the apiserver. After the limit the agent no longer waits for the answer.
/// Later either a cache shows the effect of the call, or the agent repeats the call.
pub(crate) const API_LIMIT: Duration = Duration::from_secs(20);

/// Maximum length of the message of an Event that the apiserver accepts, in bytes.
const MAX_NOTE: usize = 1024;

/// The reason for which a write to the API failed.
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
    /// The object has changed since the agent read it, so that the value to write is out of date.
    #[error("another client has changed {what} since the agent read it")]
    Conflict { what: String },
}

impl Error {
    /// Reports whether the error concerns this object only, so that writes of other objects may
    /// succeed. The apiserver then has answered and has refused the write of this object.
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

/// Writes the agent's statuses, finalizers and Events.
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
        // The object was deleted meanwhile, so there is nothing to write.
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

    /// Returns the client of the apiserver.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the name of the node on which the agent runs.
    pub(crate) fn node_name(&self) -> &str {
        &self.node_name
    }

    /// Writes the changed conditions of a Pod, and an Event for each of them that has one.
    pub(crate) async fn pod(&self, pod: &Pod, status: &StatusDraft) -> Result<(), Error> {
        let drafts = [
            (conditions::POD_HIBERNATED, &status.hibernated),
            (conditions::POD_RESTORED, &status.restored),
            (conditions::POD_BOUND, &status.bound),
        ];
        let mut changed: Vec<PodCondition> = drafts
            .into_iter()
            .filter_map(|(kind, draft)| changed_condition(pod, kind, draft.as_ref()?))
            .collect();
        let with_events = changed.len();
        if let Some(restored) = &status.restored {
            let derived = restore_conditions::derived_from(pod, restored);
            changed.extend(
                derived
                    .iter()
                    .filter_map(|(kind, draft)| changed_condition(pod, kind, draft)),
            );
        }
        if changed.is_empty() {
            return Ok(());
        }
        let namespace = pod.namespace().unwrap_or_default();
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        // A strategic merge patch merges conditions by type and does not change the kubelet's.
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

    /// Writes an Event about a changed condition, if its reason has one. A failure is only logged:
    /// it is no reason to delay a sandbox.
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

    /// Writes an Event about a Pod: its sandbox falls asleep before its time, because the node is
    /// short of memory or swap. `words` describes the shortage.
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

    /// Writes an Event about a Sandbox: the Sandbox's memory is lost. `uid` is None if the agent
    /// has only the name of the Sandbox.
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

    /// Adds Torpor's finalizer to a snapshot, before the first byte of its image is written.
    pub(crate) async fn adopt(&self, snapshot: &SandboxSnapshot) -> Result<(), Error> {
        let mut finalizers = snapshot.finalizers().to_vec();
        finalizers.push(IMAGE_FINALIZER.to_owned());
        self.finalizers(snapshot, finalizers).await
    }

    /// Removes Torpor's finalizer from a snapshot, after the bytes of its image are gone.
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
            // The patch applies only to the version that was read: otherwise it could remove a
            // finalizer that another client has added since.
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

    /// Writes the status of a snapshot, or removes its finalizer if the node keeps nothing for the
    /// snapshot any more. Returns the written snapshot, or None if nothing was written.
    ///
    /// The write applies only to the version that was read. The controller writes the condition
    /// Consumed into the list of conditions, and a merge patch replaces the whole list. If Consumed
    /// were lost, an image that its sandbox has superseded would look like one to resume from.
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

/// Returns the status as a merge patch. A merge patch removes a field only if the patch names it,
/// so a field to remove becomes null.
fn replacing(current: &SandboxSnapshotStatus, wanted: &SandboxSnapshotStatus) -> serde_json::Value {
    let mut status = json!(wanted);
    if current.consumed_by_pod_uid.is_some() && wanted.consumed_by_pod_uid.is_none() {
        status["consumedByPodUID"] = serde_json::Value::Null;
    }
    status
}

/// The data of an image that its snapshot's status shows.
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

/// Shortens a message to the length that an Event allows. The condition has the whole message.
fn shortened(message: &str) -> String {
    if message.len() <= MAX_NOTE {
        return message.to_owned();
    }
    let kept = message.chars().take(MAX_NOTE / 4);
    kept.chain(std::iter::once('…')).collect()
}

/// Returns the message of an Event about a condition. Events of one reason that follow each other
/// within minutes become one Event, with a count and the message of the first. Dozes are frequent,
/// so their Event has only what is true of each doze. The condition names the image.
fn note_of(condition: &PodCondition) -> Option<String> {
    match condition.reason.as_deref() {
        Some(reasons::hibernated::DOZING) => {
            Some("The sandbox was idle and dozes until it is needed.".to_owned())
        }
        _ => condition.message.as_deref().map(shortened),
    }
}

/// Returns type and action of the Event for a condition's reason; None if the reason has no Event.
fn event_of(reason: &str) -> Option<(EventType, &'static str)> {
    Some(match reason {
        reasons::hibernated::HIBERNATED => (EventType::Normal, "Hibernate"),
        reasons::hibernated::AWAKE => (EventType::Normal, "Wake"),
        reasons::hibernated::DOZING => (EventType::Normal, "Doze"),
        reasons::hibernated::FROZEN => (EventType::Normal, "Freeze"),
        reasons::hibernated::SAVE_FAILED => (EventType::Warning, "Save"),
        reasons::restored::FETCHING => (EventType::Normal, "Fetch"),
        reasons::restored::REPOSITORY_UNAVAILABLE
        | reasons::restored::REPOSITORY_DENIED
        | reasons::restored::SOURCE_NODE_UNAVAILABLE
        | reasons::restored::KEY_MISSING
        | reasons::restored::KEY_SERVICE_UNAVAILABLE
        | reasons::restored::NO_ROOM => (EventType::Warning, "Fetch"),
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
        reasons::bound::BOUND => (EventType::Normal, "Bind"),
        reasons::bound::CLAIM_NOT_DELIVERED
        | reasons::bound::ON_CLAIM_EXEC_FAILED
        | reasons::bound::BIND_FAILED => (EventType::Warning, "Bind"),
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
        // The status of a snapshot that is being deleted stays as it is.
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
            // The Pod that had consumed the image never ran.
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

/// Converts a fingerprint to its form in the API.
pub(crate) fn fingerprint(from: &torpor_snapshots::Fingerprint) -> snapshot::Fingerprint {
    snapshot::Fingerprint {
        cpu_features: from.cpu_features.join(" "),
        cpu_features_digest: from.cpu_features_digest.clone(),
        flags: from.flags.clone(),
        kernel: from.kernel.clone(),
        platform: from.platform.clone(),
        runsc_digest: from.runsc_digest.clone(),
        runsc_version: from.runsc_version.clone(),
    }
}

#[cfg(test)]
mod tests;

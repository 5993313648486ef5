//! Reconciles the controller's part of SandboxSnapshots.
//!
//! The controller reports that the Sandbox of a snapshot does not exist, as long as no agent
//! reports on the snapshot. It also removes the finalizer of a deleted snapshot whose node is gone
//! for good or which no agent knows. The agent of the node does everything else.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use serde_json::{Value, json};
use torpor_api::{
    PodRecord, Sandbox, SandboxSnapshot, annotations,
    conditions::{self, Draft, Status},
    name_hash,
    reasons::{self, event},
};

use crate::{
    archive,
    calls::{self, Answer},
    context::Context,
    events::{self, Note, Severity},
    saved_pod,
};

/// Time from the deletion of a snapshot until an image on an absent node is given up.
const NODE_GRACE: Duration = Duration::from_secs(60);

/// Failure of a pass.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the current state")]
    Observe(#[source] calls::Error),
    #[error("cannot write the SandboxSnapshot")]
    Write(#[source] calls::Error),
    /// The condition has the message already.
    #[error("{0}")]
    Archive(String),
}

impl Error {
    /// Stable name, for metrics and logs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Observe(_) => "ObserveFailed",
            Self::Write(_) => "WriteFailed",
            Self::Archive(_) => "ArchiveFailed",
        }
    }
}

/// Objects around the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observed {
    pub sandbox_exists: bool,
    /// `None` if the apiserver was not asked.
    pub node_exists: Option<bool>,
}

/// Next step for a snapshot.
#[derive(Clone, Debug, PartialEq)]
pub enum Plan {
    Nothing,
    /// Sets the condition Committed, which is outdated.
    SetCommitted(Draft),
    /// Removes the finalizer, because the node with the image is gone for good.
    Abandon {
        node: String,
    },
    /// Removes the finalizer, because no agent knows the snapshot.
    Release,
    Requeue(Duration),
}

/// Decides the next step; pure.
pub fn plan(snapshot: &SandboxSnapshot, observed: Observed, now: Timestamp) -> Plan {
    if let Some(deleted) = &snapshot.metadata.deletion_timestamp {
        return plan_deleted(snapshot, observed, Duration::try_from(now - deleted.0).ok());
    }
    if is_left_to_agent(snapshot) {
        return Plan::Nothing;
    }
    let committed = conditions::find(snapshot.conditions(), conditions::COMMITTED);
    let is_not_found =
        committed.is_some_and(|condition| condition.reason == reasons::snapshot::SANDBOX_NOT_FOUND);
    let draft =
        |reason, message: String| Draft::new(conditions::COMMITTED, Status::False, reason, message);
    match (observed.sandbox_exists, is_not_found) {
        (false, false) => Plan::SetCommitted(draft(
            reasons::snapshot::SANDBOX_NOT_FOUND,
            format!("Sandbox {:?} does not exist", snapshot.spec.sandbox_name),
        )),
        (true, true) => Plan::SetCommitted(draft(
            reasons::snapshot::PENDING,
            "Waiting for the agent of the Sandbox's node".to_owned(),
        )),
        _ => Plan::Nothing,
    }
}

/// Reports whether the node's agent maintains the snapshot's condition.
///
/// The agent also maintains it for a missing image, which the agent looks for.
fn is_left_to_agent(snapshot: &SandboxSnapshot) -> bool {
    snapshot.is_committed() || snapshot.is_missing() || snapshot.is_told_by_agent()
}

/// Returns the node that holds, or was to hold, the image.
///
/// The agent's report counts only if the spec names no node.
fn node_of(snapshot: &SandboxSnapshot) -> Option<&String> {
    let status = snapshot.status.as_ref();
    let asked_for = snapshot.spec.node_name.as_ref();
    asked_for.or_else(|| status?.node_name.as_ref())
}

fn plan_deleted(snapshot: &SandboxSnapshot, observed: Observed, since: Option<Duration>) -> Plan {
    if !snapshot.is_adopted() {
        return Plan::Nothing;
    }
    let since = since.unwrap_or_default();
    match (node_of(snapshot), observed.node_exists) {
        _ if since < NODE_GRACE => Plan::Requeue(NODE_GRACE - since),
        (Some(node), Some(false)) => Plan::Abandon { node: node.clone() },
        _ if !is_known_to_agent(snapshot) => Plan::Release,
        _ => Plan::Requeue(NODE_GRACE),
    }
}

/// Reports whether an agent finds the snapshot without the Pod that it was adopted for.
///
/// An agent does so once it has reported its node and the snapshot names the Pod. If the agent or
/// the Pod went before that report, nothing is kept for the snapshot: the agent removes images that
/// no snapshot names.
fn is_known_to_agent(snapshot: &SandboxSnapshot) -> bool {
    let status = snapshot.status.as_ref();
    let reported = status.is_some_and(|status| status.node_name.is_some());
    let saved = status.is_some_and(|status| status.pod_uid.is_some());
    reported && (saved || snapshot.spec.pod_uid.is_some())
}

/// Runs one pass over a snapshot.
///
/// Returns the time until the next pass that is needed without a change.
pub async fn reconcile(
    snapshot: Arc<SandboxSnapshot>,
    context: Arc<Context>,
) -> Result<Option<Duration>, Error> {
    if snapshot.is_archive() {
        return archive::reconcile(&snapshot, &context).await;
    }
    let namespace = snapshot.namespace().unwrap_or_default();
    record_pod(&snapshot, &context).await?;
    let observed = observe(&snapshot, &namespace, &context).await?;
    let name = snapshot.name_any();
    match plan(&snapshot, observed, Timestamp::now()) {
        Plan::Nothing => {}
        Plan::Requeue(wait) => return Ok(Some(wait)),
        Plan::SetCommitted(draft) => {
            let patch = condition_patch(&snapshot, draft);
            let written = context
                .api
                .patch_status::<SandboxSnapshot>(&namespace, &name, &patch)
                .await;
            unless_changed(written)?;
        }
        Plan::Release => release(&snapshot, &context).await?,
        Plan::Abandon { node } => {
            release(&snapshot, &context).await?;
            let message = format!("Node {node:?} no longer exists, so the image on it is lost");
            let note = Note {
                severity: Severity::Warning,
                reason: event::IMAGE_ABANDONED,
                message,
            };
            events::publish(&context.api, &*snapshot, note).await;
        }
    }
    Ok(None)
}

/// Returns the Pod whose memory a snapshot holds, if the snapshot has no record of it yet.
fn unrecorded<'a>(
    snapshot: &SandboxSnapshot,
    pods: impl IntoIterator<Item = &'a Pod>,
    sandbox: Option<&Sandbox>,
) -> Option<PodRecord> {
    if snapshot.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let record = saved_pod::saved_pod(snapshot, pods, sandbox)?;
    let written = snapshot.annotations().get(annotations::SAVED_POD);
    (written != Some(&record.to_annotation())).then_some(record)
}

/// Records the Pod while it exists: snapshots made by users name no Pod.
async fn record_pod(snapshot: &SandboxSnapshot, context: &Context) -> Result<(), Error> {
    let namespace = snapshot.namespace().unwrap_or_default();
    let of = &snapshot.spec.sandbox_name;
    let pods = context.caches.pods.indexed(&namespace, &name_hash(of));
    let sandbox = context.caches.sandboxes.get(&namespace, of);
    let pods = pods.iter().map(|pod| &**pod);
    let Some(record) = unrecorded(snapshot, pods, sandbox.as_deref()) else {
        return Ok(());
    };
    let patch = json!({"metadata": {
        "uid": snapshot.uid(), "annotations": saved_pod::annotation(&record),
    }});
    let (api, name) = (&context.api, snapshot.name_any());
    let written = api.patch::<SandboxSnapshot>(&namespace, &name, &patch);
    unless_changed(written.await).map(drop)
}

async fn observe(
    snapshot: &SandboxSnapshot,
    namespace: &str,
    context: &Context,
) -> Result<Observed, Error> {
    let mut observed = Observed {
        sandbox_exists: true,
        node_exists: None,
    };
    if snapshot.metadata.deletion_timestamp.is_some() {
        if let Some(node) = node_of(snapshot) {
            let exists = context
                .api
                .exists::<Node>(node)
                .await
                .map_err(Error::Observe)?;
            observed.node_exists = Some(exists);
        }
    } else if !is_left_to_agent(snapshot) {
        let name = &snapshot.spec.sandbox_name;
        let found = context
            .api
            .get::<Sandbox>(namespace, name)
            .await
            .map_err(Error::Observe)?;
        observed.sandbox_exists = found.is_some();
    }
    Ok(observed)
}

async fn release(snapshot: &SandboxSnapshot, context: &Context) -> Result<(), Error> {
    let (namespace, name) = (
        snapshot.namespace().unwrap_or_default(),
        snapshot.name_any(),
    );
    let patch = finalizer_patch(snapshot);
    let api = &context.api;
    let written = api.patch::<SandboxSnapshot>(&namespace, &name, &patch);
    unless_changed(written.await).map(drop)
}

/// Returns the patch that sets a condition.
///
/// The agent writes the same list. The patch therefore holds only for the version it was made from.
pub(crate) fn condition_patch(snapshot: &SandboxSnapshot, draft: Draft) -> Value {
    let mut all = snapshot.conditions().to_vec();
    conditions::set(
        &mut all,
        draft,
        snapshot.metadata.generation,
        Timestamp::now(),
    );
    json!({
        "metadata": {"resourceVersion": snapshot.resource_version()},
        "status": {"conditions": all},
    })
}

fn finalizer_patch(snapshot: &SandboxSnapshot) -> Value {
    let left: Vec<&String> = snapshot
        .finalizers()
        .iter()
        .filter(|name| *name != annotations::IMAGE_FINALIZER)
        .collect();
    json!({"metadata": {
        "resourceVersion": snapshot.resource_version(),
        "finalizers": left,
    }})
}

/// Ignores conflicts and absence: a newer event is on its way. Returns the object that was written.
pub(crate) fn unless_changed<T>(written: Result<T, calls::Error>) -> Result<Option<T>, Error> {
    match written {
        Err(error) if matches!(error.answer(), Answer::Conflict | Answer::NotFound) => Ok(None),
        other => other.map(Some).map_err(Error::Write),
    }
}

#[cfg(test)]
mod tests;

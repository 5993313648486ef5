//! The SandboxSnapshot kind, as far as it is the controller's: one that names no Sandbox is told so as long as that is no agent's to tell, and one that is deleted is let go where
//! its node is gone for good, or no agent knows of it. All else is the business of the node's agent.

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
    calls::{self, Answer},
    context::Context,
    events::{self, Note, Severity},
    saved_pod,
};

/// How long a node may be away before an image on it is given up, counted from the deletion of the snapshot.
const NODE_GRACE: Duration = Duration::from_secs(60);

/// A pass did not come through.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot see what is there")]
    Observe(#[source] calls::Error),
    #[error("cannot write the SandboxSnapshot")]
    Write(#[source] calls::Error),
}

impl Error {
    /// Stable name, for metrics and logs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Observe(_) => "ObserveFailed",
            Self::Write(_) => "WriteFailed",
        }
    }
}

/// What is seen beside the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Around {
    pub sandbox_exists: bool,
    /// `None` when it was not asked for.
    pub node_exists: Option<bool>,
}

/// What to do about a snapshot.
#[derive(Clone, Debug, PartialEq)]
pub enum Plan {
    Nothing,
    /// The Committed condition says something that is no longer, or not yet, so.
    SetCommitted(Draft),
    /// The node with the bytes is gone for good.
    Abandon {
        node: String,
    },
    /// No agent knows of it, and so none takes its finalizer away.
    Release,
    LookAgain(Duration),
}

/// Decides; pure.
pub fn plan(snapshot: &SandboxSnapshot, around: Around, now: Timestamp) -> Plan {
    if let Some(deleted) = &snapshot.metadata.deletion_timestamp {
        return plan_deleted(snapshot, around, Duration::try_from(now - deleted.0).ok());
    }
    if is_left_to_agent(snapshot) {
        return Plan::Nothing;
    }
    let committed = conditions::find(snapshot.conditions(), conditions::COMMITTED);
    let says_not_found =
        committed.is_some_and(|condition| condition.reason == reasons::snapshot::SANDBOX_NOT_FOUND);
    let draft =
        |reason, message: String| Draft::new(conditions::COMMITTED, Status::False, reason, message);
    match (around.sandbox_exists, says_not_found) {
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

/// Whether a node's agent knows all that there is to say of it. Also of one that is missing, which it looks for.
fn is_left_to_agent(snapshot: &SandboxSnapshot) -> bool {
    snapshot.is_committed() || snapshot.is_missing() || snapshot.is_told_by_agent()
}

/// Node that holds, or was to hold, the bytes: an agent's word counts only where nobody else says
/// it.
fn node_of(snapshot: &SandboxSnapshot) -> Option<&String> {
    let status = snapshot.status.as_ref();
    let asked_for = snapshot.spec.node_name.as_ref();
    asked_for.or_else(|| status?.node_name.as_ref())
}

fn plan_deleted(snapshot: &SandboxSnapshot, around: Around, since: Option<Duration>) -> Plan {
    if !snapshot.is_adopted() {
        return Plan::Nothing;
    }
    let since = since.unwrap_or_default();
    match (node_of(snapshot), around.node_exists) {
        _ if since < NODE_GRACE => Plan::LookAgain(NODE_GRACE - since),
        (Some(node), Some(false)) => Plan::Abandon { node: node.clone() },
        _ if !is_known_to_agent(snapshot) => Plan::Release,
        _ => Plan::LookAgain(NODE_GRACE),
    }
}

/// Whether an agent finds it without the Pod that it was adopted for: it has said of this Pod's snapshot that it is its own. One that died, or whose Pod went, before it could
/// say so has nothing that is kept for the snapshot: an image that no snapshot names is removed.
fn is_known_to_agent(snapshot: &SandboxSnapshot) -> bool {
    let status = snapshot.status.as_ref();
    let told = status.is_some_and(|status| status.node_name.is_some());
    let saved = status.is_some_and(|status| status.pod_uid.is_some());
    told && (saved || snapshot.spec.pod_uid.is_some())
}

/// One pass over one snapshot. Says when to look again though nothing has changed.
pub async fn reconcile(
    snapshot: Arc<SandboxSnapshot>,
    context: Arc<Context>,
) -> Result<Option<Duration>, Error> {
    let namespace = snapshot.namespace().unwrap_or_default();
    record_pod(&snapshot, &context).await?;
    let around = look_around(&snapshot, &namespace, &context).await?;
    let name = snapshot.name_any();
    match plan(&snapshot, around, Timestamp::now()) {
        Plan::Nothing => {}
        Plan::LookAgain(wait) => return Ok(Some(wait)),
        Plan::SetCommitted(draft) => {
            let patch = committed_patch(&snapshot, draft);
            let written = context
                .api
                .patch_status::<SandboxSnapshot>(&namespace, &name, &patch)
                .await;
            settled(written.map(drop))?;
        }
        Plan::Release => release(&snapshot, &context).await?,
        Plan::Abandon { node } => {
            release(&snapshot, &context).await?;
            let message = format!("Node {node:?} is gone, and the image on it with it");
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

/// The Pod whose memory a snapshot holds, if that is yet to be recorded on it.
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

/// Records the Pod while it is there to tell: users name none in a snapshot.
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
    settled(written.await.map(drop))
}

async fn look_around(
    snapshot: &SandboxSnapshot,
    namespace: &str,
    context: &Context,
) -> Result<Around, Error> {
    let mut around = Around {
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
            around.node_exists = Some(exists);
        }
    } else if !is_left_to_agent(snapshot) {
        let name = &snapshot.spec.sandbox_name;
        let found = context
            .api
            .get::<Sandbox>(namespace, name)
            .await
            .map_err(Error::Observe)?;
        around.sandbox_exists = found.is_some();
    }
    Ok(around)
}

async fn release(snapshot: &SandboxSnapshot, context: &Context) -> Result<(), Error> {
    let (namespace, name) = (
        snapshot.namespace().unwrap_or_default(),
        snapshot.name_any(),
    );
    let patch = finalizer_patch(snapshot);
    let api = &context.api;
    let written = api.patch::<SandboxSnapshot>(&namespace, &name, &patch);
    settled(written.await.map(drop))
}

/// The agent writes the same list, so that the patch holds only for the version it was made from.
fn committed_patch(snapshot: &SandboxSnapshot, draft: Draft) -> Value {
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

/// A conflict or an absence means that a newer event is on its way.
fn settled(written: Result<(), calls::Error>) -> Result<(), Error> {
    match written {
        Err(error) if matches!(error.answer(), Answer::Conflict | Answer::NotFound) => Ok(()),
        other => other.map_err(Error::Write),
    }
}

#[cfg(test)]
mod tests;

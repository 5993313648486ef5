//! Provides GKE's PodSnapshots on clusters other than GKE. Upstream's Python SDK asks for them when
//! it suspends a sandbox (`k8s_agent_sandbox.gke_extensions.snapshots`). SandboxSnapshots hold the
//! memory.
//!
//! The part is active only where `deploy/podsnapshots` is applied. Without its CRDs there is
//! nothing to watch. Without its role nothing may be watched, as on GKE, which has the real CRDs.
//!
//! A trigger, its SandboxSnapshot and its PodSnapshot have the same name. The SandboxSnapshot
//! belongs to the trigger until it is committed, then to the PodSnapshot. Garbage collection
//! thereby deletes it together with the object that still needs it.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::json;
use torpor_api::{PodSnapshot, PodSnapshotManualTrigger, SandboxSnapshot, conditions};

use self::plan::Step;
pub(crate) use self::plan::newest;
use crate::{
    calls::{self, Answer},
    context::Context,
};

mod plan;

/// Interval of passes over a trigger in progress when nothing changes.
const REQUEUE: Duration = Duration::from_secs(10);

/// Failure of a pass.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the current state")]
    Observe(#[source] calls::Error),
    #[error("cannot write the {kind}")]
    Write {
        kind: &'static str,
        #[source]
        source: calls::Error,
    },
}

impl Error {
    /// Stable name, for metrics and logs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Observe(_) => "ObserveFailed",
            Self::Write { .. } => "WriteFailed",
        }
    }
}

/// Runs one pass over a trigger.
///
/// Each step changes a watched object, and that change starts the pass for the next step.
pub async fn trigger(
    trigger: Arc<PodSnapshotManualTrigger>,
    context: Arc<Context>,
) -> Result<Option<Duration>, Error> {
    let (namespace, name) = (trigger.namespace().unwrap_or_default(), trigger.name_any());
    if trigger.metadata.deletion_timestamp.is_some() {
        return Ok(None);
    }
    let observed = plan::Observed {
        pod: context
            .caches
            .pods
            .get(&namespace, &trigger.spec.target_pod),
        image: context.caches.snapshots.get(&namespace, &name),
        snapshot: context.caches.pod_snapshots.get(&namespace, &name),
    };
    let capable = |pod: &Pod| can_be_saved(pod, &context);
    let mut step = plan::trigger(&trigger, &observed, capable);
    if matches!(&step, Some(Step::Settle(draft)) if draft.status == "False") {
        // A failure is final, and the caches may be behind.
        let observed = observe(&trigger, &context).await?;
        step = plan::trigger(&trigger, &observed, capable);
    }
    let Some(step) = step else {
        // The end of the Pod is no event of the trigger.
        return Ok(trigger.outcome().is_none().then_some(REQUEUE));
    };
    let api = &context.api;
    match step {
        Step::MakeImage(object) => {
            let result = api.create::<SandboxSnapshot>(&namespace, object).await;
            ignore_existing("SandboxSnapshot", result)
        }
        Step::MakeSnapshot(object) => {
            let result = api.create::<PodSnapshot>(&namespace, object).await;
            ignore_existing("PodSnapshot", result)
        }
        Step::Settle(draft) => {
            let created = (draft.status == "True").then(|| json!({"name": name}));
            let mut all = trigger.status.clone().unwrap_or_default().conditions;
            let (generation, now) = (trigger.metadata.generation, Timestamp::now());
            conditions::set(&mut all, draft, generation, now);
            let patch = json!({
                "metadata": {"resourceVersion": trigger.resource_version()},
                "status": {"conditions": all, "snapshotCreated": created},
            });
            let written = api.patch_status::<PodSnapshotManualTrigger>(&namespace, &name, &patch);
            ignore_conflict("PodSnapshotManualTrigger", written.await)
        }
        Step::DropImage {
            uid,
            resource_version,
        } => {
            let version = resource_version.as_deref();
            let deleted = api.delete::<SandboxSnapshot>(&namespace, &name, &uid, version);
            ignore_conflict("SandboxSnapshot", deleted.await)
        }
    }?;
    Ok(None)
}

/// Runs one pass over a PodSnapshot: takes over its image and sets its condition Ready.
pub async fn snapshot(
    snapshot: Arc<PodSnapshot>,
    context: Arc<Context>,
) -> Result<Option<Duration>, Error> {
    let (namespace, name) = (
        snapshot.namespace().unwrap_or_default(),
        snapshot.name_any(),
    );
    if snapshot.metadata.deletion_timestamp.is_some() {
        return Ok(None);
    }
    let api = &context.api;
    let image = match context.caches.snapshots.get(&namespace, &name) {
        Some(image) => Some(image),
        None if plan::unavailable(&snapshot).is_some() => None,
        // The cache may be behind, and a reported absence is final for the trigger.
        None => {
            let found = api.get::<SandboxSnapshot>(&namespace, &name).await;
            found.map_err(Error::Observe)?.map(Arc::new)
        }
    };
    if let Some(image) = &image
        && let Some(patch) = plan::hand_over(&snapshot, image)
    {
        let written = api
            .patch::<SandboxSnapshot>(&namespace, &name, &patch)
            .await;
        return ignore_conflict("SandboxSnapshot", written).map(|()| None);
    }
    if let Some(draft) = plan::ready(&snapshot, image.as_deref()) {
        let mut all = snapshot.conditions().to_vec();
        let (generation, now) = (snapshot.metadata.generation, Timestamp::now());
        conditions::set(&mut all, draft, generation, now);
        let patch = json!({
            "metadata": {"resourceVersion": snapshot.resource_version()},
            "status": {"conditions": all},
        });
        let written = api.patch_status::<PodSnapshot>(&namespace, &name, &patch);
        return ignore_conflict("PodSnapshot", written.await).map(|()| None);
    }
    Ok(None)
}

/// Reads the objects around a trigger from the apiserver.
async fn observe(
    trigger: &PodSnapshotManualTrigger,
    context: &Context,
) -> Result<plan::Observed, Error> {
    let (namespace, name) = (trigger.namespace().unwrap_or_default(), trigger.name_any());
    let api = &context.api;
    let pod = api.get(&namespace, &trigger.spec.target_pod).await;
    let image = api.get(&namespace, &name).await;
    let snapshot = api.get(&namespace, &name).await;
    Ok(plan::Observed {
        pod: pod.map_err(Error::Observe)?.map(Arc::new),
        image: image.map_err(Error::Observe)?.map(Arc::new),
        snapshot: snapshot.map_err(Error::Observe)?.map(Arc::new),
    })
}

/// Checks whether the node of a Pod can save its memory. The error says why not.
fn can_be_saved(pod: &Pod, context: &Context) -> Result<(), String> {
    let spec = pod.spec.as_ref();
    let class = spec.and_then(|spec| spec.runtime_class_name.as_deref());
    let class = class.and_then(|class| context.caches.runtime_classes.get("", class));
    let handler = class.as_ref().map_or("", |class| class.handler.as_str());
    let name = spec.and_then(|spec| spec.node_name.as_deref());
    let node = name.and_then(|name| context.caches.nodes.get("", name));
    if node.is_some_and(|node| node.capabilities(handler).hibernate) {
        return Ok(());
    }
    let runtime = match handler {
        "" => "the default runtime".to_owned(),
        handler => format!("runtime {handler}"),
    };
    let node = name.unwrap_or_default();
    Err(format!("{runtime} on node {node:?} cannot save memory"))
}

/// Ignores conflicts and absence: a newer event is on its way.
fn ignore_conflict<T>(kind: &'static str, written: Result<T, calls::Error>) -> Result<(), Error> {
    match written {
        Err(error) if matches!(error.answer(), Answer::Conflict | Answer::NotFound) => Ok(()),
        Err(source) => Err(Error::Write { kind, source }),
        Ok(_) => Ok(()),
    }
}

/// Ignores an existing object of that name: the watch is behind.
fn ignore_existing<T>(kind: &'static str, created: Result<T, calls::Error>) -> Result<(), Error> {
    match created {
        Err(error) if error.answer() == Answer::AlreadyExists => Ok(()),
        Err(source) => Err(Error::Write { kind, source }),
        Ok(_) => Ok(()),
    }
}

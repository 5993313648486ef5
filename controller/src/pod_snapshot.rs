//! GKE's PodSnapshots for clusters that are not GKE: what upstream's Python SDK asks for when it suspends a sandbox (`k8s_agent_sandbox.gke_extensions.snapshots`), done by SandboxSnapshots.
//!
//! Only where `deploy/podsnapshots` is applied: without its definitions there is nothing to watch, and without its role (as on GKE, whose definitions are the real ones) nothing may be.
//!
//! A trigger, its SandboxSnapshot and its PodSnapshot have one name. The SandboxSnapshot belongs to the trigger until it is committed, then to the PodSnapshot, so that garbage
//! collection deletes it with the one that still needs it.

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

/// How often a trigger that is under way is looked at, though nothing has changed.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// A pass did not come through.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot see what is there")]
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

/// One pass over one trigger. Each step changes an object that is watched, and the next pass takes the next step.
pub async fn trigger(
    trigger: Arc<PodSnapshotManualTrigger>,
    context: Arc<Context>,
) -> Result<Option<Duration>, Error> {
    let (namespace, name) = (trigger.namespace().unwrap_or_default(), trigger.name_any());
    if trigger.metadata.deletion_timestamp.is_some() {
        return Ok(None);
    }
    let around = plan::Around {
        pod: context
            .caches
            .pods
            .get(&namespace, &trigger.spec.target_pod),
        image: context.caches.snapshots.get(&namespace, &name),
        snapshot: context.caches.pod_snapshots.get(&namespace, &name),
    };
    let capable = |pod: &Pod| can_be_saved(pod, &context);
    let mut step = plan::trigger(&trigger, &around, capable);
    if matches!(&step, Some(Step::Settle(draft)) if draft.status == "False") {
        // It is final, and the watches may be behind.
        let around = look_around(&trigger, &context).await?;
        step = plan::trigger(&trigger, &around, capable);
    }
    let Some(step) = step else {
        // That its Pod has ended is no event of a trigger's.
        return Ok(trigger.outcome().is_none().then_some(LOOK_AGAIN));
    };
    let api = &context.api;
    match step {
        Step::MakeImage(object) => {
            let result = api.create::<SandboxSnapshot>(&namespace, object).await;
            made("SandboxSnapshot", result)
        }
        Step::MakeSnapshot(object) => {
            let result = api.create::<PodSnapshot>(&namespace, object).await;
            made("PodSnapshot", result)
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
            settled("PodSnapshotManualTrigger", written.await)
        }
        Step::DropImage {
            uid,
            resource_version,
        } => {
            let version = resource_version.as_deref();
            let deleted = api.delete::<SandboxSnapshot>(&namespace, &name, &uid, version);
            settled("SandboxSnapshot", deleted.await)
        }
    }?;
    Ok(None)
}

/// One pass over one PodSnapshot: whose its image is, and whether it can be had.
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
        // The watch may be behind, and what is said of an absence is final for the trigger.
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
        return settled("SandboxSnapshot", written).map(|()| None);
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
        return settled("PodSnapshot", written.await).map(|()| None);
    }
    Ok(None)
}

/// What the apiserver itself says is there beside a trigger.
async fn look_around(
    trigger: &PodSnapshotManualTrigger,
    context: &Context,
) -> Result<plan::Around, Error> {
    let (namespace, name) = (trigger.namespace().unwrap_or_default(), trigger.name_any());
    let api = &context.api;
    let pod = api.get(&namespace, &trigger.spec.target_pod).await;
    let image = api.get(&namespace, &name).await;
    let snapshot = api.get(&namespace, &name).await;
    Ok(plan::Around {
        pod: pod.map_err(Error::Observe)?.map(Arc::new),
        image: image.map_err(Error::Observe)?.map(Arc::new),
        snapshot: snapshot.map_err(Error::Observe)?.map(Arc::new),
    })
}

/// Whether the node of a Pod can save its memory; else why not.
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

/// A conflict or an absence means that a newer event is on its way.
fn settled<T>(kind: &'static str, written: Result<T, calls::Error>) -> Result<(), Error> {
    match written {
        Err(error) if matches!(error.answer(), Answer::Conflict | Answer::NotFound) => Ok(()),
        Err(source) => Err(Error::Write { kind, source }),
        Ok(_) => Ok(()),
    }
}

/// A name that is taken means that the watch is behind.
fn made<T>(kind: &'static str, made: Result<T, calls::Error>) -> Result<(), Error> {
    match made {
        Err(error) if error.answer() == Answer::AlreadyExists => Ok(()),
        Err(source) => Err(Error::Write { kind, source }),
        Ok(_) => Ok(()),
    }
}

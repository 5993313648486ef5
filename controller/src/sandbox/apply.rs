//! Client required. Executes the steps of a plan without choosing. Each step is one call, plus the
//! reads of its fence. When a step finds another state than the plan assumed, it returns a fact,
//! and the pass plans again.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use kube::ResourceExt;
use serde_json::{Value, json};
use torpor_api::{
    OperatingMode, Sandbox, SandboxSnapshot, annotations,
    conditions::{self, Draft, Status},
    reasons, taker,
};
use tracing::Instrument;

use super::dereference::{Fact, Observed};
use super::plan::{Action, Area, ImageFence, ImageUse, Plan, SnapshotFence, Step, pod_name_patch};
use crate::{
    calls::{self, Answer, Apiserver},
    saved_pod, trace,
};

/// Outcome of one step.
#[derive(Debug)]
enum Outcome {
    Done(Option<Fact>),
    /// The state is not what the plan assumed; plan again with this fact.
    Unexpected(Fact),
    Failed(Failure),
    /// The step may have taken effect; observe again later.
    Unknown(calls::Error),
}

/// Step that the apiserver refused.
#[derive(Debug)]
pub struct Failure {
    pub area: Area,
    /// Message for the status, in upstream's words.
    pub message: String,
    /// True if the Pod exists although the step failed.
    pub pod_stays: bool,
    /// True if the step was to create the Pod.
    pub makes_pod: bool,
    /// True if the object is invalid, so that an early retry does not help.
    pub lasts: bool,
}

/// Result of a plan.
#[derive(Debug, Default)]
pub struct Applied {
    pub failures: Vec<Failure>,
    /// Pod as created or changed in this pass.
    pub pod: Option<Arc<Pod>>,
    /// Name of the created Pod.
    pub made_pod: Option<String>,
    /// Service as created or changed in this pass.
    pub service: Option<Arc<Service>>,
    /// True if the Sandbox was deleted.
    pub sandbox_deleted: bool,
    /// True if the pass must plan again with the learned facts.
    pub again: bool,
    /// Error of a step with an unknown outcome.
    pub unknown: Option<calls::Error>,
}

/// Executes the steps in order.
///
/// A failure skips the rest of its area. An unknown outcome ends the pass, because no later step
/// may depend on it.
pub async fn apply(plan: &Plan, observed: &mut Observed, api: &Apiserver) -> Applied {
    let mut applied = Applied::default();
    for Step { area, action } in &plan.steps {
        if applied.failures.iter().any(|failure| failure.area == *area) {
            continue;
        }
        let step = execute(*area, action, &observed.sandbox, api);
        match step.instrument(trace::step(*area)).await {
            Outcome::Done(fact) => {
                applied.note(action, fact.as_ref());
                if let Some(fact) = fact {
                    observed.learn(fact);
                }
            }
            Outcome::Unexpected(fact) => {
                tracing::debug!(?fact, "the state is not as planned");
                observed.learn(fact);
                applied.again = true;
                return applied;
            }
            Outcome::Failed(failure) => applied.failures.push(failure),
            Outcome::Unknown(error) => {
                applied.unknown = Some(error);
                return applied;
            }
        }
    }
    applied
}

impl Applied {
    /// Reports whether the objects of all failed steps are invalid.
    pub fn is_invalid(&self) -> bool {
        !self.failures.is_empty() && self.failures.iter().all(|failure| failure.lasts)
    }

    fn note(&mut self, action: &Action, fact: Option<&Fact>) {
        if let (Action::CreatePod { .. }, Some(Fact::Pod(pod))) = (action, fact) {
            self.made_pod = Some(pod.name_any());
        }
        match (action, fact) {
            (_, Some(Fact::Pod(pod))) => self.pod = Some(Arc::clone(pod)),
            (_, Some(Fact::Service(service))) => self.service = Some(Arc::clone(service)),
            (Action::DeleteSandbox { .. } | Action::DeleteArchived { .. }, _) => {
                self.sandbox_deleted = true
            }
            _ => {}
        }
    }
}

/// Executes one action. It decides nothing.
async fn execute(area: Area, action: &Action, sandbox: &Sandbox, api: &Apiserver) -> Outcome {
    let ns = &sandbox.namespace().unwrap_or_default();
    let name = &sandbox.name_any();
    let failed = |doing: &str, error: &calls::Error| Failure {
        area,
        message: if doing.is_empty() {
            error.to_string()
        } else {
            format!("{doing}: {error}")
        },
        pod_stays: matches!(action, Action::DeletePod { .. }),
        makes_pod: matches!(action, Action::CreatePod { .. }),
        lasts: is_of_spec(action) && error.is_invalid(),
    };
    match action {
        Action::CreateClaim(claim) => {
            let created = api.create::<PersistentVolumeClaim>(ns, claim.clone()).await;
            or_existing(
                created,
                api,
                ns,
                claim,
                |c| Fact::Claim(Arc::new(c)),
                failed,
            )
            .await
        }
        Action::PatchClaim { name, patch } => {
            let patched = api.patch::<PersistentVolumeClaim>(ns, name, patch).await;
            let doing = "failed to patch PVC with owner reference";
            done(patched.map(|claim| Fact::Claim(Arc::new(claim))), |e| {
                failed(doing, e)
            })
        }
        Action::WakeUp { resume } => wake_up(api, sandbox, *resume, failed).await,
        Action::ForgetPodName => set_pod_name(api, sandbox, None, failed).await,
        Action::ForgetLastPod => {
            let patch = saved_pod::last_pod_patch(sandbox, None);
            match api.patch::<Sandbox>(ns, name, &patch).await {
                Ok(sandbox) => Outcome::Done(Some(Fact::Sandbox(Arc::new(sandbox)))),
                // The Sandbox changed since it was read; the next pass sees the change.
                Err(error) if error.answer() == Answer::Conflict => Outcome::Unknown(error),
                Err(error) => refused(error, |e| failed("failed to forget the last pod", e)),
            }
        }
        Action::RecordPodName(pod) => set_pod_name(api, sandbox, Some(pod), failed).await,
        Action::CreatePod { pod, image } => create_pod(api, ns, pod, image.as_ref(), failed).await,
        Action::PatchPod { name, patch } => match api.patch::<Pod>(ns, name, patch).await {
            Ok(pod) => Outcome::Done(Some(Fact::Pod(Arc::new(pod)))),
            Err(error) if matches!(error.answer(), Answer::NotFound | Answer::Conflict) => {
                observe_pod(api, ns, name).await
            }
            Err(error) => refused(error, |e| failed("failed to patch pod", e)),
        },
        Action::DeletePod {
            name,
            uid,
            resource_version,
            image,
        } => {
            let version = resource_version.as_deref();
            delete_pod(api, ns, (name, uid, version), image.as_ref(), failed).await
        }
        Action::CreateService(service) => {
            let created = api.create::<Service>(ns, service.clone()).await;
            or_existing(
                created,
                api,
                ns,
                service,
                |s| Fact::Service(Arc::new(s)),
                failed,
            )
            .await
        }
        Action::PatchService {
            name,
            patch,
            adopts,
        } => {
            let doing = if *adopts {
                "failed to update service with owner reference"
            } else {
                "failed to patch owned service"
            };
            let patched = api.patch::<Service>(ns, name, patch).await;
            done(
                patched.map(|service| Fact::Service(Arc::new(service))),
                |e| failed(doing, e),
            )
        }
        Action::DeleteService { name, uid } => {
            match deleted(api.delete::<Service>(ns, name, uid, None).await) {
                Ok(()) => Outcome::Done(Some(Fact::NoService)),
                Err(error) => refused(error, |e| failed("failed to delete service", e)),
            }
        }
        Action::CreateSnapshot(snapshot) => {
            let created = api.create::<SandboxSnapshot>(ns, snapshot.clone()).await;
            or_existing(
                created,
                api,
                ns,
                snapshot,
                |s| Fact::Snapshot(Arc::new(s)),
                failed,
            )
            .await
        }
        Action::DeleteSnapshot { name, uid, fence } => {
            delete_snapshot(api, ns, (name, uid), fence, failed).await
        }
        Action::PatchSnapshot { name, patch } => patch_snapshot(api, ns, name, patch).await,
        Action::SupersedeSnapshot { name, message } => {
            supersede(api, ns, name, message, failed).await
        }
        Action::DeleteSandbox { uid } => delete_sandbox(api, ns, (name, uid, None), failed).await,
        Action::DeleteArchived {
            uid,
            resource_version,
            archive,
            image,
        } => {
            for fence in [archive, image] {
                match check_image(api, ns, fence).await {
                    Err(outcome) => return outcome,
                    Ok(found) if !found.is_uploaded() => {
                        return Outcome::Unexpected(Fact::Snapshot(Arc::new(found)));
                    }
                    Ok(_) => {}
                }
            }
            delete_sandbox(api, ns, (name, uid, Some(resource_version)), failed).await
        }
        Action::ForgetArchive => {
            let patch = json!({"metadata": {
                "resourceVersion": sandbox.resource_version(),
                "annotations": {annotations::ARCHIVE_AFTER: null},
            }});
            match api.patch::<Sandbox>(ns, name, &patch).await {
                Ok(sandbox) => Outcome::Done(Some(Fact::Sandbox(Arc::new(sandbox)))),
                // The Sandbox changed since it was read; the next pass sees the change.
                Err(error) if error.answer() == Answer::Conflict => Outcome::Unknown(error),
                Err(error) => refused(error, |e| failed("failed to end the archive request", e)),
            }
        }
    }
}

/// Reports whether the written object derives only from the Sandbox's spec, which does not change
/// by itself.
fn is_of_spec(action: &Action) -> bool {
    matches!(
        action,
        Action::CreateClaim(_)
            | Action::PatchClaim { .. }
            | Action::CreatePod { .. }
            | Action::PatchPod { .. }
            | Action::CreateService(_)
            | Action::PatchService { .. }
    )
}

fn refused(error: calls::Error, failure: impl FnOnce(&calls::Error) -> Failure) -> Outcome {
    if error.answer() == Answer::Unknown {
        return Outcome::Unknown(error);
    }
    Outcome::Failed(failure(&error))
}

fn done(
    result: Result<Fact, calls::Error>,
    failure: impl FnOnce(&calls::Error) -> Failure,
) -> Outcome {
    match result {
        Ok(fact) => Outcome::Done(Some(fact)),
        Err(error) => refused(error, failure),
    }
}

/// Treats an object that is gone or was replaced as deleted.
fn deleted(result: Result<(), calls::Error>) -> Result<(), calls::Error> {
    match result {
        Err(error) if error.answer() == Answer::NotFound => Ok(()),
        other => other,
    }
}

/// Returns the outcome of a create. If the name is taken, it reads the existing object for a new
/// plan.
async fn or_existing<K: calls::Namespaced>(
    created: Result<K, calls::Error>,
    api: &Apiserver,
    namespace: &str,
    object: &Value,
    fact: impl Fn(K) -> Fact,
    failed: impl Fn(&str, &calls::Error) -> Failure,
) -> Outcome {
    let error = match created {
        Ok(object) => return Outcome::Done(Some(fact(object))),
        Err(error) => error,
    };
    if error.answer() != Answer::AlreadyExists {
        return refused(error, |e| failed("", e));
    }
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    match api.get::<K>(namespace, name).await {
        Ok(Some(existing)) => Outcome::Unexpected(fact(existing)),
        // The object was deleted between the two calls.
        Ok(None) => Outcome::Unknown(error),
        Err(error) => refused(error, |e| failed("", e)),
    }
}

async fn set_pod_name(
    api: &Apiserver,
    sandbox: &Sandbox,
    pod: Option<&String>,
    failed: impl Fn(&str, &calls::Error) -> Failure,
) -> Outcome {
    let mut patch = pod_name_patch(pod.map(String::as_str));
    // This is the first write that every Sandbox gets. Later passes continue this pass's trace.
    if !sandbox
        .annotations()
        .contains_key(annotations::TRACE_CONTEXT)
        && let Some(carrier) = trace::carrier()
    {
        patch["metadata"]["annotations"][annotations::TRACE_CONTEXT] = carrier.into();
    }
    let doing = match pod {
        Some(_) => "failed to update pod name annotation",
        None => "failed to clear pod name annotation",
    };
    let (namespace, name) = (sandbox.namespace().unwrap_or_default(), sandbox.name_any());
    let patched = api.patch::<Sandbox>(&namespace, &name, &patch).await;
    done(
        patched.map(|sandbox| Fact::Sandbox(Arc::new(sandbox))),
        |e| failed(doing, e),
    )
}

/// Resumes the Sandbox and removes its wake-up time.
///
/// A user may have suspended it or set another time since it was read. The patch therefore holds
/// only for the version it was made from.
async fn wake_up(
    api: &Apiserver,
    sandbox: &Sandbox,
    resume: bool,
    failed: impl Fn(&str, &calls::Error) -> Failure,
) -> Outcome {
    let mut patch = json!({
        "metadata": {
            "resourceVersion": sandbox.resource_version(),
            "annotations": {annotations::NEXT_WAKEUP: null},
        },
    });
    if resume {
        patch["spec"]["operatingMode"] = json!(OperatingMode::Running);
    }
    let (namespace, name) = (sandbox.namespace().unwrap_or_default(), sandbox.name_any());
    match api.patch::<Sandbox>(&namespace, &name, &patch).await {
        // The changed Sandbox needs another plan.
        Ok(sandbox) => Outcome::Unexpected(Fact::Sandbox(Arc::new(sandbox))),
        Err(error) if error.answer() == Answer::Conflict => Outcome::Unknown(error),
        Err(error) => refused(error, |e| failed("failed to wake sandbox up", e)),
    }
}

async fn observe_pod(api: &Apiserver, namespace: &str, name: &str) -> Outcome {
    match api.get::<Pod>(namespace, name).await {
        Ok(Some(pod)) => Outcome::Unexpected(Fact::Pod(Arc::new(pod))),
        Ok(None) => Outcome::Unexpected(Fact::NoPod(name.to_owned())),
        Err(error) => Outcome::Unknown(error),
    }
}

async fn create_pod(
    api: &Apiserver,
    namespace: &str,
    pod: &Value,
    image: Option<&ImageFence>,
    failed: impl Fn(&str, &calls::Error) -> Failure,
) -> Outcome {
    if let Some(image) = image {
        // Before another node can claim the image.
        let marks = image.use_of == ImageUse::Resume
            && !pod["metadata"]["annotations"][annotations::RESTORE_DIGEST].is_null();
        let checked = match marks {
            true => mark_image(api, namespace, image, TAKEN).await,
            false => check_image(api, namespace, image).await.map(drop),
        };
        if let Err(outcome) = checked {
            return outcome;
        }
    }
    let created = api.create::<Pod>(namespace, pod.clone()).await;
    or_existing(
        created,
        api,
        namespace,
        pod,
        |pod| Fact::Pod(Arc::new(pod)),
        failed,
    )
    .await
}

async fn delete_pod(
    api: &Apiserver,
    namespace: &str,
    (name, uid, resource_version): (&str, &str, Option<&str>),
    image: Option<&ImageFence>,
    failed: impl Fn(&str, &calls::Error) -> Failure,
) -> Outcome {
    if let Some(image) = image
        && let Err(outcome) = mark_image(api, namespace, image, REPLACES).await
    {
        return outcome;
    }
    match api
        .delete::<Pod>(namespace, name, uid, resource_version)
        .await
    {
        // The Pod stays visible until it is gone; the watch reports that.
        Ok(()) => Outcome::Done(None),
        Err(error) if matches!(error.answer(), Answer::NotFound | Answer::Conflict) => {
            observe_pod(api, namespace, name).await
        }
        Err(error) => refused(error, |e| failed("failed to delete pod", e)),
    }
}

async fn delete_sandbox(
    api: &Apiserver,
    namespace: &str,
    (name, uid, resource_version): (&str, &str, Option<&str>),
    failed: impl Fn(&str, &calls::Error) -> Failure,
) -> Outcome {
    let delete = api.delete::<Sandbox>(namespace, name, uid, resource_version);
    match deleted(delete.await) {
        Ok(()) => Outcome::Done(None),
        // The Sandbox changed since it was read; the next pass sees the change.
        Err(error) if error.answer() == Answer::Conflict => Outcome::Unknown(error),
        Err(error) => refused(error, |e| failed("failed to delete sandbox", e)),
    }
}

/// Checks at the apiserver whether an image is still as the plan assumed.
///
/// The caches may lack exactly the write that matters.
async fn check_image(
    api: &Apiserver,
    namespace: &str,
    fence: &ImageFence,
) -> Result<SandboxSnapshot, Outcome> {
    let found = api
        .get::<SandboxSnapshot>(namespace, &fence.name)
        .await
        .map_err(Outcome::Unknown)?;
    let Some(snapshot) = found else {
        return Err(Outcome::Unexpected(Fact::NoSnapshot(fence.name.clone())));
    };
    let reported = snapshot.status.as_ref().and_then(|s| s.node_name.as_ref());
    let usable = snapshot.uid().as_deref() == Some(&fence.uid)
        && snapshot.metadata.deletion_timestamp.is_none()
        && snapshot.is_committed()
        && fence
            .node
            .as_ref()
            .is_none_or(|node| reported == Some(node))
        && (fence.use_of == ImageUse::Copy || !snapshot.is_consumed());
    if usable {
        Ok(snapshot)
    } else {
        Err(Outcome::Unexpected(Fact::Snapshot(Arc::new(snapshot))))
    }
}

/// Mark of an image that replaces its Pod. A pass that deletes the snapshot because its Pod lives
/// does so only as long as this mark is not written.
const REPLACES: (&str, &str) = (annotations::REPLACES_POD, "true");
/// Mark of an image for which a Pod is about to be made.
const TAKEN: (&str, &str) = (annotations::TAKEN_BY, taker::PENDING);

/// Ensures that an image may be used, and marks the snapshot.
async fn mark_image(
    api: &Apiserver,
    namespace: &str,
    fence: &ImageFence,
    (key, value): (&str, &str),
) -> Result<(), Outcome> {
    let snapshot = check_image(api, namespace, fence).await?;
    if snapshot.annotations().get(key).map(String::as_str) == Some(value) {
        return Ok(());
    }
    let patch = json!({"metadata": {
        "resourceVersion": snapshot.resource_version(),
        "annotations": {key: value},
    }});
    let written = api.patch::<SandboxSnapshot>(namespace, &fence.name, &patch);
    match written.await {
        Ok(_) => Ok(()),
        Err(error) if matches!(error.answer(), Answer::Conflict | Answer::NotFound) => {
            Err(observe_snapshot(api, namespace, &fence.name).await)
        }
        Err(error) => Err(Outcome::Unknown(error)),
    }
}

async fn delete_snapshot(
    api: &Apiserver,
    namespace: &str,
    (name, uid): (&str, &str),
    fence: &SnapshotFence,
    failed: impl Fn(&str, &calls::Error) -> Failure,
) -> Outcome {
    let resource_version = match fence {
        SnapshotFence::Stale => None,
        SnapshotFence::Unchanged { resource_version } => Some(resource_version.as_str()),
        SnapshotFence::PodAlive {
            name: pod,
            uid,
            resource_version,
        } => {
            match api.get::<Pod>(namespace, pod).await {
                Err(error) => return Outcome::Unknown(error),
                Ok(None) => return Outcome::Unexpected(Fact::NoPod(pod.clone())),
                Ok(Some(found)) => {
                    let alive = found.uid().as_deref() == Some(uid)
                        && found.metadata.deletion_timestamp.is_none();
                    if !alive {
                        return Outcome::Unexpected(Fact::Pod(Arc::new(found)));
                    }
                }
            }
            Some(resource_version.as_str())
        }
    };
    match deleted(
        api.delete::<SandboxSnapshot>(namespace, name, uid, resource_version)
            .await,
    ) {
        // The snapshot may stay for its finalizer, but nothing uses it any more.
        Ok(()) => Outcome::Done(None),
        Err(error) if error.answer() == Answer::Conflict => {
            observe_snapshot(api, namespace, name).await
        }
        Err(error) => refused(error, |e| failed("failed to delete SandboxSnapshot", e)),
    }
}

async fn observe_snapshot(api: &Apiserver, namespace: &str, name: &str) -> Outcome {
    match api.get::<SandboxSnapshot>(namespace, name).await {
        Ok(Some(snapshot)) => Outcome::Unexpected(Fact::Snapshot(Arc::new(snapshot))),
        Ok(None) => Outcome::Unexpected(Fact::NoSnapshot(name.to_owned())),
        Err(error) => Outcome::Unknown(error),
    }
}

async fn patch_snapshot(api: &Apiserver, namespace: &str, name: &str, patch: &Value) -> Outcome {
    match api.patch::<SandboxSnapshot>(namespace, name, patch).await {
        Ok(snapshot) => Outcome::Done(Some(Fact::Snapshot(Arc::new(snapshot)))),
        Err(error) if matches!(error.answer(), Answer::Conflict | Answer::NotFound) => {
            observe_snapshot(api, namespace, name).await
        }
        Err(error) => Outcome::Unknown(error),
    }
}

/// Marks a snapshot as consumed.
///
/// The agent writes this status too. The patch therefore holds only for the version it was made
/// from.
async fn supersede(
    api: &Apiserver,
    namespace: &str,
    name: &str,
    message: &str,
    failed: impl Fn(&str, &calls::Error) -> Failure,
) -> Outcome {
    let snapshot = match api.get::<SandboxSnapshot>(namespace, name).await {
        Ok(Some(snapshot)) => snapshot,
        Ok(None) => return Outcome::Unexpected(Fact::NoSnapshot(name.to_owned())),
        Err(error) => return Outcome::Unknown(error),
    };
    if snapshot.is_consumed() {
        return Outcome::Done(Some(Fact::Snapshot(Arc::new(snapshot))));
    }
    let mut all = snapshot.conditions().to_vec();
    let reason = reasons::snapshot::SUPERSEDED;
    let draft = Draft::new(
        conditions::CONSUMED,
        Status::True,
        reason,
        message.to_owned(),
    );
    conditions::set(
        &mut all,
        draft,
        snapshot.metadata.generation,
        jiff::Timestamp::now(),
    );
    let patch = json!({
        "metadata": {"resourceVersion": snapshot.resource_version()},
        "status": {"conditions": all},
    });
    match api
        .patch_status::<SandboxSnapshot>(namespace, name, &patch)
        .await
    {
        Ok(snapshot) => Outcome::Done(Some(Fact::Snapshot(Arc::new(snapshot)))),
        Err(error) if matches!(error.answer(), Answer::Conflict | Answer::NotFound) => {
            observe_snapshot(api, namespace, name).await
        }
        Err(error) => refused(error, |e| {
            failed("failed to mark SandboxSnapshot consumed", e)
        }),
    }
}

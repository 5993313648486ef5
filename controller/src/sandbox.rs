//! Reconciles Sandboxes.
//!
//! One pass has five steps: **dereference** (read the objects) → **validate** (interpret
//! them) → **plan** (decide; pure) → **apply** (write) → **status** (report; pure). When a
//! step finds another state than the plan assumed, the pass plans again with the new fact. No step
//! is retried blindly.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use kube::ResourceExt;
use torpor_api::{Sandbox, SandboxStatus, annotations, labels};

use crate::{
    calls::{self, Answer, Apiserver},
    candidates,
    claim::wake,
    context::Context,
    events,
    network::default_policy::{self, Isolation},
    outline,
    pace::{Advance, Awaited},
    queue::Lane,
    repository, saved_pod, watches,
};

pub mod apply;
pub mod dereference;
pub mod lifecycle;
pub mod metadata;
pub mod notes;
pub mod plan;
pub mod pod_spec;
pub mod status;
pub mod validate;

use self::{
    apply::Applied,
    plan::{LastPod, Phase, Plan},
};

/// Plans made within one pass at most; the next pass continues.
const ROUNDS: usize = 5;

/// Time after which a Sandbox is retried when the apiserver called a field invalid.
///
/// A change of the Sandbox usually solves the problem and starts a pass. A LimitRange or a webhook
/// may have written the field, though.
const INVALID_RETRY: Duration = Duration::from_secs(600);

/// Failure of a pass. The pass is retried with a growing delay.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the current state")]
    Observe(#[source] calls::Error),
    #[error("cannot tell whether a step took effect")]
    Unknown(#[source] calls::Error),
    #[error("cannot write the status")]
    WriteStatus(#[source] calls::Error),
    #[error("cannot record the Sandbox's Pod")]
    RecordPod(#[source] calls::Error),
    /// The status already has these messages.
    #[error("{}", .0.join("; "))]
    Refused(Vec<String>),
    #[error("the objects around the Sandbox keep changing")]
    Unsettled,
}

impl Error {
    /// Stable name, for metrics and logs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Observe(_) => "ObserveFailed",
            Self::Unknown(_) => "OutcomeUnknown",
            Self::WriteStatus(_) => "StatusWriteFailed",
            Self::RecordPod(_) => "RecordFailed",
            Self::Refused(_) => "Refused",
            Self::Unsettled => "Unsettled",
        }
    }
}

/// Runs one pass over a Sandbox.
///
/// Returns the time until the next pass that is needed without a change.
pub async fn reconcile(
    sandbox: Arc<Sandbox>,
    context: Arc<Context>,
) -> Result<Option<Duration>, Error> {
    let result = pass(Arc::clone(&sandbox), &context).await;
    if result.is_err() {
        context.metrics.count_failed_change(&sandbox);
    }
    result
}

async fn pass(sandbox: Arc<Sandbox>, context: &Context) -> Result<Option<Duration>, Error> {
    if sandbox.metadata.deletion_timestamp.is_some() {
        return Ok(None);
    }
    let Some(sandbox) = full_sandbox(sandbox, context).await? else {
        return Ok(None);
    };
    let before = sandbox.status.clone().unwrap_or_default();
    let (api, _awaited) = paced_client(&sandbox, context);
    let (plan, applied, sandbox) = Box::pin(settle(sandbox, &api, context)).await?;
    if applied.sandbox_deleted {
        return Ok(None);
    }
    let now = Timestamp::now();
    let (after, requeue) = conclude(&sandbox, &plan, &applied, context, now);
    let went_well = plan.refusals.is_empty() && applied.failures.is_empty();
    if went_well && let Some(wait) = status::write_delay(&sandbox, &before, &after, now) {
        return Ok(requeue.into_iter().chain([wait]).min());
    }
    let written = write_status(&sandbox, &before, &after, &api, context).await?;
    let transitions = lifecycle::between(&sandbox, &before, &after, &applied.failures);
    let notes = transitions
        .into_iter()
        .chain(notes::between(&before, &after, &plan));
    publish_events(&sandbox, notes, &api, context).await;
    context
        .metrics
        .observe_sandbox(&sandbox, &before, &after, now);
    record_pod(written.as_ref().unwrap_or(&sandbox), &plan, &api, context).await?;
    let is_invalid = applied.is_invalid();
    let refusals: Vec<String> = plan
        .refusals
        .iter()
        .map(|(_, why)| why.clone())
        .chain(applied.failures.into_iter().map(|failure| failure.message))
        .collect();
    if refusals.is_empty() {
        return Ok(requeue);
    }
    if plan.refusals.is_empty() && is_invalid {
        // The status has the message already. An error of the pass would cause an early retry.
        context.metrics.count_failed_change(&sandbox);
        return Ok(requeue.into_iter().chain([INVALID_RETRY]).min());
    }
    Err(Error::Refused(refusals))
}

/// Publishes Events about a Sandbox, unless Sandbox Events are switched off.
async fn publish_events(
    sandbox: &Sandbox,
    notes: impl IntoIterator<Item = events::Note>,
    api: &Apiserver,
    context: &Context,
) {
    if !context.settings.sandbox_events {
        return;
    }
    for note in notes {
        events::publish(api, sandbox, note).await;
    }
}

/// Returns the full Sandbox, read from the apiserver where the cache has only its outline.
///
/// Returns `None` if the Sandbox is gone.
async fn full_sandbox(
    sandbox: Arc<Sandbox>,
    context: &Context,
) -> Result<Option<Arc<Sandbox>>, Error> {
    if !outline::is_outline(&*sandbox) {
        return Ok(Some(sandbox));
    }
    let found = outline::read_full(&context.api, &*sandbox).await;
    let found = found.map_err(Error::Observe)?;
    Ok(found
        .filter(|found| found.metadata.deletion_timestamp.is_none())
        .map(Arc::new))
}

/// Returns the lane of a pass over the Sandbox.
///
/// No client waits for a member of a pool, nor for the labels of a Pod whose Sandbox has just been
/// handed to a claim, unless the same write wakes the sandbox or brings the claim there.
pub fn lane(sandbox: &Sandbox, context: &Context) -> Lane {
    if candidates::pool_of(sandbox).is_some() {
        return Lane::InAdvance;
    }
    let namespace = sandbox.namespace().unwrap_or_default();
    let pod = dereference::pod_name(sandbox);
    let pod = context.caches.pods.get(&namespace, &pod);
    let waits = wake::is_asleep(sandbox) || annotations::binds(sandbox.annotations());
    let handed = |pod: Arc<k8s_openapi::api::core::v1::Pod>| {
        pod.labels().contains_key(labels::WARM_POOL_SANDBOX)
    };
    match !waits && pod.is_some_and(handed) {
        true => Lane::Following,
        false => Lane::Awaited,
    }
}

/// Returns the client for a pass, with the priority of its writes.
///
/// A client waits for a Sandbox that is not Ready.
fn paced_client(sandbox: &Sandbox, context: &Context) -> (Apiserver, Option<Awaited>) {
    match lane(sandbox, context) {
        Lane::InAdvance => {
            let advance = watches::extensions::pool_of_member(context, sandbox)
                .map_or(Advance::Calm, |pool| context.candidates.advance(&pool));
            (context.api.in_advance(advance), None)
        }
        Lane::Following => (context.api.in_advance(Advance::Soon), None),
        Lane::Awaited => {
            let ready = status::is_ready(sandbox.status.as_ref());
            (context.api.clone(), (!ready).then(|| context.api.awaited()))
        }
    }
}

/// Plans and applies until a plan was applied as planned.
async fn settle(
    sandbox: Arc<Sandbox>,
    api: &Apiserver,
    context: &Context,
) -> Result<(Plan, Applied, Arc<Sandbox>), Error> {
    let mut observed = dereference::dereference(sandbox, &context.caches, api)
        .await
        .map_err(Error::Observe)?;
    observed
        .runtime_image
        .clone_from(&context.settings.runtime_image);
    if plan::needs_cluster(&observed) {
        match Box::pin(repository::own_cluster(context)).await {
            Ok(own) => observed.cluster_uid = Some(own.to_owned()),
            // The plan says so, and goes on without the archive.
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, "cannot archive a Sandbox");
            }
        }
    }
    for _ in 0..ROUNDS {
        let mut plan = plan::plan(&observed, Timestamp::now());
        isolate(&mut plan, &observed.sandbox, context).await?;
        let applied = apply::apply(&plan, &mut observed, api).await;
        let made = applied.made_pod.as_deref().map(lifecycle::pod_created);
        publish_events(&observed.sandbox, made, api, context).await;
        if let Some(pod) = &applied.pod {
            watches::pod_written(context, (**pod).clone());
        }
        if let Some(error) = applied.unknown {
            return Err(Error::Unknown(error));
        }
        if !applied.again {
            return Ok((plan, applied, Arc::clone(&observed.sandbox)));
        }
        let gathered = dereference::gather_memory(&mut observed, &context.caches, api);
        gathered.await.map_err(Error::Observe)?;
    }
    Err(Error::Unsettled)
}

/// Creates the namespace's default NetworkPolicy before the Pod of a Sandbox without a template.
async fn isolate(plan: &mut Plan, sandbox: &Sandbox, context: &Context) -> Result<(), Error> {
    let isolation = Isolation::of(sandbox, context.settings.network.default_policy);
    let mut policy = Ok(());
    if default_policy::is_needed(plan, isolation) {
        let namespace = sandbox.namespace().unwrap_or_default();
        policy = match default_policy::ensure(&namespace, context).await {
            Ok(()) => Ok(()),
            Err(default_policy::Error::Unknown(error)) => return Err(Error::Unknown(error)),
            Err(error) => {
                tracing::warn!(namespace, %error, "cannot create the default NetworkPolicy");
                Err(error.to_string())
            }
        };
    }
    default_policy::amend(plan, sandbox, isolation, policy);
    Ok(())
}

/// Computes the new status and the time until the next pass.
///
/// An expiry that came during the pass is marked at once.
fn conclude(
    sandbox: &Sandbox,
    plan: &Plan,
    applied: &Applied,
    context: &Context,
    now: Timestamp,
) -> (SandboxStatus, Option<Duration>) {
    let status = status::next(sandbox, plan, applied, &context.cluster_domain, now);
    if plan.phase == Phase::Active && plan::expiry(sandbox, now) == plan::Expiry::Past {
        return (status::expired(status, sandbox, now), Some(plan::AT_ONCE));
    }
    (status, plan.requeue)
}

async fn write_status(
    sandbox: &Sandbox,
    before: &SandboxStatus,
    after: &SandboxStatus,
    api: &Apiserver,
    context: &Context,
) -> Result<Option<Sandbox>, Error> {
    let Some(patch) = status::patch(Some(before), after) else {
        return Ok(None);
    };
    let namespace = sandbox.namespace().unwrap_or_default();
    match api
        .patch_status::<Sandbox>(&namespace, &sandbox.name_any(), &patch)
        .await
    {
        Ok(written) => {
            watches::sandbox_written(context, written.clone());
            Ok(Some(written))
        }
        // The Sandbox was deleted meanwhile.
        Err(error) if error.answer() == Answer::NotFound => Ok(None),
        Err(error) => Err(Error::WriteStatus(error)),
    }
}

/// Writes or removes the record of the last Pod.
async fn record_pod(
    sandbox: &Sandbox,
    plan: &Plan,
    api: &Apiserver,
    context: &Context,
) -> Result<(), Error> {
    let patch = match &plan.last_pod {
        LastPod::Keep => return Ok(()),
        LastPod::Write(record) => saved_pod::last_pod_patch(sandbox, Some(record)),
        LastPod::Forget => saved_pod::last_pod_patch(sandbox, None),
    };
    let (namespace, name) = (sandbox.namespace().unwrap_or_default(), sandbox.name_any());
    match api.patch::<Sandbox>(&namespace, &name, &patch).await {
        Ok(written) => {
            watches::sandbox_written(context, written);
            Ok(())
        }
        // The Sandbox was deleted or changed since it was read. That event starts the next pass.
        Err(error) if matches!(error.answer(), Answer::NotFound | Answer::Conflict) => Ok(()),
        Err(error) => Err(Error::RecordPod(error)),
    }
}

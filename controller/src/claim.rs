//! Reconciler of SandboxClaims: each claim gets one Sandbox, taken from a pool or made for it.
//!
//! One pass: **dereference** → **plan** (pure) → **apply** → **status** (pure), as for a
//! Sandbox.
//!
//! A claim that takes a member of a pool is Ready after two writes: the Sandbox is assigned
//! ([`adopt::assignment`]), and the claim's status reports it. Every decision is made from the
//! watch caches. The claim's annotations (name of its Sandbox, time of first sight) are written at
//! the same time as the first write. The writes that follow (an Event, the Pod's labels) delay no
//! request.
//!
//! [`binding`] explains why no schedule of crashes and no second controller can give a claim two
//! Sandboxes or a Sandbox two claims.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use kube::ResourceExt;
use torpor_api::{SandboxClaim, annotations};

use crate::{
    calls::{self, Answer},
    context::Context,
    outline, trace,
};

pub mod adopt;
mod after;
mod annotate;
pub mod apply;
pub mod binding;
mod deliver;
pub mod dereference;
pub mod files;
mod fork;
pub mod late_bind;
pub mod memory;
pub mod metadata;
pub mod plan;
pub mod sandbox_spec;
pub mod status;
pub mod wake;

pub use self::after::Reports;
use self::{
    apply::{Effect, Step},
    dereference::Session,
    plan::{Outlook, Plan},
};

/// Most plans within one pass; the rest is left to the next pass.
const ROUNDS: usize = 16;
/// Most computations of the status within one pass, when another client changes the claim
/// meanwhile.
const REWRITES: usize = 4;

/// Failure of a pass; the pass is tried again with a growing delay.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the current state")]
    Observe(#[source] calls::Error),
    #[error("cannot tell whether a step took effect")]
    Unknown(#[source] calls::Error),
    #[error("cannot write the status")]
    WriteStatus(#[source] calls::Error),
    /// The claim's status has this message already.
    #[error("{0}")]
    Refused(String),
    #[error("the objects around the SandboxClaim keep changing")]
    Unsettled,
}

impl Error {
    /// Returns a stable name for metrics and logs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Observe(_) => "ObserveFailed",
            Self::Unknown(_) => "OutcomeUnknown",
            Self::WriteStatus(_) => "StatusWriteFailed",
            Self::Refused(_) => "Refused",
            Self::Unsettled => "Unsettled",
        }
    }
}

/// Result of a pass over a claim.
#[derive(Debug, Default)]
pub struct Served {
    /// Delay until the next pass when nothing changes.
    pub requeue: Option<Duration>,
    /// Reports to write later. The next pass over the claim need not wait for them.
    pub reports: Option<Reports>,
}

/// Reconciles one claim, including its reports. Returns the delay until the next pass when nothing
/// changes.
pub async fn reconcile(
    claim: Arc<SandboxClaim>,
    context: Arc<Context>,
) -> Result<Option<Duration>, Error> {
    let Served { requeue, reports } = serve(claim, &context).await?;
    let unwritten = match reports {
        Some(reports) => reports.write(&context).await,
        None => None,
    };
    Ok(requeue.into_iter().chain(unwritten).min())
}

/// Runs the part of a pass that requests wait for.
pub async fn serve(claim: Arc<SandboxClaim>, context: &Context) -> Result<Served, Error> {
    if claim.metadata.deletion_timestamp.is_some() {
        return Ok(Served::default());
    }
    let Some(claim) = whole(claim, context).await? else {
        return Ok(Served::default());
    };
    let (claim, trace) = traced(claim, context);
    let waits = !is_ready(&claim);
    let awaited = waits.then(|| context.api.awaited());
    let mut session = dereference::dereference(claim, context);
    session.trace = trace;
    for _ in 0..REWRITES {
        let plan = settle(&mut session, context).await?;
        if plan.keeps_status {
            let reports = after::finish(&session, &plan, context);
            let requeue = plan.requeue;
            return Ok(Served { requeue, reports });
        }
        match write_status(&mut session, &plan, context).await? {
            StatusWrite::Written => {
                drop(awaited);
                let reports = after::finish(&session, &plan, context);
                return leave(plan, reports, context).await;
            }
            StatusWrite::Changed(claim) => session.start_anew(claim),
            StatusWrite::Gone => return Ok(Served::default()),
        }
    }
    Err(Error::Unsettled)
}

/// Returns the whole claim where the cache has only its outline; `None` if the claim is gone.
async fn whole(
    claim: Arc<SandboxClaim>,
    context: &Context,
) -> Result<Option<Arc<SandboxClaim>>, Error> {
    if !outline::is_outline(&*claim) {
        return Ok(Some(claim));
    }
    let found = outline::read_full(&context.api, &*claim).await;
    let found = found.map_err(Error::Observe)?;
    Ok(found
        .filter(|found| found.metadata.deletion_timestamp.is_none())
        .map(Arc::new))
}

/// Returns the carrier of the trace for passes over a claim: the trace in its annotation, or that
/// of its first pass.
pub fn trace(claim: &SandboxClaim, context: &Context) -> Option<String> {
    trace::carried(claim).or_else(|| context.claims.trace(claim, || None))
}

/// Returns the claim with its trace in the annotation, from which its Sandbox takes it; and the
/// trace, if the claim in the API has none yet.
fn traced(claim: Arc<SandboxClaim>, context: &Context) -> (Arc<SandboxClaim>, Option<String>) {
    if claim.annotations().contains_key(annotations::TRACE_CONTEXT) {
        return (claim, None);
    }
    let Some(carrier) = context.claims.trace(&claim, trace::carrier) else {
        return (claim, None);
    };
    let mut traced = (*claim).clone();
    traced
        .annotations_mut()
        .insert(annotations::TRACE_CONTEXT.to_owned(), carrier.clone());
    (Arc::new(traced), Some(carrier))
}

/// Ends a pass. After a failure the pass is tried again soon, so that its reports are written now.
async fn leave(plan: Plan, reports: Option<Reports>, context: &Context) -> Result<Served, Error> {
    let Outlook::Failed { message, .. } = plan.outlook else {
        return Ok(Served {
            requeue: plan.requeue,
            reports,
        });
    };
    if let Some(reports) = reports {
        reports.write(context).await;
    }
    Err(Error::Refused(message))
}

/// Plans and applies until a plan was applied completely.
async fn settle(session: &mut Session, context: &Context) -> Result<Plan, Error> {
    for _ in 0..ROUNDS {
        apply::complete(session, context).await?;
        let mut plan = plan::plan(&session.observed, Timestamp::now());
        if plan.wants_member {
            session.ask_pool(context).await;
            continue;
        }
        match apply::apply(&plan, session, context).await? {
            Step::Done => return Ok(plan),
            Step::Again => {}
            Step::Refused(why) => {
                plan.requeue = why.retry();
                plan.outlook = Outlook::Refused { why, sandbox: None };
                return Ok(plan);
            }
            Step::Failed(message) => {
                let sandbox = match plan.outlook {
                    Outlook::Sandbox(sandbox) => Some(sandbox),
                    Outlook::Refused { sandbox, .. } => sandbox,
                    _ => None,
                };
                plan.outlook = Outlook::Failed { message, sandbox };
                return Ok(plan);
            }
        }
    }
    Err(Error::Unsettled)
}

enum StatusWrite {
    Written,
    /// Another client has changed the claim; holds its current version.
    Changed(Arc<SandboxClaim>),
    Gone,
}

/// Writes a changed status on exactly the version of the claim that it was computed from.
async fn write_status(
    session: &mut Session,
    plan: &Plan,
    context: &Context,
) -> Result<StatusWrite, Error> {
    let claim = Arc::clone(&session.observed.claim);
    let before = claim.status.clone().unwrap_or_default();
    let after = status::next(&claim, &plan.outlook, Timestamp::now());
    let Some(patch) = status::patch(&claim, &before, &after) else {
        return Ok(StatusWrite::Written);
    };
    let (namespace, name) = (claim.namespace().unwrap_or_default(), claim.name_any());
    let api = &context.api;
    match api
        .patch_status::<SandboxClaim>(&namespace, &name, &patch)
        .await
    {
        Ok(written) => {
            context.caches.claims.assume(written.clone());
            session.observed.claim = Arc::new(written);
            session.effects.push(Effect::StatusWritten {
                before: Box::new(before),
                after: Box::new(after),
            });
            Ok(StatusWrite::Written)
        }
        Err(error) if error.answer() == Answer::Conflict => {
            let found = api.get::<SandboxClaim>(&namespace, &name).await;
            match found.map_err(Error::Observe)? {
                Some(now) if now.metadata.uid != claim.metadata.uid => Ok(StatusWrite::Gone),
                Some(now) if now.metadata.deletion_timestamp.is_some() => Ok(StatusWrite::Gone),
                Some(now) => Ok(StatusWrite::Changed(Arc::new(now))),
                None => Ok(StatusWrite::Gone),
            }
        }
        Err(error) if error.answer() == Answer::NotFound => Ok(StatusWrite::Gone),
        Err(error) => Err(Error::WriteStatus(error)),
    }
}

/// Reports whether the claim's status has Ready=True.
fn is_ready(claim: &SandboxClaim) -> bool {
    claim.status.as_ref().is_some_and(|status| {
        torpor_api::conditions::is_true(&status.conditions, torpor_api::conditions::READY)
    })
}

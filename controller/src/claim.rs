//! The SandboxClaim kind: each claim gets one Sandbox, out of a pool or made for it. One pass: **dereference** → **plan** (pure) → **apply** → **status** (pure), as for a Sandbox.
//!
//! A claim that takes a member of a pool is Ready after two writes: the Sandbox is assigned ([`adopt::assignment`]), and the claim's status says so. Everything that decides comes
//! from the watch caches. What it names (its Sandbox, when it was seen) is written beside the
//! first; nobody waits for what comes after (an Event, the Pod's labels). [`binding`] says why no
//! schedule of crashes and no second controller can give a claim two Sandboxes or a Sandbox two
//! claims.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource, ResourceExt};
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
pub mod dereference;
pub mod metadata;
pub mod plan;
pub mod sandbox_spec;
pub mod sightings;
pub mod status;

pub use self::after::News;
use self::{
    apply::{Happened, Step},
    dereference::Session,
    plan::{Outlook, Plan},
};

/// How often the plan is made anew within one pass, before the rest is left to the next one.
const ROUNDS: usize = 16;
/// How often the status is worked out anew when somebody else has changed the claim meanwhile.
const REWRITES: usize = 4;

/// A pass did not come through; it is tried again with a growing delay.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot see what is there")]
    Observe(#[source] calls::Error),
    #[error("cannot tell whether a step took effect")]
    Unknown(#[source] calls::Error),
    #[error("cannot write the status")]
    WriteStatus(#[source] calls::Error),
    /// In the status already, in these words.
    #[error("{0}")]
    Refused(String),
    #[error("the objects around the SandboxClaim keep changing")]
    Unsettled,
}

impl Error {
    /// Stable name, for metrics and logs.
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

/// Owner reference of a claim for its Sandbox.
pub fn owner_reference(claim: &SandboxClaim) -> OwnerReference {
    OwnerReference {
        api_version: SandboxClaim::api_version(&()).into_owned(),
        kind: SandboxClaim::kind(&()).into_owned(),
        name: claim.name_any(),
        uid: claim.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// What a pass over a claim leaves.
#[derive(Debug, Default)]
pub struct Served {
    /// When to look again though nothing has changed.
    pub requeue: Option<Duration>,
    /// What is to be told when it is its turn. The next pass over the claim need not wait for it.
    pub news: Option<News>,
}

/// One pass over one claim, and what it leaves to be told. Says when to look again though nothing has changed.
pub async fn reconcile(
    claim: Arc<SandboxClaim>,
    context: Arc<Context>,
) -> Result<Option<Duration>, Error> {
    let Served { requeue, news } = serve(claim, &context).await?;
    let untold = match news {
        Some(news) => news.tell(&context).await,
        None => None,
    };
    Ok(requeue.into_iter().chain(untold).min())
}

/// The part of a pass that somebody waits for.
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
        if plan.ends {
            let (requeue, news) = (None, after::finish(&session, &plan, context));
            return Ok(Served { requeue, news });
        }
        match conclude(&mut session, &plan, context).await? {
            Concluded::Said => {
                drop(awaited);
                let news = after::finish(&session, &plan, context);
                return leave(plan, news, context).await;
            }
            Concluded::Changed(claim) => session.start_anew(claim),
            Concluded::Gone => return Ok(Served::default()),
        }
    }
    Err(Error::Unsettled)
}

/// The claim itself, where the cache has only its outline; `None` if it is gone.
async fn whole(
    claim: Arc<SandboxClaim>,
    context: &Context,
) -> Result<Option<Arc<SandboxClaim>>, Error> {
    if !outline::is_outline(&*claim) {
        return Ok(Some(claim));
    }
    let found = outline::whole(&context.api, &*claim).await;
    let found = found.map_err(Error::Observe)?;
    Ok(found
        .filter(|found| found.metadata.deletion_timestamp.is_none())
        .map(Arc::new))
}

/// The trace that passes over a claim belong to, as a carrier: the one that its annotation names, or that of its first pass.
pub fn trace(claim: &SandboxClaim, context: &Context) -> Option<String> {
    trace::carried(claim).or_else(|| context.sightings.trace(claim, || None))
}

/// The claim with its trace in the annotation, from where its Sandbox gets it; and the trace, if the claim in the API has none yet.
fn traced(claim: Arc<SandboxClaim>, context: &Context) -> (Arc<SandboxClaim>, Option<String>) {
    if claim.annotations().contains_key(annotations::TRACE_CONTEXT) {
        return (claim, None);
    }
    let Some(carrier) = context.sightings.trace(&claim, trace::carrier) else {
        return (claim, None);
    };
    let mut traced = (*claim).clone();
    traced
        .annotations_mut()
        .insert(annotations::TRACE_CONTEXT.to_owned(), carrier.clone());
    (Arc::new(traced), Some(carrier))
}

/// What failed is tried again soon, and what is to be told by then is told now.
async fn leave(plan: Plan, news: Option<News>, context: &Context) -> Result<Served, Error> {
    let Outlook::Failed { message, .. } = plan.outlook else {
        return Ok(Served {
            requeue: plan.requeue,
            news,
        });
    };
    if let Some(news) = news {
        news.tell(context).await;
    }
    Err(Error::Refused(message))
}

/// Plans and applies until a plan went through as planned.
async fn settle(session: &mut Session, context: &Context) -> Result<Plan, Error> {
    for _ in 0..ROUNDS {
        apply::complete(session, context).await?;
        let mut plan = plan::plan(&session.observed, Timestamp::now());
        if plan.wants_member {
            session.ask_pool(context);
            continue;
        }
        match apply::apply(&plan, session, context).await? {
            Step::Through => return Ok(plan),
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

enum Concluded {
    Said,
    /// Somebody else has changed the claim: this is how it is now.
    Changed(Arc<SandboxClaim>),
    Gone,
}

/// Writes the status, if it says something new, on exactly the version of the claim that it was worked out for.
async fn conclude(
    session: &mut Session,
    plan: &Plan,
    context: &Context,
) -> Result<Concluded, Error> {
    let claim = Arc::clone(&session.observed.claim);
    let before = claim.status.clone().unwrap_or_default();
    let after = status::next(&claim, &plan.outlook, Timestamp::now());
    let Some(patch) = status::patch(&claim, &before, &after) else {
        return Ok(Concluded::Said);
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
            session.happened.push(Happened::Said {
                before: Box::new(before),
                after: Box::new(after),
            });
            Ok(Concluded::Said)
        }
        Err(error) if error.answer() == Answer::Conflict => {
            let found = api.get::<SandboxClaim>(&namespace, &name).await;
            match found.map_err(Error::Observe)? {
                Some(now) if now.metadata.uid != claim.metadata.uid => Ok(Concluded::Gone),
                Some(now) if now.metadata.deletion_timestamp.is_some() => Ok(Concluded::Gone),
                Some(now) => Ok(Concluded::Changed(Arc::new(now))),
                None => Ok(Concluded::Gone),
            }
        }
        Err(error) if error.answer() == Answer::NotFound => Ok(Concluded::Gone),
        Err(error) => Err(Error::WriteStatus(error)),
    }
}

/// Whether the claim's status says Ready=True.
fn is_ready(claim: &SandboxClaim) -> bool {
    claim.status.as_ref().is_some_and(|status| {
        torpor_api::conditions::is_true(&status.conditions, torpor_api::conditions::READY)
    })
}

//! What is told once the status is written: metrics, a patch of the annotations that are not there
//! yet, Events. Nobody waits for any of it, and none of it decides about the Sandbox: it is written
//! when it is its turn.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use kube::ResourceExt;
use serde_json::Value;
use torpor_api::{
    Sandbox, SandboxClaim, annotations, conditions,
    extensions::SandboxClaimStatus,
    reasons::{claim as reasons, event},
};

use super::{
    annotate,
    apply::Happened,
    dereference::Session,
    is_ready,
    plan::{Outlook, Plan},
    sightings::Telling,
};
use crate::{
    calls::{Answer, Apiserver},
    context::Context,
    events::{self, Note, Severity},
    pace::Advance,
};

/// When the annotations are tried again after they could not be written.
const RETRY: Duration = Duration::from_secs(5);

/// What is still to be written about a claim.
#[derive(Debug)]
pub struct News {
    claim: Arc<SandboxClaim>,
    annotations: Option<(Value, Telling)>,
    notes: Vec<Note>,
}

impl News {
    /// Writes it. Says when to look at the claim again, if something could not be written.
    pub async fn tell(self, context: &Context) -> Option<Duration> {
        let api = context.api.in_advance(Advance::Calm);
        let publish = async {
            for note in self.notes {
                events::publish(&api, &*self.claim, note).await;
            }
        };
        let annotate = async {
            let Some((patch, _telling)) = self.annotations else {
                return Ok(());
            };
            annotate(&self.claim, &patch, &api, context).await
        };
        let (written, ()) = tokio::join!(annotate, publish);
        written.err()
    }
}

/// Counts what has happened, and gathers what is to be told.
pub(super) fn finish(session: &Session, plan: &Plan, context: &Context) -> Option<News> {
    let now = Timestamp::now();
    let claim = &session.observed.claim;
    let sandbox = match &plan.outlook {
        Outlook::Sandbox(sandbox) => Some(&**sandbox),
        _ => None,
    };
    count(session, sandbox, context, now);
    let annotations = sandbox
        .and_then(|sandbox| annotation_patch(session, sandbox, context, now))
        .and_then(|patch| Some((patch, context.sightings.tell(claim)?)));
    let notes = if context.settings.claims.events {
        notes(session)
    } else {
        Vec::new()
    };
    (annotations.is_some() || !notes.is_empty()).then(|| News {
        claim: Arc::clone(claim),
        annotations,
        notes,
    })
}

/// Counts what happened.
fn count(session: &Session, sandbox: Option<&Sandbox>, context: &Context, now: Timestamp) {
    let claim = &session.observed.claim;
    let Some(sandbox) = sandbox else {
        return;
    };
    let got = session
        .happened
        .iter()
        .any(|what| matches!(what, Happened::Adopted(_) | Happened::Created(_)));
    if got {
        context.metrics.count_claim(claim, sandbox);
    }
    if is_ready(claim) && context.sightings.count(claim, now) {
        let seen = context.sightings.of(claim, now).first_seen;
        context
            .metrics
            .observe_claim_ready(claim, sandbox, seen, now);
    }
}

/// When the claim was first Ready, once it is; and its Sandbox, if that is another one by now. A
/// write that failed is tried again with the same times. The first Ready is counted only once, in
/// any case.
fn annotation_patch(
    session: &Session,
    sandbox: &Sandbox,
    context: &Context,
    now: Timestamp,
) -> Option<Value> {
    let claim = &session.observed.claim;
    let known = claim.annotations();
    let name = sandbox.name_any();
    let current = known.get(annotations::SANDBOX_NAME) == Some(&name);
    if !is_ready(claim) || (current && known.contains_key(annotations::CLAIM_FIRST_READY_AT)) {
        return None;
    }
    let mut patch = annotate::first(&name, claim, session.trace.as_deref(), context, now);
    if !known.contains_key(annotations::CLAIM_FIRST_READY_AT) {
        let at = context
            .sightings
            .of(claim, now)
            .ready_at
            .map_or_else(|| annotations::UNKNOWN_TIME.to_owned(), |at| at.to_string());
        patch["metadata"]["annotations"][annotations::CLAIM_FIRST_READY_AT] = at.into();
    }
    Some(patch)
}

/// An error says when to try again.
async fn annotate(
    claim: &SandboxClaim,
    patch: &Value,
    api: &Apiserver,
    context: &Context,
) -> Result<(), Duration> {
    match annotate::write(claim, patch, api, context).await {
        Ok(_) => Ok(()),
        // It was deleted meanwhile.
        Err(error) if matches!(error.answer(), Answer::NotFound | Answer::Conflict) => Ok(()),
        Err(error) => {
            tracing::warn!(%error, claim = claim.name_any(), "cannot write the annotations of a claim");
            Err(RETRY)
        }
    }
}

/// The Events, in upstream's words. Two are ours: upstream's condition does not say where a pool is looked for, and upstream waits for no NetworkPolicy.
fn notes(session: &Session) -> Vec<Note> {
    let normal = |reason, message| Note {
        severity: Severity::Normal,
        reason,
        message,
    };
    session
        .happened
        .iter()
        .filter_map(|what| match what {
            Happened::Adopted(name) => Some(normal(
                event::SANDBOX_ADOPTED,
                format!("Adopted warm pool Sandbox {name:?}"),
            )),
            Happened::Created(name) => Some(normal(
                event::SANDBOX_PROVISIONED,
                format!("Created Sandbox {name:?}"),
            )),
            Happened::Said { before, after } if newly(reasons::CLAIM_EXPIRED, before, after) => {
                Some(normal(event::CLAIM_EXPIRED, "Claim expired".to_owned()))
            }
            Happened::Said { before, after }
                if newly(reasons::WARM_POOL_NOT_FOUND, before, after) =>
            {
                Some(pool_not_found(&session.observed.claim))
            }
            // That the policy is pending passes by itself, and the condition says so.
            Happened::Said { before, after }
                if newly(reasons::NETWORK_POLICY_NOT_OWNED, before, after) =>
            {
                policy_not_owned(after)
            }
            Happened::Said { .. } => None,
            Happened::Ended(policy) => Some(normal(
                event::CLAIM_EXPIRED,
                format!("Deleting Claim (ShutdownPolicy={})", policy.as_str()),
            )),
        })
        .collect()
}

/// Whether Ready has this reason, and had it not before.
fn newly(reason: &str, before: &SandboxClaimStatus, after: &SandboxClaimStatus) -> bool {
    let says = |status: &SandboxClaimStatus| {
        conditions::find(&status.conditions, conditions::READY)
            .is_some_and(|ready| ready.reason == reason)
    };
    says(after) && !says(before)
}

/// In the condition's words.
fn policy_not_owned(status: &SandboxClaimStatus) -> Option<Note> {
    let ready = conditions::find(&status.conditions, conditions::READY)?;
    Some(Note {
        severity: Severity::Warning,
        reason: event::NETWORK_POLICY_NOT_OWNED,
        message: ready.message.clone(),
    })
}

/// The same whether another namespace has a pool of that name or not: whoever may make claims here need not be allowed to know.
fn pool_not_found(claim: &SandboxClaim) -> Note {
    let pool = &claim.spec.warm_pool_ref.name;
    let namespace = claim.namespace().unwrap_or_default();
    Note {
        severity: Severity::Warning,
        reason: event::WARM_POOL_NOT_FOUND,
        message: format!(
            "SandboxWarmPool {pool:?} not found in namespace {namespace:?}. A claim takes from pools of its own namespace only: \
             make a pool there, or the claim in the namespace of its pool"
        ),
    }
}

//! Reports after the status is written: metrics, a patch with the missing annotations, and Events.
//! No request waits for them and they do not affect the Sandbox, so that they are written at the
//! lowest priority ([`Advance::Calm`]).

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
    apply::Effect,
    dereference::Session,
    is_ready,
    memory::AnnotationsWrite,
    plan::{Outlook, Plan},
};
use crate::{
    calls::{Answer, Apiserver},
    context::Context,
    events::{self, Note, Severity},
    pace::Advance,
};

/// Delay before a failed write of the annotations is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Pending writes about a claim.
#[derive(Debug)]
pub struct Reports {
    claim: Arc<SandboxClaim>,
    annotations: Option<(Value, AnnotationsWrite)>,
    notes: Vec<Note>,
}

impl Reports {
    /// Writes the reports. Returns the delay until the next pass over the claim, if a write failed.
    pub async fn write(self, context: &Context) -> Option<Duration> {
        let api = context.api.in_advance(Advance::Calm);
        let publish = async {
            for note in self.notes {
                events::publish(&api, &*self.claim, note).await;
            }
        };
        let annotate = async {
            let Some((patch, _write)) = self.annotations else {
                return Ok(());
            };
            annotate(&self.claim, &patch, &api, context).await
        };
        let (written, ()) = tokio::join!(annotate, publish);
        written.err()
    }
}

/// Counts the actions of the pass and collects the reports.
pub(super) fn finish(session: &Session, plan: &Plan, context: &Context) -> Option<Reports> {
    let now = Timestamp::now();
    let claim = &session.observed.claim;
    let sandbox = match &plan.outlook {
        Outlook::Sandbox(sandbox) => Some(&**sandbox),
        _ => None,
    };
    count(session, sandbox, context, now);
    let annotations = sandbox
        .and_then(|sandbox| annotation_patch(session, sandbox, context, now))
        .and_then(|patch| Some((patch, context.claims.begin_write(claim)?)));
    let notes = if context.settings.claims.events {
        notes(session)
    } else {
        Vec::new()
    };
    (annotations.is_some() || !notes.is_empty()).then(|| Reports {
        claim: Arc::clone(claim),
        annotations,
        notes,
    })
}

/// Counts the actions of the pass.
fn count(session: &Session, sandbox: Option<&Sandbox>, context: &Context, now: Timestamp) {
    let claim = &session.observed.claim;
    let Some(sandbox) = sandbox else {
        return;
    };
    let got = session
        .effects
        .iter()
        .any(|what| matches!(what, Effect::Adopted(_) | Effect::Created(_)));
    if got && context.claims.count_got(claim) {
        context.metrics.count_claim(claim, sandbox);
    }
    if is_ready(claim) && context.claims.count(claim, now) {
        let seen = context.claims.of(claim, now).first_seen;
        context
            .metrics
            .observe_claim_ready(claim, sandbox, seen, now);
    }
}

/// Returns the patch with the time of the claim's first Ready, once it is Ready, and with the name
/// of its Sandbox, if that has changed.
///
/// A failed write is repeated with the same times. The first Ready is counted only once.
fn annotation_patch(
    session: &Session,
    sandbox: &Sandbox,
    context: &Context,
    now: Timestamp,
) -> Option<Value> {
    let claim = &session.observed.claim;
    let existing = claim.annotations();
    let name = sandbox.name_any();
    let current = existing.get(annotations::SANDBOX_NAME) == Some(&name);
    if !is_ready(claim) || (current && existing.contains_key(annotations::CLAIM_FIRST_READY_AT)) {
        return None;
    }
    let mut patch = annotate::first(&name, claim, session.trace.as_deref(), context, now);
    if !existing.contains_key(annotations::CLAIM_FIRST_READY_AT) {
        let at = context
            .claims
            .of(claim, now)
            .ready_at
            .map_or_else(|| annotations::UNKNOWN_TIME.to_owned(), |at| at.to_string());
        patch["metadata"]["annotations"][annotations::CLAIM_FIRST_READY_AT] = at.into();
    }
    Some(patch)
}

/// Writes the annotations. The error is the delay until the next try.
async fn annotate(
    claim: &SandboxClaim,
    patch: &Value,
    api: &Apiserver,
    context: &Context,
) -> Result<(), Duration> {
    match annotate::write(claim, patch, api, context).await {
        Ok(_) => Ok(()),
        // The claim was deleted meanwhile.
        Err(error) if matches!(error.answer(), Answer::NotFound | Answer::Conflict) => Ok(()),
        Err(error) => {
            tracing::warn!(%error, claim = claim.name_any(), "cannot write the annotations of a claim");
            Err(RETRY)
        }
    }
}

/// Returns the Events, with upstream's texts. Two are Torpor's: upstream's condition does not name
/// the namespace of the pool, and upstream waits for no NetworkPolicy.
fn notes(session: &Session) -> Vec<Note> {
    let normal = |reason, message| Note {
        severity: Severity::Normal,
        reason,
        message,
    };
    session
        .effects
        .iter()
        .filter_map(|what| match what {
            Effect::Adopted(name) => Some(normal(
                event::SANDBOX_ADOPTED,
                format!("Adopted warm pool Sandbox {name:?}"),
            )),
            Effect::Created(name) => Some(normal(
                event::SANDBOX_PROVISIONED,
                format!("Created Sandbox {name:?}"),
            )),
            Effect::StatusWritten { before, after }
                if newly(reasons::CLAIM_EXPIRED, before, after) =>
            {
                Some(normal(event::CLAIM_EXPIRED, "Claim expired".to_owned()))
            }
            Effect::StatusWritten { before, after }
                if newly(reasons::WARM_POOL_NOT_FOUND, before, after) =>
            {
                Some(pool_not_found(&session.observed.claim))
            }
            // No Event for a pending policy: it resolves by itself, and the condition shows it.
            Effect::StatusWritten { before, after }
                if newly(reasons::NETWORK_POLICY_NOT_OWNED, before, after) =>
            {
                policy_not_owned(after)
            }
            Effect::StatusWritten { .. } => None,
            Effect::ClaimDeleted(policy) => Some(normal(
                event::CLAIM_EXPIRED,
                format!("Deleting Claim (ShutdownPolicy={})", policy.as_str()),
            )),
        })
        .collect()
}

/// Reports whether Ready has this reason now and did not have it before.
fn newly(reason: &str, before: &SandboxClaimStatus, after: &SandboxClaimStatus) -> bool {
    let says = |status: &SandboxClaimStatus| {
        conditions::find(&status.conditions, conditions::READY)
            .is_some_and(|ready| ready.reason == reason)
    };
    says(after) && !says(before)
}

/// Returns the Event with the message of the condition.
fn policy_not_owned(status: &SandboxClaimStatus) -> Option<Note> {
    let ready = conditions::find(&status.conditions, conditions::READY)?;
    Some(Note {
        severity: Severity::Warning,
        reason: event::NETWORK_POLICY_NOT_OWNED,
        message: ready.message.clone(),
    })
}

/// Returns the Event about a missing pool. It is the same whether another namespace has a pool of
/// that name or not: authors of claims need not be allowed to know.
fn pool_not_found(claim: &SandboxClaim) -> Note {
    let pool = &claim.spec.warm_pool_ref.name;
    let namespace = claim.namespace().unwrap_or_default();
    Note {
        severity: Severity::Warning,
        reason: event::WARM_POOL_NOT_FOUND,
        message: format!(
            "SandboxWarmPool {pool:?} not found in namespace {namespace:?}. A claim takes members of pools in its own namespace only: \
             create the pool there, or the claim in the namespace of the pool"
        ),
    }
}

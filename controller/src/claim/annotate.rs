//! Annotations of a claim: its Sandbox, the time of first sight, its trace.

use jiff::Timestamp;
use kube::ResourceExt;
use serde_json::{Map, Value, json};
use torpor_api::{SandboxClaim, annotations};

use super::dereference::Session;
use crate::{
    calls::{self, Apiserver},
    context::Context,
};

/// Returns the patch with the annotations that clients read when a claim becomes Ready: its Sandbox
/// and the time of first sight; with the trace.
///
/// As with upstream, the operator can disable the time and the trace.
pub(super) fn first(
    sandbox: &str,
    claim: &SandboxClaim,
    trace: Option<&str>,
    context: &Context,
    now: Timestamp,
) -> Value {
    let mut all = Map::new();
    all.insert(annotations::SANDBOX_NAME.to_owned(), sandbox.into());
    if context.settings.claims.observability {
        if !claim
            .annotations()
            .contains_key(annotations::CONTROLLER_FIRST_OBSERVED_AT)
        {
            let seen = context.claims.of(claim, now).first_seen.to_string();
            all.insert(
                annotations::CONTROLLER_FIRST_OBSERVED_AT.to_owned(),
                seen.into(),
            );
        }
        if let Some(trace) = trace {
            all.insert(annotations::TRACE_CONTEXT.to_owned(), trace.into());
        }
    }
    json!({"metadata": {"uid": claim.uid(), "annotations": all}})
}

/// Writes the annotations for this Sandbox to the claim of this pass.
pub(super) async fn note(
    sandbox: &str,
    session: &Session,
    context: &Context,
) -> Result<SandboxClaim, calls::Error> {
    let claim = &session.observed.claim;
    let trace = session.trace.as_deref();
    let patch = first(sandbox, claim, trace, context, Timestamp::now());
    write(claim, &patch, &context.api, context).await
}

/// Patches the claim and updates the cache.
pub(super) async fn write(
    claim: &SandboxClaim,
    patch: &Value,
    api: &Apiserver,
    context: &Context,
) -> Result<SandboxClaim, calls::Error> {
    let (namespace, name) = (claim.namespace().unwrap_or_default(), claim.name_any());
    let written = api.patch::<SandboxClaim>(&namespace, &name, patch).await?;
    context.caches.claims.assume(written.clone());
    Ok(written)
}

//! No client required. Computes a claim's status.

use jiff::Timestamp;
use kube::ResourceExt;
use serde_json::{Value, json};
use torpor_api::{
    Sandbox, SandboxClaim, annotations,
    conditions::{self, Draft, Status},
    extensions::{ClaimedSandbox, SandboxClaimStatus},
    reasons::{claim as reasons, sandbox as sandbox_reasons},
};

use super::{
    late_bind,
    plan::{Outlook, sandbox_expired},
};
use crate::merge_patch;

/// Returns the status after a pass.
pub fn next(claim: &SandboxClaim, outlook: &Outlook, now: Timestamp) -> SandboxClaimStatus {
    let mut status = claim.status.clone().unwrap_or_default();
    let ready = match outlook {
        Outlook::Sandbox(sandbox) => {
            describe(&mut status, Some(sandbox));
            mirrored_ready(sandbox, now)
        }
        Outlook::NoSandbox => {
            describe(&mut status, None);
            not_ready(reasons::SANDBOX_MISSING, "Sandbox does not exist")
        }
        Outlook::Refused { why, sandbox } => {
            describe(&mut status, sandbox.as_deref());
            let message = match why.reason() {
                reasons::RECONCILER_ERROR => format!("Error seen: {why}"),
                _ => why.to_string(),
            };
            not_ready(why.reason(), &message)
        }
        Outlook::Failed { message, sandbox } => {
            describe(&mut status, sandbox.as_deref());
            not_ready(reasons::RECONCILER_ERROR, &format!("Error seen: {message}"))
        }
        Outlook::Expired { sandbox, foreign } => {
            match (sandbox, foreign) {
                (Some(sandbox), _) => describe(&mut status, Some(sandbox)),
                (None, Some(_)) => describe(&mut status, None),
                (None, None) => status.sandbox = None,
            }
            let message = match foreign {
                None => "Claim expired. Sandbox cleanup initiated.".to_owned(),
                Some(name) => format!(
                    "Claim expired. Sandbox {name:?} is not owned by this claim; deletion skipped."
                ),
            };
            not_ready(reasons::CLAIM_EXPIRED, &message)
        }
    };
    conditions::set(
        &mut status.conditions,
        ready,
        claim.metadata.generation,
        now,
    );
    if let Outlook::Sandbox(sandbox) = outlook {
        mirror_finished(&mut status, claim, sandbox, now);
    }
    status
}

fn not_ready(reason: &'static str, message: &str) -> Draft {
    Draft::new(conditions::READY, Status::False, reason, message.to_owned())
}

/// Sets name and addresses of the Sandbox. The name of a lost Sandbox stays until a replacement is
/// committed: the replacement is recognized by it.
fn describe(status: &mut SandboxClaimStatus, sandbox: Option<&Sandbox>) {
    match sandbox {
        Some(sandbox) => {
            let ips = sandbox.status.as_ref().map(|status| status.pod_ips.clone());
            status.sandbox = Some(ClaimedSandbox {
                name: sandbox.name_any(),
                pod_ips: ips.unwrap_or_default(),
            });
        }
        None => {
            if let Some(gone) = &mut status.sandbox {
                gone.pod_ips.clear();
            }
        }
    }
}

fn mirrored_ready(sandbox: &Sandbox, now: Timestamp) -> Draft {
    if sandbox_expired(sandbox, now) {
        return not_ready(
            reasons::SANDBOX_EXPIRED,
            "Underlying Sandbox resource has expired independently of the Claim.",
        );
    }
    let all = sandbox.status.as_ref().map(|status| &status.conditions[..]);
    let ready = conditions::find(all.unwrap_or_default(), conditions::READY);
    let Some(ready) = ready else {
        return not_ready(reasons::SANDBOX_NOT_READY, "Sandbox is not ready");
    };
    if late_bind::is_from_before(sandbox) {
        let message = "The claim has not arrived in its Sandbox yet";
        return not_ready(sandbox_reasons::BINDING, message);
    }
    // Clients read the Pod's name as soon as the claim is Ready.
    if ready.status == "True" && !sandbox.annotations().contains_key(annotations::POD_NAME) {
        return not_ready(reasons::SANDBOX_NOT_READY, "Sandbox is not ready");
    }
    Draft {
        type_: conditions::READY,
        status: ready.status.clone().into(),
        reason: ready.reason.clone().into(),
        message: ready.message.clone().into(),
    }
}

fn mirror_finished(
    status: &mut SandboxClaimStatus,
    claim: &SandboxClaim,
    sandbox: &Sandbox,
    now: Timestamp,
) {
    let all = sandbox.status.as_ref().map(|status| &status.conditions[..]);
    let Some(finished) = conditions::find(all.unwrap_or_default(), conditions::FINISHED) else {
        conditions::remove(&mut status.conditions, conditions::FINISHED);
        return;
    };
    let draft = Draft {
        type_: conditions::FINISHED,
        status: finished.status.clone().into(),
        reason: finished.reason.clone().into(),
        message: finished.message.clone().into(),
    };
    let generation = claim.metadata.generation;
    conditions::set(&mut status.conditions, draft, generation, now);
}

/// Returns the patch from `before` to `after`, for this version of the claim only; `None` without a
/// difference.
pub fn patch(
    claim: &SandboxClaim,
    before: &SandboxClaimStatus,
    after: &SandboxClaimStatus,
) -> Option<Value> {
    let difference = merge_patch::difference(&json!(before), &json!(after))?;
    Some(json!({
        "metadata": {"resourceVersion": claim.resource_version()},
        "status": difference,
    }))
}

#[cfg(test)]
mod tests;

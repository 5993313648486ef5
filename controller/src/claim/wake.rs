//! No client required. Decides how long a claim waits for its member to wake, and whether the wake
//! has failed.
//!
//! A claim is Ready once its member runs. Until then no client has the member's name, so that
//! another member can take its place.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use torpor_api::{
    Sandbox, SandboxClaim, conditions,
    reasons::{hibernated, restored::COLD_STARTED},
};

/// Time after which a claim is Ready with a member that sleeps. Its first packet wakes it, even
/// where the agent of its node is gone.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time that a kubelet has to report that a Pod whose wake failed is not Ready any more.
const READINESS_REPORT_LIMIT: Duration = Duration::from_secs(3);

/// Returns how long a claim still waits for its member to run; `None` if it does not. `since`: time
/// since which it waits for a member that sleeps.
pub(super) fn patience(
    sandbox: &Sandbox,
    claim: &SandboxClaim,
    since: Option<Timestamp>,
    now: Timestamp,
) -> Option<Duration> {
    let (since, most) = if is_asleep(sandbox) {
        (since.unwrap_or(now), PATIENCE)
    } else if ready(sandbox).is_some() && has_failed(sandbox, claim) {
        let restored = condition(sandbox, conditions::RESTORED)?;
        (restored.last_transition_time.0, READINESS_REPORT_LIMIT)
    } else {
        return None;
    };
    let waited = Duration::try_from(now.duration_since(since)).unwrap_or_default();
    most.checked_sub(waited).filter(|left| !left.is_zero())
}

/// Reports whether a Sandbox sleeps, dozes, wakes or is about to sleep, by its status.
pub fn is_asleep(sandbox: &Sandbox) -> bool {
    let changes = [hibernated::DOZING, hibernated::WAKING, hibernated::SAVING];
    condition(sandbox, conditions::HIBERNATED)
        .is_some_and(|asleep| asleep.status == "True" || changes.contains(&&*asleep.reason))
}

/// Difference between the clocks of the apiserver and of this process that is allowed for.
const CLOCKS: SignedDuration = SignedDuration::from_secs(5);

/// Reports whether a Sandbox, since a claim exists, could not continue from its memory. It then
/// stays asleep, or starts without the memory; it has started once its status has a Ready that is
/// newer than that. The times have whole seconds: a Ready of the same second counts as that of the
/// member that slept.
pub fn has_failed(sandbox: &Sandbox, claim: &SandboxClaim) -> bool {
    let Some(restored) = condition(sandbox, conditions::RESTORED) else {
        return false;
    };
    let since = restored.last_transition_time.0;
    let created = claim.metadata.creation_timestamp.as_ref();
    let is_new = created.is_some_and(|created| created.0.duration_since(since) <= CLOCKS);
    let stays = condition(sandbox, conditions::HIBERNATED).is_some_and(|one| one.status == "True");
    let is_old = ready(sandbox).is_none_or(|ready| ready.last_transition_time.0 <= since);
    is_new && is_old && (is_cold(restored) || stays && restored.status == "False")
}

/// Reports whether the condition Restored says that a Sandbox started cold.
pub fn is_cold(restored: &Condition) -> bool {
    restored.status == "False" && restored.reason == COLD_STARTED
}

/// Returns the condition Ready of a Sandbox that is Ready.
fn ready(sandbox: &Sandbox) -> Option<&Condition> {
    condition(sandbox, conditions::READY).filter(|ready| ready.status == "True")
}

fn condition<'a>(sandbox: &'a Sandbox, type_: &str) -> Option<&'a Condition> {
    conditions::find(&sandbox.status.as_ref()?.conditions, type_)
}

#[cfg(test)]
mod tests;

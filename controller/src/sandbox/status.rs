//! No client required. Computes the status of a Sandbox after a pass, in upstream's exact words,
//! with Torpor's conditions where they apply.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt;
use serde_json::{Value, json};
use torpor_api::{
    OperatingMode, Sandbox, SandboxStatus, annotations,
    conditions::{self, Draft, Status},
    labels, name_hash,
    reasons::sandbox as reasons,
};

use super::{
    apply::Applied,
    plan::{Area, ConditionChange, Phase, Plan, ServiceOutlook, disruption},
    validate::{Ownership, ownership},
};
use crate::{candidates::pool_of, merge_patch};

/// State at the end of a pass, from which the status is computed.
struct EndState<'a> {
    sandbox: &'a Sandbox,
    pod: Option<Arc<Pod>>,
    /// True if the Pod's area failed, so that a missing Pod proves nothing.
    pod_failed: bool,
    service: Option<Arc<Service>>,
    /// True if there is no Service and none is wanted.
    service_is_gone: bool,
    several_pods: Option<usize>,
    errors: Vec<String>,
    /// True if all errors last until the Sandbox is changed.
    errors_last: bool,
    /// True if the status already has Finished=True.
    finished: bool,
    /// True if the Pod has ended and its memory is being kept for the next Pod.
    keeps_ended: bool,
}

/// Returns the status after a pass.
pub fn next(
    sandbox: &Sandbox,
    plan: &Plan,
    applied: &Applied,
    cluster_domain: &str,
    now: Timestamp,
) -> SandboxStatus {
    let old = sandbox.status.clone().unwrap_or_default();
    match plan.phase {
        Phase::Deleted => old,
        Phase::Expiring => expired(old, sandbox, now),
        // Failures are retried before the status is reduced to its conditions.
        Phase::Expired if applied.failures.is_empty() => {
            let kept = SandboxStatus {
                conditions: old.conditions,
                ..SandboxStatus::default()
            };
            set(kept, sandbox, expired_condition(), now)
        }
        Phase::Expired => old,
        Phase::Active => active(old, sandbox, plan, applied, cluster_domain, now),
    }
}

/// Time that a member of a pool may take to become Ready before its status is written.
const STATUS_DELAY: Duration = Duration::from_secs(5);

/// Reports whether a status has Ready=True.
pub fn is_ready(status: Option<&SandboxStatus>) -> bool {
    status.is_some_and(|status| conditions::is_true(&status.conditions, conditions::READY))
}

/// Returns how long the status of a member of a pool need not be written.
///
/// No client waits for a member, and a member that is Ready within seconds would otherwise get
/// three status writes. A change that lets a claim take the member (its addresses) or that ends its
/// start is written at once.
pub fn write_delay(
    sandbox: &Sandbox,
    before: &SandboxStatus,
    after: &SandboxStatus,
    now: Timestamp,
) -> Option<Duration> {
    pool_of(sandbox)?;
    let must_write = patch(Some(before), after).is_none()
        || is_ready(Some(before))
        || is_ready(Some(after))
        || before.pod_ips != after.pod_ips
        || conditions::find(&after.conditions, conditions::FINISHED).is_some();
    if must_write {
        return None;
    }
    let created = sandbox.metadata.creation_timestamp.as_ref()?.0;
    let age = Duration::try_from(now.duration_since(created)).unwrap_or_default();
    STATUS_DELAY.checked_sub(age).filter(|wait| !wait.is_zero())
}

fn expired_condition() -> Draft {
    let reason = reasons::SANDBOX_EXPIRED;
    Draft::new(
        conditions::READY,
        Status::False,
        reason,
        "Sandbox has expired",
    )
}

/// Marks a Sandbox as expired. Finished stays. PodScheduled would describe a Pod that is deleted.
pub fn expired(mut status: SandboxStatus, sandbox: &Sandbox, now: Timestamp) -> SandboxStatus {
    conditions::remove(&mut status.conditions, conditions::POD_SCHEDULED);
    set(status, sandbox, expired_condition(), now)
}

fn set(
    mut status: SandboxStatus,
    sandbox: &Sandbox,
    draft: Draft,
    now: Timestamp,
) -> SandboxStatus {
    conditions::set(
        &mut status.conditions,
        draft,
        sandbox.metadata.generation,
        now,
    );
    status
}

fn active(
    mut status: SandboxStatus,
    sandbox: &Sandbox,
    plan: &Plan,
    applied: &Applied,
    cluster_domain: &str,
    now: Timestamp,
) -> SandboxStatus {
    let state = end_state(sandbox, plan, applied);
    describe_pod(&mut status, &state);
    describe_service(&mut status, &state, cluster_domain);
    let suspended = plan
        .memory
        .suspended
        .clone()
        .unwrap_or_else(|| suspended(&state));
    let ready = ready(&state, &suspended);
    for (type_, change) in [
        (conditions::SUSPENDED, ConditionChange::Set(suspended)),
        (
            conditions::FINISHED,
            finished(&state).map_or(ConditionChange::Remove, ConditionChange::Set),
        ),
        (
            conditions::POD_SCHEDULED,
            pod_scheduled(&state).map_or(ConditionChange::Remove, ConditionChange::Set),
        ),
        (conditions::READY, ConditionChange::Set(ready)),
        (conditions::HIBERNATED, plan.memory.hibernated.clone()),
        (conditions::RESTORED, plan.memory.restored.clone()),
        (conditions::BOUND, plan.memory.bound.clone()),
        (conditions::ARCHIVED, plan.memory.archived.clone()),
    ] {
        match change {
            ConditionChange::Set(draft) => {
                let generation = sandbox.metadata.generation;
                conditions::set(&mut status.conditions, draft, generation, now);
            }
            ConditionChange::Remove => conditions::remove(&mut status.conditions, type_),
            ConditionChange::Keep => {}
        }
    }
    status
}

fn end_state<'a>(sandbox: &'a Sandbox, plan: &Plan, applied: &Applied) -> EndState<'a> {
    let failure_in = |area| applied.failures.iter().find(|failure| failure.area == area);
    let mut errors = Vec::new();
    for area in [Area::Claims, Area::Pod, Area::Service] {
        errors.extend(
            plan.refusals
                .iter()
                .filter(|(a, _)| *a == area)
                .map(|(_, why)| why.clone()),
        );
        errors.extend(failure_in(area).map(|failure| failure.message.clone()));
    }
    let refused = |area| plan.refusals.iter().any(|(a, _)| *a == area);
    let pod_failed =
        refused(Area::Pod) || failure_in(Area::Pod).is_some() || plan.several_pods.is_some();
    let pod_stays = failure_in(Area::Pod).is_none_or(|failure| failure.pod_stays);
    let pod = applied.pod.clone().or_else(|| plan.pod.clone());
    let service = match &plan.service {
        ServiceOutlook::Exists(service) => Some(
            applied
                .service
                .clone()
                .unwrap_or_else(|| Arc::clone(service)),
        ),
        ServiceOutlook::Wanted => applied.service.clone(),
        ServiceOutlook::None | ServiceOutlook::Untouched => None,
    };
    let service_failed = refused(Area::Service) || failure_in(Area::Service).is_some();
    EndState {
        sandbox,
        pod: pod.filter(|_| pod_stays && !refused(Area::Pod)),
        pod_failed,
        service: service.filter(|_| !service_failed),
        service_is_gone: plan.service == ServiceOutlook::None && !service_failed,
        several_pods: plan.several_pods,
        errors,
        errors_last: plan.refusals.is_empty() && applied.is_invalid(),
        finished: sandbox
            .status
            .as_ref()
            .is_some_and(|status| conditions::is_true(&status.conditions, conditions::FINISHED)),
        keeps_ended: plan.memory.keeps_ended,
    }
}

impl EndState<'_> {
    fn own_pod(&self) -> Option<&Pod> {
        self.pod
            .as_deref()
            .filter(|pod| ownership(*pod, self.sandbox) == Ownership::Ours)
    }

    fn suspended(&self) -> bool {
        self.sandbox.spec.operating_mode == OperatingMode::Suspended
    }
}

fn describe_pod(status: &mut SandboxStatus, state: &EndState<'_>) {
    if state.pod.is_some() {
        let hash = name_hash(&state.sandbox.name_any());
        status.selector = format!("{}={hash}", labels::SANDBOX_NAME_HASH);
    }
    let own = state.own_pod();
    status.pod_ips = own
        .and_then(|pod| pod.status.as_ref()?.pod_ips.as_ref())
        .map(|ips| ips.iter().map(|ip| ip.ip.clone()).collect())
        .unwrap_or_default();
    status.node_name = own
        .and_then(|pod| pod.spec.as_ref()?.node_name.clone())
        .unwrap_or_default();
}

/// Writes the Service's fields. A Service that failed leaves them unchanged, as upstream.
fn describe_service(status: &mut SandboxStatus, state: &EndState<'_>, cluster_domain: &str) {
    if let Some(service) = &state.service {
        let namespace = service.namespace().unwrap_or_default();
        status.service = service.name_any();
        status.service_fqdn = format!("{}.{namespace}.svc.{cluster_domain}", status.service);
    } else if state.service_is_gone {
        status.service.clear();
        status.service_fqdn.clear();
    }
}

fn suspended(state: &EndState<'_>) -> Draft {
    let draft = |status, reason, message: &'static str| {
        Draft::new(conditions::SUSPENDED, status, reason, message)
    };
    if !state.suspended() {
        return draft(
            Status::False,
            reasons::NOT_SUSPENDED,
            "Sandbox is not suspended",
        );
    }
    match &state.pod {
        None if state.pod_failed => draft(
            Status::Unknown,
            reasons::POD_STATE_UNKNOWN,
            "Pod state is unknown. Sandbox suspension cannot be confirmed",
        ),
        None => draft(
            Status::True,
            reasons::POD_TERMINATED,
            "Pod has been terminated. Sandbox is suspended",
        ),
        Some(_) if state.own_pod().is_none() => draft(
            Status::False,
            reasons::POD_NOT_OWNED,
            "Refused to delete pod because it is not owned by this sandbox",
        ),
        Some(_) => draft(
            Status::False,
            reasons::POD_TERMINATING,
            "Pod is terminating. Sandbox is suspending",
        ),
    }
}

fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("")
}

/// Reports whether the Pod is being deleted.
///
/// Its phase then shows how its programs reacted to the termination, not that they completed. The
/// garbage collector of Pods writes the phase just before it deletes.
fn is_being_deleted(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
        || disruption(pod)
            .is_some_and(|condition| condition.reason.as_deref() == Some("DeletionByPodGC"))
}

/// Returns how the Pod ended by itself, as reason and message.
///
/// A Pod that ends because it is suspended or deleted does not count. A claim would otherwise be
/// deleted after its `ttlSecondsAfterFinished`, with memory and volumes.
fn ended(pod: &Pod, state: &EndState<'_>) -> Option<(&'static str, &'static str)> {
    if !state.finished && (state.suspended() || is_being_deleted(pod) || state.keeps_ended) {
        return None;
    }
    match phase(pod) {
        "Succeeded" => Some((reasons::POD_SUCCEEDED, "Pod completed successfully")),
        "Failed" => Some((reasons::POD_FAILED, "Pod failed")),
        _ => None,
    }
}

fn ready(state: &EndState<'_>, suspended: &Draft) -> Draft {
    let not_ready =
        |reason, message: String| Draft::new(conditions::READY, Status::False, reason, message);
    if let Some(count) = state.several_pods {
        return not_ready(reasons::MULTIPLE_PODS, several_pods_message(count));
    }
    if !state.errors.is_empty() {
        let message = format!("Error seen: {}", state.errors.join("\n"));
        let reason = match state.errors_last {
            true => reasons::INVALID_CONFIGURATION,
            false => reasons::RECONCILER_ERROR,
        };
        return not_ready(reason, message);
    }
    if state.suspended() {
        let settled = state.pod.is_none() || suspended.status == Status::True.as_str();
        let message = if settled {
            "Sandbox is suspended"
        } else {
            "Sandbox is suspending"
        };
        return not_ready(reasons::SANDBOX_SUSPENDED, message.to_owned());
    }
    if let Some((reason, message)) = state.pod.as_deref().and_then(|pod| ended(pod, state)) {
        return not_ready(reason, message.to_owned());
    }
    let (pod_ready, mut message) = pod_readiness(state.pod.as_deref());
    let mut ready = pod_ready;
    let required = state
        .sandbox
        .spec
        .service
        .unwrap_or_else(|| state.service.is_some());
    if required {
        ready &= state.service.is_some();
        message.push_str(match &state.service {
            Some(_) => "; Service Exists",
            None => "; Service does not exist",
        });
    }
    let own = state.own_pod().filter(|_| ready);
    if let Some(message) = own.and_then(|pod| unbound(state.sandbox, pod)) {
        return not_ready(reasons::BINDING, message);
    }
    if ready {
        let reason = reasons::DEPENDENCIES_READY;
        return Draft::new(conditions::READY, Status::True, reason, message);
    }
    not_ready(reasons::DEPENDENCIES_NOT_READY, message)
}

/// Returns what keeps the claim of a Sandbox from its Pod's sandbox, for the message; `None` if the
/// Sandbox serves no claim that has to arrive there, or the claim has arrived.
fn unbound(sandbox: &Sandbox, pod: &Pod) -> Option<String> {
    let claim = sandbox.labels().get(labels::CLAIM_UID);
    let claim = claim.filter(|_| annotations::binds(sandbox.annotations()))?;
    let on_pod = pod.annotations().get(annotations::CLAIM);
    let Some(on_pod) = on_pod else {
        return Some(format!(
            "Claim {claim} cannot arrive: the Pod was made without the volume for it. Delete the Pod"
        ));
    };
    if on_pod != claim {
        return Some(format!("Claim {claim} waits for its files"));
    }
    let conditions = pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    match conditions.find(|found| found.type_ == conditions::POD_BOUND) {
        Some(bound) if bound.status == "True" => None,
        Some(bound) => bound.message.clone(),
        None => Some(format!(
            "Claim {claim} waits for the node agent. Late binding needs a RuntimeClass of Torpor's gVisor"
        )),
    }
}

/// Returns upstream's message for more than one Pod.
pub fn several_pods_message(count: usize) -> String {
    format!(
        "multiple Pods ({count}) are controlled by this Sandbox; refusing to choose or create a Pod"
    )
}

fn pod_readiness(pod: Option<&Pod>) -> (bool, String) {
    let Some(pod) = pod else {
        return (false, "Pod does not exist".to_owned());
    };
    if phase(pod) != "Running" {
        return (false, format!("Pod exists with phase: {}", phase(pod)));
    }
    // A terminating Pod stays Ready until it ends, but must get no new connections.
    if pod.metadata.deletion_timestamp.is_some() {
        return (false, "Pod is terminating".to_owned());
    }
    let status = pod.status.as_ref();
    let is_ready = status
        .and_then(|status| status.conditions.as_ref())
        .into_iter()
        .flatten()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True");
    let has_ips = status
        .and_then(|s| s.pod_ips.as_ref())
        .is_some_and(|ips| !ips.is_empty());
    match (is_ready, has_ips) {
        (false, _) => (false, "Pod is Running but not Ready".to_owned()),
        (true, false) => (false, "Pod is Ready but has no podIPs yet".to_owned()),
        (true, true) => (true, "Pod is Ready".to_owned()),
    }
}

fn finished(state: &EndState<'_>) -> Option<Draft> {
    let (reason, message) = ended(state.own_pod()?, state)?;
    Some(Draft::new(
        conditions::FINISHED,
        Status::True,
        reason,
        message,
    ))
}

/// Copies the Pod's condition PodScheduled.
///
/// The scheduler gives no reason on success, but a condition needs one.
fn pod_scheduled(state: &EndState<'_>) -> Option<Draft> {
    let unknown = |message: &'static str| {
        let reason = reasons::POD_SCHEDULING_UNKNOWN;
        Draft::new(conditions::POD_SCHEDULED, Status::Unknown, reason, message)
    };
    if state.pod.is_none() && state.pod_failed {
        return Some(unknown(
            "Pod state is unknown. Pod scheduling cannot be determined",
        ));
    }
    let conditions = state
        .own_pod()?
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    let condition = conditions
        .into_iter()
        .flatten()
        .find(|c| c.type_ == "PodScheduled");
    let Some(condition) = condition else {
        return Some(unknown("Pod has not reported a PodScheduled condition yet"));
    };
    let fallback = match condition.status.as_str() {
        "True" => reasons::POD_SCHEDULED,
        _ => reasons::POD_SCHEDULING_UNKNOWN,
    };
    let reason = condition.reason.clone().filter(|reason| !reason.is_empty());
    Some(Draft {
        type_: conditions::POD_SCHEDULED,
        status: condition.status.clone().into(),
        reason: reason.unwrap_or_else(|| fallback.to_owned()).into(),
        message: condition.message.clone().unwrap_or_default().into(),
    })
}

/// Returns the patch that makes the status `new`, or `None` if nothing is to be written.
///
/// A changed node name alone waits for the next change while the Sandbox is not Ready.
pub fn patch(old: Option<&SandboxStatus>, new: &SandboxStatus) -> Option<Value> {
    let old = old.cloned().unwrap_or_default();
    let ready = conditions::is_true(&new.conditions, conditions::READY);
    let node_only = SandboxStatus {
        node_name: old.node_name.clone(),
        ..new.clone()
    } == old;
    if node_only && !ready {
        return None;
    }
    let difference = merge_patch::difference(&json!(old), &json!(new))?;
    Some(json!({"status": difference}))
}

#[cfg(test)]
mod tests;

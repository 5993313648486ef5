//! No client required. What the status of a Sandbox says after a pass, word for word as upstream, plus Torpor's two conditions where they apply.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt;
use serde_json::{Value, json};
use torpor_api::{
    OperatingMode, Sandbox, SandboxStatus,
    conditions::{self, Draft, Status},
    labels, name_hash,
    reasons::sandbox as reasons,
};

use super::{
    apply::Applied,
    plan::{Area, Phase, Plan, ServiceOutlook, Shown, disruption},
    validate::{Ownership, ownership},
};
use crate::{candidates::pool_of, merge_patch};

/// The end of a pass, as the status sees it.
struct Seen<'a> {
    sandbox: &'a Sandbox,
    pod: Option<Arc<Pod>>,
    /// The Pod's part did not go through, so that a missing Pod proves nothing.
    pod_failed: bool,
    service: Option<Arc<Service>>,
    /// There is no Service, and there should be none.
    service_is_gone: bool,
    several_pods: Option<usize>,
    errors: Vec<String>,
    /// All the errors stay until the Sandbox is changed.
    errors_last: bool,
    /// The status said already that the Sandbox has finished.
    finished: bool,
    /// The Pod has ended, and its memory is being kept for the next.
    keeps_ended: bool,
}

/// What the status should be after a pass.
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
        // Failures are retried before the status is cut down to its conditions.
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

/// How long a member of a pool may be on its way to Ready before its status says how far it has come.
const UNSAID: Duration = Duration::from_secs(5);

/// Whether a status says Ready=True.
pub fn is_ready(status: Option<&SandboxStatus>) -> bool {
    status.is_some_and(|status| conditions::is_true(&status.conditions, conditions::READY))
}

/// How long the status of a member of a pool need not be written. Nobody waits for a member, and one that is Ready within seconds would otherwise be described three times. What makes it
/// one that a claim may take (its addresses), or ends its way, is said at once.
pub fn may_wait(
    sandbox: &Sandbox,
    before: &SandboxStatus,
    after: &SandboxStatus,
    now: Timestamp,
) -> Option<Duration> {
    pool_of(sandbox)?;
    let says_more = patch(Some(before), after).is_none()
        || is_ready(Some(before))
        || is_ready(Some(after))
        || before.pod_ips != after.pod_ips
        || conditions::find(&after.conditions, conditions::FINISHED).is_some();
    if says_more {
        return None;
    }
    let created = sandbox.metadata.creation_timestamp.as_ref()?.0;
    let age = Duration::try_from(now.duration_since(created)).unwrap_or_default();
    UNSAID.checked_sub(age).filter(|wait| !wait.is_zero())
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

/// Marks a Sandbox as expired. Finished stays; PodScheduled would describe a Pod that goes.
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
    let seen = seen(sandbox, plan, applied);
    describe_pod(&mut status, &seen);
    describe_service(&mut status, &seen, cluster_domain);
    let suspended = plan
        .memory
        .suspended
        .clone()
        .unwrap_or_else(|| suspended(&seen));
    let ready = ready(&seen, &suspended);
    for (type_, shown) in [
        (conditions::SUSPENDED, Shown::Set(suspended)),
        (
            conditions::FINISHED,
            finished(&seen).map_or(Shown::Remove, Shown::Set),
        ),
        (
            conditions::POD_SCHEDULED,
            pod_scheduled(&seen).map_or(Shown::Remove, Shown::Set),
        ),
        (conditions::READY, Shown::Set(ready)),
        (conditions::HIBERNATED, plan.memory.hibernated.clone()),
        (conditions::RESTORED, plan.memory.restored.clone()),
    ] {
        match shown {
            Shown::Set(draft) => {
                let generation = sandbox.metadata.generation;
                conditions::set(&mut status.conditions, draft, generation, now);
            }
            Shown::Remove => conditions::remove(&mut status.conditions, type_),
            Shown::Keep => {}
        }
    }
    status
}

fn seen<'a>(sandbox: &'a Sandbox, plan: &Plan, applied: &Applied) -> Seen<'a> {
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
    Seen {
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

impl Seen<'_> {
    fn own_pod(&self) -> Option<&Pod> {
        self.pod
            .as_deref()
            .filter(|pod| ownership(*pod, self.sandbox) == Ownership::Ours)
    }

    fn suspended(&self) -> bool {
        self.sandbox.spec.operating_mode == OperatingMode::Suspended
    }
}

fn describe_pod(status: &mut SandboxStatus, seen: &Seen<'_>) {
    if seen.pod.is_some() {
        let hash = name_hash(&seen.sandbox.name_any());
        status.selector = format!("{}={hash}", labels::SANDBOX_NAME_HASH);
    }
    let own = seen.own_pod();
    status.pod_ips = own
        .and_then(|pod| pod.status.as_ref()?.pod_ips.as_ref())
        .map(|ips| ips.iter().map(|ip| ip.ip.clone()).collect())
        .unwrap_or_default();
    status.node_name = own
        .and_then(|pod| pod.spec.as_ref()?.node_name.clone())
        .unwrap_or_default();
}

/// A Service that could not be had leaves what the status says about it, as upstream.
fn describe_service(status: &mut SandboxStatus, seen: &Seen<'_>, cluster_domain: &str) {
    if let Some(service) = &seen.service {
        let namespace = service.namespace().unwrap_or_default();
        status.service = service.name_any();
        status.service_fqdn = format!("{}.{namespace}.svc.{cluster_domain}", status.service);
    } else if seen.service_is_gone {
        status.service.clear();
        status.service_fqdn.clear();
    }
}

fn suspended(seen: &Seen<'_>) -> Draft {
    let draft = |status, reason, message: &'static str| {
        Draft::new(conditions::SUSPENDED, status, reason, message)
    };
    if !seen.suspended() {
        return draft(
            Status::False,
            reasons::NOT_SUSPENDED,
            "Sandbox is not suspended",
        );
    }
    match &seen.pod {
        None if seen.pod_failed => draft(
            Status::Unknown,
            reasons::POD_STATE_UNKNOWN,
            "Pod state is unknown. Sandbox suspension cannot be confirmed",
        ),
        None => draft(
            Status::True,
            reasons::POD_TERMINATED,
            "Pod has been terminated. Sandbox is suspended",
        ),
        Some(_) if seen.own_pod().is_none() => draft(
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

/// Whether the Pod is being taken away: its programs are ended, and its phase says how they took it, not that they were done. The garbage collector of Pods writes the phase a moment before it deletes.
fn goes(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
        || disruption(pod).is_some_and(|said| said.reason.as_deref() == Some("DeletionByPodGC"))
}

/// How the Pod ended by itself. What ends because it is suspended or taken away has not: a claim would be deleted for it, with memory and volumes, once its `ttlSecondsAfterFinished` is over.
fn ended(pod: &Pod, seen: &Seen<'_>) -> Option<(&'static str, &'static str)> {
    if !seen.finished && (seen.suspended() || goes(pod) || seen.keeps_ended) {
        return None;
    }
    match phase(pod) {
        "Succeeded" => Some((reasons::POD_SUCCEEDED, "Pod completed successfully")),
        "Failed" => Some((reasons::POD_FAILED, "Pod failed")),
        _ => None,
    }
}

fn ready(seen: &Seen<'_>, suspended: &Draft) -> Draft {
    let not_ready =
        |reason, message: String| Draft::new(conditions::READY, Status::False, reason, message);
    if let Some(count) = seen.several_pods {
        return not_ready(reasons::MULTIPLE_PODS, several_pods_message(count));
    }
    if !seen.errors.is_empty() {
        let message = format!("Error seen: {}", seen.errors.join("\n"));
        let reason = match seen.errors_last {
            true => reasons::INVALID_CONFIGURATION,
            false => reasons::RECONCILER_ERROR,
        };
        return not_ready(reason, message);
    }
    if seen.suspended() {
        let settled = seen.pod.is_none() || suspended.status == Status::True.as_str();
        let message = if settled {
            "Sandbox is suspended"
        } else {
            "Sandbox is suspending"
        };
        return not_ready(reasons::SANDBOX_SUSPENDED, message.to_owned());
    }
    if let Some((reason, message)) = seen.pod.as_deref().and_then(|pod| ended(pod, seen)) {
        return not_ready(reason, message.to_owned());
    }
    let (pod_ready, mut message) = pod_readiness(seen.pod.as_deref());
    let mut ready = pod_ready;
    let required = seen
        .sandbox
        .spec
        .service
        .unwrap_or_else(|| seen.service.is_some());
    if required {
        ready &= seen.service.is_some();
        message.push_str(match &seen.service {
            Some(_) => "; Service Exists",
            None => "; Service does not exist",
        });
    }
    if ready {
        let reason = reasons::DEPENDENCIES_READY;
        return Draft::new(conditions::READY, Status::True, reason, message);
    }
    not_ready(reasons::DEPENDENCIES_NOT_READY, message)
}

/// Upstream's words for more than one Pod.
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
    // It is Ready to its end, and nobody is to come any more.
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

fn finished(seen: &Seen<'_>) -> Option<Draft> {
    let (reason, message) = ended(seen.own_pod()?, seen)?;
    Some(Draft::new(
        conditions::FINISHED,
        Status::True,
        reason,
        message,
    ))
}

/// Copy of the Pod's own condition. The scheduler gives no reason on success, and a condition needs one.
fn pod_scheduled(seen: &Seen<'_>) -> Option<Draft> {
    let unknown = |message: &'static str| {
        let reason = reasons::POD_SCHEDULING_UNKNOWN;
        Draft::new(conditions::POD_SCHEDULED, Status::Unknown, reason, message)
    };
    if seen.pod.is_none() && seen.pod_failed {
        return Some(unknown(
            "Pod state is unknown. Pod scheduling cannot be determined",
        ));
    }
    let conditions = seen
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

/// The patch that makes the status `new`; `None` when nothing is to be written. A node name alone waits for the next change while the Sandbox is not Ready.
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

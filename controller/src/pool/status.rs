//! Computes the status of a pool: counts as upstream, and the conditions that upstream develops.
//! Pure.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use torpor_api::{
    Sandbox, SandboxWarmPool,
    conditions::{self, Draft, Status},
    extensions::SandboxWarmPoolStatus,
    labels, name_hash,
    reasons::pool as reasons,
};

use super::plan::{Observed, Plan, active, is_ready, replicas, unseen};
use crate::events::without_numbers;

/// Returns the pool's status.
pub fn next(observed: &Observed, plan: &Plan, now: Timestamp) -> SandboxWarmPoolStatus {
    let pool = &observed.pool;
    let active: Vec<&Arc<Sandbox>> = active(observed).collect();
    let ready = active.iter().filter(|member| is_ready(member)).count();
    let count = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    let mut status = SandboxWarmPoolStatus {
        conditions: pool.status.clone().unwrap_or_default().conditions,
        observed_generation: pool.metadata.generation,
        replicas: Some(count(active.len() + unseen(observed).len())),
        ready_replicas: Some(count(ready)),
        selector: format!(
            "{}={}",
            labels::WARM_POOL_SANDBOX,
            name_hash(&pool.name_any())
        ),
    };
    let before = conditions::find(&status.conditions, conditions::PROGRESSING);
    let progressing = progressing(plan, observed.template.is_some(), before);
    for draft in [available(ready >= replicas(pool)), progressing] {
        let generation = pool.metadata.generation;
        conditions::set(&mut status.conditions, draft, generation, now);
    }
    status
}

/// Returns the condition Available. Its message has no counts, which are in the status itself:
/// every new member would change the message.
fn available(has_all: bool) -> Draft {
    let (status, reason, message) = if has_all {
        let message = "As many members are Ready as spec.replicas asks for";
        (Status::True, reasons::MINIMUM_REPLICAS_AVAILABLE, message)
    } else {
        let message = "Fewer members are Ready than spec.replicas asks for";
        (
            Status::False,
            reasons::MINIMUM_REPLICAS_UNAVAILABLE,
            message,
        )
    };
    Draft::new(conditions::AVAILABLE, status, reason, message)
}

/// Returns the condition Progressing.
///
/// An earlier message stays as long as it may still hold: a stall until no member waits (as its
/// Event, [`super::advice::progress`]), and a message that differs only in numbers.
fn progressing(plan: &Plan, has_template: bool, before: Option<&Condition>) -> Draft {
    let before = before.filter(|before| before.status == Status::False.as_str());
    let stalls = reasons::WARM_POOL_NOT_PROGRESSING;
    let (status, reason, why) = match (plan.stalled.as_deref(), before) {
        (Some(why), _) if has_template => (Status::False, stalls, why),
        (Some(why), _) => (Status::False, reasons::SANDBOX_TEMPLATE_ERROR, why),
        (None, Some(before)) if !plan.placed && before.reason == stalls => {
            (Status::False, stalls, &*before.message)
        }
        (None, _) => (
            Status::True,
            reasons::WARM_POOL_PROGRESSING,
            "Nothing prevents the pool from creating its members",
        ),
    };
    let earlier = before.map(|before| &*before.message);
    let same = earlier.filter(|earlier| without_numbers(earlier) == without_numbers(why));
    let message = same.unwrap_or(why).to_owned();
    Draft::new(conditions::PROGRESSING, status, reason, message)
}

/// Reports whether the pool's status has a stall.
pub fn is_stalled(pool: &SandboxWarmPool) -> bool {
    let status = pool.status.as_ref();
    let progressing = status.and_then(|s| conditions::find(&s.conditions, conditions::PROGRESSING));
    progressing.is_some_and(|progressing| progressing.status == Status::False.as_str())
}

/// Reports whether the pool has the requested members, all Ready.
pub fn is_settled(status: &SandboxWarmPoolStatus, observed: &Observed) -> bool {
    let wanted = i32::try_from(replicas(&observed.pool)).ok();
    status.replicas == wanted && status.ready_replicas == wanted
}

//! What the status of a pool says: counts as upstream, and the conditions that upstream has in work. Pure.

use std::sync::Arc;

use jiff::Timestamp;
use kube::ResourceExt;
use torpor_api::{
    Sandbox,
    conditions::{self, Draft, Status},
    extensions::SandboxWarmPoolStatus,
    labels, name_hash,
    reasons::pool as reasons,
};

use super::plan::{Observed, active, is_ready, replicas, unseen};

/// The pool's status. `stalled` says why the pool does not come on.
///
/// The conditions are those of upstream's #1326 and of its branch with test/e2e/extensions/warmpool_status_condition_test.go (37e1c8d). Neither is in a release.
pub fn next(observed: &Observed, stalled: Option<&str>, now: Timestamp) -> SandboxWarmPoolStatus {
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
    let progressing = progressing(stalled, observed.template.is_some());
    for draft in [available(ready >= replicas(pool)), progressing] {
        let generation = pool.metadata.generation;
        conditions::set(&mut status.conditions, draft, generation, now);
    }
    status
}

/// Without counts, which the status has beside it: each member would change the words.
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

fn progressing(stalled: Option<&str>, has_template: bool) -> Draft {
    let (status, reason, message) = match stalled {
        None => (
            Status::True,
            reasons::WARM_POOL_PROGRESSING,
            "Nothing keeps the pool from its members",
        ),
        Some(why) if has_template => (Status::False, reasons::WARM_POOL_NOT_PROGRESSING, why),
        Some(why) => (Status::False, reasons::SANDBOX_TEMPLATE_ERROR, why),
    };
    Draft::new(conditions::PROGRESSING, status, reason, message.to_owned())
}

/// Whether the pool has what it is asked for.
pub fn is_settled(status: &SandboxWarmPoolStatus, observed: &Observed) -> bool {
    let wanted = i32::try_from(replicas(&observed.pool)).ok();
    status.replicas == wanted && status.ready_replicas == wanted
}

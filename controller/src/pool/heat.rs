//! No client required. Decides which members of a pool run and which sleep: pure.
//!
//! As many members run as claims took in the last three seconds, and at least as many as the
//! annotation of the pool asks for. A wake takes a fraction of that time. More than that fall
//! asleep again once no claim of the last minute explains them.

use std::{sync::Arc, time::Duration};

use kube::ResourceExt;
use serde_json::{Value, json};
use torpor_api::{
    Sandbox, SandboxWarmPool,
    annotations::{self, Heat, InvalidAnnotation},
};

use super::plan::{Action, Observed, Plan, is_ready, pause, replicas, unseen};
use crate::{claim::wake, golden::Golden};

/// Time in which claims that took members heat as many others.
pub const SOON: Duration = Duration::from_secs(3);
/// Time for which a member that was heated for claims stays awake.
pub const LATELY: Duration = Duration::from_secs(60);

/// Time until a pool looks again whether members that it has woken may sleep.
const RECHECK: Duration = Duration::from_secs(10);

/// Members that claims took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Within [`SOON`].
    pub soon: usize,
    /// Within [`LATELY`].
    pub lately: usize,
}

/// Reports whether a member sleeps, or is to sleep.
pub fn is_asleep(member: &Sandbox) -> bool {
    let value = member.annotations().get(annotations::HIBERNATE);
    value.is_some_and(|value| value == "true")
}

/// Reports whether a member runs: it is not to sleep, and has woken if it slept.
pub fn is_awake(member: &Sandbox) -> bool {
    !is_asleep(member) && !wake::is_asleep(member)
}

/// Returns the heat that the pool's annotation asks for.
pub fn of(pool: &SandboxWarmPool) -> Option<Result<Heat, InvalidAnnotation>> {
    let value = pool.annotations().get(annotations::HEAT)?;
    Some(Heat::parse(value))
}

/// Returns the least number of members that run, without demand. A wrong value counts as none.
fn least(observed: &Observed) -> usize {
    let asked = of(&observed.pool).and_then(Result::ok);
    let heat = asked.unwrap_or(match observed.golden {
        Golden::Off => Heat::AllHot,
        Golden::Preparing(_) | Golden::Ready(_) => Heat::Hot(1),
    });
    heat.hot_of(replicas(&observed.pool))
}

/// Returns the number of members that are to run.
pub fn hot(observed: &Observed) -> usize {
    let most = replicas(&observed.pool);
    least(observed).max(observed.demand.soon).min(most)
}

/// Plans the steps that wake members, or put them to sleep. `keep`: members that stay.
pub fn plan(plan: &mut Plan, observed: &Observed, keep: &[&Arc<Sandbox>]) {
    // It is not known which of the members that the watch has not shown yet are to sleep.
    if !unseen(observed).is_empty() {
        return;
    }
    let (asleep, awake): (Vec<_>, Vec<_>) = keep.iter().partition(|member| is_asleep(member));
    let hot = hot(observed);
    let most = hot.max(observed.demand.lately);
    if awake.len() > least(observed) {
        // No event says that demand is over.
        plan.requeue = plan.requeue.into_iter().chain([RECHECK]).min();
    }
    let by_age = |mut members: Vec<&&Arc<Sandbox>>| -> Vec<Arc<Sandbox>> {
        members.sort_by_key(|member| {
            let created = member.metadata.creation_timestamp.as_ref().map(|at| at.0);
            (!is_ready(member), created, member.name_any())
        });
        members
            .into_iter()
            .map(|member| Arc::clone(member))
            .collect()
    };
    let steps: Vec<Action> = if awake.len() < hot
        && let Some(pause) = pause(observed)
    {
        plan.requeue = plan.requeue.into_iter().chain([pause]).min();
        Vec::new()
    } else if awake.len() < hot {
        let oldest = by_age(asleep).into_iter();
        let heated = oldest.take(hot - awake.len());
        heated.map(|member| step(&member, Value::Null)).collect()
    } else if awake.len() > most {
        let excess = awake.len() - most;
        let ready = by_age(awake).into_iter().filter(|member| is_ready(member));
        let newest: Vec<_> = ready.collect();
        let cooled = newest.iter().rev().take(excess);
        cooled.map(|member| step(member, "true".into())).collect()
    } else {
        Vec::new()
    };
    let most = observed.settings.max_batch;
    plan.steps.extend(steps.into_iter().take(most));
}

/// Returns the write that wakes a member or puts it to sleep, in the version that was read: the
/// apiserver refuses it if a claim has taken the member meanwhile.
fn step(member: &Sandbox, hibernate: Value) -> Action {
    Action::Heat {
        name: member.name_any(),
        patch: json!({"metadata": {
            "uid": member.uid(),
            "resourceVersion": member.resource_version(),
            "annotations": {annotations::HIBERNATE: hibernate},
        }}),
    }
}

/// Returns for each of `count` new members whether it begins asleep. `awake`: members that run, or
/// may.
pub fn begins_asleep(observed: &Observed, awake: usize, count: usize) -> Vec<bool> {
    let hot = hot(observed);
    (0..count).map(|number| awake + number >= hot).collect()
}

#[cfg(test)]
mod tests;

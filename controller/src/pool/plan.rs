//! No client required. Decides which members a pool makes, keeps and deletes: pure, total, deterministic.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use jiff::Timestamp;
use kube::ResourceExt;
use serde_json::{Value, json};
use torpor_api::{
    Sandbox, SandboxTemplate, SandboxWarmPool, conditions,
    extensions::{SandboxWarmPoolStatus, WarmPoolUpdateStrategyType},
    labels, name_hash,
};

use super::{
    member::{self, owner_reference},
    memory::Remembered,
};
use crate::{blueprint::Blueprint, pace::Advance, settings::PoolSettings};

/// How long a pool without a template waits for it, unless it comes.
pub const TEMPLATE_RETRY: Duration = Duration::from_secs(60);
/// How long a pool leaves an apiserver in peace that has too much to do.
pub const PRESSED_RETRY: Duration = Duration::from_secs(1);
/// When a pool goes on that has given way to others: behind all that wait by then.
pub const NEXT_TURN: Duration = Duration::from_millis(1);
/// What is looked at after a deadline is looked at this much after it, so that it has passed on every clock.
const SLACK: Duration = Duration::from_secs(2);

/// Everything that decides about one pool.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    pub pool: Arc<SandboxWarmPool>,
    pub template: Option<Arc<SandboxTemplate>>,
    /// Sandboxes that the pool controls.
    pub members: Vec<Arc<Sandbox>>,
    /// Sandboxes that carry the pool's label and that nobody controls.
    pub orphans: Vec<Arc<Sandbox>>,
    pub remembered: Remembered,
    /// The apiserver has too much to do.
    pub pressed: bool,
    /// How soon somebody may wait for what is made.
    pub advance: Advance,
    pub settings: PoolSettings,
}

/// One call.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    Adopt {
        name: String,
        patch: Value,
    },
    Delete {
        name: String,
        uid: String,
        resource_version: Option<String>,
    },
}

/// What to do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Taken all at once, before anything is made.
    pub steps: Vec<Action>,
    /// Names of the members to make, in order; those without an answer first.
    pub create: Vec<String>,
    /// How many members the pool lacks, whether they are made now or later.
    pub missing: usize,
    /// Why the pool does not progress.
    pub stalled: Option<String>,
    pub requeue: Option<Duration>,
}

/// How a member is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Ready,
    /// Not ready, and it may still become so.
    Waiting,
    /// No node has room for it.
    Unschedulable,
    /// It had its time.
    Stuck,
}

/// Whether a pass ends here, to go on when it is the pool's turn again. `worked` is how long it has lasted.
pub fn gives_way(others_wait: bool, worked: Duration, settings: &PoolSettings) -> bool {
    others_wait && worked >= settings.turn
}

/// Decides.
pub fn plan(observed: &Observed, now: Timestamp) -> Plan {
    let Observed {
        pool, remembered, ..
    } = observed;
    let mut plan = Plan::default();
    if pool.metadata.deletion_timestamp.is_some() {
        return plan;
    }
    let blueprint = observed.template.as_deref().map(Blueprint::of);
    let adopted = plan_orphans(&mut plan, observed, blueprint.as_ref());
    let active: Vec<&Arc<Sandbox>> = active(observed).collect();
    let unseen = unseen(observed);
    let mut keep = Vec::new();
    for member in &active {
        // Without a template nothing is known to have changed.
        let outdated = blueprint
            .as_ref()
            .is_some_and(|blueprint| recreates(pool) && blueprint.is_stale(member));
        if outdated || health(member, observed, now) == Health::Stuck {
            plan.steps.push(delete(member));
        } else {
            keep.push(*member);
        }
    }
    let wanted = replicas(pool);
    let excess = (keep.len() + adopted + unseen.len()).saturating_sub(wanted);
    for member in worst(keep.clone(), excess) {
        plan.steps.push(delete(member));
    }
    plan.steps.truncate(observed.settings.max_batch);
    // What is being deleted still counts: a pool has never more than it is asked for, not even for a moment.
    let there = observed.members.len() + adopted + unseen.len();
    plan.missing = wanted.saturating_sub(there);
    plan_creates(&mut plan, observed, remembered);
    plan_next_look(&mut plan, &keep, observed, now);
    plan
}

/// How many members the pool is asked for.
pub fn replicas(pool: &SandboxWarmPool) -> usize {
    usize::try_from(pool.spec.replicas.unwrap_or(1)).unwrap_or_default()
}

/// Members that are not on their way out.
fn active(observed: &Observed) -> impl Iterator<Item = &Arc<Sandbox>> {
    observed.members.iter().filter(|member| {
        let deleted = &observed.remembered.deleting;
        member.metadata.deletion_timestamp.is_none()
            && !member.uid().is_some_and(|uid| deleted.contains(&uid))
    })
}

/// Members that were asked for and that the watch has not shown yet.
fn unseen(observed: &Observed) -> BTreeSet<String> {
    let mut names = observed.remembered.creating.clone();
    for member in &observed.members {
        names.remove(&member.name_any());
    }
    names
}

/// Orphans come back into the pool if they are what the template says, and go if not. How many come back.
fn plan_orphans(plan: &mut Plan, observed: &Observed, blueprint: Option<&Blueprint<'_>>) -> usize {
    let Some(blueprint) = blueprint else {
        return 0;
    };
    let mut room = replicas(&observed.pool)
        .saturating_sub(observed.members.len() + observed.remembered.creating.len());
    let mut adopted = 0;
    for orphan in &observed.orphans {
        if orphan.metadata.deletion_timestamp.is_some() {
            continue;
        }
        if blueprint.is_stale(orphan) || room == 0 {
            plan.steps.push(delete(orphan));
            continue;
        }
        room -= 1;
        adopted += 1;
        let mut owners: Vec<Value> = orphan.owner_references().iter().map(|o| json!(o)).collect();
        owners.push(owner_reference(&observed.pool));
        plan.steps.push(Action::Adopt {
            name: orphan.name_any(),
            patch: json!({"metadata": {
                "uid": orphan.uid(),
                "resourceVersion": orphan.resource_version(),
                "ownerReferences": owners,
            }}),
        });
    }
    adopted
}

/// The version that was seen makes the apiserver refuse when a claim has taken the member meanwhile.
fn delete(member: &Sandbox) -> Action {
    Action::Delete {
        name: member.name_any(),
        uid: member.uid().unwrap_or_default(),
        resource_version: member.resource_version(),
    }
}

/// Whether stale members have to go at once.
fn recreates(pool: &SandboxWarmPool) -> bool {
    let strategy = pool.spec.update_strategy.as_ref();
    strategy.is_some_and(|strategy| strategy.type_ == WarmPoolUpdateStrategyType::Recreate)
}

fn is_ready(member: &Sandbox) -> bool {
    let status = member.status.as_ref();
    status.is_some_and(|status| conditions::is_true(&status.conditions, conditions::READY))
}

fn health(member: &Sandbox, observed: &Observed, now: Timestamp) -> Health {
    if is_ready(member) {
        return Health::Ready;
    }
    if age_unready(member, now) <= observed.settings.readiness_grace {
        return Health::Waiting;
    }
    match unschedulable(member) {
        Some(_) => Health::Unschedulable,
        None => Health::Stuck,
    }
}

/// Since when a member could be ready and is not.
fn age_unready(member: &Sandbox, now: Timestamp) -> Duration {
    let created = member.metadata.creation_timestamp.as_ref().map(|t| t.0);
    let all = member.status.as_ref().map(|status| &status.conditions[..]);
    let ready = conditions::find(all.unwrap_or_default(), conditions::READY);
    let since = created
        .into_iter()
        .chain(ready.map(|ready| ready.last_transition_time.0))
        .max();
    since
        .and_then(|since| Duration::try_from(now.duration_since(since)).ok())
        .unwrap_or_default()
}

/// Why no node has room for a member.
fn unschedulable(member: &Sandbox) -> Option<String> {
    let all = member.status.as_ref().map(|status| &status.conditions[..]);
    conditions::find(all.unwrap_or_default(), conditions::POD_SCHEDULED)
        .filter(|scheduled| scheduled.status == "False" && scheduled.reason == "Unschedulable")
        .map(|scheduled| scheduled.message.clone())
}

/// The members to give up first: what is not ready, then the newest.
fn worst(mut members: Vec<&Arc<Sandbox>>, count: usize) -> Vec<&Arc<Sandbox>> {
    if count == 0 {
        return Vec::new();
    }
    members.sort_by_cached_key(|member| {
        let created = member.metadata.creation_timestamp.as_ref().map(|t| t.0);
        (
            is_ready(member),
            std::cmp::Reverse((created, member.name_any())),
        )
    });
    members.truncate(count);
    members
}

fn plan_creates(plan: &mut Plan, observed: &Observed, remembered: &Remembered) {
    if observed.template.is_none() {
        plan.requeue = (plan.missing > 0).then_some(TEMPLATE_RETRY);
        return;
    }
    // Their answers are missing: the same name again makes the same object.
    plan.create = remembered.uncertain.iter().cloned().collect();
    if plan.missing == 0 {
        return;
    }
    if observed.pressed {
        plan.requeue = Some(PRESSED_RETRY);
        return;
    }
    if remembered.hold.is_some() {
        plan.requeue = remembered.hold;
        return;
    }
    let most = observed.settings.max_batch.min(plan.missing);
    let now = remembered.allowance.unwrap_or(most).min(most);
    if now < plan.missing {
        plan.requeue = remembered.next_token.or(Some(Duration::from_millis(1)));
    }
    let pool = observed.pool.name_any();
    let names = (0..now).map(|number| member::name(&pool, remembered.salt, number));
    plan.create.extend(names);
}

/// When a member's time is over, or a node may have room for one.
fn plan_next_look(plan: &mut Plan, keep: &[&Arc<Sandbox>], observed: &Observed, now: Timestamp) {
    let settings = &observed.settings;
    let mut held = 0_usize;
    let mut why = None;
    let mut looks = Vec::new();
    for member in keep {
        match health(member, observed, now) {
            Health::Waiting => {
                let left = settings
                    .readiness_grace
                    .saturating_sub(age_unready(member, now));
                looks.push(jittered(left + SLACK, observed.remembered.salt));
            }
            Health::Unschedulable => {
                held += 1;
                why = why.or_else(|| unschedulable(member));
                looks.push(settings.unschedulable_recheck);
            }
            Health::Ready | Health::Stuck => {}
        }
    }
    if let Some(why) = why {
        let wanted = replicas(&observed.pool);
        // The remedy comes before the scheduler's words: those may be longer than an Event.
        plan.stalled = Some(format!(
            "{held} of {wanted} members are not scheduled after {:?} and are kept waiting. Add nodes that have room for them, or lower spec.replicas. The scheduler says: {why}",
            settings.readiness_grace
        ));
    }
    plan.requeue = plan.requeue.into_iter().chain(looks).min();
}

/// Up to half as long again, so that many pools do not all look at once.
fn jittered(wait: Duration, salt: u64) -> Duration {
    let half = u64::try_from(wait.as_millis() / 2)
        .unwrap_or(u64::MAX)
        .max(1);
    wait + Duration::from_millis(salt % half)
}

/// The pool's status.
pub fn status(observed: &Observed) -> SandboxWarmPoolStatus {
    let pool = &observed.pool;
    let active: Vec<&Arc<Sandbox>> = active(observed).collect();
    let count = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    SandboxWarmPoolStatus {
        observed_generation: pool.metadata.generation,
        replicas: Some(count(active.len() + unseen(observed).len())),
        ready_replicas: Some(count(active.iter().filter(|m| is_ready(m)).count())),
        selector: format!(
            "{}={}",
            labels::WARM_POOL_SANDBOX,
            name_hash(&pool.name_any())
        ),
    }
}

/// Whether the pool has what it is asked for.
pub fn is_settled(observed: &Observed) -> bool {
    let status = status(observed);
    let wanted = i32::try_from(replicas(&observed.pool)).ok();
    status.replicas == wanted && status.ready_replicas == wanted
}

#[cfg(test)]
mod tests;

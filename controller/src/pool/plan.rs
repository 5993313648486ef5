//! No client required. Decides which members a pool makes, keeps and deletes: pure, total, deterministic.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{
    api::networking::v1::NetworkPolicy, apimachinery::pkg::apis::meta::v1::Condition,
};
use kube::ResourceExt;
use serde_json::{Value, json};
use torpor_api::{
    Sandbox, SandboxTemplate, SandboxWarmPool, conditions, extensions::WarmPoolUpdateStrategyType,
    reasons::sandbox as reasons,
};

use super::{
    member::{self, owner_reference},
    memory::Remembered,
};
use crate::{
    blueprint::Blueprint,
    network::Cidr,
    pace::Advance,
    sandbox::plan::is_name_taken,
    settings::PoolSettings,
    template::plan::{Unisolated, isolation},
};

/// How long a pool without a template waits for it, unless it comes.
pub const TEMPLATE_RETRY: Duration = Duration::from_secs(60);
/// How long a pool waits for its template's NetworkPolicy before it looks by itself, and before its user is told. The policy's own event comes sooner.
pub const POLICY_GRACE: Duration = Duration::from_secs(15);
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
    /// Whatever has the name of the template's NetworkPolicy.
    pub template_policy: Option<Arc<NetworkPolicy>>,
    /// Ranges that the operator blocks beside the private addresses.
    pub except: Vec<Cidr>,
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
    /// UIDs of the members that are kept though they had their time.
    pub held: BTreeSet<String>,
    /// Why the pool does not progress.
    pub stalled: Option<String>,
    /// Members are lacking, and none is made before the template's NetworkPolicy is in place.
    pub unisolated: bool,
    /// The pool has all members, and each of them a Pod on a node.
    pub placed: bool,
    pub requeue: Option<Duration>,
}

/// How a member is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health<'a> {
    Ready,
    /// Not ready, and it may still become so.
    Waiting,
    /// No node has room for it, as the scheduler says. Another in its place would find none either.
    Unschedulable(&'a str),
    /// Its Pod has scheduling gates, as the apiserver says. A queue that sets them would put the
    /// Pod of a new member behind all others.
    Gated(&'a str),
    /// Its Pod is refused, in these words. That of another in its place would be, too.
    Refused(&'a str),
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
        let health = health(member, observed, now);
        // Without a template nothing is known to have changed.
        let outdated = blueprint.as_ref().is_some_and(|blueprint| match health {
            // Any change may be the one that its Pod waits for.
            Health::Refused(_) => !blueprint.would_make(member),
            _ => recreates(pool) && blueprint.is_stale(member),
        });
        if outdated || health == Health::Stuck {
            plan.steps.push(delete(member));
        } else {
            keep.push(*member);
        }
    }
    let wanted = replicas(pool);
    let excess = (keep.len() + adopted + unseen.len()).saturating_sub(wanted);
    let going = worst(keep.clone(), excess);
    plan.steps.extend(going.iter().map(|member| delete(member)));
    // What goes is no longer waited for.
    let going: BTreeSet<Option<String>> = going.iter().map(|member| member.uid()).collect();
    keep.retain(|member| !going.contains(&member.uid()));
    plan.steps.truncate(observed.settings.max_batch);
    // What is being deleted still counts: a pool has never more than it is asked for, not even for a moment.
    let there = observed.members.len() + adopted + unseen.len();
    plan.missing = wanted.saturating_sub(there);
    plan_creates(&mut plan, observed, remembered);
    plan_next_look(&mut plan, &keep, observed, now);
    plan.placed = keep.len() >= wanted && keep.iter().all(|member| is_placed(member));
    plan
}

/// How many members the pool is asked for.
pub fn replicas(pool: &SandboxWarmPool) -> usize {
    usize::try_from(pool.spec.replicas.unwrap_or(1)).unwrap_or_default()
}

/// Members that are not on their way out.
pub(super) fn active(observed: &Observed) -> impl Iterator<Item = &Arc<Sandbox>> {
    observed.members.iter().filter(|member| {
        let deleted = &observed.remembered.deleting;
        member.metadata.deletion_timestamp.is_none()
            && !member.uid().is_some_and(|uid| deleted.contains(&uid))
    })
}

/// Members that were asked for and that the watch has not shown yet.
pub(super) fn unseen(observed: &Observed) -> BTreeSet<String> {
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
        if blueprint.is_stale_orphan(orphan) || room == 0 {
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

pub(super) fn is_ready(member: &Sandbox) -> bool {
    is_true(member, conditions::READY)
}

/// Whether a member waits neither for a Pod nor for a node.
fn is_placed(member: &Sandbox) -> bool {
    is_ready(member) || is_true(member, conditions::POD_SCHEDULED)
}

fn is_true(member: &Sandbox, type_: &str) -> bool {
    let status = member.status.as_ref();
    status.is_some_and(|status| conditions::is_true(&status.conditions, type_))
}

fn health<'a>(member: &'a Sandbox, observed: &Observed, now: Timestamp) -> Health<'a> {
    if is_ready(member) {
        return Health::Ready;
    }
    let grace = observed.settings.readiness_grace;
    if age_unready(member, now) <= grace {
        return Health::Waiting;
    }
    let held = unscheduled(member, "Unschedulable")
        .map(Health::Unschedulable)
        .or_else(|| unscheduled(member, "SchedulingGated").map(Health::Gated))
        .or_else(|| refused(member).map(Health::Refused));
    held.unwrap_or_else(|| {
        if time_had(member, observed, now) <= grace {
            Health::Waiting
        } else {
            Health::Stuck
        }
    })
}

/// How much of its time a member has had. One that was held begins anew: its Pod is just being made, or has yet to find a node.
fn time_had(member: &Sandbox, observed: &Observed, now: Timestamp) -> Duration {
    let uid = member.uid().unwrap_or_default();
    let held = observed.remembered.held.get(&uid);
    let age = age_unready(member, now);
    held.map_or(age, |ago| age.min(*ago))
}

/// Since when a member could be ready and is not: at the earliest since it has a node. What it waited for before is not held against it, also by a controller that did not see it wait.
fn age_unready(member: &Sandbox, now: Timestamp) -> Duration {
    let created = member.metadata.creation_timestamp.as_ref().map(|t| t.0);
    let ready = condition(member, conditions::READY);
    // Why it has no node may change for ever, and begins nothing anew.
    let scheduled =
        condition(member, conditions::POD_SCHEDULED).filter(|scheduled| scheduled.status == "True");
    let changed = ready.into_iter().chain(scheduled);
    let since = created
        .into_iter()
        .chain(changed.map(|condition| condition.last_transition_time.0))
        .max();
    since
        .and_then(|since| Duration::try_from(now.duration_since(since)).ok())
        .unwrap_or_default()
}

fn condition<'a>(member: &'a Sandbox, type_: &str) -> Option<&'a Condition> {
    conditions::find(&member.status.as_ref()?.conditions, type_)
}

/// Why a member has no node, if it has none for this reason.
fn unscheduled<'a>(member: &'a Sandbox, reason: &str) -> Option<&'a str> {
    condition(member, conditions::POD_SCHEDULED)
        .filter(|scheduled| scheduled.status == "False" && scheduled.reason == reason)
        .map(|scheduled| scheduled.message.as_str())
}

/// Why a member's Pod cannot be made: a quota, a limit, a policy, a template that is no Pod. Somebody else's Pod of the same name is no such reason: the next member has another one.
fn refused(member: &Sandbox) -> Option<&str> {
    let ready = condition(member, conditions::READY)?;
    // What is known of a Pod's scheduling is known of a Pod that is there.
    let scheduled = condition(member, conditions::POD_SCHEDULED);
    let has_pod = scheduled.is_some_and(|scheduled| scheduled.status != "Unknown");
    let why = ready.message.as_str();
    let is_refusal = [reasons::RECONCILER_ERROR, reasons::INVALID_CONFIGURATION];
    let holds = is_refusal.contains(&&*ready.reason) && !has_pod && !is_name_taken(why);
    holds.then_some(why)
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
    let Some(template) = observed.template.as_deref() else {
        miss_template(plan, &observed.pool);
        return;
    };
    if plan.missing > 0 || !remembered.uncertain.is_empty() {
        let policy = observed.template_policy.as_deref();
        if let Err(why) = isolation(template, policy, &observed.except) {
            wait_for_policy(plan, &why, remembered);
            return;
        }
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

/// Without its template a pool keeps what it has and makes nothing, which its user is told at once
/// (upstream's #1572). A pool of none needs no template.
fn miss_template(plan: &mut Plan, pool: &SandboxWarmPool) {
    if replicas(pool) == 0 {
        return;
    }
    plan.requeue = Some(TEMPLATE_RETRY);
    let template = &pool.spec.sandbox_template_ref.name;
    plan.stalled = Some(format!(
        "SandboxTemplate {template:?} not found: no member is made. Make one of that name in this namespace, or name another in spec.sandboxTemplateRef"
    ));
}

/// Nothing is made without the template's rules. The controller makes or changes the policy in a moment: the user is told only when that lasts.
fn wait_for_policy(plan: &mut Plan, why: &Unisolated, remembered: &Remembered) {
    plan.unisolated = true;
    plan.requeue = Some(POLICY_GRACE);
    if !why.is_passing() || remembered.unisolated >= POLICY_GRACE {
        plan.stalled = Some(format!("No member is made: {why}"));
    }
}

/// When a member's time is over, or one that is held may come on.
fn plan_next_look(plan: &mut Plan, keep: &[&Arc<Sandbox>], observed: &Observed, now: Timestamp) {
    let settings = &observed.settings;
    let mut waiting = Waiting::default();
    let mut looks = Vec::new();
    for member in keep {
        match health(member, observed, now) {
            Health::Waiting => {
                let had = time_had(member, observed, now);
                let left = settings.readiness_grace.saturating_sub(had);
                looks.push(jittered(left + SLACK, observed.remembered.salt));
                continue;
            }
            Health::Unschedulable(why) => waiting.unscheduled.push(why),
            Health::Gated(why) => waiting.gated.push(why),
            Health::Refused(why) => waiting.refused.push(why),
            Health::Ready | Health::Stuck => continue,
        }
        plan.held.extend(member.uid());
    }
    if let Some(held) = stalled(&waiting, observed) {
        looks.push(settings.unschedulable_recheck);
        plan.stalled = Some(match plan.stalled.take() {
            Some(first) => format!("{first}\n{held}"),
            None => held,
        });
    }
    plan.requeue = plan.requeue.into_iter().chain(looks).min();
}

/// Members that are kept though they had their time, by what they wait for: the words of each.
#[derive(Debug, Default)]
struct Waiting<'a> {
    unscheduled: Vec<&'a str>,
    gated: Vec<&'a str>,
    refused: Vec<&'a str>,
}

/// Why the pool does not come on. The remedy comes before the words of others: those may be longer
/// than an Event. Without counts, so that one more member changes no words.
fn stalled(waiting: &Waiting<'_>, observed: &Observed) -> Option<String> {
    let Waiting {
        unscheduled,
        gated,
        refused,
    } = waiting;
    let grace = observed.settings.readiness_grace;
    let no_pod = refused.first().map(|why| {
        format!(
            "Members have no Pod after {grace:?} and are kept waiting: it is refused. Change what refuses it (a quota, a limit, a policy) or the template, or lower spec.replicas. {why}"
        )
    });
    let no_node = unscheduled.first().map(|why| {
        format!(
            "Members are not scheduled after {grace:?} and are kept waiting. Add nodes that have room for them, or lower spec.replicas. The scheduler says: {why}"
        )
    });
    let not_let = gated.first().map(|why| {
        format!(
            "Members are held by scheduling gates after {grace:?} and are kept waiting. Whoever set the gates lets them go, as a queue does once its quota has room; or lower spec.replicas. Their condition says: {why}"
        )
    });
    let all = [no_pod, no_node, not_let].into_iter().flatten();
    all.reduce(|one, other| format!("{one}\n{other}"))
}

/// Up to half as long again, so that many pools do not all look at once.
fn jittered(wait: Duration, salt: u64) -> Duration {
    let half = u64::try_from(wait.as_millis() / 2)
        .unwrap_or(u64::MAX)
        .max(1);
    wait + Duration::from_millis(salt % half)
}

#[cfg(test)]
mod tests;

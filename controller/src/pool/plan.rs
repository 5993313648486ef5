//! No client required. Plans which members a pool creates, keeps and deletes: pure, total,
//! deterministic.

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
    heat::{self, Demand},
    member,
    memory::Remembered,
};
use crate::{
    blueprint::Blueprint,
    golden::{Golden, plan::LIMIT as GOLDEN_LIMIT},
    network::Cidr,
    owners::owner_reference,
    pace::Advance,
    sandbox::plan::is_name_taken,
    settings::PoolSettings,
    template::plan::{Unisolated, isolation},
};

/// Delay until the next pass over a pool without a template, unless the template is created.
pub const TEMPLATE_RETRY: Duration = Duration::from_secs(60);
/// Time that a pool waits for its template's NetworkPolicy before it checks by itself, and before
/// its user is notified. The policy's own event comes sooner.
pub const POLICY_GRACE: Duration = Duration::from_secs(15);
/// Delay before the next call of a pool to an overloaded apiserver.
pub const PRESSED_RETRY: Duration = Duration::from_secs(1);
/// Delay until the next pass over a pool that has yielded to others; the pass comes after all that
/// wait by then.
pub const NEXT_TURN: Duration = Duration::from_millis(1);
/// Delay of a check after a deadline, so that the deadline has passed on every clock.
const SLACK: Duration = Duration::from_secs(2);

/// Input of the plan for one pool.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    pub pool: Arc<SandboxWarmPool>,
    pub template: Option<Arc<SandboxTemplate>>,
    /// NetworkPolicy with the name of the template's own, whatever controls it.
    pub template_policy: Option<Arc<NetworkPolicy>>,
    /// Ranges that the operator blocks in addition to the private addresses.
    pub except: Vec<Cidr>,
    /// Sandboxes that the pool controls.
    pub members: Vec<Arc<Sandbox>>,
    /// Sandboxes with the pool's label and without a controller.
    pub orphans: Vec<Arc<Sandbox>>,
    pub remembered: Remembered,
    /// True if the apiserver is overloaded.
    pub pressed: bool,
    /// Urgency of new members.
    pub advance: Advance,
    /// Members that claims took lately.
    pub demand: Demand,
    /// Golden images of the template.
    pub golden: Golden,
    pub settings: PoolSettings,
}

/// Step of a plan: one call.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    Adopt {
        name: String,
        patch: Value,
    },
    /// Wakes a member, or puts it to sleep.
    Heat {
        name: String,
        patch: Value,
    },
    Delete {
        name: String,
        uid: String,
        resource_version: Option<String>,
    },
}

/// Member to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Creation {
    pub name: String,
    /// It sleeps until a claim takes it.
    pub asleep: bool,
}

/// Steps for the pool, and the facts for its status.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Steps executed concurrently, before any member is created.
    pub steps: Vec<Action>,
    /// Members to create, in order; creates without an answer come first.
    pub create: Vec<Creation>,
    /// Number of missing members, whether they are created now or later.
    pub missing: usize,
    /// UIDs of the members that are kept after their grace period.
    pub held: BTreeSet<String>,
    /// Reason why the pool makes no progress.
    pub stalled: Option<String>,
    /// True if members are missing and none is created before the template's NetworkPolicy is in
    /// place.
    pub unisolated: bool,
    /// True while the template has no golden image yet.
    pub awaits_golden: bool,
    /// True if the pool has all members, each with a Pod on a node.
    pub placed: bool,
    pub requeue: Option<Duration>,
}

/// State of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health<'a> {
    Ready,
    /// Not ready yet, within the grace period.
    Waiting,
    /// No node has room for the member; holds the scheduler's message. A replacement would find no
    /// node either.
    Unschedulable(&'a str),
    /// The member's Pod has scheduling gates; holds the apiserver's message. A queue that sets them
    /// would put the Pod of a replacement behind all others.
    Gated(&'a str),
    /// The member's Pod is refused, with this message. The Pod of a replacement would be refused,
    /// too.
    Refused(&'a str),
    /// The grace period is over.
    Stuck,
}

/// Reports whether a pass ends here, to continue on the pool's next turn. `worked` is the time that
/// it has taken.
pub fn yields(others_wait: bool, worked: Duration, settings: &PoolSettings) -> bool {
    others_wait && worked >= settings.turn
}

/// Plans the steps for one pool.
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
        // Without a template no change is known.
        let outdated = blueprint.as_ref().is_some_and(|blueprint| match health {
            // Any change may be the one that the Pod waits for.
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
    // Members being deleted are no longer waited for.
    let going: BTreeSet<Option<String>> = going.iter().map(|member| member.uid()).collect();
    keep.retain(|member| !going.contains(&member.uid()));
    plan.steps.truncate(observed.settings.max_batch);
    // Members being deleted still count: a pool never has more members than requested, not even for
    // a moment.
    let there = observed.members.len() + adopted + unseen.len();
    plan.missing = wanted.saturating_sub(there);
    await_golden(&mut plan, observed, there);
    let awake = keep.iter().filter(|member| !heat::is_asleep(member));
    let awake = awake.count() + adopted + unseen.len();
    plan_creates(&mut plan, observed, remembered, awake);
    heat::plan(&mut plan, observed, &keep);
    plan_next_pass(&mut plan, &keep, observed, now);
    plan.placed = keep.len() >= wanted && keep.iter().all(|member| is_placed(member));
    plan
}

/// Returns the number of requested members.
pub fn replicas(pool: &SandboxWarmPool) -> usize {
    usize::try_from(pool.spec.replicas.unwrap_or(1)).unwrap_or_default()
}

/// Returns the members that are not being deleted.
pub(super) fn active(observed: &Observed) -> impl Iterator<Item = &Arc<Sandbox>> {
    observed.members.iter().filter(|member| {
        let deleted = &observed.remembered.deleting;
        member.metadata.deletion_timestamp.is_none()
            && !member.uid().is_some_and(|uid| deleted.contains(&uid))
    })
}

/// Returns the names of requested members that the watch has not shown yet.
pub(super) fn unseen(observed: &Observed) -> BTreeSet<String> {
    let mut names = observed.remembered.creating.clone();
    for member in &observed.members {
        names.remove(&member.name_any());
    }
    names
}

/// Plans for orphans: those that match the template return to the pool, the others are deleted.
/// Returns the number that return.
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
        let mut owners = orphan.owner_references().to_vec();
        owners.push(owner_reference(&*observed.pool));
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

/// Returns the deletion of a member in the version that was read: the apiserver refuses it if a
/// claim has taken the member meanwhile.
fn delete(member: &Sandbox) -> Action {
    Action::Delete {
        name: member.name_any(),
        uid: member.uid().unwrap_or_default(),
        resource_version: member.resource_version(),
    }
}

/// Reports whether stale members are replaced at once.
fn recreates(pool: &SandboxWarmPool) -> bool {
    let strategy = pool.spec.update_strategy.as_ref();
    strategy.is_some_and(|strategy| strategy.type_ == WarmPoolUpdateStrategyType::Recreate)
}

pub(super) fn is_ready(member: &Sandbox) -> bool {
    is_true(member, conditions::READY)
}

/// Reports whether a member waits neither for a Pod nor for a node.
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

/// Returns how much of its grace period a member has used. The period of a held member starts anew:
/// its Pod is just being created, or has yet to find a node.
fn time_had(member: &Sandbox, observed: &Observed, now: Timestamp) -> Duration {
    let uid = member.uid().unwrap_or_default();
    let held = observed.remembered.held.get(&uid);
    let age = age_unready(member, now);
    held.map_or(age, |ago| age.min(*ago))
}

/// Returns the time for which a member could be ready and is not, at most since it has a node.
/// Earlier waits do not count, even for a controller that did not see them.
fn age_unready(member: &Sandbox, now: Timestamp) -> Duration {
    let created = member.metadata.creation_timestamp.as_ref().map(|t| t.0);
    let ready = condition(member, conditions::READY);
    // The reason for the missing node may change often, and restarts nothing.
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

/// Returns the message about the missing node of a member, if the reason is this one.
fn unscheduled<'a>(member: &'a Sandbox, reason: &str) -> Option<&'a str> {
    condition(member, conditions::POD_SCHEDULED)
        .filter(|scheduled| scheduled.status == "False" && scheduled.reason == reason)
        .map(|scheduled| scheduled.message.as_str())
}

/// Returns the reason why a member's Pod cannot be created: a quota, a limit, a policy, an invalid
/// template. A foreign Pod with the same name does not count: a replacement has another name.
fn refused(member: &Sandbox) -> Option<&str> {
    let ready = condition(member, conditions::READY)?;
    // A known scheduling state proves that the Pod exists.
    let scheduled = condition(member, conditions::POD_SCHEDULED);
    let has_pod = scheduled.is_some_and(|scheduled| scheduled.status != "Unknown");
    let why = ready.message.as_str();
    let is_refusal = [reasons::RECONCILER_ERROR, reasons::INVALID_CONFIGURATION];
    let holds = is_refusal.contains(&&*ready.reason) && !has_pod && !is_name_taken(why);
    holds.then_some(why)
}

/// Returns the members to delete first: those that are not ready, then the newest.
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

/// Limits the members of a pool whose template has no golden image yet to those that are to run.
/// The others would start cold, each with the whole cost of that.
fn await_golden(plan: &mut Plan, observed: &Observed, there: usize) {
    let Golden::Preparing(golden) = &observed.golden else {
        return;
    };
    // The wait counts whether members are missing or not, and is over once for all.
    plan.awaits_golden = true;
    let now = plan.missing.min(heat::hot(observed).saturating_sub(there));
    if now == plan.missing {
        return;
    }
    let left = GOLDEN_LIMIT.saturating_sub(observed.remembered.awaits_golden);
    if left.is_zero() {
        plan.stalled = Some(format!(
            "There is no golden image after {} minutes, and members start cold: see the Events of the SandboxTemplate and Sandbox {golden:?}",
            GOLDEN_LIMIT.as_secs() / 60
        ));
        return;
    }
    plan.missing = now;
    plan.requeue = Some(left);
}

/// `awake`: members that run, or may.
fn plan_creates(plan: &mut Plan, observed: &Observed, remembered: &Remembered, awake: usize) {
    let Some(template) = observed.template.as_deref() else {
        wait_for_template(plan, &observed.pool);
        return;
    };
    if plan.missing > 0 || !remembered.uncertain.is_empty() {
        let policy = observed.template_policy.as_deref();
        if let Err(why) = isolation(template, policy, &observed.except) {
            wait_for_policy(plan, &why, remembered);
            return;
        }
    }
    // Creates without an answer: the same name again creates the same object.
    let asleep = heat::hot(observed) == 0;
    let again = remembered.uncertain.iter().cloned();
    plan.create = again.map(|name| Creation { name, asleep }).collect();
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
    if let Some(pause) = pause(observed) {
        plan.requeue = Some(pause);
        return;
    }
    let most = observed.settings.max_batch.min(plan.missing);
    let now = remembered.allowance.unwrap_or(most).min(most);
    if now < plan.missing {
        plan.requeue = remembered.next_token.or(Some(Duration::from_millis(1)));
    }
    let pool = observed.pool.name_any();
    let asleep = heat::begins_asleep(observed, awake, now);
    let new = asleep.into_iter().enumerate().map(|(number, asleep)| {
        let name = member::name(&pool, remembered.salt, number);
        Creation { name, asleep }
    });
    plan.create.extend(new);
}

/// Returns the time for which the pool leaves the node to a member that wakes for a claim. A pool
/// that runs low does not wait.
pub(super) fn pause(observed: &Observed) -> Option<Duration> {
    let waits = observed.advance == Advance::Calm;
    observed.remembered.pause.filter(|_| waits)
}

/// Plans for a pool without its template: it keeps its members and creates none, and its user is
/// notified at once (upstream's #1572). A pool with 0 replicas needs no template.
fn wait_for_template(plan: &mut Plan, pool: &SandboxWarmPool) {
    if replicas(pool) == 0 {
        return;
    }
    plan.requeue = Some(TEMPLATE_RETRY);
    let template = &pool.spec.sandbox_template_ref.name;
    plan.stalled = Some(format!(
        "SandboxTemplate {template:?} not found: no member is created. Create a template with that name in this namespace, or name another in spec.sandboxTemplateRef"
    ));
}

/// Plans for a pool whose template's rules are not in place: it creates no member. The controller
/// usually writes the policy in a moment; the user is notified only when it takes longer.
fn wait_for_policy(plan: &mut Plan, why: &Unisolated, remembered: &Remembered) {
    plan.unisolated = true;
    plan.requeue = Some(POLICY_GRACE);
    if !why.is_passing() || remembered.unisolated >= POLICY_GRACE {
        plan.stalled = Some(format!("No member is created: {why}"));
    }
}

/// Plans the next pass: when a member's grace period ends, or a held member may make progress.
fn plan_next_pass(plan: &mut Plan, keep: &[&Arc<Sandbox>], observed: &Observed, now: Timestamp) {
    let settings = &observed.settings;
    let mut waiting = Waiting::default();
    let mut checks = Vec::new();
    for member in keep {
        match health(member, observed, now) {
            Health::Waiting => {
                let had = time_had(member, observed, now);
                let left = settings.readiness_grace.saturating_sub(had);
                checks.push(jittered(left + SLACK, observed.remembered.salt));
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
        checks.push(settings.unschedulable_recheck);
        plan.stalled = Some(match plan.stalled.take() {
            Some(first) => format!("{first}\n{held}"),
            None => held,
        });
    }
    plan.requeue = plan.requeue.into_iter().chain(checks).min();
}

/// Messages about members kept after their grace period, by the cause of the wait.
#[derive(Debug, Default)]
struct Waiting<'a> {
    unscheduled: Vec<&'a str>,
    gated: Vec<&'a str>,
    refused: Vec<&'a str>,
}

/// Returns the reason why the pool makes no progress. The remedy comes before messages of others,
/// which may be longer than an Event. The text has no counts, so that one more member does not
/// change it.
fn stalled(waiting: &Waiting<'_>, observed: &Observed) -> Option<String> {
    let Waiting {
        unscheduled,
        gated,
        refused,
    } = waiting;
    let grace = observed.settings.readiness_grace;
    let no_pod = refused.first().map(|why| {
        format!(
            "Members have no Pod after {grace:?} and are kept waiting: the apiserver refuses it. Change the cause (a quota, a limit, a policy) or the template, or lower spec.replicas. {why}"
        )
    });
    let no_node = unscheduled.first().map(|why| {
        format!(
            "Members are not scheduled after {grace:?} and are kept waiting. Add nodes that have room for them, or lower spec.replicas. The scheduler says: {why}"
        )
    });
    let not_let = gated.first().map(|why| {
        format!(
            "Members are held by scheduling gates after {grace:?} and are kept waiting. The controller that set the gates removes them, as a queue does once its quota has room; or lower spec.replicas. The condition of the members says: {why}"
        )
    });
    let all = [no_pod, no_node, not_let].into_iter().flatten();
    all.reduce(|one, other| format!("{one}\n{other}"))
}

/// Adds up to half of the wait, so that many pools do not check at the same time.
fn jittered(wait: Duration, salt: u64) -> Duration {
    let half = u64::try_from(wait.as_millis() / 2)
        .unwrap_or(u64::MAX)
        .max(1);
    wait + Duration::from_millis(salt % half)
}

#[cfg(test)]
mod tests;

//! Plans for memory of a Pod that is gone and that no SandboxSnapshot holds yet.
//!
//! If no controller runs while a Pod ends, no SandboxSnapshot of its image is created. The record
//! of the Sandbox's last Pod names the node. The controller creates a snapshot for an image that
//! the SandboxNode of that node lists. It gives up memory that is not listed once the node has
//! reported later than the Pod was known to be gone.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use torpor_api::{
    PodRecord, SandboxSnapshot,
    annotations::{OnRestoreFailure, SuspensionStrategy},
    conditions,
    reasons::{hibernated, restored, snapshot as snapshot_reasons},
};

use super::{
    super::{AT_ONCE, Action, Area, ConditionChange, Plan},
    condition_false, evicted, hibernated_saving, is_incomplete,
    location::{
        GIVEN_UP_AFTER, LOOK_FOR_NODE, LOOK_SOON, LostNode, cold_start, failed_restore, lost_node,
    },
    origin::pod_node,
    own_snapshots, previous_condition, snapshot_of_pod,
    suspend::make_snapshot_of,
};
use crate::{
    sandbox::{dereference::Observed, validate::Desired},
    saved_pod,
};

/// Least time between a question and a report that answers it. The two times come from two clocks,
/// in whole seconds.
const LATER: SignedDuration = SignedDuration::from_secs(10);

/// State of the memory that the last Pod left.
#[derive(Debug)]
pub(super) enum LeftMemory {
    /// There is no sign of memory.
    Nothing,
    /// There may be memory, so no Pod is created yet; with the condition Hibernated.
    Awaited(ConditionChange),
    /// There was memory that cannot be recovered; with the reason.
    GivenUp(String),
}

/// Pod whose memory is looked for.
struct Sought<'a> {
    uid: &'a str,
    node: &'a str,
    record: Option<&'a PodRecord>,
    /// Snapshot for the memory, not committed yet.
    snapshot: Option<&'a Arc<SandboxSnapshot>>,
}

impl Sought<'_> {
    /// Returns a description of the Pod for messages.
    fn pod(&self) -> String {
        match self.record {
            Some(record) => format!("Pod {:?} (UID {})", record.name, self.uid),
            None => format!("the Pod with UID {}", self.uid),
        }
    }
}

/// Looks for memory of the Sandbox's last Pod. Call it only if there is neither a Pod nor an image
/// to continue from.
pub(super) fn settle(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    now: Timestamp,
) -> LeftMemory {
    if desired.settings.strategy() != SuspensionStrategy::Hibernate {
        return LeftMemory::Nothing;
    }
    let record = saved_pod::last_pod(desired.sandbox);
    let Some(sought) = sought(desired, observed, record.as_ref()) else {
        return LeftMemory::Nothing;
    };
    let listed = is_listed(observed, &sought);
    if !listed && !may_have_slept(desired) {
        return LeftMemory::Nothing;
    }
    if let Some(why) = sought.snapshot.and_then(|one| denial(one, sought.node)) {
        return LeftMemory::GivenUp(given_up(&sought, &why));
    }
    if sought.snapshot.is_none()
        && listed
        && let Some(record) = sought.record
    {
        let message = format!(
            "{} is gone; its image on node {:?} is about to be kept",
            sought.pod(),
            sought.node
        );
        if let Some(why) = await_answer(plan, desired, &sought, now, None) {
            return LeftMemory::GivenUp(given_up(&sought, &why));
        }
        let change = make_snapshot_of(plan, desired, observed, record, &message);
        return LeftMemory::Awaited(change);
    }
    let lost = lost_node(observed, sought.node, now);
    if is_answered(desired, observed, &sought, lost) {
        let why = format!("node {:?} has no image of it", sought.node);
        return LeftMemory::GivenUp(given_up(&sought, &why));
    }
    if let Some(why) = await_answer(plan, desired, &sought, now, lost) {
        return LeftMemory::GivenUp(given_up(&sought, &why));
    }
    LeftMemory::Awaited(match sought.snapshot {
        Some(snapshot) => hibernated_saving(format!(
            "{} is gone; its image on node {:?} is being kept in SandboxSnapshot {:?}{}",
            sought.pod(),
            sought.node,
            snapshot.name_any(),
            agent_report(snapshot)
        )),
        None => ConditionChange::Keep,
    })
}

/// Returns the agent's report about the snapshot, as the end of a sentence.
fn agent_report(snapshot: &SandboxSnapshot) -> String {
    conditions::find(snapshot.conditions(), conditions::COMMITTED)
        .filter(|condition| condition.status == "False")
        .map(|condition| {
            format!(
                "; its agent reports {}: {}",
                condition.reason, condition.message
            )
        })
        .unwrap_or_default()
}

fn given_up(sought: &Sought<'_>, why: &str) -> String {
    format!("The memory of {} is given up: {why}", sought.pod())
}

fn sought<'a>(
    desired: &'a Desired<'_>,
    observed: &'a Observed,
    record: Option<&'a PodRecord>,
) -> Option<Sought<'a>> {
    if let Some(record) = record {
        let snapshot = snapshot_of_pod(desired, observed, &record.uid);
        // Any other snapshot of that Pod shows that its memory was used or deleted.
        let open = snapshot.is_none_or(|snapshot| is_incomplete(snapshot));
        return open.then_some(Sought {
            uid: &record.uid,
            node: &record.node_name,
            record: Some(record),
            snapshot,
        });
    }
    // An older version of the controller recorded no Pod.
    let snapshot = own_snapshots(desired, observed).find(|snapshot| is_incomplete(snapshot))?;
    Some(Sought {
        uid: snapshot.spec.pod_uid.as_deref()?,
        node: pod_node(observed, snapshot)?,
        record: None,
        snapshot: Some(snapshot),
    })
}

/// Reports whether the node on which the Pod ran lists an image of it. Lists of other nodes do not
/// count.
fn is_listed(observed: &Observed, sought: &Sought<'_>) -> bool {
    let report = observed
        .nodes
        .get(sought.node)
        .and_then(|node| node.sandbox(sought.uid));
    report.is_some_and(|report| report.image_id.is_some())
}

/// Reports whether the Sandbox's conditions show that it slept, was about to, or hide its state.
fn may_have_slept(desired: &Desired<'_>) -> bool {
    const MAY_SLEEP: [&str; 5] = [
        hibernated::DOZING,
        hibernated::WAKING,
        hibernated::SAVING,
        hibernated::INVALID_ANNOTATION,
        hibernated::SNAPSHOT_CLASS_NOT_SUPPORTED,
    ];
    let condition = previous_condition(desired.sandbox, conditions::HIBERNATED);
    let slept = condition.is_some_and(|condition| {
        condition.status == "True" || MAY_SLEEP.contains(&condition.reason.as_str())
    });
    slept
        || failed_restore(desired)
            .is_some_and(|condition| condition.reason == restored::ASKING_NODE)
}

/// Returns why the agent of the Pod's node will not commit the snapshot, if it has reported that.
fn denial(snapshot: &SandboxSnapshot, node: &str) -> Option<String> {
    let status = snapshot.status.as_ref()?;
    let by_another = status
        .node_name
        .as_ref()
        .is_some_and(|reported| reported != node);
    let condition = conditions::find(&status.conditions, conditions::COMMITTED)?;
    let cannot = condition.reason == snapshot_reasons::RUNTIME_NOT_CAPABLE;
    let denied = (cannot || evicted::is_denied(snapshot)) && !by_another;
    denied.then(|| {
        format!(
            "the agent of node {node:?} reports {}: {}",
            condition.reason, condition.message
        )
    })
}

/// Returns when the node was first asked, at which time the Pod was known to be gone.
fn asked_at(desired: &Desired<'_>) -> Option<Timestamp> {
    let asks = [restored::ASKING_NODE, restored::NODE_UNAVAILABLE];
    let condition =
        failed_restore(desired).filter(|condition| asks.contains(&condition.reason.as_str()))?;
    Some(condition.last_transition_time.0)
}

/// Reports whether the node has reported since it was asked. The condition of a snapshot is its own
/// answer.
fn is_answered(
    desired: &Desired<'_>,
    observed: &Observed,
    sought: &Sought<'_>,
    lost: Option<LostNode>,
) -> bool {
    let reported_at = || {
        let status = observed.nodes.get(sought.node)?.status.as_ref()?;
        // An agent that has just started lists no images yet.
        let is_complete = status.sandboxes_complete != Some(false);
        Some(status.heartbeat_time.as_ref().filter(|_| is_complete)?.0)
    };
    let later =
        |asked| reported_at().is_some_and(|reported_at| reported_at.duration_since(asked) >= LATER);
    sought.snapshot.is_none()
        && lost != Some(LostNode::Gone)
        && asked_at(desired).is_some_and(later)
}

/// Reports in Restored that the node is asked, and schedules the next pass.
///
/// With policy ColdStart a running Sandbox waits for a limited time. When it is over, the function
/// returns the reason.
fn await_answer(
    plan: &mut Plan,
    desired: &Desired<'_>,
    sought: &Sought<'_>,
    now: Timestamp,
    lost: Option<LostNode>,
) -> Option<String> {
    let asked = asked_at(desired);
    if asked.is_none() && failed_restore(desired).is_some() {
        // A condition keeps its time while its status is unchanged. That time would count as the
        // time at which the node was asked.
        plan.memory.restored = ConditionChange::Remove;
        plan.requeue_after(AT_ONCE);
        return None;
    }
    let node = sought.node;
    let why = match lost {
        Some(lost) => format!("node {node:?}, {}, does not answer", lost.clause()),
        None => format!("node {node:?} has not answered yet"),
    };
    let is_bounded =
        desired.settings.restore_policy() == OnRestoreFailure::ColdStart && !desired.suspended;
    let waited = asked.map_or(SignedDuration::ZERO, |asked| now.duration_since(asked));
    if is_bounded && waited >= GIVEN_UP_AFTER {
        return Some(format!(
            "{why}; the controller waited {} s",
            GIVEN_UP_AFTER.as_secs()
        ));
    }
    let (reason, remedy) = match lost {
        _ if is_bounded => (
            lost.map_or(restored::ASKING_NODE, |_| restored::NODE_UNAVAILABLE),
            format!(
                "The controller waits {} s in all for the node; then the Sandbox starts without the memory",
                GIVEN_UP_AFTER.as_secs()
            ),
        ),
        Some(lost) => (restored::NODE_UNAVAILABLE, lost.remedy()),
        None => (
            restored::ASKING_NODE,
            format!("The node reports at least every 30 s; to {}", cold_start()),
        ),
    };
    let message = format!(
        "{} may have left its memory on node {node:?}, which the controller asks for it; {why}. {remedy}",
        sought.pod()
    );
    plan.memory.restored = condition_false(conditions::RESTORED, reason, message);
    plan.requeue_after(if lost.is_some() && !is_bounded {
        LOOK_FOR_NODE
    } else {
        LOOK_SOON
    });
    None
}

/// Removes the record of the last Pod. An image that its node lists later is older than the state
/// that continues now.
pub(super) fn forget(plan: &mut Plan, desired: &Desired<'_>) {
    if saved_pod::last_pod(desired.sandbox).is_some() {
        plan.step(Area::Pod, Action::ForgetLastPod);
    }
}

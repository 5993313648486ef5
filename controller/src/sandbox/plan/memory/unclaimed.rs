//! Memory of a Pod that is gone, which no SandboxSnapshot holds yet.
//!
//! A controller that was away did not see the Pod go, and nobody else makes a SandboxSnapshot of
//! its image. The record of the Sandbox's last Pod names the node to ask: its SandboxNode lists the
//! images that the node holds. An image that is listed gets its snapshot. One that is not is given
//! up once the node has reported later than the Pod was known to be gone.

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
    super::{AT_ONCE, Action, Area, Plan, Shown},
    evicted, is_half_made,
    origin::home,
    own_snapshots, says, says_saving, shown_before, snapshot_of_pod,
    suspend::make_snapshot_of,
    whereabouts::{GIVEN_UP_AFTER, LOOK_FOR_NODE, LOOK_SOON, Lost, cold_start, lost_node, told},
};
use crate::{
    sandbox::{dereference::Observed, validate::Desired},
    saved_pod,
};

/// A report answers a question that is older than it by so much. The two times are of two clocks, and have whole seconds.
const LATER: SignedDuration = SignedDuration::from_secs(10);

/// Memory that the last Pod left.
#[derive(Debug)]
pub(super) enum Left {
    /// Nothing says that there is memory.
    Nothing,
    /// There may be memory: no Pod is made yet. What Hibernated says meanwhile.
    Awaited(Shown),
    /// There was memory, and it cannot be had: why.
    GivenUp(String),
}

/// The Pod whose memory is looked for.
struct Sought<'a> {
    uid: &'a str,
    node: &'a str,
    record: Option<&'a PodRecord>,
    /// The snapshot that is to hold the memory, not committed yet.
    snapshot: Option<&'a Arc<SandboxSnapshot>>,
}

impl Sought<'_> {
    /// The Pod in words.
    fn pod(&self) -> String {
        match self.record {
            Some(record) => format!("Pod {:?} (UID {})", record.name, self.uid),
            None => format!("the Pod with UID {}", self.uid),
        }
    }
}

/// Looks for memory of the Sandbox's last Pod. To be asked only while there is no Pod, nor an image
/// to go on from.
pub(super) fn settle(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    now: Timestamp,
) -> Left {
    if desired.settings.strategy() != SuspensionStrategy::Hibernate {
        return Left::Nothing;
    }
    let record = saved_pod::last_pod(desired.sandbox);
    let Some(sought) = sought(desired, observed, record.as_ref()) else {
        return Left::Nothing;
    };
    let listed = is_listed(observed, &sought);
    if !listed && !may_have_slept(desired) {
        return Left::Nothing;
    }
    if let Some(why) = sought.snapshot.and_then(|one| denial(one, sought.node)) {
        return Left::GivenUp(given_up(&sought, &why));
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
            return Left::GivenUp(given_up(&sought, &why));
        }
        let shown = make_snapshot_of(plan, desired, observed, record, &message);
        return Left::Awaited(shown);
    }
    let lost = lost_node(observed, sought.node, now);
    if is_answered(desired, observed, &sought, lost) {
        let why = format!("node {:?} has no image of it", sought.node);
        return Left::GivenUp(given_up(&sought, &why));
    }
    if let Some(why) = await_answer(plan, desired, &sought, now, lost) {
        return Left::GivenUp(given_up(&sought, &why));
    }
    Left::Awaited(match sought.snapshot {
        Some(snapshot) => says_saving(format!(
            "{} is gone; its image on node {:?} is being kept in SandboxSnapshot {:?}{}",
            sought.pod(),
            sought.node,
            snapshot.name_any(),
            words_of_agent(snapshot)
        )),
        None => Shown::Keep,
    })
}

/// The agent's words about the snapshot, to stand at the end of a sentence.
fn words_of_agent(snapshot: &SandboxSnapshot) -> String {
    conditions::find(snapshot.conditions(), conditions::COMMITTED)
        .filter(|said| said.status == "False")
        .map(|said| format!("; its agent says {}: {}", said.reason, said.message))
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
        // Any other snapshot of that Pod tells what became of its memory: it was used, or somebody
        // deleted it.
        let open = snapshot.is_none_or(|snapshot| is_half_made(snapshot));
        return open.then_some(Sought {
            uid: &record.uid,
            node: &record.node_name,
            record: Some(record),
            snapshot,
        });
    }
    // An older version of the controller recorded no Pod.
    let snapshot = own_snapshots(desired, observed).find(|snapshot| is_half_made(snapshot))?;
    Some(Sought {
        uid: snapshot.spec.pod_uid.as_deref()?,
        node: home(observed, snapshot)?,
        record: None,
        snapshot: Some(snapshot),
    })
}

/// Whether the node on which the Pod ran reports an image of it. What other nodes list counts for
/// nothing.
fn is_listed(observed: &Observed, sought: &Sought<'_>) -> bool {
    let report = observed
        .nodes
        .get(sought.node)
        .and_then(|node| node.sandbox(sought.uid));
    report.is_some_and(|report| report.image_id.is_some())
}

/// Whether the Sandbox says that it slept, was about to, or cannot say.
fn may_have_slept(desired: &Desired<'_>) -> bool {
    const MAY_SLEEP: [&str; 5] = [
        hibernated::DOZING,
        hibernated::WAKING,
        hibernated::SAVING,
        hibernated::INVALID_ANNOTATION,
        hibernated::SNAPSHOT_CLASS_NOT_SUPPORTED,
    ];
    let said = shown_before(desired.sandbox, conditions::HIBERNATED);
    let slept =
        said.is_some_and(|said| said.status == "True" || MAY_SLEEP.contains(&said.reason.as_str()));
    slept || told(desired).is_some_and(|told| told.reason == restored::ASKING_NODE)
}

/// Why the agent of the Pod's node will not commit the snapshot, if it has said so.
fn denial(snapshot: &SandboxSnapshot, node: &str) -> Option<String> {
    let status = snapshot.status.as_ref()?;
    let by_another = status.node_name.as_ref().is_some_and(|told| told != node);
    let said = conditions::find(&status.conditions, conditions::COMMITTED)?;
    let cannot = said.reason == snapshot_reasons::RUNTIME_NOT_CAPABLE;
    let denied = (cannot || evicted::is_denied(snapshot)) && !by_another;
    denied.then(|| {
        format!(
            "the agent of node {node:?} says {}: {}",
            said.reason, said.message
        )
    })
}

/// When the node was first asked, which is when the Pod was known to be gone.
fn asked_at(desired: &Desired<'_>) -> Option<Timestamp> {
    let asks = [restored::ASKING_NODE, restored::NODE_UNAVAILABLE];
    let told = told(desired).filter(|told| asks.contains(&told.reason.as_str()))?;
    Some(told.last_transition_time.0)
}

/// Whether the node has reported since it was asked. A snapshot is answered by its own condition.
fn is_answered(
    desired: &Desired<'_>,
    observed: &Observed,
    sought: &Sought<'_>,
    lost: Option<Lost>,
) -> bool {
    let heard = || {
        let status = observed.nodes.get(sought.node)?.status.as_ref()?;
        // An agent that has just begun lists nothing yet.
        let is_complete = status.sandboxes_complete != Some(false);
        Some(status.heartbeat_time.as_ref().filter(|_| is_complete)?.0)
    };
    let later = |asked| heard().is_some_and(|heard| heard.duration_since(asked) >= LATER);
    sought.snapshot.is_none() && lost != Some(Lost::Gone) && asked_at(desired).is_some_and(later)
}

/// Says that the node is asked, and when to look again. With policy ColdStart a Sandbox that is to
/// run waits for a limited time: answers why it is over.
fn await_answer(
    plan: &mut Plan,
    desired: &Desired<'_>,
    sought: &Sought<'_>,
    now: Timestamp,
    lost: Option<Lost>,
) -> Option<String> {
    let asked = asked_at(desired);
    if asked.is_none() && told(desired).is_some() {
        // The time of a condition is that of its status: it would be taken for the time at which
        // the node was asked.
        plan.memory.restored = Shown::Remove;
        plan.look_again(AT_ONCE);
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
            "{why}, and was waited for {} s",
            GIVEN_UP_AFTER.as_secs()
        ));
    }
    let (reason, remedy) = match lost {
        _ if is_bounded => (
            lost.map_or(restored::ASKING_NODE, |_| restored::NODE_UNAVAILABLE),
            format!(
                "It is waited for, {} s in all; then the Sandbox starts without the memory",
                GIVEN_UP_AFTER.as_secs()
            ),
        ),
        Some(lost) => (restored::NODE_UNAVAILABLE, lost.remedy()),
        None => (
            restored::ASKING_NODE,
            format!("It reports every 30 s at the latest; to {}", cold_start()),
        ),
    };
    let message = format!(
        "{} may have left its memory on node {node:?}, which is asked for it; {why}. {remedy}",
        sought.pod()
    );
    plan.memory.restored = says(conditions::RESTORED, reason, message);
    plan.look_again(if lost.is_some() && !is_bounded {
        LOOK_FOR_NODE
    } else {
        LOOK_SOON
    });
    None
}

/// Forgets the last Pod: what its node lists later is an older state of the Sandbox than that which
/// goes on now.
pub(super) fn forget(plan: &mut Plan, desired: &Desired<'_>) {
    if saved_pod::last_pod(desired.sandbox).is_some() {
        plan.step(Area::Pod, Action::ForgetLastPod);
    }
}

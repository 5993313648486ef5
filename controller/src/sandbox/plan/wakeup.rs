//! Plans the wake-up of a Sandbox at the time in `agents.x-k8s.io/next-wakeup`.
//!
//! At that time the controller resumes a suspended Sandbox, as KEP-968 of upstream proposes it. The
//! node's agent, which has the time from the Pod's annotation, wakes a Sandbox that sleeps in
//! place. The controller removes the time from an awake Sandbox, so that it does not resume a
//! Sandbox that is suspended later.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use torpor_api::{conditions, reasons::hibernated};

use super::{Action, Area, Plan};
use crate::sandbox::validate::{Desired, PodState};

/// Time that the agent needs to wake the sandbox and report it.
const GRACE: Duration = Duration::from_secs(5);

/// Plans the change of the Sandbox, after which the pass plans again.
pub(super) fn plan(plan: &mut Plan, desired: &Desired<'_>, now: Timestamp) {
    let Some(time) = desired.settings.next_wakeup else {
        return;
    };
    let (resume, due) = match &desired.pod {
        _ if desired.suspended => (true, time),
        PodState::Ours(pod) if !sleeps(pod) => (false, later(time, GRACE)),
        // The Pod's condition changes when the sandbox has woken.
        _ => return,
    };
    match Duration::try_from(due.duration_since(now)) {
        Ok(left) if !left.is_zero() => {
            plan.requeue_after(left);
        }
        _ => plan.step(Area::Pod, Action::WakeUp { resume }),
    }
}

fn later(time: Timestamp, wait: Duration) -> Timestamp {
    time.checked_add(wait).unwrap_or(Timestamp::MAX)
}

/// Reports whether the sandbox sleeps in place, or is falling asleep or waking.
fn sleeps(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .iter()
        .flat_map(|s| s.conditions.iter().flatten());
    conditions
        .filter(|condition| condition.type_ == conditions::POD_HIBERNATED)
        .any(|condition| {
            let reason = condition.reason.as_deref();
            let on_its_way = [hibernated::DOZING, hibernated::WAKING, hibernated::SAVING];
            condition.status == "True" || reason.is_some_and(|reason| on_its_way.contains(&reason))
        })
}

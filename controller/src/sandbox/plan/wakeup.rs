//! `agents.x-k8s.io/next-wakeup`: a time at which the Sandbox is awake.
//!
//! A Sandbox that is suspended is resumed then, as KEP-968 of upstream proposes it. One that sleeps in place is woken by its node's agent, which has the time from the Pod's
//! annotation. Once it is awake the time is taken off, so that it does not resume a Sandbox that is suspended later.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use torpor_api::{conditions, reasons::hibernated};

use super::{Action, Area, Plan};
use crate::sandbox::validate::{Desired, PodState};

/// The agent needs a moment to see that the time has come, and to say that the sandbox is awake.
const GRACE: Duration = Duration::from_secs(5);

/// Plans the change of the Sandbox itself, with which everything is planned anew.
pub(super) fn plan(plan: &mut Plan, desired: &Desired<'_>, now: Timestamp) {
    let Some(time) = desired.settings.next_wakeup else {
        return;
    };
    let (resume, due) = match &desired.pod {
        _ if desired.suspended => (true, time),
        PodState::Ours(pod) if !sleeps(pod) => (false, later(time, GRACE)),
        // It is told when it has woken.
        _ => return,
    };
    match Duration::try_from(due.duration_since(now)) {
        Ok(left) if !left.is_zero() => {
            plan.look_again(left);
        }
        _ => plan.step(Area::Pod, Action::WakeUp { resume }),
    }
}

fn later(time: Timestamp, wait: Duration) -> Timestamp {
    time.checked_add(wait).unwrap_or(Timestamp::MAX)
}

/// Whether the sandbox sleeps in place, or is on its way out of that.
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

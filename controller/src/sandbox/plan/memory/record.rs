//! Plans the record of the Pod that last ran. It is written once the Pod runs where it can sleep,
//! and removed when the Pod's memory is no longer wanted.

use k8s_openapi::api::core::v1::Pod;
use torpor_api::PodRecord;

use super::{
    super::{LastPod, Plan},
    backup, capabilities, evicted, is_terminating, sleeps_in_place,
    suspend::runs,
};
use crate::{
    candidates,
    sandbox::{dereference::Observed, validate::Desired},
    saved_pod,
};

/// Records the Pod of a Sandbox, even if it is evicted.
///
/// A member of a pool is replaced and not restored, so its Pod is recorded once it is claimed.
pub(in crate::sandbox::plan) fn record(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
) {
    let is_known = || {
        let known = saved_pod::last_pod(desired.sandbox);
        known.is_some_and(|known| Some(&known.uid) == pod.metadata.uid.as_ref())
    };
    if is_terminating(pod) && !evicted::is_evicted(pod) {
        // A user who deletes the Pod of a running Sandbox wants its memory gone. A Pod that has not
        // run has no memory, and the record is of the Pod before.
        if !desired.suspended && is_known() {
            forget_record(plan, desired);
        }
        return;
    }
    if plan.last_pod != LastPod::Keep {
        return;
    }
    let can_sleep = || capabilities(observed, pod).0.hibernate || sleeps_in_place(pod);
    let is_member = candidates::pool_of(desired.sandbox).is_some();
    let has_run = || runs(pod) && backup::is_settled(pod) && can_sleep();
    if !is_member && has_run() && !is_known() {
        plan.last_pod = PodRecord::of(pod).map_or(LastPod::Keep, LastPod::Write);
    }
}

/// Removes the record, so that the memory of the last Pod is not looked for.
pub(in crate::sandbox::plan) fn forget_record(plan: &mut Plan, desired: &Desired<'_>) {
    if saved_pod::last_pod(desired.sandbox).is_some() {
        plan.last_pod = LastPod::Forget;
    }
}

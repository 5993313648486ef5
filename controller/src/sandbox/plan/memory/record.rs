//! The record of the Pod that last ran: written once it runs where it can sleep, forgotten when its
//! memory is to go with it.

use k8s_openapi::api::core::v1::Pod;
use torpor_api::PodRecord;

use super::{
    super::{LastPod, Plan},
    capabilities, evicted, is_terminating, sleeps_in_place,
    suspend::runs,
};
use crate::{
    candidates,
    sandbox::{dereference::Observed, validate::Desired},
    saved_pod,
};

/// Records the Pod of a Sandbox, be it evicted already. A member of a pool is replaced and not
/// brought back: its Pod is recorded once it is claimed.
pub(in crate::sandbox::plan) fn record(
    plan: &mut Plan,
    desired: &Desired<'_>,
    observed: &Observed,
    pod: &Pod,
) {
    if is_terminating(pod) && !evicted::is_evicted(pod) {
        // Whoever deletes the Pod of a Sandbox that is to run wants it gone.
        if !desired.suspended {
            forget_record(plan, desired);
        }
        return;
    }
    if plan.last_pod != LastPod::Keep {
        return;
    }
    let known = saved_pod::last_pod(desired.sandbox);
    let is_new = || known.is_none_or(|known| Some(&known.uid) != pod.metadata.uid.as_ref());
    let can_sleep = || capabilities(observed, pod).0.hibernate || sleeps_in_place(pod);
    if runs(pod) && can_sleep() && candidates::pool_of(desired.sandbox).is_none() && is_new() {
        plan.last_pod = PodRecord::of(pod).map_or(LastPod::Keep, LastPod::Write);
    }
}

/// Nobody is to look for the memory of the Pod that last ran.
pub(in crate::sandbox::plan) fn forget_record(plan: &mut Plan, desired: &Desired<'_>) {
    if saved_pod::last_pod(desired.sandbox).is_some() {
        plan.last_pod = LastPod::Forget;
    }
}

//! Looking at a Pod that Kata runs: no record, no lock file, no ledger, and the same planner.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use torpor_core::ids::Namespace;
use torpor_core::pressure::candidate;
use torpor_core::state::Desired;
use torpor_runsc::keeper::Rules;

use super::{Kubelet, Look, Remembered, Shared, note_turn};
use crate::kata::{Wish, may_be_ours};
use crate::policy::idle::Watched;
use crate::report::wakes;

/// One look at a Pod that Kata runs, and what follows; none for any other Pod.
pub(super) fn look(
    shared: &Shared,
    pod: Option<&Pod>,
    desired: &Desired,
    kubelet: &Kubelet,
    remembered: &Remembered,
) -> Option<(Look, Option<Watched>)> {
    let kata = shared.kata.as_ref()?;
    let pod = pod.filter(|pod| may_be_ours(pod))?;
    let pod_uid = desired.pod_uid.clone();
    if shared.node.sandbox_of(&pod_uid).is_some() {
        return None;
    }
    let now = Timestamp::now();
    let wish = Wish {
        pod,
        desired,
        rules: kubelet.rules.as_ref()?,
        probes: kubelet.probes.as_ref()?,
    };
    let looked = kata.look(&wish, &remembered.failures, remembered.idle.clone(), now)?;
    let mut observed = looked.observed;
    note_turn(&mut observed, remembered.save_turn.as_deref());
    let working_set = || looked.held.as_ref()?.working_set();
    let swap = &shared.node.swap;
    let plan = swap.plan(desired, &mut observed, &shared.policy, now, working_set);
    let namespace = pod.namespace().and_then(|name| Namespace::new(name).ok());
    // It writes no image.
    let wish = shared.saves.wish(&plan, namespace.as_ref(), || Some(0));
    let look = Look {
        pod_uid,
        plan,
        // No image is made of it.
        stops_for: None,
        // Whether it still does its runtime alone knows.
        asleep: None,
        record: None,
        lock: None,
        namespace,
        wish,
        saved: Vec::new(),
        nothing: false,
        given_up: Vec::new(),
        candidate: candidate(desired, &observed),
        rules: Rules::default(),
        told: None,
        limits: None,
        found: None,
        decided: now,
        cause: wakes::cause(Some(pod), observed.asleep_since, now),
        // Kata makes no images.
        limited: false,
        failures: observed.failures,
        failed_wakes: remembered.failed_wakes,
        kata: looked.held,
    };
    Some((look, looked.idle))
}

//! The observation of a Pod that Kata runs. It has no record, no lock file and no ledger;
//! the planner is the same.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use torpor_core::ids::Namespace;
use torpor_core::pressure::candidate;
use torpor_core::state::Desired;

use super::keeper_rules::KubeletRules;
use super::look::{Look, Remembered, note_turn};
use super::shared::Shared;
use crate::kata::{PodInput, may_be_kata};
use crate::policy::idle::Watched;
use crate::reconcile::shim::nothing;
use crate::report::wakes;

/// Observes a Pod that Kata runs, and plans. Returns none for any other Pod.
pub(super) fn look(
    shared: &Shared,
    pod: Option<&Pod>,
    desired: &Desired,
    kubelet: Option<&KubeletRules>,
    remembered: &Remembered,
) -> Option<(Look, Option<Watched>)> {
    let kata = shared.kata.as_ref()?;
    let pod = pod.filter(|pod| may_be_kata(pod))?;
    let pod_uid = desired.pod_uid.clone();
    if shared.node.sandbox_of(&pod_uid).is_some() {
        return None;
    }
    // A claim cannot arrive in a virtual machine that runs already.
    let desired = &Desired {
        claim: None,
        ..desired.clone()
    };
    let now = Timestamp::now();
    let input = PodInput {
        pod,
        desired,
        rules: &kubelet?.rules,
        probes: &kubelet?.probes,
    };
    let looked = kata.look(&input, &remembered.failures, remembered.idle.clone(), now)?;
    let mut observed = looked.observed;
    note_turn(&mut observed, remembered.save_turn.as_deref());
    let working_set = || looked.locked.as_ref()?.working_set();
    let swap = &shared.node.swap;
    let plan = swap.plan(desired, &mut observed, &shared.policy, now, working_set);
    let namespace = pod.namespace().and_then(|name| Namespace::new(name).ok());
    // The save writes no image, so its size is 0.
    let wish = shared.saves.wish(&plan, namespace.as_ref(), || Some(0));
    let look = Look {
        pod_uid,
        plan,
        // Kata makes no images.
        stops_for: None,
        // Only the runtime has the state of the sandbox, so each turn reads it anew.
        asleep: None,
        record: None,
        basis: nothing().basis,
        namespace,
        wish,
        saved: Vec::new(),
        nothing: false,
        given_up: Vec::new(),
        candidate: candidate(desired, &observed),
        sent_rules: None,
        handled: None,
        decided: now,
        cause: wakes::cause(Some(pod), observed.asleep_since, now),
        limited: false,
        failures: observed.failures,
        failed_wakes: remembered.failed_wakes,
        kata: looked.locked,
    };
    Some((look, looked.idle))
}

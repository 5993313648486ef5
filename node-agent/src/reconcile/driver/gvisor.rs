//! The observation of a Pod that gVisor runs, or of which only something on the disk is left: its
//! record, the report of its shim, its ledger and its images.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use torpor_core::pressure::candidate;
use torpor_core::state::{Desired, Live, PodPresence};
use torpor_core::status::{SnapshotDraft, SnapshotState, reasons};
use torpor_core::store_limit;

use super::departure::{self, with_disk};
use super::keeper_rules::{KubeletRules, is_found_dozing, send_rules};
use super::look::{Look, Remembered, note_turn};
use super::shared::Shared;
use super::sleep_watch::SleepWatch;
use crate::policy::idle::{self, Watched};
use crate::reconcile::manifest;
use crate::reconcile::observe::{observe, words};
use crate::reconcile::shim::{Shim, nothing};
use crate::report::wakes;

/// Observes a Pod that Kata does not run, and plans.
pub(super) fn look(
    shared: &Shared,
    pod: Option<&Pod>,
    desired: &Desired,
    kubelet: Option<KubeletRules>,
    remembered: Remembered,
) -> (Look, Option<Watched>) {
    let node = &shared.node;
    let desired = &with_disk(shared, desired);
    let now = Timestamp::now();
    let pod_uid = desired.pod_uid.clone();
    let record = node.sandbox_of(&pod_uid);
    // This time is read before anything else of the sandbox, so that a change meanwhile is newer.
    let as_of = (record.as_ref()).and_then(|record| node.records.changed_at(&record.sandbox));
    let sent_rules = record
        .as_ref()
        .zip(kubelet.as_ref())
        .and_then(|(record, rules)| send_rules(node, record, rules, remembered.sent_rules));
    // The mark is written before any status is published: from then on the memory of a
    // suspended Pod stays in its image.
    if let Some(kubelet) = &kubelet
        && let Err(error) = node.records.note_suspends(&pod_uid, kubelet.rules.suspends)
    {
        tracing::warn!(%pod_uid, error = words(&error), "cannot record whether the Pod is being suspended");
    }
    let failures = &remembered.failures;
    let shim = record
        .as_ref()
        .map(|record| Shim::of(&node.records, &record.sandbox));
    let seen = shim.map_or_else(nothing, |shim| shim.observe(idle::after(desired).is_some()));
    let mut observed = observe(node, &pod_uid, record.as_ref(), failures, &seen);
    let busy = seen.busy;
    if !busy {
        observed.failures.saw(observed.live);
    }
    if let Some(shim) = shim
        && is_found_dozing(remembered.handled.as_ref(), &observed)
        && let Err(why) = shim.watch()
    {
        observed.can_doze = Err(why);
    }
    let handled = match busy || observed.live == Live::Unknown {
        true => remembered.handled,
        false => observed.sandbox.clone(),
    };
    // No container runs in a sleeping sandbox.
    observed.added = pod
        .filter(|_| !observed.containers.is_empty())
        .and_then(|pod| manifest::added(pod, &seen.kept));
    let mut failed_wakes = remembered.failed_wakes;
    if let Some(reason) = (observed.ledger.as_ref().ok()).and_then(|read| failed_wakes.look(read)) {
        shared.metrics.wake_failed(reason.to_owned());
    }
    note_turn(&mut observed, remembered.save_turn.as_deref());
    let idle = match &record {
        Some(record) if !busy => {
            let used = seen.used;
            let sandbox = idle::Sandbox { node, record, used };
            idle::watch(sandbox, desired, &mut observed, remembered.idle, now)
        }
        // Another process changes the sandbox: the earlier result still applies.
        Some(_) => remembered.idle,
        None => None,
    };
    let working_set = || node.working_set(record.as_ref()?);
    let swap = &node.swap;
    let plan = swap.plan(desired, &mut observed, &shared.policy, now, working_set);
    let nothing = desired.pod == PodPresence::Gone
        && plan.status.snapshots.iter().all(is_settled)
        && record.is_none()
        && observed.images.is_empty()
        && observed.ledger.as_ref().is_ok_and(|ledger| ledger.seq == 0)
        && plan.steps.is_empty();
    if nothing {
        // The report is the last thing that is left of the Pod. A failed removal is tried again.
        let _ = node.records.remove_report(&pod_uid);
    }
    let first_image = || node.store.list_pod(&pod_uid).ok()?.into_iter().next();
    let namespace = record
        .as_ref()
        .map(|record| record.namespace.clone())
        .or_else(|| first_image().map(|image| image.namespace));
    let saved = namespace
        .iter()
        .flat_map(|namespace| manifest::saved(node, namespace, &plan))
        .collect();
    let given_up = departure::given_up(node, namespace.as_ref(), &plan);
    let wish = shared
        .saves
        .wish(&plan, namespace.as_ref(), || shim?.measure()?.expected());
    let look = Look {
        pod_uid,
        asleep: SleepWatch::of(
            &plan.status.phase,
            record.as_ref(),
            as_of.filter(|_| !busy),
            now.into(),
        ),
        stops_for: plan.stops_for(&observed),
        plan,
        basis: seen.basis,
        record,
        namespace,
        wish,
        saved,
        nothing,
        given_up,
        candidate: candidate(desired, &observed),
        sent_rules,
        handled,
        decided: now,
        cause: wakes::cause(pod, observed.asleep_since, now),
        limited: store_limit::applies_to(desired),
        failures: observed.failures,
        failed_wakes,
        kata: None,
    };
    (look, idle)
}

/// Returns whether the status of a snapshot, whose Pod has left nothing, is final.
fn is_settled(snapshot: &SnapshotDraft) -> bool {
    match &snapshot.state {
        SnapshotState::Released => true,
        SnapshotState::Failed { reason, .. } => reason == reasons::SANDBOX_NOT_FOUND,
        SnapshotState::Pending { .. }
        | SnapshotState::Saving
        | SnapshotState::Committed { .. }
        | SnapshotState::Releasing => false,
    }
}

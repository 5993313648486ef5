//! The observation of a Pod that gVisor runs, or of which only something on the disk is left: its
//! record, the sandbox's lock, its ledger and its images.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use torpor_core::pressure::candidate;
use torpor_core::state::{Desired, Live, PodPresence};
use torpor_core::status::{SnapshotDraft, SnapshotState, reasons};
use torpor_core::store_limit;

use super::departure::{self, with_disk};
use super::keeper_rules::{KubeletRules, is_found_dozing, send_doze, send_rules};
use super::look::{Look, Remembered, note_turn};
use super::shared::Shared;
use super::sleep_watch::SleepWatch;
use super::{gofers, limits};
use crate::policy::idle::{self, Watched};
use crate::policy::saves::figures;
use crate::reconcile::manifest;
use crate::reconcile::observe::{observe, words};
use crate::report::wakes;

/// Observes a Pod that Kata does not run, and plans.
pub(super) fn look(
    shared: &Shared,
    pod: Option<&Pod>,
    desired: &Desired,
    kubelet: KubeletRules,
    remembered: Remembered,
) -> (Look, Option<Watched>) {
    let node = &shared.node;
    let desired = &with_disk(shared, desired);
    let now = Timestamp::now();
    let pod_uid = desired.pod_uid.clone();
    let record = node.sandbox_of(&pod_uid);
    // This time is read before anything else of the sandbox, so that a change meanwhile is newer.
    let as_of = (record.as_ref()).and_then(|record| node.records.changed_at(&record.sandbox));
    let KubeletRules { probes, rules } = kubelet;
    let sent_rules = record
        .as_ref()
        .zip(rules.as_ref())
        .and_then(|(record, rules)| send_rules(node, record, rules, remembered.sent_rules));
    // A new sandbox that is to sleep waits for this note, under its lock: with the note its keeper
    // has the rules, too.
    if let Some((record, probes)) = record.as_ref().zip(probes.as_ref())
        && sent_rules.is_some()
        && let Err(error) = node.records.write_probes(&record.sandbox, probes)
    {
        tracing::warn!(%pod_uid, error = words(&error), "cannot record the Pod's probes");
    }
    let lock = record
        .as_ref()
        .and_then(|record| node.records.try_lock(&record.sandbox).ok().flatten());
    let busy = record.is_some() && lock.is_none();
    // The mark is written before any status is published: from then on the memory of a
    // suspended Pod stays in its image.
    if let Some(rules) = &rules
        && let Err(error) = node.records.note_suspends(&pod_uid, rules.suspends)
    {
        tracing::warn!(%pod_uid, error = words(&error), "cannot record whether the Pod is being suspended");
    }
    let failures = &remembered.failures;
    let mut observed = observe(node, &pod_uid, record.as_ref(), failures, busy);
    if !busy {
        observed.failures.saw(observed.live);
    }
    if let Some((record, rules)) = record.as_ref().zip(rules.as_ref())
        && is_found_dozing(remembered.handled.as_ref(), &observed)
        && let Err(why) = send_doze(node, record, rules)
    {
        observed.can_doze = Err(why);
    }
    let sent_limits = match record.as_ref().zip(lock.as_ref()) {
        Some((record, _)) => {
            gofers::end_containers_without(node, record, &observed);
            limits::send(node, record, &observed, remembered.sent_limits)
        }
        None => remembered.sent_limits,
    };
    let handled = match busy || observed.live == Live::Unknown {
        true => remembered.handled,
        false => observed.sandbox.clone(),
    };
    // No container runs in a sleeping sandbox.
    observed.added = record
        .as_ref()
        .filter(|_| !observed.containers.is_empty())
        .and_then(|record| manifest::added(node, record, pod));
    let mut failed_wakes = remembered.failed_wakes;
    if let Some(reason) = (observed.ledger.as_ref().ok()).and_then(|read| failed_wakes.look(read)) {
        shared.metrics.wake_failed(reason.to_owned());
    }
    note_turn(&mut observed, remembered.save_turn.as_deref());
    let idle = match record.as_ref().zip(lock.as_ref()) {
        Some((record, lock)) => {
            let sandbox = idle::Sandbox {
                node,
                record,
                lock,
                probes: probes.as_ref(),
            };
            idle::watch(&sandbox, desired, &mut observed, remembered.idle, now)
        }
        // Another process holds the lock: the earlier result still applies.
        None => remembered.idle.filter(|_| busy),
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
    let wish = shared.saves.wish(&plan, namespace.as_ref(), || {
        figures(node, record.as_ref()?, lock.as_ref()?).expected()
    });
    let look = Look {
        pod_uid,
        asleep: SleepWatch::of(
            &plan.status.phase,
            record.as_ref(),
            as_of.filter(|_| !busy),
            now.into(),
        ),
        stops_for: plan.stops_for(&observed).cloned(),
        plan,
        record,
        lock,
        namespace,
        wish,
        saved,
        nothing,
        given_up,
        candidate: candidate(desired, &observed),
        rules: rules.unwrap_or_default(),
        sent_rules,
        sent_limits,
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

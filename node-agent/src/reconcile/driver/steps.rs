//! Running the steps of a plan, with metrics, spans and log lines for each.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use torpor_core::ids::{Namespace, PodUid};
use torpor_core::state::Failures;
use torpor_core::steps::{Action, Outcome, Step};
use torpor_messages::service::Steps;
use torpor_snapshots::steps::{OnStore, Place, take};

use super::keeper_rules::rules_now;
use super::look::Look;
use super::shared::{Shared, pod_of};
use crate::reconcile::manifest;
use crate::reconcile::shim::Shim;

/// Runs the steps until one does not succeed. Returns how many bytes of an image were written.
pub(super) fn run_steps(
    shared: &Shared,
    look: &mut Look,
    pod: Option<&Pod>,
    failures: &mut Failures,
) -> u64 {
    let (decided, cause) = (look.decided, look.cause);
    let pod_uid = look.pod_uid.clone();
    let mut failed_wakes = look.failed_wakes;
    let report = |step: &Step, outcome: &Outcome, took: Duration| {
        let kind = step.action.kind();
        shared.metrics.stepped(kind, outcome, took);
        shared.spans.stepped(&pod_uid, kind, outcome, took);
        log(&pod_uid, step, outcome, took);
        failures.note(&step.action, outcome, Timestamp::now());
        failed_wakes.note(step, outcome);
    };
    let written = match (look.kata.take(), &look.record) {
        (Some(mut sandbox), _) => {
            let act = |step: &Step| sandbox.act(step, decided, cause);
            take_each(&look.plan.steps, act, report)
        }
        (None, Some(record)) => {
            let steps = request(shared, look, pod);
            Shim::of(&shared.node.records, &record.sandbox).take(steps, report)
        }
        (None, None) => {
            let namespace = look.namespace.clone().or_else(no_namespace);
            let namespace = namespace.as_ref();
            namespace.map_or(0, |namespace| on_store(shared, look, namespace, report))
        }
    };
    look.failed_wakes = failed_wakes;
    written
}

/// Returns a name for the namespace of a Pod of which only the ledger is left: no image gives it.
fn no_namespace() -> Option<Namespace> {
    Namespace::new("none").ok()
}

/// Takes the steps for a Pod without a sandbox.
fn on_store(
    shared: &Shared,
    look: &Look,
    namespace: &Namespace,
    report: impl FnMut(&Step, &Outcome, Duration),
) -> u64 {
    let place = Place {
        store: &shared.node.store,
        namespace,
        pod: &look.pod_uid,
        sandbox: None,
    };
    let act = |step: &Step| take(&place, step, &mut OnStore(&place));
    take_each(&look.plan.steps, act, report)
}

/// Takes steps in this process until one does not succeed. No step writes an image.
fn take_each(
    steps: &[Step],
    act: impl FnMut(&Step) -> Outcome,
    mut report: impl FnMut(&Step, &Outcome, Duration),
) -> u64 {
    let report = |index: usize, outcome, took| report(&steps[index], &outcome, took);
    torpor_snapshots::steps::take_each(steps, act, report);
    0
}

/// Returns the request that has the Pod's shim take the steps.
fn request(shared: &Shared, look: &Look, pod: Option<&Pod>) -> Steps {
    let node = &shared.node;
    let makes_image = |step: &Step| {
        matches!(
            step.action,
            Action::Checkpoint { .. } | Action::Commit { .. }
        )
    };
    // The Pod may have been deleted since the plan was made: its shim must not get older rules than
    // it has.
    let rules = pod_of(shared, &look.pod_uid).map(|pod| {
        let now = rules_now(shared, &look.pod_uid, &pod);
        (now.rules, now.probes)
    });
    Steps {
        steps: look.plan.steps.clone(),
        stops_for: look.stops_for,
        basis: look.basis,
        by_itself: look.plan.sleeps_by_itself(),
        decided: look.decided,
        cause: look.cause,
        reserve: node.limits.reserve,
        namespace_limit: node.namespace_limit().filter(|_| look.limited),
        rules,
        pod: (look.plan.steps.iter().any(makes_image)).then(|| manifest::facts(node, pod)),
    }
}

fn log(pod: &PodUid, step: &Step, outcome: &Outcome, took: Duration) {
    let took = took.as_millis();
    let kind = step.action.kind();
    match outcome {
        Outcome::Done | Outcome::Already => {
            tracing::info!(%pod, ?kind, took_ms = took, seq = step.fence.ledger_seq, "step done");
        }
        Outcome::Stale => {
            tracing::info!(%pod, ?kind, "step not done: it was planned for another state")
        }
        Outcome::Failed { reason, message } => {
            tracing::error!(%pod, ?kind, reason, message, took_ms = took, "step failed");
        }
        Outcome::Unknown { message } => {
            tracing::warn!(%pod, ?kind, message, took_ms = took, "the outcome of the step is unknown");
        }
    }
}

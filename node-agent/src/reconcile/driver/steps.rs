//! Running the steps of a plan, with metrics, spans and log lines for each.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use torpor_core::ids::{Namespace, PodUid};
use torpor_core::state::Failures;
use torpor_core::steps::{Outcome, Step};

use super::keeper_rules::rules_now;
use super::look::Look;
use super::shared::{Shared, pod_of};
use crate::reconcile::execute::{self, Context, execute};
use crate::reconcile::manifest;

/// Runs the steps until one does not succeed. Returns how many bytes of an image were written.
pub(super) fn run_steps(
    shared: &Shared,
    look: &mut Look,
    pod: Option<&Pod>,
    failures: &mut Failures,
) -> u64 {
    let Some(namespace) = look.namespace.clone() else {
        // A ledger is left, and no image gives the namespace.
        return remove_ledger_alone(shared, look, failures);
    };
    run_in(shared, look, &namespace, pod, failures)
}

fn remove_ledger_alone(shared: &Shared, look: &mut Look, failures: &mut Failures) -> u64 {
    match Namespace::new("none") {
        Ok(namespace) => run_in(shared, look, &namespace, None, failures),
        Err(error) => {
            tracing::error!(%error, "the constant name of a namespace is not valid");
            0
        }
    }
}

fn run_in(
    shared: &Shared,
    look: &mut Look,
    namespace: &Namespace,
    pod: Option<&Pod>,
    failures: &mut Failures,
) -> u64 {
    let mut kata = look.kata.take();
    let mut failed_wakes = look.failed_wakes;
    let draft = || manifest::draft(&shared.node, look.record.as_ref(), pod);
    // The Pod may have been deleted since the plan was made. Its keeper already has the rules for
    // that and must not get the older ones again.
    let rules = || match pod_of(shared, &look.pod_uid) {
        Some(pod) => rules_now(shared, &look.pod_uid, &pod),
        None => look.rules.clone(),
    };
    let context = Context {
        rules: &rules,
        by_itself: look.plan.sleeps_by_itself(),
        decided: look.decided,
        cause: look.cause,
        limited: look.limited,
        node: &shared.node,
        pod: &look.pod_uid,
        namespace,
        sandbox: look.record.as_ref().zip(look.lock.as_ref()),
        draft: &draft,
        partial: RefCell::new(None),
        written: Cell::new(0),
    };
    let act = |step: &Step| match &mut kata {
        Some(sandbox) => sandbox.act(step, look.decided, look.cause),
        None => execute(&context, step),
    };
    let report = |step: &Step, outcome: &Outcome, took: Duration| {
        let kind = step.action.kind();
        shared.metrics.stepped(kind, outcome, took);
        shared.spans.stepped(&look.pod_uid, kind, outcome, took);
        log(&look.pod_uid, step, outcome, took);
        failures.note(&step.action, outcome, Timestamp::now());
        failed_wakes.note(step, outcome);
    };
    let no_room = || execute::no_room(&context);
    execute::run(
        &look.plan.steps,
        look.stops_for.as_ref(),
        no_room,
        act,
        report,
    );
    let written = context.written.get();
    look.failed_wakes = failed_wakes;
    written
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

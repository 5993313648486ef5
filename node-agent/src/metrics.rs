//! What the agent counts. Names begin with `torpor_agent_`.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use torpor_core::steps::{Outcome, StepKind};

#[derive(Debug, Clone, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StepLabels {
    step: String,
    outcome: String,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KindLabel {
    step: String,
}

/// Seconds: a pause takes a millisecond, the save of gigabytes a minute.
const SECONDS: [f64; 14] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0,
];

/// The agent's metrics.
#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) registry: Registry,
    steps: Family<StepLabels, Counter>,
    seconds: Family<KindLabel, Histogram>,
    plans: Counter,
    pub(crate) running: Gauge,
    pub(crate) hibernated: Gauge,
    pub(crate) paused: Gauge,
    pub(crate) dozing: Gauge,
    pub(crate) image_bytes: Gauge,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("torpor_agent");
        let metrics = Self {
            steps: Family::default(),
            seconds: Family::new_with_constructor(|| Histogram::new(SECONDS)),
            plans: Counter::default(),
            running: Gauge::default(),
            hibernated: Gauge::default(),
            paused: Gauge::default(),
            dozing: Gauge::default(),
            image_bytes: Gauge::default(),
            registry: Registry::default(),
        };
        registry.register("steps", "Steps executed, by outcome", metrics.steps.clone());
        registry.register(
            "step_seconds",
            "Time of successful steps",
            metrics.seconds.clone(),
        );
        registry.register("plans", "Plans made", metrics.plans.clone());
        registry.register(
            "sandboxes_running",
            "Sandboxes that run",
            metrics.running.clone(),
        );
        registry.register(
            "sandboxes_hibernated",
            "Sandboxes that sleep in an image",
            metrics.hibernated.clone(),
        );
        registry.register(
            "sandboxes_paused",
            "Sandboxes that are paused",
            metrics.paused.clone(),
        );
        registry.register(
            "sandboxes_dozing",
            "Sandboxes that are paused because they were idle",
            metrics.dozing.clone(),
        );
        registry.register(
            "image_bytes",
            "Bytes of all images",
            metrics.image_bytes.clone(),
        );
        Self {
            registry,
            ..metrics
        }
    }

    pub(crate) fn planned(&self) {
        self.plans.inc();
    }

    pub(crate) fn stepped(&self, kind: StepKind, outcome: &Outcome, took: Duration) {
        let step = format!("{kind:?}");
        let outcome_name = match outcome {
            Outcome::Done => "Done".to_owned(),
            Outcome::Already => "Already".to_owned(),
            Outcome::Stale => "Stale".to_owned(),
            Outcome::Unknown { .. } => "Unknown".to_owned(),
            Outcome::Failed { reason, .. } => reason.clone(),
        };
        if matches!(outcome, Outcome::Done) {
            let label = KindLabel { step: step.clone() };
            self.seconds
                .get_or_create(&label)
                .observe(took.as_secs_f64());
        }
        self.steps
            .get_or_create(&StepLabels {
                step,
                outcome: outcome_name,
            })
            .inc();
    }
}

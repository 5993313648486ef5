//! The agent's metrics. Their names begin with `torpor_agent_`.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use jiff::Timestamp;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use torpor_api::node::NamespaceStorage;
use torpor_core::pressure::Resource;
use torpor_core::queue::{Queue, Urgency};
use torpor_core::steps::{Outcome, StepKind};
use torpor_records::{SleepNote, WakeNote};

mod transfers;

use transfers::Transfers;

#[derive(Debug, Clone, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StepLabels {
    step: String,
    outcome: String,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KindLabel {
    step: String,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq, EncodeLabelSet)]
struct WakeLabels {
    cause: String,
    from: String,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StageLabel {
    stage: String,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReasonLabel {
    reason: String,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FailureLabels {
    work: &'static str,
    reason: String,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq, EncodeLabelSet)]
struct UrgencyLabel {
    urgency: String,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq, EncodeLabelSet)]
struct NamespaceLabel {
    namespace: String,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ResourceLabel {
    resource: &'static str,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq, EncodeLabelSet)]
struct GivenUpLabel {
    reason: &'static str,
}

/// Buckets of durations, in seconds. A pause takes a millisecond, the save of gigabytes a minute.
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
    pub(crate) watched: Gauge,
    reported_at: Gauge,
    pub(crate) image_bytes: Gauge,
    pub(crate) store_available: Gauge,
    pub(crate) store_capacity: Gauge,
    namespace_bytes: Family<NamespaceLabel, Gauge>,
    namespaces_limited: Gauge,
    wakes: Family<WakeLabels, Counter>,
    wake_seconds: Family<WakeLabels, Histogram>,
    wake_stages: Family<StageLabel, Histogram>,
    given_back: Counter,
    pub(crate) held_asleep: Gauge,
    failures: Family<FailureLabels, Counter>,
    plan_reasons: Family<ReasonLabel, Gauge>,
    saves_waiting: Family<UrgencyLabel, Gauge>,
    saves_under_way: Gauge,
    save_bytes: Counter,
    bandwidth_wait: Counter<f64, AtomicU64>,
    node_short: Family<ResourceLabel, Gauge>,
    asked_to_sleep: Family<ResourceLabel, Counter>,
    given_up: Family<GivenUpLabel, Counter>,
    transfers: Transfers,
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
            watched: Gauge::default(),
            reported_at: Gauge::default(),
            image_bytes: Gauge::default(),
            store_available: Gauge::default(),
            store_capacity: Gauge::default(),
            namespace_bytes: Family::default(),
            namespaces_limited: Gauge::default(),
            wakes: Family::default(),
            wake_seconds: Family::new_with_constructor(|| Histogram::new(SECONDS)),
            wake_stages: Family::new_with_constructor(|| Histogram::new(SECONDS)),
            given_back: Counter::default(),
            held_asleep: Gauge::default(),
            failures: Family::default(),
            plan_reasons: Family::default(),
            saves_waiting: Family::default(),
            saves_under_way: Gauge::default(),
            save_bytes: Counter::default(),
            bandwidth_wait: Counter::default(),
            node_short: Family::default(),
            asked_to_sleep: Family::default(),
            given_up: Family::default(),
            transfers: Transfers::new(),
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
            "sandboxes_watched",
            "Sandboxes that the agent watches for idleness, because they may fall asleep by themselves",
            metrics.watched.clone(),
        );
        registry.register(
            "reported_timestamp_seconds",
            "Time at which the apiserver last accepted the agent's SandboxNode, in seconds since 1970; 0: not yet",
            metrics.reported_at.clone(),
        );
        registry.register(
            "image_bytes",
            "Bytes of all images",
            metrics.image_bytes.clone(),
        );
        metrics.register_sleep(&mut registry);
        metrics.register_capacity(&mut registry);
        Self {
            registry,
            ..metrics
        }
    }

    /// Registers the metrics about the gain of sleep, the cost of wakes and the storage of images.
    fn register_sleep(&self, registry: &mut Registry) {
        registry.register(
            "image_store_available_bytes",
            "Bytes free in the file system of the images",
            self.store_available.clone(),
        );
        registry.register(
            "image_store_capacity_bytes",
            "Bytes of the file system of the images",
            self.store_capacity.clone(),
        );
        registry.register(
            "namespace_image_bytes",
            "Bytes of a namespace's images, for the 32 namespaces with the most",
            self.namespace_bytes.clone(),
        );
        registry.register(
            "namespaces_limited",
            "Namespaces, among the 32 with the most, whose images take all that a namespace may (--store-per-namespace)",
            self.namespaces_limited.clone(),
        );
        registry.register(
            "wakes",
            "Wakes in place that succeeded, by their cause and the depth of the sleep",
            self.wakes.clone(),
        );
        registry.register(
            "wake_seconds",
            "Time of wakes in place, from their beginning until the sandbox ran",
            self.wake_seconds.clone(),
        );
        registry.register(
            "wake_stage_seconds",
            "Time of each stage of wakes in place",
            self.wake_stages.clone(),
        );
        registry.register(
            "memory_given_back_bytes",
            "Bytes by which working sets of Pods shrank when their sandboxes fell asleep",
            self.given_back.clone(),
        );
        registry.register(
            "memory_held_asleep_bytes",
            "Working sets of the Pods whose sandboxes sleep now, measured when the sandboxes fell asleep",
            self.held_asleep.clone(),
        );
        registry.register(
            "failures",
            "Steps that failed or whose outcome is unknown, and failed wakes by other processes, by purpose and reason",
            self.failures.clone(),
        );
        registry.register(
            "plan_reasons",
            "Sandboxes by the reasons of their latest plan",
            self.plan_reasons.clone(),
        );
    }

    /// Registers the metrics about limited resources: saves at once, bandwidth, memory, swap, disk.
    fn register_capacity(&self, registry: &mut Registry) {
        registry.register(
            "saves_waiting",
            "Sandboxes that wait for their turn to be saved, by urgency of the save",
            self.saves_waiting.clone(),
        );
        registry.register(
            "saves_under_way",
            "Sandboxes that have their turn to be saved",
            self.saves_under_way.clone(),
        );
        registry.register(
            "save_bytes",
            "Bytes of images that were written, finished or not",
            self.save_bytes.clone(),
        );
        registry.register(
            "save_bandwidth_wait_seconds",
            "Seconds that sandboxes waited for bandwidth before they were saved",
            self.bandwidth_wait.clone(),
        );
        registry.register(
            "node_short",
            "1 while the node is short of the resource",
            self.node_short.clone(),
        );
        registry.register(
            "asked_to_sleep",
            "Sandboxes that the agent asked to sleep before their time, by the resource that the node was short of",
            self.asked_to_sleep.clone(),
        );
        registry.register(
            "images_given_up",
            "Images of deleted Pods' memory that the agent removed because no SandboxSnapshot named the Pod, by reason",
            self.given_up.clone(),
        );
        self.transfers.register(registry);
    }

    /// Records the time at which the apiserver accepted the agent's SandboxNode.
    pub(crate) fn reported(&self, at: Timestamp) {
        self.reported_at.set(at.as_second());
    }

    /// Records the numbers of sandboxes that are being saved and that wait for their turn.
    pub(crate) fn saves(&self, queue: &Queue) {
        let under_way = i64::try_from(queue.under_way()).unwrap_or(i64::MAX);
        self.saves_under_way.set(under_way);
        for urgency in Urgency::ALL {
            let waiting = i64::try_from(queue.waiting(urgency)).unwrap_or(i64::MAX);
            let urgency = format!("{urgency:?}");
            let label = UrgencyLabel { urgency };
            self.saves_waiting.get_or_create(&label).set(waiting);
        }
    }

    /// Counts the time for which a save waited for bandwidth before its turn.
    pub(crate) fn waited_for_bandwidth(&self, wait: Duration) {
        self.bandwidth_wait.inc_by(wait.as_secs_f64());
    }

    /// Counts the bytes of images that a plan's steps wrote.
    pub(crate) fn wrote(&self, bytes: u64) {
        self.save_bytes.inc_by(bytes);
    }

    /// Records the resources that the node is short of.
    pub(crate) fn pressure(&self, short: &BTreeMap<Resource, String>) {
        for resource in [Resource::Memory, Resource::Swap] {
            let is_short = short.contains_key(&resource);
            self.node_short
                .get_or_create(&resource_label(resource))
                .set(is_short.into());
        }
    }

    /// Records the bytes of namespaces' images. A namespace that the list no longer has loses its
    /// series.
    pub(crate) fn namespaces(&self, namespaces: &[NamespaceStorage]) {
        self.namespace_bytes.clear();
        for storage in namespaces {
            let namespace = storage.name.clone();
            let label = NamespaceLabel { namespace };
            self.namespace_bytes
                .get_or_create(&label)
                .set(storage.bytes);
        }
        let limited = namespaces.iter().filter(|storage| storage.limited).count();
        let limited = i64::try_from(limited).unwrap_or(i64::MAX);
        self.namespaces_limited.set(limited);
    }

    /// Counts a sandbox that must sleep before its time because the node is short of this resource.
    pub(crate) fn asked_to_sleep(&self, short_of: Resource) {
        let label = resource_label(short_of);
        self.asked_to_sleep.get_or_create(&label).inc();
    }

    /// Counts an image of a deleted Pod that was removed because no SandboxSnapshot named the Pod.
    pub(crate) fn count_given_up(&self, disk_short: bool) {
        let reason = match disk_short {
            true => "DiskShort",
            false => "GraceOver",
        };
        self.given_up.get_or_create(&GivenUpLabel { reason }).inc();
    }

    /// Records the number of sandboxes whose latest plan has each reason.
    pub(crate) fn planned_for(&self, counts: &BTreeMap<String, i64>) {
        // A reason that no sandbox has any more loses its series.
        self.plan_reasons.clear();
        for (reason, count) in counts {
            let reason = reason.clone();
            self.plan_reasons
                .get_or_create(&ReasonLabel { reason })
                .set(*count);
        }
    }

    /// Counts a wake in place. `stages` has the duration of each stage.
    pub(crate) fn woke(&self, note: &WakeNote, took: Duration, stages: &[(String, Duration)]) {
        let label = WakeLabels {
            cause: note.cause.as_str().to_owned(),
            from: format!("{:?}", note.from),
        };
        self.wakes.get_or_create(&label).inc();
        self.wake_seconds
            .get_or_create(&label)
            .observe(took.as_secs_f64());
        for (stage, took) in stages {
            let label = StageLabel {
                stage: stage.clone(),
            };
            self.wake_stages
                .get_or_create(&label)
                .observe(took.as_secs_f64());
        }
    }

    /// Counts the memory that a sandbox gave back when it fell asleep.
    pub(crate) fn fell_asleep(&self, sleep: SleepNote) {
        self.given_back.inc_by(sleep.given_back);
    }

    /// Counts a failed wake by another process.
    pub(crate) fn wake_failed(&self, reason: String) {
        self.failed(work(StepKind::Wake), reason);
    }

    fn failed(&self, work: &'static str, reason: String) {
        let label = FailureLabels { work, reason };
        self.failures.get_or_create(&label).inc();
    }

    pub(crate) fn planned(&self) {
        self.plans.inc();
    }

    pub(crate) fn stepped(&self, kind: StepKind, outcome: &Outcome, took: Duration) {
        let step = format!("{kind:?}");
        let failure = match outcome {
            Outcome::Failed { reason, .. } => Some(reason.clone()),
            Outcome::Unknown { .. } => Some("Unknown".to_owned()),
            Outcome::Done | Outcome::Already | Outcome::Stale => None,
        };
        if let Some(reason) = failure {
            self.failed(work(kind), reason);
        }
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

fn resource_label(resource: Resource) -> ResourceLabel {
    ResourceLabel {
        resource: match resource {
            Resource::Memory => "memory",
            Resource::Swap => "swap",
        },
    }
}

/// Returns the purpose of a step, by the classes of the planner's waiting times after failures.
/// Removals count as upkeep here.
fn work(kind: StepKind) -> &'static str {
    match kind {
        StepKind::Pause
        | StepKind::Freeze
        | StepKind::Doze
        | StepKind::Checkpoint
        | StepKind::Commit
        | StepKind::Reclaim
        | StepKind::End => "save",
        StepKind::Wake => "wake",
        StepKind::Bind => "bind",
        StepKind::Resume
        | StepKind::Record
        | StepKind::ForgetSleep
        | StepKind::DiscardPartial
        | StepKind::DiscardImage
        | StepKind::ReleaseImage
        | StepKind::DiscardLedger => "upkeep",
    }
}

#[cfg(test)]
mod tests {
    use torpor_core::queue::Capacity;
    use torpor_records::{Depth, WakeCause};

    use super::*;

    /// Returns the metrics as text. Each family gets a series, because the text omits families
    /// without series.
    fn text_with_everything() -> String {
        let metrics = Metrics::new();
        metrics.planned();
        metrics.reported(Timestamp::UNIX_EPOCH + Duration::from_secs(90));
        metrics.stepped(StepKind::Pause, &Outcome::Done, Duration::from_millis(1));
        let failed = Outcome::Failed {
            reason: "DiskFull".to_owned(),
            message: "no room".to_owned(),
        };
        metrics.stepped(StepKind::Commit, &failed, Duration::ZERO);
        metrics.wake_failed("RestoreFailed".to_owned());
        let stages = [("verified".to_owned(), Duration::from_millis(20))];
        let note = WakeNote {
            cause: WakeCause::Packet,
            from: Depth::Dozing,
            stages_end_micros: BTreeMap::new(),
        };
        metrics.woke(&note, Duration::from_millis(90), &stages);
        let doze = SleepNote::new(5000, 2500, None);
        metrics.fell_asleep(doze);
        metrics.fell_asleep(SleepNote::new(2500, 2000, Some(doze)));
        metrics.planned_for(&[("LedgerCorrupt".to_owned(), 1)].into());
        metrics.planned_for(&[("InUse".to_owned(), 2)].into());
        metrics.saves(&Queue::new(Capacity {
            at_once: 1,
            patience: Duration::ZERO,
            longest: Duration::ZERO,
            bandwidth: None,
        }));
        metrics.waited_for_bandwidth(Duration::from_millis(1500));
        metrics.wrote(4096);
        metrics.pressure(&[(Resource::Swap, String::new())].into());
        metrics.asked_to_sleep(Resource::Memory);
        metrics.count_given_up(false);
        let namespace = |name: &str, bytes, limited| NamespaceStorage {
            bytes,
            limited,
            name: name.to_owned(),
        };
        metrics.namespaces(&[namespace("gone", 9, true), namespace("a", 5, true)]);
        metrics.namespaces(&[namespace("a", 6, true), namespace("b", 1, false)]);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &metrics.registry).expect("text");
        text
    }

    #[test]
    fn gains_of_sleep_and_costs_of_wakes_are_counted() {
        let text = text_with_everything();
        for line in [
            r#"torpor_agent_wakes_total{cause="Packet",from="Dozing"} 1"#,
            r#"torpor_agent_failures_total{work="wake",reason="RestoreFailed"} 1"#,
            r#"torpor_agent_wake_seconds_sum{cause="Packet",from="Dozing"} 0.09"#,
            r#"torpor_agent_wake_stage_seconds_sum{stage="verified"} 0.02"#,
            "torpor_agent_memory_given_back_bytes_total 3000",
            r#"torpor_agent_failures_total{work="save",reason="DiskFull"} 1"#,
            r#"torpor_agent_saves_waiting{urgency="Asked"} 0"#,
            r#"torpor_agent_saves_waiting{urgency="Pressed"} 0"#,
            "torpor_agent_save_bytes_total 4096",
            "torpor_agent_reported_timestamp_seconds 90",
            "torpor_agent_save_bandwidth_wait_seconds_total 1.5",
            r#"torpor_agent_node_short{resource="memory"} 0"#,
            r#"torpor_agent_node_short{resource="swap"} 1"#,
            r#"torpor_agent_asked_to_sleep_total{resource="memory"} 1"#,
            r#"torpor_agent_namespace_image_bytes{namespace="a"} 6"#,
            "torpor_agent_namespaces_limited 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        assert!(text.contains(r#"torpor_agent_plan_reasons{reason="InUse"} 2"#));
        assert!(!text.contains("LedgerCorrupt"), "{text}");
        assert!(!text.contains("gone"), "{text}");
    }

    #[test]
    fn dashboards_and_alerts_name_metrics_and_labels_that_the_agent_has() {
        torpor_test_monitoring::check("torpor_agent_", &text_with_everything());
    }

    #[test]
    fn reference_of_metrics_is_current() {
        let (text, source) = (text_with_everything(), include_str!("metrics.rs"));
        let title = "Metrics of the agent";
        torpor_test_reference::assert_metrics_page("metrics-agent.md", title, &text, source);
    }
}

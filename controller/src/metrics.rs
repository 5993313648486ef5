//! Metrics, under upstream's names (and controller-runtime's for the passes), so that dashboards and alerts keep working.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use kube::ResourceExt;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, text::encode},
    metrics::{
        MetricType,
        counter::Counter,
        family::Family,
        gauge::{ConstGauge, Gauge},
        histogram::Histogram,
    },
    registry::Registry,
};
use torpor_api::{Sandbox, SandboxClaim, SandboxStatus, annotations, conditions, labels, reasons};

use crate::{cache::Cache, watches::extensions::controller_of_kind};

/// Upper bounds of agent_sandbox_creation_latency_ms, upstream's.
const CREATION_BUCKETS_MS: [f64; 14] = [
    50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10000.0, 30000.0, 60000.0, 120_000.0,
    240_000.0, 300_000.0, 600_000.0,
];
/// Upper bounds of the claims' startup latencies: upstream's, and finer ones below 100 ms, where most claims of a warm pool are.
const STARTUP_BUCKETS_MS: [f64; 24] = [
    1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 250.0, 500.0, 750.0, 1000.0, 1250.0,
    1500.0, 2000.0, 2500.0, 5000.0, 10000.0, 30000.0, 60000.0, 120_000.0, 240_000.0,
];
/// Upper bounds of the time of a pass, in seconds.
const PASS_BUCKETS: [f64; 11] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0,
];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CreationLabels {
    namespace: String,
    launch_type: String,
    sandbox_template: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StartupLabels {
    launch_type: String,
    sandbox_template: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClaimLabels {
    namespace: String,
    sandbox_template: String,
    launch_type: String,
    warmpool_name: String,
    pod_condition: &'static str,
    created_by: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PassLabels {
    controller: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabels {
    controller: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabels {
    controller: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabels {
    git_version: &'static str,
    git_commit: &'static str,
    build_date: &'static str,
    go_version: &'static str,
    compiler: &'static str,
    platform: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, EncodeLabelSet)]
struct SandboxLabels {
    namespace: String,
    ready_condition: &'static str,
    expired: &'static str,
    launch_type: String,
    sandbox_template: String,
    owned_by: &'static str,
    created_by: &'static str,
}

type StartupLatency = Family<StartupLabels, Histogram, fn() -> Histogram>;

fn startup_latency() -> StartupLatency {
    Family::new_with_constructor(|| Histogram::new(STARTUP_BUCKETS_MS))
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, EncodeLabelSet)]
struct PoolLabels {
    namespace: String,
    warmpool_name: String,
    sandbox_template: String,
    sandbox_status: &'static str,
}

/// All metrics of the controller.
pub struct Metrics {
    registry: Mutex<Registry>,
    sandboxes: Arc<OnceLock<Cache<Sandbox>>>,
    creation: Family<CreationLabels, Histogram, fn() -> Histogram>,
    startup: StartupLatency,
    controller_startup: StartupLatency,
    client_startup: StartupLatency,
    claims: Family<ClaimLabels, Counter>,
    pass_time: Family<PassLabels, Histogram, fn() -> Histogram>,
    passes: Family<ResultLabels, Counter>,
    failures: Family<FailureLabels, Counter>,
    leader: Gauge,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let sandboxes = Arc::new(OnceLock::new());
        let metrics = Self {
            registry: Mutex::new(Registry::default()),
            sandboxes: Arc::clone(&sandboxes),
            creation: Family::new_with_constructor(|| Histogram::new(CREATION_BUCKETS_MS)),
            startup: startup_latency(),
            controller_startup: startup_latency(),
            client_startup: startup_latency(),
            claims: Family::default(),
            pass_time: Family::new_with_constructor(|| Histogram::new(PASS_BUCKETS)),
            passes: Family::default(),
            failures: Family::default(),
            leader: Gauge::default(),
        };
        metrics.register(sandboxes);
        metrics
    }
}

impl Metrics {
    fn register(&self, sandboxes: Arc<OnceLock<Cache<Sandbox>>>) {
        let mut registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        registry.register(
            "agent_sandbox_creation_latency_ms",
            "Time from a Sandbox's creation to its first Ready, in milliseconds",
            self.creation.clone(),
        );
        for (name, help, latency) in [
            (
                "agent_sandbox_claim_startup_latency_ms",
                "Time from a SandboxClaim's creation to its first Ready, in milliseconds",
                &self.startup,
            ),
            (
                "agent_sandbox_claim_controller_startup_latency_ms",
                "Time from a controller's first sight of a SandboxClaim to its first Ready, in milliseconds",
                &self.controller_startup,
            ),
            (
                "agent_sandbox_client_claim_startup_latency_ms",
                "Time from a client's wish for a SandboxClaim to its first Ready, in milliseconds",
                &self.client_startup,
            ),
        ] {
            registry.register(name, help, latency.clone());
        }
        registry.register(
            "agent_sandbox_claim_creation",
            "SandboxClaims that got a Sandbox",
            self.claims.clone(),
        );
        registry.register(
            "controller_runtime_reconcile_time_seconds",
            "Time of a pass, in seconds",
            self.pass_time.clone(),
        );
        registry.register(
            "controller_runtime_reconcile",
            "Passes by result",
            self.passes.clone(),
        );
        registry.register(
            "controller_runtime_reconcile_errors",
            "Passes that failed, by reason",
            self.failures.clone(),
        );
        registry.register(
            "leader_election_master_status",
            "1 while this process leads",
            self.leader.clone(),
        );
        let build = Family::<BuildLabels, Gauge>::default();
        build.get_or_create(&build_labels()).set(1);
        registry.register("agent_sandbox_build_info", "What was built", build);
        registry.register_collector(Box::new(SandboxCount { sandboxes }));
    }

    /// The Sandboxes to count at each scrape; the first call holds.
    pub fn count_sandboxes_of(&self, cache: Cache<Sandbox>) {
        let _ = self.sandboxes.set(cache);
    }

    /// Says whether this process leads.
    pub fn set_leading(&self, leads: bool) {
        self.leader.set(i64::from(leads));
    }

    /// Counts a pass. `failure` is the reason of one that failed.
    pub fn observe_pass(
        &self,
        controller: &'static str,
        took: Duration,
        failure: Option<&'static str>,
        requeues: bool,
    ) {
        self.pass_time
            .get_or_create(&PassLabels { controller })
            .observe(took.as_secs_f64());
        let result = match (failure, requeues) {
            (Some(_), _) => "error",
            (None, true) => "requeue_after",
            (None, false) => "success",
        };
        self.passes
            .get_or_create(&ResultLabels { controller, result })
            .inc();
        if let Some(reason) = failure {
            self.failures
                .get_or_create(&FailureLabels { controller, reason })
                .inc();
        }
    }

    /// Records the time to the first Ready. A Sandbox that becomes Ready again, or after a suspension, is not new.
    pub fn observe_ready(
        &self,
        sandbox: &Sandbox,
        before: &SandboxStatus,
        after: &SandboxStatus,
        now: Timestamp,
    ) {
        if !became_ready_first(before, after) {
            return;
        }
        let Some(created) = &sandbox.metadata.creation_timestamp else {
            return;
        };
        let labels = CreationLabels {
            namespace: sandbox.namespace().unwrap_or_default(),
            launch_type: launch_type(sandbox),
            sandbox_template: template(sandbox),
        };
        self.creation
            .get_or_create(&labels)
            .observe(milliseconds(created.0, now));
    }

    /// Counts a claim that got its Sandbox.
    pub fn count_claim(&self, claim: &SandboxClaim, sandbox: &Sandbox) {
        let status = sandbox.status.as_ref();
        let ready =
            status.is_some_and(|status| conditions::is_true(&status.conditions, conditions::READY));
        let labels = ClaimLabels {
            namespace: claim.namespace().unwrap_or_default(),
            sandbox_template: template(sandbox),
            launch_type: launch_type(sandbox),
            warmpool_name: claim.spec.warm_pool_ref.name.clone(),
            pod_condition: if ready { "ready" } else { "not_ready" },
            created_by: claim
                .labels()
                .get(labels::CREATED_BY)
                .map_or("unknown", |creator| labels::created_by(creator)),
        };
        self.claims.get_or_create(&labels).inc();
    }

    /// Records how long a claim took to its first Ready, as its creation, the controller and the client saw it.
    pub fn observe_claim_ready(
        &self,
        claim: &SandboxClaim,
        sandbox: &Sandbox,
        first_seen: Timestamp,
        now: Timestamp,
    ) {
        let labels = StartupLabels {
            launch_type: launch_type(sandbox),
            sandbox_template: template(sandbox),
        };
        let asked = claim
            .annotations()
            .get(annotations::CLIENT_FIRST_REQUESTED_AT);
        let created = claim.metadata.creation_timestamp.as_ref();
        for (latency, since) in [
            (&self.startup, created.map(|time| time.0)),
            (&self.controller_startup, Some(first_seen)),
            (
                &self.client_startup,
                asked.and_then(|time| time.parse().ok()),
            ),
        ] {
            if let Some(since) = since {
                let observed = milliseconds(since, now);
                latency.get_or_create(&labels).observe(observed);
            }
        }
    }

    /// The metrics in OpenMetrics text format.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(
            &mut text,
            &self.registry.lock().unwrap_or_else(PoisonError::into_inner),
        )?;
        Ok(text)
    }
}

/// Clocks of several machines may differ: never less than nothing.
fn milliseconds(since: Timestamp, now: Timestamp) -> f64 {
    let span = (now - since).total(jiff::Unit::Millisecond);
    span.unwrap_or_default().max(0.0)
}

/// The conditions tell: Ready and Suspended are written together first, and each keeps its transition time until it changes.
fn became_ready_first(before: &SandboxStatus, after: &SandboxStatus) -> bool {
    if !conditions::is_true(&after.conditions, conditions::READY) {
        return false;
    }
    let (ready, suspended) = (
        conditions::find(&before.conditions, conditions::READY),
        conditions::find(&before.conditions, conditions::SUSPENDED),
    );
    match (ready, suspended) {
        (None, _) => true,
        (Some(ready), Some(suspended)) => {
            ready.status != "True"
                && suspended.status == "False"
                && ready.last_transition_time == suspended.last_transition_time
        }
        (Some(_), None) => false,
    }
}

fn launch_type(sandbox: &Sandbox) -> String {
    sandbox
        .labels()
        .get(labels::LAUNCH_TYPE)
        .cloned()
        .unwrap_or_else(|| "cold".to_owned())
}

fn template(sandbox: &Sandbox) -> String {
    let named = sandbox.annotations().get(annotations::SANDBOX_TEMPLATE_REF);
    named
        .filter(|name| !name.is_empty())
        .cloned()
        .unwrap_or_else(|| "unknown".to_owned())
}

fn build_labels() -> BuildLabels {
    BuildLabels {
        git_version: concat!("v", env!("CARGO_PKG_VERSION")),
        git_commit: option_env!("TORPOR_GIT_COMMIT").unwrap_or("unknown"),
        build_date: option_env!("TORPOR_BUILD_DATE").unwrap_or("unknown"),
        go_version: "none",
        compiler: "rustc",
        platform: concat!("linux/", "amd64"),
    }
}

/// Counts the Sandboxes of the cache when somebody looks.
struct SandboxCount {
    sandboxes: Arc<OnceLock<Cache<Sandbox>>>,
}

impl fmt::Debug for SandboxCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SandboxCount")
    }
}

impl Collector for SandboxCount {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut counts = BTreeMap::<SandboxLabels, i64>::new();
        let mut members = BTreeMap::<PoolLabels, i64>::new();
        let all = self.sandboxes.get().map(|cache| cache.filtered(|_| true));
        for sandbox in all.unwrap_or_default() {
            *counts.entry(sandbox_labels(&sandbox)).or_default() += 1;
            if let Some(labels) = pool_labels(&sandbox) {
                *members.entry(labels).or_default() += 1;
            }
        }
        let mut family = encoder.encode_descriptor(
            "agent_sandboxes",
            "Sandboxes by state",
            None,
            MetricType::Gauge,
        )?;
        for (labels, count) in counts {
            ConstGauge::new(count).encode(family.encode_family(&labels)?)?;
        }
        let mut family = encoder.encode_descriptor(
            "agent_sandbox_warmpool_size",
            "Unclaimed members of SandboxWarmPools",
            None,
            MetricType::Gauge,
        )?;
        for (labels, count) in members {
            ConstGauge::new(count).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// `None` for a Sandbox that no pool controls.
fn pool_labels(sandbox: &Sandbox) -> Option<PoolLabels> {
    let pool = controller_of_kind(sandbox, "SandboxWarmPool")?;
    let status = sandbox.status.as_ref();
    let ready =
        status.is_some_and(|status| conditions::is_true(&status.conditions, conditions::READY));
    Some(PoolLabels {
        namespace: sandbox.namespace().unwrap_or_default(),
        warmpool_name: pool.name.clone(),
        sandbox_template: template(sandbox),
        sandbox_status: if ready { "ready" } else { "not_ready" },
    })
}

fn sandbox_labels(sandbox: &Sandbox) -> SandboxLabels {
    let conditions = sandbox
        .status
        .as_ref()
        .map_or(&[][..], |status| &status.conditions);
    let ready = conditions::find(conditions, conditions::READY);
    let text = |yes: bool| if yes { "true" } else { "false" };
    let owner = sandbox
        .owner_references()
        .iter()
        .find(|owner| owner.controller == Some(true));
    SandboxLabels {
        namespace: sandbox.namespace().unwrap_or_default(),
        ready_condition: text(ready.is_some_and(|ready| ready.status == "True")),
        expired: text(ready.is_some_and(|ready| ready.reason == reasons::sandbox::SANDBOX_EXPIRED)),
        launch_type: launch_type(sandbox),
        sandbox_template: template(sandbox),
        owned_by: match owner.map(|owner| owner.kind.as_str()) {
            Some("SandboxClaim") => "SandboxClaim",
            Some("SandboxWarmPool") => "SandboxWarmPool",
            _ => "None",
        },
        created_by: sandbox
            .labels()
            .get(labels::CREATED_BY)
            .map_or("unknown", |creator| labels::created_by(creator)),
    }
}

#[cfg(test)]
mod tests {
    use torpor_api::conditions::{Draft, Status, set};

    use super::*;

    fn status(entries: &[(&'static str, Status, i64)]) -> SandboxStatus {
        let mut status = SandboxStatus::default();
        for (type_, value, second) in entries {
            let now = Timestamp::from_second(*second).unwrap();
            set(
                &mut status.conditions,
                Draft::new(type_, *value, "R", ""),
                None,
                now,
            );
        }
        status
    }

    #[test]
    fn only_the_first_ready_counts_as_creation() {
        use conditions::{READY, SUSPENDED};
        let ready = status(&[(SUSPENDED, Status::False, 1), (READY, Status::True, 9)]);
        let new = status(&[(SUSPENDED, Status::False, 1), (READY, Status::False, 1)]);
        let flapped = status(&[(SUSPENDED, Status::False, 1), (READY, Status::False, 5)]);
        let resumed = status(&[(SUSPENDED, Status::False, 7), (READY, Status::False, 3)]);
        assert!(became_ready_first(&SandboxStatus::default(), &ready));
        assert!(became_ready_first(&new, &ready));
        assert!(!became_ready_first(&flapped, &ready));
        assert!(!became_ready_first(&resumed, &ready));
        assert!(!became_ready_first(&ready, &ready));
    }

    fn claim() -> SandboxClaim {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
            "metadata": {
                "name": "c", "namespace": "ns", "creationTimestamp": "1970-01-01T00:00:00Z",
                "annotations": {"agents.x-k8s.io/client-first-requested-at": "1970-01-01T00:00:00.1Z"},
            },
            "spec": {"warmPoolRef": {"name": "p"}},
        }))
        .unwrap()
    }

    #[test]
    fn the_three_latencies_of_a_claim_have_upstreams_names_and_finer_buckets() {
        let metrics = Metrics::default();
        let at = |millisecond| Timestamp::from_millisecond(millisecond).unwrap();
        let mut sandbox = Sandbox::default();
        sandbox
            .labels_mut()
            .insert(labels::LAUNCH_TYPE.to_owned(), "warm".to_owned());
        metrics.observe_claim_ready(&claim(), &sandbox, at(104), at(112));
        let text = metrics.text().unwrap();
        let of = r#"launch_type="warm",sandbox_template="unknown""#;
        for line in [
            format!("agent_sandbox_claim_startup_latency_ms_bucket{{le=\"100.0\",{of}}} 0"),
            format!("agent_sandbox_claim_startup_latency_ms_bucket{{le=\"250.0\",{of}}} 1"),
            format!(
                "agent_sandbox_claim_controller_startup_latency_ms_bucket{{le=\"7.5\",{of}}} 0"
            ),
            format!(
                "agent_sandbox_claim_controller_startup_latency_ms_bucket{{le=\"10.0\",{of}}} 1"
            ),
            format!("agent_sandbox_client_claim_startup_latency_ms_bucket{{le=\"10.0\",{of}}} 0"),
            format!("agent_sandbox_client_claim_startup_latency_ms_bucket{{le=\"15.0\",{of}}} 1"),
        ] {
            assert!(text.contains(&line), "{line}\nnot in\n{text}");
        }
        for bound in [
            100, 250, 500, 750, 1000, 1250, 1500, 2000, 2500, 5000, 10_000, 30_000, 60_000,
            120_000, 240_000,
        ] {
            assert!(STARTUP_BUCKETS_MS.contains(&f64::from(bound)), "{bound}");
        }
    }

    #[test]
    fn dashboards_and_alerts_name_metrics_and_labels_that_the_controller_has() {
        let metrics = Metrics::default();
        let member: Sandbox = serde_json::from_value(serde_json::json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
            "metadata": {"name": "s", "namespace": "ns", "uid": "u", "resourceVersion": "1", "ownerReferences": [{
                "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool",
                "name": "p", "uid": "v", "controller": true,
            }]},
            "spec": {"podTemplate": {"spec": {"containers": []}}},
        }))
        .unwrap();
        let cache = Cache::new(|_: &Sandbox| None);
        cache.apply(kube::runtime::watcher::Event::Apply(member.clone()));
        metrics.count_sandboxes_of(cache);
        let now = Timestamp::from_millisecond(120).unwrap();
        metrics.observe_claim_ready(&claim(), &member, now, now);
        metrics.count_claim(&claim(), &member);
        metrics.observe_pass("sandbox", Duration::from_millis(2), Some("Refused"), false);
        let text = metrics.text().unwrap();
        for prefix in ["agent_sandbox", "controller_runtime_", "leader_election_"] {
            torpor_test_monitoring::check(prefix, &text);
        }
    }

    #[test]
    fn names_and_buckets_are_upstreams() {
        let metrics = Metrics::default();
        let mut sandbox = Sandbox::default();
        let created = Timestamp::from_second(0).unwrap();
        sandbox.metadata.creation_timestamp = Some(
            k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(created),
        );
        let ready = status(&[(conditions::READY, Status::True, 1)]);
        let now = Timestamp::from_millisecond(120).unwrap();
        metrics.observe_ready(&sandbox, &SandboxStatus::default(), &ready, now);
        metrics.observe_pass("sandbox", Duration::from_millis(2), Some("Refused"), false);
        let text = metrics.text().unwrap();
        for line in [
            r#"agent_sandbox_creation_latency_ms_bucket{le="100.0",namespace="",launch_type="cold",sandbox_template="unknown"} 0"#,
            r#"agent_sandbox_creation_latency_ms_bucket{le="250.0",namespace="",launch_type="cold",sandbox_template="unknown"} 1"#,
            r#"controller_runtime_reconcile_total{controller="sandbox",result="error"} 1"#,
            r#"controller_runtime_reconcile_errors_total{controller="sandbox",reason="Refused"} 1"#,
        ] {
            assert!(text.contains(line), "{line}\nnot in\n{text}");
        }
        assert!(
            text.contains("agent_sandbox_build_info{git_version=\"v"),
            "{text}"
        );
    }
}

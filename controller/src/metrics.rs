//! Metrics, under upstream's names (and those of controller-runtime and client-go for passes,
//! queues and calls), so that dashboards and alerts keep working.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use kube::ResourceExt;
use prometheus_client::{
    encoding::text::encode,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use torpor_api::{
    Sandbox, SandboxClaim, SandboxStatus, ShutdownPolicy, annotations, conditions, labels,
};

use crate::{transport::Requests, watches::extensions::controller_of_kind};

mod label_sets;
pub mod lifecycle;
mod scrape;

use self::label_sets::{
    BuildLabels, ClaimLabels, CreationLabels, ExpiredLabels, FailureLabels, FinishedLabels,
    KeyLabels, LifecycleLabels, NamespaceLabels, OutcomeLabels, PassLabels, QueueLabels,
    ResultLabels, StartupLabels,
};
use self::lifecycle::{Change, Transition};
pub use self::scrape::Counted;

/// Upper bounds of the latencies of Sandboxes: upstream's, and finer buckets below 50 ms.
const SANDBOX_BUCKETS_MS: [f64; 17] = [
    5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10000.0, 30000.0, 60000.0,
    120_000.0, 240_000.0, 300_000.0, 600_000.0,
];
/// Upper bounds of the claims' startup latencies: upstream's, and finer buckets below 100 ms, where
/// most claims of a warm pool are.
const STARTUP_BUCKETS_MS: [f64; 24] = [
    1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 250.0, 500.0, 750.0, 1000.0, 1250.0,
    1500.0, 2000.0, 2500.0, 5000.0, 10000.0, 30000.0, 60000.0, 120_000.0, 240_000.0,
];
/// Upper bounds of the duration of a pass, in seconds.
const PASS_BUCKETS: [f64; 11] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0,
];

/// Value of unknown labels.
const UNKNOWN: &str = "unknown";
/// Value of an unknown template in a claim's metrics, as upstream writes it.
const UNKNOWN_TEMPLATE: &str = "__unknown__";

type SandboxLatency<L> = Family<L, Histogram, fn() -> Histogram>;

fn sandbox_latency<L: Clone + std::hash::Hash + Eq>() -> SandboxLatency<L> {
    Family::new_with_constructor(|| Histogram::new(SANDBOX_BUCKETS_MS))
}

type StartupLatency = Family<StartupLabels, Histogram, fn() -> Histogram>;

fn startup_latency() -> StartupLatency {
    Family::new_with_constructor(|| Histogram::new(STARTUP_BUCKETS_MS))
}

/// All metrics of the controller.
pub struct Metrics {
    registry: Mutex<Registry>,
    counted: Arc<OnceLock<Counted>>,
    /// Change in progress and its beginning, by UID of the Sandbox that is being suspended or
    /// resumed.
    changing: Mutex<HashMap<String, (Change, Timestamp)>>,
    creation: SandboxLatency<CreationLabels>,
    suspends: Family<OutcomeLabels, Counter>,
    suspend_time: SandboxLatency<LifecycleLabels>,
    resumes: Family<OutcomeLabels, Counter>,
    resume_time: SandboxLatency<LifecycleLabels>,
    finished: Family<FinishedLabels, Counter>,
    expired: Family<ExpiredLabels, Counter>,
    startup: StartupLatency,
    controller_startup: StartupLatency,
    client_startup: StartupLatency,
    claims: Family<ClaimLabels, Counter>,
    pass_time: Family<PassLabels, Histogram, fn() -> Histogram>,
    passes: Family<ResultLabels, Counter>,
    failures: Family<FailureLabels, Counter>,
    depths: Family<QueueLabels, Gauge>,
    leader: Gauge,
    listed: Family<NamespaceLabels, Gauge>,
    older_keys: Family<KeyLabels, Gauge>,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            registry: Mutex::new(Registry::default()),
            counted: Arc::default(),
            changing: Mutex::default(),
            creation: sandbox_latency(),
            suspends: Family::default(),
            suspend_time: sandbox_latency(),
            resumes: Family::default(),
            resume_time: sandbox_latency(),
            finished: Family::default(),
            expired: Family::default(),
            startup: startup_latency(),
            controller_startup: startup_latency(),
            client_startup: startup_latency(),
            claims: Family::default(),
            pass_time: Family::new_with_constructor(|| Histogram::new(PASS_BUCKETS)),
            passes: Family::default(),
            failures: Family::default(),
            depths: Family::default(),
            leader: Gauge::default(),
            listed: Family::default(),
            older_keys: Family::default(),
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&self) {
        let mut registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        self.register_sandboxes(&mut registry);
        for (name, help, latency) in [
            (
                "agent_sandbox_claim_startup_latency_ms",
                "Time from a webhook's first sight of a SandboxClaim, or from its creation, to its first Ready, in milliseconds",
                &self.startup,
            ),
            (
                "agent_sandbox_claim_controller_startup_latency_ms",
                "Time from a controller's first sight of a SandboxClaim to its first Ready, in milliseconds",
                &self.controller_startup,
            ),
            (
                "agent_sandbox_client_claim_startup_latency_ms",
                "Time from a client's first request for a SandboxClaim to its first Ready, in milliseconds",
                &self.client_startup,
            ),
        ] {
            registry.register(name, help, latency.clone());
        }
        let (name, help) = (
            "agent_sandbox_claim_creation",
            "SandboxClaims that were assigned a Sandbox",
        );
        registry.register(name, help, self.claims.clone());
        self.register_runtime(&mut registry);
        let build = Family::<BuildLabels, Gauge>::default();
        build.get_or_create(&build_labels()).set(1);
        registry.register(
            "agent_sandbox_build_info",
            "Version and build of the controller",
            build,
        );
        let counted = Arc::clone(&self.counted);
        registry.register_collector(Box::new(scrape::Scrape { counted }));
    }

    fn register_sandboxes(&self, registry: &mut Registry) {
        registry.register(
            "agent_sandbox_creation_latency_ms",
            "Time from a Sandbox's creation to its first Ready, in milliseconds",
            self.creation.clone(),
        );
        for (name, help, counter) in [
            (
                "agent_sandbox_suspend",
                "Suspensions of Sandboxes by result",
                &self.suspends,
            ),
            (
                "agent_sandbox_resume",
                "Resumes of Sandboxes by result",
                &self.resumes,
            ),
        ] {
            registry.register(name, help, counter.clone());
        }
        for (name, help, latency) in [
            (
                "agent_sandbox_suspend_latency_ms",
                "Time from the first sight of operatingMode Suspended to Suspended=True, in milliseconds",
                &self.suspend_time,
            ),
            (
                "agent_sandbox_resume_latency_ms",
                "Time from the first sight of operatingMode Running after a suspension to Ready, in milliseconds",
                &self.resume_time,
            ),
        ] {
            registry.register(name, help, latency.clone());
        }
        registry.register(
            "agent_sandbox_finished",
            "Sandboxes whose Pod has ended",
            self.finished.clone(),
        );
        registry.register(
            "agent_sandbox_expired",
            "Sandboxes that expired",
            self.expired.clone(),
        );
    }

    /// Registers the metrics that Go controllers have.
    fn register_runtime(&self, registry: &mut Registry) {
        registry.register(
            "controller_runtime_reconcile_time_seconds",
            "Duration of a pass, in seconds",
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
            "workqueue_depth",
            "Objects waiting for a pass",
            self.depths.clone(),
        );
        registry.register(
            "leader_election_master_status",
            "1 while this process leads",
            self.leader.clone(),
        );
        registry.register(
            "torpor_controller_namespace_listed",
            "1 once everything in a namespace of --watch-namespaces has been listed, 0 before",
            self.listed.clone(),
        );
        registry.register(
            "torpor_controller_repository_older_key_objects",
            "Indexes and archive records of this cluster that need an encryption key other than the newest, as the last rotation found them",
            self.older_keys.clone(),
        );
    }

    /// Sets the objects to count at each scrape; only the first call has an effect.
    pub fn count(&self, counted: Counted) {
        let _ = self.counted.set(counted);
    }

    /// Registers the counter of a client's calls.
    pub fn show_requests(&self, requests: &Requests) {
        let mut registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        requests.register(&mut registry);
    }

    /// Sets the number of objects of a kind that wait for a pass.
    pub fn set_depth(&self, controller: &'static str, depth: usize) {
        let labels = QueueLabels {
            name: controller,
            controller,
        };
        let depth = i64::try_from(depth).unwrap_or(i64::MAX);
        self.depths.get_or_create(&labels).set(depth);
    }

    /// Sets whether this process leads.
    pub fn set_leading(&self, leads: bool) {
        self.leader.set(i64::from(leads));
    }

    /// Forgets the older keys of all repositories, before they are counted again.
    pub fn forget_older_keys(&self) {
        self.older_keys.clear();
    }

    /// Sets how many objects of a class' repository need an older encryption key.
    pub fn set_older_key(&self, class: &str, key: &str, objects: u64) {
        let labels = KeyLabels {
            class: class.to_owned(),
            key: key.to_owned(),
        };
        let objects = i64::try_from(objects).unwrap_or(i64::MAX);
        self.older_keys.get_or_create(&labels).set(objects);
    }

    /// Sets whether everything in a namespace has been listed.
    pub fn set_listed(&self, namespace: &str, listed: bool) {
        let labels = NamespaceLabels {
            namespace: namespace.to_owned(),
        };
        self.listed.get_or_create(&labels).set(i64::from(listed));
    }

    /// Counts a pass. `failure` is the reason of a failed pass.
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

    /// Counts the changes that a pass made to a Sandbox, once its status has them.
    pub fn observe_sandbox(
        &self,
        sandbox: &Sandbox,
        before: &SandboxStatus,
        after: &SandboxStatus,
        now: Timestamp,
    ) {
        let uid = sandbox.uid().unwrap_or_default();
        let resumes = matches!(self.changing().get(&uid), Some((Change::Resume, _)));
        let transitions = lifecycle::between(before, after, resumes);
        for transition in &transitions {
            self.count_transition(sandbox, &uid, *transition, now);
        }
        // A Sandbox that becomes Ready again, or after a suspension, is not new.
        if !transitions.contains(&Transition::Resumed)
            && became_ready_first(before, after)
            && let Some(created) = &sandbox.metadata.creation_timestamp
        {
            let labels = CreationLabels {
                namespace: sandbox.namespace().unwrap_or_default(),
                launch_type: launch_type(sandbox),
                sandbox_template: self.template_of_claim(sandbox),
            };
            self.creation
                .get_or_create(&labels)
                .observe(milliseconds(created.0, now));
        }
    }

    fn count_transition(
        &self,
        sandbox: &Sandbox,
        uid: &str,
        transition: Transition,
        now: Timestamp,
    ) {
        let labels = self.lifecycle_labels(sandbox);
        match transition {
            Transition::SuspendRequested => {
                count_outcome(&self.suspends, labels, "requested");
                self.begin(uid, Change::Suspend, now);
            }
            Transition::Suspended(result) => {
                count_outcome(&self.suspends, labels.clone(), result);
                self.end(uid, Change::Suspend, now, &self.suspend_time, &labels);
            }
            Transition::ResumeRequested => {
                count_outcome(&self.resumes, labels, "requested");
                self.begin(uid, Change::Resume, now);
            }
            Transition::Resumed => {
                count_outcome(&self.resumes, labels.clone(), "ready");
                self.end(uid, Change::Resume, now, &self.resume_time, &labels);
            }
            Transition::Finished(reason) => {
                let LifecycleLabels {
                    namespace,
                    sandbox_template,
                    owned_by,
                } = labels;
                let labels = FinishedLabels {
                    namespace,
                    sandbox_template,
                    owned_by,
                    reason,
                };
                self.finished.get_or_create(&labels).inc();
            }
            Transition::Expired => {
                let LifecycleLabels {
                    namespace,
                    sandbox_template,
                    owned_by,
                } = labels;
                let labels = ExpiredLabels {
                    namespace,
                    sandbox_template,
                    owned_by,
                    shutdown_policy: match sandbox.spec.shutdown_policy {
                        Some(ShutdownPolicy::Delete) => "Delete",
                        _ => "Retain",
                    },
                };
                self.expired.get_or_create(&labels).inc();
            }
        }
    }

    /// Counts a failed pass that was to suspend or resume a Sandbox.
    pub fn count_failed_change(&self, sandbox: &Sandbox) {
        let counter = match lifecycle::under_way(sandbox) {
            Some(Change::Suspend) => &self.suspends,
            Some(Change::Resume) => &self.resumes,
            None => return,
        };
        count_outcome(counter, self.lifecycle_labels(sandbox), "error");
    }

    /// Forgets the deleted Sandbox with this UID.
    pub fn forget(&self, uid: &str) {
        self.changing().remove(uid);
    }

    fn begin(&self, uid: &str, change: Change, now: Timestamp) {
        self.changing().insert(uid.to_owned(), (change, now));
    }

    /// Records the duration of a change, if this process saw its beginning.
    fn end(
        &self,
        uid: &str,
        change: Change,
        now: Timestamp,
        latency: &SandboxLatency<LifecycleLabels>,
        labels: &LifecycleLabels,
    ) {
        if let Some((begun, since)) = self.changing().remove(uid)
            && begun == change
        {
            latency
                .get_or_create(labels)
                .observe(milliseconds(since, now));
        }
    }

    // A panic elsewhere leaves the map unchanged.
    fn changing(&self) -> MutexGuard<'_, HashMap<String, (Change, Timestamp)>> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a claim that was assigned its Sandbox.
    pub fn count_claim(&self, claim: &SandboxClaim, sandbox: &Sandbox) {
        let status = sandbox.status.as_ref();
        let ready =
            status.is_some_and(|status| conditions::is_true(&status.conditions, conditions::READY));
        let labels = ClaimLabels {
            namespace: claim.namespace().unwrap_or_default(),
            sandbox_template: self.template_of_claim(sandbox),
            launch_type: launch_type(sandbox),
            warmpool_name: claim.spec.warm_pool_ref.name.clone(),
            pod_condition: if ready { "ready" } else { "not_ready" },
            created_by: claim
                .labels()
                .get(labels::CREATED_BY)
                .map_or(UNKNOWN, |creator| labels::created_by(creator)),
        };
        self.claims.get_or_create(&labels).inc();
    }

    /// Records the time from a claim's creation, the controller's first sight and the client's
    /// request to its first Ready.
    pub fn observe_claim_ready(
        &self,
        claim: &SandboxClaim,
        sandbox: &Sandbox,
        first_seen: Timestamp,
        now: Timestamp,
    ) {
        let labels = StartupLabels {
            launch_type: launch_type(sandbox),
            sandbox_template: self.template_of_claim(sandbox),
        };
        let asked = claim
            .annotations()
            .get(annotations::CLIENT_FIRST_REQUESTED_AT);
        let admitted = claim
            .annotations()
            .get(annotations::WEBHOOK_FIRST_OBSERVED_AT)
            .and_then(|time| time.parse().ok());
        let created = claim.metadata.creation_timestamp.as_ref();
        for (latency, since) in [
            (
                &self.startup,
                admitted.or_else(|| created.map(|time| time.0)),
            ),
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

    fn lifecycle_labels(&self, sandbox: &Sandbox) -> LifecycleLabels {
        LifecycleLabels {
            namespace: sandbox.namespace().unwrap_or_default(),
            sandbox_template: self.template(sandbox).unwrap_or_else(|| UNKNOWN.to_owned()),
            owned_by: owned_by(sandbox),
        }
    }

    fn template_of_claim(&self, sandbox: &Sandbox) -> String {
        let template = self.template(sandbox);
        template.unwrap_or_else(|| UNKNOWN_TEMPLATE.to_owned())
    }

    fn template(&self, sandbox: &Sandbox) -> Option<String> {
        self.counted.get()?.template(sandbox)
    }

    /// Returns the metrics in OpenMetrics text format.
    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode(
            &mut text,
            &self.registry.lock().unwrap_or_else(PoisonError::into_inner),
        )?;
        Ok(text)
    }
}

/// Returns the time between two instants in milliseconds, at least 0: the clocks of several
/// machines may differ.
fn milliseconds(since: Timestamp, now: Timestamp) -> f64 {
    let span = (now - since).total(jiff::Unit::Millisecond);
    span.unwrap_or_default().max(0.0)
}

/// Reports whether the Sandbox became Ready for the first time.
///
/// Ready and Suspended are first written together, and each keeps its transition time until it
/// changes.
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

fn count_outcome(
    counter: &Family<OutcomeLabels, Counter>,
    labels: LifecycleLabels,
    result: &'static str,
) {
    let LifecycleLabels {
        namespace,
        sandbox_template,
        owned_by,
    } = labels;
    let labels = OutcomeLabels {
        namespace,
        sandbox_template,
        owned_by,
        result,
    };
    counter.get_or_create(&labels).inc();
}

fn launch_type(sandbox: &Sandbox) -> &'static str {
    let label = sandbox.labels().get(labels::LAUNCH_TYPE);
    if label.is_some_and(|value| value == "warm") {
        "warm"
    } else {
        "cold"
    }
}

fn owned_by(sandbox: &Sandbox) -> &'static str {
    ["SandboxClaim", "SandboxWarmPool"]
        .into_iter()
        .find(|kind| controller_of_kind(sandbox, kind).is_some())
        .unwrap_or("None")
}

#[cfg(target_arch = "aarch64")]
const PLATFORM: &str = "linux/arm64";
#[cfg(not(target_arch = "aarch64"))]
const PLATFORM: &str = "linux/amd64";

fn build_labels() -> BuildLabels {
    BuildLabels {
        git_version: concat!("v", env!("CARGO_PKG_VERSION")),
        git_commit: env!("TORPOR_GIT_COMMIT"),
        build_date: option_env!("TORPOR_BUILD_DATE").unwrap_or("unknown"),
        go_version: "none",
        compiler: "rustc",
        platform: PLATFORM,
    }
}

#[cfg(test)]
mod tests;

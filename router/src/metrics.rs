//! Metrics: upstream's, with its names, labels and buckets, and Torpor's own.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use http::{Method, StatusCode};
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram, info::Info},
    registry::Registry,
};

/// Histogram bounds of request durations in seconds: upstream's, and Torpor's below 5 ms.
const SECONDS: [f64; 17] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 180.0,
];
/// Histogram bounds of body sizes in bytes; upstream's.
const BYTES: [f64; 8] = [
    100.0,
    1024.0,
    10240.0,
    102_400.0,
    1_048_576.0,
    10_485_760.0,
    104_857_600.0,
    1_073_741_824.0,
];

/// Status code that counts a request whose client disconnected before the response. It is never
/// sent.
pub const CLIENT_GONE: u16 = 499;

/// Value of `sandbox_namespace` for requests without a known sandbox.
pub const NO_NAMESPACE: &str = "-";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RequestLabels {
    pub method: &'static str,
    pub code: u16,
    pub sandbox_namespace: Arc<str>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct NamespaceLabel {
    pub sandbox_namespace: Arc<str>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabels {
    pub sandbox_namespace: Arc<str>,
    pub reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct DecisionLabels {
    pub sandbox_namespace: Arc<str>,
    pub decision: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OutcomeLabel {
    pub outcome: &'static str,
}

/// Metrics of the router.
pub struct Metrics {
    registry: Mutex<Registry>,
    pub requests: Family<RequestLabels, Counter>,
    pub seconds: Family<RequestLabels, Histogram>,
    pub inflight: Gauge,
    pub upstream_errors: Family<ReasonLabels, Counter>,
    pub upstream_retries: Family<NamespaceLabel, Counter>,
    pub cache_invalidations: Family<NamespaceLabel, Counter>,
    pub authz_decisions: Family<DecisionLabels, Counter>,
    pub cert_reloads: Family<OutcomeLabel, Counter>,
    pub client_rx: Family<NamespaceLabel, Counter>,
    pub client_tx: Family<NamespaceLabel, Counter>,
    pub upstream_rx: Family<NamespaceLabel, Counter>,
    pub upstream_tx: Family<NamespaceLabel, Counter>,
    pub request_bytes: Family<NamespaceLabel, Histogram>,
    pub response_bytes: Family<NamespaceLabel, Histogram>,
    pub held: Gauge,
    pub tunnels: Gauge,
    pub calls: Gauge,
    pub refusals: Family<ReasonLabels, Counter>,
    /// Connections evicted at the connection limit.
    pub evicted_connections: Counter,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

fn sizes() -> Family<NamespaceLabel, Histogram> {
    Family::new_with_constructor(|| Histogram::new(BYTES))
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            registry: Mutex::default(),
            requests: Family::default(),
            seconds: Family::new_with_constructor(|| Histogram::new(SECONDS)),
            inflight: Gauge::default(),
            upstream_errors: Family::default(),
            upstream_retries: Family::default(),
            cache_invalidations: Family::default(),
            authz_decisions: Family::default(),
            cert_reloads: Family::default(),
            client_rx: Family::default(),
            client_tx: Family::default(),
            upstream_rx: Family::default(),
            upstream_tx: Family::default(),
            request_bytes: sizes(),
            response_bytes: sizes(),
            held: Gauge::default(),
            tunnels: Gauge::default(),
            calls: Gauge::default(),
            refusals: Family::default(),
            evicted_connections: Counter::default(),
        };
        metrics.register();
        metrics
    }
}

impl Metrics {
    fn register(&self) {
        let mut registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let upstreams = registry.sub_registry_with_prefix("sandbox_router");
        upstreams.register(
            "requests",
            "Requests by method, status code and namespace",
            self.requests.clone(),
        );
        upstreams.register(
            "request_duration_seconds",
            "Duration of requests up to the end of the response",
            self.seconds.clone(),
        );
        upstreams.register(
            "inflight_requests",
            "Requests in flight",
            self.inflight.clone(),
        );
        upstreams.register(
            "upstream_errors",
            "Failures to reach sandboxes",
            self.upstream_errors.clone(),
        );
        upstreams.register(
            "upstream_retries",
            "Repeated connection attempts",
            self.upstream_retries.clone(),
        );
        upstreams.register(
            "cache_invalidations",
            "Cached addresses dropped because the Pod no longer had them",
            self.cache_invalidations.clone(),
        );
        upstreams.register(
            "authz_decisions",
            "Authorization decisions",
            self.authz_decisions.clone(),
        );
        upstreams.register(
            "cert_reloads",
            "Reloads of the server's certificate",
            self.cert_reloads.clone(),
        );
        upstreams.register(
            "client_rx_bytes",
            "Bytes of request bodies from clients",
            self.client_rx.clone(),
        );
        upstreams.register(
            "client_tx_bytes",
            "Bytes of response bodies to clients",
            self.client_tx.clone(),
        );
        upstreams.register(
            "upstream_rx_bytes",
            "Bytes of bodies from sandboxes",
            self.upstream_rx.clone(),
        );
        upstreams.register(
            "upstream_tx_bytes",
            "Bytes of bodies to sandboxes",
            self.upstream_tx.clone(),
        );
        upstreams.register(
            "request_size_bytes",
            "Sizes of request bodies",
            self.request_bytes.clone(),
        );
        upstreams.register(
            "response_size_bytes",
            "Sizes of response bodies",
            self.response_bytes.clone(),
        );
        upstreams.register("build", "Build of the router", build_info());
        let torpors = registry.sub_registry_with_prefix("torpor_router");
        torpors.register(
            "held_requests",
            "Requests that wait for their sandbox",
            self.held.clone(),
        );
        torpors.register("tunnels", "Upgraded connections", self.tunnels.clone());
        torpors.register("grpc_calls", "gRPC calls in flight", self.calls.clone());
        torpors.register(
            "refusals",
            "Requests that the router refused, by reason",
            self.refusals.clone(),
        );
        torpors.register(
            "connections_made_way",
            "Idle connections closed at the connection limit to admit others",
            self.evicted_connections.clone(),
        );
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

#[cfg(target_arch = "aarch64")]
const PLATFORM: &str = "linux/arm64";
#[cfg(not(target_arch = "aarch64"))]
const PLATFORM: &str = "linux/amd64";

fn build_info() -> Info<Vec<(&'static str, &'static str)>> {
    Info::new(vec![
        ("git_version", concat!("v", env!("CARGO_PKG_VERSION"))),
        ("git_commit", env!("TORPOR_GIT_COMMIT")),
        (
            "build_date",
            option_env!("TORPOR_BUILD_DATE").unwrap_or("unknown"),
        ),
        ("go_version", "none"),
        ("compiler", "rustc"),
        ("platform", PLATFORM),
    ])
}

/// Returns the label of a method; all unknown methods share one.
///
/// Clients may invent methods, and label values are never removed.
pub fn method(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "PUT" => "PUT",
        "PATCH" => "PATCH",
        "DELETE" => "DELETE",
        "OPTIONS" => "OPTIONS",
        _ => "other",
    }
}

/// Returns the label of a status code; unknown codes of a hundred share its first code.
///
/// Sandboxes may invent codes.
pub fn code(code: u16) -> u16 {
    let known = StatusCode::from_u16(code).is_ok_and(|code| code.canonical_reason().is_some());
    if known || code == CLIENT_GONE {
        code
    } else {
        code / 100 * 100
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Exposition in which each metric has a sample. Families without one are not shown.
    fn text_with_everything() -> String {
        let metrics = Metrics::default();
        let namespace: Arc<str> = "ns".into();
        let labels = RequestLabels {
            method: "GET",
            code: 200,
            sandbox_namespace: Arc::clone(&namespace),
        };
        metrics.requests.get_or_create(&labels).inc();
        metrics.seconds.get_or_create(&labels).observe(0.004);
        metrics
            .authz_decisions
            .get_or_create(&DecisionLabels {
                sandbox_namespace: Arc::clone(&namespace),
                decision: "allow",
            })
            .inc();
        metrics
            .upstream_errors
            .get_or_create(&ReasonLabels {
                sandbox_namespace: Arc::clone(&namespace),
                reason: "dial",
            })
            .inc();
        let label = NamespaceLabel {
            sandbox_namespace: namespace,
        };
        metrics.upstream_retries.get_or_create(&label).inc();
        metrics.cache_invalidations.get_or_create(&label).inc();
        metrics.client_rx.get_or_create(&label).inc();
        metrics.client_tx.get_or_create(&label).inc();
        metrics.upstream_rx.get_or_create(&label).inc();
        metrics.upstream_tx.get_or_create(&label).inc();
        metrics.request_bytes.get_or_create(&label).observe(1.0);
        metrics.response_bytes.get_or_create(&label).observe(1.0);
        metrics
            .cert_reloads
            .get_or_create(&OutcomeLabel { outcome: "success" })
            .inc();
        metrics
            .refusals
            .get_or_create(&ReasonLabels {
                sandbox_namespace: NO_NAMESPACE.into(),
                reason: "suspended",
            })
            .inc();
        metrics.text().unwrap()
    }

    #[test]
    fn reference_of_metrics_is_current() {
        let (text, source) = (text_with_everything(), include_str!("metrics.rs"));
        let title = "Metrics of the router";
        torpor_test_reference::assert_metrics_page("metrics-router.md", title, &text, source);
    }

    #[test]
    fn names_and_labels_are_upstreams() {
        let text = text_with_everything();
        torpor_test_monitoring::check("sandbox_router_", &text);
        torpor_test_monitoring::check("torpor_router_", &text);
        for line in [
            r#"sandbox_router_requests_total{method="GET",code="200",sandbox_namespace="ns"} 1"#,
            r#"sandbox_router_request_duration_seconds_bucket{le="0.005",method="GET",code="200",sandbox_namespace="ns"} 1"#,
            r#"sandbox_router_inflight_requests 0"#,
            r#"sandbox_router_upstream_errors_total{sandbox_namespace="ns",reason="dial"} 1"#,
            r#"sandbox_router_upstream_retries_total{sandbox_namespace="ns"} 1"#,
            r#"sandbox_router_cache_invalidations_total{sandbox_namespace="ns"} 1"#,
            r#"sandbox_router_authz_decisions_total{sandbox_namespace="ns",decision="allow"} 1"#,
            r#"sandbox_router_cert_reloads_total{outcome="success"} 1"#,
            r#"sandbox_router_client_rx_bytes_total{sandbox_namespace="ns"} 1"#,
            r#"sandbox_router_build_info{git_version="v"#,
        ] {
            assert!(text.contains(line), "{line}\nnot in\n{text}");
        }
    }

    #[test]
    fn invented_codes_share_few_labels() {
        for (given, label) in [(200, 200), (404, 404), (499, 499), (299, 200), (999, 900)] {
            assert_eq!(code(given), label);
        }
        let labels: std::collections::HashSet<u16> = (100..1000).map(code).collect();
        assert!(labels.len() < 75, "{}", labels.len());
    }

    #[test]
    fn invented_methods_share_one_label() {
        assert_eq!(method(&Method::GET), "GET");
        assert_eq!(method(&"BREW".parse().unwrap()), "other");
    }
}

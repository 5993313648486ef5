//! A span for each request, with upstream's name and attributes
//! (sandbox-router/observability/tracing.go).
//!
//! The span belongs to the trace in the client's `traceparent`; the sandbox receives the span as
//! its `traceparent`. Without `--enable-tracing` no layer enables [`TARGET`]: no spans are made,
//! and the client's trace headers pass unchanged.

use http::{HeaderMap, Method};
use torpor_daemon::spans;
use tracing::{Span, field::Empty};

use crate::{metrics, target::Target};

/// Target of exported spans, which the log excludes.
pub const TARGET: &str = "torpor_router::spans";
/// Upstream's name of the service and of the tracer.
pub const SERVICE: &str = "sandbox-router";

/// Header or trailer with the number of a gRPC status.
const GRPC_STATUS: &str = "grpc-status";

/// Most bytes of a path in a span: a path may be as long as a request's head, and spans wait in
/// memory for the collector.
const LONGEST_PATH: usize = 1024;

/// Returns the span of a request, from its head to the end of its response.
pub fn request(method: &Method, path: &str, headers: &HeaderMap) -> Span {
    let span = tracing::info_span!(
        target: TARGET,
        "request",
        otel.name = Empty,
        otel.kind = "server",
        http.method = Empty,
        http.target = Empty,
        http.status_code = Empty,
        sandbox.id = Empty,
        sandbox.namespace = Empty,
        grpc.status_code = Empty,
    );
    if !span.is_disabled() {
        let method = metrics::method(method);
        span.record("otel.name", format!("HTTP {method}"));
        span.record("http.method", method);
        span.record(
            "http.target",
            &path[..path.floor_char_boundary(LONGEST_PATH)],
        );
        spans::continue_from(&span, headers);
    }
    span
}

/// Records which sandbox a request is for.
pub fn record_target(span: &Span, target: &Target) {
    span.record("sandbox.id", target.id.as_str());
    span.record("sandbox.namespace", target.namespace.as_str());
}

/// Records the gRPC status, if these headers or trailers have one.
pub fn record_grpc_status(span: &Span, trailers: &HeaderMap) {
    let status = trailers
        .get(GRPC_STATUS)
        .and_then(|value| value.to_str().ok()?.parse::<u16>().ok());
    if let Some(status) = status {
        // Upstream records a string.
        span.record("grpc.status_code", status.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_an_exporter_there_is_no_span_and_headers_stay() {
        let mut headers = HeaderMap::new();
        let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        headers.insert("traceparent", http::HeaderValue::from_static(parent));
        let span = request(&Method::GET, "/", &headers);
        assert!(span.is_disabled());
        spans::hand_on(&span, &mut headers);
        assert_eq!(headers["traceparent"], parent);
        assert_eq!(spans::ids(&span), None);
    }
}

//! A span for each request, under upstream's name and with its attributes
//! (sandbox-router/observability/tracing.go). It is in the trace that the client's `traceparent`
//! names, and the sandbox gets its own name as `traceparent`.
//!
//! Without `--enable-tracing` nobody listens to [`TARGET`]: its spans are never made, and what the
//! client says of its trace goes on as it is.

use http::{HeaderMap, Method};
use torpor_daemon::spans;
use tracing::{Span, field::Empty};

use crate::{metrics, target::Target};

/// Target of the spans that are exported; the log leaves it out.
pub const TARGET: &str = "torpor_router::spans";
/// Upstream's name of the service and of the tracer.
pub const SERVICE: &str = "sandbox-router";

/// Number of a gRPC status in the headers or trailers of an answer.
const GRPC_STATUS: &str = "grpc-status";

/// Most bytes of a path that a span has: a client writes paths of up to a head's length, and spans
/// wait in memory for the collector.
const LONGEST_PATH: usize = 1024;

/// The span of a request, from its head to the end of its answer.
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

/// Says which sandbox a request is for.
pub fn is_for(span: &Span, target: &Target) {
    span.record("sandbox.id", target.id.as_str());
    span.record("sandbox.namespace", target.namespace.as_str());
}

/// Says how a gRPC call ended, if these headers or trailers do.
pub fn ended(span: &Span, trailers: &HeaderMap) {
    let status = trailers
        .get(GRPC_STATUS)
        .and_then(|value| value.to_str().ok()?.parse::<u16>().ok());
    if let Some(status) = status {
        // A text, as upstream's.
        span.record("grpc.status_code", status.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_nobody_exports_there_is_no_span_and_headers_stay() {
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

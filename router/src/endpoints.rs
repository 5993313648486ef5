//! Health and metrics, as upstream's router answers them.

use std::sync::Arc;

use axum::{Router, http::StatusCode, routing::get};
use tokio_util::sync::CancellationToken;

use crate::{directory::Directory, gate::Gate, metrics::Metrics, proxy::Proxy};

/// Content type of the metrics.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Answers `/healthz` always and `/readyz` while requests can be carried out: the caches are full and nobody has asked for the end.
pub fn probes(directory: Directory, stopping: CancellationToken) -> Router {
    let ready = move || {
        let answer = if stopping.is_cancelled() {
            (StatusCode::SERVICE_UNAVAILABLE, "draining")
        } else if directory.is_ready() {
            (StatusCode::OK, "ok")
        } else {
            (
                StatusCode::SERVICE_UNAVAILABLE,
                "the watch caches are not filled yet",
            )
        };
        std::future::ready(answer)
    };
    let healthy = || async { ([("content-type", "application/json")], r#"{"status":"ok"}"#) };
    Router::new()
        .route("/healthz", get(healthy))
        .route("/readyz", get(ready))
}

/// Answers `/metrics`.
pub fn metrics(proxy: Arc<Proxy>) -> Router {
    let answer = move || std::future::ready(text(&proxy.metrics, &proxy.gate));
    Router::new().route("/metrics", get(answer))
}

fn text(metrics: &Metrics, gate: &Gate) -> (StatusCode, [(&'static str, &'static str); 1], String) {
    metrics
        .held
        .set(i64::try_from(gate.held()).unwrap_or(i64::MAX));
    match metrics.text() {
        Ok(text) => (StatusCode::OK, [("content-type", OPEN_METRICS)], text),
        Err(error) => (
            StatusCode::INTERNAL_SERVER_ERROR,
            [("content-type", "text/plain")],
            error.to_string(),
        ),
    }
}

//! HTTP servers for probes and metrics.

use std::sync::Arc;

use axum::{Router, http::StatusCode, routing::get};
pub use torpor_daemon::serve::serve;

use crate::context::Context;

/// Content type of the metrics.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Returns the router of `/healthz` and `/readyz`. A replica that waits for the lease is healthy
/// and ready, because it can take over.
pub fn probes() -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(|| async { "ok" }))
}

/// Returns the router of `/metrics`.
pub fn metrics(context: Arc<Context>) -> Router {
    let answer = move || {
        let context = Arc::clone(&context);
        async move {
            match context.metrics_text() {
                Ok(text) => (StatusCode::OK, [("content-type", OPEN_METRICS)], text),
                Err(error) => {
                    let text = error.to_string();
                    (
                        StatusCode::INTERNAL_SERVER_ERROR,
                        [("content-type", "text/plain")],
                        text,
                    )
                }
            }
        }
    };
    Router::new().route("/metrics", get(answer))
}

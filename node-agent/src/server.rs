//! Health and metrics over HTTP.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Serves `/healthz` and `/readyz`.
pub(crate) async fn health(
    address: SocketAddr,
    ready: Arc<AtomicBool>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let answer = move || {
        let ready = ready.clone();
        async move {
            if ready.load(Ordering::Relaxed) {
                (StatusCode::OK, "ok")
            } else {
                (
                    StatusCode::SERVICE_UNAVAILABLE,
                    "the watch caches are not filled yet",
                )
            }
        }
    };
    let router = Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(answer));
    serve(address, router, stop).await
}

/// Serves `/metrics` in the OpenMetrics text format.
pub(crate) async fn metrics(
    address: SocketAddr,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let answer = move || {
        let metrics = metrics.clone();
        async move {
            let mut text = String::new();
            match prometheus_client::encoding::text::encode(&mut text, &metrics.registry) {
                Ok(()) => (StatusCode::OK, [("content-type", OPEN_METRICS)], text),
                Err(error) => (
                    StatusCode::INTERNAL_SERVER_ERROR,
                    [("content-type", "text/plain")],
                    error.to_string(),
                ),
            }
        }
    };
    serve(address, Router::new().route("/metrics", get(answer)), stop).await
}

async fn serve(address: SocketAddr, router: Router, stop: CancellationToken) -> anyhow::Result<()> {
    let listener = torpor_daemon::serve::listen(address)
        .await
        .with_context(|| format!("cannot listen on {address}"))?;
    torpor_daemon::serve::serve_on(listener, router, stop).await;
    Ok(())
}

//! Health and metrics over HTTP.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use tokio_util::sync::CancellationToken;

use crate::report::metrics::Metrics;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The agent's readiness: None when the agent is ready, or else the reason to wait. Clones share
/// the state.
#[derive(Debug, Clone)]
pub(crate) struct Readiness(Arc<Mutex<Option<String>>>);

impl Default for Readiness {
    fn default() -> Self {
        let why = "the agent has just started".to_owned();
        Self(Arc::new(Mutex::new(Some(why))))
    }
}

impl Readiness {
    /// Marks the agent as not ready, for this reason.
    pub(crate) fn not_yet(&self, why: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
    }

    /// Marks the agent as ready.
    pub(crate) fn reached(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn reason_to_wait(&self) -> Option<String> {
        let why = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        why.clone()
    }

    #[cfg(test)]
    pub(crate) fn words(&self) -> String {
        self.reason_to_wait().unwrap_or_default()
    }
}

/// Serves `/healthz` and `/readyz`.
pub(crate) async fn health(
    address: SocketAddr,
    ready: Readiness,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let answer = move || {
        let why = ready.reason_to_wait();
        async move {
            match why {
                None => (StatusCode::OK, "ok".to_owned()),
                Some(why) => (StatusCode::SERVICE_UNAVAILABLE, why),
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

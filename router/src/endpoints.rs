//! Endpoints for probes and metrics, as upstream's router has them.

use std::sync::Arc;

use axum::{Router, http::StatusCode, routing::get};
use tokio_util::sync::CancellationToken;

use crate::{directory::Directory, gate::Gate, metrics::Metrics, proxy::Proxy};

/// Content type of the metrics.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Serves `/healthz`, which always succeeds, and `/readyz`.
///
/// `/readyz` succeeds from the time both watch caches are filled until the router drains.
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

/// Serves `/metrics`.
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

#[cfg(test)]
mod tests {
    use axum::{body::Body, http::Request};
    use http_body_util::BodyExt;
    use kube::runtime::watcher::Event;
    use tower::ServiceExt;

    use super::*;
    use crate::address::AddressPolicy;

    async fn ask(router: &Router, path: &str) -> (u16, String) {
        let request = Request::builder().uri(path).body(Body::empty()).unwrap();
        let response = router.clone().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn readyz_succeeds_between_full_caches_and_drain_and_healthz_always() {
        let (directory, stopping) = (
            Directory::new(AddressPolicy::default()),
            CancellationToken::new(),
        );
        let router = probes(directory.clone(), stopping.clone());
        assert_eq!(ask(&router, "/readyz").await.0, 503);
        directory.apply_sandbox(Event::InitDone);
        assert_eq!(ask(&router, "/readyz").await.0, 503, "Pods are missing");
        directory.apply_pod(Event::InitDone);
        assert_eq!(ask(&router, "/readyz").await, (200, "ok".to_owned()));
        stopping.cancel();
        assert_eq!(ask(&router, "/readyz").await, (503, "draining".to_owned()));
        assert_eq!(
            ask(&router, "/healthz").await,
            (200, r#"{"status":"ok"}"#.to_owned())
        );
    }
}

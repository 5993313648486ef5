//! The two small HTTP servers: probes and metrics.

use std::{io, net::SocketAddr, sync::Arc};

use axum::{Router, http::StatusCode, routing::get};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::context::Context;

/// Content type of the metrics.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Answers `/healthz` and `/readyz`. A replica that waits for the lease is healthy and ready: it would work if it had to.
pub fn probes() -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(|| async { "ok" }))
}

/// Answers `/metrics`.
pub fn metrics(context: Arc<Context>) -> Router {
    let answer = move || {
        let context = Arc::clone(&context);
        async move {
            match context.metrics.text() {
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

/// Opens the port now, so that a taken port is an error at once, and serves in the background.
pub async fn serve(
    address: SocketAddr,
    router: Router,
    shutdown: CancellationToken,
) -> io::Result<SocketAddr> {
    let listener = match TcpListener::bind(address).await {
        // A machine without IPv6 has no wildcard of both families.
        Err(_) if address.ip().is_unspecified() && address.is_ipv6() => {
            TcpListener::bind((std::net::Ipv4Addr::UNSPECIFIED, address.port())).await?
        }
        other => other?,
    };
    let bound = listener.local_addr()?;
    tokio::spawn(async move {
        let server =
            axum::serve(listener, router).with_graceful_shutdown(shutdown.cancelled_owned());
        if let Err(error) = server.await {
            tracing::error!(%error, %bound, "the HTTP server ended");
        }
    });
    Ok(bound)
}

//! Small HTTP servers: probes and metrics.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
};

use axum::Router;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Opens the port.
pub async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        // A machine without IPv6 has no wildcard of both families.
        Err(_) if address.ip().is_unspecified() && address.is_ipv6() => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        other => other,
    }
}

/// Opens the port now, so that a taken port is an error at once, and serves in the background.
pub async fn serve(
    address: SocketAddr,
    router: Router,
    shutdown: CancellationToken,
) -> io::Result<SocketAddr> {
    let listener = listen(address).await?;
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

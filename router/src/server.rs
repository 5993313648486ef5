//! Listeners and connections: limits on what a client may send, and the orderly end.

use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use hyper::service::service_fn;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{sleep_until, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    connection::{Felt, Patience, Pulse},
    proxy::{Peer, Proxy},
    tls::Acceptor,
    upstream::tune,
};

/// Largest head of a request, in bytes.
pub const MAX_HEAD: usize = 64 * 1024;
/// Most headers of a request.
pub const MAX_HEADERS: usize = 128;
/// Most requests of one HTTP/2 connection at once.
pub const MAX_STREAMS: u32 = 128;
/// Streams that an HTTP/2 client may open and reset before they were looked at; one more ends the connection.
const MAX_RESETS: usize = 20;
/// Streams that may be reset because of a client's faults.
const MAX_FAULTS: usize = 64;
/// Between pings of an HTTP/2 connection, and how long an answer may take.
const PING: Duration = Duration::from_secs(30);
const PONG: Duration = Duration::from_secs(20);
/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// After a failed accept, such as when no file descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What connections share.
#[derive(Debug)]
pub struct Server {
    proxy: Arc<Proxy>,
    patience: Patience,
    places: Arc<Semaphore>,
    http: auto::Builder<TokioExecutor>,
    tasks: TaskTracker,
    /// No new connection, no further request on an old one.
    closing: CancellationToken,
    /// The end of all connections.
    cut: CancellationToken,
}

impl Server {
    /// Serves `proxy` on at most `connections` connections at once. `tasks` holds every connection; `cut` ends what is left of them.
    pub fn new(
        proxy: Arc<Proxy>,
        patience: Patience,
        connections: usize,
        tasks: TaskTracker,
        cut: CancellationToken,
    ) -> Arc<Self> {
        let mut http = auto::Builder::new(TokioExecutor::new());
        // Slow heads end by the connection's own clock: see `connection`.
        http.http1()
            .timer(TokioTimer::new())
            .header_read_timeout(None)
            .max_buf_size(MAX_HEAD)
            .max_headers(MAX_HEADERS);
        http.http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .max_pending_accept_reset_streams(MAX_RESETS)
            .max_local_error_reset_streams(MAX_FAULTS)
            .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX))
            .keep_alive_interval(PING)
            .keep_alive_timeout(PONG);
        Arc::new(Self {
            proxy,
            patience,
            places: Arc::new(Semaphore::new(connections.min(Semaphore::MAX_PERMITS))),
            http,
            tasks,
            closing: CancellationToken::new(),
            cut,
        })
    }

    /// Takes connections until [`Server::drain`].
    pub fn accept(self: &Arc<Self>, listener: TcpListener, tls: Option<Acceptor>) {
        let server = Arc::clone(self);
        self.tasks.spawn(async move {
            let closing = server.closing.clone();
            tokio::select! {
                () = server.accept_all(listener, tls) => {}
                () = closing.cancelled() => {}
            }
        });
    }

    async fn accept_all(self: &Arc<Self>, listener: TcpListener, tls: Option<Acceptor>) {
        loop {
            // Who finds no place waits in the kernel's queue.
            let Ok(place) = Arc::clone(&self.places).acquire_owned().await else {
                return;
            };
            let (stream, address) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    if !of_one_connection(&error) {
                        tracing::warn!(%error, "cannot accept");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                    continue;
                }
            };
            let (server, tls) = (Arc::clone(self), tls.clone());
            self.tasks.spawn(async move {
                let cut = server.cut.clone();
                tokio::select! {
                    () = server.connection(stream, address, tls) => {}
                    () = cut.cancelled() => {}
                }
                drop(place);
            });
        }
    }

    async fn connection(&self, stream: TcpStream, address: SocketAddr, tls: Option<Acceptor>) {
        tune(&stream);
        let Some(tls) = tls else {
            return self.serve(stream, address, false).await;
        };
        match timeout(HANDSHAKE, tls.accept(stream)).await {
            Ok(Ok(stream)) => self.serve(stream, address, true).await,
            Ok(Err(error)) => tracing::debug!(%address, %error, "TLS handshake failed"),
            Err(_) => tracing::debug!(%address, "TLS handshake took too long"),
        }
    }

    async fn serve<S>(&self, stream: S, address: SocketAddr, tls: bool)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let pulse = Pulse::new(self.patience);
        let peer = Arc::new(Peer {
            address: address.ip(),
            tls,
            pulse: pulse.clone(),
        });
        let service = service_fn(|request| {
            let (proxy, peer) = (Arc::clone(&self.proxy), Arc::clone(&peer));
            async move { Ok::<_, Infallible>(proxy.handle(&peer, request).await) }
        });
        let stream = TokioIo::new(Felt::new(stream, pulse.clone()));
        let mut connection =
            std::pin::pin!(self.http.serve_connection_with_upgrades(stream, service));
        let mut draining = false;
        while let Some(deadline) = pulse.deadline() {
            tokio::select! {
                ended = connection.as_mut() => {
                    if let Err(error) = ended {
                        tracing::debug!(%address, error, "connection ended");
                    }
                    return;
                }
                () = sleep_until(deadline.into()) => {}
                () = self.closing.cancelled(), if !draining => {
                    connection.as_mut().graceful_shutdown();
                    draining = true;
                }
            }
        }
        tracing::debug!(%address, "closed: nothing came in time");
    }

    /// Takes no more requests, and waits until those under way have ended, at most `limit` long; what is left is cut.
    pub async fn drain(&self, limit: Duration) {
        self.closing.cancel();
        self.tasks.close();
        if timeout(limit, self.tasks.wait()).await.is_err() {
            tracing::warn!(
                connections = self.tasks.len(),
                "cut: they did not end in time"
            );
            self.cut.cancel();
            self.tasks.wait().await;
        }
    }
}

/// Whether accepting failed because of the one connection that was being accepted.
fn of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
    )
}

//! Listeners and client connections: limits on what a client may send, and graceful shutdown.

use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use hyper::service::service_fn;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{sleep_until, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    connection::{Activity, Monitored, QUIET, Timeouts},
    connection_limit::ConnectionLimit,
    lanes::{self, Lane},
    proxy::{Peer, Proxy},
    tls::Acceptor,
    upstream::tune,
};

/// Largest head of a request, in bytes.
pub const MAX_HEAD: usize = 64 * 1024;
/// Most headers of a request.
pub const MAX_HEADERS: usize = 128;
/// Most concurrent requests of one HTTP/2 connection.
pub const MAX_STREAMS: u32 = 128;
/// Streams that an HTTP/2 client may open and reset before the router has accepted them; one more
/// ends the connection.
const MAX_RESETS: usize = 20;
/// Streams of a connection that the router may reset because of errors of the client.
const MAX_FAULTS: usize = 64;
/// Bytes of one request that an HTTP/2 client may send before the sandbox has read them.
const STREAM_WINDOW: u32 = 256 * 1024;
/// Bytes of all requests of a connection that an HTTP/2 client may send before the sandboxes have
/// read them.
const CONNECTION_WINDOW: u32 = 512 * 1024;
/// Bytes of a response that the router buffers for an HTTP/2 client that does not read.
const SEND_BUFFER: usize = 64 * 1024;
/// Time between pings of an HTTP/2 connection.
pub const PING: Duration = Duration::from_secs(30);
/// Longest time for the response to a ping.
pub const PONG: Duration = Duration::from_secs(20);
/// Longest time of a TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Delay after a failed accept, for instance without free file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Server that accepts and serves client connections.
#[derive(Debug)]
pub struct Server {
    proxy: Arc<Proxy>,
    lanes: Vec<Lane>,
    timeouts: Timeouts,
    permits: Arc<Semaphore>,
    /// Connections that hold a permit of `permits`.
    connection_limit: ConnectionLimit,
    http: auto::Builder<TokioExecutor>,
    tasks: TaskTracker,
    /// Cancelled to accept no new connections and no further requests.
    closing: CancellationToken,
    /// Cancelled to close all connections.
    cut: CancellationToken,
}

impl Server {
    /// Returns a server that runs `proxy` for at most `connections` connections at once, spread
    /// over `lanes`.
    ///
    /// `tasks` tracks the task of every connection; `cut` closes the rest at the end.
    pub fn new(
        proxy: Arc<Proxy>,
        lanes: Vec<Lane>,
        timeouts: Timeouts,
        connections: usize,
        tasks: TaskTracker,
        cut: CancellationToken,
    ) -> Arc<Self> {
        let mut http = auto::Builder::new(TokioExecutor::new());
        // The module `connection` has the timeout of slow heads.
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
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_send_buf_size(SEND_BUFFER)
            .keep_alive_interval(PING)
            .keep_alive_timeout(PONG);
        Arc::new(Self {
            proxy,
            lanes,
            timeouts,
            permits: Arc::new(Semaphore::new(connections.min(Semaphore::MAX_PERMITS))),
            connection_limit: ConnectionLimit::default(),
            http,
            tasks,
            closing: CancellationToken::new(),
            cut,
        })
    }

    /// Accepts connections until [`Server::drain`].
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
            let accepted = listener.accept().await;
            let accepted = accepted.and_then(|(stream, address)| Ok((stream.into_std()?, address)));
            let (stream, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    if !is_of_one_connection(&error) {
                        tracing::warn!(%error, "cannot accept a connection");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                    continue;
                }
            };
            let Some(permit) = self.permit().await else {
                return;
            };
            let Some(lane) = lanes::emptiest(&self.lanes) else {
                return;
            };
            let (server, tls, lane) = (Arc::clone(self), tls.clone(), lane.clone());
            let (runtime, occupied) = (lane.runtime.clone(), lane.occupy());
            let activity = Activity::new(self.timeouts);
            let registration = self.connection_limit.register(activity.clone());
            let connection = async move {
                let cut = server.cut.clone();
                tokio::select! {
                    () = server.connection(stream, address, tls, lane, activity.clone()) => {}
                    () = activity.evicted() => {
                        tracing::debug!(%address, "closed an idle connection at the connection limit");
                    }
                    () = cut.cancelled() => {}
                }
                drop((registration, permit, occupied));
            };
            self.tasks.spawn_on(connection, &runtime);
        }
    }

    /// Waits for a permit to serve a connection.
    ///
    /// At the limit, evicts an idle connection or waits for one to end. Further clients wait in the
    /// kernel's queue meanwhile.
    async fn permit(&self) -> Option<OwnedSemaphorePermit> {
        loop {
            if let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() {
                return Some(permit);
            }
            if self.connection_limit.evict_idle() {
                self.proxy.metrics.evicted_connections.inc();
            }
            let freed = timeout(QUIET, Arc::clone(&self.permits).acquire_owned());
            // Without a permit, try again: the evicted connection had a new request, and another
            // connection may be idle by now.
            if let Ok(permit) = freed.await {
                return permit.ok();
            }
        }
    }

    async fn connection(
        &self,
        stream: std::net::TcpStream,
        address: SocketAddr,
        tls: Option<Acceptor>,
        lane: Lane,
        activity: Activity,
    ) {
        // Registers the socket with the lane's runtime.
        let stream = match TcpStream::from_std(stream) {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(%address, %error, "cannot serve a connection");
                return;
            }
        };
        tune(&stream);
        let peer = |tls| Peer {
            address: address.ip(),
            tls,
            activity: activity.clone(),
            pool: lane.pool.clone(),
        };
        let Some(tls) = tls else {
            return self.serve(stream, peer(false)).await;
        };
        match timeout(HANDSHAKE, tls.accept(stream)).await {
            Ok(Ok(stream)) => {
                activity.begin_head();
                self.serve(stream, peer(true)).await;
            }
            Ok(Err(error)) => tracing::debug!(%address, %error, "TLS handshake failed"),
            Err(_) => tracing::debug!(%address, "TLS handshake took too long"),
        }
    }

    async fn serve<S>(&self, stream: S, peer: Peer)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (activity, address) = (peer.activity.clone(), peer.address);
        let peer = Arc::new(peer);
        let service = service_fn(|request| {
            let (proxy, peer) = (Arc::clone(&self.proxy), Arc::clone(&peer));
            async move { Ok::<_, Infallible>(proxy.handle(&peer, request).await) }
        });
        let stream = TokioIo::new(Monitored::new(stream, activity.clone()));
        let mut connection =
            std::pin::pin!(self.http.serve_connection_with_upgrades(stream, service));
        let mut draining = false;
        while let Some(deadline) = activity.deadline() {
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
        tracing::debug!(%address, "closed a connection after a timeout");
    }

    /// Stops accepting requests and waits until those in flight have ended, at most `limit` long;
    /// then closes the remaining connections.
    pub async fn drain(&self, limit: Duration) {
        self.closing.cancel();
        self.tasks.close();
        if timeout(limit, self.tasks.wait()).await.is_err() {
            tracing::warn!(
                connections = self.tasks.len(),
                "closed connections that did not end in time"
            );
            self.cut.cancel();
            self.tasks.wait().await;
        }
    }
}

/// Reports whether accept failed because of that one connection.
fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
    )
}

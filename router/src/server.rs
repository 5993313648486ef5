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
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{sleep_until, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    connection::{Felt, Patience, Pulse, QUIET},
    crowd::Crowd,
    lanes::{self, Lane},
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
/// What an HTTP/2 client may send of one request, and of all of a connection, before the sandboxes have taken it; in bytes.
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 512 * 1024;
/// What is kept of an answer that an HTTP/2 client does not take, in bytes.
const SEND_BUFFER: usize = 64 * 1024;
/// Between pings of an HTTP/2 connection.
pub const PING: Duration = Duration::from_secs(30);
/// How long the answer to a ping may take.
pub const PONG: Duration = Duration::from_secs(20);
/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// After a failed accept, such as when no file descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What connections share.
#[derive(Debug)]
pub struct Server {
    proxy: Arc<Proxy>,
    lanes: Vec<Lane>,
    patience: Patience,
    places: Arc<Semaphore>,
    /// Whoever has a place.
    crowd: Crowd,
    http: auto::Builder<TokioExecutor>,
    tasks: TaskTracker,
    /// No new connection, no further request on an old one.
    closing: CancellationToken,
    /// The end of all connections.
    cut: CancellationToken,
}

impl Server {
    /// Serves `proxy` on at most `connections` connections at once, spread over `lanes`. `tasks` holds every connection; `cut` ends what is left of them.
    pub fn new(
        proxy: Arc<Proxy>,
        lanes: Vec<Lane>,
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
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_send_buf_size(SEND_BUFFER)
            .keep_alive_interval(PING)
            .keep_alive_timeout(PONG);
        Arc::new(Self {
            proxy,
            lanes,
            patience,
            places: Arc::new(Semaphore::new(connections.min(Semaphore::MAX_PERMITS))),
            crowd: Crowd::default(),
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
            let accepted = listener.accept().await;
            let accepted = accepted.and_then(|(stream, address)| Ok((stream.into_std()?, address)));
            let (stream, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    if !of_one_connection(&error) {
                        tracing::warn!(%error, "cannot accept");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                    continue;
                }
            };
            let Some(place) = self.place().await else {
                return;
            };
            let Some(lane) = lanes::emptiest(&self.lanes) else {
                return;
            };
            let (server, tls, lane) = (Arc::clone(self), tls.clone(), lane.clone());
            let (runtime, occupied) = (lane.runtime.clone(), lane.occupy());
            let pulse = Pulse::new(self.patience);
            let entered = self.crowd.enter(pulse.clone());
            let connection = async move {
                let cut = server.cut.clone();
                tokio::select! {
                    () = server.connection(stream, address, tls, lane, pulse.clone()) => {}
                    () = pulse.has_to_go() => {
                        tracing::debug!(%address, "closed: its place was needed");
                    }
                    () = cut.cancelled() => {}
                }
                drop((entered, place, occupied));
            };
            self.tasks.spawn_on(connection, &runtime);
        }
    }

    /// A place: if all are taken, that of a connection which has nothing under way; or the next one that gets free, and who comes meanwhile waits in the kernel's queue.
    async fn place(&self) -> Option<OwnedSemaphorePermit> {
        loop {
            if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
                return Some(place);
            }
            if self.crowd.make_way() {
                self.proxy.metrics.made_way.inc();
            }
            let freed = timeout(QUIET, Arc::clone(&self.places).acquire_owned());
            // Else who was asked has had a request meanwhile; and who was busy may be idle by now.
            if let Ok(place) = freed.await {
                return place.ok();
            }
        }
    }

    async fn connection(
        &self,
        stream: std::net::TcpStream,
        address: SocketAddr,
        tls: Option<Acceptor>,
        lane: Lane,
        pulse: Pulse,
    ) {
        // The lane's own runtime hears of it from here on.
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
            pulse: pulse.clone(),
            pool: lane.pool.clone(),
        };
        let Some(tls) = tls else {
            return self.serve(stream, peer(false)).await;
        };
        match timeout(HANDSHAKE, tls.accept(stream)).await {
            Ok(Ok(stream)) => {
                pulse.begin_head();
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
        let (pulse, address) = (peer.pulse.clone(), peer.address);
        let peer = Arc::new(peer);
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

//! Listeners and their connections: limits, accept and shutdown. A [`Serve`] handles the protocol.

use std::{convert::Infallible, io, sync::Arc, time::Duration};

use http::{Request, Response};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    origin::{self, Foreign},
    refusal::{Body, Refused},
    root::Root,
    token::{Closed, Gate},
};

/// Maximum size of a request's head, in bytes.
const MAX_HEAD: usize = 64 * 1024;
/// Maximum number of headers of a request.
const MAX_HEADERS: usize = 128;
/// Pause after a failed accept, such as when no file descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Protocol of a listener's connections.
pub trait Serve: Send + Sync + 'static {
    /// Serves a connection to its end. The server drops the future to cut the connection.
    fn connection(
        self: Arc<Self>,
        stream: TcpStream,
        shutdown: Shutdown,
    ) -> impl Future<Output = ()> + Send;
}

/// Shutdown of the server, as a connection sees it.
#[derive(Clone, Debug)]
pub struct Shutdown {
    /// Cancelled when no further request is accepted.
    pub closing: CancellationToken,
    /// Tasks that the shutdown waits for.
    pub tasks: TaskTracker,
}

/// Listeners with their connections.
#[derive(Debug)]
pub struct Server {
    /// Maximum number of connections of each listener.
    connections: usize,
    shutdown: Shutdown,
    /// Cancelled to cut all connections, which ends their commands.
    cut: CancellationToken,
}

impl Server {
    /// Returns a server with at most `connections` connections of each listener.
    pub fn new(connections: usize) -> Self {
        let (closing, tasks) = (CancellationToken::new(), TaskTracker::new());
        Self {
            connections: connections.min(Semaphore::MAX_PERMITS),
            shutdown: Shutdown { closing, tasks },
            cut: CancellationToken::new(),
        }
    }

    /// Accepts connections until [`Server::drain`].
    pub fn accept(&self, listener: TcpListener, service: Arc<impl Serve>) {
        let (shutdown, cut) = (self.shutdown.clone(), self.cut.clone());
        let permits = Arc::new(Semaphore::new(self.connections));
        self.shutdown.tasks.spawn(async move {
            let closing = shutdown.closing.clone();
            tokio::select! {
                () = accept_all(&listener, &permits, &service, &shutdown, &cut) => {}
                () = closing.cancelled() => {}
            }
        });
    }

    /// Waits for the calls under way, and cuts those that exceed the time limit.
    pub async fn drain(&self, limit: Duration) {
        let tasks = &self.shutdown.tasks;
        self.shutdown.closing.cancel();
        tasks.close();
        if timeout(limit, tasks.wait()).await.is_err() {
            tracing::warn!(
                calls = tasks.len(),
                "cutting calls that exceed the shutdown timeout"
            );
        }
        self.cut.cancel();
        tasks.wait().await;
    }
}

async fn accept_all(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
    service: &Arc<impl Serve>,
    shutdown: &Shutdown,
    cut: &CancellationToken,
) {
    loop {
        // Above the limit, connections wait in the kernel's queue.
        let Ok(permit) = Arc::clone(permits).acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
        let connection = Arc::clone(service).connection(stream, shutdown.clone());
        let cut = cut.clone();
        shutdown.tasks.spawn(async move {
            tokio::select! {
                () = connection => {}
                () = cut.cancelled() => {}
            }
            drop(permit);
        });
    }
}

/// Calls of an HTTP/1 API.
pub trait Calls: Send + Sync + 'static {
    /// Reason why a request is refused.
    type Refusal: Refused + From<Closed> + From<Foreign>;

    /// Path that needs no token, for probes.
    const HEALTH: &'static str;

    /// Answers a request.
    ///
    /// The server drops the future when the client disconnects: that kills a command and discards
    /// an upload.
    fn call(
        &self,
        request: Request<Incoming>,
    ) -> impl Future<Output = Result<Response<Body>, Self::Refusal>> + Send;
}

/// Connections of an HTTP/1 API.
#[derive(Debug)]
pub struct Http1<C> {
    calls: C,
    gate: Arc<Gate>,
    http: http1::Builder,
}

impl<C: Calls> Http1<C> {
    /// Returns a service of these calls for the clients that the gate admits.
    ///
    /// The timeout holds for the head of each request of a connection.
    pub fn new(calls: C, gate: Arc<Gate>, read_header_timeout: Duration) -> Arc<Self> {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(read_header_timeout)
            .max_buf_size(MAX_HEAD)
            .max_headers(MAX_HEADERS);
        Arc::new(Self { calls, gate, http })
    }

    async fn answer(&self, request: Request<Incoming>) -> Result<Response<Body>, C::Refusal> {
        origin::check(request.method(), request.headers())?;
        if request.uri().path() != C::HEALTH {
            self.gate.check(request.headers()).await?;
        }
        self.calls.call(request).await
    }

    async fn respond(&self, request: Request<Incoming>) -> Response<Body> {
        match self.answer(request).await {
            Ok(response) => response,
            Err(refusal) => {
                tracing::info!(status = refusal.status().as_u16(), %refusal, "request refused");
                refusal.response()
            }
        }
    }
}

impl<C: Calls> Serve for Http1<C> {
    async fn connection(self: Arc<Self>, stream: TcpStream, shutdown: Shutdown) {
        let service = service_fn(|request| {
            let this = Arc::clone(&self);
            async move { Ok::<_, Infallible>(this.respond(request).await) }
        });
        let serving = self.http.serve_connection(TokioIo::new(stream), service);
        let mut serving = std::pin::pin!(serving);
        let ended = tokio::select! {
            ended = serving.as_mut() => ended,
            () = shutdown.closing.cancelled() => {
                serving.as_mut().graceful_shutdown();
                serving.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection failed");
        }
    }
}

/// Opens the root directory, and creates it if the container image lacks it.
pub fn open_root(path: &std::path::Path) -> io::Result<Arc<Root>> {
    std::fs::create_dir_all(path)?;
    Root::open(path).map(Arc::new)
}

//! Connections: how many there are, when they begin and how they end. What is said on them is a [`Serve`]'s.

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

/// Largest head of a request, in bytes.
const MAX_HEAD: usize = 64 * 1024;
/// Most headers of a request.
const MAX_HEADERS: usize = 128;
/// After a failed accept, such as when no file descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a listener's connections carry.
pub trait Serve: Send + Sync + 'static {
    /// Serves a connection to its end. Dropped when it is cut.
    fn connection(
        self: Arc<Self>,
        stream: TcpStream,
        life: Life,
    ) -> impl Future<Output = ()> + Send;
}

/// A connection's part in the life of the server.
#[derive(Clone, Debug)]
pub struct Life {
    /// No further request.
    pub closing: CancellationToken,
    /// What is waited for at the end.
    pub tasks: TaskTracker,
}

/// All listeners with their connections.
#[derive(Debug)]
pub struct Server {
    /// Of each listener.
    connections: usize,
    life: Life,
    /// The end of all connections, and so of their commands.
    cut: CancellationToken,
}

impl Server {
    /// A server whose listeners have at most so many connections each.
    pub fn new(connections: usize) -> Self {
        let (closing, tasks) = (CancellationToken::new(), TaskTracker::new());
        Self {
            connections: connections.min(Semaphore::MAX_PERMITS),
            life: Life { closing, tasks },
            cut: CancellationToken::new(),
        }
    }

    /// Takes connections until [`Server::drain`].
    pub fn accept(&self, listener: TcpListener, service: Arc<impl Serve>) {
        let (life, cut) = (self.life.clone(), self.cut.clone());
        let places = Arc::new(Semaphore::new(self.connections));
        self.life.tasks.spawn(async move {
            let closing = life.closing.clone();
            tokio::select! {
                () = accept_all(&listener, &places, &service, &life, &cut) => {}
                () = closing.cancelled() => {}
            }
        });
    }

    /// Lets the calls under way end, and cuts those that do not in time.
    pub async fn drain(&self, limit: Duration) {
        let tasks = &self.life.tasks;
        self.life.closing.cancel();
        tasks.close();
        if timeout(limit, tasks.wait()).await.is_err() {
            tracing::warn!(calls = tasks.len(), "not all ended in time");
        }
        self.cut.cancel();
        tasks.wait().await;
    }
}

async fn accept_all(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
    service: &Arc<impl Serve>,
    life: &Life,
    cut: &CancellationToken,
) {
    loop {
        // Who finds no place waits in the kernel's queue.
        let Ok(place) = Arc::clone(places).acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "small answers may come late");
        }
        let connection = Arc::clone(service).connection(stream, life.clone());
        let cut = cut.clone();
        life.tasks.spawn(async move {
            tokio::select! {
                () = connection => {}
                () = cut.cancelled() => {}
            }
            drop(place);
        });
    }
}

/// The calls of an HTTP/1 API.
pub trait Calls: Send + Sync + 'static {
    /// Why a request is not answered as asked.
    type Refusal: Refused + From<Closed> + From<Foreign>;

    /// The path that answers without a token: what a probe asks, which has none to show.
    const HEALTH: &'static str;

    /// Answers a request. Dropped when the client goes away, and with it what it does: a command is killed, an upload leaves nothing.
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
    /// Serves these calls to the clients that the gate lets in. The head of a request must come in
    /// time, also of the next one.
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
                tracing::info!(status = refusal.status().as_u16(), %refusal, "refused");
                refusal.response()
            }
        }
    }
}

impl<C: Calls> Serve for Http1<C> {
    async fn connection(self: Arc<Self>, stream: TcpStream, life: Life) {
        let service = service_fn(|request| {
            let this = Arc::clone(&self);
            async move { Ok::<_, Infallible>(this.respond(request).await) }
        });
        let serving = self.http.serve_connection(TokioIo::new(stream), service);
        let mut serving = std::pin::pin!(serving);
        let ended = tokio::select! {
            ended = serving.as_mut() => ended,
            () = life.closing.cancelled() => {
                serving.as_mut().graceful_shutdown();
                serving.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection broke off");
        }
    }
}

/// Opens the root, and makes it where it is missing: an image need not have it.
pub fn open_root(path: &std::path::Path) -> io::Result<Arc<Root>> {
    std::fs::create_dir_all(path)?;
    Root::open(path).map(Arc::new)
}

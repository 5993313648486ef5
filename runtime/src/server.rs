//! Connections, and the calls on them.

use std::{convert::Infallible, io, sync::Arc, time::Duration};

use http::{Request, Response, StatusCode, header};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::json;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    execute, files,
    orphans::Children,
    refusal::{Body, Refusal, answer},
    root::Root,
    route::{Route, route},
    upload,
};

/// Largest head of a request, in bytes.
const MAX_HEAD: usize = 64 * 1024;
/// Most headers of a request.
const MAX_HEADERS: usize = 128;
/// Largest body of a request to run a command; larger commands the kernel would refuse.
const MAX_COMMAND: u64 = 4 << 20;
/// After a failed accept, such as when no file descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What is set for all calls.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub execute: execute::Limits,
    pub upload: upload::Limits,
    pub read_header_timeout: Duration,
    pub connections: usize,
}

/// What connections share.
#[derive(Debug)]
pub struct Server {
    root: Arc<Root>,
    children: Arc<Children>,
    settings: Settings,
    http: http1::Builder,
    tasks: TaskTracker,
    /// No new connection, no further request on an old one.
    closing: CancellationToken,
    /// The end of all connections, and so of their commands.
    cut: CancellationToken,
}

impl Server {
    /// Serves the files of `root`, and commands in it.
    pub fn new(root: Arc<Root>, children: Arc<Children>, settings: Settings) -> Arc<Self> {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(settings.read_header_timeout)
            .max_buf_size(MAX_HEAD)
            .max_headers(MAX_HEADERS);
        Arc::new(Self {
            root,
            children,
            settings,
            http,
            tasks: TaskTracker::new(),
            closing: CancellationToken::new(),
            cut: CancellationToken::new(),
        })
    }

    /// Takes connections until [`Server::drain`].
    pub fn accept(self: &Arc<Self>, listener: TcpListener) {
        let server = Arc::clone(self);
        self.tasks.spawn(async move {
            let closing = server.closing.clone();
            tokio::select! {
                () = server.accept_all(&listener) => {}
                () = closing.cancelled() => {}
            }
        });
    }

    /// Lets the calls under way end, and cuts those that do not in time.
    pub async fn drain(&self, limit: Duration) {
        self.closing.cancel();
        self.tasks.close();
        if timeout(limit, self.tasks.wait()).await.is_err() {
            tracing::warn!(calls = self.tasks.len(), "not all ended in time");
        }
        self.cut.cancel();
        self.tasks.wait().await;
    }

    async fn accept_all(self: &Arc<Self>, listener: &TcpListener) {
        let places = Arc::new(Semaphore::new(
            self.settings.connections.min(Semaphore::MAX_PERMITS),
        ));
        loop {
            // Who finds no place waits in the kernel's queue.
            let Ok(place) = Arc::clone(&places).acquire_owned().await else {
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
            let server = Arc::clone(self);
            self.tasks.spawn(async move {
                let cut = server.cut.clone();
                tokio::select! {
                    () = server.connection(stream) => {}
                    () = cut.cancelled() => {}
                }
                drop(place);
            });
        }
    }

    /// Dropped when the client goes away, and with it the call: a command is killed, an upload leaves nothing.
    async fn connection(self: &Arc<Self>, stream: TcpStream) {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "small answers may come late");
        }
        let service = service_fn(|request| {
            let server = Arc::clone(self);
            async move { Ok::<_, Infallible>(server.respond(request).await) }
        });
        let serving = self.http.serve_connection(TokioIo::new(stream), service);
        let mut serving = std::pin::pin!(serving);
        let ended = tokio::select! {
            ended = serving.as_mut() => ended,
            () = self.closing.cancelled() => {
                serving.as_mut().graceful_shutdown();
                serving.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection broke off");
        }
    }

    async fn respond(&self, request: Request<Incoming>) -> Response<Body> {
        match self.call(request).await {
            Ok(response) => response,
            Err(refusal) => {
                tracing::info!(status = refusal.status().as_u16(), %refusal, "refused");
                refusal.response()
            }
        }
    }

    async fn call(&self, request: Request<Incoming>) -> Result<Response<Body>, Refusal> {
        let route = route(request.method(), request.uri().path())?;
        let (head, body) = request.into_parts();
        match route {
            Route::Health => {
                let status = json!({"status": "ok", "message": "Sandbox Runtime is active."});
                Ok(answer(StatusCode::OK, &status))
            }
            Route::Execute => {
                let limits = upload::Limits {
                    bytes: MAX_COMMAND,
                    ..self.settings.upload
                };
                self.execute(&upload::whole(body, limits).await?).await
            }
            Route::Upload => {
                let limits = self.settings.upload;
                let length = head.headers.get(header::CONTENT_LENGTH);
                let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
                // Said before the body comes, where the client asks with `Expect`.
                if length.is_some_and(|length: u64| length > limits.bytes) {
                    return Err(Refusal::TooLarge);
                }
                upload::upload(&self.root, &head.headers, body, limits).await
            }
            Route::Download(path) => files::download(&self.root, path).await,
            Route::List(path) => files::list(&self.root, path).await,
            Route::Exists(path) => files::exists(&self.root, path).await,
        }
    }

    async fn execute(&self, body: &[u8]) -> Result<Response<Body>, Refusal> {
        let command = execute::command_of(body)?;
        let (directory, limits) = (self.root.path(), self.settings.execute);
        let outcome = execute::execute(&command, directory, limits, &self.children).await;
        Ok(answer(StatusCode::OK, &outcome.body()))
    }
}

/// Opens the root, and makes it where it is missing: an image need not have it.
pub fn open_root(path: &std::path::Path) -> io::Result<Arc<Root>> {
    std::fs::create_dir_all(path)?;
    Root::open(path).map(Arc::new)
}

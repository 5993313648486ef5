//! Connections of the gRPC API: HTTP/2, which service a request is for, and how long a silent client is kept.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::{body::Incoming, rt::Executor, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::TcpStream,
    sync::watch::{Receiver, Sender},
    time::{Instant, Sleep, timeout},
};
use tokio_util::task::TaskTracker;
use tonic::{Status, body::Body as Answer, server::NamedService};
use tower::{ServiceExt as _, util::BoxCloneSyncService};

use crate::{
    proto::{
        DESCRIPTORS, process::process_service_server::ProcessServiceServer,
        watcher::file_watcher_service_server::FileWatcherServiceServer,
    },
    sandboxd::{process::ProcessService, watch::WatchService},
    server::{Life, Serve},
    token::Gate,
};

/// Largest message of a request, as Go and tonic have it.
const MAX_MESSAGE: usize = 4 << 20;
/// Largest head of a request, in bytes.
const MAX_HEAD: u32 = 64 * 1024;
/// Most calls at once of one connection; a further one waits at its client without a word. As many as sandbox-router lets through to a sandbox by default, since those of all its clients are on
/// one connection: so that whoever is too many is refused, there or by the limits of commands and watches.
const MAX_STREAMS: u32 = 1024;
/// Bytes that are taken of a call before they are wanted.
const STREAM_WINDOW: u32 = 64 * 1024;
/// And of all calls of a connection: so that those which are not read hold up no others. A connection may so hold 64 MiB of requests, and as much of answers ([`SEND_BUFFER`]), beside the
/// messages that its calls are at. Only a client that means to brings it there, and who may call may start commands, which have no bound but the sandbox' own.
const CONNECTION_WINDOW: u32 = MAX_STREAMS * STREAM_WINDOW;
/// Bytes of a call that are sent before the client takes them.
const SEND_BUFFER: usize = 64 * 1024;

/// How long a client may be silent.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For the next piece of a request.
    pub body: Duration,
    /// After this time without a sign of life a client is asked for one, and has as much again to give it.
    pub keepalive: Duration,
    /// Without any call.
    pub idle: Duration,
}

/// A service of any kind.
type Service = BoxCloneSyncService<Request<Patient>, Response<Answer>, Infallible>;

/// All services, by name.
#[derive(Debug)]
pub struct Grpc {
    services: BTreeMap<&'static str, Service>,
    gate: Arc<Gate>,
    patience: Patience,
}

impl Grpc {
    /// Serves commands, changes of files, and the questions which services there are, to the clients
    /// that the gate lets in.
    pub fn new(
        process: ProcessService,
        watcher: WatchService,
        gate: Arc<Gate>,
        patience: Patience,
    ) -> Result<Arc<Self>, tonic_reflection::server::Error> {
        let describe = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(DESCRIPTORS)
        };
        let services = [
            named(ProcessServiceServer::new(process).max_decoding_message_size(MAX_MESSAGE)),
            named(FileWatcherServiceServer::new(watcher).max_decoding_message_size(MAX_MESSAGE)),
            named(describe().build_v1()?),
            named(describe().build_v1alpha()?),
        ];
        Ok(Arc::new(Self {
            services: services.into(),
            gate,
            patience,
        }))
    }

    async fn respond(&self, request: Request<Incoming>) -> Response<Answer> {
        if let Err(closed) = self.gate.check(request.headers()).await {
            tracing::info!(%closed, "refused");
            return Status::unauthenticated(closed.to_string()).into_http();
        }
        // `/package.Service/Method`
        let name = request.uri().path().split('/').nth(1).unwrap_or_default();
        let Some(service) = self.services.get(name) else {
            return Status::unimplemented(format!("unknown service {name}")).into_http();
        };
        let patience = self.patience.body;
        let request = request.map(|body| Patient::new(body, patience));
        match service.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }
}

fn named<S>(service: S) -> (&'static str, Service)
where
    S: NamedService
        + tower::Service<Request<Patient>, Response = Response<Answer>, Error = Infallible>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    (S::NAME, BoxCloneSyncService::new(service))
}

impl Serve for Grpc {
    async fn connection(self: Arc<Self>, stream: TcpStream, life: Life) {
        let calls = Arc::new(Sender::new(0_usize));
        let idle = quiet(calls.subscribe(), self.patience.idle);
        let service = service_fn(|request| {
            let (this, busy) = (Arc::clone(&self), Busy::new(&calls));
            async move {
                let response = this.respond(request).await;
                Ok::<_, Infallible>(response.map(|body| Counted { body, _busy: busy }))
            }
        });
        let http = self.http(life.tasks);
        let mut serving = std::pin::pin!(http.serve_connection(TokioIo::new(stream), service));
        let ended = tokio::select! {
            ended = serving.as_mut() => ended,
            () = life.closing.cancelled() => {
                serving.as_mut().graceful_shutdown();
                serving.await
            }
            // It may begin a call at this very moment, which then is still answered.
            () = idle => {
                serving.as_mut().graceful_shutdown();
                match timeout(self.patience.keepalive, serving).await {
                    Ok(ended) => ended,
                    Err(_) => return tracing::debug!("a connection without calls was cut"),
                }
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection broke off");
        }
    }
}

impl Grpc {
    fn http(&self, tasks: TaskTracker) -> http2::Builder<Tasks> {
        let mut http = http2::Builder::new(Tasks(tasks));
        http.timer(TokioTimer::new())
            .keep_alive_interval(self.patience.keepalive)
            .keep_alive_timeout(self.patience.keepalive)
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(MAX_HEAD)
            .max_send_buf_size(SEND_BUFFER)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW);
        http
    }
}

/// Runs calls where their end is waited for.
#[derive(Clone, Debug)]
struct Tasks(TaskTracker);

impl<F> Executor<F> for Tasks
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, call: F) {
        self.0.spawn(call);
    }
}

/// Until there was no call for so long.
async fn quiet(mut calls: Receiver<usize>, limit: Duration) {
    loop {
        // The count lives as long as the connection.
        let _none = calls.wait_for(|calls| *calls == 0).await.map(drop);
        let next = timeout(limit, calls.wait_for(|calls| *calls > 0));
        if next.await.is_err() {
            return;
        }
    }
}

/// A call that is counted.
#[derive(Debug)]
struct Busy(Arc<Sender<usize>>);

impl Busy {
    fn new(calls: &Arc<Sender<usize>>) -> Self {
        calls.send_modify(|calls| *calls += 1);
        Self(Arc::clone(calls))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.send_modify(|calls| *calls -= 1);
    }
}

/// An answer whose call counts until its end.
#[derive(Debug)]
struct Counted {
    body: Answer,
    _busy: Busy,
}

impl Body for Counted {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A request's body, whose next piece is not waited for for ever.
#[derive(Debug)]
struct Patient {
    body: Incoming,
    patience: Duration,
    over: Pin<Box<Sleep>>,
}

impl Patient {
    fn new(body: Incoming, patience: Duration) -> Self {
        Self {
            body,
            patience,
            over: Box::pin(tokio::time::sleep(patience)),
        }
    }
}

impl Body for Patient {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            let next = Instant::now() + self.patience;
            self.over.as_mut().reset(next);
            let broken = |error| Status::cancelled(format!("the request broke off: {error}"));
            return Poll::Ready(frame.map(|frame| frame.map_err(broken)));
        }
        ready!(self.over.as_mut().poll(context));
        let slow = "the request did not come in time";
        Poll::Ready(Some(Err(Status::deadline_exceeded(slow))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

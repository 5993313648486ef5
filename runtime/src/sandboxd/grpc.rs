//! Connections of the gRPC API: HTTP/2, routing to services, and timeouts of idle clients.

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
    server::{Serve, Shutdown},
    token::Gate,
};

/// Maximum size of a message of a request in bytes, the default of Go and tonic.
const MAX_MESSAGE: usize = 4 << 20;
/// Maximum size of a request's head, in bytes.
const MAX_HEAD: u32 = 64 * 1024;
/// Maximum number of calls of a connection at once; further calls wait in the client.
///
/// sandbox-router lets as many calls through to a sandbox by default, and has the calls of all its
/// clients on one connection. A call above the limits is therefore refused by the router, or by the
/// limits of commands and watches, instead of waiting.
const MAX_STREAMS: u32 = 1024;
/// Bytes of a call that are received before they are read.
const STREAM_WINDOW: u32 = 64 * 1024;
/// Bytes of all calls of a connection that are received before they are read, so that a call that
/// is not read does not block others.
///
/// A connection may hold 64 MiB of requests and as much of answers ([`SEND_BUFFER`]), in addition
/// to the messages of its calls. Only a malicious client does so, and a client that may call may
/// also start commands, which only the sandbox limits.
const CONNECTION_WINDOW: u32 = MAX_STREAMS * STREAM_WINDOW;
/// Bytes of a call that are buffered before the client receives them.
const SEND_BUFFER: usize = 64 * 1024;

/// Timeouts of a client.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// Time limit of the next piece of a request.
    pub body: Duration,
    /// Time without traffic after which a client gets a ping, and time limit of its answer.
    pub keepalive: Duration,
    /// Time without a call after which the connection is closed.
    pub idle: Duration,
}

/// Service of any type.
type Service = BoxCloneSyncService<Request<TimedBody>, Response<Answer>, Infallible>;

/// All services, by name.
#[derive(Debug)]
pub struct Grpc {
    services: BTreeMap<&'static str, Service>,
    gate: Arc<Gate>,
    timeouts: Timeouts,
}

impl Grpc {
    /// Returns the services of commands, of changes of files, and of reflection, for the clients
    /// that the gate admits.
    pub fn new(
        process: ProcessService,
        watcher: WatchService,
        gate: Arc<Gate>,
        timeouts: Timeouts,
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
            timeouts,
        }))
    }

    async fn respond(&self, request: Request<Incoming>) -> Response<Answer> {
        if let Err(closed) = self.gate.check(request.headers()).await {
            tracing::info!(%closed, "request refused");
            return Status::unauthenticated(closed.to_string()).into_http();
        }
        // `/package.Service/Method`
        let name = request.uri().path().split('/').nth(1).unwrap_or_default();
        let Some(service) = self.services.get(name) else {
            return Status::unimplemented(format!("unknown service {name}")).into_http();
        };
        let limit = self.timeouts.body;
        let request = request.map(|body| TimedBody::new(body, limit));
        match service.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }
}

fn named<S>(service: S) -> (&'static str, Service)
where
    S: NamedService
        + tower::Service<Request<TimedBody>, Response = Response<Answer>, Error = Infallible>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    (S::NAME, BoxCloneSyncService::new(service))
}

impl Serve for Grpc {
    async fn connection(self: Arc<Self>, stream: TcpStream, shutdown: Shutdown) {
        let calls = Arc::new(Sender::new(0_usize));
        let idle = idle_for(calls.subscribe(), self.timeouts.idle);
        let service = service_fn(|request| {
            let (this, call) = (Arc::clone(&self), CallGuard::new(&calls));
            async move {
                let response = this.respond(request).await;
                Ok::<_, Infallible>(response.map(|body| Counted { body, _call: call }))
            }
        });
        let http = self.http(shutdown.tasks);
        let mut serving = std::pin::pin!(http.serve_connection(TokioIo::new(stream), service));
        let ended = tokio::select! {
            ended = serving.as_mut() => ended,
            () = shutdown.closing.cancelled() => {
                serving.as_mut().graceful_shutdown();
                serving.await
            }
            // A call that begins at this moment is still answered.
            () = idle => {
                serving.as_mut().graceful_shutdown();
                match timeout(self.timeouts.keepalive, serving).await {
                    Ok(ended) => ended,
                    Err(_) => return tracing::debug!("an idle connection was cut"),
                }
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection failed");
        }
    }
}

impl Grpc {
    fn http(&self, tasks: TaskTracker) -> http2::Builder<Tasks> {
        let mut http = http2::Builder::new(Tasks(tasks));
        http.timer(TokioTimer::new())
            .keep_alive_interval(self.timeouts.keepalive)
            .keep_alive_timeout(self.timeouts.keepalive)
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(MAX_HEAD)
            .max_send_buf_size(SEND_BUFFER)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW);
        http
    }
}

/// Executor of calls that the shutdown waits for.
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

/// Completes after a time of `limit` without a call.
async fn idle_for(mut calls: Receiver<usize>, limit: Duration) {
    loop {
        // The sender lives as long as the connection, so that the wait does not fail.
        let _none = calls.wait_for(|calls| *calls == 0).await.map(drop);
        let next = timeout(limit, calls.wait_for(|calls| *calls > 0));
        if next.await.is_err() {
            return;
        }
    }
}

/// Guard that counts a call.
#[derive(Debug)]
struct CallGuard(Arc<Sender<usize>>);

impl CallGuard {
    fn new(calls: &Arc<Sender<usize>>) -> Self {
        calls.send_modify(|calls| *calls += 1);
        Self(Arc::clone(calls))
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        self.0.send_modify(|calls| *calls -= 1);
    }
}

/// Body of an answer whose call counts until its end.
#[derive(Debug)]
struct Counted {
    body: Answer,
    _call: CallGuard,
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

/// Body of a request with a time limit of its next piece.
#[derive(Debug)]
struct TimedBody {
    body: Incoming,
    limit: Duration,
    deadline: Pin<Box<Sleep>>,
}

impl TimedBody {
    fn new(body: Incoming, limit: Duration) -> Self {
        Self {
            body,
            limit,
            deadline: Box::pin(tokio::time::sleep(limit)),
        }
    }
}

impl Body for TimedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            let next = Instant::now() + self.limit;
            self.deadline.as_mut().reset(next);
            let broken = |error| Status::cancelled(format!("the request is incomplete: {error}"));
            return Poll::Ready(frame.map(|frame| frame.map_err(broken)));
        }
        ready!(self.deadline.as_mut().poll(context));
        let slow = "the request exceeded its time limit";
        Poll::Ready(Some(Err(Status::deadline_exceeded(slow))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

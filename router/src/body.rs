//! Bodies on their way through: counted, limited, bounded in time, never collected.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::{
    sync::Notify,
    time::{Sleep, sleep_until},
};
use tracing::Span;

use crate::{
    ahead::Ahead,
    calls::InUse,
    connection::InFlight,
    grpc,
    metrics::{self, Metrics, NamespaceLabel, RequestLabels},
    places::Place,
    refusal::Refusal,
    shares::Share,
    spans,
    web::{Decoder, Messages, NotBase64, Web},
};

/// A body was cut off.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the request body is larger than is allowed")]
    TooLarge,
    #[error("the request took longer than is allowed")]
    TooLong,
    #[error(transparent)]
    NotBase64(#[from] NotBase64),
    #[error("the answer ended within a message")]
    MidMessage,
    #[error(transparent)]
    Hyper(#[from] hyper::Error),
}

impl Error {
    /// One word for logs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::TooLarge => "TooLarge",
            Self::TooLong => "TooLong",
            Self::NotBase64(_) => "NotBase64",
            Self::MidMessage => "MidMessage",
            Self::Hyper(_) => "Connection",
        }
    }

    /// Whether the same request may do better.
    pub fn retry(&self) -> bool {
        match self {
            Self::TooLarge | Self::NotBase64(_) => false,
            Self::TooLong | Self::MidMessage | Self::Hyper(_) => true,
        }
    }
}

/// What was seen of a request's body so far.
#[derive(Debug, Default)]
pub struct Seen {
    bytes: AtomicU64,
    too_large: AtomicBool,
    not_base64: AtomicBool,
    sent: Notify,
}

impl Seen {
    /// Counts bytes that were no body's.
    pub fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// How many so far.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Until nothing more of it is to be sent. For one who waits, once.
    pub async fn sent(&self) {
        self.sent.notified().await;
    }

    /// Whether the body was cut off at the limit.
    pub fn too_large(&self) -> bool {
        self.too_large.load(Ordering::Relaxed)
    }

    /// Whether the body was cut off because it has to be base64 and is not.
    pub fn not_base64(&self) -> bool {
        self.not_base64.load(Ordering::Relaxed)
    }
}

/// A request's body.
#[derive(Debug)]
pub struct RequestBody {
    /// What comes before the rest.
    ahead: Ahead,
    inner: Incoming,
    /// 0: none.
    limit: u64,
    seen: Arc<Seen>,
    /// It is base64, and goes on as bytes.
    text: Option<Box<Decoder>>,
}

impl RequestBody {
    /// Lets at most `limit` bytes through; 0 sets no limit. `text`: what comes is base64, and goes on
    /// as bytes.
    pub fn new(ahead: Ahead, inner: Incoming, limit: u64, text: bool) -> Self {
        let body = Self {
            ahead,
            inner,
            limit,
            seen: Arc::default(),
            text: text.then(Box::default),
        };
        if body.is_end_stream() {
            body.seen.sent.notify_one();
        }
        body
    }

    /// The next frame as it comes, counted.
    fn poll_next(&mut self, task: &mut Context<'_>) -> Poll<Next> {
        let frame = match self.ahead.take_frame() {
            Some(frame) => Some(Ok(frame)),
            None if self.ahead.ended() => None,
            None => ready!(Pin::new(&mut self.inner).poll_frame(task)),
        };
        if let Some(Ok(frame)) = &frame {
            let size = frame.data_ref().map_or(0, |data| data.len() as u64);
            let total = self.seen.bytes.fetch_add(size, Ordering::Relaxed) + size;
            if self.limit > 0 && total > self.limit {
                self.seen.too_large.store(true, Ordering::Relaxed);
                return Poll::Ready(Some(Err(Error::TooLarge)));
            }
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Error::Hyper)))
    }

    /// What is seen of it, also once it is on its way.
    pub fn seen(&self) -> Arc<Seen> {
        Arc::clone(&self.seen)
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        // hyper lets go of it with its last byte.
        self.seen.sent.notify_one();
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        loop {
            let next = ready!(self.poll_next(task));
            let Some(text) = &mut self.text else {
                return Poll::Ready(next);
            };
            let bytes = decoded(text, next);
            if matches!(bytes, Some(Err(Error::NotBase64(_)))) {
                self.seen.not_base64.store(true, Ordering::Relaxed);
            }
            // Fewer than four letters are no bytes yet.
            let empty = |frame: &Frame<Bytes>| frame.data_ref().is_some_and(Bytes::is_empty);
            if !matches!(&bytes, Some(Ok(frame)) if empty(frame)) {
                return Poll::Ready(bytes);
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let whole = self.text.as_ref().is_none_or(|text| text.is_whole());
        whole && self.ahead.is_end_stream(&self.inner)
    }

    fn size_hint(&self) -> SizeHint {
        match self.text {
            Some(_) => SizeHint::default(),
            None => self.ahead.size_hint(&self.inner),
        }
    }
}

type Next = Option<Result<Frame<Bytes>, Error>>;

/// The next frame of base64 as bytes. One that ends in the middle of a letter's bytes is none.
fn decoded(text: &mut Decoder, frame: Next) -> Next {
    let frame = match frame {
        None if text.is_whole() => return None,
        None => return Some(Err(NotBase64.into())),
        Some(Err(error)) => return Some(Err(error)),
        Some(Ok(frame)) => frame,
    };
    Some(match frame.into_data() {
        Ok(letters) => text
            .decode(&letters)
            .map(Frame::data)
            .map_err(Error::NotBase64),
        Err(other) => Ok(other),
    })
}

/// One request and its answer; counted when it is dropped, which is when the last byte is gone or the client is.
#[derive(Debug)]
pub struct Exchange {
    pub metrics: Arc<Metrics>,
    pub method: &'static str,
    pub namespace: Arc<str>,
    pub sandbox: String,
    pub path: Option<String>,
    pub code: u16,
    /// A gRPC call: its errors are its trailers.
    pub grpc: bool,
    /// The call's client speaks gRPC-Web.
    pub web: Option<Web>,
    pub span: Span,
    pub begin: Instant,
    pub deadline: Option<Instant>,
    /// How long the client waits for the head of the answer, if it says so.
    pub patience: Option<Duration>,
    pub received: Option<Arc<Seen>>,
    pub sent: u64,
    /// The request reached the sandbox.
    pub reached: bool,
    /// Among the exchanges that have no end in sight.
    pub place: Option<Place>,
    /// Of its sandbox' other exchanges.
    pub share: Option<Share>,
    /// Keeps the client's connection from counting as idle.
    pub in_flight: InFlight,
}

impl Exchange {
    /// What is seen of the request's body.
    pub fn seen(&mut self) -> &Arc<Seen> {
        self.received.get_or_insert_default()
    }

    /// Whether its time is over.
    pub fn late(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| deadline <= Instant::now())
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let Self {
            metrics,
            method,
            namespace,
            code,
            ..
        } = &*self;
        let took = self.begin.elapsed();
        self.span.record("http.status_code", i64::from(*code));
        metrics.inflight.dec();
        if self.grpc {
            metrics.calls.dec();
        }
        let labels = RequestLabels {
            method,
            code: metrics::code(*code),
            sandbox_namespace: Arc::clone(namespace),
        };
        metrics.requests.get_or_create(&labels).inc();
        metrics
            .seconds
            .get_or_create(&labels)
            .observe(took.as_secs_f64());
        let label = NamespaceLabel {
            sandbox_namespace: Arc::clone(namespace),
        };
        let received = self
            .received
            .as_ref()
            .map(|seen| seen.bytes.load(Ordering::Relaxed));
        if let Some(received) = received {
            metrics.client_rx.get_or_create(&label).inc_by(received);
            metrics
                .request_bytes
                .get_or_create(&label)
                .observe(as_float(received));
        }
        metrics.client_tx.get_or_create(&label).inc_by(self.sent);
        metrics
            .response_bytes
            .get_or_create(&label)
            .observe(as_float(self.sent));
        if self.reached {
            metrics.upstream_rx.get_or_create(&label).inc_by(self.sent);
            metrics
                .upstream_tx
                .get_or_create(&label)
                .inc_by(received.unwrap_or_default());
        }
        if let Some(path) = &self.path {
            let (sandbox, milliseconds) = (&self.sandbox, took.as_millis());
            let ids = torpor_daemon::spans::ids(&self.span);
            let (trace_id, span_id) = ids.unzip();
            tracing::info!(
                method,
                path,
                code,
                namespace = &**namespace,
                sandbox,
                milliseconds,
                sent = self.sent,
                received,
                trace_id,
                span_id,
                "request"
            );
        }
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a histogram's bucket does not need the last byte of a petabyte"
)]
fn as_float(bytes: u64) -> f64 {
    bytes as f64
}

/// The body of a sandbox' answer.
#[derive(Debug)]
pub struct ResponseBody {
    inner: Incoming,
    /// Past the exchange's deadline; there from the first wait on, so that an answer that is there costs no timer.
    late: Option<Pin<Box<Sleep>>>,
    exchange: Exchange,
    /// The trailers of a call are passed on, or made up.
    ended: bool,
    /// What it comes as is gRPC and what it goes on as is gRPC-Web.
    web: Option<Web>,
    /// How far that has come.
    messages: Messages,
    _connection: Option<InUse>,
}

impl ResponseBody {
    /// Passes on what comes until the exchange's deadline; as gRPC-Web, if `web` says so.
    pub fn new(
        inner: Incoming,
        exchange: Exchange,
        web: Option<Web>,
        connection: Option<InUse>,
    ) -> Self {
        Self {
            inner,
            late: None,
            exchange,
            ended: false,
            web,
            messages: Messages::default(),
            _connection: connection,
        }
    }

    fn poll_late(&mut self, task: &mut Context<'_>) -> Poll<()> {
        let Some(deadline) = self.exchange.deadline else {
            return Poll::Pending;
        };
        let late = self
            .late
            .get_or_insert_with(|| Box::pin(sleep_until(deadline.into())));
        late.as_mut().poll(task)
    }

    /// The end of an answer that does not come to its own. A call hears why; of other answers only the breaking off can be told.
    fn broken(&mut self, error: Error) -> Result<Frame<Bytes>, Error> {
        let received = self.exchange.received.as_ref();
        let refusal = match error {
            _ if !self.exchange.grpc => return Err(error),
            // To a client of gRPC-Web no trailers can be sent behind what is no answer of gRPC,
            // nor within a message, of which they would be a part.
            _ if self.exchange.web != self.web || !self.messages.at_boundary() => {
                return Err(error);
            }
            _ if received.is_some_and(|seen| seen.too_large()) => Refusal::BodyTooLarge,
            _ if received.is_some_and(|seen| seen.not_base64()) => Refusal::NotBase64,
            Error::TooLong => Refusal::TooLate,
            Error::TooLarge | Error::NotBase64(_) | Error::MidMessage | Error::Hyper(_) => {
                return Err(error);
            }
        };
        self.ended = true;
        Ok(Frame::trailers(grpc::trailers(&refusal)))
    }

    /// A frame as the client gets it.
    fn passed_on(&mut self, frame: Frame<Bytes>) -> Result<Frame<Bytes>, Error> {
        if let Some(trailers) = frame.trailers_ref()
            && self.exchange.grpc
        {
            spans::ended(&self.exchange.span, trailers);
        }
        let Some(web) = self.web else {
            return Ok(frame);
        };
        match frame.into_data() {
            Ok(data) => {
                self.messages.take(&data);
                Ok(Frame::data(web.data(data)))
            }
            Err(_) if !self.messages.at_boundary() => Err(Error::MidMessage),
            Err(frame) => {
                self.ended = true;
                let trailers = frame.into_trailers().unwrap_or_default();
                Ok(Frame::data(web.trailers(&trailers)))
            }
        }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let error = match Pin::new(&mut self.inner).poll_frame(task) {
            Poll::Ready(Some(Ok(frame))) => {
                self.exchange.sent += frame.data_ref().map_or(0, |data| data.len() as u64);
                return Poll::Ready(Some(self.passed_on(frame)));
            }
            Poll::Ready(None) => return Poll::Ready(None),
            Poll::Ready(Some(Err(error))) => Error::Hyper(error),
            Poll::Pending => {
                ready!(self.poll_late(task));
                Error::TooLong
            }
        };
        let end = self.broken(error).and_then(|frame| self.passed_on(frame));
        Poll::Ready(Some(end))
    }

    fn is_end_stream(&self) -> bool {
        self.ended || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match self.web {
            Some(_) => SizeHint::default(),
            None => self.inner.size_hint(),
        }
    }
}

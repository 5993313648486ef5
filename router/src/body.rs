//! Bodies of requests and responses: counted, limited in size and time, never buffered whole.

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
    body_prefetch::BodyPrefetch,
    calls::InUse,
    connection::InFlight,
    grpc,
    metrics::{self, Metrics, NamespaceLabel, RequestLabels},
    refusal::Refusal,
    sandbox_limit::SandboxPermit,
    spans,
    wait_slots::WaitSlot,
    web::{Decoder, Messages, NotBase64, Web},
};

/// Error that cuts off a body.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the request body exceeds the limit")]
    TooLarge,
    #[error("the request exceeded its time limit")]
    TooLong,
    #[error(transparent)]
    NotBase64(#[from] NotBase64),
    #[error("the response ended within a message")]
    MidMessage,
    #[error(transparent)]
    Hyper(#[from] hyper::Error),
}

impl Error {
    /// Returns a CamelCase reason for logs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::TooLarge => "TooLarge",
            Self::TooLong => "TooLong",
            Self::NotBase64(_) => "NotBase64",
            Self::MidMessage => "MidMessage",
            Self::Hyper(_) => "Connection",
        }
    }

    /// Reports whether the same request may succeed when repeated.
    pub fn retry(&self) -> bool {
        match self {
            Self::TooLarge | Self::NotBase64(_) => false,
            Self::TooLong | Self::MidMessage | Self::Hyper(_) => true,
        }
    }
}

/// Progress of a request body.
#[derive(Debug, Default)]
pub struct BodyProgress {
    bytes: AtomicU64,
    too_large: AtomicBool,
    not_base64: AtomicBool,
    sent: Notify,
}

impl BodyProgress {
    /// Counts bytes that did not pass through a [`RequestBody`].
    pub fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the number of bytes so far.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Waits until the whole body is sent. Only one caller may wait, and only once.
    pub async fn sent(&self) {
        self.sent.notified().await;
    }

    /// Reports whether the body was cut off at the size limit.
    pub fn too_large(&self) -> bool {
        self.too_large.load(Ordering::Relaxed)
    }

    /// Reports whether the body was cut off because it was invalid base64.
    pub fn not_base64(&self) -> bool {
        self.not_base64.load(Ordering::Relaxed)
    }
}

/// Body of a request.
#[derive(Debug)]
pub struct RequestBody {
    /// Part that was read while the request was held; it precedes `inner`.
    prefetch: BodyPrefetch,
    inner: Incoming,
    /// Largest size in bytes; 0: no limit.
    limit: u64,
    progress: Arc<BodyProgress>,
    /// Decoder of a base64 body; the sandbox receives bytes.
    text: Option<Box<Decoder>>,
}

impl RequestBody {
    /// Returns a body that passes at most `limit` bytes; 0 sets no limit. `text`: the client sends
    /// base64, and the sandbox receives bytes.
    pub fn new(prefetch: BodyPrefetch, inner: Incoming, limit: u64, text: bool) -> Self {
        let body = Self {
            prefetch,
            inner,
            limit,
            progress: Arc::default(),
            text: text.then(Box::default),
        };
        if body.is_end_stream() {
            body.progress.sent.notify_one();
        }
        body
    }

    /// Returns the next frame as the client sent it, and counts its bytes.
    fn poll_next(&mut self, task: &mut Context<'_>) -> Poll<Next> {
        let frame = match self.prefetch.take_frame() {
            Some(frame) => Some(Ok(frame)),
            None if self.prefetch.ended() => None,
            None => ready!(Pin::new(&mut self.inner).poll_frame(task)),
        };
        if let Some(Ok(frame)) = &frame {
            let size = frame.data_ref().map_or(0, |data| data.len() as u64);
            let total = self.progress.bytes.fetch_add(size, Ordering::Relaxed) + size;
            if self.limit > 0 && total > self.limit {
                self.progress.too_large.store(true, Ordering::Relaxed);
                return Poll::Ready(Some(Err(Error::TooLarge)));
            }
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Error::Hyper)))
    }

    /// Returns the progress, which stays readable after hyper has taken the body.
    pub fn progress(&self) -> Arc<BodyProgress> {
        Arc::clone(&self.progress)
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        // hyper drops the body after it has read the last byte.
        self.progress.sent.notify_one();
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
                self.progress.not_base64.store(true, Ordering::Relaxed);
            }
            // Fewer than four base64 characters decode to no bytes.
            let empty = |frame: &Frame<Bytes>| frame.data_ref().is_some_and(Bytes::is_empty);
            if !matches!(&bytes, Some(Ok(frame)) if empty(frame)) {
                return Poll::Ready(bytes);
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let whole = self.text.as_ref().is_none_or(|text| text.is_whole());
        whole && self.prefetch.is_end_stream(&self.inner)
    }

    fn size_hint(&self) -> SizeHint {
        match self.text {
            Some(_) => SizeHint::default(),
            None => self.prefetch.size_hint(&self.inner),
        }
    }
}

type Next = Option<Result<Frame<Bytes>, Error>>;

/// Decodes the next frame of base64. A body that ends within a group of four characters is invalid.
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

/// One request and its response.
///
/// Dropping it counts it in the metrics: after the last byte of the response, or when the client
/// disconnects.
#[derive(Debug)]
pub struct Exchange {
    pub metrics: Arc<Metrics>,
    pub method: &'static str,
    pub namespace: Arc<str>,
    pub sandbox: String,
    pub path: Option<String>,
    pub code: u16,
    /// The request is a gRPC call: its errors are sent as trailers.
    pub grpc: bool,
    /// gRPC-Web format of the client, if the client speaks gRPC-Web.
    pub web: Option<Web>,
    pub span: Span,
    pub begin: Instant,
    pub deadline: Option<Instant>,
    /// Time the client waits for the response headers, if the request names it.
    pub client_timeout: Option<Duration>,
    pub received: Option<Arc<BodyProgress>>,
    pub sent: u64,
    /// The sandbox has responded.
    pub reached: bool,
    /// Slot of a long-lived exchange: a tunnel or a gRPC call.
    pub slot: Option<WaitSlot>,
    /// Permit of any other exchange, from the limit of its sandbox.
    pub sandbox_permit: Option<SandboxPermit>,
    /// Guard that keeps the client's connection from counting as idle.
    pub in_flight: InFlight,
}

impl Exchange {
    /// Returns the progress of the request body.
    pub fn progress(&mut self) -> &Arc<BodyProgress> {
        self.received.get_or_insert_default()
    }

    /// Reports whether the deadline has passed.
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
            .map(|progress| progress.bytes.load(Ordering::Relaxed));
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

/// Body of a sandbox's response.
#[derive(Debug)]
pub struct ResponseBody {
    inner: Incoming,
    /// Timer for the exchange's deadline, made at the first wait: a response that needs no wait
    /// costs no timer.
    late: Option<Pin<Box<Sleep>>>,
    exchange: Exchange,
    /// The trailers of a call have been sent: the sandbox's or the router's.
    ended: bool,
    /// gRPC-Web format for the client; the sandbox sends gRPC.
    web: Option<Web>,
    /// Position in the messages of the response.
    messages: Messages,
    _connection: Option<InUse>,
}

impl ResponseBody {
    /// Returns a body that passes frames on until the exchange's deadline, as gRPC-Web if `web` is
    /// set.
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

    /// Ends a response that breaks off. A gRPC call gets the reason in trailers; any other response
    /// can only be cut off.
    fn break_off(&mut self, error: Error) -> Result<Frame<Bytes>, Error> {
        let received = self.exchange.received.as_ref();
        let refusal = match error {
            _ if !self.exchange.grpc => return Err(error),
            // A gRPC-Web client reads trailers as a message. It could not read them after a
            // response that is not gRPC, nor within a message.
            _ if self.exchange.web != self.web || !self.messages.at_boundary() => {
                return Err(error);
            }
            _ if received.is_some_and(|progress| progress.too_large()) => Refusal::BodyTooLarge,
            _ if received.is_some_and(|progress| progress.not_base64()) => Refusal::NotBase64,
            Error::TooLong => Refusal::TooLate,
            Error::TooLarge | Error::NotBase64(_) | Error::MidMessage | Error::Hyper(_) => {
                return Err(error);
            }
        };
        self.ended = true;
        Ok(Frame::trailers(grpc::trailers(&refusal)))
    }

    /// Converts a frame to the client's format.
    fn convert(&mut self, frame: Frame<Bytes>) -> Result<Frame<Bytes>, Error> {
        if let Some(trailers) = frame.trailers_ref()
            && self.exchange.grpc
        {
            spans::record_grpc_status(&self.exchange.span, trailers);
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
                return Poll::Ready(Some(self.convert(frame)));
            }
            Poll::Ready(None) => return Poll::Ready(None),
            Poll::Ready(Some(Err(error))) => Error::Hyper(error),
            Poll::Pending => {
                ready!(self.poll_late(task));
                Error::TooLong
            }
        };
        let end = self.break_off(error).and_then(|frame| self.convert(frame));
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

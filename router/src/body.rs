//! Bodies on their way through: counted, limited, bounded in time, never collected.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Instant,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Sleep, sleep_until};

use crate::{
    connection::InFlight,
    metrics::{Metrics, NamespaceLabel, RequestLabels},
};

/// A body was cut off.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the request body is larger than is allowed")]
    TooLarge,
    #[error("the request took longer than is allowed")]
    TooLong,
    #[error(transparent)]
    Hyper(#[from] hyper::Error),
}

impl Error {
    /// One word for logs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::TooLarge => "TooLarge",
            Self::TooLong => "TooLong",
            Self::Hyper(_) => "Connection",
        }
    }

    /// Whether the same request may do better.
    pub fn retry(&self) -> bool {
        match self {
            Self::TooLarge => false,
            Self::TooLong | Self::Hyper(_) => true,
        }
    }
}

/// What was seen of a request's body so far.
#[derive(Debug, Default)]
pub struct Seen {
    bytes: AtomicU64,
    too_large: AtomicBool,
}

impl Seen {
    /// Whether the body was cut off at the limit.
    pub fn too_large(&self) -> bool {
        self.too_large.load(Ordering::Relaxed)
    }
}

/// A request's body.
#[derive(Debug)]
pub struct RequestBody {
    inner: Incoming,
    /// 0: none.
    limit: u64,
    seen: Arc<Seen>,
}

impl RequestBody {
    /// Lets at most `limit` bytes through; 0 sets no limit.
    pub fn new(inner: Incoming, limit: u64) -> Self {
        Self {
            inner,
            limit,
            seen: Arc::default(),
        }
    }

    /// What is seen of it, also once it is on its way.
    pub fn seen(&self) -> Arc<Seen> {
        Arc::clone(&self.seen)
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let frame = std::task::ready!(Pin::new(&mut self.inner).poll_frame(task));
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

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
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
    pub begin: Instant,
    pub received: Option<Arc<Seen>>,
    pub sent: u64,
    /// The request reached the sandbox.
    pub reached: bool,
    /// Keeps the client's connection from counting as idle.
    pub in_flight: InFlight,
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
        metrics.inflight.dec();
        let labels = RequestLabels {
            method,
            code: *code,
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
            tracing::info!(
                method,
                path,
                code,
                namespace = &**namespace,
                sandbox,
                milliseconds,
                sent = self.sent,
                received,
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
    deadline: Pin<Box<Sleep>>,
    exchange: Exchange,
}

impl ResponseBody {
    /// Passes on what comes until `deadline`.
    pub fn new(inner: Incoming, deadline: Instant, exchange: Exchange) -> Self {
        let deadline = Box::pin(sleep_until(deadline.into()));
        Self {
            inner,
            deadline,
            exchange,
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
        match Pin::new(&mut self.inner).poll_frame(task) {
            Poll::Ready(frame) => {
                if let Some(Ok(frame)) = &frame {
                    self.exchange.sent += frame.data_ref().map_or(0, |data| data.len() as u64);
                }
                Poll::Ready(frame.map(|frame| frame.map_err(Error::Hyper)))
            }
            // Only who has to wait may run out of time: an answer that is there costs no timer.
            Poll::Pending => {
                std::task::ready!(self.deadline.as_mut().poll(task));
                Poll::Ready(Some(Err(Error::TooLong)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

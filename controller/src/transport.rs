//! Transport of every call to the apiserver: a counter, and the client-side rate limit of
//! `--kube-api-qps` and `--kube-api-burst`, as in client-go.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures::{FutureExt, future::BoxFuture};
use http::{Request, Response};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use tokio::time::{Duration, Instant, Sleep};
use tower::{Layer, Service};

/// Rate limit of calls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Calls per second in the long run; more than 0.
    pub per_second: f64,
    /// Calls that may follow at once after a pause; at least 1.
    pub burst: u32,
}

impl Rate {
    /// Returns the limit of the two flags, as client-go does: a rate that is not positive is no
    /// limit.
    pub fn of(per_second: f64, burst: u32) -> Option<Self> {
        (per_second > 0.0).then_some(Self { per_second, burst })
    }
}

/// Token bucket: tokens arrive at a rate, up to a burst; each call takes one. Pure: the caller
/// passes the time.
#[derive(Debug)]
struct Bucket {
    rate: Rate,
    tokens: f64,
    filled: Instant,
}

impl Bucket {
    fn full(rate: Rate, now: Instant) -> Self {
        let tokens = f64::from(rate.burst);
        Self {
            rate,
            tokens,
            filled: now,
        }
    }

    /// Returns the time until a token arrives; `None` when the bucket has one.
    fn wait(&mut self, now: Instant) -> Option<Duration> {
        let come = (now - self.filled).as_secs_f64() * self.rate.per_second;
        self.tokens = (self.tokens + come).min(f64::from(self.rate.burst));
        self.filled = now;
        if self.tokens >= 1.0 {
            return None;
        }
        let missing = (1.0 - self.tokens) / self.rate.per_second;
        let wait = Duration::try_from_secs_f64(missing).unwrap_or(Duration::MAX);
        // At least 1 ms, so that rounding causes no busy loop; at most an hour, which a timer can
        // hold.
        Some(wait.clamp(Duration::from_millis(1), Duration::from_secs(3600)))
    }

    /// Takes an available token.
    fn take(&mut self) {
        self.tokens -= 1.0;
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    code: String,
    method: &'static str,
    host: Arc<str>,
}

/// Counter of calls by answer, as client-go's.
#[derive(Clone, Debug, Default)]
pub struct Requests(Family<RequestLabels, Counter>);

impl Requests {
    /// Registers the counter as `rest_client_requests_total`.
    pub fn register(&self, registry: &mut Registry) {
        let help =
            "Calls to the apiserver by method and answer; <error> for calls without an answer";
        registry.register("rest_client_requests", help, self.0.clone());
    }

    fn count(&self, method: &'static str, host: &Arc<str>, code: Option<http::StatusCode>) {
        let labels = RequestLabels {
            code: code.map_or_else(|| "<error>".to_owned(), |code| code.as_str().to_owned()),
            method,
            host: Arc::clone(host),
        };
        self.0.get_or_create(&labels).inc();
    }
}

fn method(method: &http::Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "POST" => "POST",
        "PUT" => "PUT",
        "PATCH" => "PATCH",
        "DELETE" => "DELETE",
        _ => "other",
    }
}

/// Layer that adds counter and limit to a client's service.
#[derive(Clone, Debug)]
pub struct TransportLayer {
    rate: Option<Rate>,
    requests: Requests,
    host: Arc<str>,
}

impl TransportLayer {
    /// Returns a layer that counts calls to the apiserver `host` in `requests`; without a `rate`
    /// they are not delayed.
    pub fn new(rate: Option<Rate>, requests: Requests, host: &str) -> Self {
        Self {
            rate,
            requests,
            host: host.into(),
        }
    }
}

impl<S> Layer<S> for TransportLayer {
    type Service = Transport<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Transport {
            inner,
            bucket: self.rate.map(|rate| Bucket::full(rate, Instant::now())),
            waiting: None,
            requests: self.requests.clone(),
            host: Arc::clone(&self.host),
        }
    }
}

/// Client's service with counter and limit.
///
/// The service is not ready while the bucket has no token. The client's queue in front of the
/// service keeps the order; cancelled calls leave that queue and take no token.
#[derive(Debug)]
pub struct Transport<S> {
    inner: S,
    bucket: Option<Bucket>,
    /// Sleep until the next token may have arrived.
    waiting: Option<Pin<Box<Sleep>>>,
    requests: Requests,
    host: Arc<str>,
}

impl<S> Transport<S> {
    fn poll_token(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(bucket) = &mut self.bucket else {
            return Poll::Ready(());
        };
        loop {
            if let Some(waiting) = &mut self.waiting {
                ready!(waiting.as_mut().poll(cx));
                self.waiting = None;
            }
            match bucket.wait(Instant::now()) {
                None => return Poll::Ready(()),
                Some(wait) => self.waiting = Some(Box::pin(tokio::time::sleep(wait))),
            }
        }
    }
}

impl<S, In, Out> Service<Request<In>> for Transport<S>
where
    S: Service<Request<In>, Response = Response<Out>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        ready!(self.poll_token(cx));
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<In>) -> Self::Future {
        if let Some(bucket) = &mut self.bucket {
            bucket.take();
        }
        let method = method(request.method());
        let answer = self.inner.call(request);
        let (requests, host) = (self.requests.clone(), Arc::clone(&self.host));
        async move {
            let answer = answer.await;
            let code = answer.as_ref().ok().map(Response::status);
            requests.count(method, &host, code);
            answer
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests;

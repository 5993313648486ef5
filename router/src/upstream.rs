//! Connection pool for sandboxes.
//!
//! The key is Sandbox UID, Pod UID, address and port. A connection to one sandbox is therefore
//! never used for another, even if the address passes to another Pod.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::{Uri, uri::PathAndQuery};
use hyper_util::{
    client::legacy::Client,
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

use crate::{
    body::RequestBody,
    directory::Directory,
    gate::Destination,
    metrics::{Metrics, NamespaceLabel},
    server::{MAX_HEAD, MAX_HEADERS},
};

/// Retries of connection attempts.
#[derive(Clone, Copy, Debug)]
pub struct Dialling {
    /// Attempts after the first.
    pub retries: u32,
    /// Delay before the second attempt; doubled before each further one.
    pub first_delay: Duration,
    pub longest_delay: Duration,
}

impl Dialling {
    /// Returns the delays between attempts.
    pub fn delays(self) -> impl Iterator<Item = Duration> {
        let delay = move |n: u32| {
            let factor = 1_u32.checked_shl(n).unwrap_or(u32::MAX);
            self.first_delay
                .saturating_mul(factor)
                .min(self.longest_delay)
        };
        (0..self.retries).map(delay)
    }
}

/// Longest time of one attempt. A sandbox that hibernates in place accepts a connection within it.
const ATTEMPT: Duration = Duration::from_secs(10);
/// Time after which an unused connection is closed; upstream's.
const IDLE: Duration = Duration::from_secs(90);
/// Most unused connections to one port of one sandbox.
const IDLE_PER_PORT: usize = 64;
/// Idle time before the first TCP keepalive probe, and time between probes.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// Error of connecting to a sandbox.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    #[error("{0} is not a key of the connection pool")]
    Key(Uri),
    /// The watch has reported a change since the request was routed.
    #[error("the Pod is no longer at {0}")]
    Moved(IpAddr),
    #[error("no connection to {0} in {ATTEMPT:?}")]
    Timeout(SocketAddr),
    #[error("cannot connect to {address}")]
    Connect {
        address: SocketAddr,
        #[source]
        error: io::Error,
    },
}

impl DialError {
    /// Returns upstream's `reason` label.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Timeout(_) => "timeout",
            Self::Key(_) | Self::Moved(_) | Self::Connect { .. } => "dial",
        }
    }

    /// Reports whether another attempt may succeed.
    pub fn retry(&self) -> bool {
        match self {
            Self::Timeout(_) | Self::Connect { .. } => true,
            Self::Key(_) | Self::Moved(_) => false,
        }
    }
}

/// Pool of HTTP/1 connections.
pub type Pool = Client<Dialer, RequestBody>;

/// Returns a pool without connections.
pub fn pool(dialer: Dialer) -> Pool {
    Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE)
        .pool_max_idle_per_host(IDLE_PER_PORT)
        .http1_max_buf_size(MAX_HEAD)
        .http1_max_headers(MAX_HEADERS)
        // `rewrite` sets the Host header.
        .set_host(false)
        .build(dialer)
}

/// Returns the URI of a request for the pool; its authority is the key.
pub fn pool_uri(destination: &Destination, path: PathAndQuery) -> Result<Uri, http::Error> {
    with_authority(&Key::of(destination).to_string(), path)
}

/// Returns the URI of a request as the sandbox sees it.
pub fn uri(destination: &Destination, path: PathAndQuery) -> Result<Uri, http::Error> {
    let address = SocketAddr::new(destination.address, destination.port);
    with_authority(&address.to_string(), path)
}

fn with_authority(authority: &str, path: PathAndQuery) -> Result<Uri, http::Error> {
    Uri::builder()
        .scheme("http")
        .authority(authority)
        .path_and_query(path)
        .build()
}

/// Key of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key<'a> {
    namespace: &'a str,
    sandbox_uid: &'a str,
    pod_uid: &'a str,
    address: IpAddr,
    port: u16,
}

impl<'a> Key<'a> {
    /// Returns the key of a destination.
    pub fn of(destination: &'a Destination) -> Self {
        let Destination {
            namespace,
            sandbox_uid,
            pod_uid,
            address,
            port,
        } = destination;
        Self {
            namespace,
            sandbox_uid,
            pod_uid,
            address: *address,
            port: *port,
        }
    }

    fn read(uri: &'a Uri) -> Option<Self> {
        let mut parts = uri.host()?.split('.');
        let address = parts.next()?;
        let address = match address.len() {
            8 => IpAddr::V4(u32::from_str_radix(address, 16).ok()?.into()),
            32 => IpAddr::V6(u128::from_str_radix(address, 16).ok()?.into()),
            _ => return None,
        };
        let (pod_uid, sandbox_uid, namespace) = (parts.next()?, parts.next()?, parts.next()?);
        let port = uri.port_u16()?;
        parts.next().is_none().then_some(Self {
            namespace,
            sandbox_uid,
            pod_uid,
            address,
            port,
        })
    }
}

impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            IpAddr::V4(v4) => write!(f, "{:08x}", v4.to_bits())?,
            IpAddr::V6(v6) => write!(f, "{:032x}", v6.to_bits())?,
        }
        let Self {
            namespace,
            sandbox_uid,
            pod_uid,
            port,
            ..
        } = self;
        write!(f, ".{pod_uid}.{sandbox_uid}.{namespace}:{port}")
    }
}

/// Connects to sandboxes.
#[derive(Clone, Debug)]
pub struct Dialer {
    directory: Directory,
    dialling: Dialling,
    metrics: Arc<Metrics>,
}

impl Dialer {
    /// Returns a dialer that connects to the Pods in `directory`.
    pub fn new(directory: Directory, dialling: Dialling, metrics: Arc<Metrics>) -> Self {
        Self {
            directory,
            dialling,
            metrics,
        }
    }

    /// Connects with upstream's retries, as long as the directory has the Pod at the address.
    pub async fn dial(&self, key: Key<'_>) -> Result<TokioIo<TcpStream>, DialError> {
        let mut delays = self.dialling.delays();
        let label = || NamespaceLabel {
            sandbox_namespace: key.namespace.into(),
        };
        loop {
            let error = match self.attempt(&key).await {
                Ok(stream) => return Ok(TokioIo::new(stream)),
                Err(error) => error,
            };
            if matches!(error, DialError::Moved(_)) {
                self.metrics
                    .cache_invalidations
                    .get_or_create(&label())
                    .inc();
            }
            let Some(delay) = delays.next().filter(|_| error.retry()) else {
                return Err(error);
            };
            self.metrics.upstream_retries.get_or_create(&label()).inc();
            tokio::time::sleep(delay).await;
        }
    }

    async fn attempt(&self, key: &Key<'_>) -> Result<TcpStream, DialError> {
        let moved = || DialError::Moved(key.address);
        let here = || self.directory.is_at(key.pod_uid, key.address);
        if !here() || !self.directory.policy().allows(key.address) {
            return Err(moved());
        }
        let address = SocketAddr::new(key.address, key.port);
        let stream = match tokio::time::timeout(ATTEMPT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Err(DialError::Connect { address, error }),
            Err(_) => return Err(DialError::Timeout(address)),
        };
        // The address may have passed to another Pod during the attempt.
        if !here() {
            return Err(moved());
        }
        tune(&stream);
        Ok(stream)
    }
}

/// Sets TCP_NODELAY, and keepalive to detect lost peers.
pub fn tune(stream: &TcpStream) {
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE)
        .with_interval(KEEPALIVE);
    let tuned = stream
        .set_nodelay(true)
        .and_then(|()| SockRef::from(stream).set_tcp_keepalive(&keepalive));
    if let Err(error) = tuned {
        tracing::debug!(%error, "socket options not set");
    }
}

impl tower::Service<Uri> for Dialer {
    type Response = TokioIo<TcpStream>;
    type Error = DialError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, DialError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), DialError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let dialer = self.clone();
        Box::pin(async move {
            let key = Key::read(&uri).ok_or_else(|| DialError::Key(uri.clone()))?;
            dialer.dial(key).await
        })
    }
}

/// Returns upstream's `reason` label of a failed request.
pub fn reason(error: &(dyn std::error::Error + 'static)) -> &'static str {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(dial) = error.downcast_ref::<DialError>() {
            return dial.reason();
        }
        if let Some(hyper) = error.downcast_ref::<hyper::Error>()
            && (hyper.is_incomplete_message() || hyper.is_closed())
        {
            return "eof";
        }
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return match io.kind() {
                io::ErrorKind::TimedOut => "timeout",
                io::ErrorKind::UnexpectedEof
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe => "eof",
                _ => "other",
            };
        }
        next = error.source();
    }
    "other"
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn destination(address: IpAddr, port: u16, pod: &str, sandbox: &str) -> Destination {
        Destination {
            namespace: "ns".into(),
            sandbox_uid: sandbox.into(),
            pod_uid: pod.into(),
            address,
            port,
        }
    }

    #[test]
    fn the_delays_are_upstreams() {
        let dialling = Dialling {
            retries: 3,
            first_delay: Duration::from_millis(200),
            longest_delay: Duration::from_millis(800),
        };
        let delays: Vec<u128> = dialling.delays().map(|delay| delay.as_millis()).collect();
        assert_eq!(delays, [200, 400, 800]);
    }

    proptest! {
        #[test]
        fn a_key_is_read_back_as_it_was_written(
            address in any::<IpAddr>(), port in 1_u16.., pod in "[0-9a-f-]{1,36}", sandbox in "[0-9a-f-]{1,36}",
        ) {
            let destination = destination(address, port, &pod, &sandbox);
            let uri = pool_uri(&destination, PathAndQuery::from_static("/a?b")).unwrap();
            prop_assert_eq!(Key::read(&uri), Some(Key::of(&destination)));
            prop_assert_eq!(uri.path_and_query().unwrap(), "/a?b");
        }

        #[test]
        fn no_two_destinations_share_a_key(
            a in any::<(IpAddr, u16)>(), b in any::<(IpAddr, u16)>(), uids in prop::array::uniform4("[0-9a-f-]{1,6}"),
        ) {
            let [p, s, q, t] = uids;
            let (x, y) = (destination(a.0, a.1, &p, &s), destination(b.0, b.1, &q, &t));
            prop_assert_eq!(x == y, Key::of(&x).to_string() == Key::of(&y).to_string());
        }
    }
}

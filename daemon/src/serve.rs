//! Small HTTP servers: probes and metrics.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinSet, yield_now},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

pub use crate::connections::Bounds;
use crate::connections::Connections;

/// Size limit of a request's head, in bytes.
const MAX_HEAD: usize = 16 * 1024;
/// Pause after a failed accept, such as when no file descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const LIMITS: Limits = Limits {
    connections: Bounds {
        total: 64,
        per_address: 8,
    },
    head: Duration::from_secs(5),
    connection: Duration::from_secs(15),
};

/// Limits of a server's clients.
///
/// Every process that reaches the address is a client, a sandbox too, and the daemon has little
/// memory.
#[derive(Clone, Copy)]
struct Limits {
    /// Connections at once. The kubelet and a scraper need one or two each, and must get them
    /// however many connections the other clients hold.
    connections: Bounds,
    /// Time limit of a request's head.
    head: Duration,
    /// Time limit of a connection: one request and its answer.
    connection: Duration,
}

/// Binds the address.
pub async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        // A machine without IPv6 cannot bind the IPv6 wildcard.
        Err(_) if address.ip().is_unspecified() && address.is_ipv6() => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        other => other,
    }
}

/// Binds the address, serves in the background, and returns the address that was bound.
///
/// A port that is in use is an error at once.
pub async fn serve(
    address: SocketAddr,
    router: Router,
    shutdown: CancellationToken,
) -> io::Result<SocketAddr> {
    let listener = listen(address).await?;
    let bound = listener.local_addr()?;
    tokio::spawn(serve_on(listener, router, shutdown));
    Ok(bound)
}

/// Serves until `shutdown`, then finishes the requests under way.
pub async fn serve_on(listener: TcpListener, router: Router, shutdown: CancellationToken) {
    serve_within(LIMITS, listener, router, shutdown).await;
}

async fn serve_within(
    limits: Limits,
    listener: TcpListener,
    router: Router,
    shutdown: CancellationToken,
) {
    let stop = shutdown.clone();
    let answer = |stream| answer(limits, stream, router.clone(), stop.clone());
    each(listener, limits.connections, answer, shutdown).await;
}

/// Answers each connection until `shutdown`, then waits for the answers under way. `answer` ends
/// them. A connection that exceeds the limits ends another one.
pub async fn each<F>(
    listener: TcpListener,
    limits: Bounds,
    answer: impl Fn(TcpStream) -> F,
    shutdown: CancellationToken,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut connections = JoinSet::new();
    let accepting = accept_all(limits, listener, answer, &mut connections);
    shutdown.run_until_cancelled(accepting).await;
    while connections.join_next().await.is_some() {}
}

async fn accept_all<F>(
    limits: Bounds,
    listener: TcpListener,
    answer: impl Fn(TcpStream) -> F,
    connections: &mut JoinSet<()>,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut open: Connections<AbortHandle> = Connections::new(limits);
    loop {
        let (stream, peer) = tokio::select! {
            biased;
            Some(ended) = connections.join_next_with_id() => {
                let ended = ended.map_or_else(|error| error.id(), |(id, ())| id);
                open.remove(|connection| connection.id() == ended);
                continue;
            }
            accepted = accept(&listener) => accepted,
        };
        let connection = connections.spawn(answer(stream));
        if let Some(surplus) = open.add(peer, connection) {
            surplus.abort();
            // The aborted task ends before the next connection is accepted.
            yield_now().await;
        }
    }
}

async fn accept(listener: &TcpListener) -> (TcpStream, IpAddr) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => return (stream, peer.ip()),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Answers one request and closes the connection, so that no client keeps one between requests.
async fn answer(limits: Limits, stream: TcpStream, router: Router, shutdown: CancellationToken) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        .max_buf_size(MAX_HEAD)
        .keep_alive(false);
    let serving = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut serving = std::pin::pin!(serving);
    let ending = async {
        tokio::select! {
            ended = serving.as_mut() => ended,
            () = shutdown.cancelled() => {
                serving.as_mut().graceful_shutdown();
                serving.await
            }
        }
    };
    match timeout(limits.connection, ending).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a connection failed"),
        Err(_) => tracing::debug!("a connection exceeded its time limit"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::routing::get;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpSocket,
        sync::Notify,
        task::JoinHandle,
    };

    use super::*;

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";
    /// Time limit that no passing test reaches.
    const LONG: Duration = Duration::from_secs(20);
    /// Timeout of the kubelet's probes.
    const PROBE: Duration = Duration::from_secs(1);
    const NO_TIME_LIMITS: Limits = Limits {
        connections: LIMITS.connections,
        head: LONG,
        connection: LONG,
    };

    struct Served {
        address: SocketAddr,
        shutdown: CancellationToken,
        ended: JoinHandle<()>,
    }

    async fn served(limits: Limits, router: Router) -> Served {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        let ended = tokio::spawn(serve_within(limits, listener, router, shutdown.clone()));
        Served {
            address,
            shutdown,
            ended,
        }
    }

    fn ok() -> Router {
        Router::new().route("/", get(|| async { "ok" }))
    }

    async fn sent(address: SocketAddr, bytes: &[u8]) -> TcpStream {
        sent_from(1, address, bytes).await
    }

    /// Sends from 127.0.0.`last`.
    async fn sent_from(last: u8, address: SocketAddr, bytes: &[u8]) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        let own = Ipv4Addr::new(127, 0, 0, last);
        socket.bind(SocketAddr::from((own, 0))).unwrap();
        let mut stream = socket.connect(address).await.unwrap();
        // The server may have closed the connection before the last byte.
        let _ = stream.write_all(bytes).await;
        stream
    }

    /// Returns what comes until the server closes the connection.
    async fn rest(mut stream: TcpStream) -> String {
        let mut bytes = Vec::new();
        let read = timeout(LONG / 2, stream.read_to_end(&mut bytes)).await;
        let _ = read.expect("the connection stays open");
        String::from_utf8(bytes).unwrap()
    }

    async fn is_open(stream: &mut TcpStream) -> bool {
        let read = timeout(Duration::from_millis(50), stream.read_u8());
        read.await.is_err()
    }

    #[tokio::test]
    async fn a_request_is_answered_and_its_connection_ends() {
        let server = served(NO_TIME_LIMITS, ok()).await;
        let answer = rest(sent(server.address, REQUEST).await).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(answer.ends_with("ok"), "{answer}");
    }

    #[tokio::test]
    async fn an_incomplete_head_ends_its_connection_at_the_time_limit() {
        let head = Duration::from_millis(50);
        let server = served(
            Limits {
                head,
                ..NO_TIME_LIMITS
            },
            ok(),
        )
        .await;
        assert_eq!(rest(sent(server.address, &REQUEST[..9]).await).await, "");
        assert_eq!(rest(sent(server.address, b"").await).await, "");
    }

    #[tokio::test]
    async fn a_large_head_is_refused() {
        let server = served(NO_TIME_LIMITS, ok()).await;
        let head = format!("GET / HTTP/1.1\r\na: {}\r\n\r\n", "a".repeat(8 * MAX_HEAD));
        let answer = rest(sent(server.address, head.as_bytes()).await).await;
        assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
    }

    #[tokio::test]
    async fn requests_are_answered_at_once_however_many_idle_connections_an_address_opens() {
        let server = served(NO_TIME_LIMITS, ok()).await;
        let mut silent = Vec::new();
        for _ in 0..200 {
            silent.push(sent(server.address, b"").await);
        }
        for last in [2, 1] {
            let asking = rest(sent_from(last, server.address, REQUEST).await);
            let answer = timeout(PROBE, asking).await.expect("it waits");
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
        let kept = NO_TIME_LIMITS.connections.per_address - 1;
        let newest = silent.split_off(silent.len() - kept);
        for stream in silent {
            assert_eq!(rest(stream).await, "");
        }
        for mut stream in newest {
            assert!(is_open(&mut stream).await, "the newest are left");
        }
    }

    #[tokio::test]
    async fn a_full_server_closes_a_connection_of_the_address_with_most() {
        let connections = Bounds {
            total: 3,
            per_address: 2,
        };
        let limits = Limits {
            connections,
            ..NO_TIME_LIMITS
        };
        let server = served(limits, ok()).await;
        let mut other = sent_from(2, server.address, b"").await;
        let oldest = sent(server.address, b"").await;
        let mut newer = sent(server.address, b"").await;
        let asking = rest(sent_from(3, server.address, REQUEST).await);
        let answer = timeout(PROBE, asking).await.expect("it waits");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert_eq!(rest(oldest).await, "");
        assert!(is_open(&mut other).await && is_open(&mut newer).await);
    }

    #[tokio::test]
    async fn a_connection_ends_at_its_time_limit() {
        let connection = Duration::from_millis(50);
        let never = Router::new().route("/", get(std::future::pending::<&'static str>));
        let server = served(
            Limits {
                connection,
                ..NO_TIME_LIMITS
            },
            never,
        )
        .await;
        assert_eq!(rest(sent(server.address, REQUEST).await).await, "");
    }

    #[tokio::test]
    async fn a_shutdown_waits_for_the_requests_under_way_and_for_no_idle_connection() {
        let (begun, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let notified = (Arc::clone(&begun), Arc::clone(&go));
        let slow = move || {
            let (begun, go) = notified.clone();
            async move {
                begun.notify_one();
                go.notified().await;
                "ok"
            }
        };
        let server = served(NO_TIME_LIMITS, Router::new().route("/", get(slow))).await;
        let _silent = sent(server.address, b"").await;
        let asking = sent(server.address, REQUEST).await;
        begun.notified().await;
        server.shutdown.cancel();
        go.notify_one();
        let answer = rest(asking).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let ended = timeout(LONG / 2, server.ended).await;
        ended.expect("the server ends").unwrap();
        TcpStream::connect(server.address).await.unwrap_err();
    }
}

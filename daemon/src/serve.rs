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

use crate::places::{Bounds, Places};

/// How much of a head is read at once and kept, in bytes.
const MAX_HEAD: usize = 16 * 1024;
/// After a failed accept, such as when no file descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const LIMITS: Limits = Limits {
    places: Bounds { all: 64, each: 8 },
    head: Duration::from_secs(5),
    connection: Duration::from_secs(15),
};

/// What clients may take. Whoever reaches the address is one, a sandbox too, and the daemon has little memory.
#[derive(Clone, Copy)]
struct Limits {
    /// Connections at once. The kubelet and whoever scrapes need one or two, and must come in whatever the others hold.
    places: Bounds,
    /// How long the head of a request may take.
    head: Duration,
    /// How long a connection may last: one request, and its answer.
    connection: Duration,
}

/// Opens the port.
pub async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        // A machine without IPv6 has no wildcard of both families.
        Err(_) if address.ip().is_unspecified() && address.is_ipv6() => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        other => other,
    }
}

/// Opens the port now, so that a taken port is an error at once, and serves in the background.
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

/// Serves until `shutdown`, and until the requests under way have been answered.
pub async fn serve_on(listener: TcpListener, router: Router, shutdown: CancellationToken) {
    serve_within(LIMITS, listener, router, shutdown).await;
}

async fn serve_within(
    limits: Limits,
    listener: TcpListener,
    router: Router,
    shutdown: CancellationToken,
) {
    let mut connections = JoinSet::new();
    let accepting = accept_all(limits, listener, router, &mut connections, &shutdown);
    shutdown.run_until_cancelled(accepting).await;
    while connections.join_next().await.is_some() {}
}

async fn accept_all(
    limits: Limits,
    listener: TcpListener,
    router: Router,
    connections: &mut JoinSet<()>,
    shutdown: &CancellationToken,
) {
    let mut places: Places<AbortHandle> = Places::new(limits.places);
    loop {
        let (stream, peer) = tokio::select! {
            biased;
            Some(ended) = connections.join_next_with_id() => {
                let ended = ended.map_or_else(|error| error.id(), |(id, ())| id);
                places.leave(|connection| connection.id() == ended);
                continue;
            }
            accepted = accept(&listener) => accepted,
        };
        let connection = answer(limits, stream, router.clone(), shutdown.clone());
        let connection = connections.spawn(connection);
        if let Some(surplus) = places.enter(peer, connection) {
            surplus.abort();
            // It goes before the next one comes, however fast they come.
            yield_now().await;
        }
    }
}

async fn accept(listener: &TcpListener) -> (TcpStream, IpAddr) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => return (stream, peer.ip()),
            Err(error) => {
                tracing::warn!(%error, "cannot accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Answers one request, and so the oldest connection is the one that makes least of its place. Nobody keeps one between requests.
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
        Ok(Err(error)) => tracing::debug!(%error, "a connection broke off"),
        Err(_) => tracing::debug!("a connection took too long"),
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
    /// Long enough for whatever is to come.
    const PATIENCE: Duration = Duration::from_secs(20);
    /// As long as the kubelet waits for a probe.
    const PROBE: Duration = Duration::from_secs(1);
    const NONE: Limits = Limits {
        places: LIMITS.places,
        head: PATIENCE,
        connection: PATIENCE,
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

    /// From 127.0.0.`last`.
    async fn sent_from(last: u8, address: SocketAddr, bytes: &[u8]) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        let own = Ipv4Addr::new(127, 0, 0, last);
        socket.bind(SocketAddr::from((own, 0))).unwrap();
        let mut stream = socket.connect(address).await.unwrap();
        // The server may have closed it before the last of them.
        let _ = stream.write_all(bytes).await;
        stream
    }

    /// What came until the server closed the connection.
    async fn rest(mut stream: TcpStream) -> String {
        let mut bytes = Vec::new();
        let read = timeout(PATIENCE / 2, stream.read_to_end(&mut bytes)).await;
        let _ = read.expect("the connection stays open");
        String::from_utf8(bytes).unwrap()
    }

    async fn is_open(stream: &mut TcpStream) -> bool {
        let read = timeout(Duration::from_millis(50), stream.read_u8());
        read.await.is_err()
    }

    #[tokio::test]
    async fn a_request_is_answered_and_its_connection_ends() {
        let server = served(NONE, ok()).await;
        let answer = rest(sent(server.address, REQUEST).await).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(answer.ends_with("ok"), "{answer}");
    }

    #[tokio::test]
    async fn half_a_head_is_not_waited_for() {
        let head = Duration::from_millis(50);
        let server = served(Limits { head, ..NONE }, ok()).await;
        assert_eq!(rest(sent(server.address, &REQUEST[..9]).await).await, "");
        assert_eq!(rest(sent(server.address, b"").await).await, "");
    }

    #[tokio::test]
    async fn a_large_head_is_not_taken() {
        let server = served(NONE, ok()).await;
        let head = format!("GET / HTTP/1.1\r\na: {}\r\n\r\n", "a".repeat(8 * MAX_HEAD));
        let answer = rest(sent(server.address, head.as_bytes()).await).await;
        assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
    }

    #[tokio::test]
    async fn however_many_silent_ones_an_address_opens_everybody_is_answered_at_once() {
        let server = served(NONE, ok()).await;
        let mut silent = Vec::new();
        for _ in 0..200 {
            silent.push(sent(server.address, b"").await);
        }
        for last in [2, 1] {
            let asking = rest(sent_from(last, server.address, REQUEST).await);
            let answer = timeout(PROBE, asking).await.expect("it waits");
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
        let kept = NONE.places.each - 1;
        let newest = silent.split_off(silent.len() - kept);
        for stream in silent {
            assert_eq!(rest(stream).await, "");
        }
        for mut stream in newest {
            assert!(is_open(&mut stream).await, "the newest are left");
        }
    }

    #[tokio::test]
    async fn of_a_full_server_who_has_most_gives_a_place() {
        let places = Bounds { all: 3, each: 2 };
        let server = served(Limits { places, ..NONE }, ok()).await;
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
    async fn a_connection_has_an_end_whatever_it_waits_for() {
        let connection = Duration::from_millis(50);
        let never = Router::new().route("/", get(std::future::pending::<&'static str>));
        let server = served(Limits { connection, ..NONE }, never).await;
        assert_eq!(rest(sent(server.address, REQUEST).await).await, "");
    }

    #[tokio::test]
    async fn at_the_end_the_requests_under_way_are_answered_and_nobody_else_is_waited_for() {
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
        let server = served(NONE, Router::new().route("/", get(slow))).await;
        let _silent = sent(server.address, b"").await;
        let asking = sent(server.address, REQUEST).await;
        begun.notified().await;
        server.shutdown.cancel();
        go.notify_one();
        let answer = rest(asking).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let ended = timeout(PATIENCE / 2, server.ended).await;
        ended.expect("the server ends").unwrap();
        TcpStream::connect(server.address).await.unwrap_err();
    }
}

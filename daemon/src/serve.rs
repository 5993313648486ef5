//! Small HTTP servers: probes and metrics.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
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
    sync::Semaphore,
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// How much of a head is read at once and kept, in bytes.
const MAX_HEAD: usize = 16 * 1024;
/// After a failed accept, such as when no file descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const LIMITS: Limits = Limits {
    connections: 64,
    head: Duration::from_secs(5),
    connection: Duration::from_secs(15),
};

/// What clients may take. Whoever reaches the address is one, a sandbox too, and the daemon has little memory.
#[derive(Clone, Copy)]
struct Limits {
    /// Most connections at once.
    connections: usize,
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
    let tasks = TaskTracker::new();
    let accepting = accept_all(limits, listener, router, &tasks, &shutdown);
    shutdown.run_until_cancelled(accepting).await;
    tasks.close();
    tasks.wait().await;
}

async fn accept_all(
    limits: Limits,
    listener: TcpListener,
    router: Router,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) {
    let places = Arc::new(Semaphore::new(limits.connections));
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
        let connection = answer(limits, stream, router.clone(), shutdown.clone());
        tasks.spawn(async move {
            connection.await;
            drop(place);
        });
    }
}

/// Answers one request. A connection that waited for the next one would keep its place from others.
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
    use axum::routing::get;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        sync::Notify,
        task::JoinHandle,
    };

    use super::*;

    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";
    /// Long enough for whatever is to come.
    const PATIENCE: Duration = Duration::from_secs(20);
    const NONE: Limits = Limits {
        connections: 8,
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
        let mut stream = TcpStream::connect(address).await.unwrap();
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
    async fn one_more_than_there_are_places_for_is_served_once_another_ends() {
        let connections = 2;
        let server = served(
            Limits {
                connections,
                ..NONE
            },
            ok(),
        )
        .await;
        let first = sent(server.address, b"").await;
        let _second = sent(server.address, b"").await;
        let mut third = sent(server.address, REQUEST).await;
        let early = timeout(Duration::from_millis(200), third.read_u8()).await;
        assert_eq!(early.ok().map(Result::ok), None, "served beside the others");
        drop(first);
        let answer = rest(third).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
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

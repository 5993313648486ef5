//! Streaming: no body is buffered whole, and the end of one side reaches the other.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use http::Response;
use http_body_util::BodyExt;
use hyper::{body::Incoming, upgrade};
use hyper_util::rt::TokioIo;
use rstest::rstest;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::{mpsc, oneshot},
};
use tokio_util::sync::CancellationToken;

use crate::{
    backend::{Backend, data, frames, full},
    client::{Raw, nothing, read, request, send, start},
    world::{Setup, World, soon, until},
};

async fn next(body: &mut Incoming) -> Option<String> {
    let frame = soon("a piece of the body", body.frame()).await?.unwrap();
    Some(String::from_utf8(frame.into_data().unwrap().to_vec()).unwrap())
}

#[tokio::test]
async fn an_answer_comes_piece_by_piece() {
    let world = World::new().await;
    let (sender, pieces) = mpsc::unbounded_channel();
    let pieces = Arc::new(Mutex::new(Some(pieces)));
    let backend = Backend::start(move |_| {
        let pieces = pieces.lock().unwrap().take().unwrap();
        async move { Response::new(frames(pieces)) }
    })
    .await;
    world.running("s", "127.0.0.1").await;
    let request = request("s", backend.port).body(nothing()).unwrap();
    let mut answer = soon("the head", start(world.address, request))
        .await
        .into_body();
    // The second piece is not sent before the first has arrived.
    for piece in ["one", "two", "three"] {
        sender.send(data(piece)).unwrap();
        assert_eq!(next(&mut answer).await.as_deref(), Some(piece));
    }
    drop(sender);
    assert_eq!(next(&mut answer).await, None);
}

#[tokio::test]
async fn a_request_goes_piece_by_piece() {
    let world = World::new().await;
    let (seen, mut arrived) = mpsc::unbounded_channel();
    let backend = Backend::start(move |request: http::Request<Incoming>| {
        let seen = seen.clone();
        async move {
            let mut body = request.into_body();
            while let Some(piece) = next(&mut body).await {
                seen.send(piece).unwrap();
            }
            Response::new(full("all"))
        }
    })
    .await;
    world.running("s", "127.0.0.1").await;
    let (sender, pieces) = mpsc::unbounded_channel();
    let request = request("s", backend.port)
        .method("POST")
        .body(frames(pieces))
        .unwrap();
    let answer = tokio::spawn(start(world.address, request));
    for piece in ["one", "two", "three"] {
        sender.send(data(piece)).unwrap();
        assert_eq!(
            soon("the piece arrives", arrived.recv()).await.as_deref(),
            Some(piece)
        );
    }
    drop(sender);
    assert_eq!(
        read(soon("the answer", answer).await.unwrap()).await.line(),
        "200 all"
    );
}

#[tokio::test]
async fn the_timeout_of_a_response_begins_after_the_request() {
    let mut setup = Setup::default();
    setup.settings.response_header_timeout = Duration::from_millis(600);
    let world = World::with(setup).await;
    let backend = Backend::echo().await;
    world.running("s", "127.0.0.1").await;
    let (sender, pieces) = mpsc::unbounded_channel();
    let request = request("s", backend.port).method("POST");
    let request = request.body(frames(pieces)).unwrap();
    let answer = tokio::spawn(start(world.address, request));
    for _ in 0..10 {
        sender.send(data("x")).unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    drop(sender);
    let answer = read(soon("the answer", answer).await.unwrap()).await;
    assert!(answer.body.ends_with("xxxxxxxxxx"), "{answer:?}");
}

/// Cancels a token on drop.
struct CancelOnDrop(CancellationToken);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

#[tokio::test]
async fn a_client_that_goes_away_ends_the_call() {
    let world = World::new().await;
    let (begun, ended) = (CancellationToken::new(), CancellationToken::new());
    let (at_begin, at_end) = (begun.clone(), ended.clone());
    let backend = Backend::start(move |_| {
        let (begun, guard) = (at_begin.clone(), CancelOnDrop(at_end.clone()));
        async move {
            let _guard = guard;
            begun.cancel();
            std::future::pending().await
        }
    })
    .await;
    world.running("s", "127.0.0.1").await;
    let mut client = Raw::open(&world).await;
    client.write(format!("GET / HTTP/1.1\r\nHost: r\r\nX-Sandbox-ID: s\r\nX-Sandbox-Namespace: ns\r\nX-Sandbox-Port: {}\r\n\r\n", backend.port)).await;
    soon("the sandbox has the request", begun.cancelled()).await;
    drop(client);
    soon("the sandbox's request ends", ended.cancelled()).await;
    let count = r#"sandbox_router_requests_total{method="GET",code="499",sandbox_namespace="ns"}"#;
    until("it is counted", || world.metric(count) == 1).await;
    assert_eq!(world.metric("sandbox_router_inflight_requests"), 0);
}

#[tokio::test]
async fn a_client_that_goes_away_ends_the_answer() {
    let world = World::new().await;
    let (sender, pieces) = mpsc::unbounded_channel();
    let pieces = Arc::new(Mutex::new(Some(pieces)));
    let backend = Backend::start(move |_| {
        let pieces = pieces.lock().unwrap().take().unwrap();
        async move { Response::new(frames(pieces)) }
    })
    .await;
    world.running("s", "127.0.0.1").await;
    let request = request("s", backend.port).body(nothing()).unwrap();
    let mut answer = soon("the head", start(world.address, request))
        .await
        .into_body();
    sender.send(data("one")).unwrap();
    assert_eq!(next(&mut answer).await.as_deref(), Some("one"));
    drop(answer);
    soon("the sandbox stops sending", sender.closed()).await;
}

/// Starts a sandbox that answers its first connection with `bytes` and closes it.
pub(crate) async fn raw_backend(bytes: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = [0; 1024];
        let _ = stream.read(&mut head).await.unwrap();
        stream.write_all(bytes.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        // The socket stays open until the router closes it, so that no reset discards bytes.
        let _ = stream.read(&mut head).await;
    });
    port
}

async fn raw_answer(bytes: &'static str) -> String {
    let world = World::new().await;
    let port = raw_backend(bytes).await;
    world.running("s", "127.0.0.1").await;
    let mut client = Raw::open(&world).await;
    client.write(format!("GET / HTTP/1.1\r\nHost: r\r\nConnection: close\r\nX-Sandbox-ID: s\r\nX-Sandbox-Namespace: ns\r\nX-Sandbox-Port: {port}\r\n\r\n")).await;
    client.rest().await
}

#[tokio::test]
async fn a_sandbox_that_ends_its_half_ends_the_answer() {
    let answer = raw_answer("HTTP/1.1 200 OK\r\n\r\nhello").await;
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert!(
        answer.ends_with("\r\n5\r\nhello\r\n0\r\n\r\n"),
        "whole: {answer}"
    );
}

#[tokio::test]
async fn an_answer_that_breaks_off_does_not_look_whole() {
    let answer =
        raw_answer("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n").await;
    assert!(answer.contains("5\r\nhello\r\n"), "{answer}");
    assert!(!answer.contains("\r\n0\r\n\r\n"), "no end: {answer}");
    let answer = raw_answer("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello").await;
    assert!(
        answer.contains("content-length: 10\r\n") && answer.ends_with("hello"),
        "{answer}"
    );
}

#[tokio::test]
async fn a_response_that_is_not_http_is_a_bad_gateway() {
    for nonsense in [
        "SSH-2.0-OpenSSH\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        "",
    ] {
        let answer = raw_answer(nonsense).await;
        assert!(answer.starts_with("HTTP/1.1 502 "), "{nonsense}: {answer}");
        assert!(
            answer.ends_with(r#"{"detail":"Could not connect to the backend sandbox: s"}"#),
            "{answer}"
        );
    }
}

/// Starts a sandbox that echoes after an upgrade and sends `bye` after the client's half ends.
pub(crate) async fn websocket() -> Backend {
    Backend::start(|mut request: http::Request<Incoming>| async move {
        let headers = request.headers();
        assert!(headers.get("origin").is_none() && headers["upgrade"] == "websocket");
        let key = headers["sec-websocket-key"].clone();
        let upgraded = upgrade::on(&mut request);
        tokio::spawn(async move {
            let (mut reader, mut writer) = tokio::io::split(TokioIo::new(upgraded.await.unwrap()));
            tokio::io::copy(&mut reader, &mut writer).await.unwrap();
            writer.write_all(b"bye").await.unwrap();
            writer.shutdown().await.unwrap();
        });
        let answer = Response::builder()
            .status(101)
            .header("connection", "Upgrade")
            .header("upgrade", "websocket");
        answer
            .header("sec-websocket-accept", key)
            .body(full(""))
            .unwrap()
    })
    .await
}

pub(crate) async fn open_websocket(world: &World, port: u16) -> Raw {
    let mut client = Raw::open(world).await;
    client
        .write(format!(
            "GET /ws HTTP/1.1\r\nHost: r\r\nX-Sandbox-ID: s\r\nX-Sandbox-Namespace: ns\r\nX-Sandbox-Port: {port}\r\n\
             Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\nSec-WebSocket-Version: 13\r\nOrigin: https://outside\r\n\r\n"
        ))
        .await;
    let head = client.read_until("\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert!(
        head.contains("upgrade: websocket\r\n") && head.contains("sec-websocket-accept: k\r\n"),
        "{head}"
    );
    client
}

#[tokio::test]
async fn a_websocket_echoes_and_each_half_ends_by_itself() {
    let world = World::new().await;
    let backend = websocket().await;
    world.running("s", "127.0.0.1").await;
    let mut client = open_websocket(&world, backend.port).await;
    for message in ["\u{1}one", "\u{2}two"] {
        client.write(message).await;
        assert_eq!(client.read_until(message).await, message);
    }
    assert_eq!(world.metric("torpor_router_tunnels"), 1);
    // The client's half ends; the other half still carries the sandbox's bytes.
    client.0.shutdown().await.unwrap();
    assert_eq!(client.rest().await, "bye");
    until("the tunnel is gone", || {
        world.metric("torpor_router_tunnels") == 0
    })
    .await;
}

#[tokio::test]
async fn a_websocket_that_is_refused_is_an_answer() {
    let world = World::new().await;
    let backend =
        Backend::start(|_| async { Response::builder().status(403).body(full("no")).unwrap() })
            .await;
    world.running("s", "127.0.0.1").await;
    let request = request("s", backend.port)
        .header("connection", "upgrade")
        .header("upgrade", "websocket");
    let answer = soon(
        "the head",
        start(world.address, request.body(nothing()).unwrap()),
    )
    .await;
    assert_eq!(read(answer).await.line(), "403 no");
}

#[tokio::test]
async fn http2_reaches_the_sandbox_too() {
    let world = World::new().await;
    let backend = Backend::echo().await;
    world.running("s", "127.0.0.1").await;
    let mut sender = crate::client::http2(&world).await;
    let request = request("s", backend.port)
        .uri("http://router/x")
        .header("cookie", "a=1")
        .header("cookie", "b=2");
    let answer = soon(
        "the head",
        sender.send_request(request.body(nothing()).unwrap()),
    )
    .await
    .unwrap();
    let answer = read(answer).await;
    assert!(
        answer.body.starts_with("GET /x\n") && answer.body.contains("cookie: a=1; b=2\n"),
        "{}",
        answer.body
    );
}

/// The timeout is the router's or the client's. A client's timeout that is invalid or longer than
/// the router's is ignored.
#[rstest]
#[case::timeout_of_the_router(300, "")]
#[case::timeout_of_the_client(30_000, "0.3")]
#[case::longer_timeout_of_the_client(300, "600")]
#[case::negative_timeout(300, "-1")]
#[case::infinite_timeout(300, "inf")]
#[case::invalid_timeout(300, "NaN")]
#[tokio::test]
async fn a_request_to_a_sandbox_that_never_responds_times_out(
    #[case] router: u64,
    #[case] client: &str,
) {
    let mut setup = crate::world::Setup::default();
    setup.settings.response_header_timeout = std::time::Duration::from_millis(router);
    let world = World::with(setup).await;
    let (gone, ended) = oneshot::channel::<()>();
    let gone = Arc::new(Mutex::new(Some(gone)));
    let backend = Backend::start(move |_| {
        let gone = gone.lock().unwrap().take();
        async move {
            let _gone = gone;
            std::future::pending().await
        }
    })
    .await;
    world.running("s", "127.0.0.1").await;
    let asked = request("s", backend.port).header("x-sandbox-timeout", client);
    let answer = send(&world, asked.body(nothing()).unwrap()).await;
    assert_eq!(
        answer.line(),
        r#"502 {"detail":"Could not connect to the backend sandbox: s"}"#
    );
    assert_eq!(
        world.metric(
            r#"sandbox_router_upstream_errors_total{sandbox_namespace="ns",reason="timeout"}"#
        ),
        1
    );
    soon("the request is cancelled", ended).await.unwrap_err();
}

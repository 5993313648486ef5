//! Clients that send too much, too slowly, or malformed requests.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use rstest::rstest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    backend::Backend,
    client::{Raw, get, nothing, request, send},
    streaming::{open_websocket, websocket},
    world::{LIMIT, Setup, World, soon, until},
};

fn setup_with(change: impl FnOnce(&mut Setup)) -> Setup {
    let mut setup = Setup::default();
    change(&mut setup);
    setup
}

#[rstest]
#[case::silent("")]
#[case::half_a_line("GET / HT")]
#[case::half_a_head("GET / HTTP/1.1\r\nHost: r\r\nX-Sandbox-ID: s\r\nX-More: ")]
#[case::http2_without_a_request("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")]
#[tokio::test]
async fn a_head_that_does_not_come_to_an_end_is_cut_off(#[case] bytes: &str) {
    let world = World::with(setup_with(|setup| {
        setup.timeouts.head = Duration::from_millis(50)
    }))
    .await;
    let mut client = Raw::open(&world).await;
    client.write(bytes).await;
    let answer = client.rest().await;
    assert!(!answer.contains("200"), "{answer}");
}

#[tokio::test]
async fn a_head_that_comes_byte_by_byte_is_cut_off() {
    let world = World::with(setup_with(|setup| {
        setup.timeouts.head = Duration::from_millis(100)
    }))
    .await;
    let mut client = Raw::open(&world).await;
    client.write("GET / HTTP/1.1\r\n").await;
    let dripping = async {
        // The head never ends; writing fails once the router closes the connection.
        while client.0.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon("the router closes", dripping).await;
}

#[tokio::test]
async fn a_connection_between_requests_may_wait_longer_than_a_head() {
    let world = World::with(setup_with(|setup| {
        setup.timeouts.head = Duration::from_millis(50)
    }))
    .await;
    let mut client = Raw::open(&world).await;
    for _ in 0..2 {
        client
            .write("GET /healthz HTTP/1.1\r\nHost: r\r\n\r\n")
            .await;
        client.read_until("ok").await;
        // The second connection begins after the response and is closed at the timeout of a head:
        // more than that has passed between the requests of the first connection, too.
        Raw::open(&world).await.rest().await;
    }
    client.write("GE").await;
    assert_eq!(client.rest().await, "", "a head has begun");
}

#[tokio::test]
async fn an_idle_connection_is_closed_in_the_end() {
    let world = World::with(setup_with(|setup| {
        setup.timeouts.idle = Duration::from_millis(20)
    }))
    .await;
    let mut client = Raw::open(&world).await;
    client
        .write("GET /healthz HTTP/1.1\r\nHost: r\r\n\r\n")
        .await;
    client.read_until("ok").await;
    client.rest().await;
}

fn with_header(line: &str) -> String {
    format!("GET / HTTP/1.1\r\nHost: r\r\n{line}\r\n\r\n")
}

#[rstest]
#[case::too_large(with_header(&format!("X-Sandbox-ID: s\r\nX-Big: {}", "x".repeat(80_000))), "431")]
#[case::too_many(with_header(&(0..200).map(|n| format!("X-{n}: 1")).collect::<Vec<_>>().join("\r\n")), "431")]
#[case::nul_in_an_id(with_header("X-Sandbox-ID: a\0b"), "400")]
#[case::control_in_a_name(with_header("X-Sand\x01box: a"), "400")]
#[case::no_colon(with_header("nonsense"), "400")]
#[case::folded(with_header("X-Sandbox-ID: a\r\n b"), "400")]
#[case::no_http("\x16\x03\x01\x02\0\x01\0\r\n\r\n".to_owned(), "400")]
#[case::two_lengths(
    with_header("X-Sandbox-ID: s\r\nContent-Length: 1\r\nContent-Length: 2"),
    "400"
)]
#[case::wrong_length(with_header("X-Sandbox-ID: s\r\nContent-Length: -1"), "400")]
#[tokio::test]
async fn heads_that_are_too_large_or_malformed_are_refused(
    #[case] bytes: String,
    #[case] status: &str,
) {
    let world = World::new().await;
    let backend = Backend::named("s").await;
    world.running("s", "127.0.0.1").await;
    let mut client = Raw::open(&world).await;
    // The router may close before it has read everything.
    let _ = client.0.write_all(bytes.as_bytes()).await;
    let answer = client.rest().await;
    assert!(
        answer.starts_with(&format!("HTTP/1.1 {status} ")),
        "{answer}"
    );
    assert_eq!(backend.connections(), 0);
}

#[tokio::test]
async fn a_length_and_chunks_at_once_do_not_smuggle_a_second_request() {
    let world = World::new().await;
    let backend = Backend::echo().await;
    world.running("s", "127.0.0.1").await;
    let mut client = Raw::open(&world).await;
    let port = backend.port;
    let smuggled = "GET /smuggled HTTP/1.1\r\nHost: r\r\n\r\n";
    let chunk = format!("{:x}\r\n{smuggled}\r\n0\r\n\r\n", smuggled.len());
    client
        .write(format!(
            "POST /outer HTTP/1.1\r\nHost: r\r\nConnection: close\r\nX-Sandbox-ID: s\r\nX-Sandbox-Namespace: ns\r\nX-Sandbox-Port: {port}\r\n\
             Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n{chunk}"
        ))
        .await;
    let answer = client.rest().await;
    // The router refuses it, or sends one request with all of it as the body; never two.
    let one = answer.contains("POST /outer")
        && answer.contains("transfer-encoding: chunked")
        && answer.matches("HTTP/1.1 200").count() == 1;
    assert!(answer.starts_with("HTTP/1.1 400 ") || one, "{answer}");
    assert!(!answer.contains("\ncontent-length: 4\n"), "{answer}");
}

#[rstest]
#[case::with_a_length(true)]
#[case::without_a_length(false)]
#[tokio::test]
async fn a_body_that_is_too_large_is_refused(#[case] with_length: bool) {
    let world = World::with(setup_with(|setup| setup.settings.max_request_body = 10)).await;
    let backend = Backend::echo().await;
    world.running("s", "127.0.0.1").await;
    let post = || request("s", backend.port).method("POST");
    let answer = if with_length {
        send(&world, post().body("x".repeat(11)).unwrap()).await
    } else {
        let pieces = ["12345", "67890", "1"].map(|piece| {
            Ok::<_, std::convert::Infallible>(http_body::Frame::data(Bytes::from(piece)))
        });
        send(
            &world,
            post()
                .body(StreamBody::new(futures::stream::iter(pieces)))
                .unwrap(),
        )
        .await
    };
    assert_eq!(answer.line(), r#"413 {"detail":"Request body too large."}"#);
    assert_eq!(
        send(&world, post().body("x".repeat(10)).unwrap())
            .await
            .status,
        200
    );
}

#[tokio::test]
async fn an_answer_that_takes_too_long_is_cut_off() {
    let world = World::with(setup_with(|setup| {
        setup.settings.proxy_timeout = Duration::from_millis(500)
    }))
    .await;
    let backend = Backend::start(|_| async {
        let endless =
            futures::stream::pending::<Result<http_body::Frame<Bytes>, std::convert::Infallible>>();
        http::Response::new(StreamBody::new(endless).boxed_unsync())
    })
    .await;
    world.running("s", "127.0.0.1").await;
    let head = crate::client::start(
        world.address,
        request("s", backend.port).body(nothing()).unwrap(),
    );
    let answer = soon("the head", head).await;
    soon("the end", answer.into_body().collect())
        .await
        .unwrap_err();
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_its_sandbox_for_a_limited_time() {
    let world = World::with(setup_with(|setup| {
        setup.timeouts.busy = Duration::from_millis(300)
    }))
    .await;
    let (sender, ended) = tokio::sync::oneshot::channel::<()>();
    let sender = std::sync::Arc::new(std::sync::Mutex::new(Some(sender)));
    let backend = Backend::start(move |_| {
        let sender = sender.lock().unwrap().take();
        async move {
            // The body is endless; the sender is dropped with it.
            let endless = futures::stream::repeat_with(move || {
                let _kept = &sender;
                Ok::<_, std::convert::Infallible>(http_body::Frame::data(Bytes::from_static(
                    &[0; 4096],
                )))
            });
            http::Response::new(StreamBody::new(endless).boxed_unsync())
        }
    })
    .await;
    world.running("s", "127.0.0.1").await;
    let mut client = Raw::open(&world).await;
    client
        .write(format!("GET / HTTP/1.1\r\nHost: r\r\nX-Sandbox-ID: s\r\nX-Sandbox-Namespace: ns\r\nX-Sandbox-Port: {}\r\n\r\n", backend.port))
        .await;
    soon("the sandbox's response is dropped", ended)
        .await
        .unwrap_err();
}

#[tokio::test]
async fn a_body_that_does_not_come_holds_its_sandbox_for_a_limited_time() {
    let world = World::with(setup_with(|setup| {
        setup.settings.proxy_timeout = Duration::from_millis(100)
    }))
    .await;
    let backend = Backend::echo().await;
    world.running("s", "127.0.0.1").await;
    let mut client = Raw::open(&world).await;
    client.write(post(backend.port, 100, "x")).await;
    let answer = client.rest().await;
    assert!(answer.starts_with("HTTP/1.1 502 "), "{answer}");
}

fn post(port: u16, length: usize, body: &str) -> String {
    format!(
        "POST / HTTP/1.1\r\nHost: r\r\nConnection: close\r\nX-Sandbox-ID: s\r\nX-Sandbox-Namespace: ns\r\nX-Sandbox-Port: {port}\r\nContent-Length: {length}\r\n\r\n{body}"
    )
}

#[tokio::test]
async fn a_sandbox_that_does_not_respond_takes_only_its_own_limit() {
    let world = World::with(setup_with(|setup| setup.requests = 2)).await;
    let silent = Backend::start(|_| std::future::pending()).await;
    let other = Backend::named("other").await;
    world.running("s", "127.0.0.1").await;
    world.running("t", "127.0.0.1").await;
    let mut waiting = Vec::new();
    for count in 1..=2 {
        let mut client = Raw::open(&world).await;
        client.write(post(silent.port, 0, "")).await;
        until("the request is in flight", || silent.connections() == count).await;
        waiting.push(client);
    }
    let refused = r#"503 {"detail":"Too many requests are under way to sandbox s."}"#;
    for port in [silent.port, other.port] {
        assert_eq!(get(&world, "s", port).await.line(), refused);
    }
    assert_eq!(silent.connections(), 2);
    assert_eq!(get(&world, "t", other.port).await.line(), "200 other");
    let refusals =
        r#"torpor_router_refusals_total{sandbox_namespace="ns",reason="TooManyRequests"}"#;
    assert_eq!(world.metric(refusals), 2);
    // WebSockets and gRPC calls have a limit of their own.
    let echo = websocket().await;
    let _tunnel = open_websocket(&world, echo.port).await;
    drop(waiting.pop());
    let under_way = "sandbox_router_inflight_requests";
    until("a client has gone", || world.metric(under_way) == 2).await;
    assert_eq!(get(&world, "s", other.port).await.line(), "200 other");
}

#[tokio::test]
async fn a_body_whose_client_ends_its_half_too_early_is_no_whole_body() {
    let world = World::new().await;
    let (sender, mut bodies) = tokio::sync::mpsc::unbounded_channel();
    let backend = Backend::start(move |request: http::Request<hyper::body::Incoming>| {
        let sender = sender.clone();
        async move {
            let whole = request.into_body().collect().await.is_ok();
            sender.send(whole).unwrap();
            http::Response::new(crate::backend::full(""))
        }
    })
    .await;
    world.running("s", "127.0.0.1").await;
    let mut client = Raw::open(&world).await;
    client.write(post(backend.port, 10, "hello")).await;
    client.0.shutdown().await.unwrap();
    assert_eq!(
        soon("the sandbox reads the body", bodies.recv()).await,
        Some(false)
    );
    let answer = client.rest().await;
    assert!(!answer.contains(" 200 "), "{answer}");
}

#[tokio::test]
async fn a_client_that_ends_its_half_while_it_waits_has_gone_away() {
    let world = World::new().await;
    let (sender, mut begins) = tokio::sync::mpsc::unbounded_channel();
    let backend = Backend::start(move |_| {
        let sender = sender.clone();
        async move {
            let (end, ended) = tokio::sync::oneshot::channel::<()>();
            sender.send(ended).unwrap();
            let _end = end;
            std::future::pending().await
        }
    })
    .await;
    world.running("s", "127.0.0.1").await;
    let mut client = Raw::open(&world).await;
    client.write(post(backend.port, 0, "")).await;
    let ended = soon("the request begins", begins.recv()).await.unwrap();
    client.0.shutdown().await.unwrap();
    soon("the sandbox's request ends", ended).await.unwrap_err();
    assert_eq!(client.rest().await, "");
}

#[tokio::test]
async fn a_head_that_is_too_large_is_refused_over_http2_too() {
    let world = World::new().await;
    let backend = Backend::named("s").await;
    world.running("s", "127.0.0.1").await;
    let mut client = crate::client::http2(&world).await;
    let large = request("s", backend.port).header("x-big", "x".repeat(80_000));
    let answer = client.send_request(large.body(nothing()).unwrap());
    assert_eq!(soon("an answer", answer).await.unwrap().status(), 431);
    assert_eq!(backend.connections(), 0);
}

/// Returns a frame of HTTP/2.
fn frame(type_: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], type_, flags];
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;
/// Header block of `GET /` for http://r, with HPACK's static table.
const GET_ROOT: &[u8] = &[0x82, 0x84, 0x86, 0x41, 1, b'r'];

/// Returns type and payload of the frames that the router sends until it closes.
async fn frames(client: &mut Raw) -> Vec<(u8, Vec<u8>)> {
    let mut bytes = Vec::new();
    let _ = soon("the router closes", client.0.read_to_end(&mut bytes)).await;
    let mut rest = bytes.as_slice();
    let mut frames = Vec::new();
    while let Some((head, after)) = rest.split_at_checked(9) {
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        let Some((payload, after)) = after.split_at_checked(length) else {
            break;
        };
        frames.push((head[3], payload.to_vec()));
        rest = after;
    }
    frames
}

#[tokio::test]
async fn a_flood_of_opened_and_reset_streams_ends_the_connection() {
    let world = World::new().await;
    let mut client = Raw::open(&world).await;
    let mut flood = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
    for stream in (1..4001).step_by(2) {
        flood.extend(frame(HEADERS, 5, stream, GET_ROOT));
        flood.extend(frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes()));
    }
    let _ = client.0.write_all(&flood).await;
    let frames = frames(&mut client).await;
    let goaway = frames
        .iter()
        .find(|(type_, _)| *type_ == GOAWAY)
        .expect("GOAWAY");
    // ENHANCE_YOUR_CALM
    assert_eq!(goaway.1[4..8], 11_u32.to_be_bytes());
    let settings = &frames
        .iter()
        .find(|(type_, _)| *type_ == SETTINGS)
        .unwrap()
        .1;
    let streams = settings
        .chunks(6)
        .find(|entry| entry[..2] == [0, 3])
        .expect("a limit of streams");
    assert_eq!(streams[2..], 128_u32.to_be_bytes());
    assert_eq!(world.metric("sandbox_router_inflight_requests"), 0);
}

#[tokio::test]
async fn a_head_of_endless_continuations_ends_the_connection() {
    let world = World::new().await;
    let mut client = Raw::open(&world).await;
    let mut flood = [
        PREFACE,
        &frame(SETTINGS, 0, 0, &[]),
        &frame(HEADERS, 1, 1, GET_ROOT),
    ]
    .concat();
    // The head has endless literal headers of 4,000 bytes.
    let mut literal = vec![0x00, 1, b'x', 0x7f];
    // 4000 - 127 as an HPACK integer.
    literal.extend([0xa1, 0x1e]);
    literal.extend([b'y'; 4000]);
    for _ in 0..200 {
        flood.extend(frame(CONTINUATION, 0, 1, &literal));
    }
    let _ = tokio::time::timeout(LIMIT, client.0.write_all(&flood)).await;
    let frames = frames(&mut client).await;
    assert!(
        frames.iter().any(|(type_, _)| *type_ == GOAWAY),
        "{frames:?}"
    );
}

//! gRPC-Web calls from browsers, over HTTP/1 and HTTP/2, to sandboxes that speak gRPC.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::{HeaderMap, Request, Response, Version, request::Builder};
use http_body::Frame;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use rstest::rstest;
use tokio::sync::mpsc;
use torpor_router::web::Origins;

use crate::{
    backend::{Backend, Body, data, frames, full},
    client::{http2, nothing, request, send, start},
    world::{NS, Setup, World, soon, until},
};

const TEXT: &str = "application/grpc-web-text+proto";
const BYTES: &str = "application/grpc-web+proto";
/// Message with its gRPC prefix.
const MESSAGE: &[u8] = b"\0\0\0\0\x02hi";

fn call(sandbox: &str, port: u16, kind: &str) -> Builder {
    request(sandbox, port)
        .method("POST")
        .uri("/process.v1.ProcessService/Start")
        .header("content-type", kind)
        .header("accept", kind)
        .header("x-grpc-web", "1")
}

fn trailers(pairs: &[(&'static str, &'static str)]) -> Frame<Bytes> {
    let mut map = HeaderMap::new();
    for (name, value) in pairs {
        map.insert(*name, http::HeaderValue::from_static(value));
    }
    Frame::trailers(map)
}

/// Starts a sandbox that sends every message back twice, then trailers. The response headers repeat
/// some of the request's.
async fn sandbox() -> Backend {
    Backend::start(|request: Request<Incoming>| async move {
        assert_eq!(request.version(), Version::HTTP_2);
        let (sender, answer) = mpsc::unbounded_channel();
        let mut response = Response::new(frames(answer));
        let kept = ["content-type", "te", "x-grpc-web", "content-length"];
        for name in kept {
            if let Some(value) = request.headers().get(name) {
                response.headers_mut().insert(
                    http::HeaderName::try_from(format!("got-{name}")).unwrap(),
                    value.clone(),
                );
            }
        }
        let kind = http::HeaderValue::from_static("application/grpc+proto");
        response.headers_mut().insert("content-type", kind);
        tokio::spawn(async move {
            let mut body = request.into_body();
            while let Some(Ok(frame)) = body.frame().await {
                let Ok(message) = frame.into_data() else {
                    continue;
                };
                for _ in 0..2 {
                    sender.send(Frame::data(message.clone())).unwrap();
                }
            }
            let end = [("grpc-status", "0"), ("own-sum", "7")];
            sender.send(trailers(&end)).unwrap();
        });
        response
    })
    .await
}

/// Returns the messages of a response body: first byte and content of each.
fn messages(mut body: &[u8]) -> Vec<(u8, String)> {
    let mut messages = Vec::new();
    while let [kind, a, b, c, d, rest @ ..] = body {
        let length = u32::from_be_bytes([*a, *b, *c, *d]) as usize;
        let (message, after) = rest.split_at(length);
        messages.push((*kind, String::from_utf8(message.to_vec()).unwrap()));
        body = after;
    }
    assert!(body.is_empty(), "{body:?}");
    messages
}

/// Decodes base64 whose pieces may be padded.
fn decoded(text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for four in text.chunks(4) {
        bytes.extend(STANDARD.decode(four).unwrap());
    }
    bytes
}

async fn collected(answer: Response<Incoming>) -> (HeaderMap, Vec<u8>) {
    assert_eq!(answer.status(), 200);
    let (head, body) = answer.into_parts();
    let body = soon("the end of an answer", body.collect()).await.unwrap();
    assert_eq!(body.trailers(), None);
    (head.headers, body.to_bytes().to_vec())
}

#[rstest]
#[case::bytes_over_http1(BYTES, Version::HTTP_11)]
#[case::text_over_http1(TEXT, Version::HTTP_11)]
#[case::bytes_over_http2(BYTES, Version::HTTP_2)]
#[case::text_over_http2(TEXT, Version::HTTP_2)]
#[tokio::test]
async fn a_web_call_becomes_grpc_and_its_trailers_come_as_a_last_message(
    #[case] kind: &str,
    #[case] version: Version,
) {
    let (world, backend) = (World::new().await, sandbox().await);
    world.running("s", "127.0.0.1").await;
    let text = kind == TEXT;
    let body = if text {
        STANDARD.encode(MESSAGE).into_bytes()
    } else {
        MESSAGE.to_vec()
    };
    let mut request = call("s", backend.port, kind).body(full(body)).unwrap();
    let answer = if version == Version::HTTP_2 {
        *request.uri_mut() = format!("http://router{}", request.uri()).parse().unwrap();
        request.headers_mut().remove("host");
        soon(
            "the head",
            http2::<Body>(&world).await.send_request(request),
        )
        .await
        .unwrap()
    } else {
        soon("the head", start(world.address, request)).await
    };
    let (head, body) = collected(answer).await;
    assert_eq!(head["content-type"], kind);
    assert_eq!(head["got-content-type"], "application/grpc+proto");
    assert_eq!(head["got-te"], "trailers");
    assert!(!head.contains_key("got-x-grpc-web"));
    let body = if text { decoded(&body) } else { body };
    let last = "grpc-status: 0\r\nown-sum: 7\r\n";
    let expected = [(0, "hi".into()), (0, "hi".into()), (0x80, last.into())];
    assert_eq!(messages(&body), expected);
    until("it is counted", || {
        world.metric("torpor_router_grpc_calls") == 0
    })
    .await;
    assert_eq!(world.proxy.open_ended.taken(), 0);
}

/// Starts a sandbox that answers one call with the frames that the test sends.
async fn streaming(answer: mpsc::UnboundedReceiver<Frame<Bytes>>) -> Backend {
    let answer = std::sync::Arc::new(std::sync::Mutex::new(Some(answer)));
    Backend::start(move |_| {
        let answer = answer.lock().unwrap().take().unwrap();
        async move {
            let mut response = Response::new(frames(answer));
            let kind = http::HeaderValue::from_static("application/grpc");
            response.headers_mut().insert("content-type", kind);
            response
        }
    })
    .await
}

#[tokio::test]
async fn a_stream_comes_message_by_message() {
    let world = World::new().await;
    let (sender, answer) = mpsc::unbounded_channel();
    let backend = streaming(answer).await;
    world.running("s", "127.0.0.1").await;
    let request = call("s", backend.port, TEXT).body(full("")).unwrap();
    let mut answer = soon("the head", start(world.address, request))
        .await
        .into_body();
    for text in ["\0\0\0\0\u{3}one", "\0\0\0\0\u{3}two"] {
        sender.send(data(text)).unwrap();
        let piece = soon("a piece", answer.frame()).await.unwrap().unwrap();
        assert_eq!(decoded(&piece.into_data().unwrap()), text.as_bytes());
    }
    sender.send(trailers(&[("grpc-status", "5")])).unwrap();
    let piece = soon("a piece", answer.frame()).await.unwrap().unwrap();
    let last = decoded(&piece.into_data().unwrap());
    assert_eq!(messages(&last), [(0x80, "grpc-status: 5\r\n".into())]);
    assert!(soon("the end", answer.frame()).await.is_none());
}

#[rstest]
#[case::trailers_too_early(Some("0"))]
#[case::out_of_time(None)]
#[tokio::test]
async fn an_answer_that_ends_within_a_message_breaks_off(#[case] status: Option<&'static str>) {
    let world = World::new().await;
    let (sender, answer) = mpsc::unbounded_channel();
    let backend = streaming(answer).await;
    world.running("s", "127.0.0.1").await;
    let request = call("s", backend.port, BYTES).header("grpc-timeout", "1S");
    let request = request.body(full("")).unwrap();
    let mut answer = soon("the head", start(world.address, request)).await;
    sender.send(data("\0\0\0\0\u{9}part")).unwrap();
    let piece = soon("a piece", answer.frame()).await.unwrap().unwrap();
    assert_eq!(piece.into_data().unwrap(), "\0\0\0\0\u{9}part");
    if let Some(status) = status {
        sender.send(trailers(&[("grpc-status", status)])).unwrap();
    }
    let end = soon("the end", answer.frame()).await;
    assert!(matches!(end, Some(Err(_))), "{end:?}");
}

#[tokio::test]
async fn incomplete_base64_makes_no_frames() {
    let world = World::new().await;
    let (seen, mut sizes) = mpsc::unbounded_channel();
    let backend = Backend::start(move |request: Request<Incoming>| {
        let seen = seen.clone();
        async move {
            let mut body = request.into_body();
            while let Some(Ok(frame)) = body.frame().await {
                seen.send(frame.data_ref().map(Bytes::len)).unwrap();
            }
            Response::new(full(""))
        }
    })
    .await;
    world.running("s", "127.0.0.1").await;
    let (sender, letters) = mpsc::unbounded_channel();
    let request = call("s", backend.port, TEXT).body(frames(letters)).unwrap();
    let answer = tokio::spawn(start(world.address, request));
    for four in STANDARD.encode(MESSAGE).as_bytes().chunks(4) {
        // The router joins the frames of a held request until it sends the call.
        for letter in four {
            sender
                .send(Frame::data(Bytes::copy_from_slice(&[*letter])))
                .unwrap();
        }
        let size = soon("a frame", sizes.recv()).await.unwrap().unwrap();
        assert!((1..=3).contains(&size), "{size}");
    }
    drop(sender);
    soon("the head", answer).await.unwrap();
    // The end of the body may be a frame without bytes.
    assert!(matches!(sizes.try_recv(), Err(_) | Ok(Some(0))));
    sizes.try_recv().unwrap_err();
}

#[rstest]
#[case::no_port(&[("x-sandbox-id", "ghost")], "", "3", "X-Sandbox-Port header is required for gRPC.")]
#[case::unknown(&[("x-sandbox-id", "ghost"), ("x-sandbox-port", "1")], "", "14", "Could not connect to the backend sandbox: ghost")]
#[case::late(&[("x-sandbox-id", "ghost"), ("x-sandbox-port", "1"), ("grpc-timeout", "0n")], "", "4", "The deadline of the call has passed.")]
#[tokio::test]
async fn a_refusal_is_a_status_in_the_head(
    #[case] headers: &[(&str, &str)],
    #[case] body: &'static str,
    #[case] status: &str,
    #[case] message: &str,
) {
    let world = World::new().await;
    let mut request = Request::post("/a/b")
        .header("host", "router")
        .header("content-type", TEXT);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answer = send(&world, request.body(full(body)).unwrap()).await;
    assert_eq!((answer.status, &*answer.body), (200, ""));
    assert_eq!(answer.headers["content-type"], "application/grpc-web-text");
    assert_eq!(answer.headers["grpc-status"], status);
    assert_eq!(answer.headers["grpc-message"], message);
}

#[rstest]
#[case::no_letters("AAAA****")]
#[case::cut_off("AAAAA")]
#[tokio::test]
async fn a_body_that_is_not_base64_is_refused(#[case] body: &'static str) {
    let (world, backend) = (World::new().await, sandbox().await);
    world.running("s", "127.0.0.1").await;
    let request = call("s", backend.port, TEXT).body(full(body)).unwrap();
    let (head, body) = collected(soon("the head", start(world.address, request)).await).await;
    // The sandbox may have responded before the router found the error.
    let status = match head.get("grpc-status") {
        Some(status) => status.to_str().unwrap().to_owned(),
        None => messages(&decoded(&body)).pop().unwrap().1,
    };
    assert!(status.contains('3'), "{status}");
}

#[tokio::test]
async fn a_response_that_is_not_grpc_passes_unchanged() {
    let (world, backend) = (World::new().await, Backend::named("plain").await);
    world.running("s", "127.0.0.1").await;
    let request = call("s", backend.port, TEXT).body(full("")).unwrap();
    assert_eq!(send(&world, request).await.line(), "200 plain");
}

#[tokio::test]
async fn a_call_opens_by_a_path() {
    let (world, backend) = (World::new().await, sandbox().await);
    world.running("s", "127.0.0.1").await;
    let request = Request::post(format!("/router/{NS}/s/{}/a.B/C", backend.port))
        .header("host", "router")
        .header("content-type", BYTES)
        .body(Full::new(Bytes::from_static(MESSAGE)))
        .unwrap();
    let (_, body) = collected(soon("the head", start(world.address, request)).await).await;
    assert_eq!(messages(&body).len(), 3);
}

async fn with_origin(world: &World, method: &str, origin: &str, port: u16) -> HeaderMap {
    let request = call("s", port, BYTES)
        .method(method)
        .header("origin", origin)
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization,x-grpc-web");
    let answer = soon(
        "the head",
        start(world.address, request.body(nothing()).unwrap()),
    )
    .await;
    answer.headers().clone()
}

#[tokio::test]
async fn only_pages_of_allowed_origins_may_make_calls() {
    let mut setup = Setup::default();
    setup.settings.web_origins = Origins::new(vec!["https://app.dev".into()]);
    let (world, backend) = (World::with(setup).await, sandbox().await);
    world.running("s", "127.0.0.1").await;
    let allowed = |headers: &HeaderMap| {
        let origin = headers.get("access-control-allow-origin");
        origin.map(|origin| origin.to_str().unwrap().to_owned())
    };
    for method in ["OPTIONS", "POST"] {
        let answer = with_origin(&world, method, "https://app.dev", backend.port).await;
        assert_eq!(
            allowed(&answer).as_deref(),
            Some("https://app.dev"),
            "{method}"
        );
        assert!(!answer.contains_key("access-control-allow-credentials"));
    }
    // Refusals have the header, too: otherwise the page could not read them.
    let refused = with_origin(&world, "POST", "https://app.dev", 0).await;
    assert_eq!(refused["grpc-status"], "3");
    assert!(allowed(&refused).is_some());
    let foreign = with_origin(&world, "POST", "https://evil.dev", backend.port).await;
    assert_eq!(allowed(&foreign), None);
}

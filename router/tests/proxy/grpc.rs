//! gRPC calls: HTTP/2 with prior knowledge on both sides, with the same headers as any request.

use std::{
    convert::Infallible,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, Version};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::{body::Incoming, client::conn::http2};
use rstest::rstest;
use serde_json::json;
use tokio::sync::{mpsc, oneshot};
use torpor_router::wait_slots::Bounds;

use crate::{
    backend::{Backend, Body, data, frames, full},
    client::{Raw, get, http2, nothing, request},
    world::{NS, Setup, World, soon, until},
};

/// Returns a call of `/process.v1.ProcessService/Start` on a sandbox's port.
fn call(sandbox: &str, port: u16) -> http::request::Builder {
    Request::builder()
        .method("POST")
        .uri("http://router/process.v1.ProcessService/Start")
        .header("content-type", "application/grpc+proto")
        .header("te", "trailers")
        .header("x-sandbox-id", sandbox)
        .header("x-sandbox-namespace", NS)
        .header("x-sandbox-port", port)
}

fn trailers(status: &'static str) -> Frame<Bytes> {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", http::HeaderValue::from_static(status));
    Frame::trailers(trailers)
}

/// Returns a complete response: a message and a status.
fn done(message: &str) -> Response<Body> {
    let (sender, answer) = mpsc::unbounded_channel();
    sender.send(data(message)).unwrap();
    sender.send(trailers("0")).unwrap();
    Response::new(frames(answer))
}

/// Outcome of a call: `grpc-status`, `grpc-message` and the messages.
#[derive(Debug)]
struct Outcome {
    head: HeaderMap,
    status: String,
    message: String,
    body: String,
}

async fn outcome(answer: Response<Incoming>) -> Outcome {
    assert_eq!(answer.status(), 200);
    let (head, body) = answer.into_parts();
    let head = head.headers;
    let body = soon("the end of an answer", body.collect()).await.unwrap();
    let last = body.trailers().cloned().unwrap_or_else(|| head.clone());
    let text = |name: &str| {
        let value = last.get(name).map(|value| value.to_str().unwrap());
        value.unwrap_or_default().to_owned()
    };
    let (status, message) = (text("grpc-status"), text("grpc-message"));
    let body = String::from_utf8(body.to_bytes().to_vec()).unwrap();
    Outcome {
        head,
        status,
        message,
        body,
    }
}

async fn send(client: &mut http2::SendRequest<Body>, request: Request<Body>) -> Outcome {
    let answer = soon("the head", client.send_request(request))
        .await
        .unwrap();
    outcome(answer).await
}

/// Calls a sandbox on a connection of its own.
async fn ask(world: &World, sandbox: &str, port: u16) -> Outcome {
    let request = call(sandbox, port).body(full("in")).unwrap();
    send(&mut http2(world).await, request).await
}

async fn next(body: &mut Incoming) -> Frame<Bytes> {
    soon("a frame", body.frame()).await.unwrap().unwrap()
}

#[tokio::test]
async fn a_call_reaches_the_sandbox_and_its_trailers_come_back() {
    let world = World::new().await;
    let backend = Backend::start(|request: Request<Incoming>| async move {
        assert_eq!(request.version(), Version::HTTP_2);
        let (parts, body) = request.into_parts();
        let headers = &parts.headers;
        for absent in ["authorization", "host"] {
            assert!(!headers.contains_key(absent), "{headers:?}");
        }
        assert_eq!(
            (headers["te"].as_bytes(), headers["own"].as_bytes()),
            (&b"trailers"[..], &b"1"[..])
        );
        assert_eq!(headers["x-forwarded-host"], "router");
        assert_eq!(body.collect().await.unwrap().to_bytes(), "in");
        let mut answer = done(&parts.uri.to_string());
        answer
            .headers_mut()
            .insert("content-type", headers["content-type"].clone());
        answer
    })
    .await;
    world.running("s", "127.0.0.1").await;
    let request = call("s", backend.port)
        .header("authorization", "Bearer secret")
        .header("own", "1");
    let outcome = send(&mut http2(&world).await, request.body(full("in")).unwrap()).await;
    assert_eq!(outcome.head["content-type"], "application/grpc+proto");
    let path = "/process.v1.ProcessService/Start";
    assert_eq!(
        outcome.body,
        format!("http://127.0.0.1:{}{path}", backend.port)
    );
    assert_eq!(outcome.status, "0");
    let count = r#"sandbox_router_requests_total{method="POST",code="200",sandbox_namespace="ns"}"#;
    until("it is counted", || world.metric(count) == 1).await;
    assert_eq!(world.metric("torpor_router_grpc_calls"), 0);
}

#[tokio::test]
async fn a_call_whose_method_looks_like_a_path_is_routed_by_its_headers() {
    let world = World::new().await;
    let backend =
        Backend::start(|request: Request<Incoming>| async move { done(request.uri().path()) })
            .await;
    world.running("s", "127.0.0.1").await;
    let method = "/router/other/sandbox/80/Start";
    let request = call("s", backend.port).uri(format!("http://router{method}"));
    let outcome = send(&mut http2(&world).await, request.body(full("")).unwrap()).await;
    assert_eq!((&*outcome.status, &*outcome.body), ("0", method));
}

#[tokio::test]
async fn messages_go_both_ways_while_the_call_is_open() {
    let world = World::new().await;
    let backend = Backend::start(|request: Request<Incoming>| async move {
        let (sender, answer) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut body = request.into_body();
            while let Some(Ok(frame)) = body.frame().await {
                sender.send(frame).unwrap();
            }
            sender.send(trailers("0")).unwrap();
        });
        Response::new(frames(answer))
    })
    .await;
    world.running("s", "127.0.0.1").await;
    let (sender, body) = mpsc::unbounded_channel();
    let mut client = http2(&world).await;
    let answer = client.send_request(call("s", backend.port).body(frames(body)).unwrap());
    let mut answer = soon("the head", answer).await.unwrap().into_body();
    for message in ["one", "two", "three"] {
        sender.send(data(message)).unwrap();
        assert_eq!(next(&mut answer).await.into_data().unwrap(), message);
    }
    // The client's half ends, and the sandbox's trailers still come.
    drop(sender);
    assert_eq!(
        next(&mut answer).await.into_trailers().unwrap()["grpc-status"],
        "0"
    );
}

#[rstest]
#[case::no_id(&[("x-sandbox-port", "9090")], "3", "X-Sandbox-ID header is required.")]
#[case::no_port(&[("x-sandbox-id", "ghost")], "3", "X-Sandbox-Port header is required for gRPC.")]
#[case::port(&[("x-sandbox-id", "ghost"), ("x-sandbox-port", "0")], "3", "Invalid port format.")]
#[case::timeout(&[("x-sandbox-id", "ghost"), ("x-sandbox-port", "1"), ("grpc-timeout", "1")], "3", "Invalid grpc-timeout format.")]
#[case::unknown(&[("x-sandbox-id", "ghost"), ("x-sandbox-port", "1")], "14", "Could not connect to the backend sandbox: ghost")]
#[case::late(&[("x-sandbox-id", "ghost"), ("x-sandbox-port", "1"), ("grpc-timeout", "0n")], "4", "The deadline of the call has passed.")]
#[tokio::test]
async fn refusals_are_statuses_of_grpc(
    #[case] headers: &[(&str, &str)],
    #[case] status: &str,
    #[case] message: &str,
) {
    let world = World::new().await;
    let mut request = Request::post("http://router/a/b").header("content-type", "application/grpc");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let outcome = send(&mut http2(&world).await, request.body(full("")).unwrap()).await;
    assert_eq!((&*outcome.status, &*outcome.message), (status, message));
    assert_eq!(outcome.head["content-type"], "application/grpc");
}

#[tokio::test]
async fn all_calls_to_a_port_share_a_connection_and_no_other_sandbox_does() {
    let world = World::new().await;
    let backend = Backend::start(|_| async { done("out") }).await;
    world.running("a", "127.0.0.1").await;
    let calls = (0..20).map(|_| ask(&world, "a", backend.port));
    for outcome in futures::future::join_all(calls).await {
        assert_eq!((&*outcome.body, &*outcome.status), ("out", "0"));
    }
    assert_eq!(backend.connections(), 1);
    // The address now belongs to another sandbox.
    world.api.remove("pods", NS, "a");
    world.running("b", "127.0.0.1").await;
    assert_eq!(ask(&world, "b", backend.port).await.status, "0");
    assert_eq!(backend.connections(), 2);
}

/// Starts a sandbox that sends an endless response to `/endless` and counts its pieces.
async fn endless(sent: Arc<AtomicUsize>) -> Backend {
    Backend::start(move |request: Request<Incoming>| {
        let sent = Arc::clone(&sent);
        async move {
            if request.uri().path() != "/endless" {
                return done("out");
            }
            let pieces = futures::stream::repeat_with(move || {
                sent.fetch_add(1, Ordering::Relaxed);
                let piece = Frame::data(Bytes::from_static(&[0; 16 * 1024]));
                Ok::<_, Infallible>(piece)
            });
            Response::new(StreamBody::new(pieces).boxed_unsync())
        }
    })
    .await
}

#[tokio::test]
async fn clients_that_take_nothing_do_not_hold_up_other_calls_to_the_port() {
    let world = World::new().await;
    let sent = Arc::new(AtomicUsize::new(0));
    let backend = endless(Arc::clone(&sent)).await;
    world.running("s", "127.0.0.1").await;
    let mut stalled = Vec::new();
    for _ in 0..4 {
        let mut client = http2(&world).await;
        let request = call("s", backend.port).uri("http://router/endless");
        let answer = client.send_request(request.body(full("")).unwrap());
        let answer = soon("the head", answer).await.unwrap();
        stalled.push((client, answer));
    }
    let all_is_sent = async {
        while sent.swap(0, Ordering::Relaxed) > 0 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    soon("nothing more is taken", all_is_sent).await;
    let outcome = ask(&world, "s", backend.port).await;
    assert_eq!((&*outcome.body, &*outcome.status), ("out", "0"));
    assert_eq!(backend.connections(), 1, "all share it");
}

/// Starts a sandbox that closes each connection after one call.
async fn short_lived() -> (u16, mpsc::UnboundedReceiver<()>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (closed, closes) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (answered, answer) = oneshot::channel::<()>();
            let answered = std::sync::Arc::new(std::sync::Mutex::new(Some(answered)));
            let service = hyper::service::service_fn(move |_| {
                let answered = answered.lock().unwrap().take();
                async move {
                    let _dropped_with_the_answer = answered;
                    Ok::<_, std::convert::Infallible>(done("out"))
                }
            });
            let executor = hyper_util::rt::TokioExecutor::new();
            let stream = hyper_util::rt::TokioIo::new(stream);
            let connection = hyper::server::conn::http2::Builder::new(executor)
                .serve_connection(stream, service);
            let mut connection = std::pin::pin!(connection);
            tokio::select! {
                _ = connection.as_mut() => {}
                _ = answer => {}
            }
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
            closed.send(()).unwrap();
        }
    });
    (port, closes)
}

#[tokio::test]
async fn a_connection_that_the_sandbox_has_closed_is_replaced() {
    let world = World::new().await;
    let (port, mut closes) = short_lived().await;
    world.running("s", "127.0.0.1").await;
    for _ in 0..5 {
        let outcome = ask(&world, "s", port).await;
        assert_eq!((&*outcome.status, &*outcome.body), ("0", "out"));
        soon("the sandbox closes", closes.recv()).await.unwrap();
    }
}

#[tokio::test]
async fn a_client_that_goes_away_resets_its_call() {
    let world = World::new().await;
    let (begun, mut begins) = mpsc::unbounded_channel();
    let backend = Backend::start(move |_| {
        let begun = begun.clone();
        async move {
            let (sender, ended) = oneshot::channel::<()>();
            begun.send(ended).unwrap();
            let _sender = sender;
            std::future::pending().await
        }
    })
    .await;
    world.running("s", "127.0.0.1").await;
    let mut client = http2(&world).await;
    let answer = tokio::spawn(client.send_request(call("s", backend.port).body(full("")).unwrap()));
    let ended = soon("the call begins", begins.recv()).await.unwrap();
    assert_eq!(world.metric("torpor_router_grpc_calls"), 1);
    answer.abort();
    soon("the sandbox's call ends", ended).await.unwrap_err();
    until("nothing is left", || {
        world.metric("torpor_router_grpc_calls") == 0 && world.proxy.open_ended.taken() == 0
    })
    .await;
}

#[rstest]
#[case::before_the_head(false)]
#[case::behind_a_message(true)]
#[tokio::test]
async fn a_call_ends_when_its_time_is_over(#[case] head: bool) {
    let world = World::new().await;
    let (sender, mut timeouts) = mpsc::unbounded_channel();
    let backend = Backend::start(move |request: Request<Incoming>| {
        let timeout = request.headers()["grpc-timeout"]
            .to_str()
            .unwrap()
            .to_owned();
        sender.send(timeout).unwrap();
        async move {
            if !head {
                return std::future::pending().await;
            }
            let (sender, answer) = mpsc::unbounded_channel();
            sender.send(data("one")).unwrap();
            // The leaked sender keeps the response open for ever.
            std::mem::forget(sender);
            Response::new(frames(answer))
        }
    })
    .await;
    world.running("s", "127.0.0.1").await;
    let request = call("s", backend.port).header("grpc-timeout", "200m");
    let outcome = send(&mut http2(&world).await, request.body(full("")).unwrap()).await;
    assert_eq!(
        (&*outcome.status, &*outcome.message),
        ("4", "The deadline of the call has passed.")
    );
    assert_eq!(outcome.body, if head { "one" } else { "" });
    let timeout = timeouts.recv().await.unwrap();
    let left: u32 = timeout.strip_suffix('u').unwrap().parse().unwrap();
    assert!(left <= 200_000, "time left: {timeout}");
}

#[tokio::test]
async fn the_timeouts_of_requests_do_not_limit_a_call() {
    let mut setup = Setup::default();
    let short = Duration::from_millis(50);
    (
        setup.settings.proxy_timeout,
        setup.settings.response_header_timeout,
    ) = (short, short);
    setup.timeouts.busy = 2 * short;
    let world = World::with(setup).await;
    let (go_on, waiting) = oneshot::channel::<()>();
    let waiting = std::sync::Arc::new(std::sync::Mutex::new(Some(waiting)));
    let backend = Backend::start(move |_| {
        let waiting = waiting.lock().unwrap().take().unwrap();
        async move {
            waiting.await.unwrap();
            done("out")
        }
    })
    .await;
    let silent = Backend::start(|_| std::future::pending()).await;
    world.running("s", "127.0.0.1").await;
    let mut client = http2(&world).await;
    let answer = tokio::spawn(client.send_request(call("s", backend.port).body(full("")).unwrap()));
    until("the call is in flight", || backend.connections() == 1).await;
    // These requests begin after the call and time out: the call has exceeded the limits, too.
    for _ in 0..3 {
        assert_eq!(get(&world, "s", silent.port).await.status, 502);
    }
    go_on.send(()).unwrap();
    let answer = soon("the answer", answer).await.unwrap().unwrap();
    assert_eq!(outcome(answer).await.status, "0");
}

#[tokio::test]
async fn the_routers_own_limit_bounds_a_call() {
    let mut setup = Setup::default();
    setup.settings.grpc_proxy_timeout = Duration::from_millis(50);
    let world = World::with(setup).await;
    let backend = Backend::start(|_| std::future::pending()).await;
    world.running("s", "127.0.0.1").await;
    assert_eq!(ask(&world, "s", backend.port).await.status, "4");
}

#[tokio::test]
async fn a_call_that_sends_too_much_gets_a_status() {
    let mut setup = Setup::default();
    setup.settings.max_request_body = 10;
    let world = World::with(setup).await;
    let backend = Backend::start(|request: Request<Incoming>| async move {
        // The response headers come first, as with a stream in both directions.
        let (sender, answer) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let _ = request.into_body().collect().await;
            let _ = sender.send(trailers("0"));
        });
        Response::new(frames(answer))
    })
    .await;
    world.running("s", "127.0.0.1").await;
    let (sender, body) = mpsc::unbounded_channel();
    let mut client = http2(&world).await;
    let answer = client.send_request(call("s", backend.port).body(frames(body)).unwrap());
    let answer = soon("the head", answer).await.unwrap();
    sender.send(data("12345678901")).unwrap();
    let outcome = outcome(answer).await;
    assert_eq!(
        (&*outcome.status, &*outcome.message),
        ("8", "Request body too large.")
    );
}

#[tokio::test]
async fn a_port_without_http2_is_unavailable() {
    let world = World::new().await;
    world.running("s", "127.0.0.1").await;
    for answer in ["HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", ""] {
        let port = crate::streaming::raw_backend(answer).await;
        let outcome = ask(&world, "s", port).await;
        assert_eq!((&*outcome.status, &*outcome.body), ("14", ""));
    }
    let closed = Backend::named("gone").await.port;
    assert_eq!(ask(&world, "s", closed).await.status, "14");
}

#[tokio::test]
async fn a_call_wakes_its_sandbox() {
    let world = World::new().await;
    let backend = Backend::start(|_| async { done("awake") }).await;
    let change = json!({
        "metadata": {"annotations": {"torpor.dev/resume-on-request": "true"}},
        "spec": {"operatingMode": "Suspended"},
    });
    let uid = world.sandbox("s", change).await;
    let meanwhile = async {
        until("it waits", || world.proxy.gate.held() == 1).await;
        world.pod("s", &uid, "127.0.0.1").await;
    };
    let (outcome, ()) = tokio::join!(ask(&world, "s", backend.port), meanwhile);
    assert_eq!((&*outcome.body, &*outcome.status), ("awake", "0"));
    assert_eq!(world.patches(), [200]);
}

/// Opens a call that the sandbox never ends.
async fn open(world: &World, sandbox: &str, port: u16) -> impl Future + use<> {
    let taken = world.proxy.open_ended.taken();
    let mut client = http2(world).await;
    let request = call(sandbox, port).body(full("")).unwrap();
    let answer = tokio::spawn(async move { client.send_request(request).await });
    until("it is open", || world.proxy.open_ended.taken() == taken + 1).await;
    answer
}

#[tokio::test]
async fn tunnels_and_calls_are_bounded_and_leave_slots_to_other_sandboxes() {
    let setup = Setup {
        open_ended: Bounds { all: 4, each: 9 },
        ..Setup::default()
    };
    let world = World::with(setup).await;
    let backend = Backend::start(|_| std::future::pending()).await;
    world.running("a", "127.0.0.1").await;
    world.running("b", "127.0.0.1").await;
    let _open = [
        open(&world, "a", backend.port).await,
        open(&world, "a", backend.port).await,
    ];
    let outcome = ask(&world, "a", backend.port).await;
    assert_eq!(
        (&*outcome.status, &*outcome.message),
        ("8", "Too many WebSockets and gRPC calls are open.")
    );
    let upgrade = request("a", backend.port)
        .header("connection", "upgrade")
        .header("upgrade", "websocket");
    let answer = crate::client::send(&world, upgrade.body(nothing()).unwrap()).await;
    let detail = r#"503 {"detail":"Too many WebSockets and gRPC calls are open."}"#;
    assert_eq!(answer.line(), detail);
    let _others = open(&world, "b", backend.port).await;
}

#[tokio::test]
async fn grpc_over_http1_is_a_request_like_any_other() {
    let world = World::new().await;
    let mut client = Raw::open(&world).await;
    client
        .write("POST /a/b HTTP/1.1\r\nHost: r\r\nConnection: close\r\nContent-Type: application/grpc\r\nX-Sandbox-ID: ghost\r\nContent-Length: 0\r\n\r\n")
        .await;
    let answer = client.rest().await;
    assert!(answer.starts_with("HTTP/1.1 502 "), "{answer}");
}

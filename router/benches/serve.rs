//! The processes of `hack/bench-router.sh`: a sandbox, the router in front of it, and a client of many WebSockets. Servers print their port and serve until they are killed.

use std::{
    convert::Infallible,
    net::Ipv4Addr,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn, upgrade};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use torpor_router::{
    address::AddressPolicy, authz::Authorizer, directory::Directory, flags, gate::Gate,
    metrics::Metrics, proxy::Proxy, resume::Resumer, server::Server, tunnel::Tunnels, upstream,
    watch,
};
use torpor_test_apiserver::Apiserver;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["sandbox"] => sandbox().await,
        ["router"] => router().await,
        ["websockets", port, sandbox, idle] => {
            websockets(port.parse()?, sandbox.parse()?, idle.parse()?).await
        }
        // `cargo test` runs benchmarks without arguments.
        [] => Ok(()),
        _ => bail!("usage: sandbox | router | websockets PORT SANDBOX-PORT IDLE"),
    }
}

async fn listen() -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    println!("{}", listener.local_addr()?.port());
    Ok(listener)
}

/// Answers "ok", or echoes after an upgrade.
async fn sandbox() -> anyhow::Result<()> {
    let listener = listen().await?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let connection =
            http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(answer));
        tokio::spawn(connection.with_upgrades());
    }
}

async fn answer(mut request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    if !request.headers().contains_key("upgrade") {
        return Ok(Response::new(Full::from("ok")));
    }
    let upgraded = upgrade::on(&mut request);
    tokio::spawn(async move {
        if let Ok(stream) = upgraded.await {
            let (mut reader, mut writer) = tokio::io::split(TokioIo::new(stream));
            let _ = tokio::io::copy(&mut reader, &mut writer).await;
        }
    });
    let mut response = Response::new(Full::default());
    *response.status_mut() = http::StatusCode::SWITCHING_PROTOCOLS;
    for (name, value) in [("connection", "upgrade"), ("upgrade", "websocket")] {
        response
            .headers_mut()
            .insert(name, http::HeaderValue::from_static(value));
    }
    Ok(response)
}

/// The router with its own defaults but for the log, with 5,000 sandboxes in its caches; sandbox `s` is on this machine.
async fn router() -> anyhow::Result<()> {
    let (flags, _) = flags::parse(["router", "--access-log=false"].map(Into::into))?;
    let api = Apiserver::new();
    for number in 0..5000 {
        make(&api, &format!("other-{number}"), "10.0.0.1");
    }
    make(&api, "s", "127.0.0.1");
    let directory = Directory::new(AddressPolicy::with_loopback());
    tokio::spawn(watch::follow(api.client(), None, &directory));
    directory.wait_ready().await;
    let metrics = Arc::new(Metrics::default());
    let (tasks, cut) = (TaskTracker::new(), CancellationToken::new());
    let dialer = upstream::Dialer::new(directory.clone(), flags.dialling(), Arc::clone(&metrics));
    let resumer = Resumer::new(api.client(), flags.api_timeout);
    let proxy = Proxy {
        gate: Gate::new(directory, resumer, flags.limits()),
        authorizer: Authorizer::AllowAll,
        pool: upstream::pool(dialer),
        tunnels: Tunnels::new(tasks.clone(), cut.clone(), Arc::clone(&metrics)),
        metrics,
        settings: flags.settings(),
    };
    let server = Server::new(
        Arc::new(proxy),
        flags.patience(),
        flags.max_connections,
        tasks,
        cut,
    );
    server.accept(listen().await?, None);
    std::future::pending().await
}

fn make(api: &Apiserver, name: &str, address: &str) {
    let sandbox = json!({"metadata": {"name": name, "namespace": "ns"}, "spec": {"operatingMode": "Running"}});
    let uid = api.create("sandboxes", sandbox)["metadata"]["uid"].clone();
    let owner = json!({"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": name, "uid": uid, "controller": true});
    api.create(
        "pods",
        json!({
            "metadata": {"name": name, "namespace": "ns", "ownerReferences": [owner],
                "labels": {"agents.x-k8s.io/sandbox-name-hash": torpor_api::name_hash(name)}},
        }),
    );
    let ready = json!({"status": {"podIPs": [{"ip": address}], "conditions": [{"type": "Ready", "status": "True"}]}});
    api.edit("pods", "ns", name, &ready);
}

/// Echoes over one WebSocket, before and after that many others were opened that do nothing.
async fn websockets(port: u16, sandbox: u16, idle: usize) -> anyhow::Result<()> {
    let mut one = open(port, sandbox).await?;
    println!("echo over 1 WebSocket: {}", echo(&mut one).await?);
    let mut others = Vec::with_capacity(idle);
    for _ in 0..idle {
        others.push(open(port, sandbox).await?);
    }
    println!("echo beside {idle} idle ones: {}", echo(&mut one).await?);
    for other in others.iter_mut().step_by(1 + idle / 100) {
        other.write_all(b"alive").await?;
        let mut answer = [0; 5];
        other.read_exact(&mut answer).await?;
        ensure!(answer == *b"alive", "an idle one echoes something else");
    }
    Ok(())
}

async fn open(port: u16, sandbox: u16) -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    stream.set_nodelay(true)?;
    let head = format!(
        "GET / HTTP/1.1\r\nHost: r\r\nX-Sandbox-ID: s\r\nX-Sandbox-Namespace: ns\r\nX-Sandbox-Port: {sandbox}\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(stream.read_u8().await.context("no answer")?);
    }
    ensure!(
        answer.starts_with(b"HTTP/1.1 101"),
        "{}",
        String::from_utf8_lossy(&answer)
    );
    Ok(stream)
}

async fn echo(stream: &mut TcpStream) -> anyhow::Result<String> {
    let mut times = Vec::with_capacity(5000);
    for _ in 0..5000 {
        let begin = Instant::now();
        stream.write_all(&[7; 64]).await?;
        let mut answer = [0; 64];
        stream.read_exact(&mut answer).await?;
        times.push(begin.elapsed());
    }
    times.sort();
    let micros = |time: Duration| time.as_micros();
    Ok(format!(
        "p50 {} µs, p99 {} µs",
        micros(times[2500]),
        micros(times[4950])
    ))
}

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
    address::AddressPolicy, authz::Authorizer, calls::Calls, directory::Directory, flags,
    gate::Gate, lanes, metrics::Metrics, places::Places, proxy::Proxy, resume::Resumer,
    server::Server, tunnel::Tunnels, upstream, watch,
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
        ["free-port"] => listen().await.map(drop),
        ["websockets", port, sandbox, idle, router] => {
            let memory = || resident(router);
            websockets(port.parse()?, sandbox.parse()?, idle.parse()?, memory).await
        }
        // `cargo test` runs benchmarks without arguments.
        [] => Ok(()),
        _ => bail!(
            "usage: sandbox | router | free-port | websockets PORT SANDBOX-PORT IDLE ROUTER-PID"
        ),
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
    for number in 0..SANDBOXES {
        make(&api, &format!("s-{number}"), "127.0.0.1");
    }
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
        calls: Calls::new(dialer.clone()),
        tunnels: Tunnels::new(tasks.clone(), cut.clone(), Arc::clone(&metrics)),
        open_ended: Places::new(flags.open_ended()),
        metrics,
        settings: flags.settings(),
    };
    let server = Server::new(
        Arc::new(proxy),
        lanes::one_per_core(&dialer)?,
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

/// Sandboxes that the idle WebSockets are spread over: one sandbox alone may not have that many.
const SANDBOXES: usize = 20;
/// Echoes beside the idle ones and without them take turns, so that both meet the same machine.
const TURNS: usize = 5;

/// Resident memory of a process in KiB.
fn resident(pid: &str) -> anyhow::Result<usize> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("no VmRSS")?.parse()?)
}

/// Echoes over one WebSocket, with and without many others open that do nothing.
async fn websockets(
    port: u16,
    sandbox: u16,
    idle: usize,
    memory: impl Fn() -> anyhow::Result<usize>,
) -> anyhow::Result<()> {
    let mut one = open(port, sandbox, "s").await?;
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    let mut per_tunnel = 0;
    for _ in 0..TURNS {
        echo(&mut one, &mut alone).await?;
        let before = memory()?;
        let mut others = Vec::with_capacity(idle);
        for number in 0..idle {
            others.push(open(port, sandbox, &format!("s-{}", number % SANDBOXES)).await?);
        }
        // Each has carried something, as those of users have.
        for other in &mut others {
            echo_once(other, *b"alive").await?;
        }
        // Of the first turn: later ones find what the allocator has kept.
        if per_tunnel == 0 {
            per_tunnel = memory()?.saturating_sub(before) * 1024 / idle.max(1);
        }
        echo(&mut one, &mut beside).await?;
        for other in others.iter_mut().step_by(1 + idle / 100) {
            echo_once(other, *b"still").await?;
        }
        drop(others);
    }
    let ((alone_p50, alone_p99), (p50, p99)) = (quantiles(alone), quantiles(beside));
    println!("echo over 1 WebSocket:    p50 {alone_p50:.1} µs, p99 {alone_p99:.1} µs");
    println!(
        "beside {idle} idle ones: p50 {p50:.1} µs ({:.2}), p99 {p99:.1} µs ({:.2}); {TURNS} turns of each",
        p50 / alone_p50,
        p99 / alone_p99
    );
    println!("router RSS per idle tunnel: {per_tunnel} bytes");
    Ok(())
}

async fn open(port: u16, sandbox: u16, name: &str) -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    stream.set_nodelay(true)?;
    let head = format!(
        "GET / HTTP/1.1\r\nHost: r\r\nX-Sandbox-ID: {name}\r\nX-Sandbox-Namespace: ns\r\nX-Sandbox-Port: {sandbox}\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
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

async fn echo_once<const N: usize>(stream: &mut TcpStream, message: [u8; N]) -> anyhow::Result<()> {
    stream.write_all(&message).await?;
    let mut answer = [0; N];
    stream.read_exact(&mut answer).await?;
    ensure!(answer == message, "it echoes something else");
    Ok(())
}

async fn echo(stream: &mut TcpStream, times: &mut Vec<Duration>) -> anyhow::Result<()> {
    for _ in 0..5000 {
        let begin = Instant::now();
        echo_once(stream, [7; 64]).await?;
        times.push(begin.elapsed());
    }
    Ok(())
}

/// p50 and p99 in microseconds.
fn quantiles(mut times: Vec<Duration>) -> (f64, f64) {
    times.sort();
    let micros = |percent: usize| times[times.len() * percent / 100].as_secs_f64() * 1e6;
    (micros(50), micros(99))
}

//! Processes of `hack/dev bench router`: a sandbox, the router in front of it, and a client with
//! many WebSockets. Servers print their port and serve until they are killed.

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
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use torpor_router::{
    address::AddressPolicy, authz::Authorizer, calls::Calls, directory::Directory, flags,
    gate::Gate, lanes, metrics::Metrics, proxy::Proxy, resume::Resumer,
    sandbox_limit::SandboxLimit, server::Server, tunnel::Tunnels, upstream, wait_slots::WaitSlots,
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
        ["free-port"] => listen().await.map(drop),
        ["websockets", port, sandbox, tunnels, kept, router, out] => {
            let idle = Idle {
                tunnels: tunnels.parse()?,
                kept: kept.parse()?,
            };
            let memory = || resident(router);
            let found = websockets(port.parse()?, sandbox.parse()?, &idle, memory).await?;
            std::fs::write(out, format!("{found:#}\n")).with_context(|| (*out).to_owned())
        }
        // `cargo test` runs benchmarks without arguments.
        [] => Ok(()),
        _ => bail!(
            "usage: sandbox | router | free-port | websockets PORT SANDBOX-PORT TUNNELS KEPT ROUTER-PID OUT"
        ),
    }
}

async fn listen() -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    println!("{}", listener.local_addr()?.port());
    Ok(listener)
}

/// Runs a sandbox that answers "ok", or echoes after an upgrade.
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

/// Runs the router with its defaults except the access log, with 5,000 sandboxes in its caches;
/// sandbox `s` is on this machine.
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
        calls: Calls::new(dialer.clone(), flags.open_ended()),
        tunnels: Tunnels::new(tasks.clone(), cut.clone(), Arc::clone(&metrics)),
        open_ended: WaitSlots::new(flags.open_ended()),
        sandbox_limit: SandboxLimit::new(flags.max_requests_per_sandbox),
        metrics,
        settings: flags.settings(),
    };
    let server = Server::new(
        Arc::new(proxy),
        lanes::one_per_core(&dialer)?,
        flags.connection_timeouts(),
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

/// Sandboxes of the idle connections: one sandbox may not have that many.
const SANDBOXES: usize = 20;
/// Alternations between echoes with and without idle connections, so that both see the same
/// conditions.
const TURNS: usize = 5;

/// Returns the resident memory of a process in KiB.
fn resident(pid: &str) -> anyhow::Result<usize> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("no VmRSS")?.parse()?)
}

/// Numbers of idle connections: WebSockets, and connections between requests, which take one
/// descriptor of the router instead of two.
struct Idle {
    tunnels: usize,
    kept: usize,
}

/// Measures echoes over one WebSocket, with and without many idle connections.
async fn websockets(
    port: u16,
    sandbox: u16,
    idle: &Idle,
    memory: impl Fn() -> anyhow::Result<usize>,
) -> anyhow::Result<Value> {
    let mut one = open(port, sandbox, "s").await?;
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    let mut per_tunnel = 0;
    for _ in 0..TURNS {
        echo(&mut one, &mut alone).await?;
        let before = memory()?;
        let mut tunnels = open_all(port, sandbox, idle.tunnels).await?;
        // Only the first turn counts: later ones reuse memory that the allocator has kept.
        if per_tunnel == 0 {
            per_tunnel = memory()?.saturating_sub(before) * 1024 / idle.tunnels.max(1);
        }
        let mut kept = Vec::with_capacity(idle.kept);
        for number in 0..idle.kept {
            let mut stream = connect(port).await?;
            get(&mut stream, sandbox, &one_of_many(number)).await?;
            kept.push(stream);
        }
        echo(&mut one, &mut beside).await?;
        for tunnel in tunnels.iter_mut().step_by(1 + idle.tunnels / 100) {
            echo_once(tunnel, *b"still").await?;
        }
        for (number, stream) in kept.iter_mut().enumerate() {
            get(stream, sandbox, &one_of_many(number)).await?;
        }
        drop((tunnels, kept));
    }
    Ok(report(
        idle,
        quantiles(alone),
        quantiles(beside),
        per_tunnel,
    ))
}

/// Prints the results, p50 and p99 each, and returns them.
fn report(idle: &Idle, alone: (f64, f64), beside: (f64, f64), per_tunnel: usize) -> Value {
    let Idle { tunnels, kept } = idle;
    println!(
        "echo over 1 WebSocket: p50 {:.1} µs, p99 {:.1} µs",
        alone.0, alone.1
    );
    println!(
        "beside {} idle connections ({tunnels} WebSockets, {kept} between requests): p50 {:.1} µs ({:.2}), p99 {:.1} µs ({:.2}); {TURNS} turns of each",
        tunnels + kept,
        beside.0,
        beside.0 / alone.0,
        beside.1,
        beside.1 / alone.1
    );
    println!("router RSS per idle tunnel: {per_tunnel} bytes");
    let tenth = |micros: f64| (micros * 10.0).round() / 10.0;
    json!({
        "websockets": tunnels,
        "between_requests": kept,
        "turns": TURNS,
        "echo_alone": {"p50_micros": tenth(alone.0), "p99_micros": tenth(alone.1)},
        "echo_beside": {"p50_micros": tenth(beside.0), "p99_micros": tenth(beside.1)},
        "router_bytes_per_websocket": per_tunnel,
    })
}

/// Returns the sandbox of an idle connection.
fn one_of_many(number: usize) -> String {
    format!("s-{}", number % SANDBOXES)
}

/// Opens WebSockets and sends one message over each, as users do.
async fn open_all(port: u16, sandbox: u16, count: usize) -> anyhow::Result<Vec<TcpStream>> {
    let mut opened = Vec::with_capacity(count);
    for number in 0..count {
        opened.push(open(port, sandbox, &one_of_many(number)).await?);
    }
    for stream in &mut opened {
        echo_once(stream, *b"alive").await?;
    }
    Ok(opened)
}

async fn connect(port: u16) -> anyhow::Result<TcpStream> {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

async fn open(port: u16, sandbox: u16, name: &str) -> anyhow::Result<TcpStream> {
    let mut stream = connect(port).await?;
    let upgrade = "Connection: upgrade\r\nUpgrade: websocket\r\n";
    ask(&mut stream, sandbox, name, upgrade, 101).await?;
    Ok(stream)
}

/// Sends a request and reads the whole response; the connection stays open.
async fn get(stream: &mut TcpStream, sandbox: u16, name: &str) -> anyhow::Result<()> {
    ask(stream, sandbox, name, "", 200).await?;
    let mut body = [0; 2];
    stream.read_exact(&mut body).await?;
    ensure!(body == *b"ok", "unexpected response");
    Ok(())
}

/// Sends a request with further headers and reads the response headers.
async fn ask(
    stream: &mut TcpStream,
    sandbox: u16,
    name: &str,
    headers: &str,
    status: u16,
) -> anyhow::Result<()> {
    let head = format!(
        "GET / HTTP/1.1\r\nHost: r\r\nX-Sandbox-ID: {name}\r\nX-Sandbox-Namespace: ns\r\nX-Sandbox-Port: {sandbox}\r\n{headers}\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(stream.read_u8().await.context("no response")?);
    }
    let answer = String::from_utf8_lossy(&answer);
    ensure!(
        answer.starts_with(&format!("HTTP/1.1 {status}")),
        "{answer}"
    );
    Ok(())
}

async fn echo_once<const N: usize>(stream: &mut TcpStream, message: [u8; N]) -> anyhow::Result<()> {
    stream.write_all(&message).await?;
    let mut answer = [0; N];
    stream.read_exact(&mut answer).await?;
    ensure!(answer == message, "unexpected echo");
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

/// Returns p50 and p99 in microseconds.
fn quantiles(mut times: Vec<Duration>) -> (f64, f64) {
    times.sort();
    let micros = |percent: usize| times[times.len() * percent / 100].as_secs_f64() * 1e6;
    (micros(50), micros(99))
}

//! The router beside a direct connection to the same sandbox and beside nginx as a proxy in front
//! of it.
//!
//! The sandbox, the router (5,000 sandboxes in its caches, no access log), nginx and wrk are
//! processes of their own and share the machine's cores. Only one proxy has load at a time.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use clap::Args;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;
use tokio::process::Command;

use crate::{cargo, node, stats::median, stop::Stop, wrk};

mod servers;

use servers::{Server, free_port, nginx_configuration};

/// Connections of wrk.
const CONNECTIONS: u32 = 50;
/// Open files that a server has beside those for idle connections.
const SPARE: u64 = 200;
/// Servers in the order of the table.
const NAMES: [&str; 3] = ["direct", "nginx", "router"];

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Seconds of load
    #[arg(default_value_t = 8)]
    seconds: u32,
    /// Rounds
    #[arg(default_value_t = 3)]
    rounds: usize,
    /// Idle connections
    #[arg(default_value_t = 10_000)]
    idle: u64,
    /// Directory that gets the results as router.json [default: bench-router in cargo's target]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// Idle connections: WebSockets, for each of which the router needs two open files, and HTTP
/// connections that wait for their client's next request, for each of which it needs one.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Idle {
    tunnels: u64,
    kept: u64,
}

impl Idle {
    /// Returns how many connections of each kind a process with so many open files may have.
    ///
    /// Most are to be WebSockets: where they cannot be, there are fewer of all.
    fn within(files: u64, wanted: u64) -> Self {
        let tunnels = files.saturating_sub(SPARE + wanted).min(wanted);
        if tunnels * 2 >= wanted {
            return Self {
                tunnels,
                kept: wanted - tunnels,
            };
        }
        Self {
            tunnels: files.saturating_sub(SPARE) / 2,
            kept: 0,
        }
    }
}

/// Raises the limit of open files, which the servers inherit, as far as is allowed and needed;
/// returns it.
fn open_files(wanted: u64) -> anyhow::Result<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raise = |files: u64, maximum: u64| {
        let limit = Rlimit {
            current: Some(files),
            maximum: Some(maximum),
        };
        setrlimit(Resource::Nofile, limit)
    };
    let hard = limit.maximum.unwrap_or(wanted);
    // Only CAP_SYS_RESOURCE raises the hard limit.
    if hard < wanted && raise(wanted, wanted).is_ok() {
        return Ok(wanted);
    }
    let files = hard.min(wanted.max(limit.current.unwrap_or(wanted)));
    raise(files, hard).context("cannot raise the limit of open files")?;
    Ok(files)
}

/// Figures of one round; latencies are in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
struct Figures {
    requests_per_second: f64,
    p50_ms: f64,
    p99_ms: f64,
    cpu_micros_per_request: f64,
}

impl Figures {
    fn median(rounds: &[Self]) -> Self {
        let of = |figure: fn(&Self) -> f64| median(&rounds.iter().map(figure).collect::<Vec<_>>());
        Self {
            requests_per_second: of(|round| round.requests_per_second),
            p50_ms: of(|round| round.p50_ms),
            p99_ms: of(|round| round.p99_ms),
            cpu_micros_per_request: of(|round| round.cpu_micros_per_request),
        }
    }

    fn row(&self, name: &str) -> String {
        format!(
            "{name:<8} {:12.0} {:10.2} {:10.2} {:14.1}",
            self.requests_per_second, self.p50_ms, self.p99_ms, self.cpu_micros_per_request
        )
    }
}

#[derive(Debug, Serialize)]
struct Results {
    seconds: u32,
    connections: u32,
    load_average_before: String,
    load: Loads,
    router_resident_mib: f64,
    idle: serde_json::Value,
}

#[derive(Debug, Serialize)]
struct Loads {
    direct: Rounds,
    nginx: Rounds,
    router: Rounds,
}

#[derive(Debug, Serialize)]
struct Rounds {
    median: Figures,
    rounds: Vec<Figures>,
}

impl From<Vec<Figures>> for Rounds {
    fn from(rounds: Vec<Figures>) -> Self {
        Self {
            median: Figures::median(&rounds),
            rounds,
        }
    }
}

pub(crate) async fn run(options: &Options, stop: &mut Stop) -> anyhow::Result<()> {
    wrk::require().await?;
    let wanted = options.idle * 2 + SPARE;
    let files = open_files(wanted)?;
    let idle = Idle::within(files, options.idle);
    if files < wanted {
        eprintln!(
            "a process may have {files} open files at most: {} idle connections, {} of them WebSockets",
            idle.tunnels + idle.kept,
            idle.tunnels
        );
    }
    let out = options
        .out
        .clone()
        .unwrap_or_else(|| cargo::target().join("bench-router"));
    let results = stop.unless(measure(options, idle)).await?;
    fs::create_dir_all(&out)?;
    let file = out.join("router.json");
    fs::write(&file, serde_json::to_string_pretty(&results)? + "\n")?;
    eprintln!("results: {}", file.display());
    Ok(())
}

async fn measure(options: &Options, idle: Idle) -> anyhow::Result<Results> {
    let bench = [
        "bench",
        "-p",
        "torpor-router",
        "--bench",
        "serve",
        "--no-run",
    ];
    let program = cargo::build(&bench, "serve").await?;
    let work = tempfile::tempdir()?;
    let sandbox = Server::start(&program, "sandbox").await?;
    let router = Server::start(&program, "router").await?;
    let port = free_port(&program).await?;
    let configuration = work.path().join("nginx.conf");
    fs::write(
        &configuration,
        nginx_configuration(work.path(), port, sandbox.port),
    )?;
    let nginx = Server::nginx(&configuration, port).await?;
    let load = |server| load(options.seconds, server, sandbox.port);
    load(&router).await?;
    let load_average = fs::read_to_string("/proc/loadavg")?;
    let load_average: Vec<&str> = load_average.split(' ').take(3).collect();
    let load_average_before = load_average.join(" ");
    eprintln!("load average {load_average_before} before");
    let servers = [&sandbox, &nginx, &router];
    let mut figures = servers.map(|_| Vec::new());
    for _ in 0..options.rounds {
        for (server, figures) in servers.iter().zip(&mut figures) {
            figures.push(load(server).await?);
        }
    }
    let resident = node::resident_mib(router.pid)?.round();
    print(options, &figures, resident);
    let file = work.path().join("idle.json");
    let idle = websockets(&program, &router, &sandbox, idle, &file).await?;
    let [direct, nginx, router] = figures.map(Rounds::from);
    Ok(Results {
        seconds: options.seconds,
        connections: CONNECTIONS,
        load_average_before,
        load: Loads {
            direct,
            nginx,
            router,
        },
        router_resident_mib: resident,
        idle,
    })
}

/// Measures one server under load.
async fn load(seconds: u32, server: &Server, sandbox: u16) -> anyhow::Result<Figures> {
    let headers = [
        "X-Sandbox-ID: s".to_owned(),
        "X-Sandbox-Namespace: ns".to_owned(),
        format!("X-Sandbox-Port: {sandbox}"),
    ];
    let before = server.processor_time();
    let load = wrk::Load {
        url: &format!("http://127.0.0.1:{}/", server.port),
        headers: &headers,
        threads: 2,
        connections: CONNECTIONS,
        seconds,
    };
    let report = load.run().await?;
    let used = server.processor_time() - before;
    Ok(Figures {
        requests_per_second: report.per_second.round(),
        p50_ms: report.p50,
        p99_ms: report.p99,
        cpu_micros_per_request: used.as_secs_f64() * 1e6 / report.requests,
    })
}

/// Prints the rounds, then the medians with their ratio to the direct connection.
fn print(options: &Options, figures: &[Vec<Figures>; 3], resident: f64) {
    println!(
        "{:<8} {:>12} {:>10} {:>10} {:>14} {:>12} {:>8}",
        format!("{CONNECTIONS} conns"),
        "requests/s",
        "p50 ms",
        "p99 ms",
        "µs of CPU/req",
        "p99/direct",
        "of direct"
    );
    for (name, rounds) in NAMES.iter().zip(figures) {
        for round in rounds {
            println!("{}", round.row(&format!("  {name}")));
        }
    }
    let direct = Figures::median(&figures[0]);
    for (name, rounds) in NAMES.iter().zip(figures) {
        let median = Figures::median(rounds);
        let row = median.row(name);
        let tail = median.p99_ms / direct.p99_ms;
        let rate = median.requests_per_second / direct.requests_per_second;
        println!("{row} {tail:12.2} {rate:8.2}");
    }
    println!(
        "medians of {} rounds of {} s; processor time of direct is the sandbox's",
        options.rounds, options.seconds
    );
    println!("router RSS after the load: {resident:.0} MiB");
}

/// Measures an echo with many idle connections; the program prints its own table.
async fn websockets(
    program: &Path,
    router: &Server,
    sandbox: &Server,
    idle: Idle,
    out: &Path,
) -> anyhow::Result<serde_json::Value> {
    let numbers = [
        u64::from(router.port),
        sandbox.port.into(),
        idle.tunnels,
        idle.kept,
    ];
    let status = Command::new(program)
        .arg("websockets")
        .args(numbers.map(|number| number.to_string()))
        .arg(router.pid.to_string())
        .arg(out)
        .kill_on_drop(true)
        .status()
        .await?;
    ensure!(status.success(), "websockets: {status}");
    Ok(serde_json::from_slice(&fs::read(out)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_connections_are_websockets_as_far_as_open_files_allow() {
        let of = |files| {
            let Idle { tunnels, kept } = Idle::within(files, 10_000);
            (tunnels, kept)
        };
        assert_eq!(of(20_200), (10_000, 0));
        assert_eq!(of(1_000_000), (10_000, 0));
        assert_eq!(of(20_000), (9_800, 200));
        assert_eq!(of(15_200), (5_000, 5_000));
        // Fewer than half would be WebSockets.
        assert_eq!(of(10_000), (4_900, 0));
    }
}

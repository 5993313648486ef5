//! Benchmarks: of sandboxes on the development cluster, of the router, and of the controller.

use std::process::ExitCode;

use anyhow::ensure;
use clap::{Parser, Subcommand};

use stop::Stop;

mod awake;
mod bare;
mod cargo;
mod claims;
mod doze;
mod elsewhere;
mod fork;
mod hour;
mod http;
mod link;
mod many;
mod node;
mod pool;
mod probes;
mod router;
mod runsc;
mod setup;
mod sleeper;
mod snapshots;
mod stats;
mod stop;
mod store;
mod swap;
mod table;
mod upload;
mod wake;
mod wrk;

/// Measures Torpor beside a base of the same run.
///
/// Benchmarks of sandboxes need a development cluster with Torpor on this machine, and root. They
/// find it by KUBECONFIG, which `hack/dev bench` sets.
#[derive(Debug, Parser)]
#[command(name = "torpor-bench")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Cost of a hibernated sandbox and time of its wake, beside bare runsc
    Wake(wake::Options),
    /// Time to the first byte of a sleeping sandbox, dozing and hibernated, small and with 100 MB
    Doze(doze::Options),
    /// Time of a resume on another node, from an S3 server; needs two nodes
    Elsewhere(elsewhere::Options),
    /// Wakes while an image is being uploaded, beside wakes without; needs an S3 server
    Upload(upload::Options),
    /// Sweep of a repository with 10,000 images; needs no cluster
    Store(store::Options),
    /// 20 copies of one snapshot of 100 MB at the same time, beside as many cold starts
    Fork(fork::Options),
    /// 50 sandboxes of 30 MB woken at once; cost of 300 asleep, and of the agent with them
    Many(many::Options),
    /// Time of gVisor alone to restore many Pods: its own commands, no cluster
    Bare(bare::Options),
    /// Cost of idle detection for a sandbox that is awake
    Awake(awake::Options),
    /// Connections to a Pod that hibernates, silent for an hour and then used all at once
    Hour(hour::Options),
    /// Cost of one tenant's SandboxSnapshots for an agent that has nothing to do with them
    Snapshots(snapshots::Options),
    /// Cost of a kubelet's probe while a sandbox dozes
    Probes(probes::Options),
    /// The router beside a direct connection and nginx; needs no cluster
    Router(router::Options),
    /// Claims from a warm pool: members that run, that sleep in a golden image, and cold starts
    Pool(pool::Options),
    /// Time until claims become Ready, beside a bare client; needs no cluster
    Claims(claims::Options),
}

fn main() -> ExitCode {
    let outcome = measure(Arguments::parse().command);
    outcome.map_or_else(
        |error| {
            eprintln!("torpor-bench: {error:#}");
            ExitCode::FAILURE
        },
        |()| ExitCode::SUCCESS,
    )
}

fn measure(command: Command) -> anyhow::Result<()> {
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    ensure!(
        provider.install_default().is_ok(),
        "a TLS provider is installed already"
    );
    match command {
        Command::Wake(options) => run(async |stop| wake::run(&options, stop).await),
        Command::Doze(options) => run(async |stop| doze::run(&options, stop).await),
        Command::Elsewhere(options) => run(async |stop| elsewhere::run(&options, stop).await),
        Command::Upload(options) => run(async |stop| upload::run(&options, stop).await),
        Command::Fork(options) => run(async |stop| fork::run(&options, stop).await),
        Command::Many(options) => run(async |stop| many::run(&options, stop).await),
        Command::Bare(options) => run(async |stop| bare::run(&options, stop).await),
        Command::Awake(options) => run(async |stop| awake::run(&options, stop).await),
        Command::Hour(options) => run(async |stop| hour::run(&options, stop).await),
        Command::Snapshots(options) => run(async |stop| snapshots::run(&options, stop).await),
        Command::Probes(options) => run(async |stop| probes::run(&options, stop).await),
        Command::Router(options) => run(async |stop| router::run(&options, stop).await),
        Command::Pool(options) => run(async |stop| pool::run(&options, stop).await),
        Command::Store(options) => store::run(&options),
        Command::Claims(options) => claims::run(&options),
    }
}

/// Runs a benchmark that ends at a signal.
fn run(body: impl AsyncFnOnce(&mut Stop) -> anyhow::Result<()>) -> anyhow::Result<()> {
    block_on(async {
        let mut stop = Stop::listen()?;
        Box::pin(body(&mut stop)).await
    })
}

/// Runs a future on a runtime of its own.
fn block_on<T>(future: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Runtime::new()?.block_on(future)
}

//! Load on the controller: claims against a control plane with fake nodes, beside a bare client that makes the same writes without a controller, in the same run.
//! `hack/bench-claims.sh` starts the control plane, runs one load at a time with `run`, and prints all of them with `report`.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

mod audit;
mod bare;
mod board;
mod controller;
mod counters;
mod load;
mod objects;
mod report;
mod run;
mod stats;

#[derive(Debug, Parser)]
#[command(name = "bench-claims", about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs one load and writes what came of it as JSON.
    Run(RunArguments),
    /// Prints a table of what `run` has written, and writes all of it into one file.
    Report {
        /// File that gets all results.
        #[arg(long)]
        out: PathBuf,
        /// What `run` has written.
        results: Vec<PathBuf>,
    },
}

/// Where things are: `hack/cluster bench env` prints the environment variables.
#[derive(Debug, Parser)]
struct RunArguments {
    /// Which load: 3, 10, 20, 40 (claims per second), burst (150 at once), gate (upstream's own), memory (5,000 sandboxes).
    load: load::Load,
    /// How long claims come.
    #[arg(long, default_value_t = 30)]
    seconds: u32,
    /// The controller's binary.
    #[arg(long)]
    controller: PathBuf,
    /// Further arguments of the controller, separated by spaces.
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    controller_args: String,
    /// File that gets the result.
    #[arg(long)]
    out: PathBuf,
    /// Kubeconfig of the load itself.
    #[arg(long, env = "KUBECONFIG")]
    kubeconfig: PathBuf,
    #[arg(long, env = "CONTROLLER_KUBECONFIG")]
    controller_kubeconfig: PathBuf,
    /// The apiserver's log of the controller's writes.
    #[arg(long, env = "AUDIT_LOG")]
    audit_log: PathBuf,
    /// The control plane's processes, as NAME=PID, separated by commas.
    #[arg(long, env = "PROCESSES")]
    processes: String,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    if rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .is_err()
    {
        anyhow::bail!("a TLS provider is installed already");
    }
    match Arguments::parse().command {
        Command::Run(arguments) => {
            let outcome = run::run(&arguments).await?;
            let text = serde_json::to_string_pretty(&outcome)?;
            std::fs::write(&arguments.out, text)
                .with_context(|| arguments.out.display().to_string())
        }
        Command::Report { out, results } => report::report(&results, &out),
    }
}

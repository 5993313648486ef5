//! torpor-agent, one per node. The agent watches the Pods of its node; it hibernates, wakes and
//! keeps their sandboxes as the API requests. `install` puts the runtime on the host; `uninstall`
//! removes it.

mod args;
mod install;
mod installed;
mod kata;
mod peers;
mod policy;
mod reconcile;
mod report;
mod repository;
mod run;
mod seal_keys;
mod watches;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use nix::sys::signal::{SigSet, Signal};

use crate::args::{Args, Command};

fn main() -> ExitCode {
    let args = Args::parse();
    init_logging(args.log_format);
    let result = match args.command {
        Command::Run(run) => serve(run),
        Command::Install(args) => log_outcome(install::install(&args)),
        Command::Uninstall(args) => log_outcome(install::uninstall(&args)),
        Command::SealKeys(args) => seal_keys::run(&args),
        Command::Wait => wait(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "torpor-agent failed");
            ExitCode::FAILURE
        }
    }
}

/// Waits for SIGTERM or SIGINT. The kubelet sends SIGTERM to end the Pod.
fn wait() -> anyhow::Result<()> {
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    signals.thread_block()?;
    tracing::info!("the runtime is installed on this node");
    signals.wait()?;
    Ok(())
}

/// Logs the result of an install or uninstall. An error gets its stable reason as context.
fn log_outcome(result: Result<install::Outcome, install::Error>) -> anyhow::Result<()> {
    let outcome = result.map_err(|error| {
        let reason = error.reason();
        anyhow::Error::new(error).context(reason)
    })?;
    let install::Outcome {
        binaries,
        containerd,
        restarted,
    } = outcome;
    tracing::info!(
        binaries,
        containerd,
        restarted,
        "done; the fields show what changed"
    );
    Ok(())
}

/// Starts the log on standard error. RUST_LOG sets the levels; the default is info.
fn init_logging(format: args::LogFormat) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match format {
        args::LogFormat::Text => lines.with_ansi(false).init(),
        args::LogFormat::Json => lines.json().init(),
    }
}

/// Time for which an idle thread for blocking calls waits for the next call before it ends.
/// tokio's default is ten seconds, and tokio gives a call to the thread that has waited longest.
/// The agent observes each of hundreds of sandboxes every few seconds. With the default it would
/// therefore keep as many threads as it ever needed at once.
const IDLE_THREAD_LIMIT: Duration = Duration::from_millis(500);

fn serve(run: args::RunArgs) -> anyhow::Result<()> {
    // The process has one TLS provider; it must be set before the first client exists.
    if rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .is_err()
    {
        anyhow::bail!("another TLS provider was installed before aws-lc-rs");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_keep_alive(IDLE_THREAD_LIMIT)
        .enable_all()
        .build()?;
    let ended = runtime.block_on(run::run(run));
    // A thread may still wait for a shim, which goes on without it.
    runtime.shutdown_background();
    ended
}

//! torpor-agent: one per node. It watches the Pods of its node and hibernates, wakes and keeps their sandboxes as the API
//! asks; `install` and `uninstall` put the runtime on the host and take it away.

mod args;
mod install;
mod installed;
mod kata;
mod policy;
mod reconcile;
mod report;
mod run;

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
        Command::Install(args) => installed(install::install(&args)),
        Command::Uninstall(args) => installed(install::uninstall(&args)),
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

/// Waits for the end that the kubelet asks for.
fn wait() -> anyhow::Result<()> {
    let ends = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    ends.thread_block()?;
    tracing::info!("the runtime is installed on this node");
    ends.wait()?;
    Ok(())
}

/// Says how an installation or its removal ended; the reason is stable, for logs.
fn installed(result: Result<install::Outcome, install::Error>) -> anyhow::Result<()> {
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

/// Levels come from RUST_LOG; without it, info.
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

/// How long a thread for blocking calls waits for the next one. The one that has waited for longest takes it: with tokio's ten seconds hundreds of
/// sandboxes, each looked at every few seconds, would keep as many threads as were ever needed at once.
const IDLE_THREAD: Duration = Duration::from_millis(500);

fn serve(run: args::RunArgs) -> anyhow::Result<()> {
    // One TLS provider for the whole process, named before the first client is made.
    if rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .is_err()
    {
        anyhow::bail!("another TLS provider was installed before aws-lc-rs");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_keep_alive(IDLE_THREAD)
        .enable_all()
        .build()?;
    runtime.block_on(run::run(run))
}

//! `sandbox-runtime`: see the crate's own documentation.

use std::{process::ExitCode, sync::Arc};

use anyhow::Context as _;
use clap::Parser as _;
use tokio::signal::unix::{SignalKind, signal};
use torpor_daemon::serve;
use torpor_runtime::{
    execute,
    flags::Flags,
    orphans::Children,
    server::{Server, Settings, open_root},
    upload,
};

fn main() -> ExitCode {
    let flags = Flags::parse();
    torpor_daemon::log::start("text");
    match work(&flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "cannot go on");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn work(flags: &Flags) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let root = open_root(&flags.root).with_context(|| flags.root.display().to_string())?;
    let children = Arc::new(Children::default());
    children.adopt().context("no way to wait for orphans")?;
    let server = Server::new(root, children, settings(flags));
    let address = flags
        .legacy_bind_address
        .0
        .context("--legacy-bind-address is needed")?;
    let listener = serve::listen(address)
        .await
        .with_context(|| address.to_string())?;
    let bound = listener.local_addr()?;
    server.accept(listener);
    tracing::info!(%bound, "serving");
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("stopping");
    server.drain(flags.shutdown_timeout).await;
    Ok(())
}

fn settings(flags: &Flags) -> Settings {
    let variable = std::env::var("SANDBOX_EXEC_TIMEOUT_SECONDS").ok();
    let (time, wrong) = flags.exec_timeout(variable.as_deref());
    if let Some(wrong) = wrong {
        tracing::warn!(limit = ?time, "{wrong}; the default applies");
    }
    Settings {
        execute: execute::Limits {
            time,
            output: flags.max_output_bytes,
        },
        upload: upload::Limits {
            bytes: flags.max_upload_bytes,
            patience: flags.read_body_timeout,
        },
        read_header_timeout: flags.read_header_timeout,
        connections: flags.max_connections,
    }
}

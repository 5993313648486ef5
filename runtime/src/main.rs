//! `sandbox-runtime`: see the crate's own documentation.

use std::{ffi::OsString, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use clap::Parser as _;
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use torpor_daemon::serve;
use torpor_runtime::{
    execute,
    flags::{Action, Flags},
    install,
    orphans::Children,
    program::{self, Program, Signals},
    server::{Server, Settings, open_root},
    upload,
};

/// Sets what is told beside a user's program.
const LOG_VARIABLE: &str = "SANDBOX_RUNTIME_LOG";

fn main() -> ExitCode {
    let flags = Flags::parse();
    let done = match &flags.action {
        Some(Action::Install { directory }) => {
            torpor_daemon::log::start("text");
            install::install(directory)
                .map(|path| tracing::info!(path = %path.display(), "installed"))
                .map(|()| ExitCode::SUCCESS)
                .map_err(anyhow::Error::from)
        }
        Some(Action::Run { command }) if !command.is_empty() => {
            torpor_daemon::log::start_with("text", LOG_VARIABLE, "warn");
            work_around(&flags, command)
        }
        Some(Action::Run { .. }) | None => {
            torpor_daemon::log::start("text");
            work(&flags)
        }
    };
    done.unwrap_or_else(|error| {
        tracing::error!(error = format!("{error:#}"), "cannot go on");
        let of_the_program = error.downcast_ref::<program::Error>();
        of_the_program.map_or(ExitCode::FAILURE, |error| error.exit_code().into())
    })
}

/// Serves until it is told to stop.
#[tokio::main]
async fn work(flags: &Flags) -> anyhow::Result<ExitCode> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let server = serve(flags, &Arc::default()).await?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("stopping");
    server.drain(flags.shutdown_timeout).await;
    Ok(ExitCode::SUCCESS)
}

/// Serves until the user's program ends. While it is being terminated, calls under way have their time too.
#[tokio::main]
async fn work_around(flags: &Flags, command: &[OsString]) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::catch()?;
    let children = Arc::default();
    let server = serve(flags, &children).await?;
    let mut program = Program::start(command, &children)?;
    let mut stopping = None;
    let status = loop {
        tokio::select! {
            status = program.wait() => break status?,
            signal = signals.next() => {
                program.send(signal);
                if signal == Signal::TERM && stopping.is_none() {
                    let (server, limit) = (Arc::clone(&server), flags.shutdown_timeout);
                    stopping = Some(tokio::spawn(async move { server.drain(limit).await }));
                }
            }
        }
    };
    match stopping {
        Some(drained) => drained.await?,
        None => server.drain(Duration::ZERO).await,
    }
    Ok(program::exit_code(status).into())
}

async fn serve(flags: &Flags, children: &Arc<Children>) -> anyhow::Result<Arc<Server>> {
    let root = open_root(flags.root()).with_context(|| flags.root().display().to_string())?;
    children.adopt().context("no way to wait for orphans")?;
    let server = Server::new(root, Arc::clone(children), settings(flags));
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
    Ok(server)
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

//! `sandbox-runtime`: see the documentation of the library crate.

use std::{
    ffi::OsString,
    os::unix::ffi::OsStringExt as _,
    path::Path,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Context as _;
use clap::Parser as _;
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use torpor_daemon::{go_flags::BindAddress, serve};
use torpor_runtime::{
    busy::Mark,
    execute,
    flags::{Action, Flags},
    install,
    legacy::{self, Legacy},
    orphans::Children,
    program::{self, Program, Signals},
    root::Root,
    sandboxd::{
        grpc::{Grpc, Timeouts},
        metadata,
        process::{self, ProcessService},
        processes::Processes,
        rest::Rest,
        watch::WatchService,
    },
    server::{Http1, Serve, Server, open_root},
    token::{self, Gate},
    upload,
};

/// Time that commands have to end after SIGTERM, as in upstream's sandboxd.
const COMMANDS_GRACE: Duration = Duration::from_secs(2);
/// Environment variable of the log level for a runtime with a user's program.
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
            serve_with_program(&flags, command)
        }
        Some(Action::Run { .. }) | None => {
            torpor_daemon::log::start("text");
            serve_alone(&flags)
        }
    };
    done.unwrap_or_else(|error| {
        tracing::error!(
            error = format!("{error:#}"),
            "the runtime ends with an error"
        );
        let program_error = error.downcast_ref::<program::Error>();
        program_error.map_or(ExitCode::FAILURE, |error| error.exit_code().into())
    })
}

/// Serves until SIGTERM or SIGINT.
#[tokio::main]
async fn serve_alone(flags: &Flags) -> anyhow::Result<ExitCode> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let serving = Serving::begin(flags, &Arc::default()).await?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("stopping");
    serving.end(flags.shutdown_timeout).await;
    Ok(ExitCode::SUCCESS)
}

/// Serves until the user's program ends.
///
/// SIGTERM to the program also starts the shutdown of the server, so that calls under way have
/// time to end.
#[tokio::main]
async fn serve_with_program(flags: &Flags, command: &[OsString]) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::catch()?;
    let children = Arc::default();
    let serving = Arc::new(Serving::begin(flags, &children).await?);
    let mut program = Program::start(command, &children)?;
    let mut stopping = None;
    let status = loop {
        tokio::select! {
            status = program.wait() => break status?,
            signal = signals.next() => {
                program.send(signal);
                if signal == Signal::TERM && stopping.is_none() {
                    let (serving, limit) = (Arc::clone(&serving), flags.shutdown_timeout);
                    stopping = Some(tokio::spawn(async move { serving.end(limit).await }));
                }
            }
        }
    };
    match stopping {
        Some(ended) => ended.await?,
        None => serving.end(Duration::ZERO).await,
    }
    Ok(program::exit_code(status).into())
}

/// Servers of all APIs.
struct Serving {
    server: Server,
    stopping: Arc<AtomicBool>,
    processes: Arc<Processes>,
    busy: Arc<Mark>,
}

impl Serving {
    async fn begin(flags: &Flags, children: &Arc<Children>) -> anyhow::Result<Self> {
        children.adopt().context("cannot adopt orphans")?;
        let gate = gate(flags)?;
        let server = Server::new(flags.max_connections);
        let stopping = Arc::new(AtomicBool::new(false));
        let processes = Processes::new(flags.max_processes);
        let root = open(flags.root())?;
        let workspace = match flags.root_dir() {
            path if path == flags.root() => Arc::clone(&root),
            path => open(&path)?,
        };
        let legacy = legacy(flags, root, children);
        let legacy = Http1::new(legacy, Arc::clone(&gate), flags.read_header_timeout);
        listen(&server, "legacy", flags.legacy_bind_address, legacy).await?;
        let busy = Mark::new(flags.busy_dir.clone());
        let mark = Arc::clone(&busy);
        tokio::spawn(async move { mark.keep().await });
        let rest = rest(flags, &workspace, &stopping, &busy);
        let rest = Http1::new(rest, Arc::clone(&gate), flags.read_header_timeout);
        listen(&server, "rest", flags.rest_bind_address, rest).await?;
        let grpc = grpc(flags, workspace, Arc::clone(children), &processes, gate)?;
        listen(&server, "grpc", flags.grpc_bind_address, grpc).await?;
        Ok(Self {
            server,
            stopping,
            processes,
            busy,
        })
    }

    /// Shuts down in upstream's order: health checks fail, commands end and with them their calls,
    /// then connections end.
    async fn end(&self, limit: Duration) {
        self.stopping.store(true, Ordering::Relaxed);
        self.busy.clear();
        let begun = Instant::now();
        self.processes.end(COMMANDS_GRACE.min(limit)).await;
        self.server
            .drain(limit.saturating_sub(begun.elapsed()))
            .await;
    }
}

fn open(path: &Path) -> anyhow::Result<Arc<Root>> {
    open_root(path).with_context(|| path.display().to_string())
}

/// Serves an API on its address; nothing if the address is 0.
async fn listen(
    server: &Server,
    api: &str,
    address: BindAddress,
    service: Arc<impl Serve>,
) -> anyhow::Result<()> {
    let Some(address) = address.0 else {
        return Ok(());
    };
    let listener = serve::listen(address)
        .await
        .with_context(|| format!("--{api}-bind-address={address}"))?;
    let bound = listener.local_addr()?;
    server.accept(listener, service);
    tracing::info!(api, %bound, "serving");
    Ok(())
}

/// Returns the gate for the configured token. An unreadable token ends the runtime at its start.
fn gate(flags: &Flags) -> anyhow::Result<Arc<Gate>> {
    let variable = std::env::var_os(token::VARIABLE).map(OsString::into_vec);
    Gate::new(flags.auth_token_file.clone(), variable).context("--auth-token-file")
}

fn uploads(flags: &Flags) -> upload::Limits {
    upload::Limits {
        bytes: flags.max_upload_bytes,
        piece_timeout: flags.read_body_timeout,
    }
}

fn legacy(flags: &Flags, root: Arc<Root>, children: &Arc<Children>) -> Legacy {
    let variable = std::env::var("SANDBOX_EXEC_TIMEOUT_SECONDS").ok();
    let (time, invalid) = flags.exec_timeout(variable.as_deref());
    if let Some(invalid) = invalid {
        tracing::warn!(limit = ?time, "{invalid}; the default applies");
    }
    let output = flags.max_output_bytes;
    Legacy {
        root,
        children: Arc::clone(children),
        settings: legacy::Settings {
            execute: execute::Limits { time, output },
            upload: uploads(flags),
        },
    }
}

fn rest(flags: &Flags, root: &Arc<Root>, stopping: &Arc<AtomicBool>, busy: &Arc<Mark>) -> Rest {
    // Variables that are no UTF-8 are not served.
    let variables = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    Rest {
        root: Arc::clone(root),
        upload: uploads(flags),
        environment: metadata::visible(variables, &flags.metadata_env_prefix),
        started: Instant::now(),
        stopping: Arc::clone(stopping),
        busy: Arc::clone(busy),
    }
}

fn grpc(
    flags: &Flags,
    root: Arc<Root>,
    children: Arc<Children>,
    processes: &Arc<Processes>,
    gate: Arc<Gate>,
) -> anyhow::Result<Arc<Grpc>> {
    let watcher = WatchService::new(Arc::clone(&root), flags.max_watches);
    let process = ProcessService {
        root,
        children,
        processes: Arc::clone(processes),
        settings: process::Settings {
            output: flags.max_output_bytes,
            chunk: flags.stream_chunk_size,
        },
    };
    let timeouts = Timeouts {
        body: flags.read_body_timeout,
        keepalive: flags.grpc_keepalive,
        idle: flags.grpc_idle_timeout,
    };
    Grpc::new(process, watcher, gate, timeouts)
        .context("cannot build the reflection of the gRPC services")
}

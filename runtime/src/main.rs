//! `sandbox-runtime`: see the crate's own documentation.

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
        grpc::{Grpc, Patience},
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

/// How long commands have to end after SIGTERM, as with upstream's sandboxd.
const COMMANDS_GRACE: Duration = Duration::from_secs(2);
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
    let serving = Serving::begin(flags, &Arc::default()).await?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("stopping");
    serving.end(flags.shutdown_timeout).await;
    Ok(ExitCode::SUCCESS)
}

/// Serves until the user's program ends. While it is being terminated, calls under way have their time too.
#[tokio::main]
async fn work_around(flags: &Flags, command: &[OsString]) -> anyhow::Result<ExitCode> {
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

/// All APIs, while they are served.
struct Serving {
    server: Server,
    stopping: Arc<AtomicBool>,
    processes: Arc<Processes>,
    busy: Arc<Mark>,
}

impl Serving {
    async fn begin(flags: &Flags, children: &Arc<Children>) -> anyhow::Result<Self> {
        children.adopt().context("no way to wait for orphans")?;
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
        let keeper = Arc::clone(&busy);
        // Until the process ends.
        tokio::spawn(async move { keeper.keep().await });
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

    /// In upstream's order: who asks is told, commands end and with them their calls, then connections do.
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

/// Opens the port of an API, unless it is not to be served.
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

/// A token that is configured and cannot be read ends the runtime before anything is served.
fn gate(flags: &Flags) -> anyhow::Result<Arc<Gate>> {
    let variable = std::env::var_os(token::VARIABLE).map(OsString::into_vec);
    Gate::new(flags.auth_token_file.clone(), variable).context("--auth-token-file")
}

fn uploads(flags: &Flags) -> upload::Limits {
    upload::Limits {
        bytes: flags.max_upload_bytes,
        patience: flags.read_body_timeout,
    }
}

fn legacy(flags: &Flags, root: Arc<Root>, children: &Arc<Children>) -> Legacy {
    let variable = std::env::var("SANDBOX_EXEC_TIMEOUT_SECONDS").ok();
    let (time, wrong) = flags.exec_timeout(variable.as_deref());
    if let Some(wrong) = wrong {
        tracing::warn!(limit = ?time, "{wrong}; the default applies");
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
    // What is no text is nobody's configuration.
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
    let patience = Patience {
        body: flags.read_body_timeout,
        keepalive: flags.grpc_keepalive,
        idle: flags.grpc_idle_timeout,
    };
    Grpc::new(process, watcher, gate, patience).context("the description of the gRPC services")
}

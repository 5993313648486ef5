//! Runs `sandbox-router`; the library crate documents it.

use std::{process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use kube::{Client, Config, config::KubeConfigOptions, config::Kubeconfig};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use torpor_daemon::{serve, spans::Exporter};
use torpor_router::{
    address::AddressPolicy,
    authz::{Authorizer, SharedToken},
    calls::Calls,
    directory::Directory,
    endpoints, files,
    flags::{self, AuthzMode, Flags},
    gate::Gate,
    lanes,
    metrics::Metrics,
    proxy::Proxy,
    resume::Resumer,
    sandbox_limit::SandboxLimit,
    scoped_token::{
        LARGEST_SECRET, Secret, Tokens,
        keys::{Keys, LARGEST_FILE},
    },
    server::Server,
    spans, tls,
    token_review::{ReviewOptions, Reviewer},
    tunnel::Tunnels,
    upstream,
    wait_slots::WaitSlots,
    watch,
};

/// Time between checks of the certificate files.
const CERTIFICATE_CHECK: Duration = Duration::from_secs(10);
/// File descriptors of one connection: the client's and the sandbox's.
const FILES_PER_CONNECTION: u64 = 2;

fn main() -> ExitCode {
    // The dependencies include two TLS providers. Unless one is installed, the first connection
    // panics.
    if rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .is_err()
    {
        eprintln!("sandbox-router: a TLS provider is already installed");
        return ExitCode::FAILURE;
    }
    let (flags, ignored) = match flags::parse(std::env::args_os()) {
        Ok(parsed) => parsed,
        Err(error) => error.exit(),
    };
    match work(&flags, &ignored) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "fatal error");
            ExitCode::FAILURE
        }
    }
}

/// Runs watches, probes and accept loops on this thread; [`lanes`] serve clients on theirs.
#[tokio::main(flavor = "current_thread")]
async fn work(flags: &Flags, ignored: &[&str]) -> anyhow::Result<()> {
    let exporter = flags
        .enable_tracing
        .then(|| Exporter::start(spans::SERVICE))
        .transpose();
    // The log starts before an exporter error is returned, so that the log holds the error.
    let exported = exporter.as_ref().ok().and_then(Option::as_ref);
    torpor_daemon::log::start_with_spans(
        &flags.log_format,
        "info",
        format!("{}=off", spans::TARGET).parse()?,
        exported.map(|exporter| exporter.layer(spans::TARGET)),
    );
    if !ignored.is_empty() {
        tracing::info!(
            flags = ignored.join(" "),
            "ignored upstream flags that have no effect here"
        );
    }
    let exporter = exporter?;
    let ended = serve_all(flags).await;
    if let Some(exporter) = exporter {
        // `end` blocks on the exporter's own thread.
        tokio::task::spawn_blocking(move || exporter.end()).await?;
    }
    ended
}

async fn serve_all(flags: &Flags) -> anyhow::Result<()> {
    flags.check()?;
    let stopping = CancellationToken::new();
    stop_on_signal(stopping.clone())?;
    let client = client(&flags.kubeconfig)
        .await
        .context("cannot make a client for the apiserver")?;
    let directory = Directory::new(AddressPolicy::default());
    let namespace = Some(flags.cache_namespace.as_str()).filter(|namespace| !namespace.is_empty());
    let watching = tokio::spawn(watch::follow(client.clone(), namespace, &directory));
    let (tasks, cut) = (TaskTracker::new(), CancellationToken::new());
    let metrics = Arc::new(Metrics::default());
    let dialer = upstream::Dialer::new(directory.clone(), flags.dialling(), Arc::clone(&metrics));
    let proxy = Proxy {
        gate: Gate::new(
            directory.clone(),
            Resumer::new(client.clone(), flags.api_timeout),
            flags.limits(),
        ),
        authorizer: authorizer(flags, &client)?,
        calls: Calls::new(dialer.clone(), flags.open_ended()),
        tunnels: Tunnels::new(tasks.clone(), cut.clone(), Arc::clone(&metrics)),
        open_ended: WaitSlots::new(flags.open_ended()),
        sandbox_limit: SandboxLimit::new(flags.max_requests_per_sandbox),
        metrics,
        settings: flags.settings(),
    };
    let proxy = Arc::new(proxy);
    if let Some(address) = flags.health_probe_bind_address.0 {
        let probes = endpoints::probes(directory.clone(), stopping.clone());
        serve::serve(address, probes, cut.clone())
            .await
            .context("cannot serve probes")?;
    }
    if let Some(address) = flags.metrics_bind_address.0 {
        let metrics = endpoints::metrics(Arc::clone(&proxy));
        serve::serve(address, metrics, cut.clone())
            .await
            .context("cannot serve metrics")?;
    }
    // A connection that becomes a tunnel no longer counts towards --max-connections.
    raise_open_files(flags.max_connections.saturating_add(flags.max_open_ended));
    let server = Server::new(
        Arc::clone(&proxy),
        lanes::one_per_core(&dialer).context("cannot start the threads that serve clients")?,
        flags.connection_timeouts(),
        flags.max_connections,
        tasks,
        cut.clone(),
    );
    // The router serves no client before both watches have listed all objects: it would refuse
    // requests for sandboxes that exist.
    tokio::select! {
        () = directory.wait_ready() => {}
        () = stopping.cancelled() => return Ok(()),
    }
    if let Some(address) = flags.http_bind_address.0 {
        server.accept(
            serve::listen(address)
                .await
                .with_context(|| format!("{address}"))?,
            None,
        );
    }
    let mut reloading = None;
    if let (Some(address), Some(files)) = (flags.https_bind_address.0, flags.tls_files()) {
        let acceptor = tls::acceptor(files).context("TLS")?;
        server.accept(
            serve::listen(address)
                .await
                .with_context(|| format!("{address}"))?,
            Some(acceptor.clone()),
        );
        let metrics = Arc::clone(&proxy.metrics);
        reloading = Some(tokio::spawn(async move {
            acceptor.keep_fresh(&metrics, CERTIFICATE_CHECK).await;
        }));
    }
    tracing::info!("serving");
    stopping.cancelled().await;
    server.drain(flags.shutdown_timeout).await;
    cut.cancel();
    watching.abort();
    if let Some(task) = reloading {
        task.abort();
    }
    Ok(())
}

/// Raises the limit of open files to the hard limit.
///
/// Container runtimes start processes with a low soft limit; Go programs raise it by themselves.
fn raise_open_files(connections: usize) {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
    let files = limit.maximum.unwrap_or(u64::MAX);
    let needed = FILES_PER_CONNECTION.saturating_mul(connections as u64);
    if files < needed {
        tracing::warn!(
            files,
            needed,
            "the limit of open files is too low for --max-connections and --max-open-ended"
        );
    }
}

fn authorizer(flags: &Flags, client: &Client) -> anyhow::Result<Authorizer> {
    Ok(match flags.mode()? {
        AuthzMode::TokenReview => Authorizer::TokenReview(reviewer(flags, client)?),
        AuthzMode::SubjectAccessReview => Authorizer::SubjectAccessReview(reviewer(flags, client)?),
        AuthzMode::ScopedToken => Authorizer::ScopedToken(tokens(flags)?),
        AuthzMode::AllowAll if !flags.router_auth_token.is_empty() => {
            Authorizer::SharedToken(SharedToken::new(&flags.router_auth_token))
        }
        AuthzMode::AllowAll => {
            tracing::warn!(
                "--authz-mode=allow-all: every client of this port may reach every sandbox"
            );
            Authorizer::AllowAll
        }
    })
}

/// Reads the secret and the keys that verify scoped tokens.
///
/// As with upstream, a later change of the files takes effect after a restart.
fn tokens(flags: &Flags) -> anyhow::Result<Tokens> {
    let mut tokens = Tokens {
        secret_until: flags
            .authz_scoped_token_v1_accept_until
            .map(|until| until.0),
        ..Tokens::default()
    };
    if let Some(file) = &flags.authz_scoped_token_secret_file {
        tokens.secret = Some(Secret::new(&files::read(file, LARGEST_SECRET)?)?);
    }
    if let Some(file) = &flags.authz_scoped_token_verification_keys_file {
        let keys = Keys::read(&files::read(file, LARGEST_FILE)?);
        tokens.keys = Some(keys.with_context(|| file.display().to_string())?);
    }
    Ok(tokens)
}

fn reviewer(flags: &Flags, client: &Client) -> anyhow::Result<Reviewer> {
    let options = ReviewOptions {
        ttl: flags.authz_tokenreview_ttl,
        size: usize::try_from(flags.authz_tokenreview_cache_size)?,
        require_token: flags.authz_tokenreview_require_token,
        audiences: flags.authz_tokenreview_audiences.clone(),
        at_once: usize::try_from(flags.max_token_reviews)?,
        waiting: usize::try_from(flags.max_held_token_reviews)?,
    };
    Ok(Reviewer::new(client.clone(), options))
}

async fn client(kubeconfig: &str) -> anyhow::Result<Client> {
    if kubeconfig.is_empty() {
        return Ok(Client::try_default().await?);
    }
    let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

fn stop_on_signal(stopping: CancellationToken) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping");
        stopping.cancel();
    });
    Ok(())
}

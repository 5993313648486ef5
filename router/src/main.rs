//! `sandbox-router`: see the crate's own documentation.

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
    places::Places,
    proxy::Proxy,
    resume::Resumer,
    scoped_token::{
        LARGEST_SECRET, Secret, Tokens,
        keys::{Keys, LARGEST_FILE},
    },
    server::Server,
    shares::Shares,
    spans, tls,
    token_review::{ReviewOptions, Reviewer},
    tunnel::Tunnels,
    upstream, watch,
};

/// How often the files of the certificates are looked at.
const CERTIFICATE_CHECK: Duration = Duration::from_secs(10);
/// A client's and one to a sandbox.
const FILES_PER_CONNECTION: u64 = 2;

fn main() -> ExitCode {
    // First of all: with two TLS providers in the tree the first connection would panic.
    if rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .is_err()
    {
        eprintln!("sandbox-router: a TLS provider is installed already");
        return ExitCode::FAILURE;
    }
    let (flags, ignored) = match flags::parse(std::env::args_os()) {
        Ok(parsed) => parsed,
        Err(error) => error.exit(),
    };
    match work(&flags, &ignored) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "cannot go on");
            ExitCode::FAILURE
        }
    }
}

/// Watches, probes and the accepting of connections are on this thread; clients are served by [`lanes`].
#[tokio::main(flavor = "current_thread")]
async fn work(flags: &Flags, ignored: &[&str]) -> anyhow::Result<()> {
    let exporter = flags
        .enable_tracing
        .then(|| Exporter::start(spans::SERVICE))
        .transpose();
    // A process that cannot begin says why in its log, too.
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
            "these flags have no meaning here"
        );
    }
    let exporter = exporter?;
    let ended = serve_all(flags).await;
    if let Some(exporter) = exporter {
        // It waits for its own thread.
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
        .context("no way to an apiserver")?;
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
        open_ended: Places::new(flags.open_ended()),
        shares: Shares::new(flags.max_requests_per_sandbox),
        metrics,
        settings: flags.settings(),
    };
    let proxy = Arc::new(proxy);
    if let Some(address) = flags.health_probe_bind_address.0 {
        let probes = endpoints::probes(directory.clone(), stopping.clone());
        serve::serve(address, probes, cut.clone())
            .await
            .context("probes")?;
    }
    if let Some(address) = flags.metrics_bind_address.0 {
        let metrics = endpoints::metrics(Arc::clone(&proxy));
        serve::serve(address, metrics, cut.clone())
            .await
            .context("metrics")?;
    }
    // What has become a tunnel is counted as a connection no more.
    raise_open_files(flags.max_connections.saturating_add(flags.max_open_ended));
    let server = Server::new(
        Arc::clone(&proxy),
        lanes::one_per_core(&dialer).context("threads that serve clients")?,
        flags.patience(),
        flags.max_connections,
        tasks,
        cut.clone(),
    );
    // Nobody is told that a sandbox does not exist by a router that has not looked yet.
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

/// Raises the limit of open files to the highest that the process may have, as programs in Go do by themselves: container runtimes start with a low one.
fn raise_open_files(connections: usize) {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
    let files = limit.maximum.unwrap_or(u64::MAX);
    let needed = FILES_PER_CONNECTION.saturating_mul(connections as u64);
    if files < needed {
        tracing::warn!(
            files,
            needed,
            "fewer files may be open than --max-connections and --max-open-ended can need"
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
                "--authz-mode=allow-all: whoever reaches this port reaches every sandbox"
            );
            Authorizer::AllowAll
        }
    })
}

/// Reads what verifies scoped tokens; what is changed later counts after a restart, as with
/// upstream.
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

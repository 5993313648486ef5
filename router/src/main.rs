//! `sandbox-router`: see the crate's own documentation.

use std::{fs, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use kube::{Client, Config, config::KubeConfigOptions, config::Kubeconfig};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use torpor_daemon::serve;
use torpor_router::{
    address::AddressPolicy,
    authz::{Authorizer, SharedToken},
    directory::Directory,
    endpoints,
    flags::{self, AuthzMode, Flags},
    gate::Gate,
    metrics::Metrics,
    proxy::Proxy,
    resume::Resumer,
    scoped_token::Secret,
    server::Server,
    tls,
    token_review::{ReviewOptions, Reviewer},
    tunnel::Tunnels,
    upstream, watch,
};

/// How often the files of the certificate are looked at.
const CERTIFICATE_CHECK: Duration = Duration::from_secs(10);

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
    torpor_daemon::log::start(&flags.log_format);
    if !ignored.is_empty() {
        tracing::info!(
            flags = ignored.join(" "),
            "these flags have no meaning here"
        );
    }
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
    let proxy = Arc::new(proxy(flags, &client, &directory, (&tasks, &cut))?);
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
    let patience = flags.patience();
    let server = Server::new(
        Arc::clone(&proxy),
        patience,
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
        let (acceptor, certificate) = tls::acceptor(files).context("TLS")?;
        server.accept(
            serve::listen(address)
                .await
                .with_context(|| format!("{address}"))?,
            Some(acceptor),
        );
        let metrics = Arc::clone(&proxy.metrics);
        reloading = Some(tokio::spawn(async move {
            certificate.keep_fresh(&metrics, CERTIFICATE_CHECK).await;
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

fn proxy(
    flags: &Flags,
    client: &Client,
    directory: &Directory,
    (tasks, cut): (&TaskTracker, &CancellationToken),
) -> anyhow::Result<Proxy> {
    let metrics = Arc::new(Metrics::default());
    let resumer = Resumer::new(client.clone(), flags.api_timeout);
    let dialer = upstream::Dialer::new(directory.clone(), flags.dialling(), Arc::clone(&metrics));
    Ok(Proxy {
        gate: Gate::new(directory.clone(), resumer, flags.limits()),
        authorizer: authorizer(flags, client)?,
        pool: upstream::pool(dialer),
        tunnels: Tunnels::new(tasks.clone(), cut.clone(), Arc::clone(&metrics)),
        metrics,
        settings: flags.settings(),
    })
}

fn authorizer(flags: &Flags, client: &Client) -> anyhow::Result<Authorizer> {
    Ok(
        match (flags.authz_mode, &flags.authz_scoped_token_secret_file) {
            (AuthzMode::TokenReview, _) => {
                let options = ReviewOptions {
                    ttl: flags.authz_tokenreview_ttl,
                    size: usize::try_from(flags.authz_tokenreview_cache_size)?,
                    require_token: flags.authz_tokenreview_require_token,
                    audiences: flags.authz_tokenreview_audiences.clone(),
                };
                Authorizer::TokenReview(Reviewer::new(client.clone(), options))
            }
            (AuthzMode::ScopedToken, Some(file)) => {
                let content = fs::read(file).with_context(|| file.display().to_string())?;
                Authorizer::ScopedToken(Secret::new(&content)?)
            }
            (AuthzMode::ScopedToken, None) => return Err(flags::Error::NoSecret.into()),
            (AuthzMode::AllowAll, _) if !flags.router_auth_token.is_empty() => {
                Authorizer::SharedToken(SharedToken::new(&flags.router_auth_token))
            }
            (AuthzMode::AllowAll, _) => {
                tracing::warn!(
                    "--authz-mode=allow-all: whoever reaches this port reaches every sandbox"
                );
                Authorizer::AllowAll
            }
        },
    )
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

//! `torpor-controller`: see the crate's own documentation.

use std::{process::ExitCode, sync::Arc};

use anyhow::Context as _;
use kube::Client;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use torpor_controller::{
    calls::Apiserver,
    context::{Context, Failures},
    flags::{self, Flags},
    lease::{Candidate, Ended, Timing},
    metrics::Metrics,
    run, serve,
    watches::Caches,
};
use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt, util::SubscriberInitExt};

/// File in which a Pod finds its own namespace.
const OWN_NAMESPACE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

fn main() -> ExitCode {
    // First of all: with two TLS providers in the tree the first connection would panic.
    if rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .is_err()
    {
        eprintln!("torpor-controller: a TLS provider is installed already");
        return ExitCode::FAILURE;
    }
    let (flags, ignored) = match flags::parse(std::env::args_os()) {
        Ok(parsed) => parsed,
        Err(error) => error.exit(),
    };
    start_log(&flags.log_format);
    if !ignored.is_empty() {
        tracing::info!(
            flags = ignored.join(" "),
            "these flags have no meaning here"
        );
    }
    if flags.extensions {
        tracing::info!(
            "--extensions: SandboxClaim, SandboxTemplate and SandboxWarmPool are not reconciled yet"
        );
    }
    match work(&flags) {
        Ok(Ended::Stopped) => ExitCode::SUCCESS,
        Ok(Ended::Lost) => {
            tracing::error!("lost the lease");
            ExitCode::FAILURE
        }
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "cannot go on");
            ExitCode::FAILURE
        }
    }
}

fn start_log(format: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let registry = tracing_subscriber::registry().with(filter);
    if format == "json" {
        registry
            .with(fmt::layer().json().with_writer(std::io::stderr))
            .init();
    } else {
        registry
            .with(fmt::layer().with_ansi(false).with_writer(std::io::stderr))
            .init();
    }
}

#[tokio::main]
async fn work(flags: &Flags) -> anyhow::Result<Ended> {
    let Flags {
        cluster_domain,
        metrics_bind_address,
        health_probe_bind_address,
        leader_elect,
        leader_election_namespace,
        sandbox_concurrent_workers,
        api_timeout,
        extensions: _,
        log_format: _,
    } = flags.clone();
    let shutdown = CancellationToken::new();
    stop_on_signal(shutdown.clone())?;
    let client = Client::try_default()
        .await
        .context("no way to an apiserver")?;
    let context = Arc::new(Context {
        api: Apiserver::new(client.clone(), api_timeout),
        caches: Caches::default(),
        cluster_domain,
        metrics: Metrics::default(),
        failures: Failures::default(),
    });
    if let Some(address) = health_probe_bind_address.0 {
        serve::serve(address, serve::probes(), shutdown.clone())
            .await
            .context("probes")?;
    }
    if let Some(address) = metrics_bind_address.0 {
        let router = serve::metrics(Arc::clone(&context));
        serve::serve(address, router, shutdown.clone())
            .await
            .context("metrics")?;
    }
    if !leader_elect {
        context.metrics.set_leading(true);
        run::run(context, sandbox_concurrent_workers, shutdown).await;
        return Ok(Ended::Stopped);
    }
    let namespace = lease_namespace(&leader_election_namespace)?;
    let mut candidate = Candidate::new(client, &namespace, identity(), Timing::default());
    if candidate.acquire(&shutdown).await.is_none() {
        return Ok(Ended::Stopped);
    }
    tracing::info!("leading");
    context.metrics.set_leading(true);
    lead(candidate, context, sandbox_concurrent_workers, shutdown).await
}

/// Reconciles while the lease is held. It is given back only once the last pass has ended, so that no two processes work at once.
async fn lead(
    mut candidate: Candidate,
    context: Arc<Context>,
    workers: u16,
    shutdown: CancellationToken,
) -> anyhow::Result<Ended> {
    let released = CancellationToken::new();
    let work = async {
        run::run(context, workers, shutdown).await;
        released.cancel();
        // The lease's own future ends this one.
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = work => anyhow::bail!("the work ended by itself"),
        ended = candidate.keep(&released) => Ok(ended),
    }
}

fn stop_on_signal(shutdown: CancellationToken) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping");
        shutdown.cancel();
    });
    Ok(())
}

fn lease_namespace(flag: &str) -> anyhow::Result<String> {
    if !flag.is_empty() {
        return Ok(flag.to_owned());
    }
    let text = std::fs::read_to_string(OWN_NAMESPACE).with_context(|| {
        format!("{OWN_NAMESPACE}: outside a Pod, name --leader-election-namespace or turn --leader-elect off")
    })?;
    Ok(text.trim().to_owned())
}

/// Differs from every other process: machine, process and time.
fn identity() -> String {
    let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "torpor-controller".to_owned());
    let now = jiff::Timestamp::now().as_nanosecond();
    format!("{host}_{}-{now:x}", std::process::id())
}

//! `torpor-controller`: see the crate's own documentation.

use std::{path::Path, process::ExitCode, sync::Arc};

use anyhow::Context as _;
use kube::{Client, Config};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use torpor_controller::{
    calls::Apiserver,
    context::Context,
    flags::{self, Flags},
    lease::{Candidate, Ended, Timing},
    run, serve,
};

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
    torpor_daemon::log::start(&flags.log_format);
    if !ignored.is_empty() {
        tracing::info!(
            flags = ignored.join(" "),
            "these flags have no meaning here"
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

#[tokio::main]
async fn work(flags: &Flags) -> anyhow::Result<Ended> {
    let settings = flags.settings(label_domains(&flags.allowed_label_domains_file)?.as_deref());
    let Flags {
        cluster_domain,
        metrics_bind_address,
        health_probe_bind_address,
        leader_elect,
        leader_election_namespace,
        api_timeout,
        ..
    } = flags.clone();
    let shutdown = CancellationToken::new();
    stop_on_signal(shutdown.clone())?;
    let client = client().await?;
    let api = Apiserver::new(client.clone(), api_timeout);
    let context = Arc::new(Context::new(api, cluster_domain, settings));
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
        run::run(context, shutdown).await;
        return Ok(Ended::Stopped);
    }
    let namespace = lease_namespace(&leader_election_namespace)?;
    let mut candidate = Candidate::new(client, &namespace, identity(), Timing::default());
    if candidate.acquire(&shutdown).await.is_none() {
        return Ok(Ended::Stopped);
    }
    tracing::info!("leading");
    context.metrics.set_leading(true);
    lead(candidate, context, shutdown).await
}

/// A client that sends nothing twice by itself: an object without a fixed name would be made twice, and who asks too much has to know it.
async fn client() -> anyhow::Result<Client> {
    let mut config = Config::infer().await.context("no way to an apiserver")?;
    config.default_retry = false;
    Client::try_from(config).context("no client for the apiserver")
}

/// Text of the allow-list of label domains, read once, as upstream. The file need not be there.
fn label_domains(path: &Path) -> anyhow::Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// Reconciles while the lease is held. It is given back only once the last pass has ended, so that no two processes work at once.
async fn lead(
    mut candidate: Candidate,
    context: Arc<Context>,
    shutdown: CancellationToken,
) -> anyhow::Result<Ended> {
    let released = CancellationToken::new();
    let work = async {
        run::run(context, shutdown).await;
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

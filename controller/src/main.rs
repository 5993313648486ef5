//! Binary `torpor-controller`; the crate's documentation describes it.

use std::{path::Path, process::ExitCode, sync::Arc};

use anyhow::Context as _;
use kube::{
    Client, Config,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig},
};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use torpor_controller::{
    calls::Apiserver,
    context::Context,
    flags::{
        self, Flags, Ignored, Parsed,
        config::{self, Configured},
    },
    lease::{Candidate, Ended, Timing},
    run, serve, trace,
    transport::{Rate, Requests, TransportLayer},
};
use torpor_daemon::spans::Exporter;

/// File with the Pod's own namespace.
const OWN_NAMESPACE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

fn main() -> ExitCode {
    // Before anything else: with two TLS providers linked, the first connection would panic.
    if rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .is_err()
    {
        eprintln!("torpor-controller: a TLS provider is installed already");
        return ExitCode::FAILURE;
    }
    let configured = match config::read(Path::new(config::DIRECTORY)) {
        Ok(configured) => configured,
        Err(error) => {
            eprintln!("torpor-controller: {:#}", anyhow::Error::from(error));
            return ExitCode::FAILURE;
        }
    };
    let parsed = match flags::parse(std::env::args_os(), &configured.flags) {
        Ok(parsed) => parsed,
        Err(flags::Error::CommandLine(error)) => error.exit(),
        Err(error) => {
            eprintln!("torpor-controller: {error}");
            return ExitCode::FAILURE;
        }
    };
    match work(&parsed, &configured) {
        Ok(Ended::Stopped) => ExitCode::SUCCESS,
        Ok(Ended::Lost) => {
            tracing::error!("lost the lease");
            ExitCode::FAILURE
        }
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "exiting after an error");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn work(parsed: &Parsed, configured: &Configured) -> anyhow::Result<Ended> {
    let flags = &parsed.flags;
    let exporter = flags
        .enable_tracing
        .then(|| Exporter::start(trace::SERVICE))
        .transpose();
    // A process that fails to start logs the reason, too.
    let spans = exporter.as_ref().ok().and_then(Option::as_ref);
    torpor_daemon::log::start_with_spans(
        flags.log_format(),
        &flags.zap_log_level,
        format!("{}=off", trace::TARGET).parse()?,
        spans.map(|exporter| exporter.layer(trace::TARGET)),
    );
    for Ignored {
        name,
        why,
        unguarded,
    } in &parsed.ignored
    {
        if *unguarded {
            tracing::warn!(flag = name, why, "flag ignored: its protection is missing");
        } else {
            tracing::info!(flag = name, why, "flag ignored");
        }
    }
    for key in &parsed.configured {
        let value = configured.flags.get(key);
        tracing::info!(key, value, "set by the ConfigMap agent-sandbox-config");
    }
    for key in &configured.unknown {
        tracing::warn!(key, "the ConfigMap agent-sandbox-config has an unknown key");
    }
    let exporter = exporter?;
    let ended = serve_and_lead(flags).await;
    if let Some(exporter) = exporter {
        // `end` blocks on its own thread.
        tokio::task::spawn_blocking(move || exporter.end()).await?;
    }
    ended
}

async fn serve_and_lead(flags: &Flags) -> anyhow::Result<Ended> {
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
    let config = client_config(flags.kubeconfig.as_deref()).await?;
    let requests = Requests::default();
    let rate = Rate::of(flags.kube_api_qps, flags.kube_api_burst);
    let api = Apiserver::new(client(config.clone(), rate, &requests)?, api_timeout);
    let context = Arc::new(Context::new(api, cluster_domain, settings));
    context.metrics.show_requests(&requests);
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
    // The lease's own client is not held back by the rate limit of the other calls.
    let client = client(config, None, &requests)?;
    let mut candidate = Candidate::new(client, &namespace, identity(), Timing::default());
    if candidate.acquire(&shutdown).await.is_none() {
        return Ok(Ended::Stopped);
    }
    tracing::info!("leading");
    context.metrics.set_leading(true);
    lead(candidate, context, shutdown).await
}

/// Returns the configuration of the apiserver's client: from the given file, else as kubectl finds
/// it, else from the Pod's service account.
async fn client_config(kubeconfig: Option<&Path>) -> anyhow::Result<Config> {
    let mut config = match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).context("--kubeconfig")?;
            let options = KubeConfigOptions::default();
            Config::from_custom_kubeconfig(file, &options)
                .await
                .with_context(|| format!("--kubeconfig={}", path.display()))?
        }
        None => Config::infer()
            .await
            .context("no configuration for a connection to the apiserver")?,
    };
    config.default_retry = false;
    Ok(config)
}

/// Returns a client that does not repeat a request by itself: an object without a fixed name would
/// be created twice, and [`Apiserver`] has to see a 429.
fn client(config: Config, rate: Option<Rate>, requests: &Requests) -> anyhow::Result<Client> {
    let authority = config.cluster_url.authority();
    let host = authority.map_or_else(String::new, ToString::to_string);
    let transport = TransportLayer::new(rate, requests.clone(), &host);
    let builder = ClientBuilder::try_from(config).context("no client for the apiserver")?;
    Ok(builder.with_layer(&transport).build())
}

/// Returns the text of the allow-list of label domains, read once, as upstream. The file need not
/// exist.
fn label_domains(path: &Path) -> anyhow::Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// Reconciles while the lease is held. The lease is released only after the last pass has ended, so
/// that no two processes work at once.
async fn lead(
    mut candidate: Candidate,
    context: Arc<Context>,
    shutdown: CancellationToken,
) -> anyhow::Result<Ended> {
    let released = CancellationToken::new();
    let work = async {
        run::run(context, shutdown).await;
        released.cancel();
        // The future of the lease ends this one.
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = work => anyhow::bail!("reconciling ended before the lease was released"),
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

/// Returns an identity unique to this process: host, process id and time.
fn identity() -> String {
    let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "torpor-controller".to_owned());
    let now = jiff::Timestamp::now().as_nanosecond();
    format!("{host}_{}-{now:x}", std::process::id())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn the_allow_list_of_label_domains_is_optional_but_has_to_be_readable() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("allowed-label-domains");
        let domains = || {
            let text = label_domains(&file)?;
            let flags = Flags::parse_from(["torpor-controller"]);
            anyhow::Ok(flags.settings(text.as_deref()).claims.label_domains)
        };
        assert_eq!(domains().unwrap(), ["sandbox.users.io"], "upstream's");
        std::fs::write(&file, "example.com # ours\n").unwrap();
        assert_eq!(domains().unwrap(), ["example.com"]);
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir(&file).unwrap();
        let error = domains().unwrap_err().to_string();
        assert!(error.contains("allowed-label-domains"), "{error}");
    }
}

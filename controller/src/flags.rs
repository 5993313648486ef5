//! Command line: every flag of upstream's controller, in the forms that Go programs accept
//! (`--flag=value`, `--flag value`, `-flag=value`, a bare boolean).
//!
//! Flags of upstream's without an effect here are accepted and named once in the log; unknown flags
//! are an error.

use std::{collections::BTreeMap, ffi::OsString, path::PathBuf, time::Duration};

pub use torpor_daemon::go_flags::{BindAddress, duration};
use torpor_daemon::go_flags::{GoBoolean, boolean, with_two_dashes};

use clap::{
    Arg, ArgAction, ArgMatches, CommandFactory, FromArgMatches, Parser, parser::ValueSource,
};

use crate::{
    network::Cidr,
    scope::Namespaces,
    settings::{self, ClaimSettings, NetworkSettings, PoolSettings, RepositorySettings, Settings},
};

pub mod config;

/// Flags that have an effect.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "agent-sandbox-controller",
    version = concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("TORPOR_GIT_COMMIT"), ")"),
    about = "Reconciles Sandboxes and their memory."
)]
pub struct Flags {
    /// Domain of the cluster, for status.serviceFQDN.
    #[arg(long, default_value = "cluster.local")]
    pub cluster_domain: String,
    /// Address on which metrics are served; 0 serves none.
    #[arg(long, default_value = ":8080")]
    pub metrics_bind_address: BindAddress,
    /// Address on which /healthz and /readyz are served; 0 serves none.
    #[arg(long, default_value = ":8081")]
    pub health_probe_bind_address: BindAddress,
    /// Run only while holding the lease, so that one of several replicas works.
    #[arg(long, default_value = "true", go_boolean())]
    pub leader_elect: bool,
    /// Namespace of the lease; the Pod's own when empty.
    #[arg(long, default_value = "")]
    pub leader_election_namespace: String,
    /// Reconcile SandboxClaims, SandboxTemplates and SandboxWarmPools too.
    #[arg(long, default_value = "false", go_boolean())]
    pub extensions: bool,
    /// Number of Sandboxes that are reconciled at once.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..))]
    pub sandbox_concurrent_workers: u16,
    /// Number of SandboxClaims that are reconciled at once. A larger number delays claims, because
    /// the apiserver serves all of them at the same time.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    pub sandbox_claim_concurrent_workers: u16,
    /// Number of SandboxWarmPools that are reconciled at once.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub sandbox_warm_pool_concurrent_workers: u16,
    /// Number of SandboxTemplates that are reconciled at once.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub sandbox_template_concurrent_workers: u16,
    /// Most members of a pool that are created or deleted in one pass.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u16).range(1..))]
    pub sandbox_warm_pool_max_batch_size: u16,
    /// Delay before a pool replaces members that were claimed; each further claim restarts the
    /// delay.
    #[arg(long, default_value = "0", value_parser = duration)]
    pub sandbox_warm_pool_replenish_delay: Duration,
    /// Most members per second that a pool creates; 0 is no limit.
    #[arg(long, default_value_t = 0.0, value_parser = rate)]
    pub sandbox_warm_pool_max_refill_rate: f64,
    /// Time that a member of a pool may take to become ready before it is replaced.
    #[arg(long, default_value = "5m", value_parser = duration)]
    pub sandbox_warm_pool_readiness_grace_period: Duration,
    /// Time after its creation that a claim waits for a member of its pool without an address,
    /// before the claim starts cold.
    #[arg(long, default_value = "2s", value_parser = duration)]
    pub sandbox_claim_warm_candidate_grace_period: Duration,
    /// Interval at which a member that no node has room for is checked again.
    #[arg(long, default_value = "1m", value_parser = duration)]
    pub sandbox_warm_pool_unschedulable_recheck_interval: Duration,
    /// Let the cluster autoscaler evict unclaimed members of pools.
    #[arg(long, default_value = "true", go_boolean())]
    pub enable_warm_pool_eviction: bool,
    /// Publish no Events about Sandboxes.
    #[arg(long, default_value = "false", go_boolean())]
    pub disable_sandbox_events: bool,
    /// Publish no Events about SandboxClaims.
    #[arg(long, default_value = "false", go_boolean())]
    pub disable_claim_events: bool,
    /// Do not write the time of first sight and the trace to SandboxClaims.
    #[arg(long, default_value = "false", go_boolean())]
    pub disable_claim_observability_annotations: bool,
    /// Namespaces, separated by commas, to which the controller is confined; all when empty. Named
    /// as in upstream's #1476.
    #[arg(long, default_value = "")]
    pub watch_namespaces: Namespaces,
    /// Watch only Services with the label of a Sandbox; Pods and PersistentVolumeClaims are always
    /// watched by that label.
    #[arg(long, default_value = "false", go_boolean())]
    pub cache_label_selectors: bool,
    /// Calls to the apiserver per second in the long run; no limit unless positive.
    #[arg(long, default_value_t = -1.0, allow_hyphen_values = true)]
    pub kube_api_qps: f64,
    /// Calls to the apiserver that may follow at once after a pause, where --kube-api-qps limits
    /// them.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub kube_api_burst: u32,
    /// Export spans by OTLP over gRPC to the endpoint in the variable OTEL_EXPORTER_OTLP_ENDPOINT.
    #[arg(long, default_value = "false", go_boolean())]
    pub enable_tracing: bool,
    /// Kubeconfig file; by default the one in KUBECONFIG, or the Pod's service account.
    #[arg(long)]
    pub kubeconfig: Option<PathBuf>,
    /// Log level: debug, info, error, or a number as in zap. RUST_LOG takes precedence.
    #[arg(long, default_value = "info", value_parser = log_level)]
    pub zap_log_level: String,
    /// Log format: json, or console, which is text.
    #[arg(long, value_parser = ["json", "console"])]
    pub zap_encoder: Option<String>,
    /// File with the domains whose labels a claim may set on its Pod; need not exist. Upstream's
    /// path.
    #[arg(long, default_value = "/etc/sandbox-config/allowed-label-domains")]
    pub allowed_label_domains_file: PathBuf,
    /// Image of the sandbox runtime for Sandboxes with the annotation torpor.dev/inject-runtime;
    /// none when empty. Torpor's.
    #[arg(long, default_value = "")]
    pub runtime_image: String,
    /// Give Sandboxes without a SandboxTemplate the strict NetworkPolicy that templates have,
    /// unless their annotation torpor.dev/network-policy is none. Torpor's.
    #[arg(long, default_value = "false", go_boolean())]
    pub default_network_policy: bool,
    /// Address ranges (198.51.100.0/24,2001:db8::/32) that the strict NetworkPolicies block in
    /// addition to the private ones; may be repeated. Torpor's.
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    pub network_policy_except: Vec<Cidr>,
    /// Directory with the credentials of repositories, one file for each: the Secret
    /// torpor-repository. Torpor's.
    #[arg(long, default_value = "/etc/torpor/repository")]
    pub repository_credentials: PathBuf,
    /// File with the encryption keys of repositories, for archives and for the rotation of keys:
    /// the Secret torpor-repository-keys. Torpor's.
    #[arg(long, default_value = "/etc/torpor/repository-keys/keys")]
    pub repository_keys: PathBuf,
    /// Unix socket of a KMS plug-in (version 2 of Kubernetes' KMS API) that opens sealed encryption
    /// keys. Torpor's.
    #[arg(long, value_name = "SOCKET")]
    pub repository_kms: Option<PathBuf>,
    /// Interval at which images that no SandboxSnapshot names are removed from repositories; 0
    /// removes none. Torpor's.
    #[arg(long, default_value = "10m", value_parser = duration)]
    pub repository_sweep_interval: Duration,
    /// Log format: text or json. Torpor's.
    #[arg(long, default_value = "text", value_parser = ["text", "json"])]
    pub log_format: String,
    /// Time limit of one call to the apiserver. Torpor's.
    #[arg(long, default_value = "30s", value_parser = duration)]
    pub api_timeout: Duration,
}

impl Flags {
    /// Returns the log format, from Torpor's flag or upstream's.
    pub fn log_format(&self) -> &str {
        match self.zap_encoder.as_deref() {
            Some("json") => "json",
            Some(_) => "text",
            None => &self.log_format,
        }
    }

    /// Returns the settings of the reconcilers. `domains` is the text of the allow-list of label
    /// domains.
    pub fn settings(&self, domains: Option<&str>) -> Settings {
        let defaults = ClaimSettings::default();
        Settings {
            extensions: self.extensions,
            sandbox_events: !self.disable_sandbox_events,
            namespaces: self.watch_namespaces.clone(),
            cache_label_selectors: self.cache_label_selectors,
            sandbox_workers: self.sandbox_concurrent_workers,
            claim_workers: self.sandbox_claim_concurrent_workers,
            pool_workers: self.sandbox_warm_pool_concurrent_workers,
            template_workers: self.sandbox_template_concurrent_workers,
            runtime_image: Some(self.runtime_image.as_str())
                .filter(|image| !image.is_empty())
                .map(Into::into),
            pools: PoolSettings {
                max_batch: self.sandbox_warm_pool_max_batch_size.into(),
                replenish_delay: self.sandbox_warm_pool_replenish_delay,
                max_refill_rate: self.sandbox_warm_pool_max_refill_rate,
                readiness_grace: self.sandbox_warm_pool_readiness_grace_period,
                unschedulable_recheck: self.sandbox_warm_pool_unschedulable_recheck_interval,
                eviction: self.enable_warm_pool_eviction,
                ..PoolSettings::default()
            },
            claims: ClaimSettings {
                events: !self.disable_claim_events,
                observability: !self.disable_claim_observability_annotations,
                candidate_grace: self.sandbox_claim_warm_candidate_grace_period,
                label_domains: domains
                    .and_then(settings::label_domains)
                    .unwrap_or(defaults.label_domains),
            },
            network: NetworkSettings {
                default_policy: self.default_network_policy,
                except: self.network_policy_except.clone(),
            },
            repositories: RepositorySettings {
                credentials: self.repository_credentials.clone(),
                keys: self.repository_keys.clone(),
                kms: self.repository_kms.clone(),
                sweep_interval: Some(self.repository_sweep_interval)
                    .filter(|interval| !interval.is_zero()),
            },
        }
    }
}

/// Flag of upstream's that has no effect here, and the reason.
///
/// `bare`: the flag may stand without a value. `guards`: the flag stands for a protection that is
/// missing here.
struct IgnoredFlag {
    name: &'static str,
    bare: bool,
    guards: bool,
    why: &'static str,
}

const PPROF: &str = "it concerns Go's runtime";
const CONNECTIONS: &str = "each running call has its own connection";
const WEBHOOK: &str = "there is no webhook";
const LOG: &str = "the log has its own format";
const TLS: &str = "metrics are served without TLS: keep the port within the cluster";
const PLAIN: &str = "metrics are served in plain text to every client that reaches their port: restrict access to the scraper with the component deploy/networkpolicy (Helm: networkPolicy.enabled), or serve none with --metrics-bind-address=0";

/// Upstream's other flags. They accept any value.
const IGNORED_FLAGS: [IgnoredFlag; 23] = [
    ignored_flag("enable-pprof", true, PPROF),
    ignored_flag("enable-pprof-debug", true, PPROF),
    ignored_flag("pprof-block-profile-rate", false, PPROF),
    ignored_flag("pprof-mutex-profile-fraction", false, PPROF),
    ignored_flag("api-connections", false, CONNECTIONS),
    ignored_flag("separate-watch-connection", true, CONNECTIONS),
    ignored_flag(
        "sandbox-write-behind-window",
        false,
        "no request waits for the writes that it would delay",
    ),
    IgnoredFlag {
        name: "metrics-secure-serving",
        bare: true,
        guards: true,
        why: PLAIN,
    },
    ignored_flag("metrics-cert-dir", false, TLS),
    ignored_flag("tls-min-version", false, TLS),
    ignored_flag("tls-cipher-suites", false, TLS),
    ignored_flag("webhook-port", false, WEBHOOK),
    ignored_flag("webhook-cert-dir", false, WEBHOOK),
    ignored_flag("webhook-cert-name", false, WEBHOOK),
    ignored_flag("webhook-key-name", false, WEBHOOK),
    ignored_flag("webhook-service-name", false, WEBHOOK),
    ignored_flag("webhook-namespace", false, WEBHOOK),
    ignored_flag("manage-webhook-certs", true, WEBHOOK),
    ignored_flag("enable-webhook", true, WEBHOOK),
    ignored_flag("zap-devel", true, LOG),
    ignored_flag("zap-stacktrace-level", false, LOG),
    ignored_flag("zap-time-encoding", false, LOG),
    ignored_flag("alsologtostderr", true, LOG),
];

const fn ignored_flag(name: &'static str, bare: bool, why: &'static str) -> IgnoredFlag {
    IgnoredFlag {
        name,
        bare,
        guards: false,
        why,
    }
}

/// Flag that was given and has no effect here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ignored {
    pub name: &'static str,
    pub why: &'static str,
    /// The flag asks for a protection that is missing here.
    pub unguarded: bool,
}

/// Failure to read the flags.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line is invalid, or asks for output such as `--help`.
    #[error("the command line: {0}")]
    CommandLine(clap::Error),
    #[error("ConfigMap agent-sandbox-config, key {key}: {source}")]
    Configured {
        key: &'static str,
        source: clap::Error,
    },
}

/// Result of reading the flags.
#[derive(Debug)]
pub struct Parsed {
    pub flags: Flags,
    pub ignored: Vec<Ignored>,
    /// Keys of the ConfigMap that set a flag.
    pub configured: Vec<&'static str>,
}

/// Reads the command line, and from the ConfigMap the flags that the command line leaves out.
pub fn parse(
    arguments: impl IntoIterator<Item = OsString>,
    configured: &BTreeMap<&'static str, String>,
) -> Result<Parsed, Error> {
    let mut arguments: Vec<OsString> = arguments.into_iter().map(with_two_dashes).collect();
    let given_there = command()
        .try_get_matches_from(&arguments)
        .map_err(Error::CommandLine)?;
    let mut effective = Vec::new();
    for (key, value) in configured {
        if is_given(key, &given_there) {
            continue;
        }
        let argument = OsString::from(format!("--{key}={value}"));
        // Parsed alone first, so that an error names the key.
        command()
            .try_get_matches_from([OsString::from("controller"), argument.clone()])
            .map_err(|source| Error::Configured { key, source })?;
        arguments.push(argument);
        effective.push(*key);
    }
    let matches = command()
        .try_get_matches_from(arguments)
        .map_err(Error::CommandLine)?;
    let flags = Flags::from_arg_matches(&matches).map_err(Error::CommandLine)?;
    let ignored = given(&matches);
    // A flag without an effect is not reported as set by the ConfigMap.
    effective.retain(|key| ignored.iter().all(|flag| flag.name != *key));
    Ok(Parsed {
        flags,
        ignored,
        configured: effective,
    })
}

/// Reports whether the command line sets a flag.
fn is_given(flag: &str, matches: &ArgMatches) -> bool {
    let command = command();
    let mut known = command.get_arguments();
    known
        .find(|argument| argument.get_long() == Some(flag))
        .map(|argument| argument.get_id().as_str())
        .is_some_and(|id| matches.value_source(id) == Some(ValueSource::CommandLine))
}

/// Returns the command with all of upstream's flags, those without an effect included.
fn command() -> clap::Command {
    Flags::command().args(IGNORED_FLAGS.iter().map(|flag| {
        let argument = Arg::new(flag.name)
            .long(flag.name)
            .hide(true)
            .action(ArgAction::Set);
        if flag.bare {
            argument.may_be_bare()
        } else {
            argument.allow_hyphen_values(true)
        }
    }))
}

fn given(matches: &ArgMatches) -> Vec<Ignored> {
    IGNORED_FLAGS
        .iter()
        .filter(|flag| matches.value_source(flag.name) == Some(ValueSource::CommandLine))
        .map(|flag| Ignored {
            name: flag.name,
            why: flag.why,
            unguarded: flag.guards && !switched_off(matches, flag.name),
        })
        .collect()
}

fn switched_off(matches: &ArgMatches, name: &str) -> bool {
    let value = matches.get_one::<String>(name);
    value.is_some_and(|value| boolean(value) == Ok(false))
}

/// Converts zap's level to the log's. Greater numbers log more.
fn log_level(text: &str) -> Result<String, String> {
    let level = match text {
        "debug" | "info" | "warn" | "error" => text,
        "panic" | "fatal" => "error",
        _ => match text.parse::<u8>() {
            Ok(0) => "info",
            Ok(1) => "debug",
            Ok(_) => "trace",
            Err(_) => {
                return Err(format!(
                    "{text:?} is not a level: debug, info, error or a number"
                ));
            }
        },
    };
    Ok(level.to_owned())
}

/// Parses a rate: a number that is not negative.
fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate >= 0.0 && rate.is_finite() => Ok(rate),
        _ => Err(format!("{text:?} is not a rate per second")),
    }
}

#[cfg(test)]
mod tests;

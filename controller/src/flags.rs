//! Command line: every flag of upstream's controller, in the ways that Go programs take flags (`--flag=value`, `--flag value`, `-flag=value`, a bare boolean). Flags that
//! mean nothing here are taken and named once in the log; unknown ones are an error.

use std::{collections::BTreeMap, ffi::OsString, path::PathBuf, time::Duration};

pub use torpor_daemon::go_flags::{BindAddress, duration};
use torpor_daemon::go_flags::{GoBoolean, boolean, with_two_dashes};

use clap::{
    Arg, ArgAction, ArgMatches, CommandFactory, FromArgMatches, Parser, parser::ValueSource,
};

use crate::{
    network::Cidr,
    scope::Namespaces,
    settings::{self, ClaimSettings, NetworkSettings, PoolSettings, Settings},
};

pub mod config;

/// Flags that mean something here.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "agent-sandbox-controller",
    version,
    about = "Reconciles Sandboxes and their memory."
)]
pub struct Flags {
    /// Domain of the cluster, for status.serviceFQDN.
    #[arg(long, default_value = "cluster.local")]
    pub cluster_domain: String,
    /// Where metrics are served; 0 serves none.
    #[arg(long, default_value = ":8080")]
    pub metrics_bind_address: BindAddress,
    /// Where /healthz and /readyz are served; 0 serves none.
    #[arg(long, default_value = ":8081")]
    pub health_probe_bind_address: BindAddress,
    /// Run only while holding the lease, so that of several replicas one works.
    #[arg(long, default_value = "true", go_boolean())]
    pub leader_elect: bool,
    /// Namespace of the lease; the Pod's own when empty.
    #[arg(long, default_value = "")]
    pub leader_election_namespace: String,
    /// Reconcile SandboxClaims, SandboxTemplates and SandboxWarmPools too.
    #[arg(long, default_value = "false", go_boolean())]
    pub extensions: bool,
    /// How many Sandboxes are reconciled at once.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..))]
    pub sandbox_concurrent_workers: u16,
    /// How many SandboxClaims are reconciled at once: more finish later, because the apiserver serves all that are under way at the same time.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    pub sandbox_claim_concurrent_workers: u16,
    /// How many SandboxWarmPools are reconciled at once.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub sandbox_warm_pool_concurrent_workers: u16,
    /// How many SandboxTemplates are reconciled at once.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub sandbox_template_concurrent_workers: u16,
    /// Most members of a pool that are made or deleted in one pass.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u16).range(1..))]
    pub sandbox_warm_pool_max_batch_size: u16,
    /// How long a pool waits before it replaces members that were claimed; each further claim begins the wait anew.
    #[arg(long, default_value = "0", value_parser = duration)]
    pub sandbox_warm_pool_replenish_delay: Duration,
    /// Members per second that a pool makes at most; 0 does not limit.
    #[arg(long, default_value_t = 0.0, value_parser = rate)]
    pub sandbox_warm_pool_max_refill_rate: f64,
    /// How long a member of a pool may take to become ready before it is replaced.
    #[arg(long, default_value = "5m", value_parser = duration)]
    pub sandbox_warm_pool_readiness_grace_period: Duration,
    /// How long after its creation a claim waits for a member of its pool that has no address yet,
    /// before it starts cold.
    #[arg(long, default_value = "2s", value_parser = duration)]
    pub sandbox_claim_warm_candidate_grace_period: Duration,
    /// How often a member that no node has room for is looked at again.
    #[arg(long, default_value = "1m", value_parser = duration)]
    pub sandbox_warm_pool_unschedulable_recheck_interval: Duration,
    /// Let the cluster autoscaler take unclaimed members of pools away.
    #[arg(long, default_value = "true", go_boolean())]
    pub enable_warm_pool_eviction: bool,
    /// Publish no Events about Sandboxes.
    #[arg(long, default_value = "false", go_boolean())]
    pub disable_sandbox_events: bool,
    /// Publish no Events about SandboxClaims.
    #[arg(long, default_value = "false", go_boolean())]
    pub disable_claim_events: bool,
    /// Do not write on a SandboxClaim when it was first seen, nor its trace.
    #[arg(long, default_value = "false", go_boolean())]
    pub disable_claim_observability_annotations: bool,
    /// Namespaces, separated by commas, that the controller is confined to; all when empty. Name of
    /// upstream's #1476.
    #[arg(long, default_value = "")]
    pub watch_namespaces: Namespaces,
    /// Watch only Services that carry the label of a Sandbox, as Pods and PersistentVolumeClaims are watched in any case.
    #[arg(long, default_value = "false", go_boolean())]
    pub cache_label_selectors: bool,
    /// Calls to the apiserver per second in the long run; what is not positive is no limit.
    #[arg(long, default_value_t = -1.0, allow_hyphen_values = true)]
    pub kube_api_qps: f64,
    /// Calls to the apiserver that may follow one another at once, where --kube-api-qps limits them.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub kube_api_burst: u32,
    /// Export spans by OTLP over gRPC, to where the variable OTEL_EXPORTER_OTLP_ENDPOINT says.
    #[arg(long, default_value = "false", go_boolean())]
    pub enable_tracing: bool,
    /// Kubeconfig file; without one KUBECONFIG, or the Pod's own account.
    #[arg(long)]
    pub kubeconfig: Option<PathBuf>,
    /// What is logged: debug, info, error, or a number as zap takes it. RUST_LOG goes before it.
    #[arg(long, default_value = "info", value_parser = log_level)]
    pub zap_log_level: String,
    /// Format of the log: json, or console, which is text.
    #[arg(long, value_parser = ["json", "console"])]
    pub zap_encoder: Option<String>,
    /// File with the domains whose labels a claim may put on its Pod; need not exist. Upstream's place.
    #[arg(long, default_value = "/etc/sandbox-config/allowed-label-domains")]
    pub allowed_label_domains_file: PathBuf,
    /// Image of the sandbox runtime, for Sandboxes with the annotation torpor.dev/inject-runtime; none when empty. Torpor's.
    #[arg(long, default_value = "")]
    pub runtime_image: String,
    /// Give Sandboxes without a SandboxTemplate the strict NetworkPolicy that templates have, unless their annotation torpor.dev/network-policy says none. Torpor's.
    #[arg(long, default_value = "false", go_boolean())]
    pub default_network_policy: bool,
    /// Ranges of addresses (198.51.100.0/24,2001:db8::/32) that the strict NetworkPolicies block beside the private ones; may be given again. Torpor's.
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    pub network_policy_except: Vec<Cidr>,
    /// Format of the log: text or json. Torpor's.
    #[arg(long, default_value = "text", value_parser = ["text", "json"])]
    pub log_format: String,
    /// How long one call to the apiserver may take. Torpor's.
    #[arg(long, default_value = "30s", value_parser = duration)]
    pub api_timeout: Duration,
}

impl Flags {
    /// Format of the log: Torpor's flag, or upstream's.
    pub fn log_format(&self) -> &str {
        match self.zap_encoder.as_deref() {
            Some("json") => "json",
            Some(_) => "text",
            None => &self.log_format,
        }
    }

    /// What the flags say about how kinds are reconciled. `domains` is the text of the allow-list of label domains.
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
        }
    }
}

/// A flag of upstream's that is taken and changes nothing, and why. `bare`: it may stand without a value. `guards`: who sets it counts on being guarded by it.
struct WithoutMeaning {
    name: &'static str,
    bare: bool,
    guards: bool,
    why: &'static str,
}

const PPROF: &str = "it is about Go's runtime";
const CONNECTIONS: &str = "each call that is under way has a connection of its own";
const WEBHOOK: &str = "there is no webhook";
const LOG: &str = "the log has its own form";
const TLS: &str = "metrics are served without TLS: keep the port within the cluster";
const PLAIN: &str = "metrics are served in plain text, to whoever reaches their port: let only those in who scrape, by the component deploy/networkpolicy (Helm: networkPolicy.enabled), or serve none with --metrics-bind-address=0";

/// Upstream's other flags. They take any value.
const WITHOUT_MEANING: [WithoutMeaning; 23] = [
    without("enable-pprof", true, PPROF),
    without("enable-pprof-debug", true, PPROF),
    without("pprof-block-profile-rate", false, PPROF),
    without("pprof-mutex-profile-fraction", false, PPROF),
    without("api-connections", false, CONNECTIONS),
    without("separate-watch-connection", true, CONNECTIONS),
    without(
        "sandbox-write-behind-window",
        false,
        "nobody waits for the writes that it would put off",
    ),
    WithoutMeaning {
        name: "metrics-secure-serving",
        bare: true,
        guards: true,
        why: PLAIN,
    },
    without("metrics-cert-dir", false, TLS),
    without("tls-min-version", false, TLS),
    without("tls-cipher-suites", false, TLS),
    without("webhook-port", false, WEBHOOK),
    without("webhook-cert-dir", false, WEBHOOK),
    without("webhook-cert-name", false, WEBHOOK),
    without("webhook-key-name", false, WEBHOOK),
    without("webhook-service-name", false, WEBHOOK),
    without("webhook-namespace", false, WEBHOOK),
    without("manage-webhook-certs", true, WEBHOOK),
    without("enable-webhook", true, WEBHOOK),
    without("zap-devel", true, LOG),
    without("zap-stacktrace-level", false, LOG),
    without("zap-time-encoding", false, LOG),
    without("alsologtostderr", true, LOG),
];

const fn without(name: &'static str, bare: bool, why: &'static str) -> WithoutMeaning {
    WithoutMeaning {
        name,
        bare,
        guards: false,
        why,
    }
}

/// A flag that was given and means nothing here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ignored {
    pub name: &'static str,
    pub why: &'static str,
    /// Somebody counts on being guarded by it, and is not.
    pub unguarded: bool,
}

/// The flags cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line is wrong, or asks for words such as `--help`.
    #[error("the command line: {0}")]
    CommandLine(clap::Error),
    #[error("ConfigMap agent-sandbox-config, key {key}: {source}")]
    Configured {
        key: &'static str,
        source: clap::Error,
    },
}

/// The flags that were read.
#[derive(Debug)]
pub struct Parsed {
    pub flags: Flags,
    pub ignored: Vec<Ignored>,
    /// Keys of the ConfigMap that set a flag.
    pub configured: Vec<&'static str>,
}

/// Reads the command line, and from the ConfigMap what that leaves out.
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
        // By itself first, so that an error is that of the key.
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
    // A flag without a meaning has no effect, wherever it is set.
    effective.retain(|key| ignored.iter().all(|flag| flag.name != *key));
    Ok(Parsed {
        flags,
        ignored,
        configured: effective,
    })
}

/// Whether the command line sets a flag.
fn is_given(flag: &str, matches: &ArgMatches) -> bool {
    let command = command();
    let mut known = command.get_arguments();
    known
        .find(|argument| argument.get_long() == Some(flag))
        .map(|argument| argument.get_id().as_str())
        .is_some_and(|id| matches.value_source(id) == Some(ValueSource::CommandLine))
}

/// Upstream's flags, those without a meaning among them.
fn command() -> clap::Command {
    Flags::command().args(WITHOUT_MEANING.iter().map(|flag| {
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
    WITHOUT_MEANING
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

/// Zap's levels in the words of our log. Its numbers are the more talkative the greater they are.
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
                    "{text:?} is no level: debug, info, error or a number"
                ));
            }
        },
    };
    Ok(level.to_owned())
}

/// A rate: a number that is not negative.
fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate >= 0.0 && rate.is_finite() => Ok(rate),
        _ => Err(format!("{text:?} is not a rate per second")),
    }
}

#[cfg(test)]
mod tests;

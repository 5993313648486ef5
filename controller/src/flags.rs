//! Command line: every flag of upstream's controller, in the ways that Go programs take flags (`--flag=value`, `--flag value`, `-flag=value`, a bare boolean). Flags that
//! mean nothing here are taken and named once in the log; unknown ones are an error.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use torpor_daemon::go_flags::with_two_dashes;
pub use torpor_daemon::go_flags::{BindAddress, duration};

use clap::{
    Arg, ArgAction, ArgMatches, CommandFactory, FromArgMatches, Parser, parser::ValueSource,
};

use crate::settings::{self, ClaimSettings, PoolSettings, Settings};

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
    #[arg(long, default_value = "true", num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub leader_elect: bool,
    /// Namespace of the lease; the Pod's own when empty.
    #[arg(long, default_value = "")]
    pub leader_election_namespace: String,
    /// Reconcile SandboxClaims, SandboxTemplates and SandboxWarmPools too.
    #[arg(long, default_value = "false", num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub extensions: bool,
    /// How many Sandboxes are reconciled at once.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..))]
    pub sandbox_concurrent_workers: u16,
    /// How many SandboxClaims are reconciled at once.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..))]
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
    /// How often a member that no node has room for is looked at again.
    #[arg(long, default_value = "1m", value_parser = duration)]
    pub sandbox_warm_pool_unschedulable_recheck_interval: Duration,
    /// Let the cluster autoscaler take unclaimed members of pools away.
    #[arg(long, default_value = "true", num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub enable_warm_pool_eviction: bool,
    /// Publish no Events about SandboxClaims.
    #[arg(long, default_value = "false", num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub disable_claim_events: bool,
    /// Do not write on a SandboxClaim when it was first seen and first ready.
    #[arg(long, default_value = "false", num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set)]
    pub disable_claim_observability_annotations: bool,
    /// File with the domains whose labels a claim may put on its Pod; need not exist. Upstream's place.
    #[arg(long, default_value = "/etc/sandbox-config/allowed-label-domains")]
    pub allowed_label_domains_file: PathBuf,
    /// Image of the sandbox runtime, for Sandboxes with the annotation torpor.dev/inject-runtime; none when empty. Torpor's.
    #[arg(long, default_value = "")]
    pub runtime_image: String,
    /// Format of the log: text or json. Torpor's.
    #[arg(long, default_value = "text", value_parser = ["text", "json"])]
    pub log_format: String,
    /// How long one call to the apiserver may take. Torpor's.
    #[arg(long, default_value = "30s", value_parser = duration)]
    pub api_timeout: Duration,
}

impl Flags {
    /// What the flags say about how kinds are reconciled. `domains` is the text of the allow-list of label domains.
    pub fn settings(&self, domains: Option<&str>) -> Settings {
        let defaults = ClaimSettings::default();
        Settings {
            extensions: self.extensions,
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
                status_interval: PoolSettings::default().status_interval,
            },
            claims: ClaimSettings {
                events: !self.disable_claim_events,
                observability: !self.disable_claim_observability_annotations,
                label_domains: domains
                    .and_then(settings::label_domains)
                    .unwrap_or(defaults.label_domains),
            },
        }
    }
}

/// Upstream's other flags. They take any value, `bool` says whether they may stand bare.
const WITHOUT_MEANING: [(&str, bool); 31] = [
    ("enable-tracing", true),
    ("enable-pprof", true),
    ("enable-pprof-debug", true),
    ("pprof-block-profile-rate", false),
    ("pprof-mutex-profile-fraction", false),
    ("kube-api-qps", false),
    ("kube-api-burst", false),
    ("api-connections", false),
    ("separate-watch-connection", true),
    ("cache-label-selectors", true),
    ("disable-sandbox-events", true),
    ("sandbox-write-behind-window", false),
    ("metrics-secure-serving", true),
    ("metrics-cert-dir", false),
    ("tls-min-version", false),
    ("tls-cipher-suites", false),
    ("kubeconfig", false),
    ("webhook-port", false),
    ("webhook-cert-dir", false),
    ("webhook-cert-name", false),
    ("webhook-key-name", false),
    ("webhook-service-name", false),
    ("webhook-namespace", false),
    ("manage-webhook-certs", true),
    ("enable-webhook", true),
    ("zap-devel", true),
    ("zap-encoder", false),
    ("zap-log-level", false),
    ("zap-stacktrace-level", false),
    ("zap-time-encoding", false),
    ("alsologtostderr", true),
];

/// Reads the command line. Returns the flags, and the names of those that were given and mean nothing here.
pub fn parse(
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<(Flags, Vec<&'static str>), clap::Error> {
    let command = Flags::command().args(WITHOUT_MEANING.map(|(name, bare)| {
        let argument = Arg::new(name).long(name).hide(true).action(ArgAction::Set);
        if bare {
            argument
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("true")
        } else {
            argument.allow_hyphen_values(true)
        }
    }));
    let matches = command.try_get_matches_from(arguments.into_iter().map(with_two_dashes))?;
    let ignored = given(&matches);
    Ok((Flags::from_arg_matches(&matches)?, ignored))
}

fn given(matches: &ArgMatches) -> Vec<&'static str> {
    let names = WITHOUT_MEANING.iter().map(|(name, _)| *name);
    names
        .filter(|name| matches.value_source(name) == Some(ValueSource::CommandLine))
        .collect()
}

/// A rate: a number that is not negative.
fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate >= 0.0 && rate.is_finite() => Ok(rate),
        _ => Err(format!("{text:?} is not a rate per second")),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn read(arguments: &[&str]) -> Result<(Flags, Vec<&'static str>), clap::Error> {
        parse(["controller"].iter().chain(arguments).map(OsString::from))
    }

    #[test]
    fn defaults_are_upstreams() {
        let (flags, ignored) = read(&[]).unwrap();
        assert_eq!(flags.cluster_domain, "cluster.local");
        assert_eq!(flags.metrics_bind_address, ":8080".parse().unwrap());
        assert_eq!(flags.health_probe_bind_address, ":8081".parse().unwrap());
        assert!(flags.leader_elect && !flags.extensions);
        assert_eq!(flags.sandbox_concurrent_workers, 100);
        assert!(ignored.is_empty());
        let settings = flags.settings(None);
        assert_eq!(settings.pools, crate::settings::PoolSettings::default());
        assert_eq!(settings.claims, crate::settings::ClaimSettings::default());
        let Settings {
            claim_workers,
            pool_workers,
            template_workers,
            ..
        } = settings;
        assert_eq!((claim_workers, pool_workers, template_workers), (50, 1, 1));
    }

    #[rstest]
    #[case(&[], None)]
    #[case(&["--runtime-image="], None)]
    #[case(&["--runtime-image=registry.example/runtime:1"], Some("registry.example/runtime:1"))]
    fn the_runtime_has_an_image_if_one_is_given(
        #[case] arguments: &[&str],
        #[case] image: Option<&str>,
    ) {
        let settings = read(arguments).unwrap().0.settings(None);
        assert_eq!(settings.runtime_image.as_deref(), image);
    }

    #[test]
    fn flags_of_pools_and_claims_have_their_effect() {
        let (flags, _) = read(&[
            "--sandbox-warm-pool-max-batch-size=7",
            "--sandbox-warm-pool-replenish-delay=20s",
            "--sandbox-warm-pool-max-refill-rate=2.5",
            "--enable-warm-pool-eviction=false",
            "--disable-claim-events",
            "--disable-claim-observability-annotations",
        ])
        .unwrap();
        let settings = flags.settings(Some("example.com"));
        assert_eq!(settings.pools.max_batch, 7);
        assert_eq!(settings.pools.replenish_delay.as_secs(), 20);
        assert!((settings.pools.max_refill_rate - 2.5).abs() < f64::EPSILON);
        assert!(!settings.pools.eviction);
        assert!(!settings.claims.events && !settings.claims.observability);
        assert_eq!(settings.claims.label_domains, ["example.com"]);
        read(&["--sandbox-warm-pool-max-refill-rate=-1"]).unwrap_err();
        read(&["--sandbox-warm-pool-max-batch-size=0"]).unwrap_err();
    }

    #[rstest]
    #[case(&["--leader-elect=false"], false)]
    #[case(&["-leader-elect=false"], false)]
    #[case(&["--leader-elect"], true)]
    #[case(&["--leader-elect=true"], true)]
    fn booleans_are_taken_as_go_takes_them(#[case] arguments: &[&str], #[case] leader: bool) {
        assert_eq!(read(arguments).unwrap().0.leader_elect, leader);
    }

    #[test]
    fn the_flags_that_upstreams_tests_patch_in_are_taken() {
        let (flags, ignored) = read(&[
            "--extensions",
            "--sandbox-concurrent-workers=10",
            "--sandbox-claim-concurrent-workers=100",
            "--sandbox-warm-pool-concurrent-workers=10",
            "--kube-api-qps=-1.000000",
            "--kube-api-burst=10",
        ])
        .unwrap();
        assert!(flags.extensions);
        assert_eq!(flags.sandbox_concurrent_workers, 10);
        assert_eq!(flags.sandbox_claim_concurrent_workers, 100);
        assert_eq!(flags.sandbox_warm_pool_concurrent_workers, 10);
        assert_eq!(ignored, ["kube-api-qps", "kube-api-burst"]);
    }

    #[rstest]
    #[case(&["--kube-api-qps", "-1"])]
    #[case(&["-kube-api-qps=-1"])]
    #[case(&["-cluster-domain", "example.org", "--enable-pprof"])]
    #[case(&["--zap-log-level=debug", "--sandbox-warm-pool-readiness-grace-period=5m"])]
    fn values_may_follow_in_any_way(#[case] arguments: &[&str]) {
        read(arguments).unwrap();
    }

    #[test]
    fn every_flag_without_meaning_is_taken_with_a_value_and_named() {
        for (name, bare) in WITHOUT_MEANING {
            let (_, ignored) = read(&[&format!("--{name}=1")]).unwrap();
            assert_eq!(ignored, [name]);
            assert_eq!(read(&[&format!("--{name}")]).is_ok(), bare, "{name} bare");
        }
    }

    #[test]
    fn an_unknown_flag_is_an_error() {
        read(&["--no-such-flag"]).unwrap_err();
        read(&["--leader-elect=perhaps"]).unwrap_err();
    }
}

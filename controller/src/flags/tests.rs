use rstest::rstest;

use super::*;

fn read(arguments: &[&str]) -> Result<(Flags, Vec<Ignored>), Error> {
    let Parsed { flags, ignored, .. } = read_with(arguments, &[])?;
    Ok((flags, ignored))
}

/// As [`read`], with values of the ConfigMap.
fn read_with(arguments: &[&str], configured: &[(&'static str, &str)]) -> Result<Parsed, Error> {
    let configured = configured
        .iter()
        .map(|(key, value)| (*key, (*value).to_owned()));
    let arguments = ["controller"].iter().chain(arguments).map(OsString::from);
    parse(arguments, &configured.collect())
}

const GRACE: &str = "sandbox-warm-pool-readiness-grace-period";

#[rstest]
#[case::only_in_the_config_map(&[], 600, &["kube-api-qps", GRACE])]
#[case::the_command_line_takes_precedence(
    &["--sandbox-warm-pool-readiness-grace-period=7m"], 420, &["kube-api-qps"]
)]
fn the_config_map_sets_what_the_command_line_leaves_out(
    #[case] arguments: &[&str],
    #[case] seconds: u64,
    #[case] effective: &[&str],
) {
    let configured = [
        (GRACE, "10m"),
        ("kube-api-qps", "-1"),
        ("api-connections", "4"),
    ];
    let parsed = read_with(arguments, &configured).unwrap();
    let settings = parsed.flags.settings(None);
    assert_eq!(settings.pools.readiness_grace.as_secs(), seconds);
    assert_eq!(parsed.ignored[0].name, "api-connections");
    assert_eq!(parsed.configured, effective);
}

#[test]
fn a_wrong_value_in_the_config_map_names_its_key() {
    let error = read_with(&[], &[(GRACE, "soon")]).unwrap_err().to_string();
    assert!(
        error.contains(&format!("agent-sandbox-config, key {GRACE}")),
        "{error}"
    );
}

#[test]
fn every_key_of_the_config_map_is_a_flag() {
    for key in config::FLAGS {
        assert!(
            command()
                .get_arguments()
                .any(|known| known.get_long() == Some(key)),
            "{key}"
        );
    }
}

#[test]
fn defaults_are_upstreams_but_for_the_claims_workers() {
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
    assert_eq!((claim_workers, pool_workers, template_workers), (8, 1, 1));
}

#[test]
fn flags_of_pools_and_claims_have_their_effect() {
    let (flags, _) = read(&[
        "--sandbox-warm-pool-max-batch-size=7",
        "--sandbox-warm-pool-replenish-delay=20s",
        "--sandbox-warm-pool-max-refill-rate=2.5",
        "--enable-warm-pool-eviction=false",
        "--disable-claim-events",
        "--disable-sandbox-events",
        "--cache-label-selectors",
        "--disable-claim-observability-annotations",
    ])
    .unwrap();
    let settings = flags.settings(Some("example.com"));
    assert_eq!(settings.pools.max_batch, 7);
    assert_eq!(settings.pools.replenish_delay.as_secs(), 20);
    assert!((settings.pools.max_refill_rate - 2.5).abs() < f64::EPSILON);
    assert!(!settings.pools.eviction);
    assert!(!settings.sandbox_events && settings.cache_label_selectors);
    assert!(!settings.claims.events && !settings.claims.observability);
    assert_eq!(settings.claims.label_domains, ["example.com"]);
    read(&["--sandbox-warm-pool-max-refill-rate=-1"]).unwrap_err();
    read(&["--sandbox-warm-pool-max-batch-size=0"]).unwrap_err();
}

#[test]
fn the_controller_is_confined_to_the_namespaces_that_are_named() {
    let namespaces = |arguments: &[&str]| read(arguments).unwrap().0.settings(None).namespaces;
    assert!(namespaces(&[]).is_cluster());
    assert!(namespaces(&["--watch-namespaces="]).is_cluster());
    let two = namespaces(&["--watch-namespaces=b, a"]);
    assert_eq!(two, "a,b".parse().unwrap());
    read(&["--watch-namespaces=a/b"]).unwrap_err();
}

#[test]
fn flags_of_network_policies_have_their_effect() {
    let (flags, _) = read(&[]).unwrap();
    assert_eq!(flags.settings(None).network, NetworkSettings::default());
    let (flags, _) = read(&[
        "--default-network-policy",
        "--network-policy-except=198.51.100.0/24,2001:db8::/32",
        "--network-policy-except=203.0.113.0/24",
    ])
    .unwrap();
    let NetworkSettings {
        default_policy,
        except,
    } = flags.settings(None).network;
    let except: Vec<String> = except.iter().map(ToString::to_string).collect();
    let given = ["198.51.100.0/24", "2001:db8::/32", "203.0.113.0/24"];
    assert_eq!(
        (default_policy, except),
        (true, given.map(str::to_owned).to_vec())
    );
    let error = read(&["--network-policy-except=198.51.100.7/24"]).unwrap_err();
    let error = error.to_string();
    for words in ["--network-policy-except", "the range is 198.51.100.0/24"] {
        assert!(error.contains(words), "{error}");
    }
}

#[rstest]
#[case(&["--leader-elect=false"], false)]
#[case(&["-leader-elect=false"], false)]
#[case(&["--leader-elect"], true)]
#[case(&["--leader-elect=true"], true)]
#[case(&["--leader-elect=1"], true)]
#[case(&["--leader-elect=T"], true)]
#[case(&["-leader-elect=True"], true)]
#[case(&["--leader-elect=0"], false)]
#[case(&["--leader-elect=f"], false)]
#[case(&["--leader-elect=FALSE"], false)]
fn booleans_are_read_as_in_go(#[case] arguments: &[&str], #[case] leader: bool) {
    assert_eq!(read(arguments).unwrap().0.leader_elect, leader);
}

#[test]
fn flags_that_upstreams_tests_patch_in_are_accepted() {
    let (flags, ignored) = read(&[
        "--extensions",
        "--sandbox-concurrent-workers=10",
        "--sandbox-claim-concurrent-workers=100",
        "--sandbox-warm-pool-concurrent-workers=10",
        "--kube-api-qps=-1.000000",
        "--kube-api-burst=10",
        "--enable-pprof-debug",
    ])
    .unwrap();
    assert!(flags.extensions);
    assert_eq!(flags.sandbox_concurrent_workers, 10);
    assert_eq!(flags.sandbox_claim_concurrent_workers, 100);
    assert_eq!(flags.sandbox_warm_pool_concurrent_workers, 10);
    assert!(flags.kube_api_qps < 0.0 && flags.kube_api_burst == 10);
    assert_eq!(ignored.len(), 1);
    assert_eq!(ignored[0].name, "enable-pprof-debug");
}

#[rstest]
#[case(&["--kube-api-qps", "-1"])]
#[case(&["-kube-api-qps=-1"])]
#[case(&["-cluster-domain", "example.org", "--enable-pprof"])]
#[case(&["--zap-log-level=debug", "--sandbox-warm-pool-readiness-grace-period=5m"])]
fn every_form_of_a_value_is_accepted(#[case] arguments: &[&str]) {
    read(arguments).unwrap();
}

#[test]
fn every_ignored_flag_is_accepted_with_a_value_and_reported() {
    for IgnoredFlag {
        name,
        bare,
        guards,
        why,
    } in IGNORED_FLAGS
    {
        let (_, ignored) = read(&[&format!("--{name}=1")]).unwrap();
        let unguarded = guards;
        let named = Ignored {
            name,
            why,
            unguarded,
        };
        assert_eq!(ignored, [named]);
        assert_eq!(read(&[&format!("--{name}")]).is_ok(), bare, "{name} bare");
    }
}

#[rstest]
#[case("--metrics-secure-serving", true)]
#[case("--metrics-secure-serving=true", true)]
#[case("--metrics-secure-serving=false", false)]
#[case("--metrics-cert-dir=/certs", false)]
fn a_flag_for_protected_metrics_causes_a_warning(#[case] flag: &str, #[case] warned: bool) {
    let (_, ignored) = read(&[flag]).unwrap();
    assert_eq!(ignored.len(), 1);
    assert_eq!(ignored[0].unguarded, warned);
}

#[test]
fn the_rate_of_calls_is_read_as_client_go_reads_it() {
    let (flags, _) = read(&["--kube-api-qps=2.5", "--kube-api-burst", "7"]).unwrap();
    assert!((flags.kube_api_qps - 2.5).abs() < f64::EPSILON);
    assert_eq!(flags.kube_api_burst, 7);
    read(&["--kube-api-burst=0"]).unwrap_err();
    read(&["--kube-api-qps=fast"]).unwrap_err();
}

#[rstest]
#[case(&[], "text", "info")]
#[case(&["--zap-log-level=debug", "--zap-encoder=json"], "json", "debug")]
#[case(&["--zap-log-level=5", "--zap-encoder=console", "--log-format=json"], "text", "trace")]
#[case(&["--log-format=json", "--zap-log-level=0"], "json", "info")]
fn upstreams_flags_set_the_format_and_level_of_the_log(
    #[case] arguments: &[&str],
    #[case] format: &str,
    #[case] level: &str,
) {
    let (flags, _) = read(arguments).unwrap();
    assert_eq!((flags.log_format(), &*flags.zap_log_level), (format, level));
    read(&["--zap-log-level=loud"]).unwrap_err();
}

#[test]
fn an_unknown_flag_is_an_error() {
    read(&["--no-such-flag"]).unwrap_err();
    read(&["--leader-elect=perhaps"]).unwrap_err();
}

#[rstest]
#[case(&[], None)]
#[case(&["--runtime-image="], None)]
#[case(&["--runtime-image=registry.example/runtime:1"], Some("registry.example/runtime:1"))]
fn the_runtime_image_is_set_by_its_flag(#[case] arguments: &[&str], #[case] image: Option<&str>) {
    let settings = read(arguments).unwrap().0.settings(None);
    assert_eq!(settings.runtime_image.as_deref(), image);
}

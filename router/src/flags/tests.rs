use rstest::rstest;

use super::*;

fn read(arguments: &[&str]) -> Result<(Flags, Vec<&'static str>), clap::Error> {
    parse(["router"].iter().chain(arguments).map(OsString::from))
}

#[test]
fn defaults_are_upstreams_except_the_response_timeout_and_the_mode() {
    let (flags, ignored) = read(&[]).unwrap();
    assert_eq!(flags.http_bind_address, ":8080".parse().unwrap());
    assert_eq!(flags.https_bind_address.0, None);
    assert_eq!(flags.metrics_bind_address, ":9090".parse().unwrap());
    assert_eq!(flags.health_probe_bind_address, ":8081".parse().unwrap());
    assert_eq!(flags.proxy_timeout, Duration::from_secs(180));
    // Upstream's 30 s would end every longer command of the SDK.
    assert_eq!(flags.response_header_timeout, Duration::from_secs(180));
    assert_eq!(flags.limits().dial, Duration::from_millis(1400));
    assert_eq!(flags.mtls_mode, MutualTls::Off);
    assert!(flags.access_log && flags.max_request_body_bytes == 0);
    assert!(ignored.is_empty());
    assert_eq!(flags.check(), Err(Error::NoMode));
}

#[test]
fn without_a_mode_the_router_does_not_start_and_names_the_modes() {
    let words = read(&[]).unwrap().0.check().unwrap_err().to_string();
    for mode in AuthzMode::value_variants() {
        let name = mode.to_possible_value().unwrap();
        assert!(words.contains(name.get_name()), "{words}");
    }
    // The Python router has no such flag.
    let (flags, _) = read(&["--router-auth-token=t"]).unwrap();
    assert_eq!(flags.mode(), Ok(AuthzMode::AllowAll));
    flags.check().unwrap();
}

#[test]
fn upstreams_manifest_starts_the_router_with_one_more_flag() {
    let (flags, ignored) = read(&[
        "--authz-mode=allow-all",
        "--http-bind-address=:8080",
        "--metrics-bind-address=:9090",
        "--health-probe-bind-address=:8081",
        "--cluster-domain=cluster.local",
        "--proxy-timeout=180s",
        "--upstream-max-retries=3",
        "--cache-enabled=true",
    ])
    .unwrap();
    flags.check().unwrap();
    assert_eq!(ignored, ["cluster-domain", "cache-enabled"]);
}

#[rstest]
#[case(&["--http-bind-address="], Error::NoListener)]
#[case(&["--https-bind-address=:8443"], Error::NoCertificate)]
#[case(&["--mtls-mode=required"], Error::MutualWithoutTls)]
#[case(&["--https-bind-address=:8443", "--tls-cert-file=c", "--tls-key-file=k", "--mtls-mode=optional"], Error::NoClientCa)]
#[case(&["--authz-mode=scoped-token"], Error::NoSecret)]
#[case(&["--authz-mode=allow-all", "--authz-scoped-token-verification-keys-file=k"], Error::KeysWithoutMode)]
#[case(&["--authz-mode=scoped-token", "--authz-scoped-token-verification-keys-file=k", "--authz-scoped-token-secret-file=s"], Error::NoEndOfVersion1)]
#[case(&["--authz-mode=scoped-token", "--authz-scoped-token-verification-keys-file=k", "--authz-scoped-token-v1-accept-until=2026-12-01T00:00:00Z"], Error::EndWithoutSecret)]
#[case(&["--authz-mode=tokenreview", "--router-auth-token=t"], Error::TwoModes)]
#[case(&["--authz-mode=allow-all", "--domain=*.example.com"], Error::Domain("*.example.com".into()))]
#[case(&["--authz-mode=allow-all", "--authz-cookie-query-param=t"], Error::NoCookie)]
#[case(&["--authz-mode=allow-all", "--authz-cookie-allowed-origins=https://a"], Error::NoCookie)]
#[case(&["--authz-cookie-name=__Host-s", "--authz-mode=tokenreview"], Error::CookieWithoutHosts)]
#[case(&["--authz-mode=allow-all", "--grpc-web-allowed-origins=*,app.dev"], Error::WebOrigin("app.dev".into()))]
#[case(&["--authz-mode=allow-all", "--path-routing-prefix=router"], Error::PathPrefix("router".into()))]
#[case(&["--authz-mode=allow-all", "--path-routing-prefix=/router/"], Error::PathPrefix("/router/".into()))]
#[case(&["--authz-cookie-name=__Host-s", "--authz-mode=tokenreview", "--path-routing-prefix=/r"], Error::Cookie(browser::Error::HostOnlyOfPath("__Host-s".into())))]
#[case(&["--authz-mode=subjectaccessreview", "--router-auth-token=t"], Error::TwoModes)]
#[case(&["--authz-cookie-name=__Host-s", "--domain=x.dev", "--authz-mode=allow-all"], Error::CookieWithoutTokens)]
#[case(&["--authz-cookie-name=s", "--domain=x.dev", "--router-auth-token=t"], Error::Cookie(browser::Error::NotHostOnly("s".into())))]
fn flags_that_do_not_fit_together_are_refused(#[case] arguments: &[&str], #[case] error: Error) {
    assert_eq!(read(arguments).unwrap().0.check(), Err(error));
}

#[test]
fn browsers_may_show_tokens_in_a_cookie_of_upstreams_flags() {
    let (flags, ignored) = read(&[
        "--domain=x.dev",
        "--authz-mode=tokenreview",
        "--authz-cookie-name=__Host-s",
        "--authz-cookie-query-param=t",
        "--authz-cookie-samesite=strict",
        "--authz-cookie-allowed-origins=https://a.dev,https://b.dev:8443",
        "--authz-trust-forwarded-proto",
    ])
    .unwrap();
    flags.check().unwrap();
    assert_eq!(ignored, ["authz-trust-forwarded-proto"]);
    let browsers = flags.settings().browsers.unwrap();
    assert_eq!(browsers.parameter.as_deref(), Some("t"));
    assert!(browsers.secure && browsers.same_site == SameSite::Strict);
    assert_eq!(browsers.origins.len(), 2);
    assert!(read(&[]).unwrap().0.settings().browsers.is_none());
}

#[rstest]
#[case("--allow-loopback-pod-ip")]
#[case("--authz-cookie-samesite=some")]
#[case("--proxy-timeout=0")]
#[case("--authz-mode=none")]
fn flags_that_would_change_authorization_are_not_ignored(#[case] flag: &str) {
    read(&[flag]).unwrap_err();
}

#[rstest]
#[case("--access-log=0", Some(false))]
#[case("-access-log=F", Some(false))]
#[case("--access-log", Some(true))]
#[case("--access-log=no", None)]
fn booleans_are_taken_as_go_takes_them(#[case] flag: &str, #[case] logged: Option<bool>) {
    let read = read(&[flag]).ok();
    assert_eq!(read.map(|(flags, _)| flags.access_log), logged);
}

#[rstest]
#[case("", &[])]
#[case("a", &["a"])]
#[case("a,b", &["a", "b"])]
// A list of empty values is an attempt to set a limit: it does not become an empty list.
#[case(",", &["", ""])]
fn lists_are_taken_as_go_takes_them(#[case] value: &str, #[case] expected: &[&str]) {
    let audiences = format!("--authz-tokenreview-audiences={value}");
    let origins = format!("--authz-cookie-allowed-origins={value}");
    let (flags, _) = read(&[&audiences, &origins]).unwrap();
    assert_eq!(flags.authz_tokenreview_audiences, expected);
    assert_eq!(flags.authz_cookie_allowed_origins, expected);
}

#[rstest]
#[case("180", Ok(180_000))]
#[case("2.5", Ok(2500))]
#[case("0", Err(()))]
#[case("-1", Err(()))]
#[case("soon", Err(()))]
fn the_python_routers_timeout_is_in_seconds(
    #[case] text: &str,
    #[case] milliseconds: Result<u128, ()>,
) {
    assert_eq!(
        seconds_of(text)
            .map(|limit| limit.as_millis())
            .map_err(|_| ()),
        milliseconds
    );
}

#[test]
fn both_versions_of_scoped_tokens_are_accepted_until_the_given_time() {
    let keys = "--authz-scoped-token-verification-keys-file=k";
    let (flags, _) = read(&["--authz-mode=scoped-token", keys]).unwrap();
    flags.check().unwrap();
    let (flags, _) = read(&[
        "--authz-mode=scoped-token",
        keys,
        "--authz-scoped-token-secret-file=s",
        "--authz-scoped-token-v1-accept-until=1970-01-01T01:00:10.9+01:00",
    ])
    .unwrap();
    flags.check().unwrap();
    assert_eq!(flags.authz_scoped_token_v1_accept_until, Some(Instant(10)));
    read(&["--authz-scoped-token-v1-accept-until=tomorrow"]).unwrap_err();
}

#[test]
fn paths_name_sandboxes_with_a_prefix_and_responses_are_rewritten_by_default() {
    let (flags, _) = read(&["--authz-mode=allow-all"]).unwrap();
    let settings = flags.settings();
    assert_eq!(settings.path_prefix, None);
    assert!(settings.rewrite_responses);
    let (flags, _) = read(&[
        "--authz-mode=tokenreview",
        "--path-routing-prefix=/router",
        "--path-routing-rewrite-responses=false",
        "--authz-cookie-name=session",
    ])
    .unwrap();
    flags.check().unwrap();
    let settings = flags.settings();
    assert_eq!(settings.path_prefix.as_deref(), Some("/router"));
    assert!(!settings.rewrite_responses);
    assert!(settings.browsers.unwrap().of_paths);
}

#[test]
fn spans_are_exported_if_the_flag_is_set() {
    let traced = |arguments: &[&str]| read(arguments).unwrap().0.enable_tracing;
    assert!(traced(&["--enable-tracing"]));
    assert!(!traced(&["--enable-tracing=false"]));
}

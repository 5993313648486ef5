use proptest::prelude::*;
use rstest::rstest;

use super::*;

const DOMAIN: &str = "sandboxes.example.com";

fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    let pairs = pairs.iter().map(|(name, value)| {
        let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
        (name, value.parse().unwrap())
    });
    let mut map = HeaderMap::new();
    for (name, value) in pairs {
        map.append(name, value);
    }
    map
}

fn read_headers(pairs: &[(&str, &str)]) -> Result<Named, Refusal> {
    read(
        &Uri::from_static("/x"),
        &headers(pairs),
        None,
        None,
        AddressPolicy::default(),
    )
}

fn read_host(host: &str) -> Result<Named, Refusal> {
    let map = headers(&[("host", host)]);
    read(
        &Uri::from_static("/x"),
        &map,
        Some(DOMAIN),
        Some("/router"),
        AddressPolicy::default(),
    )
}

fn target(id: &str, namespace: &str, port: u16) -> Target {
    Target {
        id: id.into(),
        namespace: namespace.into(),
        port,
        uid: None,
    }
}

#[rstest]
#[case(&[], Refusal::NoSandbox)]
#[case(&[("x-sandbox-id", "")], Refusal::NoSandbox)]
#[case(&[("x-sandbox-id", "..")], Refusal::SandboxFormat)]
#[case(&[("x-sandbox-id", "a.evil.com")], Refusal::SandboxFormat)]
#[case(&[("x-sandbox-id", "../etc")], Refusal::SandboxFormat)]
#[case(&[("x-sandbox-id", "Box")], Refusal::SandboxFormat)]
#[case(&[("x-sandbox-id", "-a")], Refusal::SandboxFormat)]
#[case(&[("x-sandbox-id", "a-")], Refusal::SandboxFormat)]
#[case(&[("x-sandbox-id", "a b")], Refusal::SandboxFormat)]
#[case(&[("x-sandbox-id", "a%00")], Refusal::SandboxFormat)]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-id", "b")], Refusal::SandboxFormat)]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-namespace", "Team")], Refusal::NamespaceFormat)]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-namespace", "a/b")], Refusal::NamespaceFormat)]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-namespace", "a"), ("x-sandbox-namespace", "b")], Refusal::NamespaceFormat)]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-port", "http")], Refusal::PortFormat)]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-port", "0")], Refusal::PortFormat)]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-port", "65536")], Refusal::PortFormat)]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-port", "-1")], Refusal::PortFormat)]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-pod-ip", "127.0.0.1")], Refusal::AddressFormat)]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-pod-ip", "169.254.169.254")], Refusal::AddressFormat)]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-pod-ip", "::ffff:127.0.0.1")], Refusal::AddressFormat)]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-pod-ip", "evil.com")], Refusal::AddressFormat)]
fn wrong_headers_are_refused(#[case] pairs: &[(&str, &str)], #[case] refusal: Refusal) {
    assert_eq!(read_headers(pairs), Err(refusal));
}

#[test]
fn bytes_that_are_no_text_are_refused() {
    let mut map = HeaderMap::new();
    map.insert(ID, http::HeaderValue::from_bytes(b"a\xff").unwrap());
    let named = read(
        &Uri::from_static("/"),
        &map,
        None,
        None,
        AddressPolicy::default(),
    );
    assert_eq!(named, Err(Refusal::SandboxFormat));
}

#[rstest]
#[case(&[("x-sandbox-id", "a")], target("a", "default", 8888))]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-namespace", ""), ("x-sandbox-port", "")], target("a", "default", 8888))]
#[case(&[("x-sandbox-id", "a-1"), ("x-sandbox-namespace", "team"), ("x-sandbox-port", "65535")], target("a-1", "team", 65535))]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-pod-ip", "10.1.2.3")], target("a", "default", 8888))]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-id", "a")], target("a", "default", 8888))]
fn headers_name_a_target_with_upstreams_defaults(
    #[case] pairs: &[(&str, &str)],
    #[case] target: Target,
) {
    assert_eq!(read_headers(pairs), Ok(Named::ByHeaders(target)));
}

#[rstest]
#[case("8080-a-team.sandboxes.example.com", target("a", "team", 8080))]
#[case("8080-A-Team.Sandboxes.Example.COM:443", target("a", "team", 8080))]
#[case("8080-a-team.sandboxes.example.com.", target("a", "team", 8080))]
#[case(
    "1-my-box.my-team.sandboxes.example.com",
    target("my-box", "my-team", 1)
)]
fn a_host_names_a_target(#[case] host: &str, #[case] target: Target) {
    assert_eq!(read_host(host), Ok(Named::ByHost(target)));
}

#[rstest]
#[case("a-team.sandboxes.example.com")]
#[case("0-a-team.sandboxes.example.com")]
#[case("08080-a-team.sandboxes.example.com")]
#[case("+80-a-team.sandboxes.example.com")]
#[case("70000-a-team.sandboxes.example.com")]
#[case("8080-a.sandboxes.example.com")]
#[case("8080--a.sandboxes.example.com")]
#[case("8080-a-.team.sandboxes.example.com")]
#[case("8080-a.b.team.sandboxes.example.com")]
#[case("8080-..sandboxes.example.com")]
#[case(".sandboxes.example.com")]
fn a_host_below_the_domain_that_names_nothing_is_refused(#[case] host: &str) {
    assert_eq!(read_host(host), Err(Refusal::HostFormat(DOMAIN.into())));
}

#[rstest]
#[case("sandbox-router-svc.agent-sandbox-system")]
#[case("sandboxes.example.com")]
#[case("evilsandboxes.example.com")]
#[case("[::1]:8080")]
fn the_headers_apply_below_any_other_host(#[case] host: &str) {
    assert_eq!(read_host(host), Err(Refusal::NoSandbox));
}

#[test]
fn a_host_overrides_all_headers() {
    let map = headers(&[
        ("host", "80-a-team.sandboxes.example.com"),
        ("x-sandbox-id", "other"),
        ("x-sandbox-uid", "u"),
    ]);
    let named = read(
        &Uri::from_static("/"),
        &map,
        Some(DOMAIN),
        Some("/router"),
        AddressPolicy::default(),
    );
    assert_eq!(named, Ok(Named::ByHost(target("a", "team", 80))));
}

#[test]
fn the_uris_host_goes_before_the_header() {
    let map = headers(&[("host", "80-b-team.sandboxes.example.com")]);
    let uri = Uri::from_static("http://80-a-team.sandboxes.example.com/x");
    let named = read(&uri, &map, Some(DOMAIN), None, AddressPolicy::default());
    assert_eq!(named, Ok(Named::ByHost(target("a", "team", 80))));
}

#[test]
fn a_joined_host_means_the_only_sandbox_that_exists() {
    let host = "80-my-box-my-team.sandboxes.example.com";
    let joined = Named::Joined {
        port: 80,
        text: "my-box-my-team".into(),
    };
    assert_eq!(read_host(host), Ok(joined));
    let with = |all: &'static [(&str, &str)]| {
        choose(80, "my-box-my-team", DOMAIN, move |ns, id| {
            all.contains(&(ns, id))
        })
    };
    assert_eq!(
        with(&[("my-team", "my-box")]),
        Ok(target("my-box", "my-team", 80))
    );
    assert_eq!(
        with(&[("team", "my-box-my")]),
        Ok(target("my-box-my", "team", 80))
    );
    assert_eq!(
        with(&[("my-team", "my-box"), ("team", "my-box-my")]),
        Err(Refusal::HostAmbiguous(DOMAIN.into()))
    );
    assert_eq!(
        with(&[]),
        Err(Refusal::Unreachable("my-box-my-team".into()))
    );
}

proptest! {
    #[test]
    fn a_target_of_any_headers_has_safe_names(
        id in "[ -~]{0,70}", namespace in "[ -~]{0,70}", port in "[ -~]{0,7}", address in "[ -~]{0,40}",
    ) {
        let named = read_headers(&[
            ("x-sandbox-id", &id), ("x-sandbox-namespace", &namespace), ("x-sandbox-port", &port), ("x-sandbox-pod-ip", &address),
        ]);
        if let Ok(Named::ByHeaders(target)) = named {
            prop_assert_eq!(&target.id, id.trim());
            prop_assert!(is_dns_label(&target.id) && is_dns_label(&target.namespace));
            prop_assert!(target.port > 0);
        }
    }

    #[test]
    fn the_dotted_host_is_read_back_as_it_was_written(
        id in "[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", namespace in "[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", port in 1_u16..,
    ) {
        let host = format!("{port}-{id}.{namespace}.{DOMAIN}");
        prop_assert_eq!(read_host(&host), Ok(Named::ByHost(target(&id, &namespace, port))));
    }

    #[test]
    fn the_joined_host_finds_only_a_sandbox_that_exists(
        id in "[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", namespace in "[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", port in 1_u16..,
    ) {
        let host = format!("{port}-{id}-{namespace}.{DOMAIN}");
        let wanted = target(&id, &namespace, port);
        match read_host(&host).unwrap() {
            Named::Joined { port, text } => {
                let chosen = choose(port, &text, DOMAIN, |ns, name| ns == namespace && name == id);
                prop_assert_eq!(chosen, Ok(wanted));
            }
            other => prop_assert_eq!(other, Named::ByHost(wanted)),
        }
    }

    #[test]
    fn no_host_causes_a_panic(host in "\\PC{0,80}", domain in "[a-z.]{1,20}") {
        if let Ok(value) = http::HeaderValue::from_str(&host) {
            let mut map = HeaderMap::new();
            map.insert(header::HOST, value);
            let _ = read(&Uri::from_static("/"), &map, Some(&domain), None, AddressPolicy::default());
        }
    }
}

#[test]
fn a_path_agrees_with_the_headers_and_a_host_goes_before_both() {
    let map = headers(&[
        ("host", "router"),
        ("x-sandbox-id", "a"),
        ("x-sandbox-namespace", ""),
        ("x-sandbox-port", "80"),
        ("x-sandbox-uid", "u"),
    ]);
    let uri = Uri::from_static("/router/team/a/80/x");
    let read = |map: &HeaderMap, domain| {
        read(&uri, map, domain, Some("/router"), AddressPolicy::default()).unwrap()
    };
    let route = Route {
        target: target("a", "team", 80),
        base: "/router/team/a/80".len(),
    };
    assert_eq!(read(&map, Some(DOMAIN)), Named::ByPath(route));
    let host = format!("8080-s.team.{DOMAIN}");
    let map = headers(&[("host", &host), ("x-sandbox-id", "other")]);
    let by_host = Named::ByHost(target("s", "team", 8080));
    assert_eq!(read(&map, Some(DOMAIN)), by_host);
}

#[rstest]
#[case(&[("x-sandbox-id", "other")])]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-id", "other")])]
#[case(&[("x-sandbox-namespace", "default")])]
#[case(&[("x-sandbox-id", "a"), ("x-sandbox-port", "8888")])]
#[case(&[("x-sandbox-port", "http")])]
fn headers_that_contradict_a_path_are_refused(#[case] pairs: &[(&str, &str)]) {
    let named = read(
        &Uri::from_static("/router/team/a/80/x"),
        &headers(pairs),
        None,
        Some("/router"),
        AddressPolicy::default(),
    );
    assert_eq!(named, Err(Refusal::PathContradicted));
}

#[test]
fn the_prefix_does_not_apply_to_a_native_call_with_headers() {
    let prefix = Some("/router");
    let named = headers(&[("x-sandbox-id", "a")]);
    assert_eq!(prefix_for(prefix, &named, true), None);
    assert_eq!(prefix_for(prefix, &named, false), prefix);
    assert_eq!(prefix_for(prefix, &headers(&[]), true), prefix);
}

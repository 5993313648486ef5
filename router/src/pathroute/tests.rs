use proptest::prelude::*;
use rstest::rstest;

use super::*;

const PREFIX: &str = "/router";

fn found(id: &str, namespace: &str, port: u16, base: usize) -> Result<Route, Refusal> {
    let target = Target {
        id: id.into(),
        namespace: namespace.into(),
        port,
        uid: None,
    };
    Ok(Route { target, base })
}

#[rstest]
#[case("/router/ns/box/8080/a/b", "/a/b")]
#[case("/router/ns/box/8080/", "/")]
#[case("/router/ns/box/8080", "/")]
#[case("/router/ns/box/8080//a", "//a")]
#[case("/router/ns/box/8080/some%2Ffile", "/some%2Ffile")]
#[case("/router/ns/box/8080/%zz", "/%zz")]
fn a_path_names_a_sandbox_and_the_rest_goes_on_as_it_was_written(
    #[case] path: &str,
    #[case] to_sandbox: &str,
) {
    let base = "/router/ns/box/8080".len();
    assert_eq!(read(PREFIX, path), Some(found("box", "ns", 8080, base)));
    assert_eq!(rest(path, base), to_sandbox);
    assert_eq!(strip(&path.parse().unwrap(), base).path(), to_sandbox);
}

#[test]
fn escapes_in_names_are_read() {
    let path = "/router/n%73/bo%78/80%380/x";
    let base = path.len() - "/x".len();
    assert_eq!(read(PREFIX, path), Some(found("box", "ns", 8080, base)));
}

#[rstest]
#[case("/a?b=/c")]
#[case("?b=/c")]
#[case("")]
fn the_query_goes_on(#[case] rest: &str) {
    let base = "/router/ns/box/8080".len();
    let uri: Uri = format!("http://outside/router/ns/box/8080{rest}")
        .parse()
        .unwrap();
    let slash = if rest.starts_with('/') { "" } else { "/" };
    assert_eq!(strip(&uri, base).to_string(), format!("{slash}{rest}"));
}

#[rstest]
#[case("/")]
#[case("/router")]
#[case("/routers/ns/box/8080/")]
#[case("/x/router/ns/box/8080/")]
#[case("/Router/ns/box/8080/")]
#[case("/%72outer/ns/box/8080/")]
fn paths_outside_the_prefix_are_ignored(#[case] path: &str) {
    assert_eq!(read(PREFIX, path), None);
}

#[rstest]
#[case("/router/", Refusal::PathFormat)]
#[case("/router/ns", Refusal::PathFormat)]
#[case("/router/ns/box", Refusal::PathFormat)]
#[case("/router/ns/box/", Refusal::PathFormat)]
#[case("/router//box/80/", Refusal::PathFormat)]
#[case("/router/ns//80/", Refusal::PathFormat)]
#[case("/router/NS/box/80/", Refusal::NamespaceFormat)]
#[case("/router/n.s/box/80/", Refusal::NamespaceFormat)]
#[case("/router/n%2fs/box/80/", Refusal::NamespaceFormat)]
#[case("/router/ns/bo_x/80/", Refusal::SandboxFormat)]
#[case("/router/ns/../80/", Refusal::SandboxFormat)]
#[case("/router/ns/%ff/80/", Refusal::SandboxFormat)]
#[case("/router/ns/box/http/", Refusal::PortFormat)]
#[case("/router/ns/box/0/", Refusal::PortFormat)]
#[case("/router/ns/box/65536/", Refusal::PortFormat)]
#[case("/router/ns/box/+80/", Refusal::PortFormat)]
#[case("/router/n%zz/box/80/", Refusal::PathEncoding)]
#[case("/router/ns/box%/80/", Refusal::PathEncoding)]
#[case("/router/ns/box/8%4/", Refusal::PathEncoding)]
fn a_path_below_the_prefix_that_names_no_sandbox_is_refused(
    #[case] path: &str,
    #[case] refusal: Refusal,
) {
    assert_eq!(read(PREFIX, path), Some(Err(refusal)));
}

#[rstest]
#[case("/router", true)]
#[case("/a/b-c_d.e~f", true)]
#[case("router", false)]
#[case("/", false)]
#[case("", false)]
#[case("/router/", false)]
#[case("/rou ter", false)]
#[case("/router\n", false)]
#[case("/a;b", false)]
#[case("/a?b", false)]
#[case("/a%20", false)]
fn a_prefix_is_a_path_without_a_slash_at_its_end(#[case] text: &str, #[case] is: bool) {
    assert_eq!(is_prefix(text), is);
}

fn public_path(path: &str) -> PublicPath {
    let base = "/router/ns/box/80".len();
    let hosts = vec!["10.0.0.1:80".into(), "outside.example.com".into()];
    PublicPath::new(path, base, hosts)
}

fn rewritten(name: HeaderName, value: &str) -> String {
    let mut headers = HeaderMap::new();
    headers.insert(&name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
    public_path("/router/ns/box/80/x").rewrite(&mut headers);
    String::from_utf8(headers[name].as_bytes().to_vec()).unwrap()
}

#[rstest]
#[case::from_the_root("/login?next=/", "/router/ns/box/80/login?next=/")]
#[case::the_root("/", "/router/ns/box/80/")]
#[case::by_its_address("http://10.0.0.1/a#b", "/router/ns/box/80/a#b")]
#[case::by_its_address_and_port("http://10.0.0.1:80/a", "/router/ns/box/80/a")]
#[case::by_the_clients_host("https://Outside.example.com/a", "/router/ns/box/80/a")]
#[case::by_a_host_alone("HTTPS://outside.example.com:443", "/router/ns/box/80/")]
#[case::by_a_host_and_a_query("http://outside.example.com?a", "/router/ns/box/80/?a")]
#[case::without_a_scheme("//outside.example.com/a", "/router/ns/box/80/a")]
#[case::is_there_already("/router/ns/box/80/a", "/router/ns/box/80/a")]
#[case::is_there_by_its_host(
    "https://outside.example.com/router/ns/box/80?a",
    "/router/ns/box/80?a"
)]
#[case::of_a_longer_port("/router/ns/box/8080/a", "/router/ns/box/80/router/ns/box/8080/a")]
#[case::from_here("next/page", "next/page")]
#[case::a_query("?a=b", "?a=b")]
#[case::elsewhere("https://login.example.com/a", "https://login.example.com/a")]
#[case::another_port("http://10.0.0.1:81/a", "http://10.0.0.1:81/a")]
#[case::elsewhere_without_a_scheme("//evil.com/a", "//evil.com/a")]
#[case::elsewhere_by_a_backslash("/\\evil.com/a", "/\\evil.com/a")]
#[case::another_scheme("myapp://outside.example.com/a", "myapp://outside.example.com/a")]
#[case::an_address_in_a_query("/a?to=http://x.dev/", "/router/ns/box/80/a?to=http://x.dev/")]
#[case::letters("/käse", "/router/ns/box/80/käse")]
fn a_redirect_within_the_sandbox_stays_below_its_path(#[case] from: &str, #[case] to: &str) {
    assert_eq!(rewritten(LOCATION, from), to);
}

#[rstest]
#[case("a=b; Path=/", "a=b; Path=/router/ns/box/80/")]
#[case(
    "a=b; path=/app; HttpOnly",
    "a=b; Path=/router/ns/box/80/app; HttpOnly"
)]
#[case("a=b;PATH = /app ;Secure", "a=b; Path=/router/ns/box/80/app;Secure")]
#[case("a=b; Path=/router/ns/box/80/app", "a=b; Path=/router/ns/box/80/app")]
#[case(
    "a=b; Path=/router/ns/other/80/",
    "a=b; Path=/router/ns/box/80/router/ns/other/80/"
)]
#[case(
    "a=b; Path=/router/ns/box/80/; Path=/",
    "a=b; Path=/router/ns/box/80/; Path=/router/ns/box/80/"
)]
#[case("a=b; Domain=example.com; Path=/", "a=b; Path=/router/ns/box/80/")]
#[case("a=b; Max-Age=1", "a=b; Max-Age=1")]
#[case("a=b; Path=app", "a=b; Path=app")]
#[case("path=/; Secure", "path=/; Secure")]
#[case("a=\"b; Path=/\"", "a=\"b; Path=/router/ns/box/80/\"")]
fn a_cookie_is_for_the_sandboxs_paths_alone(#[case] from: &str, #[case] to: &str) {
    assert_eq!(rewritten(SET_COOKIE, from), to);
}

#[test]
fn every_cookie_is_rewritten() {
    let mut headers = HeaderMap::new();
    for cookie in ["a=1; Path=/", "b=2; Path=/x"] {
        headers.append(SET_COOKIE, HeaderValue::from_static(cookie));
    }
    public_path("/router/ns/box/80/x").rewrite(&mut headers);
    let cookies: Vec<_> = headers.get_all(SET_COOKIE).iter().collect();
    assert_eq!(
        cookies,
        [
            "a=1; Path=/router/ns/box/80/",
            "b=2; Path=/router/ns/box/80/x"
        ]
    );
    let mut none = HeaderMap::new();
    public_path("/router/ns/box/80/x").rewrite(&mut none);
    assert!(none.is_empty());
}

#[rstest]
#[case("a=1", "a=1; Path=/router/ns/box/80/")]
#[case("a=1; Path=x", "a=1; Path=x; Path=/router/ns/box/80/")]
// Browsers use the last `Path`, which is empty here.
#[case(
    "a=1; Path=/x; Path=",
    "a=1; Path=/router/ns/box/80/x; Path=; Path=/router/ns/box/80/"
)]
#[case("a=1; Path=; Path=/x", "a=1; Path=; Path=/router/ns/box/80/x")]
fn a_cookie_without_a_path_stays_with_its_port(#[case] from: &'static str, #[case] to: &str) {
    let mut headers = HeaderMap::new();
    headers.insert(SET_COOKIE, HeaderValue::from_static(from));
    public_path("/router/ns/box/80").rewrite(&mut headers);
    assert_eq!(headers[SET_COOKIE], to);
}

#[test]
fn headers_that_apply_to_a_whole_host_are_removed() {
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("accept-ch", "Sec-CH-UA-Model"),
        ("alt-svc", "h2=\":8443\""),
        ("clear-site-data", "\"*\""),
        ("content-type", "text/plain"),
        ("nel", "{\"report_to\":\"own\",\"max_age\":9}"),
        ("report-to", "{\"group\":\"own\"}"),
        ("reporting-endpoints", "own=\"/reports\""),
        ("service-worker-allowed", "/"),
        ("strict-transport-security", "max-age=9"),
        ("use-as-dictionary", "match=\"/*\""),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    remove_host_wide_headers(&mut headers);
    let kept: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
    assert_eq!(kept, ["content-type"]);
}

/// Reports whether a browser sends a cookie of `path` in a request (RFC 6265, 5.1.4).
fn goes_to(path: &str, request: &str) -> bool {
    let rest = request.strip_prefix(path);
    rest.is_some_and(|rest| rest.is_empty() || path.ends_with('/') || rest.starts_with('/'))
}

proptest! {
    #[test]
    fn a_cookie_with_any_path_goes_to_no_other_sandbox(path in "/[a-z0-9/.%]{0,30}", attributes in "(; ?[A-Za-z]{1,6}(=[a-z/]{0,9})?){0,3}") {
        let cookie = format!("a=b; Path={path}{attributes}");
        let written = rewritten(SET_COOKIE, &cookie);
        let paths = written.split(';').skip(1).filter_map(|attribute| {
            let (name, value) = attribute.split_once('=')?;
            let path = name.trim().eq_ignore_ascii_case("path") && value.starts_with('/');
            path.then_some(value.trim())
        });
        for path in paths {
            for other in ["/router/ns/other/80/", "/router/ns/box/8080/", "/router/n/box/80/", "/"] {
                prop_assert!(!goes_to(path, other), "{written}");
            }
        }
    }

    #[test]
    fn a_target_of_any_path_has_safe_names(path in "/router/\\PC{0,60}") {
        if let Some(Ok(Route { target, base })) = read(PREFIX, &path) {
            prop_assert!(is_dns_label(&target.id) && is_dns_label(&target.namespace) && target.port != 0);
            prop_assert!(rest(&path, base).starts_with('/'));
        }
    }
}

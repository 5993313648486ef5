use proptest::prelude::*;
use rstest::rstest;

use super::*;

const HOST: &str = "80-box-ns.x.dev";

fn browsers() -> Browsers {
    Browsers {
        cookie: "__Host-s".into(),
        parameter: Some("t".into()),
        same_site: SameSite::Lax,
        secure: true,
        origins: vec!["https://known.dev".into()],
        of_paths: false,
    }
}

fn request(uri: &str, headers: &[(&str, &str)]) -> Request<()> {
    let request = headers
        .iter()
        .fold(Request::builder().uri(uri), |request, (name, value)| {
            request.header(*name, *value)
        });
    request.body(()).unwrap()
}

fn query(token: &str) -> Option<BrowserToken> {
    Some(BrowserToken::InQuery(token.to_owned()))
}

fn cookie(token: &str) -> Option<BrowserToken> {
    Some(BrowserToken::InCookie(token.to_owned()))
}

#[rstest]
#[case::alone("/p?t=abc", query("abc"), "/p")]
#[case::among_others_that_stay_as_they_were(
    "/p?z=%2b&t=abc&a&&a=1",
    query("abc"),
    "/p?z=%2b&a&&a=1"
)]
#[case::written_otherwise("/?%74=a%2Eb", query("a.b"), "/")]
#[case::twice("/?t=abc&t=def", query("abc"), "/")]
#[case::empty("/?t=&u=1", None, "/?u=1")]
#[case::bare("/?t", None, "/")]
#[case::another("/?tt=abc&T=abc", None, "/?tt=abc&T=abc")]
#[case::none("/p", None, "/p")]
#[case::of_a_whole_address("https://h.x.dev/p?t=abc&u=1", query("abc"), "https://h.x.dev/p?u=1")]
fn a_token_in_the_query_is_removed(
    #[case] uri: &str,
    #[case] shown: Option<BrowserToken>,
    #[case] rest: &str,
) {
    let mut request = request(uri, &[]);
    assert_eq!(browsers().take(&mut request), shown);
    assert_eq!(request.uri(), rest);
}

#[rstest]
#[case::alone(&["__Host-s=abc"], cookie("abc"), None)]
#[case::among_others(&["a=1; __Host-s=abc;b=\"2\""], cookie("abc"), Some("a=1; b=\"2\""))]
#[case::in_several_headers(&["a=1", "__Host-s=abc", "b=2"], cookie("abc"), Some("a=1; b=2"))]
#[case::twice(&["__Host-s=abc; __Host-s=def"], cookie("abc"), None)]
#[case::empty(&["__Host-s=; a=1"], None, Some("a=1"))]
#[case::bare(&["a=1; __Host-s"], None, Some("a=1"))]
#[case::others(&["__Host-sid=abc;a=__Host-s=abc"], None, Some("__Host-sid=abc;a=__Host-s=abc"))]
fn a_token_in_a_cookie_is_removed(
    #[case] cookies: &[&str],
    #[case] shown: Option<BrowserToken>,
    #[case] rest: Option<&str>,
) {
    let headers: Vec<_> = cookies.iter().map(|value| ("cookie", *value)).collect();
    let mut request = request("/", &headers);
    assert_eq!(browsers().take(&mut request), shown);
    let left: Vec<_> = request.headers().get_all(COOKIE).iter().collect();
    assert_eq!(left, Vec::from_iter(rest));
}

#[test]
fn a_header_goes_before_the_query_and_that_before_a_cookie() {
    let shown = [("cookie", "__Host-s=c"), ("authorization", "Bearer h")];
    let mut both = request("/?t=q", &shown);
    assert_eq!(browsers().take(&mut both), None);
    assert_eq!(both.uri(), "/");
    assert!(!both.headers().contains_key(COOKIE));
    assert_eq!(
        browsers().take(&mut request("/?t=q", &shown[..1])),
        query("q")
    );
}

#[rstest]
#[case::its_own_page(&[("sec-fetch-site", "same-origin")], true)]
#[case::its_own_page_with_a_null_origin(&[("sec-fetch-site", "same-origin"), ("origin", "null")], true)]
#[case::typed(&[("sec-fetch-site", "none"), ("sec-fetch-dest", "document")], true)]
#[case::its_own_websocket(&[("origin", "https://80-box-ns.x.dev")], true)]
#[case::with_the_default_port(&[("origin", "https://80-BOX-ns.x.dev:443")], true)]
#[case::another_sandbox(&[("origin", "https://80-evil-ns.x.dev")], false)]
#[case::another_port(&[("origin", "https://80-box-ns.x.dev:8443")], false)]
#[case::without_tls(&[("origin", "http://80-box-ns.x.dev")], false)]
#[case::hidden(&[("origin", "null")], false)]
#[case::another_sandbox_that_reads(&[("sec-fetch-site", "same-site"), ("sec-fetch-dest", "image")], false)]
#[case::another_sandbox_that_frames(&[("sec-fetch-site", "same-site"), ("sec-fetch-dest", "iframe")], false)]
#[case::a_link(&[("sec-fetch-site", "cross-site"), ("sec-fetch-dest", "document")], true)]
#[case::a_form(&[("sec-fetch-site", "cross-site"), ("sec-fetch-dest", "document"), ("origin", "https://evil.dev")], false)]
#[case::known(&[("origin", "https://known.dev")], true)]
#[case::known_that_frames(&[("sec-fetch-site", "cross-site"), ("sec-fetch-dest", "iframe"), ("referer", "https://known.dev/page?q")], true)]
#[case::almost_known(&[("sec-fetch-site", "cross-site"), ("referer", "https://known.dev.evil.dev/https://known.dev")], false)]
#[case::an_old_browser(&[], true)]
fn a_cookie_counts_unless_a_page_of_another_sandbox_caused_the_request(
    #[case] headers: &[(&str, &str)],
    #[case] counts: bool,
) {
    let request = request("/", headers);
    let host = HeaderValue::from_static(HOST);
    let counted = browsers().may_use_cookie(&Method::GET, request.headers(), Some(&host));
    assert_eq!(counted, counts);
}

#[test]
fn a_cookie_counts_for_links_that_read_and_for_own_pages_without_tls() {
    let host = HeaderValue::from_static(HOST);
    let link = request(
        "/",
        &[
            ("sec-fetch-site", "same-site"),
            ("sec-fetch-dest", "document"),
        ],
    );
    let counted = |method| browsers().may_use_cookie(&method, link.headers(), Some(&host));
    assert!(counted(Method::HEAD) && !counted(Method::POST));
    let insecure = Browsers {
        secure: false,
        ..browsers()
    };
    for scheme in ["http", "https"] {
        let origin = format!("{scheme}://{HOST}");
        let own = request("/", &[("origin", origin.as_str())]);
        assert!(insecure.may_use_cookie(&Method::POST, own.headers(), Some(&host)));
    }
}

fn redirect(method: Method, uri: &str, headers: &[(&str, &str)]) -> Option<Response<Full<Bytes>>> {
    let mut request = request(uri, headers);
    let shown = browsers().take(&mut request)?;
    *request.method_mut() = method;
    browsers().cookie_redirect(&shown, &request, 0)
}

#[test]
fn a_good_token_in_the_query_becomes_a_cookie_of_this_host_alone() {
    let answer = redirect(Method::GET, "/p?a=%2f&t=x.y_z-1", &[]).unwrap();
    assert_eq!(answer.status(), 302);
    let headers = answer.headers();
    assert_eq!(
        headers["set-cookie"],
        "__Host-s=x.y_z-1; Path=/; HttpOnly; Secure; SameSite=Lax"
    );
    assert_eq!(headers["location"], "/p?a=%2f");
    assert_eq!(headers["cache-control"], "no-store");
    assert_eq!(headers["referrer-policy"], "no-referrer");
}

#[rstest]
#[case::a_form(Method::POST, "/?t=abc", &[])]
#[case::a_websocket(Method::GET, "/?t=abc", &[("connection", "upgrade"), ("upgrade", "websocket")])]
#[case::no_cookies_value(Method::GET, "/?t=a%3Bb", &[])]
#[case::two_lines(Method::GET, "/?t=a%0d%0aset-cookie:b=c", &[])]
#[case::in_the_cookie(Method::GET, "/", &[("cookie", "__Host-s=abc")])]
fn a_client_that_would_not_follow_a_redirect_gets_none(
    #[case] method: Method,
    #[case] uri: &str,
    #[case] headers: &[(&str, &str)],
) {
    assert!(redirect(method, uri, headers).is_none());
}

#[rstest]
#[case("//evil.dev/?t=abc", "/.//evil.dev/")]
#[case("/\\evil.dev?t=abc", "/./\\evil.dev")]
#[case("/./?t=abc", "/./")]
fn a_redirect_never_leads_to_another_host(#[case] uri: &str, #[case] location: &str) {
    let answer = redirect(Method::GET, uri, &[]).unwrap();
    assert_eq!(answer.headers()["location"], location);
}

fn named(cookie: &str) -> Browsers {
    Browsers {
        cookie: cookie.into(),
        ..browsers()
    }
}

fn known(origin: &str) -> Browsers {
    Browsers {
        origins: vec!["https://a.dev:8443".into(), origin.into()],
        ..browsers()
    }
}

fn without_tls(same_site: SameSite) -> Browsers {
    Browsers {
        secure: false,
        same_site,
        ..named("s")
    }
}

#[rstest]
#[case(browsers(), None)]
#[case(named("s"), Some(Error::NotHostOnly("s".into())))]
#[case(named("__Host-a b"), Some(Error::Name("__Host-a b".into())))]
#[case(Browsers { parameter: Some("t&u".into()), ..browsers() }, Some(Error::Name("t&u".into())))]
#[case(known("https://a.dev"), None)]
#[case(known("https://a.dev/"), Some(Error::Origin("https://a.dev/".into())))]
#[case(known("a.dev"), Some(Error::Origin("a.dev".into())))]
#[case(known("*"), Some(Error::Origin("*".into())))]
#[case(without_tls(SameSite::Lax), None)]
#[case(without_tls(SameSite::None), Some(Error::NoneWithoutTls))]
fn a_cookie_that_could_not_be_safe_is_refused(
    #[case] browsers: Browsers,
    #[case] error: Option<Error>,
) {
    assert_eq!(browsers.check().err(), error);
}

proptest! {
    #[test]
    fn no_token_passes_in_any_query_or_cookie(
        pairs in prop::collection::vec("(t|%74|tt|a)(=[a-z%;=]{0,5})?", 0..6), cookies in prop::collection::vec("(__Host-s|a|__Host-ss)(=[a-z]{0,5})?", 0..6),
    ) {
        let uri = format!("/p?{}", pairs.join("&"));
        let cookie = cookies.join(if pairs.len() > 2 { ";" } else { "; " });
        let mut request = request(&uri, &[("cookie", cookie.as_str())]);
        browsers().take(&mut request);
        let query = request.uri().query().unwrap_or_default().to_owned();
        let keys = query.split('&').map(|pair| decoded(pair.split('=').next().unwrap_or_default()));
        prop_assert!(keys.into_iter().all(|key| key != "t"), "{}", query);
        for value in request.headers().get_all(COOKIE) {
            let text = value.to_str().unwrap();
            let keys = text.split(';').map(|pair| pair.trim().split('=').next());
            prop_assert!(keys.into_iter().all(|key| key != Some("__Host-s")), "{}", text);
        }
    }
}

#[rstest]
#[case("/r/ns/s/80/a?t=abc&b", "/r/ns/s/80/a?b")]
#[case::nothing_else("/r/ns/s/80?t=abc&b", "/r/ns/s/80/?b")]
fn the_cookie_of_a_path_applies_below_the_path(#[case] uri: &str, #[case] location: &str) {
    let of_paths = Browsers {
        cookie: "s".into(),
        of_paths: true,
        ..browsers()
    };
    of_paths.check().unwrap();
    let mut request = request(uri, &[]);
    let shown = of_paths.take(&mut request).unwrap();
    let answer = of_paths.cookie_redirect(&shown, &request, "/r/ns/s/80".len());
    let headers = answer.unwrap().headers().clone();
    let cookie = "s=abc; Path=/r/ns/s/80/; HttpOnly; Secure; SameSite=Lax";
    assert_eq!(headers["set-cookie"], cookie);
    assert_eq!(headers["location"], location);
}

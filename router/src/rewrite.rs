//! Rewrites headers of requests and responses. Pure.

use std::net::{IpAddr, SocketAddr};

use http::{
    HeaderMap, HeaderName, HeaderValue, Uri,
    header::{
        AUTHORIZATION, CONNECTION, COOKIE, EXPECT, FORWARDED, HOST, ORIGIN, PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE,
    },
};

use crate::target;

/// Headers of a connection, not of the message.
const HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("keep-alive"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Returns the protocol that a client asks to upgrade to, if any.
///
/// Cleartext HTTP/2 is excluded: requests in such a tunnel would reach the sandbox with headers
/// that the router has not rewritten.
pub fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let wanted = headers
        .get_all(CONNECTION)
        .iter()
        .any(|value| names(value, "upgrade"));
    let mut protocols = headers.get_all(UPGRADE).iter();
    protocols
        .next()
        .filter(|value| wanted && !value.is_empty() && !names(value, "h2c"))
        .filter(|_| protocols.next().is_none())
        .cloned()
}

/// Reports whether a sandbox upgraded to the requested protocol.
pub fn same_protocol(headers: &HeaderMap, asked: Option<&HeaderValue>) -> bool {
    let protocol = headers.get(UPGRADE).and_then(|value| value.to_str().ok());
    protocol.is_some_and(|protocol| asked.is_some_and(|asked| names(asked, protocol.trim())))
}

fn names(value: &HeaderValue, token: &str) -> bool {
    let text = value.to_str().unwrap_or_default();
    text.split(',')
        .any(|part| part.trim().eq_ignore_ascii_case(token))
}

/// Facts about a request besides its headers.
#[derive(Clone, Debug)]
pub struct Arrival {
    pub client: IpAddr,
    pub tls: bool,
    /// Host in the client's request.
    pub host: Option<HeaderValue>,
    /// Host or path named the sandbox: the client's `X-Sandbox-*` headers are not verified.
    pub by_address: bool,
}

/// Returns the host in a client's request.
pub fn host(uri: &Uri, headers: &HeaderMap) -> Option<HeaderValue> {
    match uri.authority() {
        Some(authority) => {
            // Host headers have no user and password.
            let host = authority.as_str().rsplit('@').next()?;
            HeaderValue::from_str(host).ok()
        }
        None => headers.get(HOST).cloned(),
    }
}

/// Rewrites a client's headers for the sandbox.
pub fn request(
    headers: &mut HeaderMap,
    arrival: &Arrival,
    upgrade: Option<HeaderValue>,
    to: SocketAddr,
) {
    let trailers = headers
        .get_all(TE)
        .iter()
        .any(|value| names(value, "trailers"));
    drop_hop_by_hop(headers);
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    // The credential is for the router. A sandbox that received it could act as the client.
    headers.remove(AUTHORIZATION);
    // hyper has already answered `Expect` to the client.
    headers.remove(EXPECT);
    headers.remove(FORWARDED);
    headers.insert(
        X_FORWARDED_FOR,
        text(&arrival.client.to_canonical().to_string()),
    );
    headers.insert(
        X_FORWARDED_PROTO,
        HeaderValue::from_static(if arrival.tls { "https" } else { "http" }),
    );
    match &arrival.host {
        Some(host) => headers.insert(X_FORWARDED_HOST, host.clone()),
        None => headers.remove(X_FORWARDED_HOST),
    };
    headers.insert(HOST, text(&to.to_string()));
    if arrival.by_address {
        for name in [
            target::ID,
            target::UID,
            target::NAMESPACE,
            target::PORT,
            target::POD_IP,
            target::TIMEOUT,
        ] {
            headers.remove(name);
        }
    }
    join_cookies(headers);
    if let Some(protocol) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, protocol);
        // Web editors compare Origin with Host. The Host header of the sandbox differs from the
        // browser's.
        headers.remove(ORIGIN);
    }
}

/// Rewrites a sandbox's headers for the client. `switching`: keeps the upgrade to another protocol.
pub fn response(headers: &mut HeaderMap, switching: bool) {
    let protocol = headers.get(UPGRADE).cloned();
    drop_hop_by_hop(headers);
    if let Some(protocol) = protocol.filter(|_| switching) {
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, protocol);
    }
}

fn drop_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|text| text.split(','))
        .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Joins cookies: HTTP/2 may split them into several headers, HTTP/1 may not.
fn join_cookies(headers: &mut HeaderMap) {
    let all: Vec<&[u8]> = headers
        .get_all(COOKIE)
        .iter()
        .map(HeaderValue::as_bytes)
        .collect();
    if all.len() > 1
        && let Ok(joined) = HeaderValue::from_bytes(&all.join(&b"; "[..]))
    {
        headers.insert(COOKIE, joined);
    }
}

/// Returns the header value of an address, which is always valid.
fn text(value: &str) -> HeaderValue {
    HeaderValue::from_str(value).unwrap_or_else(|_| HeaderValue::from_static(""))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in pairs {
            map.append(*name, HeaderValue::from_static(value));
        }
        map
    }

    fn arrival() -> Arrival {
        Arrival {
            client: "::ffff:192.0.2.1".parse().unwrap(),
            tls: true,
            host: Some(HeaderValue::from_static("outside.example.com")),
            by_address: false,
        }
    }

    fn to() -> SocketAddr {
        "10.0.0.1:8888".parse().unwrap()
    }

    fn rewritten(pairs: &[(&'static str, &'static str)]) -> Vec<String> {
        let mut map = headers(pairs);
        let upgrade = upgrade(&map);
        request(&mut map, &arrival(), upgrade, to());
        let mut lines: Vec<String> = map
            .iter()
            .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
            .filter(|line| !line.starts_with("x-forwarded-") && !line.starts_with("host: "))
            .collect();
        lines.sort();
        lines
    }

    #[rstest]
    #[case::credentials(&[("authorization", "Bearer t"), ("cookie", "a=1")], &["cookie: a=1"])]
    #[case::hops(&[("connection", "keep-alive, X-Own"), ("keep-alive", "5"), ("x-own", "1"), ("te", "gzip"), ("transfer-encoding", "chunked"), ("accept", "*/*")], &["accept: */*"])]
    #[case::trailers(&[("te", "trailers, gzip")], &["te: trailers"])]
    #[case::cookies(&[("cookie", "a=1"), ("cookie", "b=2")], &["cookie: a=1; b=2"])]
    #[case::expectation(&[("expect", "100-continue")], &[])]
    #[case::forwarded(&[("forwarded", "for=1.2.3.4")], &[])]
    #[case::origin_of_a_page(&[("origin", "https://a.example.com")], &["origin: https://a.example.com"])]
    #[case::upgrade(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket"), ("origin", "https://a.example.com"), ("sec-websocket-key", "k")], &["connection: Upgrade", "sec-websocket-key: k", "upgrade: websocket"])]
    #[case::upgrade_without_connection(&[("upgrade", "websocket")], &[])]
    #[case::cleartext_http2(&[("connection", "Upgrade, HTTP2-Settings"), ("upgrade", "h2c"), ("http2-settings", "AA")], &[])]
    #[case::cleartext_http2_among_others(&[("connection", "Upgrade"), ("upgrade", "websocket, H2C")], &[])]
    #[case::announced_trailers(&[("trailer", "x-sum")], &["trailer: x-sum"])]
    #[case::names(&[("x-sandbox-id", "a")], &["x-sandbox-id: a"])]
    fn requests_to_a_sandbox_keep_only_headers_meant_for_it(
        #[case] pairs: &[(&'static str, &'static str)],
        #[case] lines: &[&str],
    ) {
        assert_eq!(rewritten(pairs), lines);
    }

    #[test]
    fn only_the_router_sets_forwarded_headers() {
        let mut map = headers(&[
            ("host", "outside.example.com"),
            ("x-forwarded-for", "1.2.3.4"),
            ("x-forwarded-proto", "gopher"),
            ("x-forwarded-host", "evil"),
        ]);
        request(&mut map, &arrival(), None, to());
        assert_eq!(map["x-forwarded-for"], "192.0.2.1");
        assert_eq!(map["x-forwarded-proto"], "https");
        assert_eq!(map["x-forwarded-host"], "outside.example.com");
        assert_eq!(map["host"], "10.0.0.1:8888");
    }

    #[test]
    fn a_sandbox_named_by_its_address_gets_no_names_from_the_client() {
        let mut map = headers(&[
            ("x-sandbox-id", "other"),
            ("x-sandbox-uid", "u"),
            ("x-sandbox-port", "1"),
            ("x-sandbox-timeout", "1"),
        ]);
        request(
            &mut map,
            &Arrival {
                by_address: true,
                ..arrival()
            },
            None,
            to(),
        );
        assert!(
            map.keys()
                .all(|name| !name.as_str().starts_with("x-sandbox-")),
            "{map:?}"
        );
    }

    #[rstest]
    #[case(Some("websocket"), Some("WebSocket"), true)]
    #[case(Some("websocket, irc"), Some("irc"), true)]
    #[case(Some("websocket"), Some("irc"), false)]
    #[case(Some("websocket"), None, false)]
    #[case(None, Some("websocket"), false)]
    fn a_sandbox_upgrades_to_the_requested_protocol(
        #[case] asked: Option<&'static str>,
        #[case] protocol: Option<&'static str>,
        #[case] same: bool,
    ) {
        let protocol = protocol.map(|protocol| ("upgrade", protocol));
        let headers = headers(protocol.as_slice());
        let asked = asked.map(HeaderValue::from_static);
        assert_eq!(same_protocol(&headers, asked.as_ref()), same);
    }

    #[test]
    fn ipv6_hosts_are_written_in_brackets() {
        let mut map = HeaderMap::new();
        request(&mut map, &arrival(), None, "[fd00::1]:80".parse().unwrap());
        assert_eq!(map["host"], "[fd00::1]:80");
    }

    #[test]
    fn a_response_loses_the_headers_of_its_connection() {
        let mut map = headers(&[
            ("connection", "close, x-own"),
            ("x-own", "1"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("content-type", "text/plain"),
        ]);
        response(&mut map, false);
        assert_eq!(map, headers(&[("content-type", "text/plain")]));
        let mut map = headers(&[("connection", "upgrade"), ("upgrade", "websocket")]);
        response(&mut map, true);
        assert_eq!(map["upgrade"], "websocket");
        assert_eq!(map["connection"], "Upgrade");
    }
}

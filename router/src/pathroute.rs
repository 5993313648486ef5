//! Routing by path, for browsers without a wildcard record in DNS. Pure.
//!
//! The form `<prefix>/<namespace>/<sandbox>/<port>/…` is upstream's since 1.0.0
//! (sandbox-router/proxy/pathroute.go). The rewriting of responses is upstream's since 1.0.11
//! (PR #2203).

use std::borrow::Cow;

use http::{
    HeaderMap, HeaderName, HeaderValue, Uri,
    header::{Entry, LOCATION, SET_COOKIE},
    uri::PathAndQuery,
};
use percent_encoding::percent_decode_str;

use crate::{
    refusal::Refusal,
    target::{Target, is_dns_label},
};

/// Response headers that browsers apply to a whole origin or host, and thus to all sandboxes of the
/// router's host.
///
/// They control what a browser deletes, which scripts answer for which paths, where the browser
/// reports, and how it connects.
const HOST_WIDE: [HeaderName; 9] = [
    HeaderName::from_static("accept-ch"),
    HeaderName::from_static("alt-svc"),
    HeaderName::from_static("clear-site-data"),
    HeaderName::from_static("nel"),
    HeaderName::from_static("report-to"),
    HeaderName::from_static("reporting-endpoints"),
    HeaderName::from_static("service-worker-allowed"),
    HeaderName::from_static("strict-transport-security"),
    HeaderName::from_static("use-as-dictionary"),
];

/// Sandbox that a path names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    pub target: Target,
    /// Length in bytes of the part of the path that the sandbox does not receive.
    pub base: usize,
}

/// Reports whether a text is a valid `--path-routing-prefix`.
///
/// The rules are upstream's; in addition, no character may end a path or a cookie's attribute.
pub fn is_prefix(text: &str) -> bool {
    let begins_and_ends = text.starts_with('/') && !text.ends_with('/');
    let inner = |byte: u8| byte.is_ascii_graphic() && !b"?#;,%\"<>\\^`{|}".contains(&byte);
    begins_and_ends && text.bytes().all(inner)
}

/// Reads a path; `None`: the path is not below the prefix.
///
/// A path below the prefix that names no sandbox is an error.
pub fn read(prefix: &str, path: &str) -> Option<Result<Route, Refusal>> {
    let rest = path.strip_prefix(prefix)?.strip_prefix('/')?;
    Some(read_rest(path.len() - rest.len(), rest))
}

fn read_rest(begin: usize, rest: &str) -> Result<Route, Refusal> {
    let mut segments = rest.splitn(4, '/').take(3);
    let mut next = || segments.next().filter(|segment| !segment.is_empty());
    let (Some(namespace), Some(id), Some(port)) = (next(), next(), next()) else {
        return Err(Refusal::PathFormat);
    };
    let base = begin + namespace.len() + id.len() + port.len() + 2;
    let (namespace, id, port) = (decoded(namespace)?, decoded(id)?, decoded(port)?);
    if !is_dns_label(&namespace) {
        return Err(Refusal::NamespaceFormat);
    }
    if !is_dns_label(&id) {
        return Err(Refusal::SandboxFormat);
    }
    let digits = port.bytes().all(|byte| byte.is_ascii_digit());
    let port = port.parse().ok().filter(|port| digits && *port != 0);
    let target = Target {
        id: id.into_owned(),
        namespace: namespace.into_owned(),
        port: port.ok_or(Refusal::PortFormat)?,
        uid: None,
    };
    Ok(Route { target, base })
}

fn decoded(segment: &str) -> Result<Cow<'_, str>, Refusal> {
    let escapes = segment.split('%').skip(1);
    let mut escapes = escapes.map(|after| after.get(..2).unwrap_or_default());
    if escapes.any(|escape| escape.len() != 2 || !escape.bytes().all(|b| b.is_ascii_hexdigit())) {
        return Err(Refusal::PathEncoding);
    }
    // Invalid UTF-8 becomes a replacement character, which no name contains.
    Ok(percent_decode_str(segment).decode_utf8_lossy())
}

/// Returns the path that a sandbox receives: all after the first `base` bytes.
pub fn rest(path: &str, base: usize) -> &str {
    let rest = path.get(base..).unwrap_or_default();
    if rest.is_empty() { "/" } else { rest }
}

/// Removes scheme, authority and the first `base` bytes of the path from a URI.
///
/// The rest keeps its bytes.
pub fn strip(uri: &Uri, base: usize) -> Uri {
    let whole = uri.path_and_query().map_or("/", PathAndQuery::as_str);
    let rest = whole.get(base..).unwrap_or_default();
    let rest = if rest.starts_with('/') {
        rest.parse()
    } else {
        format!("/{rest}").parse()
    };
    // The remaining parts of a valid URI are a valid URI.
    rest.unwrap_or_default()
}

/// Path of a sandbox for its client; redirects and cookies of its responses are moved below it.
#[derive(Clone, Debug)]
pub struct PublicPath {
    /// Part of the request's path that names the sandbox, without a slash at its end.
    base: String,
    /// The request's path was equal to `base`.
    bare: bool,
    /// Hosts that mean the sandbox: the sandbox's own address, and the host that the client uses.
    hosts: Vec<String>,
}

impl PublicPath {
    /// Returns the path of a sandbox for the client of a request.
    pub fn new(path: &str, base: usize, hosts: Vec<String>) -> Self {
        let (base, rest) = path.split_at_checked(base).unwrap_or((path, ""));
        Self {
            base: base.to_owned(),
            bare: rest.is_empty(),
            hosts,
        }
    }

    /// Moves the paths in `Location` and `Set-Cookie` below the path that names the sandbox.
    pub fn rewrite(&self, headers: &mut HeaderMap) {
        if let Some(there) = headers
            .get(LOCATION)
            .and_then(|value| self.location(str::from_utf8(value.as_bytes()).ok()?))
        {
            headers.insert(LOCATION, there);
        }
        if let Entry::Occupied(mut cookies) = headers.entry(SET_COOKIE) {
            for value in cookies.iter_mut() {
                if let Some(cookie) = self.cookie(value.as_bytes()) {
                    *value = cookie;
                }
            }
        }
    }

    /// Returns the new target of a redirect to the sandbox itself, by its host or by an absolute
    /// path; `None`: the redirect stays.
    fn location(&self, there: &str) -> Option<HeaderValue> {
        let path = match there.split_once("://") {
            Some((scheme, rest)) if is_http(scheme) => self.own_path(scheme, rest)?,
            _ if there.starts_with("//") => self.own_path("http", there.get(2..)?)?,
            // `/\` is `//` to browsers.
            _ if there.starts_with('/') && !there.starts_with("/\\") => there,
            _ => return None,
        };
        if self.is_below(path) && path.len() == there.len() {
            return None;
        }
        let slash = if path.starts_with('/') { "" } else { "/" };
        let base = if self.is_below(path) { "" } else { &self.base };
        HeaderValue::from_bytes(format!("{base}{slash}{path}").as_bytes()).ok()
    }

    /// Returns the part of `rest` after the host, if the host means the sandbox.
    fn own_path<'a>(&self, scheme: &str, rest: &'a str) -> Option<&'a str> {
        let end = rest.find(['/', '?', '#', '\\']).unwrap_or(rest.len());
        let (host, path) = rest.split_at_checked(end)?;
        let port = if scheme.eq_ignore_ascii_case("https") {
            ":443"
        } else {
            ":80"
        };
        let bare = |host: &str| host.strip_suffix(port).unwrap_or(host).to_ascii_lowercase();
        let own = self.hosts.iter().any(|own| bare(own) == bare(host));
        own.then_some(path)
    }

    fn is_below(&self, path: &str) -> bool {
        let rest = path.strip_prefix(self.base.as_str());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '?', '#']))
    }

    /// Restricts a cookie to the sandbox's paths. Other sandboxes share the host, so that the
    /// `Domain` attribute is dropped.
    fn cookie(&self, cookie: &[u8]) -> Option<HeaderValue> {
        let mut attributes = cookie.split(|byte| *byte == b';');
        let mut written = attributes.next()?.to_vec();
        let mut has_path = false;
        for attribute in attributes {
            let (name, value) = name_and_value(attribute);
            if name.eq_ignore_ascii_case(b"domain") {
                continue;
            }
            written.push(b';');
            let is_path = name.eq_ignore_ascii_case(b"path");
            // Browsers ignore any other value and use the request's path.
            let is_absolute = value.starts_with(b"/");
            if is_path {
                // Browsers use the last `Path` of several (RFC 6265, 5.3).
                has_path = is_absolute;
            }
            if is_path && is_absolute {
                written.extend_from_slice(b" Path=");
                let below = str::from_utf8(value).is_ok_and(|path| self.is_below(path));
                written.extend_from_slice(if below { b"" } else { self.base.as_bytes() });
                written.extend_from_slice(value);
            } else {
                written.extend_from_slice(attribute);
            }
        }
        if !has_path && self.bare {
            // A browser would use the parent path, which other ports of the sandbox share.
            written.extend_from_slice(format!("; Path={}/", self.base).as_bytes());
        }
        HeaderValue::from_bytes(&written).ok()
    }
}

/// Removes headers that browsers apply to all sandboxes of the host.
pub fn remove_host_wide_headers(headers: &mut HeaderMap) {
    for name in HOST_WIDE {
        headers.remove(name);
    }
}

fn is_http(scheme: &str) -> bool {
    scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https")
}

fn name_and_value(attribute: &[u8]) -> (&[u8], &[u8]) {
    let mut parts = attribute.splitn(2, |byte| *byte == b'=');
    let name = parts.next().unwrap_or_default().trim_ascii();
    (name, parts.next().unwrap_or_default().trim_ascii())
}

#[cfg(test)]
mod tests;

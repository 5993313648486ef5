//! Tokens of browsers, in a cookie. Pure.
//!
//! A browser cannot send `Authorization` when it opens a page or a WebSocket. It sends its token
//! once in the query, to the host or the path of a sandbox, and afterwards in a cookie of that
//! host or path. The flags, the order and the limits are upstream's. Upstream's cookie belongs to
//! a path; this router accepts less from pages of other sandboxes' hosts.
//!
//! All pages of one host have one origin, whatever their paths: a cookie of a path is not
//! protected from pages of other sandboxes.

use bytes::Bytes;
use clap::ValueEnum;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri,
    header::{CACHE_CONTROL, COOKIE, LOCATION, ORIGIN, REFERER, REFERRER_POLICY, SET_COOKIE},
    uri::PathAndQuery,
};
use http_body_util::Full;
use percent_encoding::percent_decode_str;

use crate::{authz, rewrite};

/// Prefix of cookie names that a browser accepts only for the host that sets the cookie.
const HOST_ONLY: &str = "__Host-";
/// Header with the relation of the page that caused the request. No page can set `Sec-Fetch-*`.
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// Header with the use that the browser makes of the response.
const SEC_FETCH_DEST: HeaderName = HeaderName::from_static("sec-fetch-dest");

/// `SameSite` attribute: requests from pages of other sites in which a browser sends the cookie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SameSite {
    /// Only requests that open a page.
    #[default]
    Lax,
    /// No request.
    Strict,
    /// Every request.
    None,
}

/// Settings of the cookie.
#[derive(Clone, Debug)]
pub struct Browsers {
    /// Name of the cookie.
    pub cookie: String,
    /// Query parameter whose value becomes the cookie.
    pub parameter: Option<String>,
    pub same_site: SameSite,
    /// Browsers send the cookie only over HTTPS.
    pub secure: bool,
    /// Origins, besides the sandbox's own, whose pages may use the cookie; as `https://host`.
    pub origins: Vec<String>,
    /// The cookie belongs to the path of a sandbox, not to its host.
    pub of_paths: bool,
}

/// Settings that make no safe cookie.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(
        "--authz-cookie-name, --authz-cookie-query-param: {0:?} may contain only letters, digits and - _ . ~"
    )]
    Name(String),
    #[error(
        "--authz-cookie-name: {0:?} must begin with {HOST_ONLY}, or a sandbox could set the cookie for hosts of other sandboxes; for development, --authz-cookie-insecure allows any name"
    )]
    NotHostOnly(String),
    #[error(
        "--authz-cookie-name: {0:?} must not begin with {HOST_ONLY} without --domain: browsers reject such a cookie for a path"
    )]
    HostOnlyOfPath(String),
    #[error("--authz-cookie-samesite=none and --authz-cookie-insecure exclude each other")]
    NoneWithoutTls,
    #[error("--authz-cookie-allowed-origins: {0:?} is not scheme://host or scheme://host:port")]
    Origin(String),
}

/// Token of a browser, with the place in the request that held it.
#[derive(Debug, PartialEq, Eq)]
pub enum BrowserToken {
    InQuery(String),
    InCookie(String),
}

impl BrowserToken {
    /// Returns the token.
    pub fn token(&self) -> &str {
        match self {
            Self::InQuery(token) | Self::InCookie(token) => token,
        }
    }
}

impl Browsers {
    /// Checks that the settings make a safe cookie.
    pub fn check(&self) -> Result<(), Error> {
        let mut names = [Some(&self.cookie), self.parameter.as_ref()]
            .into_iter()
            .flatten();
        if let Some(name) = names.find(|name| !is_name(name)) {
            return Err(Error::Name(name.clone()));
        }
        let host_only = self.cookie.starts_with(HOST_ONLY);
        if self.of_paths && host_only {
            return Err(Error::HostOnlyOfPath(self.cookie.clone()));
        }
        if !self.of_paths && self.secure && !host_only {
            return Err(Error::NotHostOnly(self.cookie.clone()));
        }
        if self.same_site == SameSite::None && !self.secure {
            return Err(Error::NoneWithoutTls);
        }
        let mut origins = self.origins.iter();
        match origins.find(|origin| !is_origin(origin)) {
            Some(origin) => Err(Error::Origin(origin.clone())),
            None => Ok(()),
        }
    }

    /// Removes the token from a request and returns it.
    ///
    /// A sandbox that received the token could act as the client. As with upstream, `Authorization`
    /// takes precedence over the query, and the query over the cookie.
    pub fn take<B>(&self, request: &mut Request<B>) -> Option<BrowserToken> {
        let cookie = take_cookie(request.headers_mut(), &self.cookie);
        let name = self.parameter.as_deref();
        let parameter = name.and_then(|name| take_parameter(request.uri_mut(), name));
        if authz::bearer(request.headers()).is_some() {
            return None;
        }
        let token = parameter.map(BrowserToken::InQuery);
        token.or_else(|| cookie.map(BrowserToken::InCookie))
    }

    /// Reports whether the cookie authorizes this request to `host`.
    ///
    /// Browsers add the cookie to requests of any page. The page of another sandbox belongs to the
    /// same site, so that `SameSite` does not exclude it.
    pub fn may_use_cookie(
        &self,
        method: &Method,
        headers: &HeaderMap,
        host: Option<&HeaderValue>,
    ) -> bool {
        let header = |name: &HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        let site = header(&SEC_FETCH_SITE);
        if matches!(site, Some("same-origin" | "none")) {
            return true;
        }
        let host = host.and_then(|host| host.to_str().ok());
        if headers.contains_key(ORIGIN) {
            return header(&ORIGIN).is_some_and(|origin| self.allows_origin(origin, host));
        }
        // Old browsers send none of these headers for images and scripts. Upstream allows all such
        // requests.
        let opened = is_read(method) && header(&SEC_FETCH_DEST) == Some("document");
        let page = || header(&REFERER).and_then(origin_of);
        site.is_none() || opened || page().is_some_and(|page| self.allows_origin(&page, host))
    }

    /// Reports whether pages of this origin may use the cookie of `host`.
    fn allows_origin(&self, origin: &str, host: Option<&str>) -> bool {
        let origin = without_default_port(origin);
        let same = |other: &str| without_default_port(other).eq_ignore_ascii_case(origin);
        // A cookie with `Secure` came over HTTPS, even if a proxy terminated TLS.
        let schemes: &[&str] = if self.secure {
            &["https"]
        } else {
            &["https", "http"]
        };
        let own = |host: &str| {
            schemes
                .iter()
                .any(|scheme| same(&format!("{scheme}://{host}")))
        };
        host.is_some_and(own) || self.origins.iter().any(|other| same(other))
    }

    /// Returns a redirect that sets the cookie and removes the token from the URL.
    ///
    /// The token then stays in no history and reaches no other page. Returns `None` where a
    /// browser would not follow a redirect. `base` is the length of the path that names the
    /// sandbox, 0 where its host does. The caller has verified the token.
    pub fn cookie_redirect<B>(
        &self,
        token: &BrowserToken,
        request: &Request<B>,
        base: usize,
    ) -> Option<Response<Full<Bytes>>> {
        let BrowserToken::InQuery(token) = token else {
            return None;
        };
        let (uri, headers) = (request.uri(), request.headers());
        let followed = is_read(request.method()) && rewrite::upgrade(headers).is_none();
        if !followed || !token.bytes().all(is_in_cookies) {
            return None;
        }
        let path = uri.path().get(..base)?;
        let cookie = HeaderValue::from_str(&self.cookie_of(token, path)).ok()?;
        let mut address = address(uri);
        if base > 0 && uri.path().len() == base {
            // The cookie's path ends with a slash.
            address.insert(base, '/');
        }
        let address = HeaderValue::from_bytes(address.as_bytes()).ok()?;
        let mut response = Response::new(Full::default());
        *response.status_mut() = StatusCode::FOUND;
        response.headers_mut().extend([
            (SET_COOKIE, cookie),
            (LOCATION, address),
            (CACHE_CONTROL, HeaderValue::from_static("no-store")),
            (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        ]);
        Some(response)
    }

    /// Returns the `Set-Cookie` value of a session cookie; the token itself expires.
    fn cookie_of(&self, token: &str, path: &str) -> String {
        let secure = if self.secure { "; Secure" } else { "" };
        let same_site = match self.same_site {
            SameSite::Lax => "Lax",
            SameSite::Strict => "Strict",
            SameSite::None => "None",
        };
        let name = &self.cookie;
        format!("{name}={token}; Path={path}/; HttpOnly{secure}; SameSite={same_site}")
    }
}

fn is_read(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
}

fn is_name(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    !text.is_empty() && text.bytes().all(inner)
}

/// Reports whether a cookie's value may contain this byte (RFC 6265).
fn is_in_cookies(byte: u8) -> bool {
    byte.is_ascii_graphic() && !b"\",;\\".contains(&byte)
}

/// Removes all cookies of this name and returns the value of the first.
fn take_cookie(headers: &mut HeaderMap, name: &str) -> Option<String> {
    let (mut found, mut kept) = (Vec::new(), Vec::new());
    for pair in headers.get_all(COOKIE).iter().flat_map(pairs) {
        match pair.strip_prefix(name.as_bytes()) {
            Some([b'=', value @ ..]) => found.push(value),
            Some([]) => found.push(&[]),
            _ => kept.push(pair),
        }
    }
    let token = str::from_utf8(found.first()?)
        .unwrap_or_default()
        .to_owned();
    let kept = HeaderValue::from_bytes(&kept.join(&b"; "[..]));
    headers.remove(COOKIE);
    if let Ok(kept) = kept
        && !kept.is_empty()
    {
        headers.insert(COOKIE, kept);
    }
    Some(token).filter(|token| !token.is_empty())
}

fn pairs(header: &HeaderValue) -> impl Iterator<Item = &[u8]> {
    let pairs = header.as_bytes().split(|byte| *byte == b';');
    pairs
        .map(<[u8]>::trim_ascii)
        .filter(|pair| !pair.is_empty())
}

/// Removes all query parameters of this name and returns the value of the first.
///
/// The rest of the query keeps its bytes.
fn take_parameter(uri: &mut Uri, name: &str) -> Option<String> {
    let pairs = uri.query()?.split('&');
    let pairs = pairs.map(|pair| (pair, pair.split_once('=').unwrap_or((pair, ""))));
    let (found, kept): (Vec<_>, Vec<_>) = pairs.partition(|(_, (key, _))| decoded(key) == name);
    let (_, (_, value)) = found.first()?;
    let token = decoded(value);
    let kept: Vec<&str> = kept.into_iter().map(|(pair, _)| pair).collect();
    let mut rest = uri.path().to_owned();
    if !kept.is_empty() {
        rest.push('?');
        rest.push_str(&kept.join("&"));
    }
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = rest.parse().ok();
    // The remaining parts of a valid URI are a valid URI.
    *uri = Uri::from_parts(parts).unwrap_or_default();
    Some(token).filter(|token| !token.is_empty())
}

fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

/// Returns the URL's path and query as a reference to the same host: `//` and `/\` would begin
/// another host.
fn address(uri: &Uri) -> String {
    let address = uri.path_and_query().map_or("/", PathAndQuery::as_str);
    let elsewhere = address.get(1..).unwrap_or_default();
    if elsewhere.starts_with(['/', '\\']) {
        return format!("/.{address}");
    }
    address.to_owned()
}

/// Reports whether a text is exactly an origin, as browsers write it.
pub(crate) fn is_origin(text: &str) -> bool {
    origin_of(text).as_deref() == Some(text)
}

/// Returns the origin of a URL.
fn origin_of(address: impl AsRef<str>) -> Option<String> {
    let (scheme, rest) = address.as_ref().split_once("://")?;
    let host = rest.split(['/', '?', '#']).next()?;
    let fine = !scheme.is_empty() && !host.is_empty() && !host.contains('@');
    fine.then(|| format!("{scheme}://{host}"))
}

/// Returns an origin without the scheme's default port, which browsers leave out.
fn without_default_port(origin: &str) -> &str {
    let port = match origin.split_once("://") {
        Some((scheme, _)) if scheme.eq_ignore_ascii_case("https") => ":443",
        Some((scheme, _)) if scheme.eq_ignore_ascii_case("http") => ":80",
        _ => return origin,
    };
    origin.strip_suffix(port).unwrap_or(origin)
}

#[cfg(test)]
mod tests;

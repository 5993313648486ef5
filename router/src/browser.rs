//! Browsers cannot send `Authorization` when they open a page or a WebSocket. They show their token
//! once in the query, to the host or the path of a sandbox, and from then on in a cookie of that
//! host or path. The flags, the order and the limits are upstream's, whose cookie belongs to a
//! path; what a page of another sandbox' host may have a browser send is less. Pages of one host
//! are of one origin, whatever their paths: a cookie of a path is kept from no page of another
//! sandbox. Pure.

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

/// A browser takes no such cookie from a page but for that page's own host.
const HOST_ONLY: &str = "__Host-";
/// Whose page has had the request sent. No page can write these two.
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// What will become of the answer.
const SEC_FETCH_DEST: HeaderName = HeaderName::from_static("sec-fetch-dest");

/// Whether a browser sends the cookie where another site's page is what leads to the sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SameSite {
    /// To pages that it opens.
    #[default]
    Lax,
    /// Never.
    Strict,
    /// Always.
    None,
}

/// How browsers show tokens.
#[derive(Clone, Debug)]
pub struct Browsers {
    /// Name of the cookie.
    pub cookie: String,
    /// Parameter of the query that becomes the cookie.
    pub parameter: Option<String>,
    pub same_site: SameSite,
    /// The cookie is for HTTPS alone.
    pub secure: bool,
    /// Whose pages may use the cookie, beside the sandbox' own; as `https://host`.
    pub origins: Vec<String>,
    /// The cookie belongs to the paths of sandboxes, not to their hosts.
    pub of_paths: bool,
}

/// The settings make no safe cookie.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(
        "--authz-cookie-name, --authz-cookie-query-param: {0:?} has more in it than letters, digits and - _ . ~"
    )]
    Name(String),
    #[error(
        "--authz-cookie-name: {0:?} does not begin with {HOST_ONLY}, and so a sandbox could set it for the hosts of others; for development, --authz-cookie-insecure takes any name"
    )]
    NotHostOnly(String),
    #[error(
        "--authz-cookie-name: {0:?} begins with {HOST_ONLY}, and browsers take no such cookie for a path: without --domain, take another name"
    )]
    HostOnlyOfPath(String),
    #[error("--authz-cookie-samesite=none does not go with --authz-cookie-insecure")]
    NoneWithoutTls,
    #[error("--authz-cookie-allowed-origins: {0:?} is no scheme://host or scheme://host:port")]
    Origin(String),
}

/// A token, and where a browser has shown it.
#[derive(Debug, PartialEq, Eq)]
pub enum Shown {
    InQuery(String),
    InCookie(String),
}

impl Shown {
    /// The token.
    pub fn token(&self) -> &str {
        match self {
            Self::InQuery(token) | Self::InCookie(token) => token,
        }
    }
}

impl Browsers {
    /// Whether the cookie would be as safe as it can be.
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

    /// Takes the token out of a request: the sandbox could act by it as the client. As with upstream, `Authorization` goes before the query, and that before the cookie.
    pub fn take<B>(&self, request: &mut Request<B>) -> Option<Shown> {
        let cookie = take_cookie(request.headers_mut(), &self.cookie);
        let name = self.parameter.as_deref();
        let parameter = name.and_then(|name| take_parameter(request.uri_mut(), name));
        if authz::bearer(request.headers()).is_some() {
            return None;
        }
        let shown = parameter.map(Shown::InQuery);
        shown.or_else(|| cookie.map(Shown::InCookie))
    }

    /// Whether a cookie counts in this request to `host`. Browsers add it whoever's page asks, and the page of another sandbox is of the same site.
    pub fn may_use_cookie(
        &self,
        method: &Method,
        headers: &HeaderMap,
        host: Option<&HeaderValue>,
    ) -> bool {
        let said = |name: &HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        let site = said(&SEC_FETCH_SITE);
        if matches!(site, Some("same-origin" | "none")) {
            return true;
        }
        let host = host.and_then(|host| host.to_str().ok());
        if headers.contains_key(ORIGIN) {
            return said(&ORIGIN).is_some_and(|origin| self.knows(origin, host));
        }
        // Old browsers say nothing of images and scripts; upstream lets all of these through.
        let opened = is_read(method) && said(&SEC_FETCH_DEST) == Some("document");
        let page = || said(&REFERER).and_then(origin_of);
        site.is_none() || opened || page().is_some_and(|page| self.knows(&page, host))
    }

    /// Whether pages of that origin may use the cookie of `host`.
    fn knows(&self, origin: &str, host: Option<&str>) -> bool {
        let origin = without_default_port(origin);
        let same = |other: &str| without_default_port(other).eq_ignore_ascii_case(origin);
        // A cookie for HTTPS alone came by HTTPS, whoever took that off on the way.
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

    /// The answer to a good token in the query: the cookie, and the same address without the token, which then stays in no history and goes to no other page. `None` where a
    /// browser would not follow.
    /// `base` is the length of the path that names the sandbox, 0 where its host does.
    pub fn welcome<B>(
        &self,
        shown: &Shown,
        request: &Request<B>,
        base: usize,
    ) -> Option<Response<Full<Bytes>>> {
        let Shown::InQuery(token) = shown else {
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
            // The cookie is for what is below the path.
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

    /// It ends with the browser; the token has an end of its own.
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

/// What a cookie's value may hold: RFC 6265.
fn is_in_cookies(byte: u8) -> bool {
    byte.is_ascii_graphic() && !b"\",;\\".contains(&byte)
}

/// The value of a cookie, which the headers lose with all others of its name.
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

/// The value of a parameter, which the query loses with all others of its name. The rest stays as it was written.
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
    // A part of what was an address is one too.
    *uri = Uri::from_parts(parts).unwrap_or_default();
    Some(token).filter(|token| !token.is_empty())
}

fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

/// The address on the same host, whatever it looks like: `//` and `/\` begin another.
fn address(uri: &Uri) -> String {
    let address = uri.path_and_query().map_or("/", PathAndQuery::as_str);
    let elsewhere = address.get(1..).unwrap_or_default();
    if elsewhere.starts_with(['/', '\\']) {
        return format!("/.{address}");
    }
    address.to_owned()
}

/// Whether a text is an origin and nothing more, as browsers write it.
pub(crate) fn is_origin(text: &str) -> bool {
    origin_of(text).as_deref() == Some(text)
}

/// The origin of an address.
fn origin_of(address: impl AsRef<str>) -> Option<String> {
    let (scheme, rest) = address.as_ref().split_once("://")?;
    let host = rest.split(['/', '?', '#']).next()?;
    let fine = !scheme.is_empty() && !host.is_empty() && !host.contains('@');
    fine.then(|| format!("{scheme}://{host}"))
}

/// Browsers leave it out.
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

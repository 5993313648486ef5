//! Reads which sandbox a request is for: from upstream's `X-Sandbox-*` headers, a path below
//! `--path-routing-prefix`, or a host below `--domain`. Pure.

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, Uri, header};

use crate::{
    address::AddressPolicy,
    pathroute::{self, Route},
    refusal::Refusal,
};

/// Name of the sandbox.
pub const ID: HeaderName = HeaderName::from_static("x-sandbox-id");
/// UID of the Sandbox object, optional; the request is then for exactly that object.
pub const UID: HeaderName = HeaderName::from_static("x-sandbox-uid");
/// Namespace of the sandbox; without it, [`DEFAULT_NAMESPACE`].
pub const NAMESPACE: HeaderName = HeaderName::from_static("x-sandbox-namespace");
/// Port in the sandbox; without it, [`DEFAULT_PORT`].
pub const PORT: HeaderName = HeaderName::from_static("x-sandbox-port");
/// Address of the Pod, from the client. The router validates it, but uses the watch cache's
/// address.
pub const POD_IP: HeaderName = HeaderName::from_static("x-sandbox-pod-ip");
/// Seconds that the client waits for a response ([`crate::idle_timeout`]).
pub const TIMEOUT: HeaderName = HeaderName::from_static("x-sandbox-timeout");

/// Namespace if the client names none; upstream's.
pub const DEFAULT_NAMESPACE: &str = "default";
/// Port if the client names none; upstream's.
pub const DEFAULT_PORT: u16 = 8888;

/// Port of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub id: String,
    pub namespace: String,
    pub port: u16,
    /// UID of the Sandbox object, if the client names it. Only with its UID may a client reach an
    /// unclaimed Sandbox.
    pub uid: Option<String>,
}

/// Sandbox that a request names, and the source of the name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Named {
    /// The headers name the sandbox.
    ByHeaders(Target),
    /// The host names the sandbox. `X-Sandbox-*` headers are ignored: a page of a sandbox can set
    /// them.
    ByHost(Target),
    /// The host names the sandbox, and its `<sandbox>-<namespace>` has several dashes: [`choose`]
    /// finds the reading that exists.
    Joined { port: u16, text: String },
    /// The path names the sandbox, and the `X-Sandbox-*` headers do not contradict it.
    ByPath(Route),
}

/// Returns the prefix of paths that name sandboxes, if it applies to a request.
///
/// The path of a native gRPC call is its method, which may lie below the prefix. As with upstream,
/// headers name the target of such a call if they are present
/// (`TestGRPCPreservesMethodUnderBrowserPrefix`).
pub fn prefix_for<'a>(
    prefix: Option<&'a str>,
    headers: &HeaderMap,
    is_native_call: bool,
) -> Option<&'a str> {
    prefix.filter(|_| !is_native_call || !headers.contains_key(ID))
}

/// Reads which sandbox a request names. `domain` is in lower case.
///
/// A host takes precedence over a path: all paths of a sandbox's host belong to the sandbox.
pub fn read(
    uri: &Uri,
    headers: &HeaderMap,
    domain: Option<&str>,
    prefix: Option<&str>,
    policy: AddressPolicy,
) -> Result<Named, Refusal> {
    if let Some(domain) = domain
        && let Some(prefix) = prefix_below(&host_of(uri, headers, domain)?, domain)
    {
        return by_host(&prefix, domain);
    }
    if let Some(route) = prefix.and_then(|prefix| pathroute::read(prefix, uri.path())) {
        let route = route?;
        agree(&route.target, headers)?;
        return Ok(Named::ByPath(route));
    }
    by_headers(headers, policy).map(Named::ByHeaders)
}

/// Refuses headers that name another target than the path: a proxy in front of the router may have
/// authorized the request by its headers.
fn agree(target: &Target, headers: &HeaderMap) -> Result<(), Refusal> {
    let port = target.port.to_string();
    let ours = [
        (ID, &target.id),
        (NAMESPACE, &target.namespace),
        (PORT, &port),
    ];
    let agrees = |(name, ours): &(HeaderName, &String)| match single(headers, name) {
        Ok(None | Some("")) => true,
        Ok(Some(theirs)) => theirs == *ours,
        Err(()) => false,
    };
    match ours.iter().all(agrees) {
        true => Ok(()),
        false => Err(Refusal::PathContradicted),
    }
}

fn by_headers(headers: &HeaderMap, policy: AddressPolicy) -> Result<Target, Refusal> {
    let id = single(headers, &ID).map_err(|()| Refusal::SandboxFormat)?;
    let id = id.filter(|id| !id.is_empty()).ok_or(Refusal::NoSandbox)?;
    if !is_dns_label(id) {
        return Err(Refusal::SandboxFormat);
    }
    let namespace = single(headers, &NAMESPACE).map_err(|()| Refusal::NamespaceFormat)?;
    let namespace = namespace
        .filter(|namespace| !namespace.is_empty())
        .unwrap_or(DEFAULT_NAMESPACE);
    if !is_dns_label(namespace) {
        return Err(Refusal::NamespaceFormat);
    }
    let port = match single(headers, &PORT).map_err(|()| Refusal::PortFormat)? {
        None | Some("") => DEFAULT_PORT,
        Some(text) => port(text).ok_or(Refusal::PortFormat)?,
    };
    let address = single(headers, &POD_IP).map_err(|()| Refusal::AddressFormat)?;
    if let Some(text) = address.filter(|text| !text.is_empty()) {
        let address: IpAddr = text.parse().map_err(|_| Refusal::AddressFormat)?;
        if !policy.allows(address) {
            return Err(Refusal::AddressFormat);
        }
    }
    // A malformed UID matches no Sandbox, so that it needs no error of its own.
    let uid = single(headers, &UID).map_err(|()| Refusal::SandboxFormat)?;
    let uid = uid.filter(|uid| !uid.is_empty());
    Ok(Target {
        id: id.to_owned(),
        namespace: namespace.to_owned(),
        port,
        uid: uid.map(str::to_owned),
    })
}

/// Returns the value of a header. Two different values are an error: a proxy in front of the router
/// may have authorized the request by the other one.
pub(crate) fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, ()> {
    let mut all = headers.get_all(name).iter();
    let Some(first) = all.next() else {
        return Ok(None);
    };
    if all.any(|other| other != first) {
        return Err(());
    }
    first.to_str().map(Some).map_err(|_| ())
}

fn port(text: &str) -> Option<u16> {
    text.parse().ok().filter(|port| *port != 0)
}

/// Returns the request's host in lower case, without port and final dot; empty: no host.
fn host_of(uri: &Uri, headers: &HeaderMap, domain: &str) -> Result<String, Refusal> {
    // HTTP/2 and the absolute form carry the host in the URI, which takes precedence.
    let host = match uri.host() {
        Some(host) => host,
        None => {
            let host = single(headers, &header::HOST);
            host.map_err(|()| Refusal::HostFormat(domain.to_owned()))?
                .unwrap_or_default()
        }
    };
    // Only an IPv6 literal has more than one colon, and no IPv6 literal is below a domain.
    let host = host.split_once(':').map_or(host, |(host, _)| host);
    Ok(host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase())
}

fn prefix_below(host: &str, domain: &str) -> Option<String> {
    host.strip_suffix(domain)?
        .strip_suffix('.')
        .map(str::to_owned)
}

fn by_host(prefix: &str, domain: &str) -> Result<Named, Refusal> {
    let wrong = || Refusal::HostFormat(domain.to_owned());
    let (number, rest) = prefix.split_once('-').ok_or_else(wrong)?;
    // No sign and no leading zero: a port has one spelling.
    let digits = number.bytes().all(|byte| byte.is_ascii_digit()) && !number.starts_with('0');
    let port = port(number).filter(|_| digits).ok_or_else(wrong)?;
    let target = |id: &str, namespace: &str| {
        Named::ByHost(Target {
            id: id.to_owned(),
            namespace: namespace.to_owned(),
            port,
            uid: None,
        })
    };
    if let Some((id, namespace)) = rest.split_once('.') {
        let fine = is_dns_label(id) && is_dns_label(namespace);
        return fine.then(|| target(id, namespace)).ok_or_else(wrong);
    }
    match readings(rest).as_slice() {
        [] => Err(wrong()),
        [(id, namespace)] => Ok(target(id, namespace)),
        _ => Ok(Named::Joined {
            port,
            text: rest.to_owned(),
        }),
    }
}

/// Returns all readings of `<sandbox>-<namespace>`.
fn readings(text: &str) -> Vec<(&str, &str)> {
    text.match_indices('-')
        .map(|(at, _)| (&text[..at], &text[at + 1..]))
        .filter(|(id, namespace)| is_dns_label(id) && is_dns_label(namespace))
        .collect()
}

/// Returns the sandbox that a joined host means: the only reading that exists. `exists` takes
/// namespace and name.
pub fn choose(
    port: u16,
    text: &str,
    domain: &str,
    exists: impl Fn(&str, &str) -> bool,
) -> Result<Target, Refusal> {
    let mut found = readings(text)
        .into_iter()
        .filter(|(id, namespace)| exists(namespace, id));
    let (id, namespace) = found
        .next()
        .ok_or_else(|| Refusal::Unreachable(text.to_owned()))?;
    if found.next().is_some() {
        return Err(Refusal::HostAmbiguous(domain.to_owned()));
    }
    Ok(Target {
        id: id.to_owned(),
        namespace: namespace.to_owned(),
        port,
        uid: None,
    })
}

/// Reports whether a text is an RFC 1123 label, which Kubernetes requires of namespaces' names and
/// upstream's router of sandboxes'.
pub fn is_dns_label(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.len() <= 63
        && bytes.first().is_some_and(|byte| inner(*byte))
        && bytes.last().is_some_and(|byte| inner(*byte))
        && bytes.iter().all(|byte| inner(*byte) || *byte == b'-')
}

#[cfg(test)]
mod tests;

//! Which sandbox a request is for: upstream's `X-Sandbox-*` headers, a path below
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
/// UID of the Sandbox object, optional: then exactly that one is meant.
pub const UID: HeaderName = HeaderName::from_static("x-sandbox-uid");
/// Namespace of the sandbox, else [`DEFAULT_NAMESPACE`].
pub const NAMESPACE: HeaderName = HeaderName::from_static("x-sandbox-namespace");
/// Port in the sandbox, else [`DEFAULT_PORT`].
pub const PORT: HeaderName = HeaderName::from_static("x-sandbox-port");
/// Address of the Pod as the client knows it. It is checked, and the watch cache's is used.
pub const POD_IP: HeaderName = HeaderName::from_static("x-sandbox-pod-ip");
/// How many seconds the client waits for an answer ([`crate::silence`]).
pub const TIMEOUT: HeaderName = HeaderName::from_static("x-sandbox-timeout");

/// Namespace where the client names none; upstream's.
pub const DEFAULT_NAMESPACE: &str = "default";
/// Port where the client names none; upstream's.
pub const DEFAULT_PORT: u16 = 8888;

/// A port of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub id: String,
    pub namespace: String,
    pub port: u16,
    /// The client means this very object, and may therefore reach a sandbox that nobody has claimed.
    pub uid: Option<String>,
}

/// What a request names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Named {
    /// By headers.
    ByHeaders(Target),
    /// By its host. Its `X-Sandbox-*` headers count for nothing: a page that a sandbox serves can set them.
    ByHost(Target),
    /// By a host whose `<sandbox>-<namespace>` has several dashes: [`choose`] says which is meant.
    Joined { port: u16, text: String },
    /// By its path, which its `X-Sandbox-*` headers do not contradict.
    ByPath(Route),
}

/// The prefix of paths that name sandboxes, where it counts. A native call's path is its method,
/// which may lie below the prefix: such a call goes by its headers if it has them, as with upstream
/// (`TestGRPCPreservesMethodUnderBrowserPrefix`).
pub fn prefix_for<'a>(
    prefix: Option<&'a str>,
    headers: &HeaderMap,
    is_native_call: bool,
) -> Option<&'a str> {
    prefix.filter(|_| !is_native_call || !headers.contains_key(ID))
}

/// Reads what a request names. `domain` is in lower case. A host goes before a path: every path of a
/// sandbox' host is the sandbox' own.
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

/// Refuses headers that name another target than the path does: whoever checked the request before
/// us may have looked at them.
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
    // A UID that is none fits no sandbox, which is answer enough.
    let uid = single(headers, &UID).map_err(|()| Refusal::SandboxFormat)?;
    let uid = uid.filter(|uid| !uid.is_empty());
    Ok(Target {
        id: id.to_owned(),
        namespace: namespace.to_owned(),
        port,
        uid: uid.map(str::to_owned),
    })
}

/// The value of a header. Two different ones are an error: whoever checked the request before us may
/// have looked at the other.
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

/// The request's host in lower case, without port and final dot; empty when there is none.
fn host_of(uri: &Uri, headers: &HeaderMap, domain: &str) -> Result<String, Refusal> {
    // HTTP/2 and the absolute form carry it in the URI, which then counts alone.
    let host = match uri.host() {
        Some(host) => host,
        None => {
            let host = single(headers, &header::HOST);
            host.map_err(|()| Refusal::HostFormat(domain.to_owned()))?
                .unwrap_or_default()
        }
    };
    // Only an IPv6 literal has more than one colon, and it is below no domain.
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
    // No sign: one host, one target.
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

/// All ways to read `<sandbox>-<namespace>`.
fn readings(text: &str) -> Vec<(&str, &str)> {
    text.match_indices('-')
        .map(|(at, _)| (&text[..at], &text[at + 1..]))
        .filter(|(id, namespace)| is_dns_label(id) && is_dns_label(namespace))
        .collect()
}

/// The sandbox that a joined host means: the only one that exists. `exists` takes namespace and name.
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

/// RFC 1123 label: what Kubernetes asks of a namespace's name, and upstream's router of a sandbox's.
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

//! Routing of requests of the REST API, and their parameters. Pure.
//!
//! Upstream's stored sources end before its 1.0.10: Torpor has named the calls by `POST` and those
//! with `stat` and `recursive`. See docs/decisions/2026-11-26-sandboxd-1-0-12.md.

use std::{borrow::Cow, time::Duration};

use http::{HeaderMap, Method, header};
use torpor_daemon::go_flags::duration;

use crate::{busy, path, root::Existing, sandboxd::refusal::Refusal};

const METHODS_OF_FILES: &str = "DELETE, GET, HEAD, POST, PUT";

/// Call of the REST API. Paths are decoded and not checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// Read a file or list a directory.
    Get(String),
    /// Describe a file or directory, as in a listing.
    Stat(String),
    /// List all entries below a directory.
    Tree(String),
    Put {
        path: String,
        mode: u32,
        existing: Existing,
    },
    MakeDirectory {
        path: String,
        mode: u32,
    },
    Move(Transfer),
    Copy(Transfer),
    /// Unpack a tar archive into a directory.
    Extract(String),
    Delete {
        path: String,
        /// Parameter; an invalid one is refused after the path has been checked, as in upstream.
        recursive: Result<bool, Refusal>,
    },
    Health,
    Metadata,
    /// Return the time for which the sandbox is marked as busy.
    Busy,
    /// Mark the sandbox as busy for this time.
    SetBusy(Duration),
    /// Remove the mark.
    ClearBusy,
}

/// Parameters of a move or copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    pub from: String,
    pub to: String,
    pub existing: Existing,
}

/// Returns the call of a request. A path is decoded once, including encoded slashes.
pub fn route(
    method: &Method,
    path: &str,
    query: Option<&str>,
    headers: &HeaderMap,
) -> Result<Route, Refusal> {
    let reads = matches!(*method, Method::GET | Method::HEAD);
    if let Some(path) = path.strip_prefix("/v1/files/") {
        let path = path::decode(path);
        return match *method {
            Method::PUT => put(path, query, headers),
            Method::POST => post(path, query),
            Method::DELETE => {
                let recursive = truth("recursive", query, false);
                Ok(Route::Delete { path, recursive })
            }
            _ if reads => get(path, query),
            _ => Err(Refusal::Method(METHODS_OF_FILES)),
        };
    }
    if path == "/v1/busy" {
        return match *method {
            Method::PUT => busy_for(parameter(query, "for").as_deref()).map(Route::SetBusy),
            Method::DELETE => Ok(Route::ClearBusy),
            _ if reads => Ok(Route::Busy),
            _ => Err(Refusal::Method("DELETE, GET, HEAD, PUT")),
        };
    }
    let route = match path {
        "/v1/health" => Route::Health,
        "/v1/metadata" => Route::Metadata,
        _ => return Err(Refusal::NoRoute),
    };
    match reads {
        true => Ok(route),
        false => Err(Refusal::Method("GET, HEAD")),
    }
}

fn get(path: String, query: Option<&str>) -> Result<Route, Refusal> {
    let stat = truth("stat", query, false)?;
    let recursive = truth("recursive", query, false)?;
    match (stat, recursive) {
        (false, false) => Ok(Route::Get(path)),
        (true, false) => Ok(Route::Stat(path)),
        (false, true) => Ok(Route::Tree(path)),
        (true, true) => Err(Refusal::Invalid(
            "stat and recursive exclude each other".to_owned(),
        )),
    }
}

/// Reports whether a request has `If-None-Match: *`, HTTP's condition that nothing is replaced (RFC
/// 9110, 13.1.2).
pub fn has_condition(headers: &HeaderMap) -> bool {
    let tags = headers.get(header::IF_NONE_MATCH);
    tags.is_some_and(|tags| tags.as_bytes().trim_ascii() == b"*")
}

fn put(path: String, query: Option<&str>, headers: &HeaderMap) -> Result<Route, Refusal> {
    let mode = mode(parameter(query, "mode").as_deref(), 0o644)?;
    let overwrite = truth("overwrite", query, true)?;
    let existing = existing(overwrite && !has_condition(headers));
    Ok(Route::Put {
        path,
        mode,
        existing,
    })
}

fn post(path: String, query: Option<&str>) -> Result<Route, Refusal> {
    match parameter(query, "op").as_deref() {
        Some("mkdir") => {
            let mode = mode(parameter(query, "mode").as_deref(), 0o755)?;
            Ok(Route::MakeDirectory { path, mode })
        }
        Some("move") => transfer(path, query).map(Route::Move),
        Some("copy") => transfer(path, query).map(Route::Copy),
        Some("extract") => Ok(Route::Extract(path)),
        other => Err(Refusal::Invalid(format!(
            "op {:?} must be mkdir, move, copy or extract",
            other.unwrap_or_default()
        ))),
    }
}

fn transfer(from: String, query: Option<&str>) -> Result<Transfer, Refusal> {
    let to = parameter(query, "to").map(Cow::into_owned);
    let to = to.ok_or_else(|| Refusal::Invalid("to: the new path is missing".to_owned()))?;
    let existing = existing(truth("overwrite", query, false)?);
    Ok(Transfer { from, to, existing })
}

fn existing(overwrite: bool) -> Existing {
    match overwrite {
        true => Existing::Replace,
        false => Existing::Keep,
    }
}

/// Returns the first value of a name in a query; an empty value counts as none.
fn parameter<'a>(query: Option<&'a str>, name: &str) -> Option<Cow<'a, str>> {
    let pairs = query?
        .split('&')
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let value = pairs.into_iter().find(|(key, _)| *key == name)?.1;
    // Forms encode a space as a plus sign, and a plus sign as %2B.
    let value = value.replace('+', " ");
    let value = percent_encoding::percent_decode_str(&value).decode_utf8_lossy();
    (!value.is_empty()).then(|| Cow::Owned(value.into_owned()))
}

/// Parses permission bits such as `0644`: three octal digits after a zero.
fn mode(text: Option<&str>, default: u32) -> Result<u32, Refusal> {
    let Some(text) = text else {
        return Ok(default);
    };
    let octal =
        |digits: &str| digits.len() == 3 && digits.bytes().all(|b| matches!(b, b'0'..=b'7'));
    let digits = text.strip_prefix('0').filter(|digits| octal(digits));
    let mode = digits.and_then(|digits| u32::from_str_radix(digits, 8).ok());
    mode.ok_or_else(|| Refusal::Invalid(format!("mode {text:?} must match ^0[0-7]{{3}}$")))
}

/// Parses a boolean in Go's syntax.
fn truth(name: &str, query: Option<&str>, default: bool) -> Result<bool, Refusal> {
    match parameter(query, name).as_deref() {
        None => Ok(default),
        Some("0" | "f" | "F" | "false" | "FALSE" | "False") => Ok(false),
        Some("1" | "t" | "T" | "true" | "TRUE" | "True") => Ok(true),
        Some(text) => Err(Refusal::Invalid(format!(
            "{name} {text:?} must be a boolean"
        ))),
    }
}

/// Parses the parameter `for`, a duration in Go's syntax: `for=90s`.
fn busy_for(text: Option<&str>) -> Result<Duration, Refusal> {
    let Some(text) = text else {
        return Ok(busy::DEFAULT);
    };
    let allowed = Duration::from_secs(1)..=busy::LONGEST;
    let time = duration(text).ok().filter(|time| allowed.contains(time));
    time.ok_or_else(|| {
        Refusal::Invalid(format!(
            "for {text:?} must be a duration from 1s to 24h, such as 90s"
        ))
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use rstest::rstest;

    use super::*;

    fn asked(method: &Method, target: &str) -> Result<Route, Refusal> {
        let (path, query) = match target.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (target, None),
        };
        route(method, path, query, &HeaderMap::new())
    }

    fn put(path: &str, mode: u32, existing: Existing) -> Route {
        let path = path.to_owned();
        Route::Put {
            path,
            mode,
            existing,
        }
    }

    fn transfer(from: &str, to: &str, existing: Existing) -> Transfer {
        let (from, to) = (from.to_owned(), to.to_owned());
        Transfer { from, to, existing }
    }

    fn delete(path: &str, recursive: bool) -> Route {
        let (path, recursive) = (path.to_owned(), Ok(recursive));
        Route::Delete { path, recursive }
    }

    #[rstest]
    #[case("GET", "/v1/files/a%2Fb", Ok(Route::Get("a/b".into())))]
    #[case("HEAD", "/v1/files/", Ok(Route::Get("".into())))]
    #[case("GET", "/v1/files/a?stat=true", Ok(Route::Stat("a".into())))]
    #[case("HEAD", "/v1/files/a?stat=1&recursive=0", Ok(Route::Stat("a".into())))]
    #[case("GET", "/v1/files/?recursive=true", Ok(Route::Tree("".into())))]
    #[case(
        "PUT",
        "/v1/files/%2E%2E/a%00",
        Ok(put("../a\0", 0o644, Existing::Replace))
    )]
    #[case(
        "PUT",
        "/v1/files/a?mode=0755&overwrite=false",
        Ok(put("a", 0o755, Existing::Keep))
    )]
    #[case("DELETE", "/v1/files/%252e", Ok(delete("%2e", false)))]
    #[case("DELETE", "/v1/files/a?recursive=True", Ok(delete("a", true)))]
    #[case("POST", "/v1/files/a?op=mkdir", Ok(Route::MakeDirectory { path: "a".into(), mode: 0o755 }))]
    #[case("POST", "/v1/files/a?op=mkdir&mode=0700", Ok(Route::MakeDirectory { path: "a".into(), mode: 0o700 }))]
    #[case(
        "POST",
        "/v1/files/a?op=move&to=b%2Fc%20d+e%2B",
        Ok(Route::Move(transfer("a", "b/c d e+", Existing::Keep)))
    )]
    #[case(
        "POST",
        "/v1/files/a?op=copy&to=b&overwrite=true",
        Ok(Route::Copy(transfer("a", "b", Existing::Replace)))
    )]
    #[case("POST", "/v1/files/a?op=extract", Ok(Route::Extract("a".into())))]
    #[case("GET", "/v1/health", Ok(Route::Health))]
    #[case("HEAD", "/v1/metadata", Ok(Route::Metadata))]
    #[case("PUT", "/v1/busy?for=90s", Ok(Route::SetBusy(Duration::from_secs(90))))]
    #[case("DELETE", "/v1/busy", Ok(Route::ClearBusy))]
    #[case("HEAD", "/v1/busy", Ok(Route::Busy))]
    #[case("POST", "/v1/busy", Err(Refusal::Method("DELETE, GET, HEAD, PUT")))]
    #[case("PATCH", "/v1/files/a", Err(Refusal::Method(METHODS_OF_FILES)))]
    #[case("PUT", "/v1/health", Err(Refusal::Method("GET, HEAD")))]
    #[case("GET", "/v1/files", Err(Refusal::NoRoute))]
    #[case("GET", "/", Err(Refusal::NoRoute))]
    fn a_request_is_one_call_or_none(
        #[case] method: Method,
        #[case] target: &str,
        #[case] expected: Result<Route, Refusal>,
    ) {
        assert_eq!(asked(&method, target), expected);
    }

    #[rstest]
    #[case("GET", "/v1/files/a?stat=maybe")]
    #[case("GET", "/v1/files/a?stat=true&recursive=true")]
    #[case("GET", "/v1/files/a?recursive=tRUE")]
    #[case("PUT", "/v1/files/a?mode=0999")]
    #[case("PUT", "/v1/files/a?mode=777")]
    #[case("PUT", "/v1/files/a?mode=01777")]
    #[case("PUT", "/v1/files/a?mode=0%2B77")]
    #[case("PUT", "/v1/files/a?overwrite=2")]
    #[case("POST", "/v1/files/a")]
    #[case("POST", "/v1/files/a?op=remove")]
    #[case("POST", "/v1/files/a?op=mkdir&mode=4755")]
    #[case("POST", "/v1/files/a?op=move")]
    #[case("POST", "/v1/files/a?op=copy&to=")]
    #[case("POST", "/v1/files/a?op=copy&to=b&overwrite=x")]
    fn a_wrong_parameter_is_refused(#[case] method: Method, #[case] target: &str) {
        assert!(matches!(asked(&method, target), Err(Refusal::Invalid(_))));
    }

    #[rstest]
    #[case("*", Existing::Keep)]
    #[case(" * ", Existing::Keep)]
    #[case("\"tag\"", Existing::Replace)]
    fn if_none_match_prevents_a_replacement(
        #[case] tags: &'static str,
        #[case] existing: Existing,
    ) {
        let tags = HeaderValue::from_static(tags);
        let headers = HeaderMap::from_iter([(header::IF_NONE_MATCH, tags)]);
        let asked = route(
            &Method::PUT,
            "/v1/files/a",
            Some("overwrite=true"),
            &headers,
        );
        assert_eq!(asked, Ok(put("a", 0o644, existing)));
    }

    #[rstest]
    #[case(None, Some(60))]
    #[case(Some("90s"), Some(90))]
    #[case(Some("24h"), Some(86_400))]
    #[case(Some("24h1s"), None)]
    #[case(Some("0"), None)]
    #[case(Some("500ms"), None)]
    #[case(Some("-5s"), None)]
    #[case(Some("60"), None)]
    #[case(Some("for ever"), None)]
    fn the_time_of_a_busy_mark_is_limited(
        #[case] text: Option<&str>,
        #[case] seconds: Option<u64>,
    ) {
        assert_eq!(busy_for(text).ok().map(|time| time.as_secs()), seconds);
    }

    #[rstest]
    #[case(None, None)]
    #[case(Some("mode=0755"), Some("0755"))]
    #[case(Some("a=b&mode=%30644&mode=0000"), Some("0644"))]
    #[case(Some("mode"), None)]
    #[case(Some("mode="), None)]
    #[case(Some("xmode=1"), None)]
    fn a_parameter_is_the_first_of_its_name(
        #[case] query: Option<&str>,
        #[case] expected: Option<&str>,
    ) {
        assert_eq!(parameter(query, "mode").as_deref(), expected);
    }

    #[rstest]
    #[case("for=%zz", Some("%zz"))]
    #[case("for=a%20b", Some("a b"))]
    fn a_value_is_decoded_once(#[case] query: &str, #[case] expected: Option<&str>) {
        assert_eq!(parameter(Some(query), "for").as_deref(), expected);
    }
}

//! Routing of requests of the legacy API. Pure.

use http::Method;

use crate::{path::decode, refusal::Refusal};

/// Call of the legacy API. Paths are decoded and not checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    Health,
    Execute,
    Upload,
    Download(String),
    List(String),
    Exists(String),
}

/// Returns the call of a request.
///
/// A file's path is decoded twice, as in upstream (once in its framework and once in its own
/// code), so that clients may encode it once or twice.
pub fn route(method: &Method, raw_path: &str) -> Result<Route, Refusal> {
    let path = decode(raw_path);
    // Clients normalize "/list/." to "/list".
    let below = |prefix: &str| match path.strip_prefix(prefix) {
        Some(rest) => Some(decode(rest)),
        None => (prefix.strip_suffix('/') == Some(path.as_ref())).then(String::new),
    };
    let (allowed, route) = if path == "/" {
        (Method::GET, Route::Health)
    } else if path == "/execute" {
        (Method::POST, Route::Execute)
    } else if path == "/upload" {
        (Method::POST, Route::Upload)
    } else if let Some(file) = below("/download/") {
        (Method::GET, Route::Download(file))
    } else if let Some(file) = below("/list/") {
        (Method::GET, Route::List(file))
    } else if let Some(file) = below("/exists/") {
        (Method::GET, Route::Exists(file))
    } else {
        return Err(Refusal::NoRoute);
    };
    if *method == allowed {
        Ok(route)
    } else {
        Err(Refusal::Method(allowed))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("GET", "/", Ok(Route::Health))]
    #[case("POST", "/execute", Ok(Route::Execute))]
    #[case("POST", "/upload", Ok(Route::Upload))]
    #[case("GET", "/download/a%2Fb.txt", Ok(Route::Download("a/b.txt".into())))]
    #[case("GET", "/download/a/b.txt", Ok(Route::Download("a/b.txt".into())))]
    #[case("GET", "/download/%252e%252e%252fetc", Ok(Route::Download("../etc".into())))]
    #[case("GET", "/download/100%2525", Ok(Route::Download("100%".into())))]
    #[case("GET", "/list/", Ok(Route::List("".into())))]
    #[case("GET", "/list/%2F", Ok(Route::List("/".into())))]
    #[case("GET", "/exists/%C3%A4%00", Ok(Route::Exists("ä\0".into())))]
    #[case("GET", "/nothing", Err(Refusal::NoRoute))]
    #[case("GET", "/list", Ok(Route::List("".into())))]
    #[case("GET", "/lists", Err(Refusal::NoRoute))]
    #[case("GET", "/execute", Err(Refusal::Method(Method::POST)))]
    #[case("DELETE", "/download/a", Err(Refusal::Method(Method::GET)))]
    fn a_request_is_one_call_or_none(
        #[case] method: Method,
        #[case] path: &str,
        #[case] expected: Result<Route, Refusal>,
    ) {
        assert_eq!(route(&method, path), expected);
    }
}

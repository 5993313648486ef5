//! Requests that a browser sends because the page of another origin asked it to. Pure.

use http::{HeaderMap, HeaderName, Method};

/// Whose page has had the request sent. Browsers set it, and no page can (W3C Fetch Metadata).
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The page of another origin has had a request sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a page of another origin may not send this")]
pub struct Foreign;

/// Refuses a `POST` that the page of another origin has had sent. Of the methods by which the APIs
/// change something, browsers send this one alone without asking first.
pub fn check(method: &Method, headers: &HeaderMap) -> Result<(), Foreign> {
    let mut sites = headers.get_all(SEC_FETCH_SITE).iter();
    let foreign = sites.any(|site| matches!(site.as_bytes(), b"cross-site" | b"same-site"));
    match *method == Method::POST && foreign {
        true => Err(Foreign),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(Method::POST, Some("cross-site"), false)]
    #[case(Method::POST, Some("same-site"), false)]
    #[case(Method::POST, Some("same-origin"), true)]
    #[case(Method::POST, Some("none"), true)]
    #[case(Method::POST, None, true)]
    #[case(Method::GET, Some("cross-site"), true)]
    fn pages_of_other_origins_change_nothing(
        #[case] method: Method,
        #[case] site: Option<&'static str>,
        #[case] allowed: bool,
    ) {
        let site = site.map(|site| (SEC_FETCH_SITE, HeaderValue::from_static(site)));
        let headers = HeaderMap::from_iter(site);
        assert_eq!(check(&method, &headers).is_ok(), allowed);
    }
}

//! Check for requests of a browser that a page of another origin caused. Pure.

use http::{HeaderMap, HeaderName, Method};

/// Header with the relation of the requesting page to this origin. Browsers set it, and pages
/// cannot (W3C Fetch Metadata).
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Request of a page of another origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a page of another origin may not send this")]
pub struct Foreign;

/// Refuses a `POST` that a page of another origin caused.
///
/// `POST` is the only method of a change that browsers send without a preflight request.
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

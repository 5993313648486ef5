//! Error responses of the router itself.
//!
//! Clients parse them. The status codes, and the texts that upstream's router has too, are
//! upstream's, letter for letter.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;

/// Reason why the router refused a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("X-Sandbox-ID header is required.")]
    NoSandbox,
    #[error("Invalid sandbox ID format.")]
    SandboxFormat,
    #[error("Invalid namespace format.")]
    NamespaceFormat,
    #[error("Invalid port format.")]
    PortFormat,
    #[error("Invalid target IP address.")]
    AddressFormat,
    /// gRPC has no default port.
    #[error("X-Sandbox-Port header is required for gRPC.")]
    NoPort,
    #[error("Invalid grpc-timeout format.")]
    TimeoutFormat,
    #[error("Path-routed request must have the form <prefix>/<namespace>/<id>/<port>/...")]
    PathFormat,
    #[error("Invalid percent-encoding in path.")]
    PathEncoding,
    /// Torpor's: upstream ignores the headers and uses the path.
    #[error("X-Sandbox-* headers contradict the path.")]
    PathContradicted,
    /// Torpor's: the host is below `--domain` and names no sandbox.
    #[error(
        "Invalid host format; expected <port>-<sandbox>-<namespace>.{0} or <port>-<sandbox>.<namespace>.{0}."
    )]
    HostFormat(String),
    /// Torpor's: `<sandbox>-<namespace>` has two readings, and both sandboxes exist.
    #[error("Ambiguous host; use <port>-<sandbox>.<namespace>.{0}.")]
    HostAmbiguous(String),
    #[error("unauthenticated")]
    Unauthenticated,
    /// Text of the Python router.
    #[error("Missing or invalid Authorization header.")]
    NoBearer,
    /// Text of the Python router.
    #[error("Invalid token.")]
    WrongToken,
    #[error("forbidden")]
    Forbidden,
    /// Upstream's too: the token was in a cookie, and a page of another origin caused the request.
    #[error("origin not allowed for cookie-authenticated request")]
    ForeignOrigin,
    /// The token could not be reviewed; the log has the reason.
    #[error("tokenreview: the apiserver could not be asked")]
    ReviewFailed,
    #[error("Could not connect to the backend sandbox: {0}")]
    Unreachable(String),
    /// This and the following variants are Torpor's.
    #[error(
        "Sandbox {0} is suspended. Set spec.operatingMode to Running, or annotate it with torpor.dev/resume-on-request: \"true\"."
    )]
    Suspended(String),
    #[error("Sandbox {0} is suspended and could not be resumed: {1}")]
    NotResumed(String, String),
    #[error("Sandbox {0} is being resumed and did not become ready in time.")]
    ResumeTimeout(String),
    #[error("Too many requests wait for sandboxes that are not ready.")]
    TooManyHeld,
    #[error("Too many WebSockets and gRPC calls are open.")]
    TooManyOpen,
    #[error("Too many requests are under way to sandbox {0}.")]
    TooManyRequests(String),
    #[error("Too many tokens wait to be checked.")]
    TooManyReviews,
    /// Only of a gRPC call.
    #[error("The deadline of the call has passed.")]
    TooLate,
    #[error("Request body too large.")]
    BodyTooLarge,
    /// The body of a gRPC-Web call is not base64.
    #[error("The body of the call is not base64.")]
    NotBase64,
    #[error("Method not allowed.")]
    Method,
}

impl Refusal {
    /// Returns the status code of the response.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::NoSandbox
            | Self::SandboxFormat
            | Self::NamespaceFormat
            | Self::PortFormat
            | Self::AddressFormat
            | Self::NoPort
            | Self::TimeoutFormat
            | Self::PathFormat
            | Self::PathEncoding
            | Self::PathContradicted
            | Self::NotBase64
            | Self::HostFormat(_)
            | Self::HostAmbiguous(_) => StatusCode::BAD_REQUEST,
            Self::Unauthenticated | Self::NoBearer | Self::WrongToken => StatusCode::UNAUTHORIZED,
            Self::Forbidden | Self::ForeignOrigin => StatusCode::FORBIDDEN,
            Self::ReviewFailed => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Unreachable(_) => StatusCode::BAD_GATEWAY,
            Self::Suspended(_)
            | Self::NotResumed(..)
            | Self::TooManyHeld
            | Self::TooManyOpen
            | Self::TooManyRequests(_)
            | Self::TooManyReviews => StatusCode::SERVICE_UNAVAILABLE,
            Self::ResumeTimeout(_) | Self::TooLate => StatusCode::GATEWAY_TIMEOUT,
            Self::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
        }
    }

    /// Returns a CamelCase reason for logs and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NoSandbox => "NoSandbox",
            Self::SandboxFormat => "SandboxFormat",
            Self::NamespaceFormat => "NamespaceFormat",
            Self::PortFormat => "PortFormat",
            Self::AddressFormat => "AddressFormat",
            Self::NoPort => "NoPort",
            Self::TimeoutFormat => "TimeoutFormat",
            Self::PathFormat => "PathFormat",
            Self::PathEncoding => "PathEncoding",
            Self::PathContradicted => "PathContradicted",
            Self::HostFormat(_) => "HostFormat",
            Self::HostAmbiguous(_) => "HostAmbiguous",
            Self::Unauthenticated => "Unauthenticated",
            Self::NoBearer => "NoBearer",
            Self::WrongToken => "WrongToken",
            Self::Forbidden => "Forbidden",
            Self::ForeignOrigin => "ForeignOrigin",
            Self::ReviewFailed => "ReviewFailed",
            Self::Unreachable(_) => "Unreachable",
            Self::Suspended(_) => "Suspended",
            Self::NotResumed(..) => "NotResumed",
            Self::ResumeTimeout(_) => "ResumeTimeout",
            Self::TooManyHeld => "TooManyHeld",
            Self::TooManyOpen => "TooManyOpen",
            Self::TooManyRequests(_) => "TooManyRequests",
            Self::TooManyReviews => "TooManyReviews",
            Self::TooLate => "TooLate",
            Self::BodyTooLarge => "BodyTooLarge",
            Self::NotBase64 => "NotBase64",
            Self::Method => "Method",
        }
    }

    /// Returns the delay after which the same request may succeed, if waiting alone can help.
    pub fn retry(&self) -> Option<Duration> {
        match self {
            Self::NotResumed(..)
            | Self::ResumeTimeout(_)
            | Self::TooManyHeld
            | Self::TooManyOpen
            | Self::TooManyRequests(_)
            | Self::TooManyReviews => Some(Duration::from_secs(1)),
            _ => None,
        }
    }

    /// Returns the response, `{"detail": …}`, in the form of upstream's routers.
    pub fn response(&self) -> Response<Full<Bytes>> {
        json_response(
            self.status(),
            &serde_json::json!({"detail": self.to_string()}),
            self.retry(),
        )
    }
}

/// Returns a JSON response of the router itself.
pub fn json_response(
    status: StatusCode,
    body: &serde_json::Value,
    retry: Option<Duration>,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body.to_string())));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    if let Some(retry) = retry {
        headers.insert(
            header::RETRY_AFTER,
            HeaderValue::from(retry.as_secs().max(1)),
        );
    }
    response
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn id() -> String {
        "my-box".to_owned()
    }

    #[rstest]
    #[case(
        Refusal::NoSandbox,
        400,
        r#"{"detail":"X-Sandbox-ID header is required."}"#
    )]
    #[case(
        Refusal::SandboxFormat,
        400,
        r#"{"detail":"Invalid sandbox ID format."}"#
    )]
    #[case(
        Refusal::NamespaceFormat,
        400,
        r#"{"detail":"Invalid namespace format."}"#
    )]
    #[case(Refusal::PortFormat, 400, r#"{"detail":"Invalid port format."}"#)]
    #[case(
        Refusal::AddressFormat,
        400,
        r#"{"detail":"Invalid target IP address."}"#
    )]
    #[case(
        Refusal::PathFormat,
        400,
        r#"{"detail":"Path-routed request must have the form <prefix>/<namespace>/<id>/<port>/..."}"#
    )]
    #[case(
        Refusal::PathEncoding,
        400,
        r#"{"detail":"Invalid percent-encoding in path."}"#
    )]
    #[case(Refusal::Unauthenticated, 401, r#"{"detail":"unauthenticated"}"#)]
    #[case(
        Refusal::NoBearer,
        401,
        r#"{"detail":"Missing or invalid Authorization header."}"#
    )]
    #[case(Refusal::WrongToken, 401, r#"{"detail":"Invalid token."}"#)]
    #[case(Refusal::Forbidden, 403, r#"{"detail":"forbidden"}"#)]
    #[case(
        Refusal::ForeignOrigin,
        403,
        r#"{"detail":"origin not allowed for cookie-authenticated request"}"#
    )]
    #[case(
        Refusal::Unreachable(id()),
        502,
        r#"{"detail":"Could not connect to the backend sandbox: my-box"}"#
    )]
    #[tokio::test]
    async fn upstreams_errors_are_upstreams_letter_for_letter(
        #[case] refusal: Refusal,
        #[case] status: u16,
        #[case] body: &str,
    ) {
        assert_answer(&refusal, status, body, None).await;
    }

    #[rstest]
    #[case(Refusal::HostFormat("x.dev".into()), 400, r#"{"detail":"Invalid host format; expected <port>-<sandbox>-<namespace>.x.dev or <port>-<sandbox>.<namespace>.x.dev."}"#, None)]
    #[case(Refusal::HostAmbiguous("x.dev".into()), 400, r#"{"detail":"Ambiguous host; use <port>-<sandbox>.<namespace>.x.dev."}"#, None)]
    #[case(
        Refusal::ReviewFailed,
        500,
        r#"{"detail":"tokenreview: the apiserver could not be asked"}"#,
        None
    )]
    #[case(Refusal::Suspended(id()), 503, r#"{"detail":"Sandbox my-box is suspended. Set spec.operatingMode to Running, or annotate it with torpor.dev/resume-on-request: \"true\"."}"#, None)]
    #[case(Refusal::NotResumed(id(), "no".into()), 503, r#"{"detail":"Sandbox my-box is suspended and could not be resumed: no"}"#, Some("1"))]
    #[case(
        Refusal::ResumeTimeout(id()),
        504,
        r#"{"detail":"Sandbox my-box is being resumed and did not become ready in time."}"#,
        Some("1")
    )]
    #[case(
        Refusal::TooManyHeld,
        503,
        r#"{"detail":"Too many requests wait for sandboxes that are not ready."}"#,
        Some("1")
    )]
    #[case(
        Refusal::TooManyOpen,
        503,
        r#"{"detail":"Too many WebSockets and gRPC calls are open."}"#,
        Some("1")
    )]
    #[case(
        Refusal::TooManyRequests(id()),
        503,
        r#"{"detail":"Too many requests are under way to sandbox my-box."}"#,
        Some("1")
    )]
    #[case(
        Refusal::TooManyReviews,
        503,
        r#"{"detail":"Too many tokens wait to be checked."}"#,
        Some("1")
    )]
    #[case(
        Refusal::BodyTooLarge,
        413,
        r#"{"detail":"Request body too large."}"#,
        None
    )]
    #[case(Refusal::Method, 405, r#"{"detail":"Method not allowed."}"#, None)]
    #[tokio::test]
    async fn torpors_own_errors_have_the_same_form(
        #[case] refusal: Refusal,
        #[case] status: u16,
        #[case] body: &str,
        #[case] retry_after: Option<&str>,
    ) {
        assert_answer(&refusal, status, body, retry_after).await;
    }

    async fn assert_answer(refusal: &Refusal, status: u16, body: &str, retry: Option<&str>) {
        use http_body_util::BodyExt as _;
        let response = refusal.response();
        assert_eq!(response.status(), status);
        assert_eq!(response.headers()["content-type"], "application/json");
        let after = response
            .headers()
            .get("retry-after")
            .map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(after.as_deref(), retry);
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(bytes, body);
    }
}

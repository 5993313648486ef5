//! Error answers of the legacy API. Pure.
//!
//! Status codes and bodies are those of upstream and its framework, where upstream has them.

use bytes::Bytes;
use http::{HeaderValue, Method, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use serde_json::{Value, json};

use crate::{origin::Foreign, token::Closed};

/// Body of an answer.
pub type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// Reason why a call is refused. Messages up to `List` are upstream's.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    #[error("Not Found")]
    NoRoute,
    #[error("Method Not Allowed")]
    Method(Method),
    /// A field of the body is missing or invalid.
    #[error("{message}")]
    Field {
        kind: &'static str,
        field: Option<&'static str>,
        message: &'static str,
    },
    #[error("There was an error parsing the body")]
    Malformed,
    #[error("Access denied")]
    Denied,
    #[error("File not found")]
    NoFile,
    #[error("Path is not a directory")]
    NoDirectory,
    #[error("File upload failed: {0}")]
    Upload(String),
    #[error("List files failed: {0}")]
    List(String),
    #[error("File download failed: {0}")]
    Download(String),
    #[error("Request body too large.")]
    TooLarge,
    #[error("The request body exceeded its time limit.")]
    Slow,
    #[error(transparent)]
    Closed(#[from] Closed),
    #[error(transparent)]
    Foreign(#[from] Foreign),
}

/// Refusal that can be sent to a client.
pub trait Refused: std::fmt::Display + Send {
    /// Returns the status code of the answer.
    fn status(&self) -> StatusCode;

    /// Returns the answer.
    fn response(&self) -> Response<Body>;
}

impl Refusal {
    /// Returns the refusal for a missing field of the body; without a name for a missing body.
    pub fn missing(field: Option<&'static str>) -> Self {
        Self::Field {
            kind: "missing",
            field,
            message: "Field required",
        }
    }

    /// Returns the body of the answer: `message` for errors of upstream, `detail` for those of its
    /// framework.
    pub fn body(&self) -> Value {
        let text = self.to_string();
        match self {
            Self::Field { kind, field, .. } => {
                let place: Vec<_> = ["body"].into_iter().chain(*field).collect();
                json!({"detail": [{"type": kind, "loc": place, "msg": text, "input": null}]})
            }
            Self::NoRoute
            | Self::Method(_)
            | Self::Malformed
            | Self::TooLarge
            | Self::Slow
            | Self::Closed(_)
            | Self::Foreign(_) => {
                json!({"detail": text})
            }
            _ => json!({"message": text}),
        }
    }
}

impl Refused for Refusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::NoRoute | Self::NoFile | Self::NoDirectory => StatusCode::NOT_FOUND,
            Self::Method(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::Field { .. } => StatusCode::UNPROCESSABLE_ENTITY,
            Self::Malformed => StatusCode::BAD_REQUEST,
            Self::Denied | Self::Foreign(_) => StatusCode::FORBIDDEN,
            Self::Upload(_) | Self::List(_) | Self::Download(_) => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Slow => StatusCode::REQUEST_TIMEOUT,
            Self::Closed(_) => StatusCode::UNAUTHORIZED,
        }
    }

    fn response(&self) -> Response<Body> {
        let mut response = answer(self.status(), &self.body());
        if let Self::Method(allowed) = self
            && let Ok(allowed) = HeaderValue::from_str(allowed.as_str())
        {
            response.headers_mut().insert(header::ALLOW, allowed);
        }
        if matches!(self, Self::Closed(_)) {
            add_challenge(&mut response);
        }
        response
    }
}

/// Adds the header `WWW-Authenticate`, which each answer 401 must have (RFC 9110, 15.5.2).
pub fn add_challenge(response: &mut Response<Body>) {
    let scheme = HeaderValue::from_static("Bearer");
    let headers = response.headers_mut();
    headers.insert(header::WWW_AUTHENTICATE, scheme);
}

/// Returns a JSON answer.
pub fn answer(status: StatusCode, body: &Value) -> Response<Body> {
    let full = Full::new(Bytes::from(body.to_string()));
    let mut response = Response::new(full.map_err(|never| match never {}).boxed_unsync());
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(Refusal::NoRoute, 404, r#"{"detail":"Not Found"}"#)]
    #[case(
        Refusal::Method(Method::GET),
        405,
        r#"{"detail":"Method Not Allowed"}"#
    )]
    #[case(Refusal::missing(Some("file")), 422, r#"{"detail":[{"input":null,"loc":["body","file"],"msg":"Field required","type":"missing"}]}"#)]
    #[case(
        Refusal::missing(None),
        422,
        r#"{"detail":[{"input":null,"loc":["body"],"msg":"Field required","type":"missing"}]}"#
    )]
    #[case(
        Refusal::Malformed,
        400,
        r#"{"detail":"There was an error parsing the body"}"#
    )]
    #[case(Refusal::Denied, 403, r#"{"message":"Access denied"}"#)]
    #[case(Refusal::NoFile, 404, r#"{"message":"File not found"}"#)]
    #[case(Refusal::NoDirectory, 404, r#"{"message":"Path is not a directory"}"#)]
    #[case(Refusal::Upload("x".into()), 500, r#"{"message":"File upload failed: x"}"#)]
    #[case(Refusal::List("x".into()), 500, r#"{"message":"List files failed: x"}"#)]
    #[case(Refusal::Download("x".into()), 500, r#"{"message":"File download failed: x"}"#)]
    #[case(Refusal::TooLarge, 413, r#"{"detail":"Request body too large."}"#)]
    #[case(
        Refusal::Closed(Closed::Missing),
        401,
        r#"{"detail":"missing bearer token"}"#
    )]
    #[case(
        Refusal::Slow,
        408,
        r#"{"detail":"The request body exceeded its time limit."}"#
    )]
    fn refusals_have_upstreams_status_and_body(
        #[case] refusal: Refusal,
        #[case] status: u16,
        #[case] body: &str,
    ) {
        assert_eq!(refusal.status().as_u16(), status);
        let expected: Value = serde_json::from_str(body).unwrap();
        assert_eq!(refusal.body(), expected);
    }
}

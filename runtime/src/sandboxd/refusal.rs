//! Error answers of the REST API, with upstream's status codes and codes. Pure.

use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use rustix::io::Errno;
use serde_json::json;

use crate::{
    busy,
    origin::Foreign,
    refusal::{Body, Refused, add_challenge, answer},
    root,
    token::Closed,
};

/// Reason why a call is refused. Messages up to `Method` are upstream's, where upstream has them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("path traversal outside sandbox root is forbidden")]
    Escape,
    #[error("permission denied")]
    Permission,
    #[error("path does not exist within the sandbox")]
    Missing,
    #[error("{0}")]
    Invalid(String),
    #[error("directory is not empty; pass recursive=true to remove it")]
    NotEmpty,
    #[error("cannot delete the sandbox root; pass recursive=true to clear its contents")]
    IsRoot,
    #[error("path exists already; pass overwrite=true to replace it")]
    Exists,
    /// The path exists already, and the request has the header `If-None-Match`.
    #[error("path exists already, and If-None-Match excludes that")]
    Condition,
    /// The existing entry cannot be replaced by the new one.
    #[error("target path: {0}")]
    Occupied(String),
    /// An archive's entry was refused.
    #[error("entry {entry:?}: {cause}; {done} entries before it were extracted")]
    Entry {
        entry: String,
        cause: Box<Refusal>,
        done: usize,
    },
    #[error("{0}")]
    TooMuch(String),
    #[error("sandboxd is shutting down")]
    Stopping,
    #[error("{0}")]
    Internal(String),
    #[error("404 page not found")]
    NoRoute,
    #[error("Method Not Allowed")]
    Method(&'static str),
    #[error("the request's body is larger than --max-upload-bytes")]
    TooLarge,
    #[error("the request's body exceeded its time limit")]
    Slow,
    #[error(transparent)]
    Closed(#[from] Closed),
    #[error(transparent)]
    Foreign(#[from] Foreign),
    #[error(transparent)]
    NotMarked(#[from] busy::Error),
}

impl Refusal {
    /// Returns the machine-readable code; `None` for a request of no call, as in upstream's HTTP
    /// library.
    fn code(&self) -> Option<&'static str> {
        Some(match self {
            Self::Escape | Self::Permission | Self::Foreign(_) => "PERMISSION_DENIED",
            Self::Missing => "NOT_FOUND",
            Self::Invalid(_) => "INVALID_ARGUMENT",
            Self::NotEmpty | Self::IsRoot | Self::Exists | Self::Occupied(_) => "CONFLICT",
            Self::Stopping => "UNAVAILABLE",
            Self::Internal(_) => "INTERNAL",
            Self::TooLarge | Self::TooMuch(_) => "RESOURCE_EXHAUSTED",
            Self::Entry { cause, .. } => return cause.code(),
            Self::Slow => "DEADLINE_EXCEEDED",
            Self::Closed(_) => "UNAUTHENTICATED",
            Self::NotMarked(_) | Self::Condition => "FAILED_PRECONDITION",
            Self::NoRoute | Self::Method(_) => return None,
        })
    }
}

impl Refused for Refusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::Escape | Self::Permission | Self::Foreign(_) => StatusCode::FORBIDDEN,
            Self::Missing | Self::NoRoute => StatusCode::NOT_FOUND,
            Self::Invalid(_) => StatusCode::BAD_REQUEST,
            Self::NotEmpty | Self::IsRoot | Self::Exists | Self::Occupied(_) => {
                StatusCode::CONFLICT
            }
            Self::Entry { cause, .. } => cause.status(),
            Self::Stopping => StatusCode::SERVICE_UNAVAILABLE,
            Self::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Method(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::TooLarge | Self::TooMuch(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Slow => StatusCode::REQUEST_TIMEOUT,
            Self::Closed(_) => StatusCode::UNAUTHORIZED,
            Self::Condition => StatusCode::PRECONDITION_FAILED,
            Self::NotMarked(_) => StatusCode::NOT_IMPLEMENTED,
        }
    }

    fn response(&self) -> Response<Body> {
        let Some(code) = self.code() else {
            let mut response = text(self.status(), &self.to_string());
            if let Self::Method(allowed) = self {
                let allowed = HeaderValue::from_static(allowed);
                response.headers_mut().insert(header::ALLOW, allowed);
            }
            return response;
        };
        let message = self.to_string();
        let mut response = answer(self.status(), &json!({"code": code, "message": message}));
        if matches!(self, Self::Closed(_)) {
            add_challenge(&mut response);
        }
        response
    }
}

/// Returns an error as upstream's HTTP library writes it.
pub fn text(status: StatusCode, text: &str) -> Response<Body> {
    let full = Full::from(format!("{text}\n"));
    let mut response = Response::new(full.map_err(|never| match never {}).boxed_unsync());
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

impl From<root::Error> for Refusal {
    fn from(error: root::Error) -> Self {
        match error {
            root::Error::Denied => Self::Escape,
            root::Error::Missing => Self::Missing,
            root::Error::NotEmpty => Self::NotEmpty,
            root::Error::IsADirectory => Self::Invalid("target path is a directory".to_owned()),
            root::Error::Exists => Self::Exists,
            root::Error::FileThere => Self::Occupied(error.to_string()),
            root::Error::NotADirectory
            | root::Error::NotAFile
            | root::Error::IsRoot
            | root::Error::IntoItself
            | root::Error::OtherFileSystem
            | root::Error::Special
            | root::Error::BrokenOff => Self::Invalid(error.to_string()),
            root::Error::Io(Errno::ACCESS | Errno::PERM | Errno::ROFS) => Self::Permission,
            root::Error::Io(Errno::NAMETOOLONG | Errno::LOOP) => Self::Invalid(error.to_string()),
            root::Error::TooMany
            | root::Error::TooDeep
            | root::Error::LinkTooDeep
            | root::Error::TooLarge(_) => Self::TooMuch(error.to_string()),
            root::Error::Io(_) => Self::Internal(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(root::Error::Denied, 403, Some("PERMISSION_DENIED"))]
    #[case(root::Error::Io(Errno::ACCESS), 403, Some("PERMISSION_DENIED"))]
    #[case(root::Error::Missing, 404, Some("NOT_FOUND"))]
    #[case(root::Error::IsADirectory, 400, Some("INVALID_ARGUMENT"))]
    #[case(root::Error::NotAFile, 400, Some("INVALID_ARGUMENT"))]
    #[case(root::Error::NotEmpty, 409, Some("CONFLICT"))]
    #[case(root::Error::Exists, 409, Some("CONFLICT"))]
    #[case(root::Error::FileThere, 409, Some("CONFLICT"))]
    #[case(root::Error::IntoItself, 400, Some("INVALID_ARGUMENT"))]
    #[case(root::Error::LinkTooDeep, 413, Some("RESOURCE_EXHAUSTED"))]
    #[case(root::Error::TooMany, 413, Some("RESOURCE_EXHAUSTED"))]
    #[case(root::Error::TooLarge(1), 413, Some("RESOURCE_EXHAUSTED"))]
    #[case(root::Error::Io(Errno::NOSPC), 500, Some("INTERNAL"))]
    fn errors_are_upstreams(
        #[case] error: root::Error,
        #[case] status: u16,
        #[case] code: Option<&str>,
    ) {
        let refusal = Refusal::from(error);
        assert_eq!((refusal.status().as_u16(), refusal.code()), (status, code));
    }
}

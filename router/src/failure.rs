//! Failures of requests to sandboxes.

use std::time::Instant;

use hyper_util::client::legacy;

use crate::{calls, upstream};

/// Reason why the router has no response from a sandbox.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("cannot build the URI of the sandbox")]
    Uri(#[from] http::Error),
    #[error("no response")]
    Http1(#[from] legacy::Error),
    #[error("no response")]
    Http2(#[from] calls::Error),
    /// The time limit passed; the sandbox may still process the request.
    #[error("no response in time")]
    Timeout,
}

impl Failure {
    /// Returns upstream's `reason` label.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Uri(_) => "other",
            Self::Http1(error) => upstream::reason(error),
            Self::Http2(error) => error.reason(),
            Self::Timeout => "timeout",
        }
    }
}

/// Waits for a future until the deadline.
pub(crate) async fn within<T>(
    deadline: Option<Instant>,
    future: impl Future<Output = T>,
) -> Result<T, Failure> {
    match deadline {
        Some(deadline) => {
            let limited = tokio::time::timeout_at(deadline.into(), future);
            limited.await.map_err(|_| Failure::Timeout)
        }
        None => Ok(future.await),
    }
}

/// Returns an error and its sources in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text.push_str(": ");
        text.push_str(&source.to_string());
        next = source.source();
    }
    text
}

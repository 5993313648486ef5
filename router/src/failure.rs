//! Why a sandbox did not answer.

use std::time::Instant;

use hyper_util::client::legacy;

use crate::{calls, upstream};

/// A sandbox did not answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("no URI for the sandbox")]
    Uri(#[from] http::Error),
    #[error("no answer")]
    Http1(#[from] legacy::Error),
    #[error("no answer")]
    Http2(#[from] calls::Error),
    /// It may still be at work.
    #[error("no answer in time")]
    Timeout,
}

impl Failure {
    /// Upstream's word for it in metrics.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Uri(_) => "other",
            Self::Http1(error) => upstream::reason(error),
            Self::Http2(error) => error.reason(),
            Self::Timeout => "timeout",
        }
    }
}

/// Waits for a future, not past a deadline.
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

/// An error and what caused it, in one line.
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

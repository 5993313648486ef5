//! A time limit for all steps of a start together.

use std::time::{Duration, Instant};

use super::error::Error;

/// The limit and its end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit {
    limit: Duration,
    pub(crate) end: Instant,
}

impl Limit {
    pub(crate) fn new(limit: Duration) -> Self {
        Self {
            limit,
            end: Instant::now() + limit,
        }
    }

    pub(crate) fn left(self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// Returns the error of an exceeded limit. `log`: the last message of the process.
    pub(crate) fn exceeded(self, log: &str) -> Error {
        Error::TimedOut {
            limit: self.limit,
            said: log.to_owned(),
        }
    }
}

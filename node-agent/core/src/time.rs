//! Arithmetic with points in time.

use std::time::Duration;

use jiff::Timestamp;

/// Returns `at + wait`, at most [`Timestamp::MAX`].
pub(crate) fn later(at: Timestamp, wait: Duration) -> Timestamp {
    at.checked_add(wait).unwrap_or(Timestamp::MAX)
}

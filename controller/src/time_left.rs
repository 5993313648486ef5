//! No client required. The rest of a time that has begun.

use std::time::Duration;

use jiff::Timestamp;

/// Returns the rest of a time that has run since `since`, if any is left. A clock behind the one
/// that wrote `since` counts as none run, and so does an unknown beginning.
pub fn time_left(whole: Duration, since: Option<Timestamp>, now: Timestamp) -> Option<Duration> {
    let run = since.and_then(|since| Duration::try_from(now.duration_since(since)).ok());
    let left = whole.saturating_sub(run.unwrap_or_default());
    (!left.is_zero()).then_some(left)
}

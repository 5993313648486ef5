//! Parsers of option values.

use std::path::{Path, PathBuf};
use std::time::Duration;

pub(super) fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = Path::new(text);
    if path.is_absolute() {
        Ok(path.to_owned())
    } else {
        Err("not an absolute path".to_owned())
    }
}

pub(super) fn at_least_one(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| *count > 0);
    count.ok_or_else(|| "allowed are whole numbers from 1 on".to_owned())
}

pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let count: u64 = text
        .parse()
        .map_err(|_| "not a number of seconds".to_owned())?;
    Ok(Duration::from_secs(count))
}

/// Parses the name of a runtime handler, which is a bare key in containerd's configuration.
pub(super) fn handler(text: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if text.is_empty() || text.len() > 63 || !text.chars().all(allowed) {
        return Err("allowed are 1 to 63 characters of a-z, 0-9 and -".to_owned());
    }
    Ok(text.to_owned())
}

//! Sizes in bytes, as the API has them.

/// Converts a size to the API's signed integer. Sizes beyond its range become its maximum.
pub(crate) fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

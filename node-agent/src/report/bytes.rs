//! Sizes in bytes, as the API has them.

/// Converts a size to the API's signed integer. Sizes beyond its range become its maximum.
pub(crate) fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Returns a size in MiB with one decimal, for messages.
pub(crate) fn mebibytes(bytes: u64) -> String {
    let tenths = bytes.saturating_mul(10) >> 20;
    format!("{}.{}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_in_messages_has_one_decimal() {
        let shown = [0, 1 << 20, (3 << 20) / 2, (10 << 20) - 1].map(mebibytes);
        assert_eq!(shown, ["0.0", "1.0", "1.5", "9.9"]);
    }
}

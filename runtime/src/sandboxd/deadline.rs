//! Deadline of a gRPC call. Pure.

use std::time::Duration;

use tonic::metadata::MetadataMap;

/// Returns the value of the header `grpc-timeout`: at most eight digits and a unit.
///
/// An invalid header counts as absent.
pub fn timeout_of(metadata: &MetadataMap) -> Option<Duration> {
    parse(metadata.get("grpc-timeout")?.to_str().ok()?)
}

fn parse(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("2H", Some(7_200_000_000_000))]
    #[case("3M", Some(180_000_000_000))]
    #[case("4S", Some(4_000_000_000))]
    #[case("60000m", Some(60_000_000_000))]
    #[case("5u", Some(5000))]
    #[case("99999999n", Some(99_999_999))]
    #[case("999999999n", None)]
    #[case("S", None)]
    #[case("", None)]
    #[case("+1S", None)]
    #[case("1s", None)]
    #[case("1", None)]
    #[case("1ä", None)]
    fn a_timeout_has_the_syntax_of_the_protocol(#[case] text: &str, #[case] nanos: Option<u128>) {
        assert_eq!(parse(text).map(|time| time.as_nanos()), nanos);
    }
}

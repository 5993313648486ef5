//! Text of bytes and durations, and parsing of Kubernetes quantities.

use std::time::Duration;

use jiff::Timestamp;

/// Returns bytes in Kubernetes' binary units, with one decimal below ten: `5.0Mi`, `112Mi`.
pub fn bytes(count: i64) -> String {
    const UNITS: [&str; 5] = ["Ki", "Mi", "Gi", "Ti", "Pi"];
    if count.unsigned_abs() < 1024 {
        return count.to_string();
    }
    // Rounding to the 53 bits of a float does not change three digits.
    #[allow(clippy::cast_precision_loss)]
    let mut value = count as f64;
    let mut unit = "";
    for next in UNITS {
        if value.abs() < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if value.abs() < 9.95 {
        format!("{value:.1}{unit}")
    } else {
        format!("{value:.0}{unit}")
    }
}

/// Returns the age in kubectl's form, with at most the two largest units: `45s`, `12m`, `3h20m`.
pub fn age(since: Timestamp, now: Timestamp) -> String {
    let seconds = now.duration_since(since).as_secs().max(0);
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    let two = |large: i64, unit: &str, small: i64, of: &str| match small {
        0 => format!("{large}{unit}"),
        _ => format!("{large}{unit}{small}{of}"),
    };
    match (days, hours, minutes) {
        (0, 0, _) if seconds < 120 => format!("{seconds}s"),
        (0, 0, minutes) if minutes < 10 => two(minutes, "m", seconds % 60, "s"),
        (0, 0, minutes) => format!("{minutes}m"),
        (0, hours, minutes) => two(hours, "h", minutes, "m"),
        (days, hours, _) if days < 10 => two(days, "d", hours, "h"),
        (days, ..) => format!("{days}d"),
    }
}

/// Returns a duration as text: `6.7ms`, `420ms`, `2.5s`, `2m`.
pub fn span(span: Duration) -> String {
    let seconds = span.as_secs_f64();
    match seconds {
        s if s < 0.01 => format!("{:.1}ms", s * 1e3),
        s if s < 1.0 => format!("{:.0}ms", s * 1e3),
        s if s < 60.0 && s.fract() == 0.0 => format!("{s:.0}s"),
        s if s < 60.0 => format!("{s:.1}s"),
        _ => {
            let whole = span.as_secs();
            match whole % 60 {
                0 => format!("{}m", whole / 60),
                rest => format!("{}m{rest}s", whole / 60),
            }
        }
    }
}

/// Returns a duration in microseconds as text; 0 for a negative one.
pub fn micros(count: i64) -> String {
    span(Duration::from_micros(u64::try_from(count).unwrap_or(0)))
}

/// Parses a quantity such as `128974848`, `1.5Gi`, `250m` into thousandths of its unit; `None` if
/// the text is no quantity.
pub fn quantity_in_thousandths(text: &str) -> Option<i64> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let number: f64 = text[..digits].parse().ok()?;
    let factor = match &text[digits..] {
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "" => 1.0,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "Ki" => 1024.0,
        "Mi" => 1024.0 * 1024.0,
        "Gi" => 1024.0 * 1024.0 * 1024.0,
        "Ti" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    };
    let thousandths = (number * factor * 1e3).round();
    // A float holds integers below 9e15 exactly, which is more than the bytes of any Pod.
    #[allow(clippy::cast_possible_truncation)]
    (thousandths < 9e15).then_some(thousandths as i64)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(0, "0")]
    #[case(1023, "1023")]
    #[case(5 << 20, "5.0Mi")]
    #[case(146 << 20, "146Mi")]
    #[case(117_298_307, "112Mi")]
    #[case(1288490189, "1.2Gi")]
    fn bytes_have_two_or_three_digits(#[case] count: i64, #[case] text: &str) {
        assert_eq!(bytes(count), text);
    }

    #[rstest]
    #[case(0, "0s")]
    #[case(119, "119s")]
    #[case(125, "2m5s")]
    #[case(1200, "20m")]
    #[case(7200, "2h")]
    #[case(12_000, "3h20m")]
    #[case(446_400, "5d4h")]
    #[case(8_640_000, "100d")]
    fn ages_have_kubectls_form(#[case] seconds: i64, #[case] text: &str) {
        let since = Timestamp::UNIX_EPOCH;
        let now = Timestamp::from_second(seconds).unwrap();
        assert_eq!(age(since, now), text);
    }

    #[test]
    fn an_age_in_the_future_is_zero() {
        let now = Timestamp::UNIX_EPOCH;
        assert_eq!(age(Timestamp::from_second(5).unwrap(), now), "0s");
    }

    #[rstest]
    #[case(6_700, "6.7ms")]
    #[case(420_000, "420ms")]
    #[case(2_510_000, "2.5s")]
    #[case(30_000_000, "30s")]
    #[case(120_000_000, "2m")]
    #[case(95_000_000, "1m35s")]
    fn spans_have_the_unit_that_fits(#[case] micros: u64, #[case] text: &str) {
        assert_eq!(span(Duration::from_micros(micros)), text);
    }

    #[rstest]
    #[case("250m", Some(250))]
    #[case("2", Some(2000))]
    #[case("1.5Ki", Some(1_536_000))]
    #[case("123456789n", Some(123))]
    #[case("146Mi", Some(153_092_096_000))]
    #[case("", None)]
    #[case("5x", None)]
    fn quantities_are_numbers(#[case] text: &str, #[case] thousandths: Option<i64>) {
        assert_eq!(quantity_in_thousandths(text), thousandths);
    }
}

//! Command-line syntax of Go programs.
//!
//! Flags have one dash or two. Addresses look like `:8080`, durations like `1h30m`, and several
//! words mean true and false.

use std::{ffi::OsString, net::SocketAddr, time::Duration};

use clap::{Arg, ArgAction};

/// Returns the argument with two dashes where it is a flag with one dash, as Go accepts it.
///
/// Other arguments stay as they are: `-1` is a value.
pub fn with_two_dashes(argument: OsString) -> OsString {
    match argument.to_str() {
        Some(text)
            if text.starts_with('-')
                && text.chars().nth(1).is_some_and(|c| c.is_ascii_lowercase())
                && text.len() > 2 =>
        {
            format!("-{text}").into()
        }
        _ => argument,
    }
}

/// Address in Go's syntax: `:8080`, `127.0.0.1:8080`, or `0` for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BindAddress(pub Option<SocketAddr>);

impl std::str::FromStr for BindAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "0" || text.is_empty() {
            return Ok(Self(None));
        }
        // The IPv6 wildcard also accepts IPv4: the kernel maps IPv4 addresses onto it.
        let whole = if text.starts_with(':') {
            format!("[::]{text}")
        } else {
            text.to_owned()
        };
        match whole.parse() {
            Ok(address) => Ok(Self(Some(address))),
            Err(error) => Err(format!("{error}: expected :port, address:port, or 0")),
        }
    }
}

/// Parses a duration in Go's syntax: `1h30m`, `250ms`, `2.5s`, `0`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("{text:?} is not a duration such as 300ms, 1.5h or 2h45m");
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let mut total = 0.0_f64;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .ok_or_else(bad)?;
        let number: f64 = rest[..digits].parse().map_err(|_| bad())?;
        rest = &rest[digits..];
        let end = rest
            .find(|c: char| c.is_ascii_digit() || c == '.')
            .unwrap_or(rest.len());
        total += number
            * match &rest[..end] {
                "ns" => 1e-9,
                "us" | "µs" => 1e-6,
                "ms" => 1e-3,
                "s" => 1.0,
                "m" => 60.0,
                "h" => 3600.0,
                _ => return Err(bad()),
            };
        rest = &rest[end..];
    }
    if text.is_empty() {
        return Err(bad());
    }
    Duration::try_from_secs_f64(total).map_err(|_| bad())
}

/// Parses a boolean in the syntax of Go's `strconv.ParseBool`.
pub fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(format!("{text:?} is neither true nor false")),
    }
}

/// Attributes of clap's derive macro for boolean flags in Go's syntax.
pub trait GoBoolean {
    /// Makes the value optional: a flag without a value is true, and a value follows `=`.
    fn may_be_bare(self) -> Self;
    /// Makes the flag a boolean in Go's syntax with an optional value.
    fn go_boolean(self) -> Self;
}

impl GoBoolean for Arg {
    fn may_be_bare(self) -> Self {
        self.num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true")
    }

    fn go_boolean(self) -> Self {
        self.may_be_bare()
            .action(ArgAction::Set)
            .value_parser(boolean)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(":8080", Some("[::]:8080"))]
    #[case("127.0.0.1:1", Some("127.0.0.1:1"))]
    #[case("0", None)]
    fn addresses_have_gos_syntax(#[case] text: &str, #[case] address: Option<&str>) {
        let parsed: BindAddress = text.parse().unwrap();
        assert_eq!(parsed.0, address.map(|address| address.parse().unwrap()));
    }

    #[rstest]
    #[case("5m", 300_000)]
    #[case("1h30m", 5_400_000)]
    #[case("2.5s", 2500)]
    #[case("250ms", 250)]
    #[case("0", 0)]
    fn durations_have_gos_syntax(#[case] text: &str, #[case] milliseconds: u128) {
        assert_eq!(duration(text).unwrap().as_millis(), milliseconds);
    }

    #[rstest]
    #[case("")]
    #[case("5")]
    #[case("m")]
    #[case("5x")]
    #[case("-5s")]
    fn a_text_that_is_no_duration_is_refused(#[case] text: &str) {
        duration(text).unwrap_err();
    }

    #[rstest]
    #[case(["1", "t", "T", "true", "TRUE", "True"], Some(true))]
    #[case(["0", "f", "F", "false", "FALSE", "False"], Some(false))]
    #[case(["", "2", "yes", "on", "tRUE", " true"], None)]
    fn booleans_have_gos_syntax(#[case] texts: [&str; 6], #[case] value: Option<bool>) {
        for text in texts {
            assert_eq!(boolean(text).ok(), value, "{text:?}");
        }
    }
}

//! Idle times of the annotations `torpor.dev/doze-after` and `torpor.dev/hibernate-after`.

use std::time::Duration;

use super::{
    DOZE_AFTER, HIBERNATE_AFTER, IDLE_TIMEOUT, InvalidAnnotation, MAX_IDLE_TIME, values::invalid,
};

/// Idle time before a sandbox dozes or hibernates.
///
/// Syntax: a duration of Go and jiff (`30m`, `1h30m`, `90s`), or `off`, which overrides the pod
/// template's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SleepAfter {
    Off,
    Idle(Duration),
}

impl SleepAfter {
    const ALLOWED: &str = "off, or a duration from 1s to 8760h, such as 30m or 1h30m";
    const MIN: Duration = Duration::from_secs(1);
    const MAX: Duration = Duration::from_secs(8760 * 3600);

    /// Parses the value of `key`.
    pub fn parse(key: &'static str, value: &str) -> Result<Self, InvalidAnnotation> {
        if value == "off" {
            return Ok(Self::Off);
        }
        let parsed = value.parse::<jiff::SignedDuration>().ok();
        parsed
            .and_then(|duration| Duration::try_from(duration).ok())
            .filter(|duration| (Self::MIN..=Self::MAX).contains(duration))
            .map(Self::Idle)
            .ok_or_else(|| invalid(key, value, Self::ALLOWED))
    }

    /// Returns the time, or `None` for `off`.
    pub fn duration(self) -> Option<Duration> {
        match self {
            Self::Off => None,
            Self::Idle(duration) => Some(duration),
        }
    }

    /// Returns the annotation's value in its one canonical spelling, in seconds.
    pub fn canonical(self) -> String {
        match self {
            Self::Off => "off".to_owned(),
            // Fractions of a second are dropped.
            Self::Idle(duration) => format!("{}s", duration.as_secs()),
        }
    }
}

/// Parses the idle time after which a sandbox dozes.
pub fn doze_after<'a>(
    value: impl Fn(&str) -> Option<&'a String>,
) -> Option<Result<SleepAfter, InvalidAnnotation>> {
    value(DOZE_AFTER).map(|value| SleepAfter::parse(DOZE_AFTER, value))
}

/// Parses the idle time after which a sandbox hibernates, from the first of its keys that is set.
pub fn hibernate_after<'a>(
    value: impl Fn(&str) -> Option<&'a String>,
) -> Option<Result<SleepAfter, InvalidAnnotation>> {
    let names = [HIBERNATE_AFTER, IDLE_TIMEOUT, MAX_IDLE_TIME];
    let written = names.into_iter().find_map(|key| Some((key, value(key)?)));
    written.map(|(key, value)| SleepAfter::parse(key, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_times_are_durations_as_go_writes_them() {
        let parsed = |value| SleepAfter::parse(HIBERNATE_AFTER, value).ok();
        let seconds = |n| Some(SleepAfter::Idle(Duration::from_secs(n)));
        for (value, expected) in [
            ("30m", seconds(1800)),
            ("1h30m", seconds(5400)),
            ("90s", seconds(90)),
            ("8760h", seconds(31_536_000)),
            ("off", Some(SleepAfter::Off)),
            ("", None),
            ("0s", None),
            ("500ms", None),
            ("-5m", None),
            ("30", None),
            ("8761h", None),
            ("99999999999999999999h", None),
        ] {
            assert_eq!(parsed(value), expected, "{value:?}");
        }
        assert_eq!(seconds(5400).expect("one").canonical(), "5400s");
    }
}

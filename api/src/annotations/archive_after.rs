//! Time of the annotation `torpor.dev/archive-after`.

use std::time::Duration;

use super::{ARCHIVE_AFTER, InvalidAnnotation, values::invalid};

/// Time from the suspension of a Sandbox until it is archived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArchiveAfter {
    Off,
    /// Zero for `now`.
    Suspended(Duration),
}

impl ArchiveAfter {
    /// Value that archives a Sandbox as soon as it is suspended.
    pub const NOW: &str = "now";
    const ALLOWED: &str = "now, off, or a duration from 1s to 8760h, such as 12h or 7d";
    const MIN: Duration = Duration::from_secs(1);
    const MAX: Duration = Duration::from_secs(8760 * 3600);

    /// Parses the annotation's value.
    pub fn parse(value: &str) -> Result<Self, InvalidAnnotation> {
        match value {
            "off" => return Ok(Self::Off),
            Self::NOW => return Ok(Self::Suspended(Duration::ZERO)),
            _ => {}
        }
        let days = value.strip_suffix('d').and_then(|days| days.parse().ok());
        let parsed = match days {
            Some(days) => Some(Duration::from_secs(u64::from(u32::saturating_mul(
                days, 86_400,
            )))),
            None => value
                .parse::<jiff::SignedDuration>()
                .ok()
                .and_then(|duration| Duration::try_from(duration).ok()),
        };
        parsed
            .filter(|duration| (Self::MIN..=Self::MAX).contains(duration))
            .map(Self::Suspended)
            .ok_or_else(|| invalid(ARCHIVE_AFTER, value, Self::ALLOWED))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_durations_days_or_words() {
        let seconds = |n| Some(ArchiveAfter::Suspended(Duration::from_secs(n)));
        for (value, expected) in [
            ("now", seconds(0)),
            ("off", Some(ArchiveAfter::Off)),
            ("1s", seconds(1)),
            ("12h", seconds(43_200)),
            ("7d", seconds(604_800)),
            ("365d", seconds(31_536_000)),
            ("366d", None),
            ("99999999999d", None),
            ("0d", None),
            ("-1d", None),
            ("d", None),
            ("0s", None),
            ("7", None),
            ("", None),
        ] {
            assert_eq!(ArchiveAfter::parse(value).ok(), expected, "{value:?}");
        }
    }
}

//! Parses times that users write.

use jiff::{Timestamp, fmt::temporal::Pieces};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Deserializer, de::Error as _};

/// Year whose last moments are later than any [`Timestamp`].
const LAST_YEAR: i16 = 9999;

/// Reads a time; a time later than any [`Timestamp`] becomes the last one.
///
/// Users write such times for "never" (`9999-12-31T23:59:59Z`), and the apiserver accepts them.
pub(crate) fn or_last<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Time>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    let time = text.map(|text| parse(&text).map_err(D::Error::custom));
    Ok(time.transpose()?.map(Time))
}

fn parse(text: &str) -> Result<Timestamp, jiff::Error> {
    text.parse::<Timestamp>().or_else(|error| {
        let is_late = Pieces::parse(text).is_ok_and(|pieces| {
            let is_whole = pieces.time().is_some() && pieces.offset().is_some();
            is_whole && pieces.date().year() == LAST_YEAR
        });
        is_late.then_some(Timestamp::MAX).ok_or(error)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{Sandbox, SandboxClaim};

    /// Returns the shutdown times of a Sandbox and of a SandboxClaim with this text as
    /// `shutdownTime`.
    fn read(text: &str) -> [Result<Timestamp, serde_json::Error>; 2] {
        let sandbox = json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": "s"},
            "spec": {"podTemplate": {"spec": {}}, "shutdownTime": text},
        });
        let claim = json!({
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim", "metadata": {"name": "c"},
            "spec": {"warmPoolRef": {"name": "p"}, "lifecycle": {"shutdownTime": text}},
        });
        let sandbox = serde_json::from_value(sandbox)
            .map(|sandbox: Sandbox| sandbox.spec.shutdown_time.unwrap().0);
        let claim = serde_json::from_value(claim)
            .map(|claim: SandboxClaim| claim.spec.lifecycle.unwrap().shutdown_time.unwrap().0);
        [sandbox, claim]
    }

    #[test]
    fn the_last_moments_of_year_9999_mean_never() {
        for text in [
            "9999-12-31T23:59:59Z",
            "9999-12-31T23:59:59.999999-05:00",
            "9999-12-31t00:00:00z",
        ] {
            for time in read(text) {
                assert_eq!(time.unwrap(), Timestamp::MAX, "{text}");
            }
        }
    }

    #[test]
    fn other_times_are_exact_and_text_that_is_no_time_is_refused() {
        for (text, utc) in [
            ("2026-11-23T10:00:00.5+02:00", "2026-11-23T08:00:00.5Z"),
            ("9999-12-30T22:00:00Z", "9999-12-30T22:00:00Z"),
            ("0000-01-01T00:00:00Z", "0000-01-01T00:00:00Z"),
        ] {
            for time in read(text) {
                assert_eq!(time.unwrap(), utc.parse::<Timestamp>().unwrap(), "{text}");
            }
        }
        for text in [
            "9999-12-31",
            "9999-12-31T23:59:59",
            "9999-12-32T00:00:00Z",
            "never",
        ] {
            for time in read(text) {
                time.unwrap_err();
            }
        }
    }

    #[test]
    fn an_unset_time_is_none() {
        let never: crate::extensions::ClaimLifecycle = serde_json::from_value(json!({})).unwrap();
        assert_eq!(never.shutdown_time, None);
        let null = json!({"shutdownTime": null});
        let never: crate::extensions::ClaimLifecycle = serde_json::from_value(null).unwrap();
        assert_eq!(never.shutdown_time, None);
    }
}

//! The time at which a Sandbox is to be awake (`agents.x-k8s.io/next-wakeup`): there is one, and who wakes a Sandbox now may find
//! somebody else's there. Pure.

use jiff::Timestamp;
use serde_json::{Value, json};
use torpor_api::Sandbox;
use torpor_api::annotations::{self, NEXT_WAKEUP};

/// A time that is still to come, where a wake has written its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Displaced {
    /// What the wake has written.
    own: String,
    /// As it was written.
    theirs: String,
    at: Timestamp,
}

impl Displaced {
    /// What `patch` takes from the Sandbox, as it was `before`.
    pub fn by(patch: &Value, before: &Sandbox, now: Timestamp) -> Option<Self> {
        let own = patch["metadata"]["annotations"][NEXT_WAKEUP].as_str()?;
        let theirs = written(before)?;
        let at = time(theirs).filter(|at| *at > now)?;
        Some(Self {
            own: own.to_owned(),
            theirs: theirs.to_owned(),
            at,
        })
    }

    /// The merge patch that puts it back, good for this version of the Sandbox only. None: it is over meanwhile, or somebody has set
    /// another one.
    pub fn patch(&self, sandbox: &Sandbox, now: Timestamp) -> Option<Value> {
        // The controller takes off what is over.
        let is_ours = written(sandbox).is_none_or(|stands| stands == self.own);
        (is_ours && self.at > now).then(|| {
            json!({"metadata": {
                "resourceVersion": sandbox.metadata.resource_version,
                "annotations": {NEXT_WAKEUP: self.theirs},
            }})
        })
    }

    /// The time as it was written.
    pub fn as_str(&self) -> &str {
        &self.theirs
    }
}

/// Whether a time stands there that is over: it would resume a Sandbox that is suspended.
pub fn is_over(sandbox: &Sandbox, now: Timestamp) -> bool {
    written(sandbox).and_then(time).is_some_and(|at| at <= now)
}

fn written(sandbox: &Sandbox) -> Option<&str> {
    let annotations = sandbox.metadata.annotations.as_ref()?;
    annotations.get(NEXT_WAKEUP).map(String::as_str)
}

/// The controller tells of a wrong value.
fn time(written: &str) -> Option<Timestamp> {
    annotations::parse_time(NEXT_WAKEUP, written).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "2026-01-01T12:00:00.2Z";
    const THEIRS: &str = "2026-01-02T07:00:00+01:00";

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn sandbox(time: Option<&str>) -> Sandbox {
        let annotations = time.map(|time| json!({NEXT_WAKEUP: time}));
        serde_json::from_value(json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
            "metadata": {"name": "demo", "namespace": "x", "resourceVersion": "7", "annotations": annotations},
            "spec": {"operatingMode": "Running", "podTemplate": {"spec": {"containers": []}}},
        }))
        .unwrap()
    }

    fn displaced(time: Option<&str>) -> Option<Displaced> {
        let patch = json!({"metadata": {"annotations": {NEXT_WAKEUP: OWN}}});
        Displaced::by(&patch, &sandbox(time), at(OWN))
    }

    #[test]
    fn a_time_that_is_still_to_come_is_put_back() {
        let displaced = displaced(Some(THEIRS)).unwrap();
        let expected =
            json!({"metadata": {"resourceVersion": "7", "annotations": {NEXT_WAKEUP: THEIRS}}});
        for stands in [Some(OWN), None] {
            let patch = displaced.patch(&sandbox(stands), at(OWN));
            assert_eq!(patch, Some(expected.clone()), "{stands:?}");
        }
        let another = sandbox(Some("2027-01-01T00:00:00Z"));
        assert_eq!(displaced.patch(&another, at(OWN)), None);
        assert_eq!(
            displaced.patch(&sandbox(None), at(THEIRS)),
            None,
            "it is over"
        );
    }

    #[test]
    fn what_is_over_or_no_time_is_not_missed() {
        for time in [
            None,
            Some(OWN),
            Some("2025-01-01T00:00:00Z"),
            Some("tomorrow"),
        ] {
            assert_eq!(displaced(time), None, "{time:?}");
        }
        // A patch that sets no time.
        let other = json!({"metadata": {"annotations": {"torpor.dev/hibernate": null}}});
        assert_eq!(Displaced::by(&other, &sandbox(Some(THEIRS)), at(OWN)), None);
    }

    #[test]
    fn a_time_is_over_once_it_has_come() {
        for (time, over) in [
            (Some(OWN), true),
            (Some(THEIRS), false),
            (Some("tomorrow"), false),
            (None, false),
        ] {
            assert_eq!(is_over(&sandbox(time), at(OWN)), over, "{time:?}");
        }
    }
}

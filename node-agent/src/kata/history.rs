//! The last sleep and the last wake of a Kata sandbox, for SandboxNode.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use torpor_api::node::LastWake;
use torpor_records::{SleepNote, WakeNote};

/// The last sleep and the last wake of one sandbox.
#[derive(Debug, Default)]
pub(super) struct History {
    pub(super) sleep: Option<SleepNote>,
    pub(super) wake: Option<LastWake>,
}

impl History {
    pub(super) fn slept(&mut self, note: SleepNote) {
        self.sleep = Some(note);
    }

    pub(super) fn woke(&mut self, at: Timestamp, note: &WakeNote, took: Duration) {
        self.wake = Some(LastWake {
            at: Time(at),
            cause: format!("{:?}", note.cause),
            from: format!("{:?}", note.from),
            duration_micros: i64::try_from(took.as_micros()).unwrap_or(i64::MAX),
        });
    }
}

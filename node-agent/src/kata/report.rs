//! What SandboxNode says of Kata: whether it can doze here, how many do, and each sandbox.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use torpor_api::node::{
    LastWake, MAX_REPORTED, NodeRuntime, RuntimeCapabilities, RuntimeKind, SandboxNodeStatus,
    SandboxReport,
};
use torpor_records::{SleepNote, WakeNote};

use super::{Kata, NO_IMAGES};
use crate::report::sandboxes::{Sandboxes, signed};

/// How it last slept and woke.
#[derive(Debug, Default)]
pub(super) struct Noted {
    sleep: Option<SleepNote>,
    wake: Option<LastWake>,
}

impl Noted {
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

impl Kata {
    /// One entry for each handler.
    fn runtimes(&self, can_doze: &Result<(), String>) -> Vec<NodeRuntime> {
        let message = match can_doze {
            Ok(()) => format!("cannot hibernate: {NO_IMAGES}; a dozing sandbox has no image"),
            Err(why) => format!("cannot hibernate: {NO_IMAGES}; cannot doze: {why}"),
        };
        let of = |handler: &String| NodeRuntime {
            capabilities: RuntimeCapabilities {
                doze: can_doze.is_ok(),
                freeze: true,
                ..RuntimeCapabilities::default()
            },
            handler: handler.clone(),
            kind: RuntimeKind::Kata,
            message: message.clone(),
        };
        self.handlers.iter().map(of).collect()
    }

    /// Adds what Kata runs here. A sandbox that somebody is at work on at this moment is told of the next time.
    /// `can_doze`: whether any can on this node.
    pub(crate) fn tell(
        &self,
        status: &mut SandboxNodeStatus,
        sandboxes: &Sandboxes,
        can_doze: &Result<(), String>,
    ) {
        status.runtimes.extend(self.runtimes(can_doze));
        let mut counts = status.counts.unwrap_or_default();
        let entries: Vec<_> = self.entries().clone().into_iter().collect();
        for (pod, entry) in entries {
            let Ok(known) = entry.known.try_lock() else {
                continue;
            };
            match (&known.sandbox, &known.doze) {
                (None, _) => continue,
                (Some(_), Some(_)) => counts.dozing += 1,
                (Some(_), None) => counts.running += 1,
            }
            let sleep = known.report.sleep.as_ref();
            if status.sandboxes.len() < MAX_REPORTED {
                status.sandboxes.push(SandboxReport {
                    asleep_since: known.doze.and(known.asleep_since).map(Time),
                    image_bytes: None,
                    image_id: None,
                    last_wake: known.report.wake.clone(),
                    memory_asleep_bytes: sleep.map(|note| signed(note.bytes_after)),
                    memory_awake_bytes: sleep.map(|note| signed(note.bytes_before)),
                    namespace: entry.namespace.clone(),
                    pod_gone_since: None,
                    pod_name: entry.name.clone(),
                    pod_uid: pod.to_string(),
                    reasons: sandboxes.reasons(&pod),
                    sandbox_name: String::new(),
                });
            }
        }
        status.counts = Some(counts);
    }
}

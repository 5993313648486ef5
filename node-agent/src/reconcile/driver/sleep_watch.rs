//! A cheap check whether a sleeping sandbox is unchanged. A whole observation costs a millisecond,
//! and hundreds of sandboxes sleep for hours. A wake writes the sandbox's records, and the
//! modification time of their directory shows that.

use std::time::{Duration, SystemTime};

use torpor_core::Phase;
use torpor_core::ids::SandboxId;
use torpor_records::{PodRecord, Records};

/// A margin above the resolution of file times: the kernel's tick, at most ten milliseconds. A
/// second change in the same tick leaves the time as it is.
const TICKS: Duration = Duration::from_millis(100);

/// A sandbox that was observed asleep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SleepWatch {
    sandbox: SandboxId,
    /// Modification time of the sandbox's records. It was read before anything else of the sandbox.
    as_of: SystemTime,
}

impl SleepWatch {
    /// Returns none unless the sandbox sleeps in an image and its records are older than the
    /// observation, which began at `now`.
    pub(super) fn of(
        phase: &Phase,
        record: Option<&PodRecord>,
        as_of: Option<SystemTime>,
        now: SystemTime,
    ) -> Option<Self> {
        let sleeps = match phase {
            Phase::Hibernated { .. } => true,
            Phase::Dozing { image } => image.is_some(),
            Phase::Absent
            | Phase::Running
            | Phase::Paused
            | Phase::Saving
            | Phase::Waking { .. }
            | Phase::Restoring
            | Phase::Unknown
            | Phase::Failed { .. } => false,
        };
        let (record, as_of) = record.zip(as_of).filter(|_| sleeps)?;
        let is_over = now.duration_since(as_of).is_ok_and(|age| age > TICKS);
        is_over.then(|| Self {
            sandbox: record.sandbox.clone(),
            as_of,
        })
    }

    /// Returns whether the sandbox's records are unchanged.
    pub(super) fn is_unchanged(&self, records: &Records) -> bool {
        records.changed_at(&self.sandbox) == Some(self.as_of)
    }
}

#[cfg(test)]
mod tests {
    use torpor_core::ids::ImageId;
    use torpor_records::SandboxState;

    use super::*;
    use crate::reconcile::sandbox_index::tests::{make, records};

    #[test]
    fn a_sleeping_sandbox_counts_as_unchanged_until_a_record_is_written_or_removed() {
        let (_dir, records) = records();
        let record = make(&records, 'a', "pod-1");
        let image = ImageId::parse("pod-1.1").expect("an image");
        let hibernated = Phase::Hibernated {
            image: image.clone(),
        };
        let seen = |phase: &Phase, later: Duration| {
            let as_of = records.changed_at(&record.sandbox);
            let now = as_of.expect("it is there") + later;
            SleepWatch::of(phase, Some(&record), as_of, now)
        };
        assert_eq!(seen(&Phase::Running, 2 * TICKS), None);
        assert_eq!(seen(&Phase::Dozing { image: None }, 2 * TICKS), None);
        let now = SystemTime::now();
        assert_eq!(SleepWatch::of(&hibernated, None, None, now), None);
        assert_eq!(seen(&hibernated, Duration::ZERO), None, "in the same tick");
        let asleep = seen(&hibernated, 2 * TICKS).expect("it sleeps");
        assert!(asleep.is_unchanged(&records));
        let before = records.changed_at(&record.sandbox);
        while records.changed_at(&record.sandbox) == before {
            let state = SandboxState::Running;
            let written = records.write_state(&record.sandbox, &state);
            written.expect("written");
        }
        assert!(!asleep.is_unchanged(&records));
        let dozing = Phase::Dozing { image: Some(image) };
        let asleep = seen(&dozing, 2 * TICKS).expect("it sleeps");
        assert!(asleep.is_unchanged(&records));
        records.remove_pod(&record.sandbox).expect("removed");
        assert!(!asleep.is_unchanged(&records));
    }
}

//! Where the time of a wake or a restore went.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use torpor_core::ids::ImageId;
use torpor_records::{Depth, RestoreNote, WakeCause, WakeNote};

/// Names of stages and when each was over, since the beginning.
#[derive(Debug)]
pub(crate) struct Stages {
    began: Instant,
    ends: Vec<(&'static str, Duration)>,
}

impl Stages {
    /// The beginning.
    pub(crate) fn new() -> Self {
        Self {
            began: Instant::now(),
            ends: Vec::new(),
        }
    }

    pub(crate) fn over(&mut self, stage: &'static str) {
        self.ends.push((stage, self.began.elapsed()));
    }

    /// What is noted of a wake that went through these stages.
    pub(crate) fn note(&self, cause: WakeCause, from: Depth) -> WakeNote {
        WakeNote {
            cause,
            from,
            stages_end_micros: self.ends_micros(),
        }
    }

    /// What is noted of a restore of the image that went through these stages.
    pub(crate) fn restore_note(&self, image: &ImageId) -> RestoreNote {
        RestoreNote {
            image: image.clone(),
            stages_end_micros: self.ends_micros(),
        }
    }

    fn ends_micros(&self) -> BTreeMap<String, u64> {
        let ends = self.ends.iter().map(|(stage, end)| {
            let micros = u64::try_from(end.as_micros()).unwrap_or(u64::MAX);
            ((*stage).to_owned(), micros)
        });
        ends.collect()
    }
}

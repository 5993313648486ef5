//! The stages of a wake or a restore, with their times.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use torpor_core::ids::ImageId;
use torpor_records::{Depth, RestoreNote, WakeCause, WakeNote};

/// The stages that are finished, each with its end: the time since the beginning of the first one.
#[derive(Debug)]
pub struct Stages {
    began: Instant,
    ends: Vec<(&'static str, Duration)>,
}

impl Stages {
    /// Begins the first stage.
    pub fn begin() -> Self {
        Self {
            began: Instant::now(),
            ends: Vec::new(),
        }
    }

    /// Ends a stage; the next one begins.
    pub fn finish(&mut self, stage: &'static str) {
        self.ends.push((stage, self.began.elapsed()));
    }

    /// Returns the note of a wake with these stages.
    pub fn note(&self, cause: WakeCause, from: Depth) -> WakeNote {
        WakeNote {
            cause,
            from,
            stages_end_micros: self.ends_micros(),
        }
    }

    /// Returns the note of a restore of the image with these stages.
    pub fn restore_note(&self, image: &ImageId) -> RestoreNote {
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

//! Frames that wait for their sandbox.

use std::collections::VecDeque;

/// What may wait for one sandbox. A connection that begins is one frame of less than a hundred bytes; what does not fit is
/// sent again by TCP.
pub const MOST_FRAMES: usize = 512;
pub const MOST_BYTES: usize = 512 << 10;

/// Frames in the order of their arrival, as the tap gave them.
#[derive(Debug, Default)]
pub struct Held {
    frames: VecDeque<Box<[u8]>>,
    bytes: usize,
}

impl Held {
    /// Keeps the frame, unless the same one waits already (a sender that got no answer says it again) or there is no room.
    pub fn keep(&mut self, frame: &[u8]) {
        if self.frames.iter().any(|waiting| **waiting == *frame) {
            return;
        }
        if self.frames.len() == MOST_FRAMES || self.bytes + frame.len() > MOST_BYTES {
            return;
        }
        self.bytes += frame.len();
        self.frames.push_back(frame.into());
    }

    /// The frames, in order; nothing waits any more.
    pub fn take(&mut self) -> VecDeque<Box<[u8]>> {
        self.bytes = 0;
        std::mem::take(&mut self.frames)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_waits_is_bounded_in_order_and_never_there_twice(
            frames in proptest::collection::vec((0_u8..40, 0_usize..3000), 0..700),
        ) {
            let mut held = Held::default();
            let mut expected: Vec<Vec<u8>> = Vec::new();
            for (value, length) in frames {
                let frame = vec![value; length];
                held.keep(&frame);
                let bytes: usize = expected.iter().map(Vec::len).sum();
                let fits = expected.len() < MOST_FRAMES && bytes + length <= MOST_BYTES;
                if fits && !expected.contains(&frame) {
                    expected.push(frame);
                }
            }
            let taken: Vec<Vec<u8>> = held.take().into_iter().map(Vec::from).collect();
            prop_assert_eq!(taken, expected);
            prop_assert!(held.take().is_empty());
        }
    }
}

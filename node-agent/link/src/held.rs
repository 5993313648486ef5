//! Frames that wait for their sandbox.

use std::collections::{HashSet, VecDeque};

use crate::packet::Says;

/// What may wait for one sandbox. A connection that begins is one frame of less than a hundred bytes. What does not fit is sent again by
/// TCP, but later each time: some hundreds of connections that speak while a loaded node wakes their sandbox are to have room.
pub const MOST_FRAMES: usize = 2048;
pub const MOST_BYTES: usize = 2 << 20;

/// Frames in the order of their arrival, as the tap gave them.
#[derive(Debug, Default)]
pub struct Held {
    frames: VecDeque<Box<[u8]>>,
    said: HashSet<Says>,
    bytes: usize,
}

impl Held {
    /// Keeps the frame, unless it is a TCP segment and one that says the same waits already (a sender that got no answer repeats itself),
    /// or there is no room. Equal datagrams are as many as were sent. `says`: of a TCP segment, which bears another time whenever it is sent.
    pub fn keep(&mut self, frame: &[u8], says: Option<Says>) {
        if says.is_some_and(|says| self.said.contains(&says)) {
            return;
        }
        if self.frames.len() == MOST_FRAMES || self.bytes + frame.len() > MOST_BYTES {
            return;
        }
        self.bytes += frame.len();
        self.said.extend(says);
        self.frames.push_back(frame.into());
    }

    /// The frames, in order; nothing waits any more.
    pub fn take(&mut self) -> Vec<Box<[u8]>> {
        self.bytes = 0;
        self.said.clear();
        std::mem::take(&mut self.frames).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A segment that ends a connection from a port, and what it says.
    fn end(port: u16, repetition: u32) -> (Vec<u8>, Option<Says>) {
        use etherparse::{PacketBuilder, TcpOptionElement};
        let own = [std::net::IpAddr::from([10, 1, 2, 3])];
        let mut frame = Vec::new();
        PacketBuilder::ethernet2([1; 6], [2; 6])
            .ipv4([10, 1, 0, 1], [10, 1, 2, 3], 64)
            .tcp(port, 80, 7, 512)
            .ack(9)
            .fin()
            .options(&[TcpOptionElement::Timestamp(repetition, 1)])
            .expect("room")
            .write(&mut frame, &[])
            .expect("a frame");
        let says = crate::packet::segment(&frame, &own).map(|segment| segment.says());
        (frame, says)
    }

    #[test]
    fn ends_that_are_repeated_for_hours_take_no_room() {
        let mut held = Held::default();
        for repetition in 0..20 {
            for port in 0..100 {
                let (frame, says) = end(port, repetition);
                held.keep(&frame, says);
            }
        }
        assert_eq!(held.take().len(), 100);
    }

    proptest! {
        #[test]
        fn what_waits_is_bounded_and_in_order_and_a_segment_is_never_there_twice(
            frames in proptest::collection::vec((0_u8..40, 0_usize..3000, any::<bool>()), 0..2500),
        ) {
            let mut held = Held::default();
            let mut expected: Vec<Vec<u8>> = Vec::new();
            for (value, length, is_segment) in frames {
                let (frame, says) = match is_segment {
                    true => end(value.into(), 1),
                    false => (vec![value; length], None),
                };
                held.keep(&frame, says);
                let bytes: usize = expected.iter().map(Vec::len).sum();
                let fits = expected.len() < MOST_FRAMES && bytes + frame.len() <= MOST_BYTES;
                if fits && !(is_segment && expected.contains(&frame)) {
                    expected.push(frame);
                }
            }
            let taken: Vec<Vec<u8>> = held.take().into_iter().map(Vec::from).collect();
            prop_assert_eq!(taken, expected);
            prop_assert!(held.take().is_empty());
        }
    }
}

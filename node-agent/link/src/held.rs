//! Frames that wait for their sandbox.

use std::collections::{HashSet, VecDeque};

use crate::packet::SegmentContent;

/// The largest number of frames that wait for one sandbox.
///
/// A connection's first frame has less than a hundred bytes. TCP repeats a frame that has no room,
/// but later each time. The limits therefore leave room for some hundreds of connections that send
/// data while a loaded node wakes their sandbox.
pub const MOST_FRAMES: usize = 2048;
/// The largest size of all frames that wait for one sandbox, in bytes.
pub const MOST_BYTES: usize = 2 << 20;

/// Frames that wait, in the order of their arrival, as the tap returned them.
#[derive(Debug, Default)]
pub struct Held {
    frames: VecDeque<Box<[u8]>>,
    contents: HashSet<SegmentContent>,
    bytes: usize,
}

impl Held {
    /// Keeps the frame if there is room.
    ///
    /// A TCP segment is not kept if one with the same content waits already: a sender without an
    /// answer repeats its segment. Equal datagrams are all kept.
    ///
    /// `content`: of a TCP segment, without its timestamps, which change whenever it is sent.
    pub fn keep(&mut self, frame: &[u8], content: Option<SegmentContent>) {
        if content.is_some_and(|content| self.contents.contains(&content)) {
            return;
        }
        if self.frames.len() == MOST_FRAMES || self.bytes + frame.len() > MOST_BYTES {
            return;
        }
        self.bytes += frame.len();
        self.contents.extend(content);
        self.frames.push_back(frame.into());
    }

    /// Returns the frames in order, and removes them.
    pub fn take(&mut self) -> Vec<Box<[u8]>> {
        self.bytes = 0;
        self.contents.clear();
        std::mem::take(&mut self.frames).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns a segment that ends a connection from a port, and its content.
    fn end(port: u16, repetition: u32) -> (Vec<u8>, Option<SegmentContent>) {
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
        let content = crate::packet::segment(&frame, &own).map(|segment| segment.says());
        (frame, content)
    }

    #[test]
    fn repeated_ends_of_connections_take_no_further_room() {
        let mut held = Held::default();
        for repetition in 0..20 {
            for port in 0..100 {
                let (frame, content) = end(port, repetition);
                held.keep(&frame, content);
            }
        }
        assert_eq!(held.take().len(), 100);
    }

    proptest! {
        #[test]
        fn held_packets_are_bounded_and_in_order_and_have_no_segment_twice(
            frames in proptest::collection::vec((0_u8..40, 0_usize..3000, any::<bool>()), 0..2500),
        ) {
            let mut held = Held::default();
            let mut expected: Vec<Vec<u8>> = Vec::new();
            for (value, length, is_segment) in frames {
                let (frame, content) = match is_segment {
                    true => end(value.into(), 1),
                    false => (vec![value; length], None),
                };
                held.keep(&frame, content);
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

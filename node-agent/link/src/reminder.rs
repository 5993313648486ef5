//! Acknowledgements of peers for a restored sandbox, so that the sandbox repeats what was lost.
//!
//! In a restore, gVisor's network stack forgets the timers of its connections. It repeats its
//! unacknowledged data only after an acceptable segment, one with the number that it expects. If a
//! peer's request was received and the answer was lost, the peer repeats its request, which has an
//! earlier number. gVisor acknowledges that segment, drops it, and does not repeat the answer
//! (docs/decisions/2026-11-23-tcp-connections-revived-after-restore.md).
//!
//! After the request itself, the sandbox therefore gets an acknowledgement in the peer's name. It
//! has the number after the peer's last segment, and that segment's acknowledgement number and
//! window. Nothing in it is new, and gVisor answers nothing to it.
//!
//! Only a peer that has sent data gets a reminder in its name. After an acknowledgement without
//! data, the next number is known only if that was no keepalive, and then the sandbox gets the
//! acknowledgement itself. A guess is not safe: gVisor resets a connection that its program has
//! closed and on which a number comes that is one too high.

use crate::acknowledgement::Acknowledgement;
use crate::packet::Segment;

/// An acknowledgement in a peer's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reminder(Acknowledgement);

impl Reminder {
    /// Returns the reminder after the last segment of a peer; `None` if the segment has no data.
    pub(crate) fn of(segment: &Segment) -> Option<Self> {
        // The window of a segment with SYN has another unit (RFC 7323, 2.2).
        if !segment.ack || segment.syn || segment.rst || segment.length == 0 {
            return None;
        }
        let length = u32::try_from(segment.length).ok()?;
        let end = segment.sequence.wrapping_add(length);
        let ends = &segment.ends;
        Some(Self(Acknowledgement {
            source: (ends.remote, ends.remote_port),
            destination: (ends.local, ends.local_port),
            sequence: end.wrapping_add(u32::from(segment.fin)),
            number: segment.acknowledgment,
            window: segment.window,
            timestamps: segment.timestamps,
        }))
    }

    /// Returns the Ethernet frame to the pod. `to`: the address of the pod's end of the link.
    pub fn frame(&self, from: [u8; 6], to: [u8; 6]) -> Option<Vec<u8>> {
        self.0.frame(from, to)
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::keepalive::tests::bare;
    use crate::packet::{Ends, segment};

    /// Returns a segment with five bytes, which end at 105.
    fn data(remote: IpAddr, local: IpAddr) -> Segment {
        let ends = Ends {
            remote,
            remote_port: 4000,
            local,
            local_port: 80,
        };
        Segment {
            ends,
            length: 5,
            timestamps: Some((70, 60)),
            ..bare(100)
        }
    }

    fn over_ipv4() -> Segment {
        data(IpAddr::from([10, 1, 0, 1]), IpAddr::from([10, 1, 2, 3]))
    }

    fn number(segment: &Segment) -> Option<u32> {
        Reminder::of(segment).map(|Reminder(acknowledgement)| acknowledgement.sequence)
    }

    #[test]
    fn a_reminders_number_follows_the_data_of_the_last_segment() {
        let segment = over_ipv4();
        assert_eq!(number(&segment), Some(105));
        assert_eq!(
            number(&Segment {
                fin: true,
                ..segment
            }),
            Some(106)
        );
        // A keepalive with a byte of rubbish, whose number was received long ago.
        let rubbish = Segment {
            sequence: 99,
            length: 1,
            ..segment
        };
        assert_eq!(number(&rubbish), Some(100));
        let last = Segment {
            sequence: u32::MAX - 4,
            ..segment
        };
        assert_eq!(number(&last), Some(0), "numbers begin anew");
    }

    #[test]
    fn a_segment_without_data_makes_no_reminder() {
        let segment = over_ipv4();
        for nothing in [
            Segment {
                length: 0,
                ..segment
            },
            Segment {
                length: 0,
                fin: true,
                ..segment
            },
            Segment {
                syn: true,
                ..segment
            },
            Segment {
                rst: true,
                ..segment
            },
            Segment {
                ack: false,
                ..segment
            },
        ] {
            assert_eq!(Reminder::of(&nothing), None, "{nothing:?}");
        }
    }

    #[test]
    fn a_reminder_differs_from_the_last_segment_only_in_number_and_length() {
        let over_ipv6 = data(
            IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 1]),
            IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 3]),
        );
        let unstamped = Segment {
            timestamps: None,
            ..over_ipv4()
        };
        let (from, to) = ([2, 0, 0, 0, 0, 3], [2, 0, 0, 0, 0, 1]);
        for last in [over_ipv4(), over_ipv6, unstamped] {
            let reminder = Reminder::of(&last).expect("a reminder");
            let frame = reminder.frame(from, to).expect("a frame");
            assert_eq!((&frame[..6], &frame[6..12]), (&to[..], &from[..]));
            let expected = Segment {
                sequence: 105,
                length: 0,
                ..last
            };
            assert_eq!(segment(&frame, &[last.ends.local]), Some(expected));
        }
    }
}

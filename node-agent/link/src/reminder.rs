//! What a sandbox that was restored is told of its peers, so that it says again what was lost.
//!
//! gVisor's network stack forgets the timers of its connections in a restore. What it has said and nobody has acknowledged it
//! says again only once something has come that belongs to the connection as it stands: with the number that it expects. A
//! peer whose question was heard and whose answer was lost repeats the question, which has an earlier number: gVisor
//! acknowledges it, drops it, and the answer is not said again (docs/decisions/2026-11-23-tcp-connections-revived-after-restore.md).
//!
//! So after the question itself the sandbox gets an acknowledgement of that peer, with the number that follows, and with what
//! the peer has acknowledged and has room for by its own last word. Nothing in it is new, and gVisor answers nothing to it.
//!
//! Only of who has said something. The number that follows an acknowledgement is known if that was no keepalive, and then the
//! sandbox gets the acknowledgement itself. To guess is not safe: gVisor resets a connection that its program has
//! closed and on which a number comes that lies one further.

use crate::acknowledgement::Acknowledgement;
use crate::packet::Segment;

/// An acknowledgement of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reminder(Acknowledgement);

impl Reminder {
    /// By the last segment of a peer.
    pub(crate) fn of(said: &Segment) -> Option<Self> {
        // The window of one that begins a connection is of another measure (RFC 7323, 2.2).
        if !said.ack || said.syn || said.rst || said.length == 0 {
            return None;
        }
        let length = u32::try_from(said.length).ok()?;
        let end = said.sequence.wrapping_add(length);
        let ends = &said.ends;
        Some(Self(Acknowledgement {
            source: (ends.remote, ends.remote_port),
            destination: (ends.local, ends.local_port),
            sequence: end.wrapping_add(u32::from(said.fin)),
            number: said.acknowledgment,
            window: said.window,
            timestamps: said.timestamps,
        }))
    }

    /// As it goes to the pod, whose Ethernet address is `to`.
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

    /// Five bytes, which end at 105.
    fn said(remote: IpAddr, local: IpAddr) -> Segment {
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
        said(IpAddr::from([10, 1, 0, 1]), IpAddr::from([10, 1, 2, 3]))
    }

    fn number(said: &Segment) -> Option<u32> {
        Reminder::of(said).map(|Reminder(told)| told.sequence)
    }

    #[test]
    fn the_number_is_the_one_that_follows_what_was_said() {
        let said = over_ipv4();
        assert_eq!(number(&said), Some(105));
        assert_eq!(number(&Segment { fin: true, ..said }), Some(106));
        // A keepalive with a byte of rubbish, which was received long ago.
        let rubbish = Segment {
            sequence: 99,
            length: 1,
            ..said
        };
        assert_eq!(number(&rubbish), Some(100));
        let last = Segment {
            sequence: u32::MAX - 4,
            ..said
        };
        assert_eq!(number(&last), Some(0), "numbers begin anew");
    }

    #[test]
    fn of_who_has_said_nothing_the_next_number_is_not_known() {
        let said = over_ipv4();
        for nothing in [
            Segment { length: 0, ..said },
            Segment {
                length: 0,
                fin: true,
                ..said
            },
            Segment { syn: true, ..said },
            Segment { rst: true, ..said },
            Segment { ack: false, ..said },
        ] {
            assert_eq!(Reminder::of(&nothing), None, "{nothing:?}");
        }
    }

    #[test]
    fn nothing_else_in_it_is_new() {
        let said6 = said(
            IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 1]),
            IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 3]),
        );
        let unstamped = Segment {
            timestamps: None,
            ..over_ipv4()
        };
        let (from, to) = ([2, 0, 0, 0, 0, 3], [2, 0, 0, 0, 0, 1]);
        for said in [over_ipv4(), said6, unstamped] {
            let reminder = Reminder::of(&said).expect("a reminder");
            let frame = reminder.frame(from, to).expect("a frame");
            assert_eq!((&frame[..6], &frame[6..12]), (&to[..], &from[..]));
            let expected = Segment {
                sequence: 105,
                length: 0,
                ..said
            };
            assert_eq!(segment(&frame, &[said.ends.local]), Some(expected));
        }
    }
}

//! What peers are asked for a sandbox that was restored, so that it says again what was lost.
//!
//! Of a peer that knows that it was heard, and waits, nothing comes that would bring back what gVisor's network stack has forgotten in a
//! restore: see [`crate::reminder`], which is for those that have said something. So each peer that may not have all that the sandbox has
//! sent gets a keepalive: a number that it has received long ago, and nothing else. Its answer says what it expects and where it is
//! itself, and goes to the sandbox. It is what gVisor itself would send on an idle connection (RFC 9293 §3.8.4).
//!
//! What is known of those connections the sandbox has said itself, and it may have said anything. So a question is no more than it could
//! have sent: from the pod's own addresses, to where it has sent before, and one for each connection.

use std::net::IpAddr;

use crate::acknowledgement::Acknowledgement;
use crate::keepalive::HALF;
use crate::packet::Ends;

/// A connection on which something of the sandbox is on its way, as its packets said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Said {
    pub ends: Ends,
    /// The first number that was not acknowledged, and the one after the last.
    pub first: u32,
    pub after: u32,
    /// What the sandbox acknowledged with its last words, which no TCP can take for more than that; its window then.
    pub acknowledged: u32,
    pub window: u16,
    /// TSval and TSecr (RFC 7323) of that. Without them some peers do not answer on a connection that uses them.
    pub timestamps: Option<(u32, u32)>,
    /// The Ethernet address that it sent to.
    pub neighbour: [u8; 6],
}

/// A keepalive to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    says: Acknowledgement,
    neighbour: [u8; 6],
}

impl Question {
    /// `own`: the pod's addresses. None where there is nothing to ask, or nobody.
    pub fn of(said: &Said, own: &[IpAddr]) -> Option<Self> {
        let ends = &said.ends;
        let is_on_its_way = (1..=HALF).contains(&said.after.wrapping_sub(said.first));
        let of_pod = own.contains(&ends.local) && ends.local_port != 0;
        if !is_on_its_way || !of_pod || !is_somebody(ends) || is_of_many(said.neighbour) {
            return None;
        }
        let says = Acknowledgement {
            source: (ends.local, ends.local_port),
            destination: (ends.remote, ends.remote_port),
            sequence: said.first.wrapping_sub(1),
            number: said.acknowledged,
            window: said.window,
            timestamps: said.timestamps,
        };
        let neighbour = said.neighbour;
        Some(Self { says, neighbour })
    }

    /// As it goes out of the pod's link, whose Ethernet address is `from`.
    pub fn frame(&self, from: [u8; 6]) -> Option<Vec<u8>> {
        self.says.frame(from, self.neighbour)
    }
}

/// Whether there is one whom the pod can have a connection with.
fn is_somebody(ends: &Ends) -> bool {
    let remote = ends.remote;
    let of_many = match remote {
        IpAddr::V4(v4) => v4.is_multicast() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_multicast(),
    };
    let same_kind = remote.is_ipv4() == ends.local.is_ipv4();
    same_kind
        && !of_many
        && !remote.is_unspecified()
        && !remote.is_loopback()
        && ends.remote_port != 0
}

/// Of more than one station (IEEE 802, the lowest bit of the first byte).
fn is_of_many([first, ..]: [u8; 6]) -> bool {
    first & 1 != 0
}

#[cfg(test)]
mod tests {
    use etherparse::{LaxSlicedPacket, TransportSlice};
    use proptest::prelude::*;

    use super::*;
    use crate::keepalive::tests::bare;
    use crate::packet::{Segment, segment};

    const POD: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const NEIGHBOUR: [u8; 6] = [2, 0, 0, 0, 0, 3];

    fn own() -> [IpAddr; 2] {
        let v6 = [0xfd00, 0, 0, 0, 0, 0, 0, 3];
        [IpAddr::from([10, 1, 2, 3]), IpAddr::from(v6)]
    }

    fn remotes() -> [IpAddr; 2] {
        let v6 = [0xfd00, 0, 0, 0, 0, 0, 0, 1];
        [IpAddr::from([10, 1, 0, 1]), IpAddr::from(v6)]
    }

    /// Five bytes are on their way.
    fn said(local: IpAddr, remote: IpAddr) -> Said {
        let ends = Ends {
            remote,
            remote_port: 4000,
            local,
            local_port: 80,
        };
        Said {
            ends,
            first: 100,
            after: 105,
            acknowledged: 500,
            window: 512,
            timestamps: Some((70, 60)),
            neighbour: NEIGHBOUR,
        }
    }

    fn over_ipv4() -> Said {
        let ([local, _], [remote, _]) = (own(), remotes());
        said(local, remote)
    }

    fn sequence(said: &Said) -> Option<u32> {
        Question::of(said, &own()).map(|question| question.says.sequence)
    }

    #[test]
    fn a_question_is_a_keepalive_of_the_pod() {
        for (local, remote) in own().into_iter().zip(remotes()) {
            for timestamps in [Some((70, 60)), None] {
                let said = Said {
                    timestamps,
                    ..said(local, remote)
                };
                let question = Question::of(&said, &own()).expect("a question");
                let frame = question.frame(POD).expect("a frame");
                assert_eq!((&frame[..6], &frame[6..12]), (&NEIGHBOUR[..], &POD[..]));
                // As its peer reads it.
                let expected = Segment {
                    ends: Ends {
                        remote: local,
                        remote_port: 80,
                        local: remote,
                        local_port: 4000,
                    },
                    timestamps,
                    ..bare(99)
                };
                assert_eq!(segment(&frame, &remotes()), Some(expected));
            }
        }
    }

    #[test]
    fn the_number_is_the_one_before_the_first_that_was_not_acknowledged() {
        let from = |first, after| Said {
            first,
            after,
            ..over_ipv4()
        };
        assert_eq!(sequence(&from(100, 105)), Some(99));
        assert_eq!(sequence(&from(0, 1)), Some(u32::MAX), "numbers begin anew");
        assert_eq!(sequence(&from(u32::MAX, 4)), Some(u32::MAX - 1));
        for (first, after) in [(100, 100), (105, 100), (0, 1 << 31)] {
            assert_eq!(sequence(&from(first, after)), None, "{first} to {after}");
        }
    }

    #[test]
    fn nobody_is_asked_in_the_name_of_others_or_together_with_others() {
        let four = over_ipv4();
        let local = |local| Ends { local, ..four.ends };
        let remote = |remote| Ends {
            remote,
            ..four.ends
        };
        let ends = [
            local(remotes()[0]),
            local(IpAddr::from([0, 0, 0, 0])),
            Ends {
                local_port: 0,
                ..four.ends
            },
            Ends {
                remote_port: 0,
                ..four.ends
            },
            remote(remotes()[1]),
            remote(IpAddr::from([0, 0, 0, 0])),
            remote(IpAddr::from([127, 0, 0, 1])),
            remote(IpAddr::from([224, 0, 0, 1])),
            remote(IpAddr::from([255, 255, 255, 255])),
            Ends {
                local: own()[1],
                remote: IpAddr::from([0xff02, 0, 0, 0, 0, 0, 0, 1]),
                ..four.ends
            },
        ];
        for ends in ends {
            assert_eq!(sequence(&Said { ends, ..four }), None, "{ends:?}");
        }
        for neighbour in [[0xff; 6], [1, 0, 0x5e, 0, 0, 1]] {
            assert_eq!(sequence(&Said { neighbour, ..four }), None);
        }
    }

    fn address() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            proptest::sample::select([own(), remotes()].concat()),
            any::<[u8; 4]>().prop_map(IpAddr::from),
            any::<[u8; 16]>().prop_map(IpAddr::from),
        ]
    }

    fn anything() -> impl Strategy<Value = Said> {
        let ends = (address(), any::<u16>(), address(), any::<u16>());
        let numbers = any::<(u32, u32, u32, u16)>();
        let rest = any::<(Option<(u32, u32)>, [u8; 6])>();
        (ends, numbers, rest).prop_map(|(ends, numbers, rest)| {
            let (remote, remote_port, local, local_port) = ends;
            let (first, after, acknowledged, window) = numbers;
            Said {
                ends: Ends {
                    remote,
                    remote_port,
                    local,
                    local_port,
                },
                first,
                after,
                acknowledged,
                window,
                timestamps: rest.0,
                neighbour: rest.1,
            }
        })
    }

    proptest! {
        /// Whatever the sandbox has said: a question bears nothing, begins and ends nothing, is the pod's, and goes where the pod's packet went.
        #[test]
        fn a_question_is_never_more_than_the_sandbox_could_have_sent(said in anything()) {
            let Some(question) = Question::of(&said, &own()) else { return Ok(()) };
            let frame = question.frame(POD).expect("a frame");
            prop_assert_eq!((&frame[..6], &frame[6..12]), (&said.neighbour[..], &POD[..]));
            let read = segment(&frame, &[said.ends.remote]).expect("a segment to the peer");
            prop_assert!(read.says_nothing() && !read.other_options);
            prop_assert!(own().contains(&read.ends.remote));
            prop_assert_eq!(read.ends.local_port, said.ends.remote_port);
            prop_assert_eq!(read.sequence.wrapping_add(1), said.first);
            prop_assert_eq!(read.acknowledgment, said.acknowledged);
            let packet = LaxSlicedPacket::from_ethernet(&frame).expect("a packet");
            let is_tcp = matches!(packet.transport, Some(TransportSlice::Tcp(_)));
            prop_assert!(is_tcp && packet.stop_err.is_none());
        }

        /// What is on its way is asked for, wherever the numbers are.
        #[test]
        fn every_peer_of_the_pod_is_asked(first in any::<u32>(), length in 1..=HALF) {
            let said = Said { first, after: first.wrapping_add(length), ..over_ipv4() };
            prop_assert_eq!(sequence(&said), Some(first.wrapping_sub(1)));
        }
    }
}

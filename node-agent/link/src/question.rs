//! Keepalives to the peers of a restored sandbox, so that the sandbox repeats what was lost.
//!
//! In a restore, gVisor's network stack forgets its retransmissions. A peer that waits, and whose
//! last segment was acknowledged, sends nothing that would bring them back. ([`crate::reminder`] is
//! for peers that have sent something.) Each peer that may not have all data of the sandbox
//! therefore gets a keepalive: a number that it has received long ago, and nothing else. Its answer
//! contains the number that it expects and its own number, and goes to the sandbox. gVisor itself
//! would send the same keepalive on an idle connection (RFC 9293 §3.8.4).
//!
//! The state of those connections comes from the sandbox's own packets, which may contain anything.
//! A question is therefore no more than the sandbox could have sent: from the pod's own addresses,
//! to an address that it has sent to before, and one for each connection.

use std::net::IpAddr;

use crate::acknowledgement::Acknowledgement;
use crate::keepalive::HALF;
use crate::packet::Ends;
use crate::unacknowledged::Unacknowledged;

/// A keepalive to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepaliveProbe {
    acknowledgement: Acknowledgement,
    neighbour: [u8; 6],
}

impl KeepaliveProbe {
    /// Returns the keepalive for a connection. `own`: the pod's addresses.
    ///
    /// Returns `None` if nothing is unacknowledged or the peer's address is not one station's.
    pub fn of(connection: &Unacknowledged, own: &[IpAddr]) -> Option<Self> {
        let ends = &connection.ends;
        let is_unacknowledged =
            (1..=HALF).contains(&connection.after.wrapping_sub(connection.first));
        let of_pod = own.contains(&ends.local) && ends.local_port != 0;
        if !is_unacknowledged || !of_pod || !is_valid_peer(ends) || is_group(connection.neighbour) {
            return None;
        }
        let acknowledgement = Acknowledgement {
            source: (ends.local, ends.local_port),
            destination: (ends.remote, ends.remote_port),
            sequence: connection.first.wrapping_sub(1),
            number: connection.acknowledged,
            window: connection.window,
            timestamps: connection.timestamps,
        };
        let neighbour = connection.neighbour;
        Some(Self {
            acknowledgement,
            neighbour,
        })
    }

    /// Returns the Ethernet frame. `from`: the address of the pod's end of the link.
    pub fn frame(&self, from: [u8; 6]) -> Option<Vec<u8>> {
        self.acknowledgement.frame(from, self.neighbour)
    }
}

/// Reports whether the pod can have a connection with this peer.
fn is_valid_peer(ends: &Ends) -> bool {
    let remote = ends.remote;
    let is_group_address = match remote {
        IpAddr::V4(v4) => v4.is_multicast() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_multicast(),
    };
    let same_family = remote.is_ipv4() == ends.local.is_ipv4();
    same_family
        && !is_group_address
        && !remote.is_unspecified()
        && !remote.is_loopback()
        && ends.remote_port != 0
}

/// Reports whether the address is that of a group (IEEE 802, the lowest bit of the first byte).
fn is_group([first, ..]: [u8; 6]) -> bool {
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

    /// Returns a connection with five unacknowledged bytes.
    fn connection(local: IpAddr, remote: IpAddr) -> Unacknowledged {
        let ends = Ends {
            remote,
            remote_port: 4000,
            local,
            local_port: 80,
        };
        Unacknowledged {
            ends,
            first: 100,
            after: 105,
            acknowledged: 500,
            window: 512,
            timestamps: Some((70, 60)),
            neighbour: NEIGHBOUR,
        }
    }

    fn over_ipv4() -> Unacknowledged {
        let ([local, _], [remote, _]) = (own(), remotes());
        connection(local, remote)
    }

    fn sequence(connection: &Unacknowledged) -> Option<u32> {
        KeepaliveProbe::of(connection, &own()).map(|question| question.acknowledgement.sequence)
    }

    #[test]
    fn a_keepalive_probe_has_the_form_of_a_keepalive_of_the_pod() {
        for (local, remote) in own().into_iter().zip(remotes()) {
            for timestamps in [Some((70, 60)), None] {
                let connection = Unacknowledged {
                    timestamps,
                    ..connection(local, remote)
                };
                let question = KeepaliveProbe::of(&connection, &own()).expect("a question");
                let frame = question.frame(POD).expect("a frame");
                assert_eq!((&frame[..6], &frame[6..12]), (&NEIGHBOUR[..], &POD[..]));
                // The segment as the peer reads it.
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
    fn a_probes_number_is_just_before_the_first_unacknowledged_number() {
        let from = |first, after| Unacknowledged {
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
    fn no_probe_has_a_foreign_source_or_goes_to_several_peers() {
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
            assert_eq!(sequence(&Unacknowledged { ends, ..four }), None, "{ends:?}");
        }
        for neighbour in [[0xff; 6], [1, 0, 0x5e, 0, 0, 1]] {
            assert_eq!(sequence(&Unacknowledged { neighbour, ..four }), None);
        }
    }

    fn address() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            proptest::sample::select([own(), remotes()].concat()),
            any::<[u8; 4]>().prop_map(IpAddr::from),
            any::<[u8; 16]>().prop_map(IpAddr::from),
        ]
    }

    fn anything() -> impl Strategy<Value = Unacknowledged> {
        let ends = (address(), any::<u16>(), address(), any::<u16>());
        let numbers = any::<(u32, u32, u32, u16)>();
        let rest = any::<(Option<(u32, u32)>, [u8; 6])>();
        (ends, numbers, rest).prop_map(|(ends, numbers, rest)| {
            let (remote, remote_port, local, local_port) = ends;
            let (first, after, acknowledged, window) = numbers;
            Unacknowledged {
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
        /// For any packets of the sandbox: a question has no data, begins and ends nothing, has an
        /// address of the pod, and goes where the pod's packet went.
        #[test]
        fn a_probe_has_only_content_that_the_sandbox_could_have_sent(connection in anything()) {
            let Some(question) = KeepaliveProbe::of(&connection, &own()) else { return Ok(()) };
            let frame = question.frame(POD).expect("a frame");
            prop_assert_eq!((&frame[..6], &frame[6..12]), (&connection.neighbour[..], &POD[..]));
            let read = segment(&frame, &[connection.ends.remote]).expect("a segment to the peer");
            prop_assert!(read.has_no_data() && !read.other_options);
            prop_assert!(own().contains(&read.ends.remote));
            prop_assert_eq!(read.ends.local_port, connection.ends.remote_port);
            prop_assert_eq!(read.sequence.wrapping_add(1), connection.first);
            prop_assert_eq!(read.acknowledgment, connection.acknowledged);
            let packet = LaxSlicedPacket::from_ethernet(&frame).expect("a packet");
            let is_tcp = matches!(packet.transport, Some(TransportSlice::Tcp(_)));
            prop_assert!(is_tcp && packet.stop_err.is_none());
        }

        /// Unacknowledged data makes a question, for all numbers.
        #[test]
        fn every_peer_with_unacknowledged_data_is_probed(first in any::<u32>(), length in 1..=HALF) {
            let connection = Unacknowledged { first, after: first.wrapping_add(length), ..over_ipv4() };
            prop_assert_eq!(sequence(&connection), Some(first.wrapping_sub(1)));
        }
    }
}

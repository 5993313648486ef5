//! What a frame on its way to a sleeping pod means.

use std::net::IpAddr;

use etherparse::{Icmpv4Type, Icmpv6Type, LaxNetSlice, LaxSlicedPacket, TransportSlice};

/// Length of an Ethernet header.
pub const ETHERNET: usize = 14;

/// The ends of a TCP segment on its way to a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tcp {
    pub remote: IpAddr,
    pub remote_port: u16,
    pub local: IpAddr,
    pub local_port: u16,
    /// It is a connection's first.
    pub begins: bool,
}

impl Tcp {
    /// Whether both are of the same connection.
    pub fn is_of(&self, other: &Self) -> bool {
        let ends = |s: &Self| (s.remote, s.remote_port, s.local, s.local_port);
        ends(self) == ends(other)
    }
}

/// Reads a TCP segment for one of the pod's addresses.
pub fn tcp(frame: &[u8], own: &[IpAddr]) -> Option<Tcp> {
    let packet = LaxSlicedPacket::from_ethernet(frame).ok()?;
    let (remote, local) = match packet.net.as_ref()? {
        LaxNetSlice::Ipv4(ip) => (
            IpAddr::V4(ip.header().source_addr()),
            IpAddr::V4(ip.header().destination_addr()),
        ),
        LaxNetSlice::Ipv6(ip) => (
            IpAddr::V6(ip.header().source_addr()),
            IpAddr::V6(ip.header().destination_addr()),
        ),
        LaxNetSlice::Arp(_) => return None,
    };
    let Some(TransportSlice::Tcp(segment)) = &packet.transport else {
        return None;
    };
    own.contains(&local).then(|| Tcp {
        remote,
        remote_port: segment.source_port(),
        local,
        local_port: segment.destination_port(),
        begins: segment.syn() && !segment.ack(),
    })
}

/// Where an IP packet goes.
pub(crate) fn destination_of_ip(packet: &[u8]) -> Option<IpAddr> {
    let packet = LaxSlicedPacket::from_ip(packet).ok()?;
    destination(&packet).map(|(address, _)| address)
}

/// What is to be done about a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// Not for the pod's own addresses, or of a kind that the kernel answers while the pod sleeps (ARP, neighbour
    /// discovery): nothing.
    NotForPod,
    /// The sandbox must get it, but nobody waits for an answer: an acknowledgement, an end of a connection, an error.
    Quiet,
    /// Somebody wants something of the program.
    Wakes(Cause),
}

/// What woke a sandbox; the words are those of `torpor.dev/wake-on`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    Tcp {
        port: u16,
    },
    Udp {
        port: u16,
    },
    Icmp,
    /// Any other protocol above IP, a later part of a fragmented packet included.
    Other {
        protocol: u8,
    },
}

/// Reads an Ethernet frame. `own` are the pod's addresses; a frame that is cut short counts by what can be read.
pub fn meaning(frame: &[u8], own: &[IpAddr]) -> Meaning {
    let Ok(packet) = LaxSlicedPacket::from_ethernet(frame) else {
        return Meaning::NotForPod;
    };
    let Some((destination, protocol)) = destination(&packet) else {
        return Meaning::NotForPod;
    };
    if !own.contains(&destination) {
        return Meaning::NotForPod;
    }
    match &packet.transport {
        Some(TransportSlice::Tcp(tcp)) => {
            // A connection that begins, or data on one. What else there is goes by itself or tells of an end.
            if !tcp.rst() && (tcp.syn() || !tcp.payload().is_empty()) {
                Meaning::Wakes(Cause::Tcp {
                    port: tcp.destination_port(),
                })
            } else {
                Meaning::Quiet
            }
        }
        Some(TransportSlice::Udp(udp)) => Meaning::Wakes(Cause::Udp {
            port: udp.destination_port(),
        }),
        Some(TransportSlice::Icmpv4(icmp)) => match icmp.icmp_type() {
            Icmpv4Type::EchoRequest(_) | Icmpv4Type::TimestampRequest(_) => {
                Meaning::Wakes(Cause::Icmp)
            }
            _ => Meaning::Quiet,
        },
        Some(TransportSlice::Icmpv6(icmp)) => match icmp.icmp_type() {
            Icmpv6Type::EchoRequest(_) => Meaning::Wakes(Cause::Icmp),
            _ if (NEIGHBOUR_FIRST..=NEIGHBOUR_LAST).contains(&icmp.type_u8()) => Meaning::NotForPod,
            _ => Meaning::Quiet,
        },
        // Who belongs to which group is no business of a program.
        Some(TransportSlice::Igmp(_)) => Meaning::Quiet,
        None => Meaning::Wakes(Cause::Other { protocol }),
    }
}

/// Router and neighbour solicitation and advertisement, redirect (RFC 4861).
const NEIGHBOUR_FIRST: u8 = 133;
const NEIGHBOUR_LAST: u8 = 137;

fn destination(packet: &LaxSlicedPacket<'_>) -> Option<(IpAddr, u8)> {
    match packet.net.as_ref()? {
        LaxNetSlice::Ipv4(ip) => Some((
            IpAddr::V4(ip.header().destination_addr()),
            ip.payload().ip_number.0,
        )),
        LaxNetSlice::Ipv6(ip) => Some((
            IpAddr::V6(ip.header().destination_addr()),
            ip.payload().ip_number.0,
        )),
        LaxNetSlice::Arp(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    const POD4: [u8; 4] = [10, 1, 2, 3];
    const POD6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3];

    fn own() -> Vec<IpAddr> {
        vec![IpAddr::from(POD4), IpAddr::from(POD6)]
    }

    fn to4(address: [u8; 4]) -> etherparse::PacketBuilderStep<etherparse::IpHeaders> {
        PacketBuilder::ethernet2([1; 6], [2; 6]).ipv4([10, 1, 0, 1], address, 64)
    }

    fn to6() -> etherparse::PacketBuilderStep<etherparse::IpHeaders> {
        PacketBuilder::ethernet2([1; 6], [2; 6]).ipv6([1; 16], POD6, 64)
    }

    macro_rules! frame {
        ($builder:expr, $payload:expr) => {{
            let mut bytes = Vec::new();
            $builder.write(&mut bytes, $payload).expect("a frame");
            bytes
        }};
    }

    const TCP: Meaning = Meaning::Wakes(Cause::Tcp { port: 80 });
    const UDP: Meaning = Meaning::Wakes(Cause::Udp { port: 53 });
    const ICMP: Meaning = Meaning::Wakes(Cause::Icmp);

    #[test]
    fn what_wants_an_answer_wakes_and_what_does_not_is_kept() {
        let cases: Vec<(&str, Vec<u8>, Meaning)> = vec![
            (
                "syn",
                frame!(to4(POD4).tcp(4000, 80, 1, 512).syn(), &[]),
                TCP,
            ),
            (
                "data",
                frame!(to4(POD4).tcp(4000, 80, 1, 512).ack(9), b"hello"),
                TCP,
            ),
            (
                "last data",
                frame!(to4(POD4).tcp(4000, 80, 1, 512).ack(9).fin(), b"bye"),
                TCP,
            ),
            (
                "syn, IPv6",
                frame!(to6().tcp(4000, 80, 1, 512).syn(), &[]),
                TCP,
            ),
            (
                "keepalive",
                frame!(to4(POD4).tcp(4000, 80, 1, 512).ack(9), &[]),
                Meaning::Quiet,
            ),
            (
                "end",
                frame!(to4(POD4).tcp(4000, 80, 1, 512).ack(9).fin(), &[]),
                Meaning::Quiet,
            ),
            (
                "reset",
                frame!(to4(POD4).tcp(4000, 80, 1, 512).rst(), &[]),
                Meaning::Quiet,
            ),
            ("udp", frame!(to4(POD4).udp(4000, 53), &[]), UDP),
            ("udp, IPv6", frame!(to6().udp(4000, 53), b"x"), UDP),
            (
                "ping",
                frame!(to4(POD4).icmpv4_echo_request(1, 1), b"x"),
                ICMP,
            ),
            (
                "ping, IPv6",
                frame!(to6().icmpv6_echo_request(1, 1), b"x"),
                ICMP,
            ),
            (
                "pong",
                frame!(to4(POD4).icmpv4_echo_reply(1, 1), b"x"),
                Meaning::Quiet,
            ),
            (
                "who has, IPv6",
                frame!(to6().icmpv6_raw(135, 0, [0; 4]), &[0; 16]),
                Meaning::NotForPod,
            ),
            (
                "another's",
                frame!(to4([10, 1, 2, 4]).tcp(4000, 80, 1, 512).syn(), &[]),
                Meaning::NotForPod,
            ),
            (
                "broadcast",
                frame!(to4([255; 4]).udp(67, 68), &[]),
                Meaning::NotForPod,
            ),
            (
                "multicast",
                frame!(to4([224, 0, 0, 251]).udp(5353, 5353), &[]),
                Meaning::NotForPod,
            ),
        ];
        for (name, frame, expected) in cases {
            assert_eq!(meaning(&frame, &own()), expected, "{name}");
        }
    }

    #[test]
    fn an_arp_request_is_the_kernels() {
        let mut frame = vec![0xff; 6];
        frame.extend([2; 6]);
        frame.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend([0; 20]);
        assert_eq!(meaning(&frame, &own()), Meaning::NotForPod);
    }

    #[test]
    fn a_protocol_that_is_not_known_wakes_by_its_number() {
        let mut frame = frame!(to4(POD4).udp(1, 2), b"xxxxxxxx");
        // SCTP, in place of UDP.
        frame[14 + 9] = 132;
        assert_eq!(
            meaning(&frame, &own()),
            Meaning::Wakes(Cause::Other { protocol: 132 })
        );
    }

    proptest! {
        #[test]
        fn no_frame_is_too_strange(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            meaning(&bytes, &own());
        }

        /// Whatever follows the addresses: what is for the pod is never taken for somebody else's, and the other way round.
        #[test]
        fn only_the_pods_own_addresses_count(rest in proptest::collection::vec(any::<u8>(), 0..64), last in any::<u8>()) {
            let mut frame = frame!(to4([10, 1, 2, last]).udp(1, 2), &[]);
            frame.truncate(14 + 20);
            frame.extend(rest);
            prop_assert_eq!(meaning(&frame, &own()) == Meaning::NotForPod, last != 3);
        }
    }
}

//! Reads the frames on their way to a sleeping pod, and decides what they mean for it.

use std::net::IpAddr;

use etherparse::{
    Icmpv4Type, Icmpv6Type, IpNumber, LaxNetSlice, LaxSlicedPacket, TcpOptionElement,
    TransportSlice, ip_number,
};
use torpor_core::wake_on::WakeOn;

/// Length of an Ethernet header.
pub const ETHERNET: usize = 14;

/// The addresses and ports of a TCP connection of a pod. `local`: the pod's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ends {
    pub remote: IpAddr,
    pub remote_port: u16,
    pub local: IpAddr,
    pub local_port: u16,
}

/// A TCP segment on its way to a pod (RFC 9293 §3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub ends: Ends,
    pub sequence: u32,
    pub acknowledgment: u32,
    pub window: u16,
    pub syn: bool,
    pub fin: bool,
    pub rst: bool,
    pub ack: bool,
    /// Bytes of data.
    pub length: usize,
    /// TSval and TSecr (RFC 7323), where the connection uses them.
    pub timestamps: Option<(u32, u32)>,
    /// True if it has options that are neither timestamps nor padding.
    pub other_options: bool,
}

impl Segment {
    /// Reports whether the segment begins a connection: SYN without ACK.
    pub fn begins(&self) -> bool {
        self.syn && !self.ack
    }

    /// Reports whether the header has ACK and none of SYN, FIN and RST. The segment may have data.
    pub fn only_acknowledges(&self) -> bool {
        self.ack && !(self.syn || self.fin || self.rst)
    }

    /// Reports whether the segment is an acknowledgement without data, with any options.
    pub fn has_no_data(&self) -> bool {
        self.only_acknowledges() && self.length == 0
    }

    /// Returns the segment's content, without its timestamps.
    ///
    /// A segment that is sent again has the same content.
    pub fn says(&self) -> SegmentContent {
        SegmentContent {
            ends: self.ends,
            sequence: self.sequence,
            length: self.length,
            flags: [self.syn, self.fin, self.rst, self.ack],
            acknowledges: self
                .has_no_data()
                .then_some((self.acknowledgment, self.window)),
        }
    }
}

/// The part of a segment that distinguishes it from others of its connection: see
/// [`Segment::says`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SegmentContent {
    ends: Ends,
    sequence: u32,
    length: usize,
    flags: [bool; 4],
    /// Acknowledgement number and window of a segment that is an acknowledgement without data.
    acknowledges: Option<(u32, u16)>,
}

/// Reads a TCP segment for one of the pod's addresses (`own`). Returns `None` for any other frame.
pub fn segment(frame: &[u8], own: &[IpAddr]) -> Option<Segment> {
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
    let Some(TransportSlice::Tcp(tcp)) = &packet.transport else {
        return None;
    };
    if !own.contains(&local) {
        return None;
    }
    let (mut timestamps, mut other_options) = (None, false);
    for option in tcp.options_iterator() {
        match option {
            Ok(TcpOptionElement::Timestamp(value, echo)) => timestamps = Some((value, echo)),
            Ok(TcpOptionElement::Noop) => {}
            Ok(_) | Err(_) => other_options = true,
        }
    }
    Some(Segment {
        ends: Ends {
            remote,
            remote_port: tcp.source_port(),
            local,
            local_port: tcp.destination_port(),
        },
        sequence: tcp.sequence_number(),
        acknowledgment: tcp.acknowledgment_number(),
        window: tcp.window_size(),
        syn: tcp.syn(),
        fin: tcp.fin(),
        rst: tcp.rst(),
        ack: tcp.ack(),
        length: tcp.payload().len(),
        timestamps,
        other_options,
    })
}

/// Reports whether a frame has a TCP segment in it, or the beginning of one.
pub fn is_tcp(frame: &[u8]) -> bool {
    let packet = LaxSlicedPacket::from_ethernet(frame);
    packet.is_ok_and(|packet| matches!(packet.transport, Some(TransportSlice::Tcp(_))))
}

/// Returns the destination address of an IP packet.
pub(crate) fn destination_of_ip(packet: &[u8]) -> Option<IpAddr> {
    let packet = LaxSlicedPacket::from_ip(packet).ok()?;
    destination(&packet).map(|(address, _)| address)
}

/// The meaning of a frame for the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// The frame is to be ignored.
    ///
    /// Either the frame is not for the pod's own addresses, or the kernel answers it while the pod
    /// sleeps (ARP, neighbour discovery).
    NotForPod,
    /// The sandbox must get the frame, but no peer waits for an answer: an acknowledgement, an
    /// end of a connection, an error.
    Quiet,
    /// A peer wants an answer of the program, but the pod's configuration forbids a wake for it.
    Unwanted,
    /// A peer wants an answer of the program.
    Wakes(Cause),
}

impl Meaning {
    /// Returns the meaning for a pod that only some packets wake.
    pub fn for_pod_that_wakes_on(self, wake_on: &WakeOn) -> Self {
        match self {
            Self::Wakes(cause) if !cause.is_wanted(wake_on) => Self::Unwanted,
            other => other,
        }
    }
}

/// The packet that woke a sandbox, in the words of `torpor.dev/wake-on`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    Tcp {
        port: u16,
    },
    Udp {
        port: u16,
    },
    Icmp,
    /// Any other protocol above IP, or a later fragment of a packet.
    Other {
        protocol: u8,
    },
    /// A packet that came before the keeper watched the link, of any kind.
    Earlier,
}

impl Cause {
    /// Reports whether this packet wakes a pod that the packets in `wake_on` wake.
    pub fn is_wanted(self, wake_on: &WakeOn) -> bool {
        let WakeOn::Only {
            tcp,
            udp,
            icmp,
            ports,
        } = wake_on
        else {
            return true;
        };
        let listed = |port| ports.is_empty() || ports.iter().any(|range| range.contains(&port));
        match self {
            Self::Tcp { port } => *tcp && listed(port),
            Self::Udp { port } => *udp && listed(port),
            Self::Icmp => *icmp,
            Self::Earlier => *tcp || *udp || *icmp,
            // A fragment has no port.
            Self::Other { protocol } => match IpNumber(protocol) {
                ip_number::TCP => *tcp,
                ip_number::UDP => *udp,
                ip_number::ICMP | ip_number::IPV6_ICMP => *icmp,
                _ => false,
            },
        }
    }
}

/// Returns the meaning of an Ethernet frame.
///
/// `own`: the pod's addresses. A frame that is cut short counts by its readable part.
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
            // A segment that begins a connection or bears data wants an answer. The peer's
            // network stack sends other segments by itself, or they end a connection.
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
        // The network stack, not the program, handles membership of groups.
        Some(TransportSlice::Igmp(_)) => Meaning::Quiet,
        None => Meaning::Wakes(Cause::Other { protocol }),
    }
}

/// Types of router and neighbour solicitation and advertisement, and redirect (RFC 4861).
const NEIGHBOUR_FIRST: u8 = 133;
const NEIGHBOUR_LAST: u8 = 137;

/// Returns the destination address and the number of the protocol above IP.
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
mod tests;

//! A TCP acknowledgement without data, and its Ethernet frame.

use std::net::IpAddr;

use etherparse::{PacketBuilder, TcpOptionElement};

const HOPS: u8 = 64;

/// An acknowledgement from one end of a connection to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Acknowledgement {
    /// Address and port.
    pub(crate) source: (IpAddr, u16),
    pub(crate) destination: (IpAddr, u16),
    pub(crate) sequence: u32,
    /// The acknowledgement number.
    pub(crate) number: u32,
    pub(crate) window: u16,
    /// TSval and TSecr (RFC 7323) if the connection uses timestamps.
    pub(crate) timestamps: Option<(u32, u32)>,
}

impl Acknowledgement {
    /// Returns the Ethernet frame between the two Ethernet addresses.
    ///
    /// Returns `None` if one end has an IPv4 address and the other one an IPv6 address.
    pub(crate) fn frame(&self, source: [u8; 6], destination: [u8; 6]) -> Option<Vec<u8>> {
        let ethernet = PacketBuilder::ethernet2(source, destination);
        let ip = match (self.source.0, self.destination.0) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                ethernet.ipv4(source.octets(), destination.octets(), HOPS)
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                ethernet.ipv6(source.octets(), destination.octets(), HOPS)
            }
            _ => return None,
        };
        let (source, destination) = (self.source.1, self.destination.1);
        let tcp = ip
            .tcp(source, destination, self.sequence, self.window)
            .ack(self.number);
        let stamp = self.timestamps.map(|(value, echo)| {
            let stamp = TcpOptionElement::Timestamp(value, echo);
            [TcpOptionElement::Noop, TcpOptionElement::Noop, stamp]
        });
        let tcp = match &stamp {
            Some(options) => tcp.options(options).ok()?,
            None => tcp,
        };
        let mut bytes = Vec::with_capacity(tcp.size(0));
        tcp.write(&mut bytes, &[]).ok()?;
        Some(bytes)
    }
}

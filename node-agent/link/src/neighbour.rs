//! Answers ARP requests (RFC 826) and neighbour solicitations (RFC 4861 §7.2.4) for a
//! pod's addresses while the network stack that has them is stopped.

use std::net::{IpAddr, Ipv6Addr};

use etherparse::icmpv6::{NeighborAdvertisementHeader, TYPE_NEIGHBOR_SOLICITATION};
use etherparse::{
    ArpEthIpv4Packet, ArpOperation, Icmpv6Type, LaxNetSlice, LaxSlicedPacket, PacketBuilder,
    TransportSlice,
};

use crate::packet::ETHERNET;

type Mac = [u8; 6];

/// The hop limit that proves that the sender is on the link, because no router forwards a
/// packet with it (RFC 4861 §11.2).
const ON_LINK: u8 = 255;
/// The group of all nodes of a link, and the Ethernet address of that group (RFC 4291 §2.7.1, RFC
/// 2464 §7).
const ALL_NODES: (Ipv6Addr, Mac) = (
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1),
    [0x33, 0x33, 0, 0, 0, 1],
);
/// An option of a neighbour advertisement: the target's link-layer address, with its length in
/// units of eight bytes (RFC 4861 §4.6.1).
const TARGET_ADDRESS: [u8; 2] = [2, 1];

/// Returns the answer to an Ethernet frame that requests the Ethernet address of one of `own`.
///
/// `own`: the pod's addresses, all of which are at `mac`. Returns `None` for any other frame.
pub fn answer(frame: &[u8], own: &[IpAddr], mac: Mac) -> Option<Vec<u8>> {
    let packet = LaxSlicedPacket::from_ethernet(frame).ok()?;
    // The answer goes to the sender of the frame. The request may contain any other address.
    let sender: Mac = frame.get(6..ETHERNET - 2)?.try_into().ok()?;
    match packet.net.as_ref()? {
        LaxNetSlice::Arp(arp) => {
            let request = arp.to_packet().try_eth_ipv4().ok()?;
            answer_arp(&request, own, mac, sender)
        }
        LaxNetSlice::Ipv6(ip) if ip.header().hop_limit() == ON_LINK => {
            let Some(TransportSlice::Icmpv6(icmp)) = &packet.transport else {
                return None;
            };
            if icmp.type_u8() != TYPE_NEIGHBOR_SOLICITATION {
                return None;
            }
            let target: [u8; 16] = icmp.payload().get(..16)?.try_into().ok()?;
            answer_solicitation(target.into(), ip.header().source_addr(), own, mac, sender)
        }
        _ => None,
    }
}

fn answer_arp(
    request: &ArpEthIpv4Packet,
    own: &[IpAddr],
    mac: Mac,
    sender: Mac,
) -> Option<Vec<u8>> {
    let target = request.target_ipv4_addr();
    let is_request = request.operation == ArpOperation::REQUEST;
    if !is_request || !own.contains(&IpAddr::V4(target)) {
        return None;
    }
    let reply = ArpEthIpv4Packet {
        operation: ArpOperation::REPLY,
        sender_mac: mac,
        sender_ipv4: request.target_ipv4,
        target_mac: sender,
        target_ipv4: request.sender_ipv4,
    };
    let mut frame = Vec::new();
    let ethernet = PacketBuilder::ethernet2(mac, sender);
    ethernet.arp(reply.into()).write(&mut frame).ok()?;
    Some(frame)
}

fn answer_solicitation(
    target: Ipv6Addr,
    source: Ipv6Addr,
    own: &[IpAddr],
    mac: Mac,
    sender: Mac,
) -> Option<Vec<u8>> {
    if !own.contains(&IpAddr::V6(target)) {
        return None;
    }
    // A solicitation without a source address is a probe of a station that wants this address. Its
    // answer goes to all nodes.
    let is_probe = source.is_unspecified();
    let (to, to_mac) = match is_probe {
        true => ALL_NODES,
        false => (source, sender),
    };
    let reply = Icmpv6Type::NeighborAdvertisement(NeighborAdvertisementHeader {
        router: false,
        solicited: !is_probe,
        r#override: true,
    });
    let payload = [&target.octets()[..], &TARGET_ADDRESS, &mac].concat();
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(mac, to_mac)
        .ipv6(target.octets(), to.octets(), ON_LINK)
        .icmpv6(reply)
        .write(&mut frame, &payload)
        .ok()?;
    Some(frame)
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: Mac = [2, 0, 0, 0, 0, 7];
    const PEER: Mac = [2, 0, 0, 0, 0, 9];
    const BROADCAST: Mac = [0xff; 6];

    fn own() -> [IpAddr; 2] {
        ["10.0.0.7", "fd00::7"].map(|address| address.parse().expect("an address"))
    }

    fn arp(operation: ArpOperation, target: [u8; 4]) -> Vec<u8> {
        let message = ArpEthIpv4Packet {
            operation,
            // Differs from the frame's source address.
            sender_mac: [6; 6],
            sender_ipv4: [10, 0, 0, 9],
            target_mac: [0; 6],
            target_ipv4: target,
        };
        let mut frame = Vec::new();
        let ethernet = PacketBuilder::ethernet2(PEER, BROADCAST);
        ethernet
            .arp(message.into())
            .write(&mut frame)
            .expect("a frame");
        frame
    }

    fn solicitation(source: &str, target: &str, hops: u8, of_type: u8) -> Vec<u8> {
        let [source, target] =
            [source, target].map(|address| address.parse::<Ipv6Addr>().expect("an address"));
        // Solicited-node multicast (RFC 4291 §2.7.1).
        let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 7);
        let mut frame = Vec::new();
        PacketBuilder::ethernet2(PEER, [0x33, 0x33, 0xff, 0, 0, 7])
            .ipv6(source.octets(), group.octets(), hops)
            .icmpv6_raw(of_type, 0, [0; 4])
            .write(&mut frame, &target.octets())
            .expect("a frame");
        frame
    }

    #[test]
    fn an_arp_request_is_answered_with_the_link_of_the_address() {
        let reply = answer(&arp(ArpOperation::REQUEST, [10, 0, 0, 7]), &own(), POD);
        let reply = reply.expect("an answer");
        let packet = LaxSlicedPacket::from_ethernet(&reply).expect("a frame");
        assert_eq!(reply[..12], [PEER, POD].concat());
        let Some(LaxNetSlice::Arp(arp)) = packet.net else {
            panic!("{packet:?}")
        };
        let expected = ArpEthIpv4Packet {
            operation: ArpOperation::REPLY,
            sender_mac: POD,
            sender_ipv4: [10, 0, 0, 7],
            target_mac: PEER,
            target_ipv4: [10, 0, 0, 9],
        };
        assert_eq!(arp.to_packet().try_eth_ipv4(), Ok(expected));
    }

    /// Returns destination, flags (RFC 4861 §4.4: R, S, O) and the payload after them, of an
    /// advertisement whose checksum is right.
    fn advertisement(frame: &[u8]) -> (Ipv6Addr, u8, Vec<u8>) {
        let packet = LaxSlicedPacket::from_ethernet(frame).expect("a frame");
        let (Some(LaxNetSlice::Ipv6(ip)), Some(TransportSlice::Icmpv6(icmp))) =
            (packet.net, packet.transport)
        else {
            panic!("no advertisement")
        };
        let header = ip.header();
        assert_eq!((header.hop_limit(), icmp.type_u8()), (255, 136));
        assert!(icmp.is_checksum_valid(header.source(), header.destination()));
        let flags = icmp.bytes5to8()[0];
        (header.destination_addr(), flags, icmp.payload().to_vec())
    }

    #[test]
    fn a_solicitation_is_answered_and_a_duplicate_check_is_answered_to_all_nodes() {
        let payload = [&own_v6().octets()[..], &[2, 1], &POD].concat();
        for (source, to, to_mac, flags) in [
            ("fd00::9", "fd00::9", PEER, 0x60),
            ("::", "ff02::1", [0x33, 0x33, 0, 0, 0, 1], 0x20),
        ] {
            let request = solicitation(source, "fd00::7", 255, 135);
            let answer = answer(&request, &own(), POD).expect("an answer");
            assert_eq!(answer[..12], [to_mac, POD].concat());
            let to: Ipv6Addr = to.parse().expect("an address");
            assert_eq!(advertisement(&answer), (to, flags, payload.clone()));
        }
    }

    fn own_v6() -> Ipv6Addr {
        Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 7)
    }

    #[test]
    fn only_a_valid_request_for_an_own_address_is_answered() {
        let whole = solicitation("fd00::9", "fd00::7", 255, 135);
        for (frame, why) in [
            (
                arp(ArpOperation::REQUEST, [10, 0, 0, 8]),
                "another's address",
            ),
            (arp(ArpOperation::REPLY, [10, 0, 0, 7]), "no question"),
            (solicitation("fd00::9", "fd00::8", 255, 135), "another's"),
            (solicitation("fd00::9", "fd00::7", 254, 135), "from afar"),
            (solicitation("fd00::9", "fd00::7", 255, 136), "no question"),
            (whole[..whole.len() - 1].to_vec(), "cut short"),
            (vec![], "nothing"),
        ] {
            assert_eq!(answer(&frame, &own(), POD), None, "{why}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_frame_is_read_without_a_panic(frame in proptest::collection::vec(0_u8.., 0..120)) {
            let _ = answer(&frame, &own(), POD);
        }
    }
}

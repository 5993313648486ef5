//! The BPF program that records the times of packets.

use crate::bpf::Register::{R0, R1, R2, R3, R4, R6, R7, R8, R9, R10};
use crate::bpf::packet::{
    ETH_P_IP, ETH_P_IPV6, IPPROTO_TCP, Offset, PACKET_HOST, SKB_PKT_TYPE, SKB_PROTOCOL,
    TC_ACT_UNSPEC, copy_header, lengths_of_ipv4,
};
use crate::bpf::{self, Code, Helper, Instruction};
use crate::net::Direction;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd};

/// The key of all packets that are not recorded by port. The key of the others is the port.
pub(super) const OTHER_TRAFFIC: u32 = 1 << 16;
/// Added to the key of incoming packets that begin a connection or bear data.
pub(super) const MAY_WANT_ANSWER: u32 = 1 << 17;

/// The node's own addresses towards a pod.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct NodeAddresses {
    pub(super) v4: Option<Ipv4Addr>,
    pub(super) v6: Option<Ipv6Addr>,
}

const IPPROTO_IGMP: i32 = 2;
const IPPROTO_ICMPV6: i32 = 58;
/// The flags FIN, SYN and RST.
const BEGINS_OR_ENDS: i32 = 0x07;
const SYN: i32 = 0x02;
/// The flags SYN and ACK.
const SYN_ACK: i32 = 0x12;

// Offsets on the stack.
const IP: i16 = -64;
const TCP: i16 = -88;
const KEY: i16 = -16;
const TIME: i16 = -8;

/// Jump targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Label {
    Ipv6,
    Icmpv6,
    NotTcp4,
    NotTcp6,
    NotNode4,
    NotNode6,
    Tcp,
    NoData,
    Counted,
    NotNode,
    NoAnswer,
    Others,
    Note,
    New,
    Done,
}

/// Stores the time at the key, if the map has this key.
fn note_at_key(code: &mut Code<Label>, map: i32, if_missing: Label) {
    key_in_map(code, map);
    code.push(bpf::call(Helper::MapLookupElem));
    code.jump(bpf::jump_if_zero(R0), if_missing);
    code.push(bpf::copy(R7, R0));
    code.push(bpf::call(Helper::KtimeGetNs));
    code.push(bpf::store64(R7, 0, R0));
}

fn key_in_map(code: &mut Code<Label>, map: i32) {
    code.push(bpf::copy(R2, R10));
    code.push(bpf::add(R2, KEY.into()));
    code.extend(bpf::set_map(R1, map));
}

/// Returns the program for one direction.
///
/// R6 is the packet, R7 the length of the IP header, R8 the length of the packet's remainder, R9
/// whether the node is the other end.
pub(super) fn code(direction: Direction, node: NodeAddresses, map: &OwnedFd) -> Vec<Instruction> {
    let map = map.as_raw_fd();
    let mut code = Code::new();
    code.push(bpf::copy(R6, R1));
    if matches!(direction, Direction::In) {
        // A bridge that does not know the receiver's port sends the packet to all ports.
        code.push(bpf::load32(R2, R6, SKB_PKT_TYPE));
        code.jump(bpf::jump_if_not(R2, PACKET_HOST), Label::Done);
    }
    code.push(bpf::load32(R2, R6, SKB_PROTOCOL));
    code.push(bpf::from_network_order16(R2));
    code.jump(bpf::jump_if(R2, ETH_P_IPV6), Label::Ipv6);
    code.jump(bpf::jump_if_not(R2, ETH_P_IP), Label::Done);
    ipv4(&mut code, direction, node);
    code.label(Label::Ipv6);
    ipv6(&mut code, direction, node);
    tcp(&mut code, direction);

    code.label(Label::Others);
    code.push(bpf::store32(R10, KEY, other_key(direction)));
    code.label(Label::Note);
    note_at_key(&mut code, map, Label::New);
    code.jump(bpf::jump(), Label::Done);
    code.label(Label::New);
    code.push(bpf::call(Helper::KtimeGetNs));
    code.push(bpf::store64(R10, TIME, R0));
    key_in_map(&mut code, map);
    code.push(bpf::copy(R3, R10));
    code.push(bpf::add(R3, TIME.into()));
    code.push(bpf::set(R4, 0));
    code.push(bpf::call(Helper::MapUpdateElem));
    code.jump(bpf::jump_if_zero(R0), Label::Done);
    // The map is full.
    code.push(bpf::store32(R10, KEY, other_key(direction)));
    note_at_key(&mut code, map, Label::Done);
    code.label(Label::Done);
    code.push(bpf::set(R0, TC_ACT_UNSPEC));
    code.push(bpf::exit());
    code.finish()
}

/// Returns the key of packets that are not recorded by port. Incoming ones may want an answer.
fn other_key(direction: Direction) -> i32 {
    let key = match direction {
        Direction::In => OTHER_TRAFFIC | MAY_WANT_ANSWER,
        Direction::Out => OTHER_TRAFFIC,
    };
    key.cast_signed()
}

fn ipv4(code: &mut Code<Label>, direction: Direction, node: NodeAddresses) {
    copy_header(code, Offset::Network(0), IP, 20, Label::Done);
    code.push(bpf::load8(R2, R10, IP + 16));
    // Multicast and broadcast.
    code.jump(bpf::jump_if_at_least(R2, 224), Label::Done);
    code.push(bpf::load16(R2, R10, IP + 6));
    code.push(bpf::from_network_order16(R2));
    code.push(bpf::and(R2, 0x1fff));
    // A later fragment has no ports.
    code.jump(bpf::jump_if_not(R2, 0), Label::Others);
    code.push(bpf::load8(R2, R10, IP + 9));
    code.jump(bpf::jump_if_not(R2, IPPROTO_TCP), Label::NotTcp4);
    lengths_of_ipv4(code, IP);
    code.push(bpf::set(R9, 0));
    if let Some(node) = node.v4 {
        let remote = match direction {
            Direction::In => IP + 12,
            Direction::Out => IP + 16,
        };
        code.push(bpf::load32(R2, R10, remote));
        let node = i32::from_ne_bytes(node.octets());
        code.jump(bpf::jump32_if_not(R2, node), Label::NotNode4);
        code.push(bpf::set(R9, 1));
        code.label(Label::NotNode4);
    }
    code.jump(bpf::jump(), Label::Tcp);
    code.label(Label::NotTcp4);
    code.jump(bpf::jump_if(R2, IPPROTO_IGMP), Label::Done);
    code.jump(bpf::jump(), Label::Others);
}

fn ipv6(code: &mut Code<Label>, direction: Direction, node: NodeAddresses) {
    copy_header(code, Offset::Network(0), IP, 40, Label::Done);
    code.push(bpf::load8(R2, R10, IP + 24));
    code.jump(bpf::jump_if(R2, 0xff), Label::Done);
    code.push(bpf::load8(R2, R10, IP + 6));
    code.jump(bpf::jump_if_not(R2, IPPROTO_TCP), Label::NotTcp6);
    code.push(bpf::set(R7, 40));
    code.push(bpf::load16(R8, R10, IP + 4));
    code.push(bpf::from_network_order16(R8));
    code.push(bpf::set(R9, 0));
    if let Some(node) = node.v6 {
        let remote = match direction {
            Direction::In => IP + 8,
            Direction::Out => IP + 24,
        };
        for (at, word) in (remote..).step_by(4).zip(node.octets().chunks_exact(4)) {
            code.push(bpf::load32(R2, R10, at));
            let word = i32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
            code.jump(bpf::jump32_if_not(R2, word), Label::NotNode6);
        }
        code.push(bpf::set(R9, 1));
        code.label(Label::NotNode6);
    }
    code.jump(bpf::jump(), Label::Tcp);
    code.label(Label::NotTcp6);
    code.jump(bpf::jump_if(R2, IPPROTO_ICMPV6), Label::Icmpv6);
    code.jump(bpf::jump(), Label::Others);
    code.label(Label::Icmpv6);
    copy_header(code, Offset::Network(40), TCP, 1, Label::Others);
    code.push(bpf::load8(R2, R10, TCP));
    // 130 to 137: listener discovery, routers and neighbours. 143: version 2 of listener
    // discovery.
    code.jump(bpf::jump_if(R2, 143), Label::Done);
    code.jump(bpf::jump_if_at_least(R2, 138), Label::Others);
    code.jump(bpf::jump_if_at_least(R2, 130), Label::Done);
    code.jump(bpf::jump(), Label::Others);
}

/// Begins with TCP. From here on, R7 is whether the packet may want an answer.
fn tcp(code: &mut Code<Label>, direction: Direction) {
    code.label(Label::Tcp);
    copy_header(code, Offset::NetworkIn(R7), TCP, 14, Label::Others);
    let is_incoming = matches!(direction, Direction::In);
    code.push(bpf::set(R7, i32::from(is_incoming)));
    code.push(bpf::load8(R2, R10, TCP + 13));
    if !is_incoming {
        // The network stack accepts a connection even if the pod's program never sees it.
        code.push(bpf::copy(R3, R2));
        code.push(bpf::and(R3, SYN_ACK));
        code.jump(bpf::jump_if(R3, SYN_ACK), Label::Done);
    }
    code.jump(bpf::jump_if_any(R2, SYN), Label::Counted);
    code.push(bpf::load8(R3, R10, TCP + 12));
    code.push(bpf::shift_right(R3, 4));
    code.push(bpf::shift_left(R3, 2));
    code.push(bpf::subtract(R8, R3));
    code.jump(bpf::jump_if_zero(R8), Label::NoData);
    code.jump(bpf::jump(), Label::Counted);
    code.label(Label::NoData);
    // An end of a connection counts, but its peer waits for no more than the acknowledgement.
    code.push(bpf::set(R7, 0));
    code.jump(bpf::jump_if_any(R2, BEGINS_OR_ENDS), Label::Counted);
    code.jump(bpf::jump(), Label::Done);
    code.label(Label::Counted);
    code.push(bpf::set(R2, OTHER_TRAFFIC.cast_signed()));
    code.jump(bpf::jump_if_zero(R9), Label::NotNode);
    let own_port = match direction {
        Direction::In => TCP + 2,
        Direction::Out => TCP,
    };
    code.push(bpf::load16(R2, R10, own_port));
    code.push(bpf::from_network_order16(R2));
    code.label(Label::NotNode);
    code.jump(bpf::jump_if_zero(R7), Label::NoAnswer);
    code.push(bpf::add(R2, MAY_WANT_ANSWER.cast_signed()));
    code.label(Label::NoAnswer);
    code.push(bpf::store_register32(R10, KEY, R2));
    code.jump(bpf::jump(), Label::Note);
}

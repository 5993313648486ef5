//! The BPF programs that record unacknowledged data.

use std::os::fd::{AsRawFd, OwnedFd};

use crate::bpf::Register::{R0, R1, R2, R3, R4, R6, R7, R8, R9, R10};
use crate::bpf::packet::{
    ETH_P_IP, ETH_P_IPV6, IPPROTO_TCP, Offset, PACKET_HOST, SKB_MARK, SKB_PKT_TYPE, SKB_PROTOCOL,
    TC_ACT_UNSPEC, copy_header, lengths_of_ipv4,
};
use crate::bpf::{self, Code, Helper, Instruction, Register};
use crate::net::Direction;

/// The mark of packets (SO_MARK) that leave by the pod's link and are not the sandbox's. The mark
/// does not leave the pod's namespace.
pub const NOT_OF_SANDBOX: u32 = 0x746f_7270;

/// The IP version in a key.
pub(super) const IPV4: u32 = 4;
pub(super) const IPV6: u32 = 6;

// Flags of a TCP header.
const FIN: i32 = 0x01;
const SYN: i32 = 0x02;
const RST: i32 = 0x04;
const ACK: i32 = 0x10;
/// The sign bit of a difference of two numbers: the first one is the earlier one (RFC 9293, 3.4).
const NEGATIVE: i32 = i32::MIN;

// Offsets on the stack, which has 512 bytes. A field that is copied eight bytes at once lies at a
// multiple of eight.
const IP: i16 = -40;
const TCP: i16 = -72;
const KEY: i16 = -112;
const VALUE: i16 = -152;

// Offsets in a key: see `super::KEY`.
const LOCAL: i16 = 0;
const REMOTE: i16 = 16;
const LOCAL_PORT: i16 = 32;
const REMOTE_PORT: i16 = 34;
const KIND: i16 = 36;

// Offsets in a value: see `super::VALUE`.
const FIRST: i16 = 0;
const AFTER: i16 = 4;
const HEADER: i16 = 8;
const NEIGHBOUR: i16 = 32;

// Offsets in a TCP header.
const SEQUENCE: i16 = 4;
const ACKNOWLEDGED: i16 = 8;
const LENGTH: i16 = 12;
const FLAGS: i16 = 13;

/// Jump targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Label {
    Ipv6,
    Tcp,
    WithoutOptions,
    Segment,
    NoFurther,
    New,
    Partly,
    Forget,
    Done,
}

/// Returns the program for one direction.
///
/// R6 is the packet, R7 the length of the IP header, R8 the length of the packet's remainder.
pub(super) fn code(direction: Direction, map: &OwnedFd) -> Vec<Instruction> {
    let map = map.as_raw_fd();
    let mut code = Code::new();
    code.push(bpf::copy(R6, R1));
    match direction {
        Direction::In => {
            // A bridge that does not know the receiver's port sends the packet to all ports.
            code.push(bpf::load32(R2, R6, SKB_PKT_TYPE));
            code.jump(bpf::jump_if_not(R2, PACKET_HOST), Label::Done);
        }
        Direction::Out => {
            code.push(bpf::load32(R2, R6, SKB_MARK));
            let mark = NOT_OF_SANDBOX.cast_signed();
            code.jump(bpf::jump_if(R2, mark), Label::Done);
        }
    }
    code.push(bpf::load32(R2, R6, SKB_PROTOCOL));
    code.push(bpf::from_network_order16(R2));
    code.jump(bpf::jump_if(R2, ETH_P_IPV6), Label::Ipv6);
    code.jump(bpf::jump_if_not(R2, ETH_P_IP), Label::Done);
    ipv4(&mut code, direction);
    code.label(Label::Ipv6);
    ipv6(&mut code, direction);
    tcp(&mut code, direction);
    match direction {
        Direction::In => to_pod(&mut code, map),
        Direction::Out => from_pod(&mut code, map),
    }
    code.label(Label::Forget);
    call_with_key(&mut code, map, Helper::MapDeleteElem);
    code.label(Label::Done);
    code.push(bpf::set(R0, TC_ACT_UNSPEC));
    code.push(bpf::exit());
    code.finish()
}

/// Returns the offsets in a key of the packet's source and destination address.
fn address_offsets(direction: Direction) -> [i16; 2] {
    match direction {
        Direction::In => [REMOTE, LOCAL],
        Direction::Out => [LOCAL, REMOTE],
    }
}

fn ipv4(code: &mut Code<Label>, direction: Direction) {
    copy_header(code, Offset::Network(0), IP, 20, Label::Done);
    code.push(bpf::load8(R2, R10, IP + 9));
    code.jump(bpf::jump_if_not(R2, IPPROTO_TCP), Label::Done);
    code.push(bpf::load16(R2, R10, IP + 6));
    code.push(bpf::from_network_order16(R2));
    code.push(bpf::and(R2, 0x1fff));
    // A later fragment has no ports.
    code.jump(bpf::jump_if_not(R2, 0), Label::Done);
    lengths_of_ipv4(code, IP);
    code.push(bpf::set(R2, 0));
    for place in (0..LOCAL_PORT).step_by(8) {
        code.push(bpf::store64(R10, KEY + place, R2));
    }
    for (from, place) in [IP + 12, IP + 16]
        .into_iter()
        .zip(address_offsets(direction))
    {
        code.push(bpf::load32(R2, R10, from));
        code.push(bpf::store_register32(R10, KEY + place, R2));
    }
    code.push(bpf::store32(R10, KEY + KIND, IPV4.cast_signed()));
    code.jump(bpf::jump(), Label::Tcp);
}

fn ipv6(code: &mut Code<Label>, direction: Direction) {
    copy_header(code, Offset::Network(0), IP, 40, Label::Done);
    code.push(bpf::load8(R2, R10, IP + 6));
    code.jump(bpf::jump_if_not(R2, IPPROTO_TCP), Label::Done);
    code.push(bpf::set(R7, 40));
    code.push(bpf::load16(R8, R10, IP + 4));
    code.push(bpf::from_network_order16(R8));
    for (from, place) in [IP + 8, IP + 24]
        .into_iter()
        .zip(address_offsets(direction))
    {
        copy_words(code, (R10, from), (R10, KEY + place), 2);
    }
    code.push(bpf::store32(R10, KEY + KIND, IPV6.cast_signed()));
}

/// Copies `words` times eight bytes.
fn copy_words(code: &mut Code<Label>, from: (Register, i16), to: (Register, i16), words: i16) {
    for at in (0..words).map(|word| 8 * word) {
        code.push(bpf::load64(R2, from.0, from.1 + at));
        code.push(bpf::store64(to.0, to.1 + at, R2));
    }
}

/// Begins with TCP. From here on, R9 is the flags, and the key is complete.
fn tcp(code: &mut Code<Label>, direction: Direction) {
    code.label(Label::Tcp);
    // The copy has twelve bytes of options or of data. Missing bytes are zero.
    copy_header(code, Offset::NetworkIn(R7), TCP, 32, Label::WithoutOptions);
    code.jump(bpf::jump(), Label::Segment);
    code.label(Label::WithoutOptions);
    copy_header(code, Offset::NetworkIn(R7), TCP, 20, Label::Done);
    code.label(Label::Segment);
    let [from, to] = match direction {
        Direction::In => [REMOTE_PORT, LOCAL_PORT],
        Direction::Out => [LOCAL_PORT, REMOTE_PORT],
    };
    for (port, place) in [(TCP, from), (TCP + 2, to)] {
        code.push(bpf::load16(R2, R10, port));
        code.push(bpf::store_register16(R10, KEY + place, R2));
    }
    code.push(bpf::load8(R9, R10, TCP + FLAGS));
    let ends = match direction {
        // Any station can send a SYN for an existing connection.
        Direction::In => RST,
        Direction::Out => RST | SYN,
    };
    code.jump(bpf::jump_if_any(R9, ends), Label::Forget);
    code.push(bpf::copy(R2, R9));
    code.push(bpf::and(R2, ACK));
    code.jump(bpf::jump_if_zero(R2), Label::Done);
}

/// Handles a segment of the pod. R8 becomes the number after the segment, R9 its first one.
fn from_pod(code: &mut Code<Label>, map: i32) {
    code.push(bpf::load8(R2, R10, TCP + LENGTH));
    code.push(bpf::shift_right(R2, 4));
    code.push(bpf::shift_left(R2, 2));
    code.push(bpf::subtract(R8, R2));
    // FIN counts as one byte.
    code.push(bpf::and(R9, FIN));
    code.push(bpf::add_register(R8, R9));
    code.jump(bpf::jump_if_zero(R8), Label::Done);
    code.push(bpf::load32(R9, R10, TCP + SEQUENCE));
    code.push(bpf::from_network_order32(R9));
    code.push(bpf::add_register32(R8, R9));
    call_with_key(code, map, Helper::MapLookupElem);
    code.jump(bpf::jump_if_zero(R0), Label::New);
    jump_unless_after(code, AFTER, Label::NoFurther);
    code.push(bpf::store_register32(R0, AFTER, R8));
    code.label(Label::NoFurther);
    copy_words(code, (R10, TCP + ACKNOWLEDGED), (R0, HEADER), 3);
    code.jump(bpf::jump(), Label::Done);

    code.label(Label::New);
    code.push(bpf::store_register32(R10, VALUE + FIRST, R9));
    code.push(bpf::store_register32(R10, VALUE + AFTER, R8));
    copy_words(code, (R10, TCP + ACKNOWLEDGED), (R10, VALUE + HEADER), 3);
    code.push(bpf::set(R2, 0));
    code.push(bpf::store64(R10, VALUE + NEIGHBOUR, R2));
    copy_header(code, Offset::Ethernet(0), VALUE + NEIGHBOUR, 6, Label::Done);
    code.push(bpf::copy(R3, R10));
    code.push(bpf::add(R3, VALUE.into()));
    code.push(bpf::set(R4, 0));
    call_with_key(code, map, Helper::MapUpdateElem);
    code.jump(bpf::jump(), Label::Done);
}

/// Handles a segment to the pod. R8 becomes its acknowledgement number.
fn to_pod(code: &mut Code<Label>, map: i32) {
    code.push(bpf::load32(R8, R10, TCP + ACKNOWLEDGED));
    code.push(bpf::from_network_order32(R8));
    call_with_key(code, map, Helper::MapLookupElem);
    code.jump(bpf::jump_if_zero(R0), Label::Done);
    difference(code, AFTER);
    code.jump(bpf::jump_if_any(R3, NEGATIVE), Label::Partly);
    code.jump(bpf::jump(), Label::Forget);
    code.label(Label::Partly);
    jump_unless_after(code, FIRST, Label::Done);
    code.push(bpf::store_register32(R0, FIRST, R8));
    code.jump(bpf::jump(), Label::Done);
}

/// Computes R3 as R8 less the number at `place` in the value at R0.
fn difference(code: &mut Code<Label>, place: i16) {
    code.push(bpf::load32(R2, R0, place));
    code.push(bpf::copy(R3, R8));
    code.push(bpf::subtract32(R3, R2));
}

/// Jumps to `if_not` unless R8 comes after the number at `place` in the value at R0.
fn jump_unless_after(code: &mut Code<Label>, place: i16, if_not: Label) {
    difference(code, place);
    code.jump(bpf::jump_if_zero(R3), if_not);
    code.jump(bpf::jump_if_any(R3, NEGATIVE), if_not);
}

/// Calls a helper with the map and the key. Its further arguments are already in their registers.
fn call_with_key(code: &mut Code<Label>, map: i32, helper: Helper) {
    code.extend(bpf::set_map(R1, map));
    code.push(bpf::copy(R2, R10));
    code.push(bpf::add(R2, KEY.into()));
    code.push(bpf::call(helper));
}

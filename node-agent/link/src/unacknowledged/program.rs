//! The programs that note what is on its way.

use std::os::fd::{AsRawFd, OwnedFd};

use super::NOT_OF_SANDBOX;
use crate::bpf::Register::{R0, R1, R2, R3, R4, R6, R7, R8, R9, R10};
use crate::bpf::packet::{
    ETH_P_IP, ETH_P_IPV6, IPPROTO_TCP, Offset, PACKET_HOST, SKB_MARK, SKB_PKT_TYPE, SKB_PROTOCOL,
    TC_ACT_UNSPEC, copy_header, lengths_of_ipv4,
};
use crate::bpf::{self, Code, Helper, Instruction, Register};
use crate::net::Direction;

/// What a key says of its addresses.
pub(super) const IPV4: u32 = 4;
pub(super) const IPV6: u32 = 6;

// Of a TCP header's flags.
const FIN: i32 = 0x01;
const SYN: i32 = 0x02;
const RST: i32 = 0x04;
const ACK: i32 = 0x10;
/// Of a difference of two numbers: the first is the earlier one (RFC 9293, 3.4).
const NEGATIVE: i32 = i32::MIN;

// Places on the stack, which has 512 bytes. What is copied eight bytes at once lies at a multiple of eight.
const IP: i16 = -40;
const TCP: i16 = -72;
const KEY: i16 = -112;
const VALUE: i16 = -152;

// Places in a key: see `super::KEY`.
const LOCAL: i16 = 0;
const REMOTE: i16 = 16;
const LOCAL_PORT: i16 = 32;
const REMOTE_PORT: i16 = 34;
const KIND: i16 = 36;

// Places in a value: see `super::VALUE`.
const FIRST: i16 = 0;
const AFTER: i16 = 4;
const HEADER: i16 = 8;
const NEIGHBOUR: i16 = 32;

// Places in a TCP header.
const SEQUENCE: i16 = 4;
const ACKNOWLEDGED: i16 = 8;
const LENGTH: i16 = 12;
const FLAGS: i16 = 13;

/// Where jumps go.
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

/// R6 the packet, R7 the length of the IP header, R8 what is left of the packet's length.
pub(super) fn code(direction: Direction, map: &OwnedFd) -> Vec<Instruction> {
    let map = map.as_raw_fd();
    let mut code = Code::new();
    code.push(bpf::copy(R6, R1));
    match direction {
        Direction::In => {
            // A bridge that does not know where somebody else is tells everybody.
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
        Direction::In => heard(&mut code, map),
        Direction::Out => said(&mut code, map),
    }
    code.label(Label::Forget);
    on_key(&mut code, map, Helper::MapDeleteElem);
    code.label(Label::Done);
    code.push(bpf::set(R0, TC_ACT_UNSPEC));
    code.push(bpf::exit());
    code.finish()
}

/// Where in a key the packet's sender and its receiver go.
fn places(direction: Direction) -> [i16; 2] {
    match direction {
        Direction::In => [REMOTE, LOCAL],
        Direction::Out => [LOCAL, REMOTE],
    }
}

fn ipv4(code: &mut Code<Label>, direction: Direction) {
    copy_header(code, Offset::Fixed(0), IP, 20, Label::Done);
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
    for (from, place) in [IP + 12, IP + 16].into_iter().zip(places(direction)) {
        code.push(bpf::load32(R2, R10, from));
        code.push(bpf::store_register32(R10, KEY + place, R2));
    }
    code.push(bpf::store32(R10, KEY + KIND, IPV4.cast_signed()));
    code.jump(bpf::jump(), Label::Tcp);
}

fn ipv6(code: &mut Code<Label>, direction: Direction) {
    copy_header(code, Offset::Fixed(0), IP, 40, Label::Done);
    code.push(bpf::load8(R2, R10, IP + 6));
    code.jump(bpf::jump_if_not(R2, IPPROTO_TCP), Label::Done);
    code.push(bpf::set(R7, 40));
    code.push(bpf::load16(R8, R10, IP + 4));
    code.push(bpf::from_network_order16(R8));
    for (from, place) in [IP + 8, IP + 24].into_iter().zip(places(direction)) {
        copy_words(code, (R10, from), (R10, KEY + place), 2);
    }
    code.push(bpf::store32(R10, KEY + KIND, IPV6.cast_signed()));
}

/// So many times eight bytes.
fn copy_words(code: &mut Code<Label>, from: (Register, i16), to: (Register, i16), words: i16) {
    for at in (0..words).map(|word| 8 * word) {
        code.push(bpf::load64(R2, from.0, from.1 + at));
        code.push(bpf::store64(to.0, to.1 + at, R2));
    }
}

/// From here on R9 has the flags, and the key is there.
fn tcp(code: &mut Code<Label>, direction: Direction) {
    code.label(Label::Tcp);
    // Twelve bytes of options, or of data. What is not there is zero.
    copy_header(code, Offset::In(R7), TCP, 32, Label::WithoutOptions);
    code.jump(bpf::jump(), Label::Segment);
    code.label(Label::WithoutOptions);
    copy_header(code, Offset::In(R7), TCP, 20, Label::Done);
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
        // Anybody can ask for a connection that there is.
        Direction::In => RST,
        Direction::Out => RST | SYN,
    };
    code.jump(bpf::jump_if_any(R9, ends), Label::Forget);
    code.push(bpf::copy(R2, R9));
    code.push(bpf::and(R2, ACK));
    code.jump(bpf::jump_if_zero(R2), Label::Done);
}

/// Of the pod. R8 becomes the number after the segment, R9 its first.
fn said(code: &mut Code<Label>, map: i32) {
    code.push(bpf::load8(R2, R10, TCP + LENGTH));
    code.push(bpf::shift_right(R2, 4));
    code.push(bpf::shift_left(R2, 2));
    code.push(bpf::subtract(R8, R2));
    // An end counts as one.
    code.push(bpf::and(R9, FIN));
    code.push(bpf::add_register(R8, R9));
    code.jump(bpf::jump_if_zero(R8), Label::Done);
    code.push(bpf::load32(R9, R10, TCP + SEQUENCE));
    code.push(bpf::from_network_order32(R9));
    code.push(bpf::add_register32(R8, R9));
    on_key(code, map, Helper::MapLookupElem);
    code.jump(bpf::jump_if_zero(R0), Label::New);
    further_than(code, AFTER, Label::NoFurther);
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
    copy_header(code, Offset::OfLink(0), VALUE + NEIGHBOUR, 6, Label::Done);
    code.push(bpf::copy(R3, R10));
    code.push(bpf::add(R3, VALUE.into()));
    code.push(bpf::set(R4, 0));
    on_key(code, map, Helper::MapUpdateElem);
    code.jump(bpf::jump(), Label::Done);
}

/// Of others. R8 becomes what it acknowledges.
fn heard(code: &mut Code<Label>, map: i32) {
    code.push(bpf::load32(R8, R10, TCP + ACKNOWLEDGED));
    code.push(bpf::from_network_order32(R8));
    on_key(code, map, Helper::MapLookupElem);
    code.jump(bpf::jump_if_zero(R0), Label::Done);
    minus(code, AFTER);
    code.jump(bpf::jump_if_any(R3, NEGATIVE), Label::Partly);
    code.jump(bpf::jump(), Label::Forget);
    code.label(Label::Partly);
    further_than(code, FIRST, Label::Done);
    code.push(bpf::store_register32(R0, FIRST, R8));
    code.jump(bpf::jump(), Label::Done);
}

/// R3 becomes R8 less the number there in the value at R0.
fn minus(code: &mut Code<Label>, place: i16) {
    code.push(bpf::load32(R2, R0, place));
    code.push(bpf::copy(R3, R8));
    code.push(bpf::subtract32(R3, R2));
}

/// Whether R8 comes after the number there in the value at R0.
fn further_than(code: &mut Code<Label>, place: i16, if_not: Label) {
    minus(code, place);
    code.jump(bpf::jump_if_zero(R3), if_not);
    code.jump(bpf::jump_if_any(R3, NEGATIVE), if_not);
}

/// Calls a helper that takes the map and a key, and perhaps more, which is there already.
fn on_key(code: &mut Code<Label>, map: i32, helper: Helper) {
    code.extend(bpf::set_map(R1, map));
    code.push(bpf::copy(R2, R10));
    code.push(bpf::add(R2, KEY.into()));
    code.push(bpf::call(helper));
}

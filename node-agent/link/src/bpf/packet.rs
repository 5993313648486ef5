//! What programs on a link read of a packet, which they keep in R6.

use super::Register::{self, R0, R1, R2, R3, R4, R5, R6, R7, R8, R10};
use super::{
    Code, Helper, add, and, call, copy, from_network_order16, jump_if_not, load8, load16, set,
    shift_left, subtract,
};

// Offsets in the kernel's `struct __sk_buff`.
pub(crate) const SKB_PKT_TYPE: i16 = 4;
pub(crate) const SKB_MARK: i16 = 8;
pub(crate) const SKB_PROTOCOL: i16 = 16;
/// Of linux/if_packet.h: to this link's own address.
pub(crate) const PACKET_HOST: i32 = 0;
pub(crate) const ETH_P_IP: i32 = 0x0800;
pub(crate) const ETH_P_IPV6: i32 = 0x86dd;
pub(crate) const IPPROTO_TCP: i32 = 6;
/// Go on with whatever else is attached.
pub(crate) const TC_ACT_UNSPEC: i32 = -1;

const BPF_HDR_START_MAC: i32 = 0;
const BPF_HDR_START_NET: i32 = 1;

/// Where in a packet.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Offset {
    /// From its Ethernet header on.
    OfLink(i32),
    /// From its network header on.
    Fixed(i32),
    /// Likewise, and only the program knows it.
    In(Register),
}

/// Copies `length` bytes of the packet to the stack.
pub(crate) fn copy_header<Label: Copy + PartialEq>(
    code: &mut Code<Label>,
    offset: Offset,
    to: i16,
    length: i32,
    if_short: Label,
) {
    code.push(copy(R1, R6));
    code.push(match offset {
        Offset::OfLink(offset) | Offset::Fixed(offset) => set(R2, offset),
        Offset::In(register) => copy(R2, register),
    });
    code.push(copy(R3, R10));
    code.push(add(R3, to.into()));
    code.push(set(R4, length));
    let start = match offset {
        Offset::OfLink(_) => BPF_HDR_START_MAC,
        Offset::Fixed(_) | Offset::In(_) => BPF_HDR_START_NET,
    };
    code.push(set(R5, start));
    code.push(call(Helper::SkbLoadBytesRelative));
    code.jump(jump_if_not(R0, 0), if_short);
}

/// Of the IPv4 header at `ip` on the stack: its length into R7, and that of what follows it into R8.
pub(crate) fn lengths_of_ipv4<Label: Copy + PartialEq>(code: &mut Code<Label>, ip: i16) {
    code.push(load8(R7, R10, ip));
    code.push(and(R7, 0xf));
    code.push(shift_left(R7, 2));
    code.push(load16(R8, R10, ip + 2));
    code.push(from_network_order16(R8));
    code.push(subtract(R8, R7));
}

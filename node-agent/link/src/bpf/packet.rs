//! Access to packets for programs on a link. The programs keep the packet in R6.

use super::Register::{self, R0, R1, R2, R3, R4, R5, R6, R7, R8, R10};
use super::{
    Code, Helper, add, and, call, copy, from_network_order16, jump_if_not, load8, load16, set,
    shift_left, subtract,
};

// Offsets in the kernel's `struct __sk_buff`.
pub(crate) const SKB_PKT_TYPE: i16 = 4;
pub(crate) const SKB_MARK: i16 = 8;
pub(crate) const SKB_PROTOCOL: i16 = 16;
/// The packet goes to this link's own address (linux/if_packet.h).
pub(crate) const PACKET_HOST: i32 = 0;
pub(crate) const ETH_P_IP: i32 = 0x0800;
pub(crate) const ETH_P_IPV6: i32 = 0x86dd;
pub(crate) const IPPROTO_TCP: i32 = 6;
/// The kernel continues with the other programs that are attached.
pub(crate) const TC_ACT_UNSPEC: i32 = -1;

const BPF_HDR_START_MAC: i32 = 0;
const BPF_HDR_START_NET: i32 = 1;

/// A position in a packet.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Offset {
    /// Distance from the Ethernet header.
    Ethernet(i32),
    /// Distance from the network header.
    Network(i32),
    /// Distance from the network header, in a register of the program.
    NetworkIn(Register),
}

/// Copies `length` bytes of the packet to the stack at `to`.
///
/// Jumps to `if_short` if the packet is shorter.
pub(crate) fn copy_header<Label: Copy + PartialEq>(
    code: &mut Code<Label>,
    offset: Offset,
    to: i16,
    length: i32,
    if_short: Label,
) {
    code.push(copy(R1, R6));
    code.push(match offset {
        Offset::Ethernet(offset) | Offset::Network(offset) => set(R2, offset),
        Offset::NetworkIn(register) => copy(R2, register),
    });
    code.push(copy(R3, R10));
    code.push(add(R3, to.into()));
    code.push(set(R4, length));
    let start = match offset {
        Offset::Ethernet(_) => BPF_HDR_START_MAC,
        Offset::Network(_) | Offset::NetworkIn(_) => BPF_HDR_START_NET,
    };
    code.push(set(R5, start));
    code.push(call(Helper::SkbLoadBytesRelative));
    code.jump(jump_if_not(R0, 0), if_short);
}

/// Loads the length of the IPv4 header at `ip` on the stack into R7, and the length of the packet's
/// remainder into R8.
pub(crate) fn lengths_of_ipv4<Label: Copy + PartialEq>(code: &mut Code<Label>, ip: i16) {
    code.push(load8(R7, R10, ip));
    code.push(and(R7, 0xf));
    code.push(shift_left(R7, 2));
    code.push(load16(R8, R10, ip + 2));
    code.push(from_network_order16(R8));
    code.push(subtract(R8, R7));
}

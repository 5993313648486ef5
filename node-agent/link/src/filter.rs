//! Filters of packet sockets that drop frames for routers.
//!
//! The filters are classic BPF (socket(7), SO_ATTACH_FILTER; include/uapi/linux/filter.h). The
//! kernel runs the filter before it copies a frame or wakes a process.
//!
//! A bridge sends every multicast to all of its ports. Each network stack that begins, and so each
//! sandbox that wakes, solicits routers and reports the groups that it listens to. These are some
//! nine frames. Without the filter, every other sandbox of the node, and the keeper of every
//! sleeping sandbox, would receive them. They are for routers alone:
//!
//! - A host discards a router solicitation (RFC 4861, 6.2.6).
//! - A host needs no listener report of another host (RFC 3810, 5.2). With version 1, a host may
//!   omit its own report if it receives another host's (RFC 2710, 4).

use std::os::fd::AsFd;

use nix::libc::{self, sock_filter};

use crate::packet_socket::{Error, set};

const LOAD_WORD: u16 = 0x20;
const LOAD_HALF: u16 = 0x28;
const LOAD_BYTE: u16 = 0x30;
const JUMP: u16 = 0x05;
const IF_EQUAL: u16 = 0x15;
const IF_ANY_BIT: u16 = 0x45;
const RETURN: u16 = 0x06;

/// Instructions of [`ALL_BUT_FOR_ROUTERS`], the two returns included.
const LENGTH: usize = 20;

const fn op(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

const fn load(code: u16, place: u32) -> sock_filter {
    op(code, 0, 0, place)
}

// SKF_AD_OFF + SKF_AD_PKTTYPE: the packet's type, which is no part of the frame.
const PACKET_TYPE: u32 = (-0x1000_i32).cast_unsigned() + 4;
const OUTGOING_PACKET: u32 = libc::PACKET_OUTGOING as u32;

/// A filter that takes the frames with this value at `place`, and no others.
const fn frames_with(place: u32, value: u32) -> [sock_filter; 4] {
    [
        load(LOAD_WORD, place),
        op(IF_EQUAL, 0, 1, value),
        op(RETURN, 0, 0, u32::MAX),
        op(RETURN, 0, 0, 0),
    ]
}

/// A filter that takes all frames but multicast listener reports and router solicitations.
const ALL_BUT_FOR_ROUTERS: [sock_filter; LENGTH] = {
    const IPV6: u32 = 0x86dd;
    const ICMPV6: u32 = 58;
    /// The router alert, a hop-by-hop option, precedes a listener report.
    const HOP_BY_HOP: u32 = 0;
    [
        load(LOAD_BYTE, 0), // the destination address; its lowest bit: a group
        op(IF_ANY_BIT, 0, 16, 1),
        load(LOAD_HALF, 12),
        op(IF_EQUAL, 0, 14, IPV6),
        load(LOAD_BYTE, 14 + 6), // next header
        op(IF_EQUAL, 7, 0, ICMPV6),
        op(IF_EQUAL, 0, 11, HOP_BY_HOP),
        load(LOAD_BYTE, 14 + 40), // next header of the options
        op(IF_EQUAL, 0, 9, ICMPV6),
        load(LOAD_BYTE, 14 + 40 + 1), // length of the options beyond 8 bytes
        op(IF_EQUAL, 0, 7, 0),
        load(LOAD_BYTE, 14 + 40 + 8),
        op(JUMP, 0, 0, 1),
        load(LOAD_BYTE, 14 + 40),
        op(IF_EQUAL, 4, 0, 131), // report, version 1
        op(IF_EQUAL, 3, 0, 132), // done
        op(IF_EQUAL, 2, 0, 133), // router solicitation
        op(IF_EQUAL, 1, 0, 143), // report, version 2
        op(RETURN, 0, 0, u32::MAX),
        op(RETURN, 0, 0, 0),
    ]
};

/// A filter that takes the outgoing frames of the link that [`ALL_BUT_FOR_ROUTERS`] takes.
const OUTGOING: [sock_filter; 2 + LENGTH] = {
    const TO_LAST_RETURN: u8 = 19;
    let mut code = [op(RETURN, 0, 0, 0); 2 + LENGTH];
    code[0] = load(LOAD_WORD, PACKET_TYPE);
    code[1] = op(IF_EQUAL, 0, TO_LAST_RETURN, OUTGOING_PACKET);
    let mut n = 0;
    while n < LENGTH {
        code[2 + n] = ALL_BUT_FOR_ROUTERS[n];
        n += 1;
    }
    code
};

/// Makes the socket take the frames that leave by its link, except those for routers.
///
/// At the host's end of a pod's link these are the frames to the pod.
pub(crate) fn take_outgoing(socket: impl AsFd) -> Result<(), Error> {
    attach(socket, &OUTGOING)
}

/// Makes the socket take all frames that leave by its link.
///
/// At the pod's end of its link these are the pod's frames, those for routers included.
pub(crate) fn take_all_outgoing(socket: impl AsFd) -> Result<(), Error> {
    attach(socket, &frames_with(PACKET_TYPE, OUTGOING_PACKET))
}

/// Makes a sandbox's packet socket drop frames for routers from now on.
pub fn leave_out_for_routers(socket: impl AsFd) -> Result<(), Error> {
    attach(socket, &ALL_BUT_FOR_ROUTERS)
}

fn attach(socket: impl AsFd, code: &[sock_filter]) -> Result<(), Error> {
    let program = libc::sock_fprog {
        len: u16::try_from(code.len()).unwrap_or_default(),
        // The kernel only reads the instructions, and copies them.
        filter: code.as_ptr().cast_mut(),
    };
    let option = libc::SO_ATTACH_FILTER;
    set(
        socket,
        "SO_ATTACH_FILTER",
        libc::SOL_SOCKET,
        option,
        &program,
    )
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Makes the socket take the frames with this mark (SO_MARK).
    pub(crate) fn take_marked(socket: impl AsFd, mark: u32) {
        // SKF_AD_OFF + SKF_AD_MARK: the mark, which is no part of the frame.
        let code = frames_with((-0x1000_i32).cast_unsigned() + 20, mark);
        attach(socket, &code).expect("attached");
    }

    /// An Ethernet frame with an IPv6 packet in it.
    fn ipv6(receiver: [u8; 6], next: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = [&receiver[..], &[2, 0, 0, 0, 0, 1], &[0x86, 0xdd]].concat();
        frame.extend([0x60, 0, 0, 0]);
        frame.extend(u16::try_from(payload.len()).expect("short").to_be_bytes());
        frame.extend([next, 1]);
        frame.extend([0; 32]);
        frame.extend(payload);
        frame
    }

    /// An ICMPv6 message of this type; with `alert`, behind a router alert as a listener report.
    fn icmp(kind: u8, alert: bool) -> (u8, Vec<u8>) {
        let message = [kind, 0, 0, 0, 0, 0, 0, 0];
        match alert {
            true => (0, [&[58, 0, 5, 2, 0, 0, 1, 0], &message[..]].concat()),
            false => (58, message.to_vec()),
        }
    }

    #[test]
    fn the_filter_leaves_out_only_packets_for_routers() {
        // The kernel runs the filter of any socket that takes datagrams.
        let (sender, socket) = std::os::unix::net::UnixDatagram::pair().expect("a pair");
        leave_out_for_routers(&socket).expect("attached");
        socket.set_nonblocking(true).expect("set");
        let all = [0x33, 0x33, 0, 0, 0, 0x16];
        let frame = |receiver, (next, message): (u8, Vec<u8>)| ipv6(receiver, next, &message);
        let mut frames = Vec::new();
        for kind in [131, 132, 143] {
            frames.push((frame(all, icmp(kind, true)), false));
            frames.push((frame(all, icmp(kind, false)), false));
        }
        frames.push((frame(all, icmp(133, false)), false));
        // A listener query, a router advertisement, a neighbour solicitation and advertisement, an
        // echo request. A listener report to this host alone is unusual; the filter lets it pass.
        for kind in [130, 134, 135, 136, 128] {
            frames.push((frame(all, icmp(kind, false)), true));
            frames.push((frame(all, icmp(kind, true)), true));
        }
        frames.push((frame([2, 0, 0, 0, 0, 2], icmp(143, true)), true));
        // mDNS, and options of more than eight bytes.
        frames.push((ipv6(all, 17, &[143; 16]), true));
        frames.push((
            ipv6(all, 0, &[58, 1, 143, 143, 143, 143, 143, 143, 143, 143]),
            true,
        ));
        let arp = [&[0xff; 6], &[2, 0, 0, 0, 0, 1], &[8, 6][..], &[0; 28]].concat();
        let ipv4 = [
            &[1, 0, 0x5e, 0, 0, 0xfb],
            &[2, 0, 0, 0, 0, 1],
            &[8, 0][..],
            &[143; 50],
        ]
        .concat();
        frames.extend([(arp, true), (ipv4, true)]);
        for (frame, is_taken) in frames {
            // The send may fail: the receiver's filter drops a datagram that it refuses.
            let _ = sender.send(&frame);
            let mut buffer = [0; 256];
            let received = socket.recv(&mut buffer);
            assert_eq!(received.is_ok(), is_taken, "{frame:x?}");
            assert_eq!(received.unwrap_or(frame.len()), frame.len(), "whole");
        }
    }
}

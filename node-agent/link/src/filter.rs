//! What a packet socket takes: classic BPF, as the kernel runs it before it copies a frame or wakes anybody (socket(7), SO_ATTACH_FILTER;
//! include/uapi/linux/filter.h).
//!
//! A bridge hands every multicast to all of its ports. Each network stack that begins, and so each sandbox that wakes, asks for routers and reports the groups
//! that it listens to: some nine frames, of which every other sandbox of the node would hear, and a sleeping one's keeper too. They are for routers
//! alone: a host discards a router solicitation (RFC 4861, 6.2.6), and needs nobody's listener report (RFC 3810, 5.2; with version 1 it
//! may leave its own out where it hears another's, RFC 2710, 4).

use std::os::fd::AsFd;

use nix::libc::{self, sock_filter};

use crate::tap::{Error, set};

const LOAD_WORD: u16 = 0x20;
const LOAD_HALF: u16 = 0x28;
const LOAD_BYTE: u16 = 0x30;
const JUMP: u16 = 0x05;
const IF_EQUAL: u16 = 0x15;
const IF_ANY_BIT: u16 = 0x45;
const RETURN: u16 = 0x06;

/// How long the part is that leaves out what is for routers, its two ends included.
const FOR_ROUTERS: usize = 20;

const fn op(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

const fn load(code: u16, place: u32) -> sock_filter {
    op(code, 0, 0, place)
}

// SKF_AD_OFF + SKF_AD_PKTTYPE: not of the frame, but whose it is.
const KIND_OF_PACKET: u32 = (-0x1000_i32).cast_unsigned() + 4;
const TO_BE_SENT: u32 = libc::PACKET_OUTGOING as u32;

/// Takes all of the frames with this value there.
const fn those_with(place: u32, value: u32) -> [sock_filter; 4] {
    [
        load(LOAD_WORD, place),
        op(IF_EQUAL, 0, 1, value),
        op(RETURN, 0, 0, u32::MAX),
        op(RETURN, 0, 0, 0),
    ]
}

/// Takes all but multicasts that are listener reports or router solicitations.
const BUT_FOR_ROUTERS: [sock_filter; FOR_ROUTERS] = {
    const IPV6: u32 = 0x86dd;
    const ICMPV6: u32 = 58;
    /// In front of a listener report: the router alert.
    const HOP_BY_HOP: u32 = 0;
    [
        load(LOAD_BYTE, 0), // the receiver
        op(IF_ANY_BIT, 0, 16, 1),
        load(LOAD_HALF, 12),
        op(IF_EQUAL, 0, 14, IPV6),
        load(LOAD_BYTE, 14 + 6), // what follows the header
        op(IF_EQUAL, 7, 0, ICMPV6),
        op(IF_EQUAL, 0, 11, HOP_BY_HOP),
        load(LOAD_BYTE, 14 + 40), // what follows the options
        op(IF_EQUAL, 0, 9, ICMPV6),
        load(LOAD_BYTE, 14 + 40 + 1), // their length, beyond 8 bytes
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

/// The same of what goes out of the link, and nothing else.
const OUTGOING: [sock_filter; 2 + FOR_ROUTERS] = {
    const TO_THE_END: u8 = 19;
    let mut code = [op(RETURN, 0, 0, 0); 2 + FOR_ROUTERS];
    code[0] = load(LOAD_WORD, KIND_OF_PACKET);
    code[1] = op(IF_EQUAL, 0, TO_THE_END, TO_BE_SENT);
    let mut n = 0;
    while n < FOR_ROUTERS {
        code[2 + n] = BUT_FOR_ROUTERS[n];
        n += 1;
    }
    code
};

/// The socket takes what goes out of its link, that is into a pod, but for what is for routers.
pub(crate) fn take_outgoing(socket: impl AsFd) -> Result<(), Error> {
    attach(socket, &OUTGOING)
}

/// The socket takes all that goes out of its link: what a pod says is for routers too.
pub(crate) fn take_all_outgoing(socket: impl AsFd) -> Result<(), Error> {
    attach(socket, &those_with(KIND_OF_PACKET, TO_BE_SENT))
}

/// A sandbox' packet socket leaves out what is for routers from now on.
pub fn leave_out_for_routers(socket: impl AsFd) -> Result<(), Error> {
    attach(socket, &BUT_FOR_ROUTERS)
}

fn attach(socket: impl AsFd, code: &[sock_filter]) -> Result<(), Error> {
    let program = libc::sock_fprog {
        len: u16::try_from(code.len()).unwrap_or_default(),
        // The kernel only reads it, and keeps a copy.
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

    /// Takes the frames with this mark (SO_MARK).
    pub(crate) fn take_marked(socket: impl AsFd, mark: u32) {
        // SKF_AD_OFF + SKF_AD_MARK: not of the frame.
        let code = those_with((-0x1000_i32).cast_unsigned() + 20, mark);
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

    /// ICMPv6 of a type, behind the router alert where a listener report has one.
    fn icmp(kind: u8, alert: bool) -> (u8, Vec<u8>) {
        let message = [kind, 0, 0, 0, 0, 0, 0, 0];
        match alert {
            true => (0, [&[58, 0, 5, 2, 0, 0, 1, 0], &message[..]].concat()),
            false => (58, message.to_vec()),
        }
    }

    #[test]
    fn only_what_is_for_routers_is_left_out() {
        // The kernel runs the filter of any socket that takes datagrams.
        let (sender, socket) = std::os::unix::net::UnixDatagram::pair().expect("a pair");
        leave_out_for_routers(&socket).expect("attached");
        socket.set_nonblocking(true).expect("set");
        let all = [0x33, 0x33, 0, 0, 0, 0x16];
        let of = |receiver, (next, message): (u8, Vec<u8>)| ipv6(receiver, next, &message);
        let mut frames = Vec::new();
        for kind in [131, 132, 143] {
            frames.push((of(all, icmp(kind, true)), false));
            frames.push((of(all, icmp(kind, false)), false));
        }
        frames.push((of(all, icmp(133, false)), false));
        // A listener query, a router's own word, questions for neighbours, an echo; a report to this host alone is odd, and nobody's to drop.
        for kind in [130, 134, 135, 136, 128] {
            frames.push((of(all, icmp(kind, false)), true));
            frames.push((of(all, icmp(kind, true)), true));
        }
        frames.push((of([2, 0, 0, 0, 0, 2], icmp(143, true)), true));
        // mDNS, and longer options.
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
        for (frame, is_heard) in frames {
            // A datagram that the receiver's filter refuses is gone, and nothing is wrong.
            let _ = sender.send(&frame);
            let mut buffer = [0; 256];
            let heard = socket.recv(&mut buffer);
            assert_eq!(heard.is_ok(), is_heard, "{frame:x?}");
            assert_eq!(heard.unwrap_or(frame.len()), frame.len(), "whole");
        }
    }
}

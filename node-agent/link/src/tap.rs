//! Packet sockets at the two ends of a pod's link.
//!
//! At the host's end, a [`Tap`] receives the frames to the pod and sends more of them. At the pod's
//! end, a [`Tap`] receives the pod's frames, and a [`FrameSender`] sends frames in the pod's name.
//!
//! A packet socket at the host's end receives every frame on its way to the pod, even if the pod's
//! namespace drops the frame. A frame that the socket sends arrives as any other. Frames carry a
//! `virtio_net_hdr` (PACKET_VNET_HDR). If the kernel has left a frame's checksum or segmentation to
//! the link, the frame therefore comes back as it was. Numbers and layouts are the kernel's ABI
//! (packet(7), include/uapi/linux/{if_packet,virtio_net}.h).

#![allow(unsafe_code)]

use std::io;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::libc;

use crate::filter;
use crate::packet_socket::{length_of, set};

pub use crate::packet_socket::Error;

/// Length of the `virtio_net_hdr` before each frame.
pub const HEADER: usize = 10;
/// The largest frame: the kernel hands over at most 64 KiB in one piece, and its headers.
const LARGEST: usize = (64 << 10) + 256;
/// Bytes that wait between two reads. A sender repeats what has no room.
const QUEUE: libc::c_int = 1 << 20;

const PACKET_VNET_HDR: libc::c_int = 15;

/// A packet socket that receives the frames that leave by one link. It does not block.
#[derive(Debug)]
pub struct Tap {
    socket: OwnedFd,
    buffer: Box<[u8]>,
}

impl AsFd for Tap {
    /// Returns the socket for poll: it is readable when a frame has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Tap {
    /// Opens a tap at the host's end of a pod's link. It receives no frames for routers.
    ///
    /// `index`: the link's in the calling thread's network namespace.
    pub fn open(index: u32) -> Result<Self, Error> {
        let socket = open()?;
        filter::take_outgoing(&socket)?;
        Self::on(socket, index)
    }

    /// Opens a tap at the pod's end of its link. It receives all frames of the pod.
    pub fn of_pod(index: u32) -> Result<Self, Error> {
        let socket = open()?;
        filter::take_all_outgoing(&socket)?;
        Self::on(socket, index)
    }

    fn on(socket: OwnedFd, index: u32) -> Result<Self, Error> {
        set(
            &socket,
            "PACKET_VNET_HDR",
            libc::SOL_PACKET,
            PACKET_VNET_HDR,
            &1_i32,
        )?;
        make_room(&socket, QUEUE)?;
        bind(&socket, index, libc::ETH_P_ALL)?;
        Ok(Self {
            socket,
            buffer: vec![0; LARGEST].into_boxed_slice(),
        })
    }

    /// Returns the next frame, with its header; `None` if no frame waits.
    pub fn receive(&mut self) -> Result<Option<&[u8]>, Error> {
        // SAFETY: the buffer is writable for its whole length while it is borrowed here.
        let length = unsafe {
            libc::recv(
                self.socket.as_raw_fd(),
                self.buffer.as_mut_ptr().cast(),
                self.buffer.len(),
                0,
            )
        };
        match usize::try_from(length) {
            Ok(length) => Ok(self.buffer.get(..length)),
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
                // The kernel reports once that the link went down.
                error if error.raw_os_error() == Some(libc::ENETDOWN) => Ok(None),
                error => Err(Error::Read(error)),
            },
        }
    }

    /// Puts a frame, with its header, into the link. This tap does not receive that frame.
    pub fn send(&self, frame: &[u8]) -> Result<(), Error> {
        send(&self.socket, frame)
    }
}

/// A packet socket that sends frames from one link and receives nothing.
#[derive(Debug)]
pub struct FrameSender(OwnedFd);

impl FrameSender {
    /// Opens the socket on the link with this index in the calling thread's network namespace.
    ///
    /// The frames that it sends bear the mark (SO_MARK).
    pub fn open(index: u32, mark: u32) -> Result<Self, Error> {
        let socket = open()?;
        set(&socket, "SO_MARK", libc::SOL_SOCKET, libc::SO_MARK, &mark)?;
        bind(&socket, index, 0)?;
        Ok(Self(socket))
    }

    /// Sends a frame: an Ethernet header and what follows, complete and without a `virtio_net_hdr`.
    pub fn send(&self, frame: &[u8]) -> Result<(), Error> {
        send(&self.0, frame)
    }
}

/// Opens a socket with protocol 0: it receives nothing before it is bound to its link.
fn open() -> Result<OwnedFd, Error> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers.
    let raw = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    if raw < 0 {
        return Err(Error::Open(io::Error::last_os_error()));
    }
    // SAFETY: the kernel has just made this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

fn send(socket: &OwnedFd, frame: &[u8]) -> Result<(), Error> {
    // SAFETY: the frame is readable for its whole length.
    let sent = unsafe {
        libc::send(
            socket.as_raw_fd(),
            frame.as_ptr().cast(),
            frame.len(),
            libc::MSG_NOSIGNAL,
        )
    };
    if sent < 0 {
        return Err(Error::Send(io::Error::last_os_error()));
    }
    Ok(())
}

/// Returns the Ethernet frame after the `virtio_net_hdr`.
pub fn ethernet(frame: &[u8]) -> &[u8] {
    frame.get(HEADER..).unwrap_or_default()
}

fn bind(socket: &OwnedFd, index: u32, protocol: libc::c_int) -> Result<(), Error> {
    let failed = |source| Error::Bind { index, source };
    // SAFETY: all zeros is a valid value of this structure of integers.
    let mut address: libc::sockaddr_ll = unsafe { zeroed() };
    address.sll_family = libc::AF_PACKET
        .cast_unsigned()
        .try_into()
        .unwrap_or(u16::MAX);
    address.sll_protocol = u16::try_from(protocol).unwrap_or(u16::MAX).to_be();
    address.sll_ifindex = index
        .try_into()
        .map_err(|_| failed(io::ErrorKind::InvalidInput.into()))?;
    // SAFETY: the address is a sockaddr_ll of the length that is given.
    let bound = unsafe {
        libc::bind(
            socket.as_raw_fd(),
            std::ptr::from_ref(&address).cast(),
            length_of::<libc::sockaddr_ll>(),
        )
    };
    if bound < 0 {
        return Err(failed(io::Error::last_os_error()));
    }
    Ok(())
}

/// Makes room for `bytes` that wait to be read.
///
/// The kernel gives at most `net.core.rmem_max`, by default a fifth of what is wanted here. A
/// process with CAP_NET_ADMIN gets more by SO_RCVBUFFORCE.
fn make_room(socket: &OwnedFd, bytes: libc::c_int) -> Result<(), Error> {
    let set_option = |what, option| set(socket, what, libc::SOL_SOCKET, option, &bytes);
    match set_option("SO_RCVBUFFORCE", libc::SO_RCVBUFFORCE) {
        Err(Error::Set { source, .. }) if source.raw_os_error() == Some(libc::EPERM) => {
            set_option("SO_RCVBUF", libc::SO_RCVBUF)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use nix::sys::socket::{getsockopt, sockopt};

    use super::*;
    use crate::filter::tests::take_marked;

    /// Needs root, as the development cluster does.
    #[test]
    fn a_tap_has_its_buffer_size_whatever_limit_the_kernel_sets() {
        const MUCH: libc::c_int = 1 << 29;
        let socket = OwnedFd::from(UdpSocket::bind("127.0.0.1:0").expect("bound"));
        make_room(&socket, MUCH).expect("set");
        // The kernel doubles the size, for its own needs. It takes no memory before a frame comes.
        let room = getsockopt(&socket, sockopt::RcvBuf).expect("told");
        assert_eq!(Some(room), usize::try_from(2 * MUCH).ok());
    }

    #[test]
    fn only_a_tap_of_a_pod_receives_the_pods_packets_for_routers() {
        const LOOPBACK: u32 = 1;
        let (mut host, mut pod) = (
            Tap::open(LOOPBACK).expect("a tap"),
            Tap::of_pod(LOOPBACK).expect("a tap"),
        );
        // A router solicitation; its source address distinguishes it from other frames.
        let mut solicitation = [
            &[0x33, 0x33, 0, 0, 0, 2, 2, 0x70, 1, 2, 3, 4, 0x86, 0xdd][..],
            &[0; 48],
        ]
        .concat();
        (
            solicitation[14],
            solicitation[19],
            solicitation[20],
            solicitation[54],
        ) = (0x60, 8, 58, 133);
        let sender = FrameSender::open(LOOPBACK, 0).expect("a mouth");
        sender.send(&solicitation).expect("sent");
        let receives = |tap: &mut Tap| {
            while let Some(frame) = tap.receive().expect("read") {
                if ethernet(frame) == solicitation {
                    return true;
                }
            }
            false
        };
        assert!(receives(&mut pod) && !receives(&mut host));
    }

    #[test]
    fn a_sent_frame_has_the_mark_of_its_sender() {
        const MARK: u32 = 0x7001;
        // The first link of every namespace.
        const LOOPBACK: u32 = 1;
        let mut tap = Tap::open(LOOPBACK).expect("a tap");
        take_marked(&tap.socket, MARK);
        // Frames that came before the filter.
        while tap.receive().expect("read").is_some() {}
        // The type is IEEE 802's first one for experiments; no protocol uses it.
        let experiment = |word: &[u8]| [&[0; 12][..], &[0x88, 0xb5], word].concat();
        for (word, mark) in [(b"a", MARK + 1), (b"b", MARK)] {
            let sender = FrameSender::open(LOOPBACK, mark).expect("a mouth");
            sender.send(&experiment(word)).expect("sent");
        }
        let mut received = || {
            let frame = tap.receive().expect("read")?;
            Some(ethernet(frame).to_vec())
        };
        // The tap sees the frame as it leaves, and perhaps as it arrives.
        assert_eq!(received(), Some(experiment(b"b")));
        assert!(received().is_none_or(|frame| frame == experiment(b"b")));
    }
}

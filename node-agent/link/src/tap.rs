//! The two ends of a pod's link: at the host's, seeing what goes to the pod and sending it more; at the pod's, speaking for it.
//!
//! A packet socket on that end sees every frame on its way to the pod, whatever becomes of it in the pod's namespace, and
//! what it sends arrives there as any other. Frames carry a `virtio_net_hdr` (PACKET_VNET_HDR), so that one whose checksum
//! or segmentation the kernel has left to the link comes back as it was. Numbers and layouts are the kernel's ABI
//! (packet(7), include/uapi/linux/{if_packet,virtio_net}.h).

#![allow(unsafe_code)]

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::libc;

use crate::filter;

/// Before each frame.
pub const HEADER: usize = 10;
/// The kernel hands over at most 64 KiB in one piece, and its headers.
const LARGEST: usize = (64 << 10) + 256;
/// For the moment between two looks; what has no room is sent again.
const QUEUE: libc::c_int = 1 << 20;

const PACKET_VNET_HDR: libc::c_int = 15;

/// Why a link cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot open a packet socket (needs CAP_NET_RAW)")]
    Open(#[source] io::Error),
    #[error("cannot set {what} of a packet socket")]
    Set {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("cannot watch the link with index {index}")]
    Bind {
        index: u32,
        #[source]
        source: io::Error,
    },
    #[error("cannot read a frame")]
    Read(#[source] io::Error),
    #[error("cannot send a frame")]
    Send(#[source] io::Error),
}

/// Sees what the host sends into one link. Does not block.
#[derive(Debug)]
pub struct Tap {
    socket: OwnedFd,
    buffer: Box<[u8]>,
}

impl AsFd for Tap {
    /// Can be polled: readable when a frame has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Tap {
    /// On the link with this index in the calling thread's network namespace, at the host's end: what is for routers is left out.
    pub fn open(index: u32) -> Result<Self, Error> {
        let socket = open()?;
        filter::take_outgoing(&socket)?;
        Self::on(socket, index)
    }

    /// The same at the pod's end: all that the pod says.
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

    /// The next frame, with its header; none when there is none.
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
                // The link went down; it says so once.
                error if error.raw_os_error() == Some(libc::ENETDOWN) => Ok(None),
                error => Err(Error::Read(error)),
            },
        }
    }

    /// Puts a frame, with its header, into the link. This tap does not see it.
    pub fn send(&self, frame: &[u8]) -> Result<(), Error> {
        send(&self.socket, frame)
    }
}

/// Sends frames from one link and receives nothing.
#[derive(Debug)]
pub struct Mouth(OwnedFd);

impl Mouth {
    /// On the link with this index in the calling thread's network namespace. What it sends bears the mark (SO_MARK).
    pub fn open(index: u32, mark: u32) -> Result<Self, Error> {
        let socket = open()?;
        set(&socket, "SO_MARK", libc::SOL_SOCKET, libc::SO_MARK, &mark)?;
        bind(&socket, index, 0)?;
        Ok(Self(socket))
    }

    /// Sends a frame: an Ethernet header and what follows, complete in itself.
    pub fn send(&self, frame: &[u8]) -> Result<(), Error> {
        send(&self.0, frame)
    }
}

/// Protocol 0: nothing is received before the socket is bound to its link.
fn open() -> Result<OwnedFd, Error> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers.
    let raw = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    if raw < 0 {
        return Err(Error::Open(io::Error::last_os_error()));
    }
    // SAFETY: the kernel has just made this descriptor; nobody else owns it.
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

/// The frame after its header.
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

/// Room for so many bytes that wait to be read. The kernel gives no more than `net.core.rmem_max`, a fifth of what is wanted here if nobody
/// has changed it, but to who has CAP_NET_ADMIN and insists.
fn make_room(socket: &OwnedFd, bytes: libc::c_int) -> Result<(), Error> {
    let ask = |what, option| set(socket, what, libc::SOL_SOCKET, option, &bytes);
    match ask("SO_RCVBUFFORCE", libc::SO_RCVBUFFORCE) {
        Err(Error::Set { source, .. }) if source.raw_os_error() == Some(libc::EPERM) => {
            ask("SO_RCVBUF", libc::SO_RCVBUF)
        }
        other => other,
    }
}

fn length_of<T>() -> libc::socklen_t {
    libc::socklen_t::try_from(size_of::<T>()).unwrap_or(libc::socklen_t::MAX)
}

/// `value`: what the option's name promises, as the kernel lays it out.
pub(crate) fn set<T>(
    socket: impl AsFd,
    what: &'static str,
    level: libc::c_int,
    option: libc::c_int,
    value: &T,
) -> Result<(), Error> {
    // SAFETY: the kernel reads the value, by its size, and of a filter what it points to, which lives until then.
    let done = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            option,
            std::ptr::from_ref(value).cast(),
            length_of::<T>(),
        )
    };
    if done < 0 {
        return Err(Error::Set {
            what,
            source: io::Error::last_os_error(),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use nix::sys::socket::{getsockopt, sockopt};

    use super::*;
    use crate::filter::tests::take_marked;

    /// Needs root, as the development cluster does.
    #[test]
    fn there_is_room_for_what_waits_however_little_the_kernel_gives_of_itself() {
        const MUCH: libc::c_int = 1 << 29;
        let socket = OwnedFd::from(UdpSocket::bind("127.0.0.1:0").expect("bound"));
        make_room(&socket, MUCH).expect("set");
        // The kernel doubles it, for what it needs itself. It takes no memory before there is something to keep.
        let room = getsockopt(&socket, sockopt::RcvBuf).expect("told");
        assert_eq!(Some(room), usize::try_from(2 * MUCH).ok());
    }

    #[test]
    fn what_a_pod_says_to_routers_is_collected_and_what_it_hears_of_others_is_not() {
        const LOOPBACK: u32 = 1;
        let (mut host, mut pod) = (
            Tap::open(LOOPBACK).expect("a tap"),
            Tap::of_pod(LOOPBACK).expect("a tap"),
        );
        // A router solicitation, known by its sender.
        let mut said = [
            &[0x33, 0x33, 0, 0, 0, 2, 2, 0x70, 1, 2, 3, 4, 0x86, 0xdd][..],
            &[0; 48],
        ]
        .concat();
        (said[14], said[19], said[20], said[54]) = (0x60, 8, 58, 133);
        let mouth = Mouth::open(LOOPBACK, 0).expect("a mouth");
        mouth.send(&said).expect("sent");
        let hears = |tap: &mut Tap| {
            while let Some(frame) = tap.receive().expect("read") {
                if ethernet(frame) == said {
                    return true;
                }
            }
            false
        };
        assert!(hears(&mut pod) && !hears(&mut host));
    }

    #[test]
    fn what_is_said_bears_its_mark() {
        const MARK: u32 = 0x7001;
        // The first link of every namespace.
        const LOOPBACK: u32 = 1;
        let mut tap = Tap::open(LOOPBACK).expect("a tap");
        take_marked(&tap.socket, MARK);
        // What was there before the filter.
        while tap.receive().expect("read").is_some() {}
        // Of a kind that is nobody's: IEEE 802's first for experiments.
        let said = |word: &[u8]| [&[0; 12][..], &[0x88, 0xb5], word].concat();
        for (word, mark) in [(b"a", MARK + 1), (b"b", MARK)] {
            let mouth = Mouth::open(LOOPBACK, mark).expect("a mouth");
            mouth.send(&said(word)).expect("sent");
        }
        let mut heard = || {
            let frame = tap.receive().expect("read")?;
            Some(ethernet(frame).to_vec())
        };
        // It is seen as it leaves and as it arrives.
        assert_eq!(heard(), Some(said(b"b")));
        assert!(heard().is_none_or(|frame| frame == said(b"b")));
    }
}

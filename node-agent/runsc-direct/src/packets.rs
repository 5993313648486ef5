//! Making of the packet sockets by which a sandbox' network stack uses its links, as in
//! runsc/sandbox/network.go.
#![allow(unsafe_code)]

use std::io::Error;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::libc;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, setsockopt, socket, sockopt};

/// Bytes of the buffers for receiving and for sending.
const BUFFER: usize = 4 << 20;

const SIOCETHTOOL: libc::c_ulong = 0x8946;
const ETHTOOL_GGSO: u32 = 0x23;
/// From linux/if_packet.h.
const PACKET_VNET_HDR: libc::c_int = 15;

/// `struct ethtool_value` of linux/ethtool.h.
#[repr(C)]
struct EthtoolValue {
    command: u32,
    data: u32,
}

/// Opens a socket on the link with this index and name in the calling thread's network namespace.
/// Returns also whether the link has segmentation offload.
pub(super) fn open(index: u32, name: &str) -> Result<(OwnedFd, bool), Error> {
    // Without a protocol the socket receives nothing before it is bound.
    let (family, cloexec) = (AddressFamily::Packet, SockFlag::SOCK_CLOEXEC);
    let link = socket(family, SockType::Raw, cloexec, None)?;
    bind(&link, index)?;
    let offloads = offloads(&link, name)?;
    if offloads {
        with_headers(&link)?;
    }
    // More bytes than `net.core.rmem_max` take CAP_NET_ADMIN of the host. With smaller buffers
    // gVisor's network is slower.
    if setsockopt(&link, sockopt::RcvBufForce, &BUFFER).is_err() {
        let _ = setsockopt(&link, sockopt::RcvBuf, &BUFFER);
    }
    if setsockopt(&link, sockopt::SndBufForce, &BUFFER).is_err() {
        let _ = setsockopt(&link, sockopt::SndBuf, &BUFFER);
    }
    Ok((link, offloads))
}

fn done(answer: libc::c_int) -> Result<(), Error> {
    if answer < 0 {
        return Err(Error::last_os_error());
    }
    Ok(())
}

fn length_of<T>() -> libc::socklen_t {
    libc::socklen_t::try_from(size_of::<T>()).unwrap_or(libc::socklen_t::MAX)
}

fn bind(link: &OwnedFd, index: u32) -> Result<(), Error> {
    // SAFETY: all zeros is a valid value of this structure of integers.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = u16::try_from(libc::AF_PACKET).map_err(Error::other)?;
    address.sll_protocol = u16::try_from(libc::ETH_P_ALL)
        .map_err(Error::other)?
        .to_be();
    address.sll_ifindex = i32::try_from(index).map_err(Error::other)?;
    let length = length_of::<libc::sockaddr_ll>();
    // SAFETY: the address is a sockaddr_ll of the length that is given.
    done(unsafe {
        libc::bind(
            link.as_raw_fd(),
            std::ptr::from_ref(&address).cast(),
            length,
        )
    })
}

/// Reports whether the link has segmentation offload (`ETHTOOL_GGSO`).
fn offloads(link: &OwnedFd, name: &str) -> Result<bool, Error> {
    let mut value = EthtoolValue {
        command: ETHTOOL_GGSO,
        data: 0,
    };
    // SAFETY: all zeros is a valid value of this structure of integers and a pointer.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero.
    let room = request.ifr_name.len() - 1;
    for (place, byte) in request.ifr_name[..room].iter_mut().zip(name.bytes()) {
        *place = byte.cast_signed();
    }
    request.ifr_ifru.ifru_data = std::ptr::from_mut(&mut value).cast();
    // SAFETY: the request is an ifreq, and its data an ethtool_value, which the kernel writes to.
    // Both live until this returns.
    done(unsafe {
        libc::ioctl(
            link.as_raw_fd(),
            SIOCETHTOOL,
            std::ptr::from_mut(&mut request),
        )
    })?;
    Ok(value.data != 0)
}

/// Puts a header before each packet (virtio_net_hdr), with the size of the segments to cut.
fn with_headers(link: &OwnedFd) -> Result<(), Error> {
    let on: libc::c_int = 1;
    // SAFETY: the value is an int of the length that is given.
    done(unsafe {
        libc::setsockopt(
            link.as_raw_fd(),
            libc::SOL_PACKET,
            PACKET_VNET_HDR,
            std::ptr::from_ref(&on).cast(),
            length_of::<libc::c_int>(),
        )
    })
}

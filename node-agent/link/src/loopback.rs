//! Takes the connections to the loopback of a pod's network namespace in the host's kernel.
//!
//! `kubectl port-forward` makes containerd enter the namespace and dial 127.0.0.1 there. The pod's
//! programs listen in gVisor's own network stack, where no such connection arrives. One listener of
//! ours on the host kernel's 127.0.0.1 therefore takes them: a BPF program of the type `sk_lookup`,
//! attached to this namespace alone, gives it every TCP connection to 127.0.0.0/8. The address of
//! the accepted socket shows the port that was dialled.
//!
//! The sandbox cannot reach the listener: it sends and receives whole frames on eth0 (AF_PACKET),
//! and nothing that it sends goes over the namespace's `lo`. Frames that claim to be from or for
//! 127.0.0.0/8 and come in over eth0 do not reach it either: the listener is bound to `lo`, and
//! both ends must be in 127.0.0.0/8.

use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use nix::sys::socket::{setsockopt, sockopt};

use crate::bpf::{self, Hook};
use crate::net::{self, within};

/// Why connections to the loopback cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Namespace(#[from] net::Error),
    #[error("cannot listen on the loopback of the pod's network namespace")]
    Listen(#[source] std::io::Error),
    #[error("cannot redirect the loopback's connections (needs Linux 5.9 or later)")]
    Steer(#[from] bpf::Error),
}

/// The listener and the program's link.
///
/// A process that keeps both takes the connections. When the last copy of `link` is closed, the
/// namespace is as it was.
#[derive(Debug)]
pub struct Loopback {
    /// The socket that gets every connection. It does not block.
    pub listener: OwnedFd,
    /// Keeps the program attached.
    pub link: OwnedFd,
}

/// Begins to take the connections to the loopback of the namespace at `path`.
pub fn open(path: &Path) -> Result<Loopback, Error> {
    let listener = within(path, listen)?;
    let namespace = std::fs::File::open(path).map_err(|source| net::Error::Namespace {
        path: path.into(),
        source,
    })?;
    let sockets = bpf::socket_map(listener.as_fd())?;
    let program = bpf::load(Hook::SocketLookup, &program(sockets.as_raw_fd()))?;
    // The link holds the program, and the program the map.
    let link = bpf::attach_to_namespace(Hook::SocketLookup, program.as_fd(), namespace.as_fd())?;
    Ok(Loopback { listener, link })
}

/// Returns a listener on any port: the program gives it the connections to all ports.
fn listen() -> Result<OwnedFd, Error> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(Error::Listen)?;
    listener.set_nonblocking(true).map_err(Error::Listen)?;
    setsockopt(&listener, sockopt::BindToDevice, &OsString::from("lo"))
        .map_err(|errno| Error::Listen(errno.into()))?;
    Ok(listener.into())
}

/// Offsets in the kernel's `struct bpf_sk_lookup`; its addresses are in network byte order.
mod lookup {
    pub(super) const FAMILY: i16 = 8;
    pub(super) const PROTOCOL: i16 = 12;
    pub(super) const REMOTE_IP4: i16 = 16;
    pub(super) const LOCAL_IP4: i16 = 40;
}

/// The jump target at the end of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pass;

/// Returns the program. It gives TCP over IPv4 from and to 127.0.0.0/8 the socket in the map.
///
/// Everything else goes the way it would go without this program; so does such a connection when
/// there is no socket any more.
fn program(sockets: i32) -> Vec<bpf::Instruction> {
    use bpf::Register::{R0, R1, R2, R3, R6, R7, R10};
    use bpf::{call, exit, jump_if_not, jump_if_zero, load32, set, set_map};

    const LOOPBACK_NET: i32 = 127;
    const PASS: i32 = 1;
    let mut code = bpf::Code::new();
    code.push(bpf::copy(R6, R1));
    for (offset, wanted) in [
        (lookup::FAMILY, nix::libc::AF_INET),
        (lookup::PROTOCOL, nix::libc::IPPROTO_TCP),
    ] {
        code.push(load32(R2, R6, offset));
        code.jump(jump_if_not(R2, wanted), Pass);
    }
    for offset in [lookup::LOCAL_IP4, lookup::REMOTE_IP4] {
        code.push(load32(R2, R6, offset));
        code.push(bpf::from_network_order32(R2));
        code.push(bpf::shift_right(R2, 24));
        code.jump(jump_if_not(R2, LOOPBACK_NET), Pass);
    }
    // The key 0, on the stack.
    code.push(bpf::store32(R10, -4, 0));
    code.push(bpf::copy(R2, R10));
    code.push(bpf::add(R2, -4));
    code.extend(set_map(R1, sockets));
    code.push(call(bpf::Helper::MapLookupElem));
    code.jump(jump_if_zero(R0), Pass);
    code.push(bpf::copy(R7, R0));
    code.push(bpf::copy(R1, R6));
    code.push(bpf::copy(R2, R7));
    code.push(set(R3, 0));
    // The call fails only for a socket that is closed at this moment.
    code.push(call(bpf::Helper::SkAssign));
    code.push(bpf::copy(R1, R7));
    code.push(call(bpf::Helper::SkRelease));
    code.label(Pass);
    code.extend([set(R0, PASS), exit()]);
    code.finish()
}

#[cfg(test)]
mod tests;

//! What runs in the sandbox: one connection to a port of its loopback, and the bytes of it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::Context;

use super::carry::carry;

/// Written before the bytes of the connection, when there is one. Who hears nothing before the end knows that there is none.
pub(super) const CONNECTED: [u8; 1] = *b"+";

/// A program that lets its connections wait does not take this one.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// What the kernel's loopback would try for containerd: IPv4 first.
const ADDRESSES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];

/// How long answers are carried to one who sends nothing more. The program has been told; who has gone altogether looks the
/// same. It is what port-forward gives everywhere else.
const ANSWER_LIMIT: Duration = Duration::from_millis(500);

pub(crate) fn inside(port: u16) -> anyhow::Result<()> {
    let server = connect(port)?;
    let stream = std::io::stdin();
    rustix::io::write(&stream, &CONNECTED)?;
    carry(stream.as_fd(), server.as_fd(), None, Some(ANSWER_LIMIT))?;
    Ok(())
}

fn connect(port: u16) -> anyhow::Result<TcpStream> {
    let mut tried = ADDRESSES
        .iter()
        .map(|address| TcpStream::connect_timeout(&(*address, port).into(), CONNECT_LIMIT));
    let first = tried.next().context("no address")?;
    // The second may be unknown here, so that the first one's error is the news.
    first.or_else(|error| {
        tried
            .next()
            .and_then(Result::ok)
            .ok_or(error)
            .map_err(Into::into)
    })
}

/// glibc asks where the program lies, for a static program too, and ends it when `/proc/self/exe` is not a path: for one
/// that gVisor runs from a descriptor it is `host:[…]`. This stands in for glibc's function, whose answer only programs that
/// load libraries need; -1 is its own word for "not known".
#[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
#[allow(unsafe_code)]
// SAFETY: no other object of the program defines the name (glibc's own is in an archive, and taken only where it is missing),
// and glibc (elf/dl-origin.c) allows this answer.
#[unsafe(no_mangle)]
extern "C" fn _dl_get_origin() -> *const std::ffi::c_char {
    std::ptr::without_provenance(usize::MAX)
}

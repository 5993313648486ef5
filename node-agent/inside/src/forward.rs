//! One connection to a port of the sandbox's loopback, whose bytes are carried.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::Context;

use crate::carry::carry;

/// Written before the bytes of the connection, once it is made. A stream that ends without this
/// byte means that there is no connection.
pub const CONNECTED: [u8; 1] = *b"+";

/// Time after which a program that does not accept the connection counts as not listening.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// The addresses that containerd tries for a port of the loopback, in its order: IPv4 first.
const ADDRESSES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];

/// Time for which answers are carried to a client that sends nothing more. The program has read the
/// end of its input. A client that is gone looks the same. port-forward has this limit everywhere
/// else, too.
const ANSWER_LIMIT: Duration = Duration::from_millis(500);

/// Connects to `port` and carries the bytes of standard input, which is a socket.
pub fn inside(port: u16) -> anyhow::Result<()> {
    let server = connect(port)?;
    let stream = std::io::stdin();
    rustix::io::write(&stream, &CONNECTED)?;
    carry(stream.as_fd(), server.as_fd(), None, Some(ANSWER_LIMIT))?;
    Ok(())
}

fn connect(port: u16) -> anyhow::Result<TcpStream> {
    let mut connections = ADDRESSES
        .iter()
        .map(|address| TcpStream::connect_timeout(&(*address, port).into(), CONNECT_LIMIT));
    let first = connections.next().context("no address")?;
    // The sandbox may not have the second address, so the error of the first one is returned.
    first.or_else(|error| {
        connections
            .next()
            .and_then(Result::ok)
            .ok_or(error)
            .map_err(Into::into)
    })
}

//! TCP data of a pod that no peer has acknowledged.
//!
//! In a restore, gVisor's network stack forgets its retransmissions. Two small BPF programs on the
//! pod's link, one for each direction, therefore keep a map of the connections with unacknowledged
//! data. The keeper of a restored sandbox sends keepalives to those peers, and their answers make
//! the sandbox repeat its data
//! (docs/decisions/2026-11-23-tcp-connections-revived-after-restore.md). The programs are attached
//! like those of [`crate::traffic`], beside them; every packet passes. If the kernel refuses them,
//! nothing else is missing.
//!
//! - Out: data or the end of a connection makes an entry, or moves its last number. The begin or
//!   a reset of the connection removes it. A segment that only acknowledges costs a look at its
//!   header.
//! - In: an acknowledgement moves the first number, or removes the entry. A reset removes it. Each
//!   segment costs one lookup.
//!
//! The map's content comes from the sandbox's own packets and may be anything. The map has room for
//! few connections and drops the least recently used one, so a sandbox harms only itself. The
//! programs read TCP over IPv4, and over IPv6 without extension headers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;
use std::path::Path;

use torpor_records::UnacknowledgedMap;

use crate::bpf::{self, Hook};
use crate::net::{self, Direction, within};
use crate::packet::Ends;

pub use program::NOT_OF_SANDBOX;

mod program;

/// The largest number of recorded connections of one pod.
const MAX_CONNECTIONS: u32 = 256;

/// Size of a key: the addresses of the pod's end and of the other, each from its first byte on;
/// their ports, in network byte order; the IP version, 4 or 6.
const KEY: usize = 16 + 16 + 2 + 2 + 4;
/// Size of a value: the first number and the one after the last (in the machine's byte order);
/// [`HEADER`]; the neighbour's Ethernet address; two bytes of padding.
const VALUE: usize = 4 + 4 + HEADER + 6 + 2;
/// Size of the part of the last segment's TCP header in a value: from the acknowledgement
/// number on, with the first twelve bytes after the fixed header, which are options or data.
const HEADER: usize = 24;

/// Why unacknowledged data cannot be recorded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Namespace(#[from] net::Error),
    #[error(
        "the kernel refuses the program that records unacknowledged data (needs Linux 5.8 or later)"
    )]
    Note(#[from] bpf::Error),
}

/// A connection with unacknowledged data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unacknowledged {
    /// The connection's ends, as the pod's packets show: no proof that the local one is the pod's.
    pub ends: Ends,
    /// The first number that was not acknowledged, and the one after the last.
    pub first: u32,
    pub after: u32,
    /// The number that the pod acknowledged in its last segment, and its window then. To repeat
    /// the number is safe: no TCP takes it for the acknowledgement of later data.
    pub acknowledged: u32,
    pub window: u16,
    /// TSval and TSecr (RFC 7323) of that segment. Some peers do not answer without them on a
    /// connection that uses timestamps.
    pub timestamps: Option<(u32, u32)>,
    /// The Ethernet address that the pod sent to.
    pub neighbour: [u8; 6],
}

/// Begins to record for the links of the network namespace at `path`.
pub fn begin(path: &Path) -> Result<UnacknowledgedMap, Error> {
    let size = |bytes| u32::try_from(bytes).unwrap_or(u32::MAX);
    let map = bpf::lru_map(size(KEY), size(VALUE), MAX_CONNECTIONS)?;
    let id = bpf::map_id(map.as_fd())?;
    let program = |direction| bpf::load(Hook::Classify, &program::code(direction, &map));
    let programs = [
        (Direction::In, program(Direction::In)?),
        (Direction::Out, program(Direction::Out)?),
    ];
    within(path, || net::attach_to_links(&programs))?;
    Ok(UnacknowledgedMap { map: id })
}

/// Reads the connections that the programs of [`begin`] record.
pub fn read(noted: UnacknowledgedMap) -> Result<Vec<Unacknowledged>, Error> {
    let map = bpf::map_by_id(noted.map)?;
    let entries = bpf::entries::<KEY, VALUE>(map.as_fd())?;
    Ok(entries
        .iter()
        .filter_map(|(key, value)| entry(key, value))
        .collect())
}

fn entry(key: &[u8; KEY], value: &[u8; VALUE]) -> Option<Unacknowledged> {
    let (local, rest) = key.split_first_chunk()?;
    let (remote, rest) = rest.split_first_chunk()?;
    let (local_port, rest) = rest.split_first_chunk()?;
    let (remote_port, kind) = rest.split_first_chunk()?;
    let kind = u32::from_ne_bytes(kind.try_into().ok()?);
    let (first, rest) = value.split_first_chunk()?;
    let (after, rest) = rest.split_first_chunk()?;
    let (header, rest) = rest.split_first_chunk::<HEADER>()?;
    let (acknowledged, rest_of_header) = header.split_first_chunk()?;
    let window = rest_of_header.get(2..4)?;
    Some(Unacknowledged {
        ends: Ends {
            remote: address(kind, remote)?,
            remote_port: u16::from_be_bytes(*remote_port),
            local: address(kind, local)?,
            local_port: u16::from_be_bytes(*local_port),
        },
        first: u32::from_ne_bytes(*first),
        after: u32::from_ne_bytes(*after),
        acknowledged: u32::from_be_bytes(*acknowledged),
        window: u16::from_be_bytes(window.try_into().ok()?),
        timestamps: timestamps(header),
        neighbour: *rest.first_chunk()?,
    })
}

fn address(kind: u32, bytes: &[u8; 16]) -> Option<IpAddr> {
    match kind {
        program::IPV4 => {
            let first: [u8; 4] = *bytes.first_chunk()?;
            Some(Ipv4Addr::from(first).into())
        }
        program::IPV6 => Some(Ipv6Addr::from(*bytes).into()),
        _ => None,
    }
}

/// Returns the timestamps, if they lie where gVisor and Linux put them and the header is long
/// enough. Otherwise these bytes are data.
fn timestamps(header: &[u8; HEADER]) -> Option<(u32, u32)> {
    /// Two padding bytes, and the kind and length of the timestamps: ten bytes.
    const BEGIN: [u8; 4] = [1, 1, 8, 10];
    /// Length of a header with room for them, in words of four bytes.
    const WORDS: u8 = 8;
    let [_, _, _, _, length, ..] = header;
    let options = header.get(12..)?;
    let (begin, rest) = options.split_first_chunk()?;
    let (value, echo) = rest.split_first_chunk()?;
    let is_present = length >> 4 >= WORDS && *begin == BEGIN;
    is_present.then_some((
        u32::from_be_bytes(*value),
        u32::from_be_bytes(echo.try_into().ok()?),
    ))
}

#[cfg(test)]
mod tests;

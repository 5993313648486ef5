//! What a pod has said over TCP and nobody has acknowledged.
//!
//! gVisor's network stack forgets in a restore what it was to say again. So two small BPF programs on the pod's link, one for each
//! direction, keep a map of the connections on which something is on its way: who has restored the sandbox asks those peers where they
//! are, and their answers remind it (docs/decisions/2026-11-23-tcp-connections-revived-after-restore.md). They are attached as those of
//! [`crate::traffic`], and beside them; every packet passes. Where the kernel does not take them nothing else is missing.
//!
//! - Out, data or the end of a connection makes an entry, or says how far it goes. What begins or resets the connection ends it. A segment
//!   that only acknowledges costs a look at its header.
//! - In, an acknowledgement moves the first number, or ends the entry; so does a reset. One lookup for each segment.
//!
//! The map's content is the sandbox' own words: it may be anything. There is room for few, and what was not looked at for longest is
//! forgotten, so that a sandbox harms only itself. TCP over IPv4, and over IPv6 without extension headers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;
use std::path::Path;

use torpor_records::UnacknowledgedMap;

use crate::bpf::{self, Hook};
use crate::net::{self, Direction, within};

mod program;

/// Connections of one pod with something on its way.
const MOST: u32 = 256;
/// The mark of packets (SO_MARK) that leave by the pod's link and are not the sandbox' words. It does not leave the pod's namespace.
pub const NOT_OF_SANDBOX: u32 = 0x746f_7270;

/// Addresses of the pod's end and of the other, from their first byte on; ports likewise, in network byte order; 4 or 6.
const KEY: usize = 16 + 16 + 2 + 2 + 4;
/// The first number, the one after the last (as the machine orders bytes); [`HEADER`]; the neighbour's Ethernet address; two bytes.
const VALUE: usize = 4 + 4 + HEADER + 6 + 2;
/// Of the last segment: its TCP header from the acknowledged number on, with the first twelve bytes of its options, or what follows it.
const HEADER: usize = 24;

/// Why nothing is noted.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Namespace(#[from] net::Error),
    #[error(
        "the kernel refuses the program that records unacknowledged data (needs Linux 5.8 or later)"
    )]
    Note(#[from] bpf::Error),
}

/// A connection on which something is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unacknowledged {
    /// The pod's end. No more than what its packets said.
    pub local: (IpAddr, u16),
    pub remote: (IpAddr, u16),
    /// The first number that was not acknowledged, and the one after the last.
    pub first: u32,
    pub after: u32,
    /// What the pod has acknowledged with its last words, and its window then.
    pub acknowledged: u32,
    pub window: u16,
    /// TSval and TSecr (RFC 7323) of that.
    pub timestamps: Option<(u32, u32)>,
    /// The Ethernet address that the pod sent to.
    pub neighbour: [u8; 6],
}

/// Begins to note for the links of the network namespace at `path`.
pub fn begin(path: &Path) -> Result<UnacknowledgedMap, Error> {
    let size = |bytes| u32::try_from(bytes).unwrap_or(u32::MAX);
    let map = bpf::forgetful_map(size(KEY), size(VALUE), MOST)?;
    let id = bpf::map_id(map.as_fd())?;
    let program = |direction| bpf::load(Hook::Classify, &program::code(direction, &map));
    let programs = [
        (Direction::In, program(Direction::In)?),
        (Direction::Out, program(Direction::Out)?),
    ];
    within(path, || net::attach_to_links(&programs))?;
    Ok(UnacknowledgedMap { map: id })
}

/// Reads what [`begin`] notes.
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
        local: (address(kind, local)?, u16::from_be_bytes(*local_port)),
        remote: (address(kind, remote)?, u16::from_be_bytes(*remote_port)),
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

/// If they lie where gVisor, as Linux, puts them, and there are options at all: else it is data.
fn timestamps(header: &[u8; HEADER]) -> Option<(u32, u32)> {
    /// Twice nothing, then timestamps, of ten bytes.
    const BEGIN: [u8; 4] = [1, 1, 8, 10];
    /// Words of a header with room for them.
    const WORDS: u8 = 8;
    let [_, _, _, _, length, ..] = header;
    let options = header.get(12..)?;
    let (begin, rest) = options.split_first_chunk()?;
    let (value, echo) = rest.split_first_chunk()?;
    let there = length >> 4 >= WORDS && *begin == BEGIN;
    there.then_some((
        u32::from_be_bytes(*value),
        u32::from_be_bytes(echo.try_into().ok()?),
    ))
}

#[cfg(test)]
mod tests;

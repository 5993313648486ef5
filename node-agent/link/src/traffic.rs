//! Times of a pod's last packets that count as use.
//!
//! Two small BPF programs on the pod's link, one for each direction, record the time of each
//! packet in a map. They let every packet pass. They are attached through the link's own clsact
//! queueing discipline (Linux 4.5 or later), so they live exactly as long as the link, without any
//! process, and need no removal. A packet that counts costs two map operations, any other one a
//! look at its header. A large segment is one packet here.
//!
//! These packets do not count:
//!
//! - Packets for another link: a bridge sends a packet to all of its ports if it does not know,
//!   or no longer knows, the receiver's.
//! - Packets other than IP (ARP), multicast, IGMP, neighbour and listener discovery: network stacks
//!   send them by themselves.
//! - TCP segments without data that begin or end nothing: acknowledgements follow data that
//!   counted, and keepalives of an idle connection are no use of the sandbox.
//! - The pod's answer to the begin of a connection: its network stack sends the answer, and the
//!   pod's program may not even have seen the connection. The begin itself counts.
//!
//! Incoming packets that may want an answer are recorded apart from the rest. The difference shows
//! whether the pod owes an answer ([`unanswered`]).
//!
//! Packets between the node itself and a TCP port of the pod are recorded by port, because the
//! kubelet's probes are among them. The node's address is the one that its kernel chooses for
//! connections to the pod. The caller of this module passes the probed ports. If other traffic
//! arrives with that address (a NodePort with masquerading, a process on the node) and goes to a
//! probed port, it therefore counts as probes.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use torpor_records::TrafficMap;

use crate::bpf::{self, Hook};
use crate::net::{self, Direction, within};

use program::{MAY_WANT_ANSWER, NodeAddresses, OTHER_TRAFFIC};

mod program;

/// The largest number of recorded ports of one pod. Traffic between the node and further ports
/// counts as other traffic.
const MOST_PORTS: u32 = 64;

/// Why traffic cannot be recorded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Namespace(#[from] net::Error),
    #[error(
        "the kernel refuses the program that watches the pod's link (needs Linux 5.8 or later)"
    )]
    Watch(#[from] bpf::Error),
    #[error("cannot determine the node's address on the route to the pod's {pod}")]
    NodeAddress {
        pod: IpAddr,
        #[source]
        source: std::io::Error,
    },
}

/// Ages of the last packets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Ages {
    /// The last packet between the node and each TCP port of the pod, in milliseconds by port.
    pub node_millis: BTreeMap<u16, u64>,
    /// The last one of all other packets, in milliseconds; `None`: none since the pod was made.
    pub other_millis: Option<u64>,
}

impl Ages {
    /// Returns the age of the last use. Packets between the node and `probed` ports are no
    /// use: they count as the kubelet's probes.
    pub fn youngest(&self, probed: &[u16]) -> Option<Duration> {
        let by_port = self.node_millis.iter();
        let counted = by_port.filter(|(port, _)| !probed.contains(port));
        let ages = counted.map(|(_, age)| *age).chain(self.other_millis);
        ages.min().map(Duration::from_millis)
    }

    /// Returns the age of the last packet between the node and `probed` ports, probes included.
    pub fn youngest_probe(&self, probed: &[u16]) -> Option<Duration> {
        let ages = probed.iter().filter_map(|port| self.node_millis.get(port));
        ages.min().copied().map(Duration::from_millis)
    }
}

/// Begins to record packets on the links of the network namespace at `path`.
///
/// `pod`: the pod's addresses. The caller is in the node's own namespace.
pub fn begin(path: &Path, pod: &[IpAddr]) -> Result<TrafficMap, Error> {
    let node = node_addresses(pod)?;
    let map = bpf::time_map(2 * (MOST_PORTS + 1))?;
    // The programs can always update these entries, even if there is no room for further ones.
    for key in [OTHER_TRAFFIC, OTHER_TRAFFIC | MAY_WANT_ANSWER] {
        bpf::insert_time(map.as_fd(), key, 0)?;
    }
    let id = bpf::map_id(map.as_fd())?;
    let program = |direction| bpf::load(Hook::Classify, &program::code(direction, node, &map));
    let programs = [
        (Direction::In, program(Direction::In)?),
        (Direction::Out, program(Direction::Out)?),
    ];
    within(path, || net::attach_to_links(&programs))?;
    Ok(TrafficMap { map: id })
}

/// Reads the ages of the packets that the programs of [`begin`] record.
pub fn last(watch: TrafficMap) -> Result<Ages, Error> {
    let mut ages = Ages::default();
    for Entry { port, age, .. } in entries(watch)? {
        let age = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
        let youngest = match port {
            Some(port) => ages.node_millis.entry(port).or_insert(age),
            None => ages.other_millis.get_or_insert(age),
        };
        *youngest = age.min(*youngest);
    }
    Ok(ages)
}

/// Returns the age of the last incoming packet that the pod may have to answer, if the pod has sent
/// nothing since.
///
/// The begin of a connection is such a packet: its peer may wait for the pod's first data.
/// Packets from the node to `probed` ports do not count.
pub fn unanswered(watch: TrafficMap, probed: &[u16]) -> Result<Option<Duration>, Error> {
    let mut entries = entries(watch)?;
    entries.retain(|entry| entry.port.is_none_or(|port| !probed.contains(&port)));
    let youngest = |may_want_answer| {
        let ages = entries
            .iter()
            .filter(|entry| entry.may_want_answer == may_want_answer);
        ages.map(|entry| entry.age).min()
    };
    let other = youngest(false);
    Ok(youngest(true).filter(|age| other.is_none_or(|other| *age < other)))
}

/// An entry of the map.
struct Entry {
    /// The pod's port, if the node is the other end of a TCP connection.
    port: Option<u16>,
    may_want_answer: bool,
    age: Duration,
}

fn entries(watch: TrafficMap) -> Result<Vec<Entry>, Error> {
    let map = bpf::map_by_id(watch.map)?;
    let now = bpf::now();
    let times = bpf::times(map.as_fd())?.into_iter();
    let entries = times
        .filter(|(_, at)| !at.is_zero())
        .map(|(key, at)| Entry {
            port: u16::try_from(key & !MAY_WANT_ANSWER).ok(),
            may_want_answer: key & MAY_WANT_ANSWER != 0,
            age: now.saturating_sub(at),
        });
    Ok(entries.collect())
}

/// Returns the addresses that the kernel chooses for connections to the pod. The kubelet's
/// probes come from them.
fn node_addresses(pod: &[IpAddr]) -> Result<NodeAddresses, Error> {
    let mut found = NodeAddresses::default();
    for address in pod {
        let unspecified: IpAddr = match address {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        // Connecting a UDP socket sends nothing.
        let chosen = UdpSocket::bind((unspecified, 0))
            .and_then(|socket| {
                socket.connect((*address, 9))?;
                socket.local_addr()
            })
            .map_err(|source| Error::NodeAddress {
                pod: *address,
                source,
            })?;
        match chosen.ip() {
            IpAddr::V4(v4) => found.v4 = Some(v4),
            IpAddr::V6(v6) => found.v6 = Some(v6),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests;

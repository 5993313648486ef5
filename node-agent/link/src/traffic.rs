//! When a pod last sent or received something that matters.
//!
//! Two small BPF programs on the pod's link, one for each direction, note the time of each packet in a map; they let every packet
//! pass. They are attached through the link's own clsact queueing discipline (Linux 4.5 or later), so they live exactly as long as the
//! link, whoever dies, and there is nothing to take away. For a packet that counts they cost two map operations, for one that does
//! not, a look at its header; large segments are one packet here.
//!
//! What does not count:
//! - what is for another link: a bridge sends to all of its ports what is for one that it does not know (any more);
//! - what is not IP (ARP), multicast, IGMP, neighbour and listener discovery: it comes and goes without anybody's wish;
//! - TCP segments without data that begin or end nothing: acknowledgements follow data that counted, and keepalives of a connection
//!   on which nothing is said are no use of the sandbox;
//! - the answer to who begins a connection: the pod's network stack gives it, and the program may not even have seen it. That somebody has
//!   begun one counts.
//!
//! What comes in and may want an answer is noted apart from the rest, so that it can be told whether the pod owes one ([`unanswered`]).
//!
//! What the node itself exchanges with a TCP port of the pod is noted by port, because the kubelet's probes are among it: the
//! address that the node's kernel takes for connections to the pod. Which ports are probed is only known to who asks. Traffic
//! of others that arrives with that address (a NodePort with masquerading, somebody on the node) and goes to a probed port is
//! therefore taken for probes.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use torpor_records::TrafficMap;

use crate::bpf::{self, Hook};
use crate::net::{self, Direction, within};

mod program;

/// Ports are noted as themselves; this is everything else.
const OTHERS: u32 = 1 << 16;
/// Added to the key of what comes in and begins a connection or bears data.
const MAY_WANT_ANSWER: u32 = 1 << 17;
/// Ports of one pod that its node talks to; beyond them everything counts as others' traffic.
const MOST_PORTS: u32 = 64;

/// Why traffic cannot be watched.
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

/// The node's own addresses towards a pod.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct NodeAddresses {
    v4: Option<Ipv4Addr>,
    v6: Option<Ipv6Addr>,
}

/// How long ago it was that something last happened.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Ages {
    /// Between the node and TCP ports of the pod, in milliseconds by port.
    pub node_millis: BTreeMap<u16, u64>,
    /// Everything else; none: nothing since the pod was made.
    pub other_millis: Option<u64>,
}

impl Ages {
    /// The youngest of what counts when the node's talk with `probed` ports is the kubelet's probing.
    pub fn youngest(&self, probed: &[u16]) -> Option<Duration> {
        let of_node = self.node_millis.iter();
        let counted = of_node.filter(|(port, _)| !probed.contains(port));
        let ages = counted.map(|(_, age)| *age).chain(self.other_millis);
        ages.min().map(Duration::from_millis)
    }

    /// Of the node's talk with `probed` ports, the kubelet's probes among it.
    pub fn youngest_probe(&self, probed: &[u16]) -> Option<Duration> {
        let ages = probed.iter().filter_map(|port| self.node_millis.get(port));
        ages.min().copied().map(Duration::from_millis)
    }
}

/// Begins to watch the links of the network namespace at `path`, whose addresses are `pod`. Called in the node's own namespace.
pub fn begin(path: &Path, pod: &[IpAddr]) -> Result<TrafficMap, Error> {
    let node = node_addresses(pod)?;
    let map = bpf::time_map(2 * (MOST_PORTS + 1))?;
    // The programs find these always, so that there is a place for what has none.
    for key in [OTHERS, OTHERS | MAY_WANT_ANSWER] {
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

/// Reads what [`begin`] watches.
pub fn last(watch: TrafficMap) -> Result<Ages, Error> {
    let mut ages = Ages::default();
    for Seen { port, age, .. } in seen(watch)? {
        let age = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
        let noted = match port {
            Some(port) => ages.node_millis.entry(port).or_insert(age),
            None => ages.other_millis.get_or_insert(age),
        };
        *noted = age.min(*noted);
    }
    Ok(ages)
}

/// How long ago something came in that the pod may have to answer, if it has said nothing since: also who has begun a connection may wait to be
/// spoken to. What the node says to `probed` ports does not count.
pub fn unanswered(watch: TrafficMap, probed: &[u16]) -> Result<Option<Duration>, Error> {
    let mut seen = seen(watch)?;
    seen.retain(|seen| seen.port.is_none_or(|port| !probed.contains(&port)));
    let youngest = |may_want_answer| {
        let of = seen
            .iter()
            .filter(|seen| seen.may_want_answer == may_want_answer);
        of.map(|seen| seen.age).min()
    };
    let said = youngest(false);
    Ok(youngest(true).filter(|asked| said.is_none_or(|said| *asked < said)))
}

/// One entry of the map.
struct Seen {
    /// Of the node's talk with it.
    port: Option<u16>,
    may_want_answer: bool,
    age: Duration,
}

fn seen(watch: TrafficMap) -> Result<Vec<Seen>, Error> {
    let map = bpf::map_by_id(watch.map)?;
    let now = bpf::now();
    let times = bpf::times(map.as_fd())?.into_iter();
    let seen = times.filter(|(_, at)| !at.is_zero()).map(|(key, at)| Seen {
        port: u16::try_from(key & !MAY_WANT_ANSWER).ok(),
        may_want_answer: key & MAY_WANT_ANSWER != 0,
        age: now.saturating_sub(at),
    });
    Ok(seen.collect())
}

/// The kubelet's probes come from the address that the kernel chooses for connections to the pod.
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

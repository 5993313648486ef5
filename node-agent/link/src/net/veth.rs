//! The veth pairs between a pod and its host.

use std::path::Path;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage};

use super::error::Error;
use super::namespace::within;
use super::netlink::Netlink;

/// The two ends of a link between a pod and its host.
///
/// `pod` and `host` are their indexes in the namespaces where they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    pub pod: u32,
    pub host: u32,
    /// Ethernet address of the pod's end.
    pub pod_address: [u8; 6],
    /// True if packets have come to the pod's end that the host's end has not sent.
    ///
    /// A program of the node then hands them over from link to link (`bpf_redirect_peer`), and no
    /// packet socket at the host's end sees them.
    pub is_bypassed: bool,
}

/// Returns the veth pairs between the namespace at `path` and the calling thread's.
///
/// Links of other kinds have no other end.
pub fn pairs(path: &Path) -> Result<Vec<Pair>, Error> {
    // The pod's counters are read first. Packets sent between the two reads therefore do not
    // count as ones that bypass the host's end.
    let pods = within(path, veths)?;
    let hosts = veths()?;
    let pairs = pods.iter().filter_map(|pod| pair(pod, &hosts));
    Ok(pairs.collect())
}

/// Returns the pair of a pod's end, if its other end is among the host's.
///
/// An index alone means nothing in another namespace: both ends must name each other.
fn pair(pod: &Veth, hosts: &[Veth]) -> Option<Pair> {
    let other_end = |host: &&Veth| (host.peer, host.index) == (pod.index, pod.peer);
    let host = hosts.iter().find(other_end)?;
    Some(Pair {
        pod: pod.index,
        host: host.index,
        pod_address: pod.address,
        is_bypassed: pod.received > host.sent,
    })
}

/// One end of a veth pair.
struct Veth {
    index: u32,
    /// Index of the other end, in the namespace of that end.
    peer: u32,
    address: [u8; 6],
    /// Packets. One end receives as many as the other one sends.
    received: u64,
    sent: u64,
}

/// Returns the veth links of this thread's namespace.
fn veths() -> Result<Vec<Veth>, Error> {
    let links = Netlink::open()?.dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
    let veths = links.into_iter().filter_map(|message| match message {
        RouteNetlinkMessage::NewLink(link) => veth(&link),
        _ => None,
    });
    Ok(veths.collect())
}

fn veth(link: &LinkMessage) -> Option<Veth> {
    let address = link.attributes.iter().find_map(|a| match a {
        LinkAttribute::Address(address) => address.as_slice().try_into().ok(),
        _ => None,
    });
    let packets = link.attributes.iter().find_map(|a| match a {
        LinkAttribute::Stats64(packets) => Some((packets.rx_packets, packets.tx_packets)),
        _ => None,
    });
    let (received, sent) = packets.unwrap_or_default();
    Some(Veth {
        index: link.header.index,
        peer: veth_peer(link)?,
        address: address?,
        received,
        sent,
    })
}

fn veth_peer(link: &LinkMessage) -> Option<u32> {
    let kind = |info: &LinkInfo| matches!(info, LinkInfo::Kind(InfoKind::Veth));
    let is_veth = link
        .attributes
        .iter()
        .any(|a| matches!(a, LinkAttribute::LinkInfo(infos) if infos.iter().any(kind)));
    link.attributes.iter().find_map(|a| match a {
        LinkAttribute::Link(peer) if is_veth => Some(*peer),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traffic_that_bypasses_the_hosts_end_is_detected_by_the_counters_of_both_ends() {
        let veth = |index, peer, received, sent| Veth {
            index,
            peer,
            address: [2; 6],
            received,
            sent,
        };
        for (received, sent, bypassed) in
            [(0, 0, false), (7, 7, false), (7, 8, false), (8, 7, true)]
        {
            // The first link of the host leads to another pod.
            let hosts = [veth(9, 3, 0, 0), veth(8, 2, 100, sent)];
            let found = pair(&veth(2, 8, received, 0), &hosts).expect("a pair");
            assert_eq!(found.is_bypassed, bypassed, "{received} {sent}");
        }
    }
}

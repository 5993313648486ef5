//! The links between a pod and its host.

use std::path::Path;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage};

use super::{Error, Netlink, within};

/// The two ends of a link between a pod and its host, by their indexes in the namespaces where they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    pub pod: u32,
    pub host: u32,
    /// Ethernet address of the pod's end.
    pub pod_address: [u8; 6],
    /// Packets have come to the pod's end that the host's end has not sent: a program of the node hands them over from link to link
    /// (`bpf_redirect_peer`), and nobody sees them on the host's.
    pub is_bypassed: bool,
}

/// The veth pairs between the namespace at `path` and the calling thread's. Links of other kinds have no other end.
pub fn pairs(path: &Path) -> Result<Vec<Pair>, Error> {
    // Theirs first: what is sent between the two looks is not taken for what came another way.
    let theirs = within(path, veths)?;
    let ours = veths()?;
    let pairs = theirs.iter().filter_map(|theirs| pair(theirs, &ours));
    Ok(pairs.collect())
}

/// An index alone means nothing in another namespace: both ends must name each other.
fn pair(theirs: &Veth, ours: &[Veth]) -> Option<Pair> {
    let other_end = |ours: &&Veth| (ours.peer, ours.index) == (theirs.index, theirs.peer);
    let host = ours.iter().find(other_end)?;
    Some(Pair {
        pod: theirs.index,
        host: host.index,
        pod_address: theirs.address,
        is_bypassed: theirs.received > host.sent,
    })
}

/// One end of a veth pair.
struct Veth {
    index: u32,
    /// The other end's index, in its own namespace.
    peer: u32,
    address: [u8; 6],
    /// Packets. One end counts what the other one counts.
    received: u64,
    sent: u64,
}

/// The veth links of this thread's namespace.
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
    let counted = link.attributes.iter().find_map(|a| match a {
        LinkAttribute::Stats64(counted) => Some((counted.rx_packets, counted.tx_packets)),
        _ => None,
    });
    let (received, sent) = counted.unwrap_or_default();
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
    fn what_reaches_a_pod_past_the_hosts_end_is_seen_by_what_both_ends_have_counted() {
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
            // Another pod's, with a number that is this one's in its own namespace.
            let ours = [veth(9, 3, 0, 0), veth(8, 2, 100, sent)];
            let found = pair(&veth(2, 8, received, 0), &ours).expect("a pair");
            assert_eq!(found.is_bypassed, bypassed, "{received} {sent}");
        }
    }
}

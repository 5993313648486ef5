//! A restored sandbox' network, as in runsc/sandbox/network.go: the links, addresses and routes of
//! the pod's network namespace, the addresses to remove there, and the arguments for gVisor.

use std::net::IpAddr;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric,
};
use serde_json::{Value, json};

use torpor_link::net::{network, own_ip};

/// Bytes of gVisor's own segmentation offload, where the host's link has none
/// (pkg/tcpip/stack.GVisorGSOMaxSize).
const SOFTWARE_GSO: u32 = 1 << 16;
/// Value of runsc/config.QDiscFIFO.
const FIFO: u32 = 1;

/// The configuration of a network namespace, as the kernel reports it.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) links: Vec<LinkMessage>,
    pub(super) addresses: Vec<AddressMessage>,
    pub(super) routes: Vec<RouteMessage>,
    pub(super) neighbours: Vec<NeighbourMessage>,
}

/// A link that the sandbox gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: String,
    /// Bytes of the host's segmentation offload; 0 for none.
    pub(super) gso: u32,
}

impl Found {
    pub(super) fn add(&mut self, message: RouteNetlinkMessage) {
        match message {
            RouteNetlinkMessage::NewLink(link) => self.links.push(link),
            RouteNetlinkMessage::NewAddress(address) => self.addresses.push(address),
            RouteNetlinkMessage::NewRoute(route) => self.routes.push(route),
            RouteNetlinkMessage::NewNeighbour(neighbour) => self.neighbours.push(neighbour),
            _ => {}
        }
    }

    fn addresses_of(&self, link: u32) -> impl Iterator<Item = (IpAddr, u8)> {
        let of_link = self
            .addresses
            .iter()
            .filter(move |address| address.header.index == link);
        of_link.filter_map(|address| Some((own_ip(address)?, address.header.prefix_len)))
    }

    /// Returns the sandbox' links without loopback: those that are up and have an address.
    pub(super) fn links(&self) -> Vec<Link> {
        let of_sandbox = self.links.iter().filter(|link| {
            let flags = link.header.flags;
            flags.contains(LinkFlags::Up)
                && !flags.contains(LinkFlags::Loopback)
                && self.addresses_of(link.header.index).next().is_some()
        });
        let links = of_sandbox.map(|link| {
            let attributes = &link.attributes;
            let gso = attributes.iter().find_map(|a| match a {
                LinkAttribute::GsoMaxSize(size) => Some(*size),
                _ => None,
            });
            Link {
                index: link.header.index,
                name: name_of(link).to_owned(),
                gso: gso.unwrap_or_default(),
            }
        });
        links.collect()
    }

    /// Returns the addresses of the links, which are removed from the namespace.
    pub(super) fn taken(&self, links: &[Link]) -> impl Iterator<Item = &AddressMessage> {
        let indexes: Vec<u32> = links.iter().map(|link| link.index).collect();
        (self.addresses.iter()).filter(move |address| indexes.contains(&address.header.index))
    }

    /// Returns gVisor's CreateLinksAndRoutesArgs. `offloads`: for each link, whether it has the
    /// host's segmentation offload.
    pub(super) fn arguments(&self, links: &[Link], offloads: &[bool]) -> Value {
        let loopback = self.links.iter().filter(|link| {
            let flags = link.header.flags;
            flags.contains(LinkFlags::Up) && flags.contains(LinkFlags::Loopback)
        });
        let loopback: Vec<Value> = loopback.map(|link| self.loopback(link)).collect();
        let of_host: Vec<Value> = (links.iter().zip(offloads))
            .map(|(link, offload)| self.link(link, *offload))
            .collect();
        json!({
            "LoopbackLinks": loopback,
            "FDBasedLinks": of_host,
            "AllowConnectedOnSave": true,
            "IsRestore": true,
        })
    }

    fn loopback(&self, link: &LinkMessage) -> Value {
        let index = link.header.index;
        // The kernel has the routes to own addresses in another table than those of `routes_of`.
        let own = self
            .addresses_of(index)
            .map(|(ip, length)| route(network(ip, length), length, None, 0));
        let routes: Vec<Value> = own.chain(self.routes_of(index)).collect();
        json!({ "Name": name_of(link), "Addresses": self.prefixes(index), "Routes": routes })
    }

    fn link(&self, link: &Link, offload: bool) -> Value {
        let offload = offload && link.gso > 0;
        let attributes = self
            .links
            .iter()
            .find(|other| other.header.index == link.index);
        let (mut mtu, mut hardware) = (0, &[][..]);
        for attribute in attributes.iter().flat_map(|link| &link.attributes) {
            match attribute {
                LinkAttribute::Mtu(bytes) => mtu = *bytes,
                // An address of zeros stands for none.
                LinkAttribute::Address(address) if address.iter().any(|byte| *byte != 0) => {
                    hardware = address;
                }
                _ => {}
            }
        }
        let routes: Vec<Value> = self.routes_of(link.index).collect();
        let neighbours: Vec<Value> = self.neighbours_of(link.index).collect();
        json!({
            "Name": link.name,
            "MTU": mtu,
            "Addresses": self.prefixes(link.index),
            "Routes": routes,
            "Neighbors": neighbours,
            "GSOMaxSize": if offload { link.gso } else { SOFTWARE_GSO },
            "GVisorGSOEnabled": !offload,
            "RXChecksumOffload": true,
            "LinkAddress": BASE64_STANDARD.encode(hardware),
            "QDisc": FIFO,
            "NumChannels": 1,
        })
    }

    fn prefixes(&self, link: u32) -> Vec<Value> {
        let prefix = |(ip, length): (IpAddr, u8)| json!({ "Address": ip, "PrefixLen": length });
        self.addresses_of(link).map(prefix).collect()
    }

    fn routes_of(&self, link: u32) -> impl Iterator<Item = Value> {
        let of_link = self.routes.iter().filter(move |route| {
            route.header.table == RouteHeader::RT_TABLE_MAIN
                && !route.header.flags.contains(RouteFlags::Cloned)
                && route.attributes.contains(&RouteAttribute::Oif(link))
        });
        of_link.filter_map(|message| {
            let (mut to, mut through, mut mtu) = (None, None, 0);
            for attribute in &message.attributes {
                match attribute {
                    RouteAttribute::Destination(address) => to = ip(address),
                    RouteAttribute::Gateway(address) => through = ip(address),
                    RouteAttribute::Metrics(metrics) => {
                        mtu = metrics.iter().find_map(path_mtu).unwrap_or_default();
                    }
                    _ => {}
                }
            }
            let length = message.header.destination_prefix_length;
            // The kernel leaves out the destination of a default route.
            let any = match message.header.address_family {
                netlink_packet_route::AddressFamily::Inet => IpAddr::from([0; 4]),
                netlink_packet_route::AddressFamily::Inet6 => IpAddr::from([0; 16]),
                _ => return None,
            };
            let to = network(to.unwrap_or(any), length);
            Some(route(to, length, through, mtu))
        })
    }

    fn neighbours_of(&self, link: u32) -> impl Iterator<Item = Value> {
        let configured = self.neighbours.iter().filter(move |neighbour| {
            neighbour.header.ifindex == link && neighbour.header.state == NeighbourState::Permanent
        });
        configured.filter_map(|neighbour| {
            let attributes = &neighbour.attributes;
            let ip = attributes.iter().find_map(|a| match a {
                NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => {
                    Some(IpAddr::V4(*ip))
                }
                NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => {
                    Some(IpAddr::V6(*ip))
                }
                _ => None,
            });
            let hardware = attributes.iter().find_map(|a| match a {
                NeighbourAttribute::LinkLayerAddress(address) => Some(address),
                _ => None,
            });
            let hardware = BASE64_STANDARD.encode(hardware.map(Vec::as_slice).unwrap_or_default());
            Some(json!({ "IP": ip?, "HardwareAddr": hardware }))
        })
    }
}

fn name_of(link: &LinkMessage) -> &str {
    let name = link.attributes.iter().find_map(|a| match a {
        LinkAttribute::IfName(name) => Some(name.as_str()),
        _ => None,
    });
    name.unwrap_or_default()
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some((*ip).into()),
        RouteAddress::Inet6(ip) => Some((*ip).into()),
        _ => None,
    }
}

fn path_mtu(metric: &RouteMetric) -> Option<u32> {
    match metric {
        RouteMetric::Mtu(bytes) => Some(*bytes),
        _ => None,
    }
}

/// Returns gVisor's Route. In Go's JSON a mask is its bytes in base64.
fn route(to: IpAddr, length: u8, through: Option<IpAddr>, mtu: u32) -> Value {
    let (ones, bits) = match to {
        IpAddr::V4(_) => (IpAddr::from([0xff; 4]), 32),
        IpAddr::V6(_) => (IpAddr::from([0xff; 16]), 128),
    };
    let mask = match network(ones, length.min(bits)) {
        IpAddr::V4(mask) => mask.octets().to_vec(),
        IpAddr::V6(mask) => mask.octets().to_vec(),
    };
    let through = through.map(|ip| ip.to_string()).unwrap_or_default();
    json!({
        "Destination": { "IP": to, "Mask": BASE64_STANDARD.encode(mask) },
        "Gateway": through,
        "MTU": mtu,
    })
}

//! Addresses, routes and configured neighbours of a pod's network namespace.
//!
//! At start and restore, runsc removes the addresses from the pod's interfaces, because its own
//! network stack has them from then on. The kernel then removes what depends on them. Nothing puts
//! them back when the sandbox ends. The creation of the pause container therefore reads them once,
//! when the CNI plugin has just set them. The pod's record keeps them as the kernel's own messages,
//! and each restore replays them first.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use netlink_packet_core::{
    NLM_F_CREATE, NLM_F_EXCL, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage,
};
use netlink_packet_route::link::{LinkFlags, LinkMessage};
use netlink_packet_route::neighbour::{NeighbourAttribute, NeighbourMessage, NeighbourState};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::tc::{
    TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcMessage, TcOption,
};
use netlink_sys::Socket;
use rustix::event::{PollFd, PollFlags, poll};
use torpor_records::Addresses;

pub use error::Error;
pub use namespace::{inside, within};
pub use netlink::Netlink;
pub use veth::{Pair, pairs};

mod error;
mod namespace;
mod netlink;
mod veth;

/// Direction of packets, as the pod sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    In,
    Out,
}

/// Returns the IP addresses of a record, without link-local ones (fe80::/10).
pub fn ips(recorded: &Addresses) -> Result<Vec<IpAddr>, Error> {
    let mut ips = Vec::new();
    for hex in &recorded.addresses {
        if let RouteNetlinkMessage::NewAddress(address) = from_hex(hex)? {
            let is_of_link =
                |ip: &IpAddr| matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
            ips.extend(own_ip(&address).filter(|ip| !is_of_link(ip)));
        }
    }
    Ok(ips)
}

/// Returns the own IP address in a message.
///
/// On a point-to-point link, the attribute `Local` is the own address and `Address` the other
/// end's. IPv6 has only `Address`.
pub fn own_ip(address: &AddressMessage) -> Option<IpAddr> {
    let attributes = &address.attributes;
    let local = attributes.iter().find_map(|a| match a {
        AddressAttribute::Local(ip) => Some(*ip),
        _ => None,
    });
    let any = || {
        attributes.iter().find_map(|a| match a {
            AddressAttribute::Address(ip) => Some(*ip),
            _ => None,
        })
    };
    local.or_else(any)
}

/// Reads the addresses, routes and neighbours that are configured in the namespace at `path`.
pub fn read(path: &Path) -> Result<Addresses, Error> {
    within(path, || {
        let mut netlink = Netlink::open()?;
        let loopback = netlink.loopback_indexes()?;
        let mut found = Addresses::default();
        // The addresses come before the routes: the routes of an address found here exist by then.
        let addresses = netlink.dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()))?;
        let mut routes = netlink.routes()?;
        for message in addresses {
            if let RouteNetlinkMessage::NewAddress(mut address) = message
                && !loopback.contains(&address.header.index)
            {
                make_addable(&mut address, &routes);
                found
                    .addresses
                    .push(to_hex(RouteNetlinkMessage::NewAddress(address)));
            }
        }
        routes.retain(is_configured);
        // The kernel accepts a route through a gateway only after a route to the gateway.
        routes.sort_by_key(|route| route.header.scope != RouteScope::Link);
        found.routes = routes
            .into_iter()
            .map(|mut route| {
                route
                    .attributes
                    .retain(|a| !matches!(a, RouteAttribute::CacheInfo(_)));
                to_hex(RouteNetlinkMessage::NewRoute(route))
            })
            .collect();
        found.neighbours = netlink.configured_neighbours()?;
        Ok(found)
    })
}

/// Puts all recorded items back into the namespace at `path`. Existing ones stay as they are.
pub fn put_back(path: &Path, addresses: &Addresses) -> Result<(), Error> {
    within(path, || {
        let mut netlink = Netlink::open()?;
        for (what, message) in addresses
            .addresses
            .iter()
            .map(|hex| ("the pod's address", hex))
            .chain(addresses.routes.iter().map(|hex| ("the pod's route", hex)))
            .chain((addresses.neighbours.iter()).map(|hex| ("the pod's neighbour", hex)))
        {
            netlink.replace(what, from_hex(message)?)?;
        }
        Ok(())
    })
}

/// Waits for the removal of an address of a namespace: runsc removes the addresses right before
/// it hands an image over to the sandbox.
#[derive(Debug)]
pub struct AddressWatch(Socket);

impl AddressWatch {
    /// Begins to record removals in the namespace at `path`.
    pub fn begin(path: &Path) -> Result<Self, Error> {
        within(path, || {
            let socket = Netlink::open()?.socket;
            // RTNLGRP_IPV4_IFADDR and RTNLGRP_IPV6_IFADDR.
            for group in [5, 9] {
                socket.add_membership(group).map_err(Error::Socket)?;
            }
            socket.set_non_blocking(true).map_err(Error::Socket)?;
            Ok(Self(socket))
        })
    }

    /// Waits until an address is removed, or `other` is readable or has lost its other end.
    pub fn wait(self, other: BorrowedFd<'_>) -> Result<(), Error> {
        let mut netlink = Netlink {
            socket: self.0,
            sequence: 0,
        };
        loop {
            let mut fds = [
                PollFd::new(&netlink.socket, PollFlags::IN),
                PollFd::from_borrowed_fd(other, PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(Error::Socket(errno.into())),
            }
            if !fds[1].revents().is_empty() {
                return Ok(());
            }
            let messages = match netlink.receive() {
                Ok(messages) => messages,
                Err(Error::Socket(error)) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    continue;
                }
                Err(error) => return Err(error),
            };
            let is_removal = |message: &NetlinkMessage<RouteNetlinkMessage>| {
                let deleted = RouteNetlinkMessage::is_del_address;
                matches!(&message.payload, NetlinkPayload::InnerMessage(inner) if deleted(inner))
            };
            if messages.iter().any(is_removal) {
                return Ok(());
            }
        }
    }
}

/// Changes the message that the kernel reported for an address, so that the kernel accepts it.
///
/// The kernel rejects its own cache information. An address that was in use needs no duplicate
/// address detection, which would delay the wake of an IPv6 pod by a second. If the route to the
/// address's network was removed, the kernel must not add it again: plugins for point-to-point
/// links remove it, because all other stations are behind the gateway.
fn make_addable(address: &mut AddressMessage, routes: &[RouteMessage]) {
    let mut wanted = AddressFlags::Nodad | AddressFlags::Permanent;
    if !has_route(address, routes) {
        wanted |= AddressFlags::Noprefixroute;
    }
    address
        .attributes
        .retain(|a| !matches!(a, AddressAttribute::CacheInfo(_)));
    address.header.flags = AddressHeaderFlags::Nodad;
    for attribute in &mut address.attributes {
        if let AddressAttribute::Flags(flags) = attribute {
            *flags = wanted;
        }
    }
}

/// Reports whether the route exists that the kernel derives from the address.
fn has_route(address: &AddressMessage, routes: &[RouteMessage]) -> bool {
    let length = address.header.prefix_len;
    let is_own = |ip: IpAddr| {
        address.attributes.iter().any(|a| match a {
            AddressAttribute::Address(own) | AddressAttribute::Local(own) => {
                network(*own, length) == network(ip, length)
            }
            _ => false,
        })
    };
    let link = RouteAttribute::Oif(address.header.index);
    routes.iter().any(|route| {
        route.header.protocol == RouteProtocol::Kernel
            && route.header.kind == RouteType::Unicast
            && route.header.destination_prefix_length == length
            && route.attributes.contains(&link)
            && route.attributes.iter().any(|a| match a {
                RouteAttribute::Destination(RouteAddress::Inet(ip)) => is_own((*ip).into()),
                RouteAttribute::Destination(RouteAddress::Inet6(ip)) => is_own((*ip).into()),
                _ => false,
            })
    })
}

/// Returns the network of an address: its first `length` bits, and zeros.
pub fn network(ip: IpAddr, length: u8) -> IpAddr {
    match ip {
        IpAddr::V4(ip) => {
            let rest = u32::MAX.checked_shr(length.into()).unwrap_or(0);
            Ipv4Addr::from_bits(ip.to_bits() & !rest).into()
        }
        IpAddr::V6(ip) => {
            let rest = u128::MAX.checked_shr(length.into()).unwrap_or(0);
            Ipv6Addr::from_bits(ip.to_bits() & !rest).into()
        }
    }
}

/// Reports whether the route was configured.
///
/// Routes that the kernel derives from addresses come back with the addresses.
fn is_configured(route: &RouteMessage) -> bool {
    route.header.table == RouteHeader::RT_TABLE_MAIN
        && route.header.kind == RouteType::Unicast
        && route.header.protocol != RouteProtocol::Kernel
        && route.header.protocol != RouteProtocol::Ra
}

impl Netlink {
    fn routes(&mut self) -> Result<Vec<RouteMessage>, Error> {
        let all = self.dump(RouteNetlinkMessage::GetRoute(RouteMessage::default()))?;
        let routes = all.into_iter().filter_map(|message| match message {
            RouteNetlinkMessage::NewRoute(route) => Some(route),
            _ => None,
        });
        Ok(routes.collect())
    }

    /// Returns the configured neighbours, which runsc gives to gVisor.
    ///
    /// Learnt neighbours are left out: the next owner of the address learns them again.
    fn configured_neighbours(&mut self) -> Result<Vec<String>, Error> {
        let all = RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default());
        let mut found = Vec::new();
        for message in self.dump(all)? {
            if let RouteNetlinkMessage::NewNeighbour(mut neighbour) = message
                && neighbour.header.state == NeighbourState::Permanent
            {
                neighbour.attributes.retain(|a| {
                    use NeighbourAttribute::{Destination, LinkLayerAddress};
                    matches!(a, Destination(_) | LinkLayerAddress(_))
                });
                found.push(to_hex(RouteNetlinkMessage::NewNeighbour(neighbour)));
            }
        }
        Ok(found)
    }

    fn loopback_indexes(&mut self) -> Result<Vec<u32>, Error> {
        self.links(|flags| flags.contains(LinkFlags::Loopback))
    }

    fn links(&mut self, wanted: impl Fn(LinkFlags) -> bool) -> Result<Vec<u32>, Error> {
        let links = self.dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
        Ok(links
            .into_iter()
            .filter_map(|message| match message {
                RouteNetlinkMessage::NewLink(link) if wanted(link.header.flags) => {
                    Some(link.header.index)
                }
                _ => None,
            })
            .collect())
    }
}

/// Returns the indexes of this thread's links that are up, loopback aside.
pub(crate) fn link_indexes() -> Result<Vec<u32>, Error> {
    Netlink::open()?
        .links(|flags| flags.contains(LinkFlags::Up) && !flags.contains(LinkFlags::Loopback))
}

/// Attaches programs of [`crate::bpf::Hook::Classify`] to every link of this thread's namespace
/// that is up, loopback aside.
///
/// Each program sees the packets of its direction for as long as the link exists.
pub(crate) fn attach_to_links(programs: &[(Direction, OwnedFd)]) -> Result<(), Error> {
    /// Precedes programs of CNI plugins, which may end the classification; ours never end it.
    const PRIORITY: u32 = 7;
    const ETH_P_ALL: u16 = 3;
    let mut netlink = Netlink::open()?;
    for link in link_indexes()? {
        let link = i32::try_from(link).map_err(|_| Error::BadAnswer("a link's number".into()))?;
        let mut discipline = TcMessage::with_index(link);
        discipline.header.handle = TcHandle::from(0xffff_0000);
        discipline.header.parent = TcHandle::CLSACT;
        discipline.attributes = vec![TcAttribute::Kind("clsact".to_owned())];
        let made = netlink.change(
            "a clsact qdisc on the pod's link",
            RouteNetlinkMessage::NewQueueDiscipline(discipline),
            NLM_F_CREATE | NLM_F_EXCL,
        );
        match made {
            Err(Error::Refused { source, .. })
                if source.kind() == std::io::ErrorKind::AlreadyExists => {}
            other => other?,
        }
        for (direction, program) in programs {
            let mut filter = TcMessage::with_index(link);
            filter.header.parent = TcHandle {
                major: u16::MAX,
                minor: match direction {
                    Direction::In => TcHandle::MIN_INGRESS,
                    Direction::Out => TcHandle::MIN_EGRESS,
                },
            };
            filter.header.info = PRIORITY << 16 | u32::from(ETH_P_ALL.to_be());
            let options = [
                TcFilterBpfOption::ProgFd(program.as_raw_fd().cast_unsigned()),
                TcFilterBpfOption::ProgName("torpor".to_owned()),
                TcFilterBpfOption::Flags(TcBpfFlags::DirectAction),
            ];
            filter.attributes = vec![
                TcAttribute::Kind(TcFilterBpf::KIND.to_owned()),
                TcAttribute::Options(options.map(TcOption::Bpf).into()),
            ];
            netlink.change(
                "a program on the pod's link",
                RouteNetlinkMessage::NewTrafficFilter(filter),
                NLM_F_CREATE | NLM_F_EXCL,
            )?;
        }
    }
    Ok(())
}

fn to_hex(message: RouteNetlinkMessage) -> String {
    use std::fmt::Write as _;
    let mut packet = NetlinkMessage::new(NetlinkHeader::default(), NetlinkPayload::from(message));
    packet.finalize();
    let mut bytes = vec![0; packet.buffer_len()];
    packet.serialize(&mut bytes);
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut hex, byte| {
            // Writing to a String cannot fail.
            let _ = write!(hex, "{byte:02x}");
            hex
        })
}

fn from_hex(hex: &str) -> Result<RouteNetlinkMessage, Error> {
    let bad = || Error::BadRecord(hex.chars().take(80).collect());
    let bytes: Option<Vec<u8>> = (0..hex.len())
        .step_by(2)
        .map(|at| {
            hex.get(at..at + 2)
                .and_then(|pair| u8::from_str_radix(pair, 16).ok())
        })
        .collect();
    let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&bytes.ok_or_else(bad)?)
        .map_err(|_| bad())?;
    match message.payload {
        NetlinkPayload::InnerMessage(message) => Ok(message),
        _ => Err(bad()),
    }
}

#[cfg(test)]
mod tests;

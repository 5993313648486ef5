//! Addresses, routes and configured neighbours of a pod's network namespace.
//!
//! At start and restore runsc takes the addresses off the pod's interfaces (its own network stack owns them from then
//! on), the kernel takes what depends on them, and nobody puts them back when the sandbox ends. So they are read once, when the CNI plugin has just set them,
//! kept in the pod's record as the kernel's own messages, and replayed before each restore.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST,
    NetlinkHeader, NetlinkMessage, NetlinkPayload,
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
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use nix::sched::{CloneFlags, setns};
use rustix::event::{PollFd, PollFlags, poll};
use torpor_records::Addresses;

pub use veth::{Pair, pairs};

mod veth;

/// A dump of a pod's namespace is a few kilobytes; one datagram is at most 32 KiB (rtnetlink's own limit).
const DATAGRAM: usize = 64 << 10;

/// Why addresses could not be read or put back.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot open the network namespace {path}")]
    Namespace {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot enter the network namespace {path}")]
    Enter {
        path: PathBuf,
        #[source]
        source: nix::Error,
    },
    #[error("cannot communicate with the kernel's routing socket")]
    Socket(#[source] std::io::Error),
    #[error("the kernel refused {what}")]
    Refused {
        what: String,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot parse the kernel's answer: {0}")]
    BadAnswer(String),
    #[error("cannot parse the recorded address or route: {0}")]
    BadRecord(String),
    #[error("the thread that entered the network namespace panicked")]
    Panicked,
}

/// Which way packets go, as the pod sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    In,
    Out,
}

/// The addresses of a record, without link-local ones (fe80::/10).
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

/// On a point-to-point link the other attribute is the other end's address; IPv6 has only that one.
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

/// Runs `work` on a thread of its own inside the namespace at `path`.
pub fn inside<T: Send>(path: &Path, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
    within(path, || Ok(work()))
}

/// Reads what is set in the namespace at `path`.
pub fn read(path: &Path) -> Result<Addresses, Error> {
    within(path, || {
        let mut netlink = Netlink::open()?;
        let loopback = netlink.loopback_indexes()?;
        let mut found = Addresses::default();
        // Before the routes: an address that is there by now has its own.
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
        // A gateway must be reachable before a route through it is accepted.
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

/// Puts everything back. What is there already stays as it is.
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

/// Tells when an address of a namespace is taken away: runsc does so right before it hands an image over.
#[derive(Debug)]
pub struct AddressWatch(Socket);

impl AddressWatch {
    /// Sees what happens in the namespace at `path` from now on.
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

    /// Waits for it, or until `other` can be read from or has lost its other end.
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
            let news = match netlink.receive() {
                Ok(news) => news,
                Err(Error::Socket(error)) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    continue;
                }
                Err(error) => return Err(error),
            };
            let taken = |message: &NetlinkMessage<RouteNetlinkMessage>| {
                let deleted = RouteNetlinkMessage::is_del_address;
                matches!(&message.payload, NetlinkPayload::InnerMessage(inner) if deleted(inner))
            };
            if news.iter().any(taken) {
                return Ok(());
            }
        }
    }
}

/// The kernel rejects the cache information that it reports itself; and an address that was in use needs no duplicate
/// address detection, which would delay an IPv6 pod's wake by a second. Nor a route to its network, if somebody has taken
/// that away: a plugin for point-to-point links, on which all others are behind the gateway.
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

/// Whether the route is there that the kernel derives from the address.
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

/// The address with nothing but its first `length` bits.
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

/// Routes that somebody configured; those that the kernel derives from addresses come back with the addresses.
fn is_configured(route: &RouteMessage) -> bool {
    route.header.table == RouteHeader::RT_TABLE_MAIN
        && route.header.kind == RouteType::Unicast
        && route.header.protocol != RouteProtocol::Kernel
        && route.header.protocol != RouteProtocol::Ra
}

/// Runs `work` on a thread of its own inside the namespace: a namespace belongs to a thread, and the thread ends here.
pub fn within<T: Send, E: From<Error> + Send>(
    path: &Path,
    work: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, E> {
    let file = std::fs::File::open(path).map_err(|source| Error::Namespace {
        path: path.into(),
        source,
    })?;
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                setns(file.as_fd(), CloneFlags::CLONE_NEWNET).map_err(|source| Error::Enter {
                    path: path.into(),
                    source,
                })?;
                work()
            })
            .join()
            .map_err(|_| Error::Panicked)?
    })
}

/// A connection to the kernel's routing, in the namespace of the thread that opened it.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    pub fn open() -> Result<Self, Error> {
        let mut socket = Socket::new(NETLINK_ROUTE).map_err(Error::Socket)?;
        socket.bind_auto().map_err(Error::Socket)?;
        socket
            .connect(&SocketAddr::new(0, 0))
            .map_err(Error::Socket)?;
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    fn send(&mut self, message: RouteNetlinkMessage, flags: u16) -> Result<(), Error> {
        self.sequence += 1;
        let mut packet =
            NetlinkMessage::new(NetlinkHeader::default(), NetlinkPayload::from(message));
        packet.header.flags = flags;
        packet.header.sequence_number = self.sequence;
        packet.finalize();
        let mut bytes = vec![0; packet.buffer_len()];
        packet.serialize(&mut bytes);
        self.socket.send(&bytes, 0).map_err(Error::Socket)?;
        Ok(())
    }

    /// The messages of one datagram.
    fn receive(&mut self) -> Result<Vec<NetlinkMessage<RouteNetlinkMessage>>, Error> {
        let mut buffer = Vec::with_capacity(DATAGRAM);
        self.socket.recv(&mut buffer, 0).map_err(Error::Socket)?;
        let mut messages = Vec::new();
        let mut rest = buffer.as_slice();
        while !rest.is_empty() {
            let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)
                .map_err(|error| Error::BadAnswer(error.to_string()))?;
            let length = usize::try_from(message.header.length).unwrap_or(usize::MAX);
            // Messages are padded to four bytes.
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            messages.push(message);
        }
        Ok(messages)
    }

    /// One that a change interrupts is begun anew: what it says may be neither what was nor what is.
    pub fn dump(
        &mut self,
        request: RouteNetlinkMessage,
    ) -> Result<Vec<RouteNetlinkMessage>, Error> {
        const TRIES: usize = 10;
        for _ in 0..TRIES {
            if let Some(found) = self.dump_once(request.clone())? {
                return Ok(found);
            }
        }
        Err(Error::Refused {
            what: "a consistent dump".to_owned(),
            source: std::io::ErrorKind::Interrupted.into(),
        })
    }

    /// None when it was interrupted.
    fn dump_once(
        &mut self,
        request: RouteNetlinkMessage,
    ) -> Result<Option<Vec<RouteNetlinkMessage>>, Error> {
        self.send(request, NLM_F_REQUEST | NLM_F_DUMP)?;
        let (mut found, mut whole) = (Vec::new(), true);
        loop {
            for message in self.receive()? {
                whole &= message.header.flags & NLM_F_DUMP_INTR == 0;
                match message.payload {
                    NetlinkPayload::Done(_) => return Ok(whole.then_some(found)),
                    NetlinkPayload::InnerMessage(message) => found.push(message),
                    NetlinkPayload::Error(error) => {
                        let source = error.to_io();
                        return Err(Error::Refused {
                            what: "a dump".to_owned(),
                            source,
                        });
                    }
                    _ => {}
                }
            }
        }
    }

    /// One that is gone already is removed.
    pub fn remove_address(&mut self, address: AddressMessage) -> Result<(), Error> {
        let message = RouteNetlinkMessage::DelAddress(address);
        match self.change("the removal of the pod's address", message, 0) {
            Err(Error::Refused { source, .. })
                if source.kind() == std::io::ErrorKind::AddrNotAvailable =>
            {
                Ok(())
            }
            removed => removed,
        }
    }

    fn replace(&mut self, what: &str, message: RouteNetlinkMessage) -> Result<(), Error> {
        self.change(what, message, NLM_F_CREATE | NLM_F_REPLACE)
    }

    fn change(
        &mut self,
        what: &str,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> Result<(), Error> {
        self.send(message, NLM_F_REQUEST | NLM_F_ACK | flags)?;
        for message in self.receive()? {
            if let NetlinkPayload::Error(error) = message.payload
                && error.code.is_some()
            {
                return Err(Error::Refused {
                    what: what.to_owned(),
                    source: error.to_io(),
                });
            }
        }
        Ok(())
    }

    fn routes(&mut self) -> Result<Vec<RouteMessage>, Error> {
        let all = self.dump(RouteNetlinkMessage::GetRoute(RouteMessage::default()))?;
        let routes = all.into_iter().filter_map(|message| match message {
            RouteNetlinkMessage::NewRoute(route) => Some(route),
            _ => None,
        });
        Ok(routes.collect())
    }

    /// Those that runsc gives to gVisor: of what was learnt the next one to have the address learns anew.
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

/// Indexes of this thread's links that are up, loopback aside.
pub(crate) fn link_indexes() -> Result<Vec<u32>, Error> {
    Netlink::open()?
        .links(|flags| flags.contains(LinkFlags::Up) && !flags.contains(LinkFlags::Loopback))
}

/// Attaches programs of [`crate::bpf::Hook::Classify`] to every link of this thread's namespace that is up, loopback aside: each
/// sees the packets of its direction for as long as the link exists.
pub(crate) fn attach_to_links(programs: &[(Direction, OwnedFd)]) -> Result<(), Error> {
    /// Before programs that a CNI plugin may have there, which may end the matter; ours never do.
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

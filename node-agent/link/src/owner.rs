//! Finds the process of this machine that has the socket of a connection.
//!
//! The kubelet's probes look like any other connections. But their other end is a socket of this
//! machine, whose inode number the kernel reports (sock_diag(7)). The kubelet, the process that
//! listens on the kubelet's port, has that socket open. If another process or no process listens on
//! that port of a node, a probe there counts as any connection.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr, UdpSocket};

use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP};
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, SocketId, StateFlags};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use netlink_sys::{Socket, SocketAddr};

use crate::packet::Ends;

/// Size of the buffer for one answer, which holds hundreds of sockets.
const DATAGRAM: usize = 64 << 10;

/// Why the owner of a connection could not be found.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot query the kernel's sockets")]
    Ask(#[source] io::Error),
    #[error("cannot parse the kernel's answer about sockets: {0}")]
    BadAnswer(String),
    #[error("cannot list the processes of this machine")]
    Processes(#[source] io::Error),
}

/// The owner of a connection's other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    Kubelet,
    /// Another process of this machine.
    Process,
    /// This machine's kernel alone: the connection was closed. A probe closes its own within a
    /// millisecond.
    Kernel,
    /// No process of this machine, or it was closed long ago.
    Nobody,
}

/// Reports whether the address is this machine's, in the calling thread's network namespace.
pub fn is_of_this_machine(address: IpAddr) -> bool {
    // The kernel binds sockets to its own addresses alone.
    UdpSocket::bind((address, 0)).is_ok()
}

/// The kubelet of this machine, and its process once it was found.
#[derive(Debug)]
pub struct Kubelet {
    port: u16,
    found: Option<Listener>,
}

/// A process that listens, and its socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Listener {
    process: u32,
    /// Inode number of the socket.
    socket: u32,
}

impl Kubelet {
    /// Returns the kubelet that serves logs and exec on this port (KubeletConfiguration's `port`).
    pub fn at(port: u16) -> Self {
        Self { port, found: None }
    }

    /// Reports whether the connection is the kubelet's.
    pub fn owns(&mut self, connection: &Ends) -> Result<bool, Error> {
        Ok(self.owner_of(connection)? == Owner::Kubelet)
    }

    /// Returns the owner of the connection's other end.
    pub fn owner_of(&mut self, connection: &Ends) -> Result<Owner, Error> {
        let socket = match socket_of(connection)? {
            None => return Ok(Owner::Nobody),
            // The kernel alone still has the socket, because it was closed: its number is 0.
            Some(0) => return Ok(Owner::Kernel),
            Some(socket) => socket,
        };
        if self.has_socket(socket)? {
            return Ok(Owner::Kubelet);
        }
        // A search through a process takes time; the connection may be closed meanwhile.
        Ok(match socket_of(connection)? {
            Some(now) if now == socket => Owner::Process,
            Some(0) => Owner::Kernel,
            _ => Owner::Nobody,
        })
    }

    /// Reports whether the kubelet has a connection to one of these ports of the pod, or begins
    /// one.
    pub fn is_connected_to(&mut self, pod: &[IpAddr], ports: &[u16]) -> Result<bool, Error> {
        for family in [AF_INET, AF_INET6] {
            let states = StateFlags::ESTABLISHED | StateFlags::SYN_SENT;
            for found in query(family, states, any(family), true)? {
                let (address, port) = found.remote;
                if pod.contains(&address)
                    && ports.contains(&port)
                    && found.inode != 0
                    && self.has_socket(found.inode)?
                {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn has_socket(&mut self, socket: u32) -> Result<bool, Error> {
        if let Some(Listener {
            process,
            socket: at,
        }) = self.found
        {
            if has_open(process, socket) {
                return Ok(true);
            }
            // A search through all processes takes longer than a wake of a sandbox, and
            // many peers may connect at once.
            if has_open(process, at) {
                return Ok(false);
            }
        }
        // The kubelet may have been restarted.
        self.found = listener(self.port)?;
        Ok(self
            .found
            .is_some_and(|found| has_open(found.process, socket)))
    }
}

/// Returns the inode number of the socket at the connection's other end, if this machine has it. It
/// is 0 if no process has the socket open any more.
fn socket_of(connection: &Ends) -> Result<Option<u32>, Error> {
    let id = SocketId {
        source_port: connection.remote_port,
        destination_port: connection.local_port,
        source_address: connection.remote,
        destination_address: connection.local,
        interface_id: 0,
        // The wildcard: any socket with these ends.
        cookie: [0xff; 8],
    };
    let family = if connection.remote.is_ipv4() {
        AF_INET
    } else {
        AF_INET6
    };
    let found = query(family, StateFlags::all(), id, false)?;
    Ok(found.first().map(|socket| socket.inode))
}

/// Returns the process that listens on the port, and its socket.
fn listener(port: u16) -> Result<Option<Listener>, Error> {
    for family in [AF_INET6, AF_INET] {
        let listening = query(family, StateFlags::LISTEN, any(family), true)?;
        for found in listening.into_iter().filter(|found| found.port == port) {
            let socket = found.inode;
            let mut process_ids = process_ids().map_err(Error::Processes)?;
            if let Some(process) = process_ids.find(|process| has_open(*process, socket)) {
                return Ok(Some(Listener { process, socket }));
            }
        }
    }
    Ok(None)
}

/// A socket of this machine.
#[derive(Debug, Clone, Copy)]
struct Found {
    port: u16,
    remote: (IpAddr, u16),
    /// 0 if no process has it open any more.
    inode: u32,
}

/// Returns the id that matches any socket of the family.
fn any(family: u8) -> SocketId {
    let mut any = SocketId::new_v4();
    if family == AF_INET6 {
        any.source_address = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        any.destination_address = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    }
    any
}

/// Returns each socket that matches `socket_id` and `states`.
///
/// `all`: requests a dump of all of them; else the kernel returns the one with exactly these ends.
fn query(
    family: u8,
    states: StateFlags,
    socket_id: SocketId,
    all: bool,
) -> Result<Vec<Found>, Error> {
    let mut socket = Socket::new(NETLINK_SOCK_DIAG).map_err(Error::Ask)?;
    socket.bind_auto().map_err(Error::Ask)?;
    socket.connect(&SocketAddr::new(0, 0)).map_err(Error::Ask)?;
    let request = InetRequest {
        family,
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::empty(),
        states,
        socket_id,
    };
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | if all { NLM_F_DUMP } else { 0 };
    let mut message = NetlinkMessage::new(header, SockDiagMessage::InetRequest(request).into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0).map_err(Error::Ask)?;
    let mut found = Vec::new();
    loop {
        let mut buffer = Vec::with_capacity(DATAGRAM);
        socket.recv(&mut buffer, 0).map_err(Error::Ask)?;
        let mut rest = buffer.as_slice();
        while !rest.is_empty() {
            let message = NetlinkMessage::<SockDiagMessage>::deserialize(rest)
                .map_err(|error| Error::BadAnswer(error.to_string()))?;
            let length = usize::try_from(message.header.length).unwrap_or(usize::MAX);
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            match message.payload {
                NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => {
                    let id = &response.header.socket_id;
                    found.push(Found {
                        port: id.source_port,
                        remote: (id.destination_address, id.destination_port),
                        inode: response.header.inode,
                    });
                    if !all {
                        return Ok(found);
                    }
                }
                NetlinkPayload::Done(_) => return Ok(found),
                NetlinkPayload::Error(error) => match error.to_io() {
                    // This machine has no such socket.
                    error if error.kind() == io::ErrorKind::NotFound => return Ok(found),
                    error => return Err(Error::Ask(error)),
                },
                _ => {}
            }
        }
    }
}

fn process_ids() -> io::Result<impl Iterator<Item = u32>> {
    let entries = fs::read_dir("/proc")?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()))
}

/// Reports whether the process has the socket with this inode number open.
///
/// Returns false for a process that has just ended or cannot be inspected.
fn has_open(process: u32, inode: u32) -> bool {
    let wanted = format!("socket:[{inode}]");
    let Ok(open) = fs::read_dir(format!("/proc/{process}/fd")) else {
        return false;
    };
    open.filter_map(Result::ok)
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .any(|target| target.as_os_str() == wanted.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    /// Returns a server's port, the server, and a connection to it.
    fn connected(to: &str) -> (u16, TcpListener, TcpStream) {
        let server = TcpListener::bind(to).expect("listens");
        let address = server.local_addr().expect("an address");
        let stream = TcpStream::connect(address).expect("connects");
        (address.port(), server, stream)
    }

    fn ends(stream: &TcpStream) -> Ends {
        let (local, remote) = (
            stream.local_addr().expect("an address"),
            stream.peer_addr().expect("an address"),
        );
        Ends {
            remote: local.ip(),
            remote_port: local.port(),
            local: remote.ip(),
            local_port: remote.port(),
        }
    }

    #[test]
    fn the_process_at_a_connections_other_end_is_found() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let (port, _server, stream) = connected(address);
            let inode = socket_of(&ends(&stream)).expect("asked").expect("is here");
            assert!(has_open(std::process::id(), inode), "{address}");
            let found = listener(port).expect("asked").map(|found| found.process);
            assert_eq!(found, Some(std::process::id()), "{address}");
        }
    }

    #[test]
    fn a_connection_of_another_machine_has_no_owner_here() {
        let elsewhere = Ends {
            remote: IpAddr::from([192, 0, 2, 1]),
            remote_port: 40_000,
            local: IpAddr::from([192, 0, 2, 2]),
            local_port: 80,
        };
        assert_eq!(socket_of(&elsewhere).expect("asked"), None);
        assert!(!Kubelet::at(10250).owns(&elsewhere).expect("asked"));
    }

    #[test]
    fn a_connection_is_the_kubelets_if_its_process_listens_on_the_kubelets_port() {
        let (port, _server, stream) = connected("127.0.0.1:0");
        let ends = ends(&stream);
        // The entry is outdated, as after a restart of the kubelet.
        let mut kubelet = Kubelet::at(port);
        kubelet.found = Some(Listener {
            process: 1,
            socket: 0,
        });
        assert!(kubelet.owns(&ends).expect("asked"));
    }

    #[test]
    fn while_the_kubelet_listens_it_is_not_looked_for_again() {
        let (port, server, stream) = connected("127.0.0.1:0");
        let mut kubelet = Kubelet::at(port);
        assert!(kubelet.owns(&ends(&stream)).expect("asked"));
        let found = kubelet.found;
        // A search would find no process on this port.
        kubelet.port = 0;
        assert!(
            !kubelet.has_socket(0).expect("asked"),
            "no socket has this number"
        );
        assert_eq!(kubelet.found, found);
        drop(server);
        assert!(!kubelet.has_socket(0).expect("asked"));
        assert_eq!(kubelet.found, None);
    }

    #[test]
    fn a_connection_of_the_kubelet_is_seen_while_it_lasts_and_no_other() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let (port, server, stream) = connected(address);
            let ip = stream.peer_addr().expect("an address").ip();
            let mut kubelet = Kubelet::at(port);
            let mut to =
                |ips: &[IpAddr], ports: &[u16]| kubelet.is_connected_to(ips, ports).expect("asked");
            assert!(to(&[ip], &[1, port]), "{address}");
            assert!(!to(&[ip], &[1]), "another port");
            assert!(!to(&[IpAddr::from([192, 0, 2, 1])], &[port]), "another pod");
            let (accepted, _) = server.accept().expect("accepted");
            drop((stream, accepted));
            assert!(!to(&[ip], &[port]), "it is closed");
        }
    }

    #[test]
    fn a_connection_of_another_process_is_not_the_kubelets() {
        let (_, _server, stream) = connected("127.0.0.1:0");
        // No process listens on this port, so no process is the kubelet.
        let nobody = TcpListener::bind("127.0.0.1:0").expect("listens");
        let port = nobody.local_addr().expect("an address").port();
        drop(nobody);
        let owner = Kubelet::at(port).owner_of(&ends(&stream));
        assert_eq!(owner.expect("asked"), Owner::Process);
    }

    #[test]
    fn a_connection_that_was_closed_is_the_kernels_alone() {
        let (port, _server, stream) = connected("127.0.0.1:0");
        let ends = ends(&stream);
        let mut kubelet = Kubelet::at(port);
        let owner = kubelet.owner_of(&ends).expect("asked");
        assert_eq!(owner, Owner::Kubelet);
        // The kernel keeps the connection for a while: the server has not read its end.
        drop(stream);
        let owner = kubelet.owner_of(&ends).expect("asked");
        assert_eq!(owner, Owner::Kernel);
        assert!(!kubelet.owns(&ends).expect("asked"));
    }

    #[test]
    fn addresses_of_this_machine_are_distinguished_from_foreign_addresses() {
        assert!(is_of_this_machine(IpAddr::from([127, 0, 0, 1])));
        // An address for documentation.
        assert!(!is_of_this_machine(IpAddr::from([192, 0, 2, 1])));
    }
}

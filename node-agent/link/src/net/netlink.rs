//! A netlink socket of the kernel's routing (rtnetlink(7)).

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REPLACE, NLM_F_REQUEST,
    NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::AddressMessage;
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

use super::error::Error;

/// Size of the buffer for one datagram, in bytes.
///
/// A dump of a pod's namespace is a few kilobytes. rtnetlink limits a datagram to 32 KiB.
const DATAGRAM: usize = 64 << 10;

/// A connection to the kernel's routing, in the namespace of the thread that opened it.
#[derive(Debug)]
pub struct Netlink {
    pub(super) socket: Socket,
    pub(super) sequence: u32,
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

    /// Returns the messages of the next datagram.
    pub(super) fn receive(&mut self) -> Result<Vec<NetlinkMessage<RouteNetlinkMessage>>, Error> {
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

    /// Returns all messages of a dump.
    ///
    /// Repeats a dump that a change interrupted: its messages may show neither the old state
    /// nor the new one.
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

    /// Returns `None` if a change interrupted the dump.
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

    /// Removes an address. Succeeds if the address does not exist.
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

    pub(super) fn replace(
        &mut self,
        what: &str,
        message: RouteNetlinkMessage,
    ) -> Result<(), Error> {
        self.change(what, message, NLM_F_CREATE | NLM_F_REPLACE)
    }

    pub(super) fn change(
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
}

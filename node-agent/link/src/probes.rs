//! Answers the kubelet's probes for a sandbox that sleeps. Each answer is success, because a
//! healthy sandbox fell asleep.
//!
//! A probe is a TCP connection: the handshake alone (`tcpSocket`), one HTTP request (`httpGet`,
//! also over TLS), or one call of `grpc.health.v1.Health/Check` (`grpc`). smoltcp provides the TCP.
//! It has the pod's addresses, on the pod's link, while no other network stack answers there. The
//! keeper decides before whether a connection is the kubelet's (see [`crate::owner`]). Any other
//! connection to the same port wakes the sandbox.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Checksum, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp;
use smoltcp::wire::{HardwareAddress, IpCidr};

use crate::packet::{ETHERNET, Ends};

mod tls;

use tls::Tls;

/// The largest number of probes at once. The kubelet probes each container a few times a second at
/// most, by one connection each.
const MAX_PROBES: usize = 16;
/// Size of the receive buffer, for a request's head. The kubelet's has 200 bytes.
const RECEIVE: usize = 4 << 10;
/// Size of the send buffer. A server's first flight in TLS has 700 bytes; 2 KiB with a post-quantum
/// key.
const SEND: usize = 4 << 10;
/// Time after which a probe is dropped. The kubelet gives up after its probe's timeout, by default
/// a second.
const LIMIT: Duration = Duration::from_secs(10);
const MTU: usize = 1500;

/// A network stack that answers the probes of one sleeping pod.
pub struct Responder {
    began: Instant,
    answers_hooks: bool,
    interface: Interface,
    sockets: SocketSet<'static>,
    wire: Wire,
    probes: Vec<Probe>,
}

impl std::fmt::Debug for Responder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Responder")
            .field("probes", &self.probes)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Probe {
    ends: Ends,
    /// The Ethernet header of frames to the kubelet.
    header: [u8; ETHERNET],
    socket: SocketHandle,
    /// Present if the connection began with TLS.
    tls: Option<Tls>,
    /// The received data, after decryption.
    received: Vec<u8>,
    /// The connection uses HTTP/2, and the server's settings were sent.
    settings_sent: bool,
    until: Instant,
}

impl Responder {
    /// Creates a responder for a pod with these addresses.
    pub fn new(own: &[IpAddr], now: Instant) -> Self {
        let mut wire = Wire::default();
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = random_seed();
        let mut interface = Interface::new(config, &mut wire, smoltcp::time::Instant::ZERO);
        // The prefix length 0 makes every address reachable over the same link.
        interface.update_ip_addrs(|addresses| {
            for ip in own {
                // There is room for a few addresses; the first ones are the pod's status.podIPs.
                let _ = addresses.push(IpCidr::new((*ip).into(), 0));
            }
        });
        Self {
            began: now,
            answers_hooks: false,
            interface,
            sockets: SocketSet::new(Vec::new()),
            wire,
            probes: Vec::new(),
        }
    }

    /// Sets whether requests of containers' hooks are answered with success.
    ///
    /// If not, their connections are reset. Success would mean that the program has done its
    /// work for the end, and the kubelet reports a failure.
    pub fn answer_hooks(&mut self, answers: bool) {
        self.answers_hooks = answers;
    }

    /// Reports whether the connection is a probe that is being answered.
    pub fn has(&self, ends: &Ends) -> bool {
        self.probes.iter().any(|probe| probe.ends == *ends)
    }

    /// Begins to answer a probe. The caller then passes `frame`, its first segment, to
    /// [`Responder::hear`].
    ///
    /// Returns false if there is no room.
    pub fn begin(&mut self, ends: &Ends, frame: &[u8], now: Instant) -> bool {
        let Some(from) = frame.first_chunk::<ETHERNET>() else {
            return false;
        };
        if self.probes.len() == MAX_PROBES {
            return false;
        }
        let buffer = |size| tcp::SocketBuffer::new(vec![0; size]);
        let mut socket = tcp::Socket::new(buffer(RECEIVE), buffer(SEND));
        // A call's last segments come with the connection's end. The kubelet repeats a segment that
        // is not acknowledged at once, and by then the responder has no such connection any more.
        socket.set_ack_delay(None);
        // A listening socket of smoltcp takes one connection: that of the following segment.
        if socket.listen(ends.local_port).is_err() {
            return false;
        }
        self.probes.push(Probe {
            ends: *ends,
            header: back(from),
            socket: self.sockets.add(socket),
            tls: None,
            received: Vec::new(),
            settings_sent: false,
            until: now + LIMIT,
        });
        true
    }

    /// Receives a frame of a probe.
    pub fn hear(&mut self, frame: &[u8], now: Instant) {
        if let Some(packet) = frame.get(ETHERNET..) {
            self.wire.received.push_back(packet.to_vec());
            self.turn(now);
        }
    }

    /// Processes received packets and timers, and removes probes that are over.
    pub fn turn(&mut self, now: Instant) {
        let time = self.time(now);
        self.interface.poll(time, &mut self.wire, &mut self.sockets);
        for probe in &mut self.probes {
            let socket = self.sockets.get_mut::<tcp::Socket<'_>>(probe.socket);
            serve(socket, probe, self.answers_hooks);
        }
        // The second poll sends the answers and the ends of connections.
        self.interface.poll(time, &mut self.wire, &mut self.sockets);
        let sockets = &mut self.sockets;
        self.probes.retain(|probe| {
            let socket = sockets.get::<tcp::Socket<'_>>(probe.socket);
            let over = !socket.is_open() || now >= probe.until;
            if over {
                sockets.remove(probe.socket);
            }
            !over
        });
    }

    /// Returns the time until the next call of [`Responder::turn`] if no frame comes.
    pub fn next_deadline(&mut self, now: Instant) -> Option<Duration> {
        if self.probes.is_empty() {
            return None;
        }
        let time = self.time(now);
        let wait = self.interface.poll_delay(time, &self.sockets);
        Some(wait.map_or(LIMIT, Duration::from).min(LIMIT))
    }

    /// Returns the next frame for the kubelet.
    pub fn says(&mut self) -> Option<Vec<u8>> {
        let packet = self.wire.sent.pop_front()?;
        let probe = self
            .probes
            .iter()
            .find(|probe| crate::packet::destination_of_ip(&packet) == Some(probe.ends.remote));
        // A connection's last segment comes after its probe was removed. The last header fits,
        // because the link is the same for all.
        let header = probe.map_or(self.wire.last_header, |probe| probe.header);
        self.wire.last_header = header;
        let mut frame = header.to_vec();
        // The first four bits are the IP version, 4 or 6.
        let kind: u16 = if packet.first().is_some_and(|first| first >> 4 == 6) {
            0x86dd
        } else {
            0x0800
        };
        frame[12..].copy_from_slice(&kind.to_be_bytes());
        frame.extend(packet);
        Some(frame)
    }

    fn time(&self, now: Instant) -> smoltcp::time::Instant {
        let micros = now.saturating_duration_since(self.began).as_micros();
        smoltcp::time::Instant::from_micros(i64::try_from(micros).unwrap_or(i64::MAX))
    }
}

/// Prepares for probes over TLS.
pub fn expect_tls() {
    tls::prepare();
}

/// Reads the kubelet's data and answers it. Closes the connection after the kubelet has closed it.
fn serve(socket: &mut tcp::Socket<'_>, probe: &mut Probe, answers_hooks: bool) {
    let mut ended = receive(socket, probe);
    if !answers_hooks && is_hook(&probe.received) {
        return socket.abort();
    }
    let mut reply = Vec::new();
    if !probe.settings_sent && probe.received.starts_with(HTTP2) {
        // The kubelet's client (grpc-go) makes no call before the server has sent its settings,
        // which must be the server's first frame (RFC 9113 §3.4).
        reply.extend(frame(SETTINGS, 0, CONNECTION, &[]));
        probe.settings_sent = true;
    }
    if let Some(bytes) = answer(&probe.received) {
        reply.extend(bytes);
        probe.received.clear();
        ended = true;
    }
    let peer_has_ended = socket.is_open() && !socket.may_recv() && !is_connecting(socket);
    ended |= peer_has_ended;
    if let Some(tls) = &mut probe.tls {
        reply = tls.seal(&reply, ended);
    }
    if !reply.is_empty() {
        // The buffer is larger than all answers.
        let _ = socket.send_slice(&reply);
    }
    if ended {
        socket.close();
    }
}

/// Moves the received data to the probe. Returns true if the connection is to end: the data was
/// too long, or it began like TLS and is none.
fn receive(socket: &mut tcp::Socket<'_>, probe: &mut Probe) -> bool {
    let mut received = Vec::new();
    let mut ended = false;
    while socket.can_recv() {
        let read = socket.recv(|data| {
            received.extend_from_slice(data);
            (data.len(), ())
        });
        ended |= read.is_err();
    }
    let is_first = probe.tls.is_none() && probe.received.is_empty();
    if is_first && tls::begins(&received) {
        probe.tls = Tls::new();
        ended |= probe.tls.is_none();
    }
    match &mut probe.tls {
        Some(tls) => ended |= tls.open(&received, &mut probe.received).is_err(),
        None => probe.received.append(&mut received),
    }
    probe.received.truncate(RECEIVE);
    ended || probe.received.len() == RECEIVE
}

fn is_connecting(socket: &tcp::Socket<'_>) -> bool {
    matches!(socket.state(), tcp::State::Listen | tcp::State::SynReceived)
}

/// Reports whether the data is the request of a container's hook, by the kubelet's user agent
/// (pkg/kubelet/lifecycle).
///
/// The agent sends the keeper a message beforehand that such connections may come. A hook that
/// comes before that message, or after the message was lost, is detected here.
fn is_hook(received: &[u8]) -> bool {
    let name = b"\nuser-agent: kube-lifecycle/";
    let mut windows = received.windows(name.len());
    windows.any(|window| window.eq_ignore_ascii_case(name))
}

const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Returns the answer to the data received so far; `None` if more must come.
fn answer(received: &[u8]) -> Option<Vec<u8>> {
    if let Some(frames) = received.strip_prefix(HTTP2) {
        return serving(frames);
    }
    let whole = received.windows(4).any(|window| window == b"\r\n\r\n");
    let maybe_http2 = HTTP2.starts_with(received);
    (whole && !maybe_http2)
        .then(|| b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_vec())
}

/// Types of HTTP/2 frames, and their flags (RFC 9113 §6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const ACKNOWLEDGED: u8 = 1;
const END_OF_STREAM: u8 = 1;
const END_OF_HEADERS: u8 = 4;
/// The stream identifier of frames of the connection.
const CONNECTION: [u8; 4] = [0; 4];

fn frame(kind: u8, flags: u8, stream: [u8; 4], payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap_or(u8::MAX);
    let mut bytes = vec![0, 0, length, kind, flags];
    bytes.extend(stream);
    bytes.extend(payload);
    bytes
}

/// Returns the answer SERVING to a call of `Health/Check`, once all of the call has come.
///
/// The answer consists of HTTP/2 frames (RFC 9113 §4.1, §6), headers by index or as literals
/// (RFC 7541 §6), one gRPC message of two bytes, and a status.
fn serving(mut frames: &[u8]) -> Option<Vec<u8>> {
    let stream = loop {
        let (header, rest) = frames.split_first_chunk::<9>()?;
        let length =
            usize::from(header[0]) << 16 | usize::from(header[1]) << 8 | usize::from(header[2]);
        let (kind, flags) = (header[3], header[4]);
        frames = rest.get(length..)?;
        if matches!(kind, DATA | HEADERS) && flags & END_OF_STREAM != 0 {
            break [header[5], header[6], header[7], header[8]];
        }
    };
    // :status 200 (static table, 8); content-type (31) as a literal.
    let mut head = vec![0x88, 0x0f, 0x10];
    let media = b"application/grpc";
    head.push(u8::try_from(media.len()).unwrap_or(u8::MAX));
    head.extend(media);
    let mut trailers = vec![0x00];
    for word in [b"grpc-status".as_slice(), b"0"] {
        trailers.push(u8::try_from(word.len()).unwrap_or(u8::MAX));
        trailers.extend(word);
    }
    // Not compressed, two bytes: field 1 (status) = 1 (SERVING).
    let message = [0, 0, 0, 0, 2, 0x08, 0x01];
    Some(
        [
            frame(SETTINGS, ACKNOWLEDGED, CONNECTION, &[]),
            frame(HEADERS, END_OF_HEADERS, stream, &head),
            frame(DATA, 0, stream, &message),
            frame(HEADERS, END_OF_HEADERS | END_OF_STREAM, stream, &trailers),
        ]
        .concat(),
    )
}

/// Returns the header with destination and source exchanged.
fn back(from: &[u8; ETHERNET]) -> [u8; ETHERNET] {
    let mut header = *from;
    header[..6].copy_from_slice(&from[6..12]);
    header[6..12].copy_from_slice(&from[..6]);
    header
}

/// Returns a seed for sequence numbers that a peer off the link cannot guess.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

/// The link of smoltcp's interface: IP packets that were received, and those to send.
#[derive(Debug, Default)]
struct Wire {
    received: VecDeque<Vec<u8>>,
    sent: VecDeque<Vec<u8>>,
    last_header: [u8; ETHERNET],
}

struct ReceivedPacket(Vec<u8>);

struct SentPackets<'a>(&'a mut VecDeque<Vec<u8>>);

impl RxToken for ReceivedPacket {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(&self.0)
    }
}

impl TxToken for SentPackets<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, write: F) -> R {
        let mut packet = vec![0; length];
        let result = write(&mut packet);
        self.0.push_back(packet);
        result
    }
}

impl Device for Wire {
    type RxToken<'a> = ReceivedPacket;
    type TxToken<'a> = SentPackets<'a>;

    fn receive(&mut self, _: smoltcp::time::Instant) -> Option<(ReceivedPacket, SentPackets<'_>)> {
        let packet = self.received.pop_front()?;
        Some((ReceivedPacket(packet), SentPackets(&mut self.sent)))
    }

    fn transmit(&mut self, _: smoltcp::time::Instant) -> Option<SentPackets<'_>> {
        Some(SentPackets(&mut self.sent))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = MTU;
        // On receipt, the checksum of TCP is not verified: the kernel leaves the checksum of
        // what it sends over a veth pair to a link that never computes it.
        capabilities.checksum.ipv4 = Checksum::Both;
        capabilities.checksum.tcp = Checksum::Tx;
        capabilities
    }
}

#[cfg(test)]
mod tests;

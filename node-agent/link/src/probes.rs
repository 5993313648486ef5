//! Answering the kubelet's probes for a sandbox that sleeps: a healthy sandbox fell asleep, so each is answered with yes.
//!
//! A probe is a TCP connection: the handshake alone (`tcpSocket`), one HTTP request (`httpGet`, also over TLS), or one call of
//! `grpc.health.v1.Health/Check` (`grpc`). The TCP is smoltcp's; it speaks for the pod's addresses, on the pod's link, while
//! nobody else does. Whether a connection is the kubelet's is decided before (see [`crate::owner`]): whoever else connects
//! to the same port wakes the sandbox.

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

/// The kubelet probes each container a few times a second at most, one connection each.
const MOST_AT_ONCE: usize = 16;
/// A request's head; the kubelet's is 200 bytes.
const RECEIVE: usize = 4 << 10;
/// A server's first words in TLS are 700 bytes, 2 KiB with a key that quantum computers do not find.
const SEND: usize = 4 << 10;
/// The kubelet gives up after its probe's timeout, a second by default.
const LIMIT: Duration = Duration::from_secs(10);
const MTU: usize = 1500;

/// Speaks for one sleeping pod.
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
    /// The Ethernet header of what goes back.
    header: [u8; ETHERNET],
    socket: SocketHandle,
    /// It began with TLS.
    tls: Option<Tls>,
    /// What was said, without TLS.
    received: Vec<u8>,
    /// It speaks HTTP/2 and was told that so do we.
    greeted: bool,
    until: Instant,
}

impl Responder {
    /// For a pod with these addresses.
    pub fn new(own: &[IpAddr], now: Instant) -> Self {
        let mut wire = Wire::default();
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = random_seed();
        let mut interface = Interface::new(config, &mut wire, smoltcp::time::Instant::ZERO);
        // Its own addresses, and every other one is reached over the same link.
        interface.update_ip_addrs(|addresses| {
            for ip in own {
                // There is room for a few; the first ones are the pod's status.podIPs.
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

    /// Whether containers' hooks are answered too. Where they are not, their connections are reset: to say yes would be to say that
    /// the program has done what it does at its end, and of a failure the kubelet tells.
    pub fn answer_hooks(&mut self, answers: bool) {
        self.answers_hooks = answers;
    }

    /// Whether the connection is a probe that is being answered.
    pub fn has(&self, ends: &Ends) -> bool {
        self.probes.iter().any(|probe| probe.ends == *ends)
    }

    /// The first segment of a probe, in `frame`, is about to be given to [`Responder::hear`]. False when there is no room.
    pub fn begin(&mut self, ends: &Ends, frame: &[u8], now: Instant) -> bool {
        let Some(from) = frame.first_chunk::<ETHERNET>() else {
            return false;
        };
        if self.probes.len() == MOST_AT_ONCE {
            return false;
        }
        let buffer = |size| tcp::SocketBuffer::new(vec![0; size]);
        let mut socket = tcp::Socket::new(buffer(RECEIVE), buffer(SEND));
        // The last words of a call come with the connection's end: what is not acknowledged at once is said again when nobody knows it any more.
        socket.set_ack_delay(None);
        // A listener takes one connection; this one takes the segment that follows.
        if socket.listen(ends.local_port).is_err() {
            return false;
        }
        self.probes.push(Probe {
            ends: *ends,
            header: back(from),
            socket: self.sockets.add(socket),
            tls: None,
            received: Vec::new(),
            greeted: false,
            until: now + LIMIT,
        });
        true
    }

    /// A frame of a probe has come.
    pub fn hear(&mut self, frame: &[u8], now: Instant) {
        if let Some(packet) = frame.get(ETHERNET..) {
            self.wire.heard.push_back(packet.to_vec());
            self.turn(now);
        }
    }

    /// Does what is to be done now.
    pub fn turn(&mut self, now: Instant) {
        let time = self.time(now);
        self.interface.poll(time, &mut self.wire, &mut self.sockets);
        for probe in &mut self.probes {
            let socket = self.sockets.get_mut::<tcp::Socket<'_>>(probe.socket);
            converse(socket, probe, self.answers_hooks);
        }
        // What was answered goes out, and that a connection is over.
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

    /// When [`Responder::turn`] is to be called again, though nothing comes.
    pub fn turn_again(&mut self, now: Instant) -> Option<Duration> {
        if self.probes.is_empty() {
            return None;
        }
        let time = self.time(now);
        let wait = self.interface.poll_delay(time, &self.sockets);
        Some(wait.map_or(LIMIT, Duration::from).min(LIMIT))
    }

    /// The next frame for the kubelet.
    pub fn says(&mut self) -> Option<Vec<u8>> {
        let packet = self.wire.said.pop_front()?;
        let probe = self
            .probes
            .iter()
            .find(|probe| crate::packet::destination_of_ip(&packet) == Some(probe.ends.remote));
        // The last segment of a connection comes after it is over: the link is the same for all.
        let header = probe.map_or(self.wire.last_header, |probe| probe.header);
        self.wire.last_header = header;
        let mut frame = header.to_vec();
        // 4 or 6, the first four bits.
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

/// Some of the probes that come are made over TLS.
pub fn expect_tls() {
    tls::prepare();
}

/// Reads what the kubelet says and answers it; ends when it ends.
fn converse(socket: &mut tcp::Socket<'_>, probe: &mut Probe, answers_hooks: bool) {
    let mut ended = hear(socket, probe);
    if !answers_hooks && is_hook(&probe.received) {
        return socket.abort();
    }
    let mut said = Vec::new();
    if !probe.greeted && probe.received.starts_with(HTTP2) {
        // The kubelet's client (grpc-go) makes no call before the server has spoken, as it has to first of all (RFC 9113 §3.4).
        said.extend(frame(SETTINGS, 0, CONNECTION, &[]));
        probe.greeted = true;
    }
    if let Some(bytes) = answer(&probe.received) {
        said.extend(bytes);
        probe.received.clear();
        ended = true;
    }
    let peer_has_ended = socket.is_open() && !socket.may_recv() && !is_beginning(socket);
    ended |= peer_has_ended;
    if let Some(tls) = &mut probe.tls {
        said = tls.seal(&said, ended);
    }
    if !said.is_empty() {
        // The buffer is larger than all that is said.
        let _ = socket.send_slice(&said);
    }
    if ended {
        socket.close();
    }
}

/// Takes what has come. True when that was too much, or no TLS although it began so.
fn hear(socket: &mut tcp::Socket<'_>, probe: &mut Probe) -> bool {
    let mut came = Vec::new();
    let mut ended = false;
    while socket.can_recv() {
        let read = socket.recv(|data| {
            came.extend_from_slice(data);
            (data.len(), ())
        });
        ended |= read.is_err();
    }
    let is_first = probe.tls.is_none() && probe.received.is_empty();
    if is_first && tls::begins(&came) {
        probe.tls = Tls::new();
        ended |= probe.tls.is_none();
    }
    match &mut probe.tls {
        Some(tls) => ended |= tls.open(&came, &mut probe.received).is_err(),
        None => probe.received.append(&mut came),
    }
    probe.received.truncate(RECEIVE);
    ended || probe.received.len() == RECEIVE
}

fn is_beginning(socket: &tcp::Socket<'_>) -> bool {
    matches!(socket.state(), tcp::State::Listen | tcp::State::SynReceived)
}

/// Whether it is the request of a container's hook and no probe, by what the kubelet calls itself (pkg/kubelet/lifecycle). The
/// agent says beforehand which connections these are; one that comes before its word, or after it was lost, ends up here.
fn is_hook(received: &[u8]) -> bool {
    let name = b"\nuser-agent: kube-lifecycle/";
    let mut windows = received.windows(name.len());
    windows.any(|window| window.eq_ignore_ascii_case(name))
}

const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The answer to what was received so far; none when more must come.
fn answer(received: &[u8]) -> Option<Vec<u8>> {
    if let Some(frames) = received.strip_prefix(HTTP2) {
        return serving(frames);
    }
    let whole = received.windows(4).any(|window| window == b"\r\n\r\n");
    let maybe_http2 = HTTP2.starts_with(received);
    (whole && !maybe_http2)
        .then(|| b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_vec())
}

/// Kinds of HTTP/2 frames, and their flags (RFC 9113 §6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const ACKNOWLEDGED: u8 = 1;
const END_OF_STREAM: u8 = 1;
const END_OF_HEADERS: u8 = 4;
/// Where frames belong that are of no stream.
const CONNECTION: [u8; 4] = [0; 4];

fn frame(kind: u8, flags: u8, stream: [u8; 4], payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap_or(u8::MAX);
    let mut bytes = vec![0, 0, length, kind, flags];
    bytes.extend(stream);
    bytes.extend(payload);
    bytes
}

/// The answer SERVING to a call of `Health/Check`, once all of the call is there: HTTP/2 frames (RFC 9113 §4.1, §6), headers
/// by index or as literals (RFC 7541 §6), one gRPC message of two bytes and a status.
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

/// The addresses change places.
fn back(from: &[u8; ETHERNET]) -> [u8; ETHERNET] {
    let mut header = *from;
    header[..6].copy_from_slice(&from[6..12]);
    header[6..12].copy_from_slice(&from[..6]);
    header
}

/// Sequence numbers are not to be guessed by who cannot see them.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

/// IP packets that were heard, and those to be said.
#[derive(Debug, Default)]
struct Wire {
    heard: VecDeque<Vec<u8>>,
    said: VecDeque<Vec<u8>>,
    last_header: [u8; ETHERNET],
}

struct Heard(Vec<u8>);

struct Said<'a>(&'a mut VecDeque<Vec<u8>>);

impl RxToken for Heard {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(&self.0)
    }
}

impl TxToken for Said<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, write: F) -> R {
        let mut packet = vec![0; length];
        let result = write(&mut packet);
        self.0.push_back(packet);
        result
    }
}

impl Device for Wire {
    type RxToken<'a> = Heard;
    type TxToken<'a> = Said<'a>;

    fn receive(&mut self, _: smoltcp::time::Instant) -> Option<(Heard, Said<'_>)> {
        let packet = self.heard.pop_front()?;
        Some((Heard(packet), Said(&mut self.said)))
    }

    fn transmit(&mut self, _: smoltcp::time::Instant) -> Option<Said<'_>> {
        Some(Said(&mut self.said))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = MTU;
        // The kernel leaves the checksum of what it sends over a veth pair to a link that never computes it.
        capabilities.checksum.ipv4 = Checksum::Both;
        capabilities.checksum.tcp = Checksum::Tx;
        capabilities
    }
}

#[cfg(test)]
mod tests;

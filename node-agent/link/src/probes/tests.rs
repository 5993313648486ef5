use std::io::{Read, Write};
use std::sync::Arc;

use super::*;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme};
use smoltcp::wire::IpAddress;

const POD: &str = "10.1.2.3";
const POD6: &str = "fd00::3";
const NODE: &str = "10.1.0.1";
const NODE6: &str = "fd00::1";
/// Destination (the pod's link), source (the host's), and a type, which a test replaces for IPv6.
const HEADER: [u8; ETHERNET] = [2, 0, 0, 0, 0, 3, 2, 0, 0, 0, 0, 1, 8, 0];

fn own() -> Vec<IpAddr> {
    vec![
        POD.parse().expect("address"),
        POD6.parse().expect("address"),
    ]
}

/// The kubelet's side: a network stack, and the link to the responder.
struct Kubelet {
    responder: Responder,
    interface: Interface,
    sockets: SocketSet<'static>,
    wire: Wire,
    socket: SocketHandle,
    now: Instant,
}

impl Kubelet {
    fn connects(pod: &str, node: &str) -> Self {
        let now = Instant::now();
        let mut wire = Wire::default();
        let config = Config::new(HardwareAddress::Ip);
        let mut interface = Interface::new(config, &mut wire, smoltcp::time::Instant::ZERO);
        let node: IpAddr = node.parse().expect("address");
        interface.update_ip_addrs(|addresses| {
            addresses.push(IpCidr::new(node.into(), 0)).expect("room");
        });
        let buffer = |size| tcp::SocketBuffer::new(vec![0; size]);
        let mut socket = tcp::Socket::new(buffer(4096), buffer(8192));
        let pod: IpAddress = pod.parse::<IpAddr>().expect("address").into();
        socket
            .connect(interface.context(), (pod, 8080), 50_001)
            .expect("begins");
        let mut sockets = SocketSet::new(Vec::new());
        let socket = sockets.add(socket);
        Self {
            responder: Responder::new(&own(), now),
            interface,
            sockets,
            wire,
            socket,
            now,
        }
    }

    fn socket(&mut self) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(self.socket)
    }

    /// Carries packets between the two sides until none has any more.
    fn carry(&mut self) {
        for _ in 0..20 {
            self.now += Duration::from_millis(20);
            let time = self.responder.time(self.now);
            self.interface.poll(time, &mut self.wire, &mut self.sockets);
            while let Some(packet) = self.wire.sent.pop_front() {
                let mut frame = HEADER.to_vec();
                if packet[0] >> 4 == 6 {
                    frame[12..14].copy_from_slice(&[0x86, 0xdd]);
                }
                frame.extend(packet);
                let segment =
                    crate::packet::segment(&frame, &own()).expect("a segment for the pod");
                if segment.begins() && !self.responder.has(&segment.ends) {
                    assert!(self.responder.begin(&segment.ends, &frame, self.now));
                }
                self.responder.hear(&frame, self.now);
            }
            self.responder.turn(self.now);
            while let Some(frame) = self.responder.says() {
                assert_eq!(frame[..6], HEADER[6..12], "to the host's link");
                assert_eq!(frame[6..12], HEADER[..6], "from the pod's");
                self.wire.received.push_back(frame[ETHERNET..].to_vec());
            }
        }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.carry();
        let sent = self.socket().send_slice(bytes).expect("connected");
        assert_eq!(sent, bytes.len());
        self.carry();
    }

    fn received(&mut self) -> Vec<u8> {
        self.socket()
            .recv(|data| (data.len(), data.to_vec()))
            .unwrap_or_default()
    }
}

#[test]
fn a_connection_is_accepted_and_is_forgotten_at_its_end() {
    for (pod, node) in [(POD, NODE), (POD6, NODE6)] {
        let mut kubelet = Kubelet::connects(pod, node);
        kubelet.carry();
        assert!(kubelet.socket().may_send(), "{pod} took no connection");
        kubelet.socket().close();
        kubelet.carry();
        assert_eq!(kubelet.responder.probes.len(), 0);
        let now = kubelet.now;
        assert_eq!(kubelet.responder.next_deadline(now), None);
    }
}

#[test]
fn a_request_is_answered_with_yes_once_it_is_whole() {
    let mut kubelet = Kubelet::connects(POD, NODE);
    kubelet
        .send(b"GET /healthz HTTP/1.1\r\nHost: 10.1.2.3:8080\r\nUser-Agent: kube-probe/1.36\r\n");
    assert_eq!(kubelet.received(), b"", "the head is not over");
    kubelet.send(b"\r\n");
    assert!(kubelet.received().starts_with(b"HTTP/1.1 200 OK\r\n"));
    assert!(
        !kubelet.socket().may_recv(),
        "the answer ends the connection"
    );
}

#[test]
fn a_hook_without_its_program_gets_no_answer_and_fails() {
    let mut kubelet = Kubelet::connects(POD, NODE);
    kubelet.send(
        b"GET /stop HTTP/1.1\r\nHost: 10.1.2.3:8080\r\nUser-Agent: kube-lifecycle/1.36\r\n\r\n",
    );
    assert_eq!(kubelet.received(), b"");
    assert!(!kubelet.socket().is_open(), "it is told that it has failed");
}

#[test]
fn the_hook_of_a_program_that_goes_on_elsewhere_is_answered_for_it() {
    let mut kubelet = Kubelet::connects(POD, NODE);
    kubelet.responder.answer_hooks(true);
    kubelet.send(b"GET /stop HTTP/1.1\r\nUser-Agent: kube-lifecycle/1.36\r\n\r\n");
    assert!(kubelet.received().starts_with(b"HTTP/1.1 200 OK\r\n"));
}

/// Takes every certificate whose key the server has, as the kubelet's client does.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signed, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Returns a client that offers HTTP/2, too, as the kubelet's prober does.
fn tls_client() -> ClientConnection {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("versions")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Unverified(provider)))
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let name = ServerName::try_from(POD).expect("an address");
    ClientConnection::new(Arc::new(config), name).expect("a client")
}

impl Kubelet {
    /// Sends the client's data over TLS and returns the server's data.
    fn exchange(&mut self, client: &mut ClientConnection) -> Vec<u8> {
        while client.wants_write() {
            let mut sealed = Vec::new();
            client.write_tls(&mut sealed).expect("written");
            // The data goes in two segments, as a hello with today's keys does.
            let (first, second) = sealed.split_at(sealed.len() / 2);
            self.send(first);
            self.send(second);
            let received = self.received();
            if !received.is_empty() {
                client.read_tls(&mut received.as_slice()).expect("read");
                client.process_new_packets().expect("TLS");
            }
        }
        let mut opened = Vec::new();
        // The read fails at the end of the data if the server sent no close_notify.
        let _ = client.reader().read_to_end(&mut opened);
        opened
    }

    fn request_over_tls(&mut self, request: &[u8]) -> Vec<u8> {
        let mut client = tls_client();
        client.writer().write_all(request).expect("kept");
        self.exchange(&mut client)
    }
}

#[test]
fn a_request_over_tls_is_answered_with_yes_once_it_is_whole() {
    expect_tls();
    let mut kubelet = Kubelet::connects(POD, NODE);
    let mut client = tls_client();
    let (head, end) = (b"GET / HTTP/1.1\r\nHost: 10.1.2.3:8080\r\n", b"\r\n");
    client.writer().write_all(head).expect("kept");
    assert_eq!(kubelet.exchange(&mut client), b"", "the head is not over");
    client.writer().write_all(end).expect("kept");
    let answer = kubelet.exchange(&mut client);
    assert!(answer.starts_with(b"HTTP/1.1 200 OK\r\n"), "{answer:?}");
    assert_eq!(client.alpn_protocol(), None, "HTTP/1.1");
    assert!(
        !kubelet.socket().may_recv(),
        "the answer ends the connection"
    );
    client.send_close_notify();
    kubelet.exchange(&mut client);
    kubelet.socket().close();
    kubelet.carry();
    assert_eq!(kubelet.socket().send_queue(), 0);
    assert_eq!(kubelet.responder.probes.len(), 0);
}

#[test]
fn a_hook_is_handled_over_tls_as_without_tls() {
    let hook = b"GET /stop HTTP/1.1\r\nUser-Agent: kube-lifecycle/1.36\r\n\r\n";
    let mut kubelet = Kubelet::connects(POD, NODE);
    assert_eq!(kubelet.request_over_tls(hook), b"");
    assert!(!kubelet.socket().is_open(), "it is told that it has failed");
    let mut kubelet = Kubelet::connects(POD, NODE);
    kubelet.responder.answer_hooks(true);
    let answer = kubelet.request_over_tls(hook);
    assert!(answer.starts_with(b"HTTP/1.1 200 OK\r\n"), "{answer:?}");
}

#[test]
fn an_oversized_or_malformed_tls_request_ends_the_connection() {
    let mut kubelet = Kubelet::connects(POD, NODE);
    assert_eq!(kubelet.request_over_tls(&vec![b'x'; RECEIVE + 1]), b"");
    assert!(!kubelet.socket().may_recv(), "too much was said");
    let mut kubelet = Kubelet::connects(POD, NODE);
    kubelet.send(&[22, 3, 1, 0, 4, 1, 0, 0, 0]);
    kubelet.received();
    assert!(!kubelet.socket().may_recv(), "an empty hello");
}

/// Returns a call as the kubelet makes it: preface, settings, headers, one message that ends the
/// stream.
fn health_check() -> Vec<u8> {
    let mut call = HTTP2.to_vec();
    call.extend([0, 0, 0, 4, 0, 0, 0, 0, 0]);
    call.extend([0, 0, 3, 1, 4, 0, 0, 0, 1, 0x83, 0x86, 0x84]);
    call.extend([0, 0, 5, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0]);
    call
}

#[test]
fn a_health_check_is_answered_serving_on_its_stream() {
    let mut kubelet = Kubelet::connects(POD, NODE);
    let call = health_check();
    // The client does not call before it has received the settings of the server's HTTP/2.
    let (preface, call) = call.split_at(HTTP2.len());
    kubelet.send(preface);
    assert_eq!(kubelet.received(), frame(SETTINGS, 0, CONNECTION, &[]));
    let (first, second) = call.split_at(call.len() - 1);
    kubelet.send(first);
    assert_eq!(kubelet.received(), b"");
    kubelet.send(second);
    let answer = kubelet.received();
    let acknowledged = frame(SETTINGS, ACKNOWLEDGED, CONNECTION, &[]);
    assert!(answer.starts_with(&acknowledged), "{answer:?}");
    let message = [0, 0, 7, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 2, 0x08, 0x01];
    let has = |part: &[u8]| answer.windows(part.len()).any(|window| window == part);
    assert!(has(&message) && has(b"grpc-status\x010"), "{answer:?}");
}

/// grpc-go sends PING and GOAWAY after the answer has ended the connection. If it
/// repeated them, they would count as data of a peer that wants the Pod.
#[test]
fn frames_after_the_answer_are_acknowledged() {
    let mut kubelet = Kubelet::connects(POD, NODE);
    kubelet.send(&health_check());
    kubelet.send(&[0; 72]);
    kubelet.socket().close();
    kubelet.carry();
    assert_eq!(kubelet.socket().send_queue(), 0);
    assert_eq!(kubelet.responder.probes.len(), 0);
}

#[test]
fn a_connection_that_sends_no_valid_probe_is_closed() {
    let mut kubelet = Kubelet::connects(POD, NODE);
    kubelet.send(&vec![b'x'; RECEIVE + 1]);
    assert!(!kubelet.socket().may_recv(), "too much was said");
    let mut silent = Kubelet::connects(POD, NODE);
    silent.carry();
    silent.now += LIMIT;
    let now = silent.now;
    silent.responder.turn(now);
    assert_eq!(silent.responder.probes.len(), 0, "nothing was said");
}

#[test]
fn the_number_of_probes_answered_at_once_is_limited() {
    let now = Instant::now();
    let mut responder = Responder::new(&own(), now);
    let ends = |port| Ends {
        remote: NODE.parse().expect("address"),
        remote_port: port,
        local: POD.parse().expect("address"),
        local_port: 8080,
    };
    let taken = (0..100)
        .filter(|port| responder.begin(&ends(*port), &HEADER, now))
        .count();
    assert_eq!(taken, MAX_PROBES);
}

#[test]
fn an_incomplete_http2_preface_is_no_request() {
    for length in 0..HTTP2.len() {
        assert_eq!(answer(&HTTP2[..length]), None, "{length}");
    }
    assert_eq!(answer(&health_check()[..HTTP2.len() + 12]), None);
    assert!(answer(&health_check()).is_some());
}

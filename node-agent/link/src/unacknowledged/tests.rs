use std::net::UdpSocket;

use nix::sys::socket::{
    AddressFamily, SockFlag, SockProtocol, SockType, setsockopt, socket, sockopt,
};

use super::*;
use torpor_test_namespace::{Namespace, sh};

/// The two ends of a link; the near one stands for the node. Needs root and iproute2, as the
/// development cluster does.
struct Pod {
    near: Namespace,
    far: Namespace,
    map: UnacknowledgedMap,
}

/// The addresses of the pod's end of a connection and of the other, over IPv4 and over IPv6. No
/// kernel has these addresses, so none answers.
const ENDS: [[&str; 2]; 2] = [["10.203.0.9", "10.203.0.8"], ["fd00:203::9", "fd00:203::8"]];
const PORT: u16 = 80;
const PEERS_PORT: u16 = 4000;

/// A TCP segment.
#[derive(Debug, Clone, Copy)]
struct Segment {
    flags: u8,
    sequence: u32,
    acknowledged: u32,
    options: &'static [u8],
    data: &'static [u8],
    peers_port: u16,
}

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

fn data_segment(sequence: u32, data: &'static [u8]) -> Segment {
    Segment {
        flags: ACK,
        sequence,
        acknowledged: 500,
        options: &[],
        data,
        peers_port: PEERS_PORT,
    }
}

fn acknowledged(acknowledged: u32) -> Segment {
    Segment {
        acknowledged,
        ..data_segment(500, b"")
    }
}

impl Segment {
    fn bytes(&self, [from, to]: [u16; 2]) -> Vec<u8> {
        let words = u8::try_from(5 + self.options.len() / 4).expect("few");
        let mut bytes = [from.to_be_bytes(), to.to_be_bytes()].concat();
        bytes.extend(self.sequence.to_be_bytes());
        bytes.extend(self.acknowledged.to_be_bytes());
        // The window is 512.
        bytes.extend([words << 4, self.flags, 2, 0, 0, 0, 0, 0]);
        bytes.extend(self.options);
        bytes.extend(self.data);
        bytes
    }
}

/// Returns the IP packet with these TCP bytes.
fn packet(from: IpAddr, to: IpAddr, tcp: &[u8]) -> Vec<u8> {
    let length = |header: usize| u16::try_from(header + tcp.len()).expect("short");
    let ip = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let [high, low] = length(20).to_be_bytes();
            let fixed = [0x45, 0, high, low, 0, 0, 0, 0, 64, 6, 0, 0];
            [&fixed[..], &from.octets(), &to.octets()].concat()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let [high, low] = length(0).to_be_bytes();
            let fixed = [0x60, 0, 0, 0, high, low, 6, 64];
            [&fixed[..], &from.octets(), &to.octets()].concat()
        }
        _ => panic!("addresses of two kinds"),
    };
    [ip, tcp.to_vec()].concat()
}

/// Sends a packet with its own IP header and this mark.
fn send(to: IpAddr, packet: &[u8], mark: u32) {
    let family = match to {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    let close = SockFlag::SOCK_CLOEXEC;
    let raw = socket(family, SockType::Raw, close, SockProtocol::Raw).expect("a socket");
    setsockopt(&raw, sockopt::Mark, &mark).expect("marked");
    // A raw socket sends by the same calls as one for UDP.
    let sent = UdpSocket::from(raw).send_to(packet, (to, 0));
    assert_eq!(sent.expect("sent"), packet.len());
}

impl Pod {
    fn new() -> Self {
        let (near, far) = (Namespace::empty("un"), Namespace::empty("uf"));
        let (a, b) = (near.name(), far.name());
        sh(&format!(
            "ip link add eth0 netns {a} address 02:00:00:00:00:08 type veth peer name eth0 address 02:00:00:00:00:09 netns {b}
             for n in {a} {b}; do ip -n $n link set eth0 up; done
             ip -n {a} addr add 10.203.0.1/24 dev eth0; ip -n {b} addr add 10.203.0.2/24 dev eth0
             ip -n {a} addr add fd00:203::1/64 dev eth0 nodad; ip -n {b} addr add fd00:203::2/64 dev eth0 nodad"
        ));
        for [pod, peer] in ENDS {
            sh(&format!(
                "ip -n {a} neigh add {pod} lladdr 02:00:00:00:00:09 dev eth0
                 ip -n {b} neigh add {peer} lladdr 02:00:00:00:00:08 dev eth0"
            ));
        }
        let map = begin(&far.path()).expect("noted");
        Self { near, far, map }
    }

    /// Returns the ends over IPv4 (0) or over IPv6 (1).
    fn ends(family: usize) -> [IpAddr; 2] {
        ENDS[family].map(|end| end.parse().expect("an address"))
    }

    fn sends_marked(&self, family: usize, segment: Segment, mark: u32) {
        let [pod, peer] = Self::ends(family);
        let bytes = packet(pod, peer, &segment.bytes([PORT, segment.peers_port]));
        let work = || {
            send(peer, &bytes, mark);
            Ok::<_, net::Error>(())
        };
        within(&self.far.path(), work).expect("entered");
    }

    fn sends(&self, family: usize, segment: Segment) {
        self.sends_marked(family, segment, 0);
    }

    fn receives(&self, family: usize, segment: Segment) {
        let [pod, peer] = Self::ends(family);
        let bytes = packet(peer, pod, &segment.bytes([segment.peers_port, PORT]));
        let work = || {
            send(pod, &bytes, 0);
            Ok::<_, net::Error>(())
        };
        within(&self.near.path(), work).expect("entered");
    }

    fn all(&self) -> Vec<Unacknowledged> {
        read(self.map).expect("read")
    }

    /// Returns the first number and the one after the last of the only connection, if there is one.
    fn numbers(&self) -> Option<(u32, u32)> {
        let all = self.all();
        assert!(all.len() < 2, "{all:?}");
        all.first()
            .map(|connection| (connection.first, connection.after))
    }
}

#[test]
fn data_makes_an_entry_which_acknowledgements_move_and_end() {
    let pod = Pod::new();
    for family in [0, 1] {
        let [local, remote] = Pod::ends(family);
        pod.sends(family, data_segment(100, b""));
        assert_eq!(pod.numbers(), None, "an acknowledgement");
        const STAMPED: &[u8] = &[1, 1, 8, 10, 0, 0, 0, 7, 0, 0, 0, 9];
        let stamped = Segment {
            options: STAMPED,
            ..data_segment(100, b"hello")
        };
        pod.sends(family, stamped);
        let expected = Unacknowledged {
            ends: Ends {
                remote,
                remote_port: PEERS_PORT,
                local,
                local_port: PORT,
            },
            first: 100,
            after: 105,
            acknowledged: 500,
            window: 512,
            timestamps: Some((7, 9)),
            neighbour: [2, 0, 0, 0, 0, 8],
        };
        assert_eq!(pod.all(), [expected]);

        pod.sends(family, data_segment(105, b", world"));
        assert_eq!(pod.numbers(), Some((100, 112)));
        let again = Segment {
            acknowledged: 600,
            ..data_segment(100, b"hello")
        };
        pod.sends(family, again);
        let expected = Unacknowledged {
            after: 112,
            acknowledged: 600,
            timestamps: None,
            ..expected
        };
        assert_eq!(pod.all(), [expected], "said again");

        for (number, first) in [(100, 100), (103, 103), (99, 103), (103, 103)] {
            pod.receives(family, acknowledged(number));
            assert_eq!(pod.numbers(), Some((first, 112)), "{number}");
        }
        pod.sends(family, data_segment(100, b"hello"));
        assert_eq!(pod.numbers(), Some((103, 112)), "said again too late");
        pod.receives(family, acknowledged(112));
        assert_eq!(pod.numbers(), None);
    }
}

#[test]
fn an_end_of_connection_counts_as_one_number() {
    let pod = Pod::new();
    for (data, after) in [(&b""[..], 101), (b"bye", 104)] {
        let end = Segment {
            flags: ACK | FIN,
            ..data_segment(100, data)
        };
        pod.sends(0, end);
        assert_eq!(pod.numbers(), Some((100, after)));
        pod.receives(0, acknowledged(after - 1));
        let first = after - 1;
        assert_eq!(pod.numbers(), Some((first, after)));
        pod.receives(0, acknowledged(after));
        assert_eq!(pod.numbers(), None);
    }
}

#[test]
fn a_reset_or_a_begin_of_a_connection_removes_its_entry() {
    let pod = Pod::new();
    for family in [0, 1] {
        for flags in [RST, RST | ACK, SYN, SYN | ACK] {
            pod.sends(family, data_segment(100, b"hello"));
            assert!(pod.numbers().is_some());
            let end = Segment {
                flags,
                ..data_segment(100, b"")
            };
            pod.sends(family, end);
            assert_eq!(pod.numbers(), None, "{flags:x}");
        }
        for (flags, removes) in [(RST, true), (RST | ACK, true), (SYN, false)] {
            pod.sends(family, data_segment(100, b"hello"));
            let end = Segment {
                flags,
                ..acknowledged(0)
            };
            pod.receives(family, end);
            assert_eq!(pod.numbers().is_none(), removes, "{flags:x}");
        }
        pod.receives(family, acknowledged(105));
    }
}

#[test]
fn numbers_begin_anew_after_the_largest() {
    let pod = Pod::new();
    pod.sends(0, data_segment(u32::MAX - 4, b"helloworld"));
    for (number, first) in [
        (u32::MAX - 5, u32::MAX - 4),
        (u32::MAX, u32::MAX),
        (0, 0),
        (u32::MAX, 0),
        (2, 2),
    ] {
        pod.receives(0, acknowledged(number));
        assert_eq!(pod.numbers(), Some((first, 5)), "{number}");
    }
    pod.sends(0, data_segment(5, b"more"));
    assert_eq!(pod.numbers(), Some((2, 9)));
    pod.receives(0, acknowledged(9));
    assert_eq!(pod.numbers(), None);
}

#[test]
fn a_packet_of_another_connection_changes_no_entry() {
    let pod = Pod::new();
    pod.sends_marked(0, data_segment(100, b"a probe's answer"), NOT_OF_SANDBOX);
    assert_eq!(pod.numbers(), None);
    pod.sends(0, data_segment(100, b"hello"));
    let other = Segment {
        peers_port: PEERS_PORT + 1,
        ..acknowledged(105)
    };
    pod.receives(0, other);
    pod.receives(1, acknowledged(105));
    let (near, [to, _]) = (pod.near.name(), ENDS[0]);
    sh(&format!(
        "ip -n {near} neigh replace {to} lladdr 02:00:00:00:00:07 dev eth0"
    ));
    pod.receives(0, acknowledged(105));
    assert_eq!(pod.numbers(), Some((100, 105)), "for another link");
}

#[test]
fn the_number_of_entries_is_limited_and_the_latest_senders_keep_theirs() {
    const SOME: usize = 32;
    let pod = Pod::new();
    let ports = 10_000..10_000 + 4 * u16::try_from(MAX_CONNECTIONS).expect("few");
    for peers_port in ports.clone() {
        let segment = Segment {
            peers_port,
            ..data_segment(100, b"hello")
        };
        pod.sends(0, segment);
    }
    let all = pod.all();
    let room = usize::try_from(MAX_CONNECTIONS).expect("few");
    assert!((SOME..=room).contains(&all.len()), "{}", all.len());
    for port in ports.rev().take(SOME) {
        let is_recorded = all
            .iter()
            .any(|connection| connection.ends.remote_port == port);
        assert!(is_recorded, "{port}");
    }
}

#[test]
fn packet_times_are_noted_beside_unacknowledged_data() {
    let pod = Pod::new();
    let own = Pod::ends(0);
    let path = pod.far.path();
    let begin = || crate::traffic::begin(&path, &own[..1]);
    let watch = within(&pod.near.path(), begin).expect("watched");
    pod.sends(0, data_segment(100, b"hello"));
    assert!(pod.numbers().is_some());
    let ages = crate::traffic::last(watch).expect("read");
    assert!(ages.other_millis.is_some(), "{ages:?}");
}

#[test]
fn any_entry_of_a_sandbox_can_be_read() {
    let (mut key, mut value) = ([0xff; KEY], [0xff; VALUE]);
    assert_eq!(entry(&key, &value), None, "neither IPv4 nor IPv6");
    key[KEY - 4..].copy_from_slice(&program::IPV6.to_ne_bytes());
    let read = entry(&key, &value).expect("an entry");
    assert_eq!(read.timestamps, None);
    // The timestamps are present only if the header is long enough; else these bytes are data.
    value[8 + 12..8 + 16].copy_from_slice(&[1, 1, 8, 10]);
    for (words, is_present) in [(5, false), (7, false), (8, true), (15, true)] {
        value[8 + 4] = words << 4;
        let read = entry(&key, &value).expect("an entry");
        let expected = is_present.then_some((u32::MAX, u32::MAX));
        assert_eq!(read.timestamps, expected, "{words}");
    }
}

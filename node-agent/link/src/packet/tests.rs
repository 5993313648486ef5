use super::*;
use etherparse::PacketBuilder;
use proptest::prelude::*;

const POD4: [u8; 4] = [10, 1, 2, 3];
const POD6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3];

fn own() -> Vec<IpAddr> {
    vec![IpAddr::from(POD4), IpAddr::from(POD6)]
}

fn to4(address: [u8; 4]) -> etherparse::PacketBuilderStep<etherparse::IpHeaders> {
    PacketBuilder::ethernet2([1; 6], [2; 6]).ipv4([10, 1, 0, 1], address, 64)
}

fn to6() -> etherparse::PacketBuilderStep<etherparse::IpHeaders> {
    PacketBuilder::ethernet2([1; 6], [2; 6]).ipv6([1; 16], POD6, 64)
}

macro_rules! frame {
    ($builder:expr, $payload:expr) => {{
        let mut bytes = Vec::new();
        $builder.write(&mut bytes, $payload).expect("a frame");
        bytes
    }};
}

const TCP: Meaning = Meaning::Wakes(Cause::Tcp { port: 80 });
const UDP: Meaning = Meaning::Wakes(Cause::Udp { port: 53 });
const ICMP: Meaning = Meaning::Wakes(Cause::Icmp);

#[test]
fn only_a_packet_that_needs_an_answer_wakes_the_pod() {
    let cases: Vec<(&str, Vec<u8>, Meaning)> = vec![
        (
            "syn",
            frame!(to4(POD4).tcp(4000, 80, 1, 512).syn(), &[]),
            TCP,
        ),
        (
            "data",
            frame!(to4(POD4).tcp(4000, 80, 1, 512).ack(9), b"hello"),
            TCP,
        ),
        (
            "last data",
            frame!(to4(POD4).tcp(4000, 80, 1, 512).ack(9).fin(), b"bye"),
            TCP,
        ),
        (
            "syn, IPv6",
            frame!(to6().tcp(4000, 80, 1, 512).syn(), &[]),
            TCP,
        ),
        (
            "keepalive",
            frame!(to4(POD4).tcp(4000, 80, 1, 512).ack(9), &[]),
            Meaning::Quiet,
        ),
        (
            "end",
            frame!(to4(POD4).tcp(4000, 80, 1, 512).ack(9).fin(), &[]),
            Meaning::Quiet,
        ),
        (
            "reset",
            frame!(to4(POD4).tcp(4000, 80, 1, 512).rst(), &[]),
            Meaning::Quiet,
        ),
        ("udp", frame!(to4(POD4).udp(4000, 53), &[]), UDP),
        ("udp, IPv6", frame!(to6().udp(4000, 53), b"x"), UDP),
        (
            "ping",
            frame!(to4(POD4).icmpv4_echo_request(1, 1), b"x"),
            ICMP,
        ),
        (
            "ping, IPv6",
            frame!(to6().icmpv6_echo_request(1, 1), b"x"),
            ICMP,
        ),
        (
            "pong",
            frame!(to4(POD4).icmpv4_echo_reply(1, 1), b"x"),
            Meaning::Quiet,
        ),
        (
            "who has, IPv6",
            frame!(to6().icmpv6_raw(135, 0, [0; 4]), &[0; 16]),
            Meaning::NotForPod,
        ),
        (
            "another's",
            frame!(to4([10, 1, 2, 4]).tcp(4000, 80, 1, 512).syn(), &[]),
            Meaning::NotForPod,
        ),
        (
            "broadcast",
            frame!(to4([255; 4]).udp(67, 68), &[]),
            Meaning::NotForPod,
        ),
        (
            "multicast",
            frame!(to4([224, 0, 0, 251]).udp(5353, 5353), &[]),
            Meaning::NotForPod,
        ),
    ];
    for (name, frame, expected) in cases {
        assert_eq!(meaning(&frame, &own()), expected, "{name}");
    }
}

#[test]
fn an_arp_request_is_left_to_the_kernel() {
    let mut frame = vec![0xff; 6];
    frame.extend([2; 6]);
    frame.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend([0; 20]);
    assert_eq!(meaning(&frame, &own()), Meaning::NotForPod);
}

#[test]
fn a_protocol_that_is_not_known_wakes_by_its_number() {
    let mut frame = frame!(to4(POD4).udp(1, 2), b"xxxxxxxx");
    // SCTP, in place of UDP.
    frame[14 + 9] = 132;
    assert_eq!(
        meaning(&frame, &own()),
        Meaning::Wakes(Cause::Other { protocol: 132 })
    );
}

fn wakes(cause: Cause, wake_on: &WakeOn) -> bool {
    Meaning::Wakes(cause).for_pod_that_wakes_on(wake_on) != Meaning::Unwanted
}

#[test]
fn a_pod_may_be_woken_by_some_packets_only() {
    let only = |tcp, udp, icmp, ports: &[(u16, u16)]| WakeOn::Only {
        tcp,
        udp,
        icmp,
        ports: ports.iter().map(|(first, last)| *first..=*last).collect(),
    };
    let causes = [
        Cause::Tcp { port: 80 },
        Cause::Tcp { port: 22 },
        Cause::Udp { port: 80 },
        Cause::Udp { port: 53 },
        Cause::Icmp,
        // A fragment of a TCP or a UDP packet, and SCTP.
        Cause::Other { protocol: 6 },
        Cause::Other { protocol: 17 },
        Cause::Other { protocol: 132 },
    ];
    for (wake_on, expected) in [
        (WakeOn::Any, [true; 8]),
        (only(false, false, false, &[]), [false; 8]),
        (
            only(true, false, false, &[]),
            [true, true, false, false, false, true, false, false],
        ),
        (
            only(true, false, false, &[(80, 80)]),
            [true, false, false, false, false, true, false, false],
        ),
        (
            only(true, true, false, &[(50, 80)]),
            [true, false, true, true, false, true, true, false],
        ),
        (
            only(false, true, true, &[(53, 53)]),
            [false, false, false, true, true, false, true, false],
        ),
    ] {
        assert_eq!(
            causes.map(|cause| wakes(cause, &wake_on)),
            expected,
            "{wake_on:?}"
        );
    }
}

#[test]
fn the_wake_on_setting_does_not_change_packets_that_never_wake() {
    let nothing = WakeOn::Only {
        tcp: false,
        udp: false,
        icmp: false,
        ports: Vec::new(),
    };
    for meaning in [Meaning::Quiet, Meaning::NotForPod] {
        assert_eq!(meaning.for_pod_that_wakes_on(&nothing), meaning);
    }
}

#[test]
fn a_segment_that_is_sent_again_has_the_same_content() {
    let stamped =
        |tcp: etherparse::PacketBuilderStep<etherparse::TcpHeader>, at, payload: &[u8]| {
            let options = [
                TcpOptionElement::Noop,
                TcpOptionElement::Noop,
                TcpOptionElement::Timestamp(at, 7),
            ];
            let frame = frame!(tcp.options(&options).expect("room"), payload);
            segment(&frame, &own()).expect("a segment").says()
        };
    let tcp = |sequence, acknowledgment| to4(POD4).tcp(4000, 80, sequence, 512).ack(acknowledgment);
    assert_eq!(
        stamped(tcp(1, 9), 100, b"hello"),
        stamped(tcp(1, 9), 200, b"hello")
    );
    assert_eq!(
        stamped(tcp(1, 9).fin(), 100, b""),
        stamped(tcp(1, 9).fin(), 200, b"")
    );
    // The following data, an end after data, and another acknowledgement have other contents.
    assert_ne!(
        stamped(tcp(1, 9), 100, b"hello"),
        stamped(tcp(6, 9), 100, b"hello")
    );
    assert_ne!(
        stamped(tcp(1, 9), 100, b"hello"),
        stamped(tcp(1, 9).fin(), 100, b"hello")
    );
    assert_ne!(stamped(tcp(1, 9), 100, b""), stamped(tcp(1, 10), 100, b""));
}

#[test]
fn a_segment_is_read_with_what_its_answer_needs() {
    let frame = frame!(to4(POD4).tcp(4000, 80, 77, 512).ack(99), b"x");
    let read = segment(&frame, &own()).expect("a segment");
    assert_eq!(
        read,
        Segment {
            ends: Ends {
                remote: [10, 1, 0, 1].into(),
                remote_port: 4000,
                local: POD4.into(),
                local_port: 80
            },
            sequence: 77,
            acknowledgment: 99,
            window: 512,
            syn: false,
            fin: false,
            rst: false,
            ack: true,
            length: 1,
            timestamps: None,
            other_options: false,
        }
    );
    assert!(segment(&frame!(to4([10, 1, 2, 4]).tcp(1, 2, 3, 4), &[]), &own()).is_none());
    assert!(segment(&frame!(to4(POD4).udp(1, 2), &[]), &own()).is_none());
}

proptest! {
    #[test]
    fn no_frame_causes_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        meaning(&bytes, &own());
        segment(&bytes, &own());
    }

    /// For any bytes after the addresses: a frame is the pod's if and only if its destination is.
    #[test]
    fn only_the_pods_own_addresses_count(rest in proptest::collection::vec(any::<u8>(), 0..64), last in any::<u8>()) {
        let mut frame = frame!(to4([10, 1, 2, last]).udp(1, 2), &[]);
        frame.truncate(14 + 20);
        frame.extend(rest);
        prop_assert_eq!(meaning(&frame, &own()) == Meaning::NotForPod, last != 3);
    }
}

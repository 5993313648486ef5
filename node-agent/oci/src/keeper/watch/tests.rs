use std::io::Write;
use std::net::{TcpListener, TcpStream, UdpSocket};

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use torpor_core::wake_on::WakeOn;
use torpor_link::unacknowledged;

use super::*;
use crate::keeper::egress_hold::tests::{Pair, ip, listener, said};
use crate::node::tests::record;

fn pod_in(network: &Path) -> PodRecord {
    PodRecord {
        network_namespace: Some(network.to_owned()),
        addresses: net::read(network).expect("addresses"),
        ..record()
    }
}

#[test]
fn what_is_frozen_is_reached_by_others_until_its_memory_is_written() {
    let pair = Pair::new("frozen");
    let network = Pair::path(&pair.pod);
    let hears = pair.in_pod(|| listener("10.204.0.1:7"));
    let says = pair.at_host(|| UdpSocket::bind("10.204.0.2:0").expect("bound"));
    let say = |word: &str| says.send_to(word.as_bytes(), "10.204.0.1:7").expect("sent");
    say("before");
    assert_eq!(said(&hears).as_deref(), Some("before"));

    let pod = pod_in(&network);
    let rules = Rules {
        wake_on: WakeOn::NOTHING,
        ..Rules::default()
    };
    pair.at_host(|| {
        let mut watch = Watch::begin(&pod, &rules, 10250, None, None).expect("watched");
        say("held");
        assert_eq!(watch.turn(), Next::Nothing);
        assert_eq!(said(&hears), None);
        assert_eq!(watch.frozen(), Next::Nothing);
        assert!(watch.is_asleep(), "nobody has to look");
        say("frozen");
        assert_eq!(watch.turn(), Next::Nothing);
        assert_eq!(said(&hears).as_deref(), Some("frozen"));
        watch.hold();
        say("saved");
        assert_eq!(watch.turn(), Next::Nothing);
        assert_eq!(said(&hears), None, "no image knows of it");
        watch.release();
    });
    say("after");
    let heard: Vec<_> = std::iter::from_fn(|| said(&hears)).collect();
    // While it sleeps, what does not wake it is as if it had been lost on its way.
    assert_eq!(heard, ["held", "after"]);
}

/// The segments to the peer that have left the pod since this was last asked.
fn left(tap: &mut Tap) -> Vec<Segment> {
    let peer = [IpAddr::from([10, 204, 0, 2])];
    let mut left = Vec::new();
    while let Ok(Some(frame)) = tap.receive() {
        left.extend(segment(ethernet(frame), &peer));
    }
    left
}

#[test]
fn who_has_not_acknowledged_what_was_said_is_asked_after_a_restore_alone() {
    let pair = Pair::new("asked");
    let network = Pair::path(&pair.pod);
    let pod = pod_in(&network);
    let noted = unacknowledged::begin(&network).expect("noted");
    let pairs = pair.at_host(|| net::pairs(&network)).expect("pairs");
    let tap = pair.in_pod(|| Tap::open(pairs[0].pod));
    let mut tap = tap.expect("a tap");
    let (_listener, _peer, mut program) = connected(&pair);
    // From now on it hears nothing.
    pair.at_host(|| ip("addr flush dev eth0"));
    program.write_all(b"lost").expect("said");
    let said = left(&mut tap);
    let lost = said.iter().find(|segment| segment.length == 4);
    let lost = lost.expect("what is lost");
    let asks = |segment: &Segment| {
        let number = segment.sequence == lost.sequence.wrapping_sub(1);
        let same = segment.acknowledgment == lost.acknowledgment;
        number && same && segment.says_nothing()
    };
    for restored in [false, true] {
        pair.at_host(|| {
            let rules = Rules::default();
            let noted = Some(noted);
            let watch = Watch::begin(&pod, &rules, 10250, None, noted);
            let mut watch = watch.expect("watched");
            if restored {
                assert_eq!(watch.asleep(), Next::Nothing);
            }
            watch.release();
        });
        let said = left(&mut tap);
        let asked = said.iter().filter(|segment| asks(segment)).count();
        assert_eq!(asked, usize::from(restored), "{said:?}");
    }
}

/// A connection from the host's end to the pod's: who listens, the client, and the server.
fn connected(pair: &Pair) -> (TcpListener, TcpStream, TcpStream) {
    let listener = pair
        .in_pod(|| TcpListener::bind("10.204.0.1:7"))
        .expect("bound");
    let peer = pair.at_host(|| TcpStream::connect("10.204.0.1:7"));
    let (program, _) = listener.accept().expect("accepted");
    (listener, peer.expect("connected"), program)
}

/// Keepalives.
fn asks_each_second(peer: &TcpStream) {
    use rustix::net::sockopt;
    let second = Duration::from_secs(1);
    sockopt::set_socket_keepalive(peer, true).expect("set");
    sockopt::set_tcp_keepidle(peer, second).expect("set");
    sockopt::set_tcp_keepintvl(peer, second).expect("set");
}

/// What reaches the pod's kernel by TCP.
fn heard_in(pair: &Pair) -> UdpSocket {
    let raw = pair.in_pod(|| {
        let close = SockFlag::SOCK_CLOEXEC;
        socket(AddressFamily::Inet, SockType::Raw, close, SockProtocol::Tcp)
    });
    // The same calls read it.
    let heard = UdpSocket::from(raw.expect("a raw socket"));
    let limit = Some(Duration::from_millis(300));
    heard.set_read_timeout(limit).expect("set");
    heard
}

/// The TCP segments that have reached the pod's kernel, once nothing more has come for a while.
fn segments(heard: &UdpSocket) -> Vec<Segment> {
    const ETHERNET_OF_IPV4: [u8; 14] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    let own = [IpAddr::from([10, 204, 0, 1])];
    let next = || {
        let mut packet = [0; 2048];
        let length = heard.recv(&mut packet).ok()?;
        segment(&[&ETHERNET_OF_IPV4[..], &packet[..length]].concat(), &own)
    };
    std::iter::from_fn(next).collect()
}

#[test]
fn who_was_restored_gets_what_has_waited_and_is_told_what_comes_next() {
    let pair = Pair::new("remind");
    let pod = pod_in(&Pair::path(&pair.pod));
    let (_listener, mut peer, _program) = connected(&pair);
    let heard = heard_in(&pair);
    pair.at_host(|| {
        let rules = Rules::default();
        let mut watch = Watch::begin(&pod, &rules, 10250, None, None).expect("watched");
        peer.write_all(b"held").expect("said");
        assert_eq!(watch.turn(), Next::Nothing);
        assert!(matches!(watch.asleep(), Next::Wake(_)));
        watch.release();
    });
    let heard = segments(&heard);
    let held = heard.iter().find(|segment| segment.length == 4);
    let held = held.expect("what has waited");
    let next = held.sequence.wrapping_add(4);
    let reminded = |segment: &Segment| {
        let same = segment.acknowledgment == held.acknowledgment;
        segment.says_nothing() && segment.sequence == next && same
    };
    assert!(heard.iter().any(reminded), "{heard:?}");
}

#[test]
fn one_that_is_stopped_hears_nothing_and_is_found_until_it_goes_on() {
    let pair = Pair::new("halted");
    let network = Pair::path(&pair.pod);
    let pod = pod_in(&network);
    let (_listener, mut peer, _program) = connected(&pair);
    asks_each_second(&peer);
    let heard = heard_in(&pair);
    // Told by one who says something to it, to whom nobody answers who has the address.
    let is_found = |watch: &mut Watch| {
        ip("neigh flush dev eth0");
        let says = UdpSocket::bind("[::]:0").expect("bound");
        let until = Instant::now() + Duration::from_secs(2);
        let found = |address: &str| {
            let known = ip(&format!("neigh show to {address} nud reachable"));
            known.contains("02:00:00:00:00:07")
        };
        while Instant::now() < until {
            for address in ["10.204.0.1", "fd04::1"] {
                let _ = says.send_to(b"", (address, 9));
            }
            // Its rules let nothing wake it but TCP.
            assert_eq!(watch.turn(), Next::Nothing);
            if found("10.204.0.1") && found("fd04::1") {
                return true;
            }
        }
        false
    };
    let hears = |watch: &mut Watch| {
        let until = Instant::now() + Duration::from_millis(2500);
        let mut all = Vec::new();
        while Instant::now() < until {
            assert_eq!(watch.turn(), Next::Nothing);
            all.extend(segments(&heard));
        }
        !all.is_empty()
    };
    pair.at_host(|| {
        let rules = Rules {
            wake_on: WakeOn::Only {
                tcp: true,
                udp: false,
                icmp: false,
                ports: vec![],
            },
            ..Rules::default()
        };
        let mut watch = Watch::begin(&pod, &rules, 10250, None, None).expect("watched");
        watch.halt().expect_err("it runs");
        assert_eq!(watch.standing(), Next::Nothing);
        assert!(hears(&mut watch), "its network stack answers");
        // As runsc has left it.
        pair.in_pod(|| ip("addr flush dev eth0"));
        assert!(!is_found(&mut watch), "it speaks for itself");
        assert_eq!(watch.halt().expect("spoken for"), Next::Nothing);
        assert!(is_found(&mut watch));
        assert!(!hears(&mut watch), "it could not hear it");
        // Somebody has let it go on, and it dozes again.
        watch.go_on();
        assert!(!is_found(&mut watch), "it speaks for itself again");
        watch.halt().expect("spoken for again");
        assert!(is_found(&mut watch));
        peer.write_all(b"wakes").expect("said");
        let until = Instant::now() + Duration::from_secs(10);
        while !matches!(watch.turn(), Next::Wake(_)) {
            assert!(Instant::now() < until, "nobody wakes it");
        }
        watch.release();
    });
}

#[test]
fn what_a_probe_from_before_says_wakes_nobody_and_what_others_say_does() {
    let pair = Pair::new("probed");
    let pod = pod_in(&Pair::path(&pair.pod));
    let (_listener, mut peer, _program) = connected(&pair);
    // Who listens there is the kubelet: this test.
    let kubelet = pair.at_host(|| TcpListener::bind("0.0.0.0:0").expect("bound"));
    let port = kubelet.local_addr().expect("bound").port();
    let probed = Rules {
        probes: vec![7],
        ..Rules::default()
    };
    let hooked = Rules {
        hooks: vec![7],
        ..probed.clone()
    };
    for (rules, port, wakes) in [
        (&probed, port, false),
        (&hooked, port, true),
        (&Rules::default(), port, true),
        // The kubelet is another one.
        (&probed, 1, true),
    ] {
        pair.at_host(|| {
            let mut watch = Watch::begin(&pod, rules, port, None, None).expect("watched");
            assert_eq!(watch.standing(), Next::Nothing);
            peer.write_all(b"said").expect("said");
            let until = Instant::now() + Duration::from_millis(500);
            let mut next = Next::Nothing;
            while next == Next::Nothing && Instant::now() < until {
                next = watch.turn();
            }
            assert_eq!(matches!(next, Next::Wake(_)), wakes, "{rules:?}");
            watch.release();
        });
    }
}

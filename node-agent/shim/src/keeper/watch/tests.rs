use std::io::Write;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::path::Path;

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use torpor_core::ids::{Namespace, PodUid, SandboxId};
use torpor_core::wake_on::WakeOn;
use torpor_link::tap::Tap;
use torpor_link::unacknowledged;

use super::*;
use crate::keeper::egress_hold::tests::{PodAndHost, ip, receive, receiver};

fn pod_in(network: &Path) -> PodRecord {
    PodRecord {
        sandbox: SandboxId::new("5".repeat(64)).expect("an id"),
        pod_uid: PodUid::new("pod-a").expect("a uid"),
        namespace: Namespace::new("default").expect("a name"),
        name: "a".to_owned(),
        runsc: PathBuf::new(),
        runsc_digest: String::new(),
        network_namespace: Some(network.to_owned()),
        addresses: net::read(network).expect("addresses"),
        cgroup: PathBuf::new(),
        volumes: Vec::new(),
        cold_start_on_failure: false,
    }
}

#[test]
fn a_frozen_sandbox_receives_packets_until_its_memory_is_written() {
    let both = PodAndHost::new("frozen");
    let network = PodAndHost::path(&both.pod);
    let receiver = both.in_pod(|| receiver("10.204.0.1:7"));
    let socket = both.at_host(|| UdpSocket::bind("10.204.0.2:0").expect("bound"));
    let send = |datagram: &str| {
        let sent = socket.send_to(datagram.as_bytes(), "10.204.0.1:7");
        sent.expect("sent")
    };
    send("before");
    assert_eq!(receive(&receiver).as_deref(), Some("before"));

    let pod = pod_in(&network);
    let rules = Rules {
        wake_on: WakeOn::NOTHING,
        ..Rules::default()
    };
    both.at_host(|| {
        let mut watch = Watch::begin(&pod, &rules, 10250, None, None).expect("watched");
        send("held");
        assert_eq!(watch.handle_frames(), Next::Nothing);
        assert_eq!(receive(&receiver), None);
        assert_eq!(watch.frozen(), Next::Nothing);
        assert!(watch.is_asleep(), "nobody has to look");
        send("frozen");
        assert_eq!(watch.handle_frames(), Next::Nothing);
        assert_eq!(receive(&receiver).as_deref(), Some("frozen"));
        watch.hold();
        send("saved");
        assert_eq!(watch.handle_frames(), Next::Nothing);
        assert_eq!(receive(&receiver), None, "no image knows of it");
        watch.release();
    });
    send("after");
    let received: Vec<_> = std::iter::from_fn(|| receive(&receiver)).collect();
    // A packet that does not wake the sleeping sandbox counts as lost on its way.
    assert_eq!(received, ["held", "after"]);
}

/// Returns the segments to the peer that have left the pod since the last call.
fn sent_segments(tap: &mut Tap) -> Vec<Segment> {
    let peer = [IpAddr::from([10, 204, 0, 2])];
    let mut sent = Vec::new();
    while let Ok(Some(frame)) = tap.receive() {
        sent.extend(segment(ethernet(frame), &peer));
    }
    sent
}

#[test]
fn a_peer_with_unacknowledged_data_is_probed_only_after_a_restore() {
    let both = PodAndHost::new("asked");
    let network = PodAndHost::path(&both.pod);
    let pod = pod_in(&network);
    let map = unacknowledged::begin(&network).expect("noted");
    let pairs = both.at_host(|| net::pairs(&network)).expect("pairs");
    let tap = both.in_pod(|| Tap::open(pairs[0].pod));
    let mut tap = tap.expect("a tap");
    let (_listener, _peer, mut program) = connected(&both);
    // From now on the peer receives nothing.
    both.at_host(|| ip("addr flush dev eth0"));
    program.write_all(b"lost").expect("said");
    let sent = sent_segments(&mut tap);
    let lost = sent.iter().find(|segment| segment.length == 4);
    let lost = lost.expect("what is lost");
    let is_keepalive = |segment: &Segment| {
        let number = segment.sequence == lost.sequence.wrapping_sub(1);
        let same = segment.acknowledgment == lost.acknowledgment;
        number && same && segment.has_no_data()
    };
    for restored in [false, true] {
        both.at_host(|| {
            let rules = Rules::default();
            let watch = Watch::begin(&pod, &rules, 10250, None, Some(map));
            let mut watch = watch.expect("watched");
            if restored {
                assert_eq!(watch.hibernated(), Next::Nothing);
            }
            watch.release();
        });
        let sent = sent_segments(&mut tap);
        let keepalives = sent.iter().filter(|segment| is_keepalive(segment)).count();
        assert_eq!(keepalives, usize::from(restored), "{sent:?}");
    }
}

/// Makes a connection from the host to the pod. Returns the listener and the connection's ends at
/// the host and in the pod.
fn connected(both: &PodAndHost) -> (TcpListener, TcpStream, TcpStream) {
    let listener = both
        .in_pod(|| TcpListener::bind("10.204.0.1:7"))
        .expect("bound");
    let peer = both.at_host(|| TcpStream::connect("10.204.0.1:7"));
    let (program, _) = listener.accept().expect("accepted");
    (listener, peer.expect("connected"), program)
}

/// Makes the peer send keepalives.
fn send_keepalives_each_second(peer: &TcpStream) {
    use rustix::net::sockopt;
    let second = Duration::from_secs(1);
    sockopt::set_socket_keepalive(peer, true).expect("set");
    sockopt::set_tcp_keepidle(peer, second).expect("set");
    sockopt::set_tcp_keepintvl(peer, second).expect("set");
}

/// Returns a raw socket that receives the TCP segments that reach the pod's kernel.
fn tcp_receiver(both: &PodAndHost) -> UdpSocket {
    let raw = both.in_pod(|| {
        let close = SockFlag::SOCK_CLOEXEC;
        socket(AddressFamily::Inet, SockType::Raw, close, SockProtocol::Tcp)
    });
    // A raw socket is read by the same calls as a UDP socket.
    let receiver = UdpSocket::from(raw.expect("a raw socket"));
    let limit = Some(Duration::from_millis(300));
    receiver.set_read_timeout(limit).expect("set");
    receiver
}

/// Returns the segments of a [`tcp_receiver`], once no more come for a while.
fn segments(receiver: &UdpSocket) -> Vec<Segment> {
    const ETHERNET_OF_IPV4: [u8; 14] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    let pod_ips = [IpAddr::from([10, 204, 0, 1])];
    let next = || {
        let mut packet = [0; 2048];
        let length = receiver.recv(&mut packet).ok()?;
        segment(
            &[&ETHERNET_OF_IPV4[..], &packet[..length]].concat(),
            &pod_ips,
        )
    };
    std::iter::from_fn(next).collect()
}

#[test]
fn a_restored_sandbox_gets_its_held_packets_and_a_reminder_of_the_next_number() {
    let both = PodAndHost::new("remind");
    let pod = pod_in(&PodAndHost::path(&both.pod));
    let (_listener, mut peer, _program) = connected(&both);
    let receiver = tcp_receiver(&both);
    both.at_host(|| {
        let rules = Rules::default();
        let mut watch = Watch::begin(&pod, &rules, 10250, None, None).expect("watched");
        peer.write_all(b"held").expect("said");
        assert_eq!(watch.handle_frames(), Next::Nothing);
        assert!(matches!(watch.hibernated(), Next::Wake(_)));
        watch.release();
    });
    let received = segments(&receiver);
    let held = received.iter().find(|segment| segment.length == 4);
    let held = held.expect("what has waited");
    let next = held.sequence.wrapping_add(4);
    let is_reminder = |segment: &Segment| {
        let same = segment.acknowledgment == held.acknowledgment;
        segment.has_no_data() && segment.sequence == next && same
    };
    assert!(received.iter().any(is_reminder), "{received:?}");
}

#[test]
fn peers_still_find_a_sandbox_whose_wake_failed_after_it_had_taken_the_address() {
    let both = PodAndHost::new("unwoken");
    let pod = pod_in(&PodAndHost::path(&both.pod));
    let addresses = || both.in_pod(|| ip("-brief addr show dev eth0"));
    both.at_host(|| {
        let rules = Rules::default();
        let mut watch = Watch::begin(&pod, &rules, 10250, None, None).expect("watched");
        for is_hibernated in [false, true] {
            if is_hibernated {
                assert_eq!(watch.hibernated(), Next::Nothing);
            }
            both.in_pod(|| ip("addr flush dev eth0"));
            watch.wake_failed();
            let found = addresses();
            // A sandbox with processes has its addresses itself.
            for address in ["10.204.0.1/24", "fd04::1/64"] {
                assert_eq!(found.contains(address), is_hibernated, "{found}");
            }
        }
        watch.release();
    });
}

#[test]
fn a_stopped_sandbox_receives_no_packets_and_its_address_is_still_resolved() {
    let both = PodAndHost::new("halted");
    let network = PodAndHost::path(&both.pod);
    let pod = pod_in(&network);
    let (_listener, mut peer, _program) = connected(&both);
    send_keepalives_each_second(&peer);
    let receiver = tcp_receiver(&both);
    // A peer that sends to the pod records its Ethernet address if it gets an answer.
    let is_found = |watch: &mut Watch| {
        ip("neigh flush dev eth0");
        let socket = UdpSocket::bind("[::]:0").expect("bound");
        let until = Instant::now() + Duration::from_secs(2);
        let found = |address: &str| {
            let known = ip(&format!("neigh show to {address} nud reachable"));
            known.contains("02:00:00:00:00:07")
        };
        while Instant::now() < until {
            for address in ["10.204.0.1", "fd04::1"] {
                let _ = socket.send_to(b"", (address, 9));
            }
            // By the rules, only TCP wakes the sandbox.
            assert_eq!(watch.handle_frames(), Next::Nothing);
            if found("10.204.0.1") && found("fd04::1") {
                return true;
            }
        }
        false
    };
    let receives = |watch: &mut Watch| {
        let until = Instant::now() + Duration::from_millis(2500);
        let mut all = Vec::new();
        while Instant::now() < until {
            assert_eq!(watch.handle_frames(), Next::Nothing);
            all.extend(segments(&receiver));
        }
        !all.is_empty()
    };
    both.at_host(|| {
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
        watch.begin_answers().expect_err("it runs");
        assert_eq!(watch.paused(), Next::Nothing);
        assert!(receives(&mut watch), "its network stack answers");
        // runsc removes the addresses from a pod's links, too.
        both.in_pod(|| ip("addr flush dev eth0"));
        assert!(!is_found(&mut watch), "it speaks for itself");
        assert_eq!(watch.begin_answers().expect("spoken for"), Next::Nothing);
        assert!(is_found(&mut watch));
        assert!(!receives(&mut watch), "it could not hear it");
        // Another process has continued the sandbox's processes, and it dozes again.
        watch.end_answers();
        assert!(!is_found(&mut watch), "it speaks for itself again");
        watch.begin_answers().expect("spoken for again");
        assert!(is_found(&mut watch));
        peer.write_all(b"wakes").expect("said");
        let until = Instant::now() + Duration::from_secs(10);
        while !matches!(watch.handle_frames(), Next::Wake(_)) {
            assert!(Instant::now() < until, "nobody wakes it");
        }
        watch.release();
    });
}

#[test]
fn data_on_an_earlier_probe_connection_wakes_no_sandbox_and_other_data_does() {
    let both = PodAndHost::new("probed");
    let pod = pod_in(&PodAndHost::path(&both.pod));
    let (_listener, mut peer, _program) = connected(&both);
    // The process that listens on the kubelet's port counts as the kubelet: this test.
    let kubelet = both.at_host(|| TcpListener::bind("0.0.0.0:0").expect("bound"));
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
        // The kubelet is another process.
        (&probed, 1, true),
    ] {
        both.at_host(|| {
            let mut watch = Watch::begin(&pod, rules, port, None, None).expect("watched");
            assert_eq!(watch.paused(), Next::Nothing);
            peer.write_all(b"said").expect("said");
            let until = Instant::now() + Duration::from_millis(500);
            let mut next = Next::Nothing;
            while next == Next::Nothing && Instant::now() < until {
                next = watch.handle_frames();
            }
            assert_eq!(matches!(next, Next::Wake(_)), wakes, "{rules:?}");
            watch.release();
        });
    }
}

use super::*;
use torpor_test_namespace::{Namespace, sh};

/// The two ends of a link; the near one stands for the node. Needs root and iproute2, as the
/// development cluster does.
struct Pod {
    near: Namespace,
    far: Namespace,
    watch: TrafficMap,
}

const NODE: &str = "10.203.0.1";
const OTHER_NODE_ADDRESS: &str = "10.203.0.3";
const POD: &str = "10.203.0.2";

impl Pod {
    fn new() -> Self {
        let (near, far) = (Namespace::empty("tn"), Namespace::empty("tf"));
        let (a, b) = (near.name(), far.name());
        sh(&format!(
            "ip link add eth0 netns {a} type veth peer name eth0 netns {b}
             for n in {a} {b}; do ip -n $n link set eth0 up; done
             ip -n {a} addr add {NODE}/24 dev eth0; ip -n {a} addr add {OTHER_NODE_ADDRESS}/24 dev eth0
             ip -n {b} addr add {POD}/24 dev eth0
             ip -n {a} addr add fd00:203::1/64 dev eth0 nodad; ip -n {b} addr add fd00:203::2/64 dev eth0 nodad"
        ));
        let pod = [
            POD.parse().expect("an address"),
            "fd00:203::2".parse().expect("an address"),
        ];
        let path = far.path();
        let watch = within(&near.path(), || begin(&path, &pod)).expect("watched");
        Self { near, far, watch }
    }

    fn ages(&self) -> Ages {
        last(self.watch).expect("read")
    }

    /// Resets the recorded times.
    fn reset(&self) {
        let map = bpf::map_by_id(self.watch.map).expect("a map");
        for (key, _) in bpf::times(map.as_fd()).expect("times") {
            bpf::insert_time(map.as_fd(), key, 0).expect("written");
        }
    }

    fn on_node<T: Send>(&self, work: impl FnOnce() -> std::io::Result<T> + Send) -> T {
        within(&self.near.path(), || {
            Ok::<_, net::Error>(work().expect("done"))
        })
        .expect("entered")
    }

    fn in_pod<T: Send>(&self, work: impl FnOnce() -> std::io::Result<T> + Send) -> T {
        within(&self.far.path(), || {
            Ok::<_, net::Error>(work().expect("done"))
        })
        .expect("entered")
    }
}

/// Sends an echo request to the pod.
fn ping() -> std::io::Result<()> {
    use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto, sendto, socket};
    let raw = socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::ICMP))?;
    let target: std::net::SocketAddr = format!("{POD}:0").parse().expect("an address");
    const ECHO: [u8; 8] = [8, 0, 0xf7, 0xff, 0, 0, 0, 0];
    sendto(&raw, &ECHO, SendFlags::empty(), &target)?;
    Ok(())
}

fn connect(from: &str, to: &str, port: u16) -> std::io::Result<()> {
    let source: std::net::SocketAddr = format!("{from}:0").parse().expect("an address");
    let target: std::net::SocketAddr = format!("{to}:{port}").parse().expect("an address");
    let socket = rustix::net::socket(
        if source.is_ipv4() {
            rustix::net::AddressFamily::INET
        } else {
            rustix::net::AddressFamily::INET6
        },
        rustix::net::SocketType::STREAM,
        None,
    )?;
    rustix::net::bind(&socket, &source)?;
    // No program listens: a SYN goes there and a RST comes back.
    match rustix::net::connect(&socket, &target) {
        Err(rustix::io::Errno::CONNREFUSED) => Ok(()),
        other => other.map_err(Into::into),
    }
}

#[test]
fn packets_of_the_node_to_a_port_are_counted_apart_from_other_packets() {
    let pod = Pod::new();
    pod.reset();
    pod.on_node(|| connect(NODE, POD, 8080));
    let ages = pod.ages();
    assert_eq!(ages.node_millis.keys().collect::<Vec<_>>(), [&8080]);
    assert_eq!(ages.other_millis, None, "{ages:?}");
    assert_eq!(ages.youngest(&[8080]), None, "a probe is nobody's use");
    assert!(ages.youngest(&[9090]).expect("a use") < Duration::from_secs(60));

    pod.on_node(|| connect("[fd00:203::1]", "[fd00:203::2]", 8081));
    assert!(
        pod.ages().node_millis.contains_key(&8081),
        "{:?}",
        pod.ages()
    );
    pod.on_node(|| connect(OTHER_NODE_ADDRESS, POD, 8080));
    assert!(pod.ages().other_millis.is_some(), "from another address");
}

#[test]
fn datagrams_and_pings_in_either_direction_count() {
    let pod = Pod::new();
    for (work, what) in [
        (
            Box::new(|| {
                pod.on_node(|| UdpSocket::bind((NODE, 0))?.send_to(b"x", (POD, 53)));
            }) as Box<dyn Fn()>,
            "a datagram to the pod",
        ),
        (
            Box::new(|| {
                pod.in_pod(|| UdpSocket::bind((POD, 0))?.send_to(b"x", (NODE, 53)));
            }),
            "a datagram from the pod",
        ),
        (
            Box::new(|| {
                pod.on_node(ping);
            }),
            "a ping",
        ),
    ] {
        pod.reset();
        work();
        assert!(pod.ages().other_millis.is_some(), "{what}");
    }
}

#[test]
fn keepalives_arp_and_multicast_do_not_count_as_use() {
    let pod = Pod::new();
    let listener = pod.in_pod(|| std::net::TcpListener::bind((POD, 7000)));
    let near = pod.on_node(|| std::net::TcpStream::connect((POD, 7000)));
    let (far, _) = listener.accept().expect("accepted");
    // The keepalive and its acknowledgement: the connection is idle.
    rustix::net::sockopt::set_tcp_keepidle(&near, Duration::from_secs(1)).expect("set");
    rustix::net::sockopt::set_tcp_keepintvl(&near, Duration::from_secs(1)).expect("set");
    pod.reset();
    rustix::net::sockopt::set_socket_keepalive(&near, true).expect("set");
    let name = pod.near.name();
    let keepalives = || {
        let seen = sh(&format!(
            "ip netns exec {name} nstat -az TcpExtTCPKeepAlive | awk '/TCPKeep/ {{print $2}}'"
        ));
        seen.trim().parse::<u32>().expect("a number")
    };
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while keepalives() == 0 && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(keepalives() > 0, "a keepalive was sent");
    let far_name = pod.far.name();
    // ARP, neighbours, multicast.
    sh(&format!(
        "ip -n {far_name} neigh flush all; ip -n {name} neigh flush all"
    ));
    let multicast = (std::net::Ipv4Addr::new(224, 0, 0, 251), 5353);
    pod.in_pod(|| UdpSocket::bind((POD, 0))?.send_to(b"x", multicast));
    assert_eq!(pod.ages(), Ages::default());
    // Data on the same connection counts.
    std::io::Write::write_all(&mut &far, b"x").expect("sent");
    assert!(
        pod.ages().node_millis.contains_key(&7000),
        "{:?}",
        pod.ages()
    );
}

#[test]
fn a_request_is_distinguished_from_its_answer_and_from_the_end_of_a_connection() {
    let pod = Pod::new();
    let open = |probed: &[u16]| unanswered(pod.watch, probed).expect("read").is_some();
    let listener = pod.in_pod(|| std::net::TcpListener::bind((POD, 7000)));
    let mut near = pod.on_node(|| std::net::TcpStream::connect((POD, 7000)));
    let (mut far, _) = listener.accept().expect("accepted");
    assert!(open(&[]), "who has connected may wait to be spoken to");
    assert!(!open(&[7000]), "a probe");
    std::io::Write::write_all(&mut far, b"welcome").expect("sent");
    assert!(!open(&[]), "nobody has asked anything yet");
    std::io::Write::write_all(&mut near, b"?").expect("sent");
    assert!(open(&[]) && open(&[7001]));
    assert!(!open(&[7000]), "a probe");
    std::io::Write::write_all(&mut far, b"!").expect("sent");
    assert!(!open(&[]));
    drop(near);
    assert!(!open(&[]), "an end asks nothing");
    // A request of the node in a datagram, and the pod's answer.
    let server = pod.in_pod(|| UdpSocket::bind((POD, 53)));
    let client = pod.on_node(|| UdpSocket::bind((NODE, 0)));
    client.send_to(b"?", (POD, 53)).expect("sent");
    assert!(open(&[]));
    let from = client.local_addr().expect("an address");
    server.send_to(b"!", from).expect("sent");
    assert!(!open(&[]));
}

#[test]
fn more_ports_than_are_noted_count_as_everything_else() {
    let pod = Pod::new();
    pod.reset();
    for port in 9000..9000 + u16::try_from(MOST_PORTS).expect("few") {
        pod.on_node(|| connect(NODE, POD, port));
    }
    assert_eq!(pod.ages().other_millis, None);
    pod.on_node(|| connect(NODE, POD, 8999));
    assert!(pod.ages().other_millis.is_some());
}

#[test]
fn a_packet_that_a_bridge_floods_counts_only_for_its_receiver() {
    let pod = Pod::new();
    let near = pod.near.name();
    sh(&format!(
        "ip -n {near} neigh replace 10.203.0.9 lladdr 02:00:00:00:00:09 dev eth0
         ip -n {near} neigh replace {POD} lladdr 02:00:00:00:00:09 dev eth0"
    ));
    let send =
        |to: &'static str| pod.on_node(move || UdpSocket::bind((NODE, 0))?.send_to(b"x", (to, 53)));
    pod.reset();
    send("10.203.0.9");
    // The pod's IP address with another link's Ethernet address is not for the pod either.
    send(POD);
    assert_eq!(pod.ages(), Ages::default());
    assert_eq!(unanswered(pod.watch, &[]).expect("read"), None);
    sh(&format!("ip -n {near} neigh del {POD} dev eth0"));
    send(POD);
    assert!(pod.ages().other_millis.is_some());
}

use super::*;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) fn sh(script: &str) -> String {
    let output = Command::new("sh")
        .args(["-ec", script])
        .output()
        .expect("sh runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {errors}");
    String::from_utf8(output.stdout).expect("text")
}

/// A namespace with a veth that has addresses and routes as a CNI bridge plugin sets them, and a gateway that answers no ARP, as that of Amazon's.
pub(crate) struct Namespace(String);

impl Namespace {
    pub(crate) fn empty(purpose: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("torpor-{purpose}-{}-{number}", std::process::id());
        sh(&format!("ip netns add {name}"));
        Self(name)
    }

    pub(crate) fn name(&self) -> &str {
        &self.0
    }

    pub(crate) fn with_addresses() -> Self {
        let namespace = Self::empty("test");
        let name = namespace.name();
        sh(&format!(
            "ip -n {name} link add eth0 type veth peer name eth1
             ip -n {name} link set eth0 up; ip -n {name} link set eth1 up; ip -n {name} link set lo up
             ip -n {name} addr add 10.201.3.4/16 brd 10.201.255.255 dev eth0
             ip -n {name} -6 addr add fd00:201::4/64 dev eth0 nodad
             ip -n {name} route add default via 10.201.0.1 dev eth0
             ip -n {name} -6 route add default via fd00:201::1 dev eth0
             ip -n {name} neigh add 10.201.0.1 lladdr 02:00:00:00:00:01 dev eth0 nud permanent
             ip -n {name} neigh add fd00:201::1 lladdr 02:00:00:00:00:01 dev eth0 nud permanent"
        ));
        namespace
    }

    pub(crate) fn path(&self) -> PathBuf {
        format!("/run/netns/{}", self.0).into()
    }

    fn show(&self) -> String {
        let name = &self.0;
        sh(&format!(
            "ip -n {name} -o addr show dev eth0 scope global | awk '{{print $3, $4}}' | sort
             ip -n {name} route show; ip -n {name} -6 route show default | sed 's/ pref.*//'
             ip -n {name} neigh show nud permanent"
        ))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        sh(&format!("ip netns del {}", self.0));
    }
}

/// Needs root and iproute2, as the development cluster does.
#[test]
fn what_runsc_takes_away_is_put_back_and_twice_changes_nothing() {
    let namespace = Namespace::with_addresses();
    let before = namespace.show();
    let kept = read(&namespace.path()).expect("read");
    // As runsc does: the addresses go, and with them the routes and the neighbours.
    sh(&format!(
        "ip -n {} addr flush dev eth0 scope global",
        namespace.0
    ));
    assert_ne!(namespace.show(), before);

    put_back(&namespace.path(), &kept).expect("put back");
    assert_eq!(namespace.show(), before);
    put_back(&namespace.path(), &kept).expect("put back again");
    assert_eq!(namespace.show(), before);
    assert_eq!(read(&namespace.path()).expect("read"), kept);
}

#[test]
fn a_network_that_was_behind_the_gateway_is_so_again() {
    let namespace = Namespace::with_addresses();
    let name = namespace.name();
    // As the CNI plugin ptp does.
    sh(&format!(
        "ip -n {name} route del 10.201.0.0/16 dev eth0; ip -n {name} -6 route del fd00:201::/64 dev eth0
         ip -n {name} route add 10.201.0.1 dev eth0 scope link src 10.201.3.4
         ip -n {name} route replace default via 10.201.0.1 dev eth0
         ip -n {name} route add 10.201.0.0/16 via 10.201.0.1 src 10.201.3.4
         ip -n {name} -6 route add fd00:201::1 dev eth0
         ip -n {name} -6 route add fd00:201::/64 via fd00:201::1"
    ));
    let routes = || {
        sh(&format!(
            "ip -n {name} route show; ip -n {name} -6 route show dev eth0"
        ))
    };
    let before = routes();
    let kept = read(&namespace.path()).expect("read");
    sh(&format!("ip -n {name} addr flush dev eth0 scope global"));
    put_back(&namespace.path(), &kept).expect("put back");
    assert_eq!(routes(), before);
    assert_eq!(read(&namespace.path()).expect("read"), kept);
}

#[test]
fn an_address_that_is_taken_away_is_told_and_so_is_the_end_of_who_would_do_it() {
    let namespace = Namespace::with_addresses();
    let taken = AddressWatch::begin(&namespace.path()).expect("watched");
    let (mine, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| taken.wait(mine.as_fd()));
        let name = namespace.name();
        sh(&format!("ip -n {name} addr add 10.203.0.1/24 dev eth0"));
        assert!(!waiting.is_finished(), "one was added");
        sh(&format!("ip -n {name} addr del 10.203.0.1/24 dev eth0"));
        waiting.join().expect("no panic").expect("told");
    });
    let never = AddressWatch::begin(&namespace.path()).expect("watched");
    drop(theirs);
    never
        .wait(mine.as_fd())
        .expect("nobody is left to take one");
}

#[test]
fn a_damaged_record_is_refused() {
    let damaged = Addresses {
        addresses: vec!["zz".to_owned()],
        ..Addresses::default()
    };
    let error = put_back(Path::new("/proc/self/ns/net"), &damaged).expect_err("refused");
    assert!(matches!(error, Error::BadRecord(_)));
}

#[test]
fn a_record_tells_the_pods_own_addresses() {
    let namespace = Namespace::with_addresses();
    let kept = read(&namespace.path()).expect("read");
    let ips: Vec<String> = kept
        .ips()
        .expect("read")
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(ips, ["10.201.3.4", "fd00:201::4"]);
}

#[test]
fn the_hosts_end_of_a_pods_link_is_found() {
    let (host, pod) = (Namespace::empty("host"), Namespace::empty("pod"));
    let (h, p) = (host.name(), pod.name());
    // Indexes alone would mislead: the host has other pairs, and so have other pods.
    sh(&format!(
        "ip -n {h} link add other0 type veth peer name other1
         ip link add eth0 netns {p} address 02:00:00:0a:0b:0c type veth peer name pod0 netns {h}"
    ));
    let found: Vec<Pair> = within(&host.path(), || pairs(&pod.path())).expect("found");
    let index = |namespace: &str, link: &str| {
        let index = sh(&format!(
            "ip netns exec {namespace} cat /sys/class/net/{link}/ifindex"
        ));
        index.trim().parse::<u32>().expect("an index")
    };
    let expected = Pair {
        pod: index(p, "eth0"),
        host: index(h, "pod0"),
        pod_address: [2, 0, 0, 0x0a, 0x0b, 0x0c],
        is_bypassed: false,
    };
    assert_eq!(found, [expected]);
    let none: Vec<Pair> = within(&pod.path(), || pairs(&pod.path())).expect("looked");
    assert!(none.is_empty(), "{none:?}");
}

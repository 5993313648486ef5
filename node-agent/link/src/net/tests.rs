use std::os::fd::AsFd;

use torpor_test_namespace::{Namespace, sh};

use super::*;

fn show(namespace: &Namespace) -> String {
    let name = namespace.name();
    sh(&format!(
        "ip -n {name} -o addr show dev eth0 scope global | awk '{{print $3, $4}}' | sort
         ip -n {name} route show; ip -n {name} -6 route show default | sed 's/ pref.*//'
         ip -n {name} neigh show nud permanent"
    ))
}

/// Needs root and iproute2, as the development cluster does.
#[test]
fn addresses_that_runsc_removed_are_put_back_and_a_repetition_changes_nothing() {
    let namespace = Namespace::with_addresses();
    let before = show(&namespace);
    let kept = read(&namespace.path()).expect("read");
    // runsc removes the addresses, and the kernel with them the routes and the neighbours.
    sh(&format!(
        "ip -n {} addr flush dev eth0 scope global",
        namespace.name()
    ));
    assert_ne!(show(&namespace), before);

    put_back(&namespace.path(), &kept).expect("put back");
    assert_eq!(show(&namespace), before);
    put_back(&namespace.path(), &kept).expect("put back again");
    assert_eq!(show(&namespace), before);
    assert_eq!(read(&namespace.path()).expect("read"), kept);
}

#[test]
fn a_route_behind_the_gateway_is_put_back() {
    let namespace = Namespace::with_addresses();
    let name = namespace.name();
    // The routes of the CNI plugin ptp.
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
fn a_watch_ends_when_an_address_is_removed_or_its_remover_ends() {
    let namespace = Namespace::with_addresses();
    let removal = AddressWatch::begin(&namespace.path()).expect("watched");
    let (near, far) = std::os::unix::net::UnixStream::pair().expect("a pair");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| removal.wait(near.as_fd()));
        let name = namespace.name();
        sh(&format!("ip -n {name} addr add 10.203.0.1/24 dev eth0"));
        assert!(!waiting.is_finished(), "one was added");
        sh(&format!("ip -n {name} addr del 10.203.0.1/24 dev eth0"));
        waiting.join().expect("no panic").expect("told");
    });
    let no_removal = AddressWatch::begin(&namespace.path()).expect("watched");
    drop(far);
    no_removal
        .wait(near.as_fd())
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
fn a_record_has_the_pods_own_addresses() {
    let namespace = Namespace::with_addresses();
    let kept = read(&namespace.path()).expect("read");
    let ips: Vec<String> = ips(&kept)
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
    // Equal indexes exist elsewhere: the host has other pairs, and so have other pods.
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

use super::*;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use torpor_test_namespace::{Namespace, sh};

/// A network namespace with nothing but a loopback that is up.
struct LoopbackNamespace(Namespace);

impl LoopbackNamespace {
    fn new() -> Self {
        let namespace = Namespace::empty("lo");
        sh(&format!("ip -n {} link set lo up", namespace.name()));
        Self(namespace)
    }

    fn path(&self) -> PathBuf {
        self.0.path()
    }

    fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        within::<T, net::Error>(&self.path(), || Ok(work())).expect("in the namespace")
    }

    fn dial(&self, address: &str) -> std::io::Result<TcpStream> {
        let address: SocketAddr = address.parse().expect("an address");
        self.within(|| TcpStream::connect(address))
    }
}

fn refused(dialled: std::io::Result<TcpStream>) {
    let error = dialled.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
}

/// Dials until the connection is refused, for at most 10 s.
///
/// The refusal comes once a descriptor of this test is closed. A child that another test starts at
/// this moment has a copy of it until it executes its program.
fn refused_at_last(mut dial: impl FnMut() -> std::io::Result<TcpStream>) {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match dial() {
            Ok(_) if Instant::now() < deadline => std::thread::yield_now(),
            dialled => return refused(dialled),
        }
    }
}

/// Returns a copy of the listener, to accept the connections that wait.
fn listener(loopback: &Loopback) -> TcpListener {
    let copy = loopback.listener.try_clone().expect("a copy");
    TcpListener::from(copy)
}

#[test]
fn every_port_of_the_loopback_arrives_with_its_number() {
    let namespace = LoopbackNamespace::new();
    refused(namespace.dial("127.0.0.1:8080"));
    let loopback = open(&namespace.path()).expect("open");
    for address in ["127.0.0.1:1", "127.0.0.1:8080", "127.9.9.9:65535"] {
        let mut client = namespace.dial(address).expect("a connection");
        let (mut accepted, peer) = listener(&loopback).accept().expect("accepted");
        let dialled = accepted.local_addr().expect("an address");
        assert_eq!(dialled.to_string(), address);
        assert_eq!(peer, client.local_addr().expect("an address"));
        // Bytes go both ways.
        client.write_all(b"question").expect("written");
        let mut bytes = [0; 8];
        accepted.read_exact(&mut bytes).expect("read");
        assert_eq!(&bytes, b"question");
        accepted.write_all(b"answered").expect("written");
        client.read_exact(&mut bytes).expect("read");
        assert_eq!(&bytes, b"answered");
    }
    let error = listener(&loopback).accept().expect_err("nobody waits");
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
}

#[test]
fn other_namespaces_addresses_and_ipv6_are_left_alone() {
    let (namespace, other) = (LoopbackNamespace::new(), LoopbackNamespace::new());
    let name = namespace.0.name();
    sh(&format!("ip -n {name} addr add 10.201.9.9/32 dev lo"));
    let _loopback = open(&namespace.path()).expect("open");
    refused(other.dial("127.0.0.1:8080"));
    refused(namespace.dial("10.201.9.9:8080"));
    refused(namespace.dial("[::1]:8080"));
    // A listener of another process on an address that is not the loopback's is reached.
    let own = namespace.within(|| TcpListener::bind("10.201.9.9:8080").expect("a listener"));
    drop(namespace.dial("10.201.9.9:8080").expect("a connection"));
    own.accept().expect("accepted");
}

#[test]
fn the_namespace_is_as_before_once_no_process_holds_the_link() {
    let namespace = LoopbackNamespace::new();
    let Loopback { listener, link } = open(&namespace.path()).expect("open");
    drop(namespace.dial("127.0.0.1:8080").expect("a connection"));
    drop(link);
    refused_at_last(|| namespace.dial("127.0.0.1:8080"));
    drop(listener);
    // The loopback can be taken again, by one process or by several at a time.
    let _first = open(&namespace.path()).expect("open");
    let _second = open(&namespace.path()).expect("open");
    drop(namespace.dial("127.0.0.1:8080").expect("a connection"));
}

#[test]
fn a_listener_that_is_gone_means_that_connections_are_refused() {
    let namespace = LoopbackNamespace::new();
    let Loopback { listener, link } = open(&namespace.path()).expect("open");
    drop(listener);
    refused_at_last(|| namespace.dial("127.0.0.1:8080"));
    drop(link);
}

#[test]
fn a_namespace_that_is_not_there_is_named() {
    let error = open(Path::new("/run/netns/torpor-no-such")).expect_err("not there");
    assert!(error.to_string().contains("torpor-no-such"), "{error}");
}

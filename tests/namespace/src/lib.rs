//! For tests: network namespaces, made by iproute2. They need root.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Runs a script with `sh -e`; returns what it writes to stdout.
///
/// # Panics
/// The script fails.
pub fn sh(script: &str) -> String {
    let output = Command::new("sh")
        .args(["-ec", script])
        .output()
        .expect("sh runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {errors}");
    String::from_utf8(output.stdout).expect("text")
}

/// A network namespace. Dropping it removes the namespace.
#[derive(Debug)]
pub struct Namespace(String);

impl Namespace {
    /// Makes a namespace without links but a loopback that is down; `purpose` is part of its name.
    pub fn empty(purpose: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("torpor-{purpose}-{}-{number}", std::process::id());
        sh(&format!("ip netns add {name}"));
        Self(name)
    }

    /// Makes a namespace with a veth pair, and on eth0 the addresses and routes that a CNI bridge
    /// plugin sets. The gateway is a permanent neighbour, as one that answers no ARP needs (EKS).
    pub fn with_addresses() -> Self {
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

    /// The name that `ip -n` takes.
    pub fn name(&self) -> &str {
        &self.0
    }

    /// The file that stands for the namespace (ip-netns(8)).
    pub fn path(&self) -> PathBuf {
        format!("/run/netns/{}", self.0).into()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        sh(&format!("ip netns del {}", self.0));
    }
}

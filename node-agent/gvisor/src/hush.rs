//! Silence while a sandbox wakes.
//!
//! From the moment its address is back until its connections are, others stand in for it: the host's kernel, then gVisor's
//! network stack before the image is in it. Neither knows the connections, and both answer their packets with resets. So
//! what the pod's links receive meanwhile is dropped before either sees it; TCP sends it again.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use crate::bpf::{self, Hook};
use crate::net::{self, within};

/// Why a pod's links cannot be silenced.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Namespace(#[from] net::Error),
    #[error("cannot drop what the pod's links receive (Linux 5.9 or later can)")]
    Drop(#[from] bpf::Error),
}

/// The links receive nothing until this is dropped, or its process has ended.
#[derive(Debug)]
pub struct Hush {
    /// Each keeps the program attached to one link.
    _links: Vec<OwnedFd>,
}

impl Hush {
    /// Silences the links, loopback aside, of the network namespace at `path`.
    pub fn begin(path: &Path) -> Result<Self, Error> {
        within(path, || {
            const DROP: i32 = 1;
            let code = [bpf::set(bpf::Register::R0, DROP), bpf::exit()];
            let program = bpf::load(Hook::Received, &code)?;
            let links = net::link_indexes()?
                .into_iter()
                .map(|link| bpf::attach_to_link(Hook::Received, program.as_fd(), link))
                .collect::<Result<_, _>>()?;
            Ok(Self { _links: links })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::tests::{Namespace, sh};

    /// Needs root and iproute2, as the development cluster does.
    #[test]
    fn a_silenced_link_receives_nothing_until_the_silence_is_over() {
        let (near, far) = (Namespace::empty("near"), Namespace::empty("far"));
        let (a, b) = (near.name(), far.name());
        sh(&format!(
            "ip link add eth0 netns {a} type veth peer name eth0 netns {b}
             for n in {a} {b}; do ip -n $n link set eth0 up; ip netns exec $n sysctl -qw net.ipv4.icmp_echo_ignore_all=0; done
             ip -n {a} addr add 10.202.0.1/24 dev eth0; ip -n {b} addr add 10.202.0.2/24 dev eth0"
        ));
        // A connection to a closed port is answered by a reset at once, if it is answered.
        let is_answered = || {
            within(&near.path(), || {
                let address = std::net::SocketAddr::from(([10, 202, 0, 2], 9));
                let limit = std::time::Duration::from_millis(500);
                let error = std::net::TcpStream::connect_timeout(&address, limit);
                Ok::<_, net::Error>(
                    error.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionRefused),
                )
            })
        };
        assert!(is_answered().expect("asked"));
        let hush = Hush::begin(&far.path()).expect("silenced");
        assert!(!is_answered().expect("asked"));
        drop(hush);
        assert!(is_answered().expect("asked"));
    }
}

//! Silence while a sandbox is saved, sleeps and wakes.
//!
//! From the moment its memory is written until its connections are back, others stand in for it: its paused self, whose
//! later words are in no image, then the host's kernel, then gVisor's network stack before the image is in it. None of
//! them knows what the sandbox will know, and the last two answer packets of its connections with resets. So what the
//! pod's links receive meanwhile is dropped before any of them sees it. Who listens at the other end of the link (see
//! `torpor-wake`) can give it back later; without that, TCP sends it again.
//!
//! Who silences the links may be heard all the same, by an address that nobody else knows ([`Sender`]).
//!
//! ARP and neighbour discovery go through: whoever has the address at the time answers them.

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
    Drop(#[source] bpf::Error),
    /// By another process, or by somebody else's XDP program.
    #[error("the pod's links are silenced already")]
    Already,
}

impl From<bpf::Error> for Error {
    fn from(error: bpf::Error) -> Self {
        match error {
            bpf::Error::Taken => Self::Already,
            error => Self::Drop(error),
        }
    }
}

/// The links receive nothing but ARP and neighbour discovery until this is dropped, or its process has ended.
#[derive(Debug)]
pub struct Hush {
    /// Each keeps the program attached to one link.
    _links: Vec<OwnedFd>,
}

impl Hush {
    /// Silences the links, loopback aside, of the network namespace at `path`, for all but frames of the sender `known`.
    pub fn begin(path: &Path, known: Option<Sender>) -> Result<Self, Error> {
        within(path, || {
            let program = bpf::load(Hook::Received, &program(known))?;
            let links = net::link_indexes()?
                .into_iter()
                .map(|link| bpf::attach_to_link(Hook::Received, program.as_fd(), link))
                .collect::<Result<_, _>>()?;
            Ok(Self { _links: links })
        })
    }
}

/// An Ethernet address that nobody else has: who silences a link sends from it what is to be heard all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sender([u8; 6]);

impl Sender {
    /// A new one, not to be guessed: locally administered, of one station (IEEE 802, the two lowest bits of the first byte).
    pub fn random() -> Self {
        use std::hash::{BuildHasher, RandomState};
        // Its keys are the kernel's random numbers.
        let [first, b, c, d, e, f, _, _] = RandomState::new().hash_one(()).to_ne_bytes();
        Self([first & 0xfc | 0x02, b, c, d, e, f])
    }

    pub fn address(&self) -> [u8; 6] {
        self.0
    }
}

/// Offsets in the kernel's `struct xdp_md`.
mod received {
    pub(super) const BEGIN: i16 = 0;
    pub(super) const END: i16 = 4;
}

/// Offsets in a frame, and what is looked for there.
mod frame {
    pub(super) const SENDER: i16 = 6;
    pub(super) const ETHER_TYPE: i16 = 12;
    pub(super) const ETHERNET: i32 = 14;
    pub(super) const IPV6_NEXT: i16 = 14 + 6;
    pub(super) const ICMPV6_TYPE: i16 = 14 + 40;
    pub(super) const ARP: u16 = 0x0806;
    pub(super) const IPV6: u16 = 0x86dd;
    pub(super) const ICMPV6: i32 = 58;
    /// Router and neighbour solicitation and advertisement, redirect (RFC 4861).
    pub(super) const NEIGHBOUR_FIRST: i32 = 133;
    pub(super) const NEIGHBOUR_LAST: i32 = 137;
}

/// Where the program leaves for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Label {
    Stranger,
    Pass,
    Drop,
}

fn program(known: Option<Sender>) -> Vec<bpf::Instruction> {
    use bpf::Register::{R0, R1, R2, R3, R4, R5};
    use bpf::{add, copy, exit, jump_if, jump_if_greater, jump_if_greater_than, jump_if_less};
    use bpf::{jump_if_not, jump32_if_not, load8, load16, load32, set};

    const DROP: i32 = 1;
    const PASS: i32 = 2;
    let mut code = bpf::Code::new();
    code.push(load32(R2, R1, received::BEGIN));
    code.push(load32(R3, R1, received::END));
    code.extend([copy(R4, R2), add(R4, frame::ETHERNET)]);
    code.jump(jump_if_greater_than(R4, R3), Label::Drop);
    if let Some(Sender([a, b, c, d, e, f])) = known {
        code.push(load32(R5, R2, frame::SENDER));
        let first = i32::from_ne_bytes([a, b, c, d]);
        code.jump(jump32_if_not(R5, first), Label::Stranger);
        code.push(load16(R5, R2, frame::SENDER + 4));
        let last = i32::from(u16::from_ne_bytes([e, f]));
        code.jump(jump_if(R5, last), Label::Pass);
        code.label(Label::Stranger);
    }
    code.push(load16(R5, R2, frame::ETHER_TYPE));
    code.jump(jump_if(R5, i32::from(frame::ARP.to_be())), Label::Pass);
    code.jump(jump_if_not(R5, i32::from(frame::IPV6.to_be())), Label::Drop);
    code.extend([copy(R4, R2), add(R4, i32::from(frame::ICMPV6_TYPE) + 1)]);
    code.jump(jump_if_greater_than(R4, R3), Label::Drop);
    code.push(load8(R5, R2, frame::IPV6_NEXT));
    code.jump(jump_if_not(R5, frame::ICMPV6), Label::Drop);
    code.push(load8(R5, R2, frame::ICMPV6_TYPE));
    code.jump(jump_if_less(R5, frame::NEIGHBOUR_FIRST), Label::Drop);
    code.jump(jump_if_greater(R5, frame::NEIGHBOUR_LAST), Label::Drop);
    for (label, verdict) in [(Label::Pass, PASS), (Label::Drop, DROP)] {
        code.label(label);
        code.extend([set(R0, verdict), exit()]);
    }
    code.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::tests::{Namespace, sh};

    /// Needs root and iproute2, as the development cluster does.
    #[test]
    fn a_silenced_link_receives_nothing_but_questions_for_its_address() {
        let (near, far) = (Namespace::empty("near"), Namespace::empty("far"));
        let (a, b) = (near.name(), far.name());
        sh(&format!(
            "ip link add eth0 netns {a} type veth peer name eth0 netns {b}
             for n in {a} {b}; do ip -n $n link set eth0 up; ip netns exec $n sysctl -qw net.ipv4.icmp_echo_ignore_all=0; done
             ip -n {a} addr add 10.202.0.1/24 dev eth0; ip -n {b} addr add 10.202.0.2/24 dev eth0
             ip -n {a} addr add fd02::1/64 dev eth0 nodad; ip -n {b} addr add fd02::2/64 dev eth0 nodad"
        ));
        // A connection to a closed port is answered by a reset at once, if it is answered.
        let is_answered = |address: &str| {
            let address: std::net::SocketAddr = address.parse().expect("an address");
            within(&near.path(), || {
                let limit = std::time::Duration::from_millis(500);
                let error = std::net::TcpStream::connect_timeout(&address, limit);
                Ok::<_, net::Error>(
                    error.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionRefused),
                )
            })
            .expect("asked")
        };
        let known = Sender([2, 0, 0, 0x7f, 0x80, 0xff]);
        let hush = Hush::begin(&far.path(), Some(known)).expect("silenced");
        assert!(matches!(
            Hush::begin(&far.path(), None),
            Err(Error::Already)
        ));
        assert!(!is_answered("10.202.0.2:9") && !is_answered("[fd02::2]:9"));
        // The silence has not kept anybody from learning where the addresses are.
        let neighbours = sh(&format!("ip -n {a} neighbour"));
        for address in ["10.202.0.2", "fd02::2"] {
            let known = neighbours
                .lines()
                .any(|line| line.starts_with(address) && line.contains("lladdr"));
            assert!(known, "{address} in {neighbours}");
        }
        let moves_to = |address: &str| {
            sh(&format!(
                "ip -n {a} link set eth0 address {address}; ip -n {b} neigh flush dev eth0"
            ));
        };
        moves_to("02:00:00:7f:80:ff");
        assert!(
            is_answered("10.202.0.2:9") && is_answered("[fd02::2]:9"),
            "a known sender"
        );
        moves_to("02:00:00:7f:80:fe");
        assert!(!is_answered("10.202.0.2:9"), "a stranger");
        drop(hush);
        assert!(is_answered("10.202.0.2:9") && is_answered("[fd02::2]:9"));
    }
}

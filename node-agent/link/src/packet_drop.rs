//! Drops a pod's packets while its sandbox is saved, sleeps and wakes.
//!
//! **Received packets** ([`PacketDrop`]). From the moment the sandbox's memory is written until its
//! connections are back, other network stacks have its addresses: first the paused sandbox, whose
//! later packets are in no image, then the host's kernel, then gVisor's network stack before the
//! image is in it. None of them has the state that the sandbox will have. The last two answer
//! packets of its connections with resets. A program therefore drops what the pod's links receive,
//! before any of the stacks reads it. A process that listens at the other end of the link (see
//! [`crate::tap`]) can hand the packets over later. Without such a process, TCP sends them again.
//!
//! **Sent packets** ([`EgressHold`]). gVisor cannot be restored in a paused state, so its programs
//! run for a moment before the record exists that their image is stale. Another program therefore
//! drops what the sandbox sends while it is restored.
//!
//! Two kinds of frames pass: frames of one secret Ethernet address ([`Sender`]), and ARP and
//! neighbour discovery. The stack that has the pod's address at the time answers the latter.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use crate::bpf::{self, Hook};
use crate::net::{self, Pair, within};

/// Why packets of a pod's links cannot be dropped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Namespace(#[from] net::Error),
    #[error("cannot drop the packets that the pod's links receive (needs Linux 5.9 or later)")]
    Drop(#[source] bpf::Error),
    /// Another process, or a foreign XDP program.
    #[error("a program on the pod's links drops received packets already")]
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

/// A drop of all packets that a pod's links receive, except ARP and neighbour discovery.
///
/// The drop ends when [`PacketDrop::open`] is called, or when no process has its links any more.
#[derive(Debug)]
pub struct PacketDrop {
    /// Each keeps the program attached to one link.
    links: Vec<OwnedFd>,
    gate: Gate,
}

/// A flag that ends a program's drop at once.
///
/// To detach a program from its link takes long where many processes do so at the same time: each
/// waits for the kernel's one lock for such changes, and for a grace period of its RCU.
#[derive(Debug)]
struct Gate(OwnedFd);

impl Gate {
    fn shut() -> Result<Self, bpf::Error> {
        bpf::flag_map().map(Self)
    }

    /// Opens the gate. If that fails, the drop ends when its program is detached.
    fn open(&self) {
        let _ = bpf::raise_flag(self.0.as_fd());
    }
}

impl PacketDrop {
    /// Begins to drop what the links, loopback aside, of the network namespace at `path` receive.
    ///
    /// Frames of the sender `allowed` pass.
    pub fn begin(path: &Path, allowed: Option<Sender>) -> Result<Self, Error> {
        within(path, || {
            let allowed = allowed.map(Allowed::Unchanged);
            let gate = Gate::shut()?;
            let program = bpf::load(Hook::Received, &program(allowed, &gate))?;
            let links = net::link_indexes()?
                .into_iter()
                .map(|link| bpf::attach_to_link(Hook::Received, program.as_fd(), link))
                .collect::<Result<_, _>>()?;
            Ok(Self { links, gate })
        })
    }

    /// Ends the drop, even if another process keeps copies of [`PacketDrop::links`].
    pub fn open(&self) {
        self.gate.open();
    }

    /// Returns the descriptors that keep the program attached. A process with copies of them keeps
    /// it attached, too.
    pub fn links(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.links.iter().map(AsFd::as_fd)
    }
}

/// A drop of all packets that a pod's links send, on the host's side; except ARP and neighbour
/// discovery.
///
/// The drop ends when [`EgressHold::open`] is called, or when no process has its links any more.
#[derive(Debug)]
pub struct EgressHold {
    /// Each keeps the program attached to one link.
    links: Vec<OwnedFd>,
    gate: Gate,
}

impl EgressHold {
    /// Begins to drop what the pod's ends of the links send.
    ///
    /// The host's ends are in the calling thread's network namespace. Frames of the sender
    /// `allowed` arrive as if the pod's end had sent them.
    pub fn begin(pairs: &[Pair], allowed: Sender) -> Result<Self, Error> {
        let gate = Gate::shut()?;
        let links = pairs.iter().map(|pair| {
            let allowed = Allowed::Replaced(allowed, pair.pod_address);
            let program = bpf::load(Hook::Received, &program(Some(allowed), &gate))?;
            Ok(bpf::attach_to_link(
                Hook::Received,
                program.as_fd(),
                pair.host,
            )?)
        });
        let links = links.collect::<Result<_, Error>>()?;
        Ok(Self { links, gate })
    }

    /// Ends the drop, even if another process keeps copies of [`EgressHold::links`].
    pub fn open(&self) {
        self.gate.open();
    }

    /// Returns the descriptors that keep the program attached. A process with copies of them keeps
    /// it attached, too.
    pub fn links(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.links.iter().map(AsFd::as_fd)
    }

    /// Reports whether a frame (an Ethernet header and what follows) passes a link that is held.
    pub fn lets_pass(ethernet: &[u8]) -> bool {
        let at = |offset: i16| ethernet.get(usize::try_from(offset).unwrap_or(usize::MAX));
        let kind = at(frame::ETHER_TYPE).zip(at(frame::ETHER_TYPE + 1));
        match kind.map(|(high, low)| u16::from_be_bytes([*high, *low])) {
            Some(frame::ARP) => true,
            Some(frame::IPV6)
                if at(frame::IPV6_NEXT).copied().map(i32::from) == Some(frame::ICMPV6) =>
            {
                let kinds = frame::NEIGHBOUR_FIRST..=frame::NEIGHBOUR_LAST;
                at(frame::ICMPV6_TYPE).is_some_and(|kind| kinds.contains(&i32::from(*kind)))
            }
            _ => false,
        }
    }
}

/// The sender whose frames pass.
#[derive(Debug, Clone, Copy)]
enum Allowed {
    Unchanged(Sender),
    /// The program replaces the frame's source address by this one.
    Replaced(Sender, [u8; 6]),
}

/// An Ethernet address that no other station has. The process that holds a link sends from it the
/// frames that are to pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sender([u8; 6]);

impl Sender {
    /// Returns a new address that cannot be guessed: locally administered, of one station
    /// (IEEE 802, the two lowest bits of the first byte).
    pub fn random() -> Self {
        use std::hash::{BuildHasher, RandomState};
        // The keys of a `RandomState` are the kernel's random numbers.
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

/// Offsets in a frame, and values there.
mod frame {
    pub(super) const SENDER: i16 = 6;
    pub(super) const ETHER_TYPE: i16 = 12;
    pub(super) const ETHERNET: i32 = 14;
    pub(super) const IPV6_NEXT: i16 = 14 + 6;
    pub(super) const ICMPV6_TYPE: i16 = 14 + 40;
    pub(super) const ARP: u16 = 0x0806;
    pub(super) const IPV6: u16 = 0x86dd;
    pub(super) const ICMPV6: i32 = 58;
    /// Types of router and neighbour solicitation and advertisement, and redirect (RFC 4861).
    pub(super) const NEIGHBOUR_FIRST: i32 = 133;
    pub(super) const NEIGHBOUR_LAST: i32 = 137;
}

/// Jump targets of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Label {
    OtherSender,
    Allowed,
    Pass,
    Drop,
}

/// Returns an address as the two numbers that the program compares and stores.
fn halves([a, b, c, d, e, f]: [u8; 6]) -> (i32, i32) {
    let last = u16::from_ne_bytes([e, f]);
    (i32::from_ne_bytes([a, b, c, d]), i32::from(last))
}

fn program(allowed: Option<Allowed>, gate: &Gate) -> Vec<bpf::Instruction> {
    use bpf::Register::{R0, R1, R2, R3, R4, R5};
    use bpf::{
        add, copy, exit, jump, jump_if, jump_if_greater, jump_if_greater_than, jump_if_less,
    };
    use bpf::{jump_if_not, jump32_if_not, load8, load16, load32, set, set_map_value};
    use bpf::{store16, store32};

    const DROP: i32 = 1;
    const PASS: i32 = 2;
    let mut code = bpf::Code::new();
    code.push(load32(R2, R1, received::BEGIN));
    code.push(load32(R3, R1, received::END));
    code.extend([copy(R4, R2), add(R4, frame::ETHERNET)]);
    code.jump(jump_if_greater_than(R4, R3), Label::Drop);
    if let Some(Allowed::Unchanged(sender) | Allowed::Replaced(sender, _)) = allowed {
        let (first, last) = halves(sender.address());
        code.push(load32(R5, R2, frame::SENDER));
        code.jump(jump32_if_not(R5, first), Label::OtherSender);
        code.push(load16(R5, R2, frame::SENDER + 4));
        code.jump(jump_if(R5, last), Label::Allowed);
        code.label(Label::OtherSender);
    }
    code.extend(set_map_value(R4, gate.0.as_raw_fd()));
    code.push(load32(R5, R4, 0));
    code.jump(jump_if_not(R5, 0), Label::Pass);
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
    code.jump(jump(), Label::Pass);
    code.label(Label::Allowed);
    if let Some(Allowed::Replaced(_, address)) = allowed {
        let (first, last) = halves(address);
        code.push(store32(R2, frame::SENDER, first));
        code.push(store16(R2, frame::SENDER + 4, last));
    }
    for (label, verdict) in [(Label::Pass, PASS), (Label::Drop, DROP)] {
        code.label(label);
        code.extend([set(R0, verdict), exit()]);
    }
    code.finish()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use torpor_test_namespace::{Namespace, sh};

    /// If a peer answers, a closed port resets a connection within this time.
    const AT_ONCE: Duration = Duration::from_millis(500);
    /// The kernel repeats a lost question after a second.
    const AFTER_REPETITION: Duration = Duration::from_secs(5);

    /// Reports whether a connection from the namespace to the address is refused, and so answered.
    fn answers(from: &Namespace, address: &str, limit: Duration) -> bool {
        let address: std::net::SocketAddr = address.parse().expect("an address");
        within(&from.path(), || {
            let error = std::net::TcpStream::connect_timeout(&address, limit);
            Ok::<_, net::Error>(
                error.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionRefused),
            )
        })
        .expect("asked")
    }

    /// Needs root and iproute2, as the development cluster does.
    #[test]
    fn a_packet_drop_lets_only_the_allowed_sender_and_address_resolution_pass() {
        let (near, far) = (Namespace::empty("near"), Namespace::empty("far"));
        let (a, b) = (near.name(), far.name());
        sh(&format!(
            "ip link add eth0 netns {a} type veth peer name eth0 netns {b}
             for n in {a} {b}; do ip -n $n link set eth0 up; ip netns exec $n sysctl -qw net.ipv4.icmp_echo_ignore_all=0; done
             ip -n {a} addr add 10.202.0.1/24 dev eth0; ip -n {b} addr add 10.202.0.2/24 dev eth0
             ip -n {a} addr add fd02::1/64 dev eth0 nodad; ip -n {b} addr add fd02::2/64 dev eth0 nodad"
        ));
        let is_answered = |address: &str| answers(&near, address, AFTER_REPETITION);
        let is_silent = |address: &str| !answers(&near, address, AT_ONCE);
        let allowed = Sender([2, 0, 0, 0x7f, 0x80, 0xff]);
        let packet_drop = PacketDrop::begin(&far.path(), Some(allowed)).expect("silenced");
        assert!(matches!(
            PacketDrop::begin(&far.path(), None),
            Err(Error::Already)
        ));
        assert!(is_silent("10.202.0.2:9") && is_silent("[fd02::2]:9"));
        // The drop lets address resolution pass.
        let neighbours = sh(&format!("ip -n {a} neighbour"));
        for address in ["10.202.0.2", "fd02::2"] {
            let is_resolved = neighbours
                .lines()
                .any(|line| line.starts_with(address) && line.contains("lladdr"));
            assert!(is_resolved, "{address} in {neighbours}");
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
        assert!(is_silent("10.202.0.2:9"), "a stranger");
        packet_drop.open();
        assert!(is_answered("10.202.0.2:9") && is_answered("[fd02::2]:9"));
        drop(packet_drop);
        assert!(is_answered("10.202.0.2:9") && is_answered("[fd02::2]:9"));
    }

    #[test]
    fn an_egress_hold_lets_only_the_allowed_sender_and_address_resolution_pass() {
        let (pod, host) = (Namespace::empty("muted"), Namespace::empty("hears"));
        let (p, h) = (pod.name(), host.name());
        sh(&format!(
            "ip link add eth0 netns {p} address 02:00:00:00:00:07 type veth peer name eth0 netns {h}
             for n in {p} {h}; do ip -n $n link set eth0 up; done
             ip -n {p} addr add 10.203.0.1/24 dev eth0; ip -n {h} addr add 10.203.0.2/24 dev eth0
             ip -n {p} addr add fd03::1/64 dev eth0 nodad; ip -n {h} addr add fd03::2/64 dev eth0 nodad"
        ));
        let is_answered = |address: &str| answers(&pod, address, AFTER_REPETITION);
        let is_silent = |address: &str| !answers(&pod, address, AT_ONCE);
        let allowed = Sender([2, 0, 0, 0x7f, 0x80, 0xff]);
        let pairs = within(&host.path(), || net::pairs(&pod.path())).expect("pairs");
        let addresses: Vec<_> = pairs.iter().map(|pair| pair.pod_address).collect();
        assert_eq!(addresses, [[2, 0, 0, 0, 0, 7]]);
        let egress_hold =
            within(&host.path(), || EgressHold::begin(&pairs, allowed)).expect("muted");
        assert!(is_silent("10.203.0.2:9") && is_silent("[fd03::2]:9"));
        let neighbours = sh(&format!("ip -n {p} neighbour"));
        for address in ["10.203.0.2", "fd03::2"] {
            let is_resolved = neighbours
                .lines()
                .any(|line| line.starts_with(address) && line.contains("lladdr"));
            assert!(is_resolved, "{address} in {neighbours}");
        }
        // The answer goes to the address of the allowed sender, which is now the link's.
        sh(&format!(
            "ip -n {h} neigh replace 10.203.0.1 lladdr 02:00:00:7f:80:ff dev eth0
             ip -n {p} link set eth0 address 02:00:00:7f:80:ff"
        ));
        assert!(is_answered("10.203.0.2:9"), "a known sender");
        sh(&format!(
            "ip -n {p} link set eth0 address 02:00:00:00:00:07; ip -n {h} neigh del 10.203.0.1 dev eth0; ip -n {h} neigh flush dev eth0"
        ));
        assert!(is_silent("10.203.0.2:9"), "a stranger again");
        egress_hold.open();
        assert!(is_answered("10.203.0.2:9") && is_answered("[fd03::2]:9"));
        drop(egress_hold);
        assert!(is_answered("10.203.0.2:9") && is_answered("[fd03::2]:9"));
    }

    #[test]
    fn an_egress_hold_lets_only_arp_and_neighbour_discovery_pass() {
        let frame = |kind: u16, next: u8, message: u8| {
            let mut frame = vec![0; 64];
            frame[12..14].copy_from_slice(&kind.to_be_bytes());
            frame[20] = next;
            frame[54] = message;
            frame
        };
        for (frame, passes) in [
            (frame(frame::ARP, 0, 0), true),
            (frame(0x0800, 17, 135), false),
            (frame(frame::IPV6, 58, 132), false),
            (frame(frame::IPV6, 58, 133), true),
            (frame(frame::IPV6, 58, 137), true),
            (frame(frame::IPV6, 58, 138), false),
            (frame(frame::IPV6, 6, 135), false),
            (frame(frame::IPV6, 58, 135)[..54].to_vec(), false),
            (vec![8, 6], false),
            (vec![], false),
        ] {
            assert_eq!(EgressHold::lets_pass(&frame), passes, "{frame:?}");
        }
    }
}

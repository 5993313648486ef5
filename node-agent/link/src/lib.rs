//! The packets of a pod's link. A sandbox wakes by a packet, and no packet is lost while it sleeps.
//!
//! While a sandbox runs, BPF programs record the times of its packets. While it is saved, sleeps or
//! wakes, its keeper holds the frames that arrive and answers some of them. The first packet whose
//! sender wants an answer starts the wake. Once the sandbox runs, it gets all held frames in order.
//!
//! | module | subject |
//! |---|---|
//! | [`net`] | the pod's addresses and routes: read once, put back before each wake |
//! | [`loopback`] | connections to the loopback of the pod's network namespace (BPF) |
//! | [`traffic`] | when a pod last sent or received a packet (BPF) |
//! | [`unacknowledged`] | TCP data of the pod that no peer has acknowledged (BPF) |
//! | [`packet_drop`] | drops packets to or from a pod that sleeps or wakes (BPF) |
//! | [`tap`] | receives and sends frames at the host's end of the pod's link |
//! | [`filter`] | drops packets that are for routers alone |
//! | [`packet`] | what a frame means for a sleeping sandbox (pure) |
//! | [`sensor`] | when to wake, when to retry a wake, which frames to hand over (pure) |
//! | [`held`] | the frames that wait, bounded (pure) |
//! | [`doubt`] | connections of the kubelet that may be a probe or a hook (pure) |
//! | [`owner`] | which process has the socket of a connection: the kubelet or another one |
//! | [`probes`] | answers to the kubelet's probes of a sleeping pod |
//! | [`keepalive`] | answers to the keepalives of peers whose connections sleep (pure) |
//! | [`neighbour`] | ARP and neighbour discovery for a pod's addresses (pure) |
//! | [`question`] | keepalives to peers of a restored sandbox (pure) |
//! | [`reminder`] | acknowledgements of peers for a restored sandbox (pure) |

mod acknowledgement;
mod bpf;
pub mod doubt;
pub mod filter;
pub mod held;
pub mod keepalive;
pub mod loopback;
pub mod neighbour;
pub mod net;
pub mod owner;
pub mod packet;
pub mod packet_drop;
mod packet_socket;
pub mod probes;
pub mod question;
pub mod reminder;
pub mod sensor;
pub mod tap;
pub mod traffic;
pub mod unacknowledged;

//! The packets of a pod's link: what is noted of them while a sandbox runs, held and answered while
//! it sleeps, and what wakes it.
//!
//! What arrives while a sandbox is saved, sleeps or wakes is held. The first packet whose sender
//! wants an answer starts the wake. The sandbox gets all of them in order once it runs.
//!
//! | module | subject |
//! |---|---|
//! | [`net`] | the pod's addresses and routes: read once, put back before each wake |
//! | [`loopback`] | connections to the loopback of the pod's network namespace (BPF) |
//! | [`traffic`] | when a pod last sent or received a packet (BPF) |
//! | [`unacknowledged`] | TCP data of the pod that no peer has acknowledged (BPF) |
//! | [`packet_drop`] | what a waking pod receives or sends before it can answer is dropped (BPF) |
//! | [`tap`] | seeing and sending frames at the host's end of the pod's link |
//! | [`filter`] | packets for routers, which concern no sandbox |
//! | [`packet`] | what a frame means for a sleeping sandbox (pure) |
//! | [`sensor`] | when to wake, when not to try again yet, what to give back (pure) |
//! | [`held`] | the frames that wait, bounded (pure) |
//! | [`doubt`] | connections of the kubelet that may be a probe or a hook (pure) |
//! | [`owner`] | whose socket a connection comes from: the kubelet's, or another's |
//! | [`probes`] | answers to the kubelet's probes of a sleeping pod |
//! | [`keepalive`] | answers to the keepalives of peers whose connections sleep (pure) |
//! | [`neighbour`] | ARP and neighbour discovery for a pod's addresses (pure) |
//! | [`question`] | what peers are asked for a sandbox that was restored (pure) |
//! | [`reminder`] | what a sandbox that was restored is told of its peers (pure) |

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
pub mod probes;
pub mod question;
pub mod reminder;
pub mod sensor;
pub mod tap;
pub mod traffic;
pub mod unacknowledged;

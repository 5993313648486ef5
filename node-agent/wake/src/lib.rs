//! Waking on a packet: what arrives for a pod while its sandbox is saved, sleeps or wakes is held, the first packet that
//! means somebody wants an answer starts the wake, and all of it is given to the sandbox in order once it runs.
//!
//! | module | subject |
//! |---|---|
//! | [`packet`] | what a frame means for a sleeping sandbox (pure) |
//! | [`doubt`] | connections of the kubelet that may be a probe or a hook (pure) |
//! | [`filter`] | what is for routers, and concerns no sandbox |
//! | [`held`] | the frames that wait, bounded (pure) |
//! | [`keepalive`] | answering the keepalives of peers whose connections sleep (pure) |
//! | [`neighbour`] | telling where a pod's addresses are (pure) |
//! | [`owner`] | whose socket it is that connects: the kubelet's, or somebody else's |
//! | [`probes`] | answering the kubelet's probes meanwhile |
//! | [`question`] | what peers are asked for a sandbox that was restored (pure) |
//! | [`reminder`] | what a sandbox that was restored is told of its peers (pure) |
//! | [`sensor`] | when to wake, when not to try again yet, what to give back (pure) |
//! | [`tap`] | seeing and sending frames at the host's end of the pod's link |
//!
//! What a sleeping pod's kernel would answer by itself is silenced by `torpor-gvisor`'s `hush`.

mod acknowledgement;
pub mod doubt;
pub mod filter;
pub mod held;
pub mod keepalive;
pub mod neighbour;
pub mod owner;
pub mod packet;
pub mod probes;
pub mod question;
pub mod reminder;
pub mod sensor;
pub mod tap;

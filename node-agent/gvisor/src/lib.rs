//! The gVisor driver: everything that knows how a pod lives inside `runsc`.
//!
//! One pod is one gVisor sandbox. The pause container is the sandbox's root container, every other container of the
//! pod is a sub-container of it. This crate holds the mechanics, and no decision: what is to happen is planned in
//! `torpor-core`, or asked for by containerd through `torpor-oci`.
//!
//! | module | subject |
//! |---|---|
//! | [`config`] | where things lie on this node (`torpor-oci.json`) |
//! | [`control`] | the sandbox's control socket: pause, resume, checkpoint, wait, signal |
//! | [`runsc`] | the commands: create, start, restore, exec, delete |
//! | [`spec`] | what is changed in an OCI spec before runsc sees it, and its digest |
//! | [`record`] | what is known of a pod on this node, under `/run/torpor` |
//! | [`root`] | the pause container's root file system |
//! | [`loopback`] | connections to the loopback of the pod's network namespace |
//! | [`net`] | the pod's addresses and routes: read once, put back before each wake |
//! | [`exec`] | an OCI process in gVisor's words |
//! | [`expedite`] | settings of the kernel for the moment of a wake |
//! | [`forward`] | who forwards a connection into a sandbox, and how a save ends it |
//! | [`halt`] | stopping the host's processes of a sandbox that dozes |
//! | [`hearing`] | the packet sockets of a sandbox' network stack |
//! | [`hush`] | what a waking pod receives before it can answer is dropped |
//! | [`keeper`] | talking to a keeper over its socket |
//! | [`probe`] | what this node's runsc can do; its fingerprint |
//! | [`pause`] | pausing exactly once |
//! | [`traffic`] | when a pod last sent or received a packet |
//! | [`resume`] | letting a sandbox that stands still run on |
//! | [`sentry`] | the first process of a restored sandbox |
//! | [`save`] | reading a sandbox' memory into an image |
//! | [`turns`] | how many sandboxes are restored at once |
//! | [`unacknowledged`] | what a pod has said over TCP and nobody has acknowledged |

mod bpf;
pub mod config;
pub mod control;
mod dial;
pub mod exec;
pub mod expedite;
pub mod forward;
pub mod halt;
pub mod hearing;
pub mod hush;
pub mod inside;
pub mod keeper;
pub mod left;
pub mod limits;
mod locks;
pub mod loopback;
pub mod net;
pub mod pause;
pub mod probe;
pub mod process;
pub mod programs;
pub mod record;
pub mod resume;
pub mod root;
pub mod runsc;
pub mod save;
pub mod sentry;
pub mod spec;
pub mod traffic;
pub mod turns;
pub mod unacknowledged;

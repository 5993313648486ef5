//! The Kata driver: a sandbox that is a virtual machine, through containerd's API.
//!
//! Kata has no snapshot of a running sandbox, so that a Kata sandbox can doze but not hibernate:
//! its containers are paused, and the virtual machine's memory is pushed into swap. No image
//! exists. `torpor-core` plans the actions; this crate executes them.
//!
//! - **containerd pauses the containers**: their cgroups are frozen inside the guest. The virtual
//!   machine itself runs on, because Kata's shim checks the guest's health every 30 s and gives the
//!   guest up after 90 s. The guest's kernel therefore continues to answer ARP, handshakes and
//!   keepalives, and buffers data for the paused programs.
//! - **The sandbox container is never paused.** It does nothing. containerd ends a sandbox at its
//!   own restart if the sandbox container does not run.
//! - The driver records no state: containerd reports which containers are paused.
//!
//! | module | subject |
//! |---|---|
//! | [`containerd`] | calls: list containers; get, pause and resume tasks. None makes or ends one |
//! | [`sandbox`] | a Pod's sandbox and its state, from containerd's answers (pure) |
//! | [`driver`] | pause, resume and reclaim; each may be repeated |

pub mod containerd;
pub mod driver;
pub mod proto;
pub mod sandbox;

//! The Kata driver: a sandbox that is a virtual machine, through containerd's API.
//!
//! Kata has no snapshot of a running sandbox, so sleep is as deep as a doze here: the containers are paused and the virtual machine's memory is
//! pushed into swap. There is no image of it. What is to happen is planned in `torpor-core`; this crate holds the mechanics.
//!
//! - **Paused is what containerd pauses**: the containers' cgroups are frozen inside the guest. The virtual machine itself runs on, because Kata's shim
//!   asks the guest every 30 s whether it is well, and gives it up after 90 s. So the guest's kernel goes on answering ARP, handshakes and keepalives,
//!   and keeps what arrives for the programs that stand still.
//! - **The sandbox container is never paused.** It does nothing, and containerd ends a sandbox whose container does not run when it is started again.
//! - Nothing is noted: what is paused says containerd.
//!
//! | module | subject |
//! |---|---|
//! | [`containerd`] | the calls: list containers, get, pause and resume tasks; no call makes or ends anything |
//! | [`sandbox`] | what containerd's answers say about a Pod's sandbox (pure) |
//! | [`driver`] | pause, resume, reclaim: each may be done twice |

pub mod containerd;
pub mod driver;
pub mod proto;
pub mod sandbox;

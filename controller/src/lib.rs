//! Controller of Torpor: reconciles Sandboxes, SandboxTemplates, SandboxClaims and
//! SandboxWarmPools, and manages SandboxSnapshots.
//!
//! Sandbox is upstream's kind with upstream's behaviour; Torpor saves and restores its memory. The
//! controller knows runtimes only through the SandboxNode of each node.
//!
//! ```text
//! watches -> caches                one task per kind; an event queues the objects that it concerns
//!     `----> queues -> reconcile   one queue per kind, namespaces take turns, one pass per object
//!                dereference -> validate -> plan -> apply -> status
//! pace ----> delays writes that no request waits for
//! lease ---> runs all of it only while this process leads
//! ```
//! `plan` and `status` are pure; `apply` executes and makes no choices. Every call to the apiserver
//! has a timeout. After a call without an answer the controller observes again.

pub mod archive;
pub mod background;
pub mod blueprint;
pub mod cache;
pub mod calls;
pub mod candidates;
pub mod claim;
pub mod context;
pub mod events;
pub mod flags;
pub mod golden;
pub mod lease;
pub mod merge_patch;
pub mod metrics;
pub mod network;
pub mod outline;
pub mod owners;
pub mod pace;
pub mod pod_snapshot;
pub mod pool;
pub mod queue;
pub mod repository;
pub mod retention;
pub mod run;
pub mod sandbox;
pub mod saved_pod;
pub mod scope;
pub mod serve;
pub mod settings;
pub mod snapshot;
pub mod staging;
pub mod sweep;
pub mod template;
pub mod time_left;
pub mod trace;
pub mod transport;
pub mod watches;

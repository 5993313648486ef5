//! The controller: it reconciles Sandboxes (upstream's kind, upstream's behaviour, and Torpor's memory beside it), SandboxTemplates, SandboxClaims and SandboxWarmPools, and looks
//! after SandboxSnapshots. It knows nothing of runtimes beyond what each node's SandboxNode says.
//!
//! ```text
//! watches ──► caches                 one task per kind; each event names the objects that it concerns
//!    └──────► queues ─► reconcile    one queue per kind, namespaces take turns, one pass per object at a time
//!                          dereference → validate → plan → apply → status
//! pace ────► what nobody waits for is written when it is its turn
//! lease ───► runs all of it only while this process leads
//! ```
//! `plan` and `status` are pure; `apply` executes without choosing. Every call to the apiserver has a timeout, and a call without an answer leads to observing again.

pub mod afterwards;
pub mod blueprint;
pub mod cache;
pub mod calls;
pub mod candidates;
pub mod claim;
pub mod context;
pub mod events;
pub mod flags;
pub mod lease;
pub mod merge_patch;
pub mod metrics;
pub mod network;
pub mod outline;
pub mod pace;
pub mod pod_snapshot;
pub mod pool;
pub mod queue;
pub mod retention;
pub mod run;
pub mod sandbox;
pub mod saved_pod;
pub mod scope;
pub mod serve;
pub mod settings;
pub mod snapshot;
pub mod template;
pub mod trace;
pub mod transport;
pub mod watches;

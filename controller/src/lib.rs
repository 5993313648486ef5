//! The controller: it reconciles Sandboxes (upstream's kind, upstream's behaviour, and Torpor's memory beside it) and looks after SandboxSnapshots. It knows nothing of
//! runtimes beyond what each node's SandboxNode says.
//!
//! ```text
//! watches ──► caches                 one task per kind; each event names the Sandboxes that it concerns
//!    └──────► queue ──► reconcile    up to --sandbox-concurrent-workers at once, one per Sandbox
//!                          dereference → validate → plan → apply → status
//! lease ───► runs all of it only while this process leads
//! ```
//! `plan` and `status` are pure; [`sandbox::apply`] executes without choosing. Every call to the apiserver has a timeout, and a call without an answer leads to observing again.

pub mod cache;
pub mod calls;
pub mod context;
pub mod events;
pub mod flags;
pub mod lease;
pub mod merge_patch;
pub mod metrics;
pub mod run;
pub mod sandbox;
pub mod serve;
pub mod snapshot;
pub mod watches;

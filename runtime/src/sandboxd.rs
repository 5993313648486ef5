//! The API of upstream's sandboxd: files over HTTP/1 ([`rest`]), commands and changes of files over
//! gRPC ([`grpc`]).
//!
//! ```text
//! rest ──► route (pure), content (pure), metadata (pure), refusal (pure), root
//!   └──► archive ──► root::unpack
//! grpc ──► process ──► processes, output, terminal, group
//!     └──► watch ──► inotify on descriptors below root
//! ```
//! Sources of the contract: `packages/sandboxd` of kubernetes-sigs/agent-sandbox, its specs and the
//! handlers behind them.

pub mod archive;
pub mod child;
pub mod content;
pub mod deadline;
pub mod grpc;
pub mod metadata;
pub mod output;
pub mod polled;
pub mod process;
pub mod processes;
pub mod refusal;
pub mod rest;
pub mod route;
pub mod terminal;
pub mod watch;

//! sandbox-runtime: the server inside a sandbox that upstream's SDKs talk to. It serves the APIs of upstream's two runtimes, same paths, bodies and status codes, from one static binary: the legacy HTTP API of the Python one, and the files over HTTP and commands over gRPC of sandboxd.
//!
//! ```text
//! token, origin: which calls are let in
//! server: connections ──► legacy ──► route       which call (pure)
//!                     │          ├──► execute ──► command_line (pure), group ──► orphans
//!                     │          ├──► upload, files ──► path (pure), root
//!                     │          └──► refusal      what a client is told (pure)
//!                     └──► sandboxd::{rest, grpc}
//!                                    └──► busy   whether the sandbox may fall asleep
//! ```
//! Around a user's program (`sandbox-runtime run -- program…`) it is the container's first process: program passes signals on and ends the container as the program ended.
//! Paths are resolved by [`root`] only, below one directory. Commands are confined by the sandbox, not by this process: who may call it may run anything.

pub mod busy;
pub mod command_line;
pub mod execute;
pub mod files;
pub mod flags;
pub mod group;
pub mod install;
pub mod legacy;
pub mod origin;
pub mod orphans;
pub mod path;
pub mod program;
pub mod proto;
pub mod refusal;
pub mod root;
pub mod route;
pub mod sandboxd;
pub mod server;
pub mod token;
pub mod upload;

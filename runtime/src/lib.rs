//! sandbox-runtime: the server inside a sandbox that upstream's SDKs call.
//!
//! One static binary serves the APIs of upstream's two runtimes, with the same paths, bodies and
//! status codes: the legacy HTTP API of the Python runtime, and the files over HTTP and commands
//! over gRPC of sandboxd.
//!
//! ```text
//! token, origin: authorization of calls
//! server: connections ──► legacy ──► route       parsing of a request (pure)
//!                     │          ├──► execute ──► command_line (pure), group ──► orphans
//!                     │          │              claim   variables of the sandbox' claim
//!                     │          ├──► upload, files ──► path (pure), root
//!                     │          └──► refusal      error answers (pure)
//!                     └──► sandboxd::{rest, grpc}
//!                                    └──► busy   mark that keeps the sandbox awake
//! ```
//! With a user's program (`sandbox-runtime run -- program…`) the runtime is the container's first
//! process: [`program`] forwards signals, and the container ends with the program's exit code.
//!
//! [`root`] alone resolves paths, below one directory. The sandbox confines commands, not this
//! process: a client that may call the runtime may run any command.

pub mod busy;
pub mod claim;
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

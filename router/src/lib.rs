//! sandbox-router: carries HTTP requests into sandboxes and resumes the sandboxes they need.
//!
//! Clients see upstream's router: its header contract, error bodies, flags and metrics.
//!
//! ```text
//! client --> server --> proxy --> target      reads which sandbox a request names (pure)
//!   HTTP/1, 2, TLS        |  |      `- pathroute   reads it from a path (pure)
//!                         |  |--> browser     takes a browser's token from a cookie (pure)
//!                         |  |--> authz       authorizes the client (pure, or by reviews)
//!                         |  |--> gate        routes, holds, resumes or refuses (pure decision)
//!                         |  |      `- resume      makes one patch for many requests
//!                         |  `--> rewrite     rewrites headers in both directions (pure)
//!                         |-----> upstream    one pool, keyed by Sandbox UID, Pod UID and address
//!                         |-----> calls       gRPC: one HTTP/2 connection per port of a sandbox
//!                         |         `- web         turns gRPC-Web into gRPC (pure)
//!                         `-----> tunnel      upgraded connections
//! watch ---> directory                        Sandboxes and their Pods, joined by UID
//! ```
//! No request causes a read from the apiserver: the router serves only Sandboxes that the
//! [`directory`] holds.

pub mod address;
pub mod authz;
pub mod authz_cache;
pub mod body;
pub mod body_prefetch;
pub mod browser;
pub mod calls;
pub mod connection;
pub mod connection_limit;
pub mod directory;
pub mod endpoints;
mod failure;
pub mod files;
pub mod flags;
pub mod gate;
pub mod grpc;
pub mod idle_timeout;
pub mod lanes;
pub mod metrics;
pub mod pathroute;
pub mod proxy;
pub mod refusal;
pub mod resume;
pub mod rewrite;
pub mod sandbox_limit;
pub mod scoped_token;
pub mod server;
pub mod spans;
pub mod target;
pub mod tls;
pub mod token_review;
pub mod tunnel;
pub mod upstream;
pub mod wait_slots;
pub mod watch;
pub mod watched;
pub mod web;

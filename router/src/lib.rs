//! sandbox-router: the way of HTTP into sandboxes. It is upstream's router to its clients (header contract, error bodies, flags, metrics), and wakes what it routes to.
//!
//! ```text
//! client ──► server ──► proxy ──► target      which sandbox (pure); by a path: pathroute
//!   HTTP/1, 2, TLS        │  ├──► browser     a browser's token, in a cookie (pure)
//!                         │  ├──► authz       may the client (pure, or TokenReview)
//!                         │  ├──► gate        is it there: route, wait, resume, refuse (pure decision; bounded waiting)
//!                         │  │      └─ resume one patch for many requests
//!                         │  └──► rewrite     headers on the way in and out (pure)
//!                         ├─────► upstream    one pool, keyed by Sandbox UID, Pod UID and address
//!                         ├─────► calls       gRPC: one HTTP/2 connection for each port of a sandbox; gRPC-Web becomes it by web (pure)
//!                         └─────► tunnel      what has changed its protocol
//! watch ───► directory                        Sandboxes and their Pods, joined by UID
//! ```
//! No request causes a read from the apiserver: what the [`directory`] does not know does not exist.

pub mod address;
pub mod ahead;
pub mod authz;
pub mod body;
pub mod browser;
pub mod calls;
pub mod connection;
pub mod crowd;
pub mod directory;
pub mod endpoints;
mod failure;
pub mod files;
pub mod flags;
pub mod gate;
pub mod grpc;
pub mod lanes;
pub mod metrics;
pub mod pathroute;
pub mod places;
pub mod proxy;
pub mod refusal;
pub mod resume;
pub mod rewrite;
pub mod scoped_token;
pub mod server;
pub mod shares;
pub mod silence;
pub mod spans;
pub mod target;
pub mod tls;
pub mod token_review;
pub mod tunnel;
pub mod upstream;
pub mod verdicts;
pub mod watch;
pub mod watched;
pub mod web;

//! The router on real sockets, between real clients and real sandboxes, against an apiserver in memory.

mod authorization;
mod backend;
mod browsers;
mod client;
mod contract;
mod crowd;
mod drain;
mod grpc;
mod hosts;
mod isolation;
mod limits;
mod paths;
mod resume;
mod scoped;
mod streaming;
mod tls;
mod tracing;
mod web;
mod world;

//! Tests the router with real sockets, clients and sandboxes, against an apiserver in memory.

mod authorization;
mod backend;
mod browsers;
mod client;
mod connection_limit;
mod contract;
mod drain;
mod grpc;
mod hosts;
mod isolation;
mod limits;
mod paths;
mod reference;
mod resume;
mod scoped;
mod streaming;
mod tls;
mod tracing;
mod web;
mod world;

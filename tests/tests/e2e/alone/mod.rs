//! Tests that disturb the whole node: each runs alone. One of them among others would wait for those that run, while the rest waits for it, so hack/test.sh runs these after the others.

mod away;
mod capacity;
mod crash;
mod drain;
mod kata;
mod killed;
mod programs;
mod revoked;
mod speechless;
mod stock;
mod tracing;

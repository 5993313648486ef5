//! Tests that disturb the whole node: each runs alone.
//!
//! Among other tests each of these would wait for the running ones, while the rest waits for it. So
//! hack/test.sh runs these tests after the others.

mod capacity;
mod controller_away;
mod crash;
mod drain;
mod kata;
mod killed;
mod programs;
mod revoked;
mod stock;
mod stopped_agent;
mod storm;
mod tracing;

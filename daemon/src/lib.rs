//! What the daemons have in common: command lines as Go programs take them, logs, exported spans, and small HTTP servers.

pub mod go_flags;
pub mod log;
mod places;
pub mod serve;
pub mod spans;

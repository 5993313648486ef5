//! Code that the daemons share: command lines in Go's syntax, logs, exported spans, and small HTTP
//! servers.

mod connections;
pub mod go_flags;
pub mod log;
pub mod serve;
pub mod spans;

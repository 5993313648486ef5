//! Messages and services of the gRPC API, made of the files below `proto/` by the test `proto`, which also keeps them in step.

#![allow(
    clippy::all,
    clippy::cast_possible_truncation,
    clippy::or_fun_call,
    missing_debug_implementations,
    unreachable_pub,
    reason = "generated"
)]

pub mod process {
    include!("proto/process.v1.rs");
}
pub mod watcher {
    include!("proto/watcher.v1.rs");
}

/// The files as they are told to clients that ask which services there are.
pub const DESCRIPTORS: &[u8] = include_bytes!("proto/descriptors.bin");

//! Messages and services of the gRPC API. The test `proto` generates them from the files below
//! `proto/` and checks that they match.

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

/// Encoded descriptors of the files below `proto/`, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!("proto/descriptors.bin");

//! Messages and services of containerd's API, as far as they are needed: made of the files in `proto/` by the test `proto`, which also keeps them in
//! step. The servers' side is that of the tests.

#![allow(
    clippy::all,
    clippy::cast_possible_truncation,
    clippy::or_fun_call,
    missing_debug_implementations,
    unreachable_pub,
    reason = "generated"
)]

pub mod containers {
    include!("proto/containerd.services.containers.v1.rs");
}
pub mod tasks {
    include!("proto/containerd.services.tasks.v1.rs");
}

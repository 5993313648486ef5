//! Messages and services of containerd's API, as far as the driver needs them. The test `proto`
//! generates them from the files in `proto/` and checks that they agree. Only tests use the
//! servers.

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

//! Messages and services of the gRPC API, made of the files below `proto/` by the test `proto`, which also keeps them in step.

#![allow(
    clippy::all,
    clippy::cast_possible_truncation,
    clippy::or_fun_call,
    missing_debug_implementations,
    unreachable_pub,
    reason = "generated"
)]

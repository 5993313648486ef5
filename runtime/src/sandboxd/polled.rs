//! File descriptors for asynchronous waits.
#![allow(unsafe_code)]

use std::{io, os::fd::OwnedFd};

use tokio::io::unix::AsyncFd;

/// Registers a non-blocking descriptor with tokio.
pub fn polled(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open and keeps its number until it is dropped, and nothing replaces
    // the descriptor in the `AsyncFd`.
    let registered = unsafe { AsyncFd::register(descriptor) };
    Ok(registered?)
}

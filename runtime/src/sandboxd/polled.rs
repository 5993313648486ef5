//! Descriptors that are waited for without a thread.
#![allow(unsafe_code)]

use std::{io, os::fd::OwnedFd};

use tokio::io::unix::AsyncFd;

/// A descriptor to wait for; it does not block.
pub fn polled(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open and keeps its number until it is dropped, and nothing replaces it in there.
    let registered = unsafe { AsyncFd::register(descriptor) };
    Ok(registered?)
}

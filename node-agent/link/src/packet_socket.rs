//! Errors and options of packet sockets (packet(7)).

#![allow(unsafe_code)]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};

use nix::libc;

/// Why a link cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot open a packet socket (needs CAP_NET_RAW)")]
    Open(#[source] io::Error),
    #[error("cannot set {what} of a packet socket")]
    Set {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("cannot watch the link with index {index}")]
    Bind {
        index: u32,
        #[source]
        source: io::Error,
    },
    #[error("cannot read a frame")]
    Read(#[source] io::Error),
    #[error("cannot send a frame")]
    Send(#[source] io::Error),
}

/// Sets an option of the socket.
///
/// `what`: the option's name, for the error. `value` has the kernel's layout for this option.
pub(crate) fn set<T>(
    socket: impl AsFd,
    what: &'static str,
    level: libc::c_int,
    option: libc::c_int,
    value: &T,
) -> Result<(), Error> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes of the value. For a filter it also reads the
    // instructions that the value points to, which live until the call returns.
    let done = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            option,
            std::ptr::from_ref(value).cast(),
            length_of::<T>(),
        )
    };
    if done < 0 {
        return Err(Error::Set {
            what,
            source: io::Error::last_os_error(),
        });
    }
    Ok(())
}

pub(crate) fn length_of<T>() -> libc::socklen_t {
    libc::socklen_t::try_from(size_of::<T>()).unwrap_or(libc::socklen_t::MAX)
}

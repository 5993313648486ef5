//! Connections to sandboxes and keepers, by the paths of their sockets.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

/// Connects; neither that nor what is sent takes longer than the limit. A program that stands still takes no connections, and once the kernel has taken as many
/// for it as it may (seventeen, of those who have given up too), it lets the next one wait, and of itself for ever.
pub(crate) fn dial(path: &Path, kind: SockType, limit: Duration) -> nix::Result<OwnedFd> {
    let peer = socket(AddressFamily::Unix, kind, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&peer, sockopt::SendTimeout, &time_val(limit))?;
    connect(peer.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(peer)
}

/// Whether nobody listens there, by the error of [`dial`]. Any other says nothing about that.
pub(crate) fn is_nobody(errno: Errno) -> bool {
    matches!(errno, Errno::ENOENT | Errno::ECONNREFUSED)
}

pub(crate) fn time_val(limit: Duration) -> TimeVal {
    TimeVal::milliseconds(i64::try_from(limit.as_millis()).unwrap_or(i64::MAX))
}

#[cfg(test)]
pub(crate) mod tests {
    use nix::sys::socket::{Backlog, bind, listen};

    use super::*;

    const LIMIT: Duration = Duration::from_millis(50);

    /// Somebody who listens and takes no connections, and for whom the kernel takes no more.
    pub(crate) fn deaf(path: &Path, kind: SockType) -> OwnedFd {
        let (unix, cloexec) = (AddressFamily::Unix, SockFlag::SOCK_CLOEXEC);
        let listener = socket(unix, kind, cloexec, None).expect("a socket");
        let address = UnixAddr::new(path).expect("an address");
        bind(listener.as_raw_fd(), &address).expect("bound");
        listen(&listener, Backlog::new(1).expect("a backlog")).expect("it listens");
        let mut tries = (0..10).map(|_| dial(path, kind, LIMIT));
        assert_eq!(tries.find_map(Result::err), Some(Errno::EAGAIN));
        listener
    }

    #[test]
    fn who_takes_no_connections_is_there_and_not_waited_for_for_ever() {
        for kind in [SockType::Stream, SockType::SeqPacket] {
            let dir = tempfile::tempdir().expect("a directory");
            let path = dir.path().join("socket");
            let error = || dial(&path, kind, LIMIT).expect_err("it does not hear");
            assert!(is_nobody(error()));
            let listener = deaf(&path, kind);
            assert!(!is_nobody(error()));
            drop(listener);
            assert!(is_nobody(error()));
        }
    }
}

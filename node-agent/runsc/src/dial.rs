//! Connections to sandboxes and keepers, by the paths of their sockets.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

/// Connects to the socket at `path`. The limit is for the connection and for each later send.
///
/// A stopped program accepts no connections. The kernel queues some for it (seventeen, also of
/// callers that have given up). The next caller would wait without end.
pub(crate) fn dial(path: &Path, kind: SockType, limit: Duration) -> nix::Result<OwnedFd> {
    let peer = socket(AddressFamily::Unix, kind, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&peer, sockopt::SendTimeout, &time_val(limit))?;
    connect(peer.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(peer)
}

/// Reports whether an error of [`dial`] means that no process listens at the path. After other
/// errors a process may listen there.
pub(crate) fn is_not_listening(errno: Errno) -> bool {
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

    /// Returns a socket that listens, accepts no connections, and has a full queue.
    pub(crate) fn unresponsive(path: &Path, kind: SockType) -> OwnedFd {
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
            assert!(is_not_listening(error()));
            let listener = unresponsive(&path, kind);
            assert!(!is_not_listening(error()));
            drop(listener);
            assert!(is_not_listening(error()));
        }
    }
}

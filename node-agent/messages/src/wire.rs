//! Sockets of Unix, by their paths, and messages with files beside them.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType,
    UnixAddr, accept4, bind, connect, listen as listen_on, recvmsg, sendmsg, setsockopt, socket,
    sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

/// Most bytes of a message. Most have a few hundred; the facts for the manifest of an image are
/// some hundred for each container of the Pod. The default buffer of a socket has room for one.
pub const MAX_MESSAGE: usize = 128 << 10;

/// Connects to the socket at `path`. The limit is for the connection and for each later send.
///
/// A stopped program accepts no connections. The kernel queues some for it (seventeen, also of
/// callers that have given up). The next caller would wait without end.
pub fn dial(path: &Path, kind: SockType, limit: Duration) -> nix::Result<OwnedFd> {
    let peer = socket(AddressFamily::Unix, kind, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&peer, sockopt::SendTimeout, &time_val(limit))?;
    connect(peer.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(peer)
}

/// Reports whether an error of [`dial`] means that no process listens at the path. After other
/// errors a process may listen there.
pub fn is_not_listening(errno: Errno) -> bool {
    matches!(errno, Errno::ENOENT | Errno::ECONNREFUSED)
}

/// Why a request was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unsent {
    /// No process listens at the path.
    NotListening(Errno),
    /// A process may listen at the path. It may have received the request.
    Failed(Errno),
}

/// Sends a message with files to the sequenced-packet socket at `path`, and returns the connection.
/// The limit is for the connection and for each later wait for the peer.
pub fn request(
    path: &Path,
    bytes: &[u8],
    files: &[BorrowedFd<'_>],
    limit: Duration,
) -> Result<OwnedFd, Unsent> {
    let dialled = dial(path, SockType::SeqPacket, limit);
    let peer = dialled.map_err(|source| match is_not_listening(source) {
        true => Unsent::NotListening(source),
        false => Unsent::Failed(source),
    })?;
    let sent = limit_wait(&peer, limit).and_then(|()| send(&peer, bytes, files));
    sent.map(|()| peer).map_err(Unsent::Failed)
}

fn time_val(limit: Duration) -> TimeVal {
    TimeVal::milliseconds(i64::try_from(limit.as_millis()).unwrap_or(i64::MAX))
}

/// Returns a sequenced-packet socket that listens on the path.
pub fn listen(path: &Path) -> nix::Result<OwnedFd> {
    let (unix, packets) = (AddressFamily::Unix, SockType::SeqPacket);
    let listener = socket(unix, packets, SockFlag::SOCK_CLOEXEC, None)?;
    bind(listener.as_raw_fd(), &UnixAddr::new(path)?)?;
    listen_on(&listener, Backlog::new(16)?)?;
    Ok(listener)
}

/// Accepts a connection.
pub fn accept(listener: &OwnedFd) -> nix::Result<OwnedFd> {
    accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC).map(own)
}

/// Limits each wait for a message of the peer, and for room for a message to it.
pub fn limit_wait(peer: &OwnedFd, limit: Duration) -> nix::Result<()> {
    setsockopt(peer, sockopt::SendTimeout, &time_val(limit))?;
    setsockopt(peer, sockopt::ReceiveTimeout, &time_val(limit))
}

/// Sends one message with files.
pub fn send(peer: &OwnedFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> nix::Result<()> {
    let fds: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&fds)];
    let cmsgs: &[ControlMessage<'_>] = if fds.is_empty() { &[] } else { &rights };
    let flags = MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(peer.as_raw_fd(), &[IoSlice::new(bytes)], cmsgs, flags, None).map(drop)
}

/// Most files beside a message: the kernel's limit (`SCM_MAX_FD`, unix(7)).
const MOST_FILES: usize = 253;

/// Receives one message with its files. An empty message means that the peer has closed the
/// connection.
pub fn receive(peer: &OwnedFd) -> nix::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let mut space = nix::cmsg_space!([RawFd; MOST_FILES]);
    let mut buffers = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(peer.as_raw_fd(), &mut buffers, Some(&mut space), flags)?;
    let length = message.bytes;
    let mut fds = Vec::new();
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = part {
            fds.extend(raw.into_iter().map(own));
        }
    }
    bytes.truncate(length);
    Ok((bytes, fds))
}

#[allow(unsafe_code)]
fn own(raw: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just made this descriptor for this process; nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(raw) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(50);

    /// Returns a socket that listens, accepts no connections, and has a full queue.
    pub(crate) fn unresponsive(path: &Path, kind: SockType) -> OwnedFd {
        let (unix, cloexec) = (AddressFamily::Unix, SockFlag::SOCK_CLOEXEC);
        let listener = socket(unix, kind, cloexec, None).expect("a socket");
        let address = UnixAddr::new(path).expect("an address");
        bind(listener.as_raw_fd(), &address).expect("bound");
        listen_on(&listener, Backlog::new(1).expect("a backlog")).expect("it listens");
        let mut tries = (0..10).map(|_| dial(path, kind, LIMIT));
        assert_eq!(tries.find_map(Result::err), Some(Errno::EAGAIN));
        listener
    }

    #[test]
    fn a_process_that_accepts_no_connections_is_there_and_the_wait_for_it_is_limited() {
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

//! Copies of the packet sockets by which a running sandbox' network stack uses its links.
//!
//! runsc or this crate opens the sockets when it begins the sandbox, and gives them to the sentry.
//! A filter that is attached to a copy applies to the sentry's socket too.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::net::{AddressFamily, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use torpor_runsc::command::Runsc;
use torpor_runsc::process::command_line;
use torpor_runsc::state;

/// Most descriptors that are read. A sentry has some sixty; a compromised one may have any number.
const MOST: usize = 4096;

/// Why a sandbox' sockets cannot be copied.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Record(#[from] state::Error),
    #[error("process {pid} is no longer the sandbox")]
    Ended { pid: i32 },
    #[error("cannot list the sandbox's descriptors in {path}")]
    List {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot copy a descriptor of process {pid} (needs Linux 5.6 or later)")]
    Copy {
        pid: i32,
        #[source]
        source: rustix::io::Errno,
    },
}

/// Returns copies of the sandbox' packet sockets.
pub fn packet_sockets(runsc: &Runsc, sandbox: &str) -> Result<Vec<OwnedFd>, Error> {
    let pid = state::sentry(runsc.root(), sandbox)?;
    let id = Pid::from_raw(pid).ok_or(Error::Ended { pid })?;
    let copy = |source| Error::Copy { pid, source };
    let process = pidfd_open(id, PidfdFlags::empty()).map_err(copy)?;
    // Another process may have the number by now. After the open the number cannot change hands, so
    // this check of the process holds.
    let command = command_line(pid);
    if !(command.starts_with("runsc-sandbox") && command.contains(sandbox)) {
        return Err(Error::Ended { pid });
    }
    packet_sockets_of(process.as_fd(), pid)
}

fn packet_sockets_of(process: impl AsFd, pid: i32) -> Result<Vec<OwnedFd>, Error> {
    let path = PathBuf::from(format!("/proc/{pid}/fd"));
    let list = |source| Error::List {
        path: path.clone(),
        source,
    };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&path).map_err(list)?.take(MOST) {
        let entry = entry.map_err(list)?;
        // A descriptor that was closed meanwhile is skipped.
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        let Some(number) = (entry.file_name().to_str()).and_then(|name| name.parse().ok()) else {
            continue;
        };
        if !target.to_string_lossy().starts_with("socket:") {
            continue;
        }
        match pidfd_getfd(&process, number, PidfdGetfdFlags::empty()) {
            Ok(socket) if sockopt::socket_domain(&socket) == Ok(AddressFamily::PACKET) => {
                found.push(socket);
            }
            Ok(_) | Err(rustix::io::Errno::BADF) => {}
            Err(source) => return Err(Error::Copy { pid, source }),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use rustix::net::{SocketType, socket};

    use super::*;

    #[test]
    fn only_packet_sockets_are_copied_from_a_process() {
        let own = i32::try_from(std::process::id()).expect("a number");
        let process = pidfd_open(Pid::from_raw(own).expect("a number"), PidfdFlags::empty());
        let process = process.expect("opened");
        let _file = std::fs::File::open("/dev/null").expect("opened");
        let datagrams = OwnedFd::from(std::net::UdpSocket::bind("127.0.0.1:0").expect("bound"));
        let packets = socket(AddressFamily::PACKET, SocketType::RAW, None).expect("needs root");
        let found = packet_sockets_of(&process, own).expect("listed");
        let inode = |socket: &OwnedFd| rustix::fs::fstat(socket).expect("told").st_ino;
        let is_found = |socket| found.iter().any(|copy| inode(copy) == inode(socket));
        assert!(is_found(&packets) && !is_found(&datagrams));
    }
}

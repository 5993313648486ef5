//! Connections that are forwarded into a sandbox, and their end before a pause.
//!
//! gVisor cannot be saved while such a connection is open: a helper runs in the sandbox then, and
//! the helper's program is a file of the host (`Can't save pma with non-MemoryFile`). So each
//! forwarding process (the shim's command `forward`) holds the pod's pipe `forwards` open for
//! reading, and a pausing process opens the pipe for writing. Without a reader there is no
//! connection to end. Otherwise the pausing process writes a byte, which no process reads. All
//! forwarding processes end when the pipe is readable. The last one has ended when the pipe has no
//! reader any more. Forwards and pauses begin only under the pod's lock.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc::{O_NOFOLLOW, O_NONBLOCK};
use nix::sys::stat::Mode;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use torpor_core::ids::SandboxId;

use torpor_records::Records;

/// Why the forwarded connections of a sandbox are unknown or do not end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot use {path}")]
    Pipe {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error(
        "forwarded connections did not end within {0:?}, and gVisor cannot save a sandbox while one is open"
    )]
    StillOpen(Duration),
}

/// A forwarded connection counts as open until this is dropped.
#[derive(Debug)]
pub struct Forward(File);

impl AsFd for Forward {
    /// Returns a descriptor that is readable as soon as the connection has to end.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns the path of the pod's pipe.
fn pipe(records: &Records, sandbox: &SandboxId) -> PathBuf {
    records.pod_dir(sandbox).join("forwards")
}

/// Registers a forwarded connection. The caller holds the pod's lock until its helper runs.
pub fn begin(records: &Records, sandbox: &SandboxId) -> Result<Forward, Error> {
    let path = pipe(records, sandbox);
    let failed = |source| Error::Pipe {
        path: path.clone(),
        source,
    };
    match nix::unistd::mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR) {
        Ok(()) | Err(Errno::EEXIST) => {}
        Err(errno) => return Err(failed(errno.into())),
    }
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(O_NONBLOCK | O_NOFOLLOW);
    options.open(&path).map(Forward).map_err(failed)
}

/// Reports whether a connection is being forwarded.
pub fn any_open(records: &Records, sandbox: &SandboxId) -> Result<bool, Error> {
    let path = pipe(records, sandbox);
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(O_NONBLOCK | O_NOFOLLOW);
    match options.open(&path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) if error.raw_os_error() == Some(nix::libc::ENXIO) => Ok(false),
        Err(source) => Err(Error::Pipe { path, source }),
    }
}

/// Ends every forwarded connection, and waits for the last end. The caller holds the pod's lock.
pub fn end_all(records: &Records, sandbox: &SandboxId, limit: Duration) -> Result<(), Error> {
    let path = pipe(records, sandbox);
    let failed = |source| Error::Pipe {
        path: path.clone(),
        source,
    };
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(O_NONBLOCK | O_NOFOLLOW);
    let mut pipe = match options.open(&path) {
        Ok(pipe) => pipe,
        // There was never a reader, or there is none now.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) if error.raw_os_error() == Some(nix::libc::ENXIO) => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    match pipe.write_all(&[0]) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
        // The pipe is full of unread bytes of earlier requests.
        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
        Err(error) => return Err(failed(error)),
    }
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        // No events are requested: poll always reports that no reader is left (POLLERR).
        match poll(
            &mut [PollFd::new(&pipe, PollFlags::empty())],
            Some(&timeout),
        ) {
            Ok(0) => return Err(Error::StillOpen(limit)),
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::one_pod;

    const LONG: Duration = Duration::from_secs(10);

    fn is_asked_to_end(forward: &Forward) -> bool {
        let mut fds = [PollFd::new(forward, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).expect("polled");
        !fds[0].revents().is_empty()
    }

    #[test]
    fn ending_forwarded_connections_succeeds_if_there_are_none() {
        let (_dir, records, sandbox) = one_pod();
        end_all(&records, &sandbox, Duration::ZERO).expect("never one");
        let open = begin(&records, &sandbox).expect("begun");
        assert!(any_open(&records, &sandbox).expect("looked"));
        drop(open);
        assert!(!any_open(&records, &sandbox).expect("looked"));
        end_all(&records, &sandbox, Duration::ZERO).expect("none any more");
    }

    #[test]
    fn a_pause_ends_every_forwarded_connection_and_no_later_connection() {
        let (_dir, records, sandbox) = one_pod();
        let forwards: Vec<Forward> = (0..3)
            .map(|_| begin(&records, &sandbox).expect("begun"))
            .collect();
        assert!(forwards.iter().all(|forward| !is_asked_to_end(forward)));
        std::thread::scope(|scope| {
            let paused = scope.spawn(|| end_all(&records, &sandbox, LONG));
            for forward in forwards {
                poll(&mut [PollFd::new(&forward, PollFlags::IN)], None).expect("asked");
                assert!(!paused.is_finished());
            }
            paused.join().expect("no panic").expect("all have ended");
        });
        assert!(!is_asked_to_end(&begin(&records, &sandbox).expect("begun")));
    }

    #[test]
    fn a_forwarded_connection_that_does_not_end_is_reported() {
        let (_dir, records, sandbox) = one_pod();
        let _forward = begin(&records, &sandbox).expect("begun");
        let error = end_all(&records, &sandbox, Duration::from_millis(10)).expect_err("open");
        assert!(matches!(error, Error::StillOpen(_)));
    }
}

//! Bytes from one stream to the other and back.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::Shutdown;

const CHUNK: usize = 64 << 10;

/// How it ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// The far side closed, and all that it had sent has been delivered.
    ByFar,
    /// The near side is gone, or sends nothing more and was answered for long enough.
    ByNear,
    /// Somebody else wants it to end.
    Asked,
}

/// One direction.
struct Way {
    buffer: Box<[u8]>,
    /// Read and not yet written.
    from: usize,
    to: usize,
    /// Nothing more will be read.
    over: bool,
}

impl Way {
    fn new() -> Self {
        Self {
            buffer: vec![0; CHUNK].into_boxed_slice(),
            from: 0,
            to: 0,
            over: false,
        }
    }

    fn is_empty(&self) -> bool {
        self.from == self.to
    }

    fn wants_input(&self) -> bool {
        self.is_empty() && !self.over
    }

    /// Everything was read and written.
    fn is_done(&self) -> bool {
        self.is_empty() && self.over
    }

    /// Reads when there is nothing to write.
    fn fill(&mut self, source: BorrowedFd<'_>) -> rustix::io::Result<()> {
        if self.wants_input() {
            match rustix::io::read(source, &mut *self.buffer) {
                Ok(0) => self.over = true,
                Ok(count) => (self.from, self.to) = (0, count),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    fn flush(&mut self, sink: BorrowedFd<'_>) -> rustix::io::Result<()> {
        while !self.is_empty() {
            match rustix::io::write(sink, &self.buffer[self.from..self.to]) {
                Ok(count) => self.from += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// The other side takes nothing any more.
    fn give_up(&mut self) {
        (self.from, self.to, self.over) = (0, 0, true);
    }
}

/// Carries until the far side has closed. That the near side sends nothing more is passed on; with `patience`, its answers
/// are then carried for so long. `asked` can be read from when it is to end at once.
pub(super) fn carry(
    near: BorrowedFd<'_>,
    far: BorrowedFd<'_>,
    asked: Option<BorrowedFd<'_>>,
    patience: Option<Duration>,
) -> anyhow::Result<Ended> {
    for stream in [near, far] {
        let flags = rustix::fs::fcntl_getfl(stream)?;
        rustix::fs::fcntl_setfl(stream, flags | OFlags::NONBLOCK)?;
    }
    let (mut out, mut back) = (Way::new(), Way::new());
    let mut told = false;
    let mut leave_at = None;
    loop {
        if wait(near, far, asked, (&out, &back), leave_at)? {
            return Ok(Ended::Asked);
        }
        if out.fill(near).is_err() {
            return Ok(Ended::ByNear);
        }
        if out.flush(far).is_err() {
            // It has closed; what it sent before is still to be read.
            out.give_up();
        }
        if out.is_done() && !told {
            told = true;
            // A side that has closed needs to be told nothing.
            let _ = rustix::net::shutdown(far, Shutdown::Write);
            leave_at = patience.map(|patience| Instant::now() + patience);
        }
        if back.fill(far).is_err() {
            // Reset: the near side is to see an error too.
            return Ok(Ended::ByNear);
        }
        if back.flush(near).is_err() {
            return Ok(Ended::ByNear);
        }
        if back.is_done() {
            return Ok(Ended::ByFar);
        }
        if leave_at.is_some_and(|at| at <= Instant::now()) {
            return Ok(Ended::ByNear);
        }
    }
}

/// Sleeps until something can be done; whether it is to end.
fn wait(
    near: BorrowedFd<'_>,
    far: BorrowedFd<'_>,
    asked: Option<BorrowedFd<'_>>,
    (out, back): (&Way, &Way),
    until: Option<Instant>,
) -> rustix::io::Result<bool> {
    let mut fds = Vec::with_capacity(3);
    fds.extend(asked.map(|asked| PollFd::from_borrowed_fd(asked, PollFlags::IN)));
    for (side, input, output) in [
        (near, out.wants_input(), !back.is_empty()),
        (far, back.wants_input(), !out.is_empty()),
    ] {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, input);
        flags.set(PollFlags::OUT, output);
        // That a side has closed is reported whether it is asked for or not, and would be again and again until it is its
        // turn to be looked at.
        if !flags.is_empty() {
            fds.push(PollFd::from_borrowed_fd(side, flags));
        }
    }
    let timeout = until.and_then(|until| {
        let left = until.saturating_duration_since(Instant::now());
        // Longer than any time that somebody waits: none.
        Timespec::try_from(left).ok()
    });
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(errno) => return Err(errno),
    }
    Ok(asked.is_some() && !fds[0].revents().is_empty())
}

#[cfg(test)]
mod tests;

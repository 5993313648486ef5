//! Carries bytes between two streams, in both directions.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::Shutdown;

const CHUNK: usize = 64 << 10;

/// The cause of the end.
#[derive(Debug, PartialEq, Eq)]
pub enum Ended {
    /// The far side has closed, and all bytes that it had sent are delivered.
    Far,
    /// The near side is gone. Or it sends nothing more, and the time for answers is over.
    Near,
    /// Another process has requested the end.
    Stopped,
}

/// One direction of the bytes.
struct Direction {
    buffer: Box<[u8]>,
    /// The range in `buffer` of the bytes that are read and not yet written.
    from: usize,
    to: usize,
    /// No more bytes will be read.
    over: bool,
}

impl Direction {
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

    /// Reports whether all bytes were read and written.
    fn is_done(&self) -> bool {
        self.is_empty() && self.over
    }

    /// Reads, unless there are bytes to write.
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

    /// Ends this direction, because its sink accepts no more bytes.
    fn give_up(&mut self) {
        (self.from, self.to, self.over) = (0, 0, true);
    }
}

/// Carries bytes until the far side has closed.
///
/// If the near side sends nothing more, the far side is shut down for writing. With `answer_limit`,
/// answers are carried for that time from then on.
///
/// `stop`: readable when the function must return at once.
pub fn carry(
    near: BorrowedFd<'_>,
    far: BorrowedFd<'_>,
    stop: Option<BorrowedFd<'_>>,
    answer_limit: Option<Duration>,
) -> anyhow::Result<Ended> {
    for stream in [near, far] {
        let flags = rustix::fs::fcntl_getfl(stream)?;
        rustix::fs::fcntl_setfl(stream, flags | OFlags::NONBLOCK)?;
    }
    let (mut out, mut back) = (Direction::new(), Direction::new());
    let mut is_shut_down = false;
    let mut deadline = None;
    loop {
        if wait(near, far, stop, (&out, &back), deadline)? {
            return Ok(Ended::Stopped);
        }
        if out.fill(near).is_err() {
            return Ok(Ended::Near);
        }
        if out.flush(far).is_err() {
            // The far side has closed. Bytes that it sent before must still be read.
            out.give_up();
        }
        if out.is_done() && !is_shut_down {
            is_shut_down = true;
            // This fails only if the far side has closed, and then it needs no shutdown.
            let _ = rustix::net::shutdown(far, Shutdown::Write);
            deadline = answer_limit.map(|limit| Instant::now() + limit);
        }
        if back.fill(far).is_err() {
            // The far side has reset the connection, so the near side must see an error, too.
            return Ok(Ended::Near);
        }
        if back.flush(near).is_err() {
            return Ok(Ended::Near);
        }
        if back.is_done() {
            return Ok(Ended::Far);
        }
        if deadline.is_some_and(|at| at <= Instant::now()) {
            return Ok(Ended::Near);
        }
    }
}

/// Waits until bytes can be read or written, or until `deadline`. Returns whether `stop` is
/// readable.
fn wait(
    near: BorrowedFd<'_>,
    far: BorrowedFd<'_>,
    stop: Option<BorrowedFd<'_>>,
    (out, back): (&Direction, &Direction),
    deadline: Option<Instant>,
) -> rustix::io::Result<bool> {
    let mut fds = Vec::with_capacity(3);
    fds.extend(stop.map(|stop| PollFd::from_borrowed_fd(stop, PollFlags::IN)));
    for (side, input, output) in [
        (near, out.wants_input(), !back.is_empty()),
        (far, back.wants_input(), !out.is_empty()),
    ] {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, input);
        flags.set(PollFlags::OUT, output);
        // Poll reports a closed side even if no event is requested. It would end each poll at once
        // as long as nothing is read from that side or written to it.
        if !flags.is_empty() {
            fds.push(PollFd::from_borrowed_fd(side, flags));
        }
    }
    let timeout = deadline.and_then(|deadline| {
        let left = deadline.saturating_duration_since(Instant::now());
        // A time that does not fit is longer than any wait: no timeout.
        Timespec::try_from(left).ok()
    });
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(errno) => return Err(errno),
    }
    Ok(stop.is_some() && !fds[0].revents().is_empty())
}

#[cfg(test)]
mod tests;

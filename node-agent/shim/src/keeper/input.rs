//! Detects input of a client of `attach` while the sandbox sleeps.
//!
//! The keeper holds the container's standard input. No other process can detect the input then.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};
use rustix::fs::FileType;

/// Time between two wakes for the same input. A wake takes up to a second, and frequent retries do
/// not make a failed one succeed.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Decides whether and when the keeper polls the container's standard input.
#[derive(Debug)]
pub(super) struct Input {
    /// A process may write to it: it is a terminal, or a pipe whose other end is open.
    open: bool,
    asleep: bool,
    /// When the keeper polls the input again, after a wake was begun for unread bytes.
    not_before: Option<Instant>,
    /// The number of unread bytes when that wake was begun.
    woken_for: Option<u64>,
    /// The number of bytes that the program has not read although it was woken for them. It is not
    /// woken for them again.
    left_unread: Option<u64>,
}

impl Input {
    /// `input`: the container's standard input.
    pub(super) fn new(input: impl AsFd) -> Self {
        let is_pipe = rustix::fs::fstat(&input)
            .is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Fifo);
        Self {
            open: is_pipe || rustix::termios::isatty(input),
            asleep: false,
            not_before: None,
            woken_for: None,
            left_unread: None,
        }
    }

    /// Records that the sandbox sleeps: gVisor does not read the input any more.
    pub(super) fn fell_asleep(&mut self, input: impl AsFd) {
        if !self.asleep {
            let known = self.woken_for.take().or(self.left_unread);
            self.left_unread = known.filter(|bytes| unread(input) == Some(*bytes));
        }
        self.asleep = true;
    }

    /// Records that the sandbox runs: gVisor reads the input.
    pub(super) fn woke(&mut self) {
        (self.asleep, self.not_before) = (false, None);
    }

    /// Returns the input's descriptor if the keeper polls it now.
    pub(super) fn poll_fd<'a>(&self, input: BorrowedFd<'a>, now: Instant) -> Option<PollFd<'a>> {
        let is_polled = self.open && self.asleep && self.not_before.is_none_or(|at| at <= now);
        is_polled.then(|| PollFd::new(input, PollFlags::POLLIN))
    }

    /// Returns the time until the keeper polls the input again; none if that is now or never.
    pub(super) fn due_in(&self, now: Instant) -> Option<Duration> {
        let at = self.not_before.filter(|_| self.open && self.asleep)?;
        at.checked_duration_since(now)
            .filter(|left| !left.is_zero())
    }

    /// Reports whether the events that poll returned for the input require a wake.
    pub(super) fn requires_wake(
        &mut self,
        events: PollFlags,
        input: impl AsFd,
        now: Instant,
    ) -> bool {
        let has_bytes = events.contains(PollFlags::POLLIN);
        // No process will write to the input any more, and each poll would report that at once.
        self.open &= has_bytes
            || !events.intersects(PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL);
        if !has_bytes {
            return false;
        }
        self.not_before = Some(now + RETRY_INTERVAL);
        let bytes = unread(input);
        if self.left_unread.is_some() && self.left_unread == bytes {
            return false;
        }
        (self.woken_for, self.left_unread) = (bytes, None);
        true
    }
}

/// Returns the number of unread bytes.
fn unread(input: impl AsFd) -> Option<u64> {
    rustix::io::ioctl_fionread(input).ok()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use nix::poll::{PollTimeout, poll};

    use super::*;

    fn events(watched: &Input, input: &impl AsFd, now: Instant) -> Option<PollFlags> {
        let mut fds = [watched.poll_fd(input.as_fd(), now)?];
        poll(&mut fds, PollTimeout::ZERO).expect("polled");
        fds[0].revents()
    }

    #[test]
    fn typed_input_requests_the_wake_of_a_sleeping_sandbox_at_intervals() {
        let (input, mut client) = std::io::pipe().expect("a pipe");
        let mut watched = Input::new(&input);
        let now = Instant::now();
        client.write_all(b"x").expect("typed");
        assert_eq!(events(&watched, &input, now), None, "gVisor reads it");
        watched.fell_asleep(&input);
        let flags = events(&watched, &input, now).expect("it looks");
        assert!(watched.requires_wake(flags, &input, now));
        assert_eq!(events(&watched, &input, now), None, "its wake is under way");
        assert_eq!(watched.due_in(now), Some(RETRY_INTERVAL));
        let later = now + RETRY_INTERVAL;
        assert_eq!(watched.due_in(later), None);
        assert!(
            events(&watched, &input, later)
                .is_some_and(|flags| watched.requires_wake(flags, &input, later))
        );
        watched.woke();
        assert_eq!(events(&watched, &input, later + RETRY_INTERVAL), None);
    }

    #[test]
    fn a_program_that_does_not_read_is_woken_once_for_waiting_input() {
        let (input, mut client) = std::io::pipe().expect("a pipe");
        let mut watched = Input::new(&input);
        let mut now = Instant::now();
        let mut sleeps = |watched: &mut Input| {
            now += RETRY_INTERVAL;
            watched.fell_asleep(&input);
            let events = events(watched, &input, now);
            let wakes = events.is_some_and(|flags| watched.requires_wake(flags, &input, now));
            assert!(
                self::events(watched, &input, now).is_none(),
                "poll would spin"
            );
            watched.woke();
            wakes
        };
        client.write_all(b"line\n").expect("typed");
        assert!(sleeps(&mut watched));
        assert!(!sleeps(&mut watched) && !sleeps(&mut watched));
        client.write_all(b"x").expect("typed");
        assert!(sleeps(&mut watched));
        assert!(!sleeps(&mut watched));
    }

    #[test]
    fn an_empty_or_closed_input_wakes_no_sandbox() {
        let (input, client) = std::io::pipe().expect("a pipe");
        let mut watched = Input::new(&input);
        let now = Instant::now();
        watched.fell_asleep(&input);
        assert!(
            !events(&watched, &input, now)
                .is_some_and(|flags| watched.requires_wake(flags, &input, now))
        );
        assert!(
            watched.poll_fd(input.as_fd(), now).is_some(),
            "somebody may type yet"
        );
        drop(client);
        let flags = events(&watched, &input, now).expect("it looks");
        assert!(!watched.requires_wake(flags, &input, now));
        assert!(
            watched.poll_fd(input.as_fd(), now).is_none(),
            "poll would spin"
        );
    }

    #[test]
    fn an_input_without_a_writer_is_not_watched() {
        let null = std::fs::File::open("/dev/null").expect("a device");
        let mut watched = Input::new(&null);
        watched.fell_asleep(&null);
        assert!(watched.poll_fd(null.as_fd(), Instant::now()).is_none());
    }
}

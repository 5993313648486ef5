//! What a client of `attach` types while the sandbox sleeps: the keeper, which holds the container's standard input, is the only one
//! who can see it then.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};
use rustix::fs::FileType;

/// A wake takes up to a second, and one that failed does not get better by being made again and again.
const AGAIN: Duration = Duration::from_secs(10);

/// Whether the container's standard input is to be looked at, and when.
#[derive(Debug)]
pub(super) struct Typing {
    /// Somebody may write to it: a terminal or a pipe whose other end is there.
    open: bool,
    asleep: bool,
    /// A wake has been begun for what stands in it.
    not_before: Option<Instant>,
    /// Bytes that stood in it then.
    called_for: Option<u64>,
    /// Bytes that a program which was woken for them has not read: it is not woken for them again.
    overlooked: Option<u64>,
}

impl Typing {
    /// `input`: the container's standard input.
    pub(super) fn new(input: impl AsFd) -> Self {
        let is_pipe = rustix::fs::fstat(&input)
            .is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Fifo);
        Self {
            open: is_pipe || rustix::termios::isatty(input),
            asleep: false,
            not_before: None,
            called_for: None,
            overlooked: None,
        }
    }

    /// gVisor does not read it any more.
    pub(super) fn fell_asleep(&mut self, input: impl AsFd) {
        if !self.asleep {
            let known = self.called_for.take().or(self.overlooked);
            self.overlooked = known.filter(|bytes| unread(input) == Some(*bytes));
        }
        self.asleep = true;
    }

    pub(super) fn woke(&mut self) {
        (self.asleep, self.not_before) = (false, None);
    }

    pub(super) fn interest<'a>(&self, input: BorrowedFd<'a>, now: Instant) -> Option<PollFd<'a>> {
        let looks = self.open && self.asleep && self.not_before.is_none_or(|at| at <= now);
        looks.then(|| PollFd::new(input, PollFlags::POLLIN))
    }

    /// How long until it is to be looked at again.
    pub(super) fn patience(&self, now: Instant) -> Option<Duration> {
        let at = self.not_before.filter(|_| self.open && self.asleep)?;
        at.checked_duration_since(now)
            .filter(|left| !left.is_zero())
    }

    /// Whether what was seen of it asks for the sandbox.
    pub(super) fn calls(&mut self, seen: PollFlags, input: impl AsFd, now: Instant) -> bool {
        let typed = seen.contains(PollFlags::POLLIN);
        // Nobody will write to it any more, and poll would not stop saying so.
        self.open &= typed
            || !seen.intersects(PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL);
        if !typed {
            return false;
        }
        self.not_before = Some(now + AGAIN);
        let bytes = unread(input);
        if self.overlooked.is_some() && self.overlooked == bytes {
            return false;
        }
        (self.called_for, self.overlooked) = (bytes, None);
        true
    }
}

fn unread(input: impl AsFd) -> Option<u64> {
    rustix::io::ioctl_fionread(input).ok()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use nix::poll::{PollTimeout, poll};

    use super::*;

    fn seen(typing: &Typing, input: &impl AsFd, now: Instant) -> Option<PollFlags> {
        let mut fds = [typing.interest(input.as_fd(), now)?];
        poll(&mut fds, PollTimeout::ZERO).expect("polled");
        fds[0].revents()
    }

    #[test]
    fn what_is_typed_calls_a_sandbox_that_sleeps_once_in_a_while() {
        let (input, mut client) = std::io::pipe().expect("a pipe");
        let mut typing = Typing::new(&input);
        let now = Instant::now();
        client.write_all(b"x").expect("typed");
        assert_eq!(seen(&typing, &input, now), None, "gVisor reads it");
        typing.fell_asleep(&input);
        let flags = seen(&typing, &input, now).expect("it looks");
        assert!(typing.calls(flags, &input, now));
        assert_eq!(seen(&typing, &input, now), None, "its wake is under way");
        assert_eq!(typing.patience(now), Some(AGAIN));
        let later = now + AGAIN;
        assert_eq!(typing.patience(later), None);
        assert!(
            seen(&typing, &input, later).is_some_and(|flags| typing.calls(flags, &input, later))
        );
        typing.woke();
        assert_eq!(seen(&typing, &input, later + AGAIN), None);
    }

    #[test]
    fn a_program_that_does_not_read_is_woken_once_for_what_stands_there() {
        let (input, mut client) = std::io::pipe().expect("a pipe");
        let mut typing = Typing::new(&input);
        let mut now = Instant::now();
        let mut sleeps = |typing: &mut Typing| {
            now += AGAIN;
            typing.fell_asleep(&input);
            let seen = seen(typing, &input, now);
            let calls = seen.is_some_and(|flags| typing.calls(flags, &input, now));
            assert!(self::seen(typing, &input, now).is_none(), "poll would spin");
            typing.woke();
            calls
        };
        client.write_all(b"line\n").expect("typed");
        assert!(sleeps(&mut typing));
        assert!(!sleeps(&mut typing) && !sleeps(&mut typing));
        client.write_all(b"x").expect("typed");
        assert!(sleeps(&mut typing));
        assert!(!sleeps(&mut typing));
    }

    #[test]
    fn silence_and_a_closed_input_call_nobody() {
        let (input, client) = std::io::pipe().expect("a pipe");
        let mut typing = Typing::new(&input);
        let now = Instant::now();
        typing.fell_asleep(&input);
        assert!(!seen(&typing, &input, now).is_some_and(|flags| typing.calls(flags, &input, now)));
        assert!(
            typing.interest(input.as_fd(), now).is_some(),
            "somebody may type yet"
        );
        drop(client);
        let flags = seen(&typing, &input, now).expect("it looks");
        assert!(!typing.calls(flags, &input, now));
        assert!(
            typing.interest(input.as_fd(), now).is_none(),
            "poll would spin"
        );
    }

    #[test]
    fn an_input_that_nobody_can_write_to_is_not_looked_at() {
        let null = std::fs::File::open("/dev/null").expect("a device");
        let mut typing = Typing::new(&null);
        typing.fell_asleep(&null);
        assert!(typing.interest(null.as_fd(), Instant::now()).is_none());
    }
}

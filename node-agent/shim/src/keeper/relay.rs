//! Carries bytes between the pipes to a client of a terminal and the terminal in the sandbox.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, Winsize, tcgetattr, tcsetattr,
    tcsetwinsize,
};

use super::Streams;

const CHUNK: usize = 4096;

/// A client's side and the terminal in the sandbox.
#[derive(Debug)]
pub(crate) struct Relay {
    /// The master of the terminal in the sandbox.
    console: OwnedFd,
    /// Bytes of the client; none once its pipe is closed.
    input: Option<OwnedFd>,
    /// Bytes for the client.
    output: OwnedFd,
    /// Bytes from the client that the sandbox has not taken yet.
    to_container: Vec<u8>,
    /// Bytes from the sandbox that the client has not taken yet.
    to_client: Vec<u8>,
    /// The last [`Relay::carry`] has read bytes from the client.
    has_input: bool,
    /// Signals of keys that the client has pressed; none where the kernel sends them.
    signals: Option<Vec<Signal>>,
}

impl Relay {
    /// Begins to carry bytes to and from `console`, the terminal in the sandbox.
    ///
    /// `mode`: the settings of the terminal before this one, if the same program continues with it.
    pub(crate) fn new(
        console: OwnedFd,
        mode: Option<Termios>,
        streams: &Streams,
    ) -> anyhow::Result<Self> {
        if let Some(mode) = mode {
            tcsetattr(&console, OptionalActions::Now, &mode)
                .context("cannot set the terminal's mode")?;
        }
        let (input, output) = (streams.stdin.try_clone()?, streams.stdout.try_clone()?);
        for fd in [&input, &output, &console] {
            let flags = rustix::fs::fcntl_getfl(fd)?;
            rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        }
        Ok(Self {
            console,
            input: Some(input),
            output,
            to_container: Vec::new(),
            to_client: Vec::new(),
            has_input: false,
            signals: None,
        })
    }

    /// Notes the signals of keys such as Ctrl-C from now on: no process has the terminal as its
    /// controlling terminal, so that the kernel sends none.
    pub(crate) fn note_signals(&mut self) {
        self.signals = Some(Vec::new());
    }

    /// Returns the signals of the keys that were pressed since the last call.
    pub(crate) fn take_signals(&mut self) -> Vec<Signal> {
        self.signals
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    pub(crate) fn poll_fds(&self) -> Vec<PollFd<'_>> {
        let wanted = |can_read: bool, has_output: bool| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::POLLIN, can_read);
            flags.set(PollFlags::POLLOUT, has_output);
            flags
        };
        let (reads_input, has_output) = (self.to_container.is_empty(), !self.to_client.is_empty());
        let mut fds = Vec::new();
        // A closed terminal ends each poll at once, whatever is wanted of it.
        let wants_console = wanted(!has_output, !reads_input);
        if !wants_console.is_empty() {
            fds.push(PollFd::new(self.console.as_fd(), wants_console));
        }
        // A closed pipe would end each poll at once.
        let input = self.input.as_ref().filter(|_| reads_input);
        fds.extend(input.map(|input| PollFd::new(input.as_fd(), PollFlags::POLLIN)));
        if has_output {
            fds.push(PollFd::new(self.output.as_fd(), PollFlags::POLLOUT));
        }
        fds
    }

    /// Carries the available bytes.
    ///
    /// Returns false if the terminal in the sandbox is gone: the sandbox sleeps or has ended.
    pub(crate) fn carry(&mut self) -> bool {
        self.has_input = false;
        if let Some(input) = self.input.take_if(|_| self.to_container.is_empty()) {
            // A client that detaches leaves the pipe open.
            if fill(input.as_fd(), &mut self.to_container) {
                self.input = Some(input);
            }
            self.has_input = !self.to_container.is_empty();
            if let (Some(signals), Ok(mode)) = (&mut self.signals, tcgetattr(&self.console)) {
                signals.extend(key_signals(&mode, &self.to_container));
            }
        }
        if self.to_client.is_empty() && !fill(self.console.as_fd(), &mut self.to_client) {
            flush(self.output.as_fd(), &mut self.to_client);
            return false;
        }
        flush(self.console.as_fd(), &mut self.to_container);
        flush(self.output.as_fd(), &mut self.to_client);
        true
    }

    /// Reports whether the last [`Relay::carry`] has read input of a client.
    pub(crate) fn has_input(&self) -> bool {
        self.has_input
    }

    /// Carries the rest of the container's output, after the container has ended.
    pub(crate) fn drain(&mut self) {
        loop {
            flush(self.output.as_fd(), &mut self.to_client);
            if !self.to_client.is_empty() {
                return;
            }
            if !fill(self.console.as_fd(), &mut self.to_client) || self.to_client.is_empty() {
                return;
            }
        }
    }

    /// Carries the rest of the output to a client that may read slowly, at most for `limit`.
    pub(crate) fn finish(&mut self, limit: Duration) {
        let deadline = Instant::now() + limit;
        loop {
            self.drain();
            let left = deadline.saturating_duration_since(Instant::now());
            if self.to_client.is_empty() || left.is_zero() {
                return;
            }
            let mut fds = [PollFd::new(self.output.as_fd(), PollFlags::POLLOUT)];
            let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            if !matches!(poll(&mut fds, left), Ok(1..)) {
                return;
            }
        }
    }

    /// Returns the settings that the program has made for its terminal.
    pub(crate) fn mode(&self) -> Option<Termios> {
        tcgetattr(&self.console).ok()
    }

    /// Sets the size of the terminal in the sandbox. A failure means that the terminal is gone.
    pub(crate) fn resize(&self, size: Winsize) {
        let _ = tcsetwinsize(&self.console, size);
    }
}

/// Returns the size of a window in characters.
pub(crate) fn window(rows: u16, columns: u16) -> Winsize {
    Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

/// Returns the signals that the kernel would send for these bytes (termios(3), `ISIG`).
fn key_signals(mode: &Termios, bytes: &[u8]) -> Vec<Signal> {
    if !mode.local_modes.contains(LocalModes::ISIG) {
        return Vec::new();
    }
    let keys = [
        (SpecialCodeIndex::VINTR, Signal::SIGINT),
        (SpecialCodeIndex::VQUIT, Signal::SIGQUIT),
        (SpecialCodeIndex::VSUSP, Signal::SIGTSTP),
    ];
    // A key that is disabled has the code 0 (_POSIX_VDISABLE).
    let signal_of = |byte: u8| {
        keys.iter()
            .find(|(key, _)| byte != 0 && mode.special_codes[*key] == byte)
    };
    bytes
        .iter()
        .filter_map(|byte| signal_of(*byte))
        .map(|(_, signal)| *signal)
        .collect()
}

/// Reads one chunk. Returns false at the end of the file, or after an error other than EAGAIN and
/// EINTR.
fn fill(from: BorrowedFd<'_>, into: &mut Vec<u8>) -> bool {
    let mut chunk = [0; CHUNK];
    match rustix::io::read(from, &mut chunk) {
        Ok(0) => false,
        Ok(count) => {
            into.extend_from_slice(&chunk[..count]);
            true
        }
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => true,
        Err(_) => false,
    }
}

fn flush(to: BorrowedFd<'_>, from: &mut Vec<u8>) {
    while !from.is_empty() {
        match rustix::io::write(to, from) {
            Ok(count) => drop(from.drain(..count)),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use torpor_sandbox::console::Terminal;

    use super::*;

    /// A relay between pipes and the master of a terminal, with the other ends of all.
    fn piped() -> (Relay, std::io::PipeWriter, std::io::PipeReader, OwnedFd) {
        let (stdin, client_in) = std::io::pipe().expect("a pipe");
        let (client_out, stdout) = std::io::pipe().expect("a pipe");
        let terminal = Terminal::open().expect("a terminal");
        let streams = Streams {
            stdin: stdin.into(),
            stderr: stdout.try_clone().expect("a copy").into(),
            stdout: stdout.into(),
        };
        let relay = Relay::new(terminal.master, None, &streams).expect("a relay");
        (relay, client_in, client_out, terminal.slave)
    }

    #[test]
    fn bytes_of_pipes_reach_the_terminal_and_its_output_the_pipes() {
        let (mut relay, mut client_in, mut client_out, slave) = piped();
        client_in.write_all(b"ls\n").expect("written");
        assert!(relay.carry() && relay.has_input());
        let mut line = [0; 3];
        let mut slave = std::fs::File::from(slave);
        slave.read_exact(&mut line).expect("read");
        assert_eq!(&line, b"ls\n");
        // The terminal echoes the line, and the program prints.
        slave.write_all(b"a").expect("written");
        let mut shown = [0; 5];
        // The kernel brings the echo and the program's byte to the terminal's master by itself, not
        // always together.
        let there = |pipe: &_| rustix::io::ioctl_fionread(pipe).expect("a number of bytes");
        while there(&client_out) < 5 || relay.has_input() {
            assert!(relay.carry(), "the terminal is open");
        }
        client_out.read_exact(&mut shown).expect("read");
        assert_eq!(&shown, b"ls\r\na");
        drop(client_in);
        assert!(relay.carry(), "only the input has ended");
        drop(slave);
        assert!(!relay.carry(), "the terminal is gone");
    }

    #[test]
    fn a_window_of_pipes_is_set_on_request() {
        let (relay, _client_in, _client_out, slave) = piped();
        relay.resize(window(40, 120));
        let found = rustix::termios::tcgetwinsize(&slave).expect("a size");
        assert_eq!((found.ws_row, found.ws_col), (40, 120));
    }

    #[test]
    fn keys_become_signals_where_the_terminal_makes_signals_of_them() {
        let (mut relay, mut client_in, _client_out, slave) = piped();
        let mut press = |relay: &mut Relay| {
            client_in.write_all(b"a\x03b\x1c\x1a\0").expect("written");
            assert!(relay.carry());
            relay.take_signals()
        };
        assert_eq!(press(&mut relay), [], "nobody has asked for them");
        relay.note_signals();
        let all = [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTSTP];
        assert_eq!(press(&mut relay), all);
        assert_eq!(relay.take_signals(), []);
        let mut raw = tcgetattr(&slave).expect("a mode");
        raw.make_raw();
        tcsetattr(&slave, OptionalActions::Now, &raw).expect("set");
        assert_eq!(press(&mut relay), [], "an editor reads the keys itself");
    }
}

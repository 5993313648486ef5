//! The control socket of a gVisor sandbox, spoken to directly.
//!
//! A unix stream socket at `<runsc root>/runsc-<sandbox id>.sock` takes one JSON value per request,
//! `{"method": "...", "arg": ...}` with files by SCM_RIGHTS, and answers `{"success", "err", "result"}` (gVisor's
//! pkg/urpc and runsc/boot/controller.go). The protocol is internal to a runsc build: we ship that build, name its
//! digest in every image, and the e2e tests run against it. A call costs 0.1–0.5 ms where the command costs 16.

use std::io::{BufReader, ErrorKind, IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessage, MsgFlags, SockType, getsockopt, sendmsg, sockopt};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::dial::{dial, is_nobody};
use crate::sigstop::{self, Gofers};

/// An answer is never larger than this: the longest is the process list of one container.
const MAX_ANSWER: u64 = 4 << 20;
const CHECKPOINT: &str = "containerManager.Checkpoint";
/// gVisor takes a connection at once.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// Why a call on the control socket failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody listens: the sandbox is not running (any more).
    #[error("no sandbox listens on {path}")]
    NotRunning {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// It may be there, and has heard nothing.
    #[error("cannot connect to the sandbox at {path}")]
    Unreachable {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// It was stopped while it dozed, and would not answer.
    #[error("cannot resume the sandbox of {path}")]
    Halted {
        path: PathBuf,
        #[source]
        source: Box<sigstop::Error>,
    },
    #[error("cannot send {method} to the sandbox")]
    Send {
        method: &'static str,
        #[source]
        source: std::io::Error,
    },
    /// The sandbox ended with the call unread: it had no effect, and never will have. (The kernel resets a unix stream whose other end is closed with bytes unread in it; one that
    /// was read ends without an error.)
    #[error("the sandbox ended before it received {method}")]
    NotHeard {
        method: &'static str,
        #[source]
        source: std::io::Error,
    },
    /// The sandbox ended, or did not answer in time: whether the call took effect is not known.
    #[error("the sandbox did not answer {method}")]
    NoAnswer {
        method: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot parse the sandbox's answer to {method}")]
    BadAnswer {
        method: &'static str,
        #[source]
        source: serde_json::Error,
    },
    /// gVisor's own words.
    #[error("gVisor refused {method}: {message}")]
    Refused {
        method: &'static str,
        message: String,
    },
}

impl Error {
    /// Whether the call may have taken effect all the same.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::NoAnswer { .. } | Self::BadAnswer { .. })
    }

    fn of_send(method: &'static str, source: std::io::Error) -> Self {
        match source.kind() {
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Self::NotHeard { method, source },
            _ => Self::Send { method, source },
        }
    }
}

#[derive(Deserialize)]
struct Answer {
    success: bool,
    #[serde(default)]
    err: String,
    #[serde(default)]
    result: Value,
}

/// What gVisor says of a panic, without the stacks of its goroutines, which go on for pages.
pub(crate) fn without_stack(message: &str) -> &str {
    let words = message.split("\ngoroutine ").next().unwrap_or(message);
    words.trim().trim_end_matches(':')
}

/// State of one container as the sandbox tells it (gVisor's ContainerRuntimeState).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContainerState {
    Creating,
    Running,
    Stopped,
}

/// Where a signal goes (gVisor's SignalDeliveryMode).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalScope {
    /// One process; pid 0 is the container's first.
    Process,
    /// Every process of the container.
    All,
    /// The foreground process group of the process' terminal.
    Foreground,
}

/// Path of the control socket of `sandbox`.
pub fn socket_path(runsc_root: &Path, sandbox: &str) -> PathBuf {
    runsc_root.join(format!("runsc-{sandbox}.sock"))
}

/// One connection to a sandbox; one call at a time.
#[derive(Debug)]
pub struct Control {
    stream: UnixStream,
    /// Those of a sandbox that was stopped and let go on for this connection.
    gofers: Option<Gofers>,
}

/// The connection up to a deadline, which stands for all that is carried over it together: the kernel's own limit begins anew with each
/// call, and a sandbox that says a byte now and then would be listened to for months.
struct Until<'a, 'w> {
    stream: &'a UnixStream,
    /// None: for as long as it takes.
    deadline: Option<Instant>,
    /// Looks every [`LOOK`] whether the answer is still worth waiting for.
    watch: Option<Watch<'w>>,
}

/// Answers whether the wait for an answer goes on.
pub type Watch<'a> = &'a mut dyn FnMut() -> bool;

/// How often a [`Watch`] looks while the sandbox says nothing.
const LOOK: Duration = Duration::from_millis(100);

impl Until<'_, '_> {
    /// What is left, as the limit of the next call of the kernel's.
    fn left(&self) -> std::io::Result<Option<Duration>> {
        let until = |at: Instant| at.saturating_duration_since(Instant::now());
        match self.deadline.map(until) {
            Some(Duration::ZERO) => Err(ErrorKind::TimedOut.into()),
            left => Ok(left),
        }
    }
}

impl Read for Until<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        loop {
            let mut limit = self.left()?;
            if let Some(watch) = &mut self.watch {
                if !watch() {
                    return Err(std::io::Error::other(
                        "the caller stopped waiting for the answer",
                    ));
                }
                limit = Some(limit.map_or(LOOK, |left| left.min(LOOK)));
            }
            self.stream.set_read_timeout(limit)?;
            match self.stream.read(buffer).map_err(timed_out) {
                Err(error) if self.watch.is_some() && error.kind() == ErrorKind::TimedOut => {}
                read => return read,
            }
        }
    }
}

impl Write for Until<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes).map_err(timed_out)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The kernel says of a time that is over that the call would block.
fn timed_out(error: std::io::Error) -> std::io::Error {
    match error.kind() {
        ErrorKind::WouldBlock => ErrorKind::TimedOut.into(),
        _ => error,
    }
}

impl Control {
    /// Connects to the sandbox whose root container is `sandbox`, and lets it go on if it was stopped: see [`crate::sigstop`].
    pub fn connect(runsc_root: &Path, sandbox: &str) -> Result<Self, Error> {
        let path = socket_path(runsc_root, sandbox);
        let connected = match Self::connect_within(path.clone(), CONNECT_LIMIT) {
            Err(Error::Unreachable { .. })
                if sigstop::go_on_by_record(runsc_root, sandbox).is_ok() =>
            {
                Self::connect_within(path.clone(), CONNECT_LIMIT)
            }
            connected => connected,
        };
        let control = connected?;
        match sigstop::go_on(runsc_root, sandbox, control.sentry()) {
            Ok(gofers) => Ok(Self { gofers, ..control }),
            Err(source) => Err(Error::Halted {
                path,
                source: Box::new(source),
            }),
        }
    }

    /// To a sandbox that has just begun: nobody has stopped it, and there may be no record of it yet.
    pub fn connect_to_new(runsc_root: &Path, sandbox: &str) -> Result<Self, Error> {
        Self::connect_within(socket_path(runsc_root, sandbox), CONNECT_LIMIT)
    }

    /// The process that listens; 0 where it cannot be seen from here.
    fn sentry(&self) -> i32 {
        let listens = getsockopt(&self.stream, sockopt::PeerCredentials);
        listens.map_or(0, |peer| peer.pid())
    }

    fn connect_within(path: PathBuf, limit: Duration) -> Result<Self, Error> {
        match dial(&path, SockType::Stream, limit) {
            Ok(stream) => Ok(Self {
                stream: stream.into(),
                gofers: None,
            }),
            Err(errno) => {
                let source = errno.into();
                Err(match is_nobody(errno) {
                    true => Error::NotRunning { path, source },
                    false => Error::Unreachable { path, source },
                })
            }
        }
    }

    /// The sandbox' gofers, where they had to be known to connect: to read of them again takes a tenth of a wake's own time.
    pub(crate) fn gofers(&self) -> Option<&Gofers> {
        self.gofers.as_ref()
    }

    /// The raw descriptor, for poll.
    pub fn as_raw_fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    fn send(
        &mut self,
        method: &'static str,
        arg: &Value,
        files: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<(), Error> {
        let request = json!({ "method": method, "arg": arg })
            .to_string()
            .into_bytes();
        let fds: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&fds)];
        let cmsgs: &[ControlMessage<'_>] = if fds.is_empty() { &[] } else { &rights };
        let failed = |source| Error::of_send(method, source);
        let mut until = Until {
            stream: &self.stream,
            deadline,
            watch: None,
        };
        let limit = until.left().map_err(failed)?;
        self.stream.set_write_timeout(limit).map_err(failed)?;
        let sent = sendmsg::<()>(
            self.stream.as_raw_fd(),
            &[IoSlice::new(&request)],
            cmsgs,
            MsgFlags::MSG_NOSIGNAL,
            None,
        )
        .map_err(|errno| failed(timed_out(errno.into())))?;
        until.write_all(&request[sent..]).map_err(failed)
    }

    fn receive<T: DeserializeOwned>(
        &mut self,
        method: &'static str,
        deadline: Option<Instant>,
        watch: Option<Watch<'_>>,
    ) -> Result<T, Error> {
        let until = Until {
            stream: &self.stream,
            deadline,
            watch,
        };
        // One call at a time: nothing comes after its answer. Without a buffer each byte would be a call of the kernel's.
        let limited = BufReader::new(until.take(MAX_ANSWER));
        let mut values = serde_json::Deserializer::from_reader(limited).into_iter::<Answer>();
        let answer = match values.next() {
            Some(Ok(answer)) => answer,
            Some(Err(error)) if error.is_io() || error.is_eof() => {
                let source = std::io::Error::from(error);
                return Err(match source.kind() {
                    ErrorKind::ConnectionReset => Error::NotHeard { method, source },
                    _ => Error::NoAnswer { method, source },
                });
            }
            Some(Err(source)) => return Err(Error::BadAnswer { method, source }),
            None => {
                let source = std::io::ErrorKind::UnexpectedEof.into();
                return Err(Error::NoAnswer { method, source });
            }
        };
        if !answer.success {
            return Err(Error::Refused {
                method,
                message: without_stack(&answer.err).to_owned(),
            });
        }
        serde_json::from_value(answer.result).map_err(|source| Error::BadAnswer { method, source })
    }

    pub fn call<T: DeserializeOwned>(
        &mut self,
        method: &'static str,
        arg: &Value,
        files: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<T, Error> {
        let deadline = Some(Instant::now() + timeout);
        self.send(method, arg, files, deadline)?;
        self.receive(method, deadline, None)
    }

    /// Stops every task; returns when all of them are stopped. gVisor counts: see [`crate::pause`].
    pub(crate) fn pause(&mut self, timeout: Duration) -> Result<(), Error> {
        self.call::<Value>("containerManager.Pause", &Value::Null, &[], timeout)
            .map(drop)
    }

    /// Lets the tasks run on. Once too often ends the sandbox: see [`crate::pause`].
    pub(crate) fn resume(&mut self, timeout: Duration) -> Result<(), Error> {
        self.call::<Value>("containerManager.Resume", &Value::Null, &[], timeout)
            .map(drop)
    }

    /// Lets go of a container other than the sandbox' first: its processes are killed, and gVisor knows it no more.
    pub(crate) fn destroy_container(
        &mut self,
        container: &str,
        timeout: Duration,
    ) -> Result<(), Error> {
        let method = "containerManager.DestroySubcontainer";
        self.call::<Value>(method, &json!(container), &[], timeout)
            .map(drop)
    }

    /// State of one container. Answers also while the sandbox is paused, and so tells whether it is alive.
    pub fn container_state(
        &mut self,
        container: &str,
        timeout: Duration,
    ) -> Result<ContainerState, Error> {
        let method = "containerManager.ContainerRuntimeState";
        let raw: i64 = self.call(method, &json!(container), &[], timeout)?;
        Ok(match raw {
            1 => ContainerState::Creating,
            2 => ContainerState::Running,
            _ => ContainerState::Stopped,
        })
    }

    /// Processor time that the sandbox' programs have used since it was started or restored, by gVisor's own accounts.
    pub fn processor_time(&mut self, sandbox: &str, timeout: Duration) -> Result<Duration, Error> {
        #[derive(Deserialize)]
        struct Usage {
            /// Nanoseconds by container; null when there is none.
            #[serde(rename = "containerUsage", default)]
            containers: Option<std::collections::BTreeMap<String, u64>>,
        }
        let usage: Usage = self.call("containerManager.Event", &json!(sandbox), &[], timeout)?;
        let containers = usage.containers.unwrap_or_default();
        let total = containers
            .values()
            .fold(0_u64, |sum, one| sum.saturating_add(*one));
        Ok(Duration::from_nanos(total))
    }

    /// Bytes that the memory of the sandbox' programs takes, in swap or not: an image of it is about as large, or smaller by its zeros.
    pub fn memory_usage(&mut self, timeout: Duration) -> Result<u64, Error> {
        #[derive(Deserialize)]
        struct Usage {
            #[serde(rename = "Total")]
            total: u64,
        }
        // Not in full: that would go through all pages.
        let arg = json!({ "Full": false });
        let usage: Usage = self.call("Usage.Collect", &arg, &[], timeout)?;
        Ok(usage.total)
    }

    /// Has the sentry collect its garbage; its runtime does so by itself when the last time was an hour ago (Google's build: two minutes), or the heap has doubled since.
    /// It also lets go of what it caches of files: of a sandbox that was just saved nothing is left of that.
    pub fn collect_garbage(&mut self, timeout: Duration) -> Result<(), Error> {
        let arg = json!({ "wait": true, "do_not_gc": false });
        self.call::<Value>("Usage.Reduce", &arg, &[], timeout)
            .map(drop)
    }

    /// Whether a file is there that the pause container can open. Reads it into nowhere; a FIFO in its place is waited for in vain.
    pub fn has_file(&mut self, path: &str, timeout: Duration) -> Result<bool, Error> {
        let nowhere = std::fs::OpenOptions::new().write(true).open("/dev/null");
        let method = "Fs.Cat";
        let nowhere = nowhere.map_err(|source| Error::Send { method, source })?;
        let arg = json!({ "files": [path] });
        match self.call::<Value>(method, &arg, &[nowhere.as_fd()], timeout) {
            Ok(_) => Ok(true),
            Err(Error::Refused { message, .. }) if message.contains("no such file") => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Sends signal number `signo`.
    pub fn signal(
        &mut self,
        container: &str,
        pid: i32,
        signo: i32,
        scope: SignalScope,
        timeout: Duration,
    ) -> Result<(), Error> {
        let mode = match scope {
            SignalScope::Process => 0,
            SignalScope::All => 1,
            SignalScope::Foreground => 2,
        };
        let arg = json!({ "CID": container, "Signo": signo, "PID": pid, "Mode": mode });
        self.call::<Value>("containerManager.Signal", &arg, &[], timeout)
            .map(drop)
    }

    /// Pids in the sandbox's own numbering of the processes of one container.
    pub fn processes(&mut self, container: &str, timeout: Duration) -> Result<Vec<Value>, Error> {
        let method = "containerManager.Processes";
        let found: Option<Vec<Value>> = self.call(method, &json!(container), &[], timeout)?;
        Ok(found.unwrap_or_default())
    }

    /// Writes the whole sandbox to three files (kernel state, pages metadata, pages), which must be empty, and leaves
    /// it as it was (paused, if it was paused). A failed encode kills nothing because the sandbox is told to go on.
    /// Where `watch` ends the wait, the sandbox may go on writing: [`Self::end_of_checkpoint`] waits for its end.
    pub fn checkpoint(
        &mut self,
        files: [BorrowedFd<'_>; 3],
        timeout: Duration,
        watch: Watch<'_>,
    ) -> Result<(), Error> {
        let arg = json!({
            "key": null,
            "metadata": { "compression": "none" },
            "app_mf_exclude_committed_zero_pages": true,
            "have_pages_file": true,
            "Resume": true,
        });
        let deadline = Some(Instant::now() + timeout);
        self.send(CHECKPOINT, &arg, &files, deadline)?;
        self.receive::<Value>(CHECKPOINT, deadline, Some(watch))
            .map(drop)
    }

    /// Reads the answer to a checkpoint for which nobody waited any more.
    pub(crate) fn end_of_checkpoint(
        &mut self,
        timeout: Duration,
        watch: Watch<'_>,
    ) -> Result<(), Error> {
        let deadline = Some(Instant::now() + timeout);
        self.receive::<Value>(CHECKPOINT, deadline, Some(watch))
            .map(drop)
    }

    /// Asks to be told when the container's first process ends; the answer is read by [`Self::wait_result`].
    pub fn begin_wait(&mut self, container: &str) -> Result<(), Error> {
        self.send("containerManager.Wait", &json!(container), &[], None)
    }

    /// Reads the answer of [`Self::begin_wait`]: a wait status as wait(2) gives it.
    pub fn wait_result(&mut self) -> Result<WaitStatus, Error> {
        self.wait_result_until(None)
    }

    /// The same, but not for longer than `timeout`.
    pub fn wait_result_within(&mut self, timeout: Duration) -> Result<WaitStatus, Error> {
        self.wait_result_until(Some(Instant::now() + timeout))
    }

    fn wait_result_until(&mut self, deadline: Option<Instant>) -> Result<WaitStatus, Error> {
        self.receive::<u32>("containerManager.Wait", deadline, None)
            .map(WaitStatus)
    }

    /// Starts a process in a container; `arg` is gVisor's control.ExecArgs. Answers its pid in the sandbox.
    pub fn execute(
        &mut self,
        arg: &Value,
        files: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<i32, Error> {
        self.call("containerManager.ExecuteAsync", arg, files, timeout)
    }

    /// Asks to be told when process `pid` (as [`Self::execute`] answered) ends; see [`Self::wait_result`].
    pub fn begin_wait_pid(&mut self, container: &str, pid: i32) -> Result<(), Error> {
        self.send(
            "containerManager.WaitPID",
            &json!({ "PID": pid, "CID": container }),
            &[],
            None,
        )
    }
}

/// A wait status as wait(2) gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitStatus(pub u32);

impl WaitStatus {
    /// What a shell would call it: the exit code, or 128 + the signal's number.
    pub fn exit_code(self) -> u8 {
        let signal = u8::try_from(self.0 & 0x7f).unwrap_or(0);
        if signal == 0 {
            u8::try_from((self.0 >> 8) & 0xff).unwrap_or(255)
        } else {
            128 + signal
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn wait_status_is_read_as_a_shell_reads_it() {
        assert_eq!(WaitStatus(0).exit_code(), 0);
        assert_eq!(WaitStatus(3 << 8).exit_code(), 3);
        assert_eq!(WaitStatus(9).exit_code(), 137);
        assert_eq!(WaitStatus(0x80 | 11).exit_code(), 139);
    }

    fn answering(answer: &'static str) -> (tempfile::TempDir, Control) {
        let dir = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(socket_path(dir.path(), "s")).expect("a socket");
        std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().expect("a connection");
            let mut buffer = [0; 4096];
            let _ = peer.read(&mut buffer).expect("a request");
            peer.write_all(answer.as_bytes()).expect("an answer");
        });
        let control = Control::connect(dir.path(), "s").expect("connected");
        (dir, control)
    }

    #[test]
    fn a_refusal_carries_gvisors_words() {
        let (_dir, mut control) =
            answering(r#"{"success":false,"err":"not paused","result":null}"#);
        let error = control.resume(Duration::from_secs(5)).expect_err("refused");
        assert!(matches!(&error, Error::Refused { message, .. } if message == "not paused"));
        assert!(!error.is_unknown());
    }

    #[test]
    fn a_refusal_has_no_stacks_in_it() {
        let (_dir, mut control) = answering(
            r#"{"success":false,"err":"no space left on device:\ngoroutine 7 [running]:\nmain.save()","result":null}"#,
        );
        let error = control.pause(Duration::from_secs(5)).expect_err("refused");
        assert!(
            error.to_string().ends_with("no space left on device"),
            "{error}"
        );
    }

    #[test]
    fn a_sandbox_that_dies_before_it_answers_leaves_the_outcome_unknown() {
        let (_dir, mut control) = answering("");
        let error = control
            .pause(Duration::from_secs(5))
            .expect_err("no answer");
        assert!(error.is_unknown(), "{error}");
    }

    #[test]
    fn an_answer_in_drips_is_waited_for_no_longer_than_one_in_a_piece() {
        let dir = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(socket_path(dir.path(), "s")).expect("a socket");
        let answers = std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().expect("a connection");
            // Each comes in time, all of them together do not; nobody may listen any more.
            for _ in 0..100 {
                if peer.write_all(b" ").is_err() {
                    return;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = peer.write_all(br#"{"success":true,"err":"","result":null}"#);
        });
        let mut control = Control::connect(dir.path(), "s").expect("connected");
        let error = control
            .resume(Duration::from_millis(200))
            .expect_err("no answer in time");
        let over = |source: &std::io::Error| source.kind() == ErrorKind::TimedOut;
        assert!(
            matches!(&error, Error::NoAnswer { source, .. } if over(source)),
            "{error:?}"
        );
        assert!(error.is_unknown());
        drop(control);
        answers.join().expect("no panic");
    }

    #[test]
    fn a_call_that_is_not_read_is_given_up_and_had_no_effect() {
        let dir = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(socket_path(dir.path(), "s")).expect("a socket");
        let mut control = Control::connect(dir.path(), "s").expect("connected");
        let (given_up, waits) = std::sync::mpsc::channel::<()>();
        let deaf = std::thread::spawn(move || {
            // Not for ever: who waits for it would wait too.
            let _ = waits.recv_timeout(Duration::from_secs(10));
            drop(listener);
        });
        // More than a socket holds.
        let long = "x".repeat(8 << 20);
        let error = control
            .destroy_container(&long, Duration::from_millis(200))
            .expect_err("not read");
        let over = |source: &std::io::Error| source.kind() == ErrorKind::TimedOut;
        assert!(
            matches!(&error, Error::Send { source, .. } if over(source)),
            "{error:?}"
        );
        assert!(!error.is_unknown());
        drop(given_up);
        deaf.join().expect("no panic");
    }

    #[test]
    fn a_sandbox_that_dies_with_the_call_unread_has_not_heard_of_it() {
        for accepts in [true, false] {
            let dir = tempfile::tempdir().expect("a directory");
            let listener = UnixListener::bind(socket_path(dir.path(), "s")).expect("a socket");
            let mut control = Control::connect(dir.path(), "s").expect("connected");
            let peer = accepts.then(|| listener.accept().expect("a connection"));
            let dies = std::thread::spawn(move || {
                if let Some((peer, _)) = &peer {
                    wait_until_readable(peer);
                }
                drop((peer, listener));
            });
            let error = control.resume(Duration::from_secs(5)).expect_err("dead");
            assert!(matches!(error, Error::NotHeard { .. }), "{accepts} {error}");
            assert!(!error.is_unknown());
            dies.join().expect("no panic");
        }
    }

    fn wait_until_readable(stream: &UnixStream) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let limit = Timespec {
            tv_sec: 5,
            tv_nsec: 0,
        };
        let mut fds = [PollFd::new(stream, PollFlags::IN)];
        poll(&mut fds, Some(&limit)).expect("bytes to read");
    }

    #[test]
    fn a_sandbox_that_takes_no_connections_is_not_taken_for_gone() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = socket_path(dir.path(), "s");
        let _listener = crate::dial::tests::deaf(&path, SockType::Stream);
        let connected = Control::connect_within(path, Duration::from_millis(50));
        let error = connected.expect_err("it does not hear");
        assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
        assert!(!error.is_unknown());
    }

    #[test]
    fn nobody_listening_means_not_running() {
        let dir = tempfile::tempdir().expect("a directory");
        let error = Control::connect(dir.path(), "s").expect_err("nobody there");
        assert!(matches!(error, Error::NotRunning { .. }));
    }
}

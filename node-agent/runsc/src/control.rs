//! A client of the control socket of a gVisor sandbox.
//!
//! A unix stream socket at `<runsc root>/runsc-<sandbox id>.sock` takes one JSON value per request,
//! `{"method": "...", "arg": ...}`, with files by SCM_RIGHTS. It answers
//! `{"success", "err", "result"}` (gVisor's pkg/urpc and runsc/boot/controller.go). The protocol is
//! internal to a runsc build. Torpor ships that build, every image names its digest, and the e2e
//! tests run against it. A call costs 0.1–0.5 ms; a command of runsc costs 16 ms.

use std::io::{BufReader, ErrorKind, IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessage, MsgFlags, SockType, getsockopt, sendmsg, sockopt};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::sigstop::{self, Gofers};
use torpor_messages::wire::{dial, is_not_listening};

/// Bytes that are read of an answer. The longest answer is the process list of one container.
const MAX_ANSWER: u64 = 4 << 20;
const CHECKPOINT: &str = "containerManager.Checkpoint";
/// Limit for connecting. gVisor accepts a connection at once.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);

/// Why a call on the control socket failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No process listens: the sandbox does not run, or runs no longer.
    #[error("no sandbox listens on {path}")]
    NotRunning {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The sandbox may exist, and has received nothing.
    #[error("cannot connect to the sandbox at {path}")]
    Unreachable {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The dozing sandbox' processes are stopped and cannot be continued, so it would not answer.
    #[error("cannot resume the sandbox of {path}")]
    Stopped {
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
    /// The sandbox ended without reading the call: the call has no effect. (The kernel resets a
    /// unix stream whose other end is closed with unread bytes in it. A stream whose bytes were all
    /// read ends without an error.)
    #[error("the sandbox ended before it received {method}")]
    NotReceived {
        method: &'static str,
        #[source]
        source: std::io::Error,
    },
    /// The sandbox ended, or did not answer in time. It is not known whether the call took effect.
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
    /// gVisor answered with this error message.
    #[error("gVisor refused {method}: {message}")]
    Refused {
        method: &'static str,
        message: String,
    },
}

impl Error {
    /// Reports whether the call may have taken effect in spite of the error.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::NoAnswer { .. } | Self::BadAnswer { .. })
    }

    fn of_send(method: &'static str, source: std::io::Error) -> Self {
        match source.kind() {
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
                Self::NotReceived { method, source }
            }
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

/// Returns the message of a panic of gVisor without the stacks of its goroutines, which take pages.
pub(crate) fn without_stack(message: &str) -> &str {
    let text = message.split("\ngoroutine ").next().unwrap_or(message);
    text.trim().trim_end_matches(':')
}

/// State of one container as the sandbox reports it (gVisor's ContainerRuntimeState).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContainerState {
    Creating,
    Running,
    Stopped,
}

/// Receivers of a signal (gVisor's SignalDeliveryMode).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalScope {
    /// One process; pid 0 is the container's first process.
    Process,
    /// Every process of the container.
    All,
    /// The foreground process group of the process' terminal.
    Foreground,
}

/// Returns the path of the control socket of `sandbox`.
pub fn socket_path(runsc_root: &Path, sandbox: &str) -> PathBuf {
    runsc_root.join(format!("runsc-{sandbox}.sock"))
}

/// A connection to a sandbox, for one call at a time.
#[derive(Debug)]
pub struct Control {
    stream: UnixStream,
    /// Gofers of a sandbox whose stopped processes were continued for this connection.
    gofers: Option<Gofers>,
}

/// The connection up to a deadline for all its reads and writes together. The kernel's own limit
/// begins anew with each system call: a sandbox that sends a byte now and then could be waited for
/// without end.
struct Until<'a, 'w> {
    stream: &'a UnixStream,
    /// None: no limit.
    deadline: Option<Instant>,
    /// Called every [`WATCH_PERIOD`] while an answer is awaited.
    watch: Option<Watch<'w>>,
}

/// Returns whether the wait for an answer continues.
pub type Watch<'a> = &'a mut dyn FnMut() -> bool;

/// Time between two calls of a [`Watch`] while the sandbox sends nothing.
const WATCH_PERIOD: Duration = Duration::from_millis(100);

impl Until<'_, '_> {
    /// Returns the remaining time, as the limit of the next system call.
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
                limit = Some(limit.map_or(WATCH_PERIOD, |left| left.min(WATCH_PERIOD)));
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

/// Translates the kernel's error for an exceeded limit: "the call would block".
fn timed_out(error: std::io::Error) -> std::io::Error {
    match error.kind() {
        ErrorKind::WouldBlock => ErrorKind::TimedOut.into(),
        _ => error,
    }
}

impl Control {
    /// Connects to the sandbox whose root container is `sandbox`. Continues its processes where
    /// they are stopped: see [`crate::sigstop`].
    pub fn connect(runsc_root: &Path, sandbox: &str) -> Result<Self, Error> {
        let path = socket_path(runsc_root, sandbox);
        let connected = match Self::connect_within(path.clone(), CONNECT_LIMIT) {
            Err(Error::Unreachable { .. })
                if sigstop::continue_by_record(runsc_root, sandbox).is_ok() =>
            {
                Self::connect_within(path.clone(), CONNECT_LIMIT)
            }
            connected => connected,
        };
        let control = connected?;
        match sigstop::continue_stopped(runsc_root, sandbox, control.sentry()) {
            Ok(gofers) => Ok(Self { gofers, ..control }),
            Err(source) => Err(Error::Stopped {
                path,
                source: Box::new(source),
            }),
        }
    }

    /// Connects to a sandbox that has just started. Its processes are not stopped, and runsc may
    /// have no record of it yet.
    pub fn connect_to_new(runsc_root: &Path, sandbox: &str) -> Result<Self, Error> {
        Self::connect_within(socket_path(runsc_root, sandbox), CONNECT_LIMIT)
    }

    /// Returns the id of the listening process. 0: this process' PID namespace does not have it.
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
                Err(match is_not_listening(errno) {
                    true => Error::NotRunning { path, source },
                    false => Error::Unreachable { path, source },
                })
            }
        }
    }

    /// Returns the sandbox' gofers where [`Self::connect`] has read them. Reading them again takes
    /// a tenth of a wake's own time.
    pub(crate) fn gofers(&self) -> Option<&Gofers> {
        self.gofers.as_ref()
    }

    /// Returns the descriptor, for poll.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
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
        // One call at a time: no bytes follow its answer. Without a buffer each byte would be a
        // system call.
        let limited = BufReader::new(until.take(MAX_ANSWER));
        let mut values = serde_json::Deserializer::from_reader(limited).into_iter::<Answer>();
        let answer = match values.next() {
            Some(Ok(answer)) => answer,
            Some(Err(error)) if error.is_io() || error.is_eof() => {
                let source = std::io::Error::from(error);
                return Err(match source.kind() {
                    ErrorKind::ConnectionReset => Error::NotReceived { method, source },
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

    /// Calls a method and returns its result. `timeout` is for the call and its answer together.
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

    /// Stops every task, and returns when all tasks are stopped. gVisor counts pauses: see
    /// [`crate::pause`].
    pub(crate) fn pause(&mut self, timeout: Duration) -> Result<(), Error> {
        self.call::<Value>("containerManager.Pause", &Value::Null, &[], timeout)
            .map(drop)
    }

    /// Continues the tasks. One resume too many ends the sandbox: see [`crate::pause`].
    pub(crate) fn resume(&mut self, timeout: Duration) -> Result<(), Error> {
        self.call::<Value>("containerManager.Resume", &Value::Null, &[], timeout)
            .map(drop)
    }

    /// Kills the processes of a container other than the sandbox' first, and removes the container
    /// from gVisor.
    pub(crate) fn destroy_container(
        &mut self,
        container: &str,
        timeout: Duration,
    ) -> Result<(), Error> {
        let method = "containerManager.DestroySubcontainer";
        self.call::<Value>(method, &json!(container), &[], timeout)
            .map(drop)
    }

    /// Returns the state of one container. A paused sandbox answers too, so the call shows whether
    /// the sandbox is alive.
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

    /// Returns the processor time that the sandbox' programs have used since the sandbox was
    /// started or restored, by gVisor's own accounts.
    pub fn processor_time(&mut self, sandbox: &str, timeout: Duration) -> Result<Duration, Error> {
        #[derive(Deserialize)]
        struct Usage {
            /// Nanoseconds by container; null when there is no container.
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

    /// Returns the bytes of the memory of the sandbox' programs, in swap or not. An image of the
    /// sandbox is about as large, or smaller by the pages of zeros.
    pub fn memory_usage(&mut self, timeout: Duration) -> Result<u64, Error> {
        #[derive(Deserialize)]
        struct Usage {
            #[serde(rename = "Total")]
            total: u64,
        }
        // A full count would go through all pages.
        let arg = json!({ "Full": false });
        let usage: Usage = self.call("Usage.Collect", &arg, &[], timeout)?;
        Ok(usage.total)
    }

    /// Requests a garbage collection of the sentry. Go's runtime collects by itself an hour after
    /// the last time (Google's build: two minutes), or when the heap has doubled. The sentry also
    /// drops its cache of files; a sandbox that was just saved has none left.
    pub fn collect_garbage(&mut self, timeout: Duration) -> Result<(), Error> {
        let arg = json!({ "wait": true, "do_not_gc": false });
        self.call::<Value>("Usage.Reduce", &arg, &[], timeout)
            .map(drop)
    }

    /// Reports whether the pause container can open the file at `path`. Reads the file and discards
    /// its bytes. A FIFO at `path` lets the call run into its timeout.
    pub fn has_file(&mut self, path: &str, timeout: Duration) -> Result<bool, Error> {
        let null = std::fs::OpenOptions::new().write(true).open("/dev/null");
        let method = "Fs.Cat";
        let null = null.map_err(|source| Error::Send { method, source })?;
        let arg = json!({ "files": [path] });
        match self.call::<Value>(method, &arg, &[null.as_fd()], timeout) {
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

    /// Returns the processes of one container, by their pids in the sandbox.
    pub fn processes(&mut self, container: &str, timeout: Duration) -> Result<Vec<Value>, Error> {
        let method = "containerManager.Processes";
        let found: Option<Vec<Value>> = self.call(method, &json!(container), &[], timeout)?;
        Ok(found.unwrap_or_default())
    }

    /// Writes the whole sandbox to three empty files: kernel state, pages metadata, pages. The
    /// sandbox stays as it was (paused, if it was paused). The call requests that the sandbox
    /// continues, so a failed encode kills nothing. Where `watch` ends the wait, the sandbox may
    /// write on: [`Self::end_of_checkpoint`] waits for the end.
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

    /// Reads the answer to a checkpoint after [`Self::checkpoint`] has stopped waiting for it.
    pub(crate) fn end_of_checkpoint(
        &mut self,
        timeout: Duration,
        watch: Watch<'_>,
    ) -> Result<(), Error> {
        let deadline = Some(Instant::now() + timeout);
        self.receive::<Value>(CHECKPOINT, deadline, Some(watch))
            .map(drop)
    }

    /// Requests the end of the container's first process. [`Self::wait_result`] reads the answer.
    pub fn begin_wait(&mut self, container: &str) -> Result<(), Error> {
        self.send("containerManager.Wait", &json!(container), &[], None)
    }

    /// Reads the answer of [`Self::begin_wait`], without a limit.
    pub fn wait_result(&mut self) -> Result<WaitStatus, Error> {
        self.wait_result_until(None)
    }

    /// Reads the answer of [`Self::begin_wait`] within `timeout`.
    pub fn wait_result_within(&mut self, timeout: Duration) -> Result<WaitStatus, Error> {
        self.wait_result_until(Some(Instant::now() + timeout))
    }

    fn wait_result_until(&mut self, deadline: Option<Instant>) -> Result<WaitStatus, Error> {
        self.receive::<u32>("containerManager.Wait", deadline, None)
            .map(WaitStatus)
    }

    /// Starts a process in a container, and returns its pid in the sandbox. `arg` is gVisor's
    /// control.ExecArgs.
    pub fn execute(
        &mut self,
        arg: &Value,
        files: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<i32, Error> {
        self.call("containerManager.ExecuteAsync", arg, files, timeout)
    }

    /// Requests the end of process `pid` (from [`Self::execute`]). [`Self::wait_result`] reads the
    /// answer.
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
    /// Returns the exit code as a shell reports it: the code, or 128 + the signal's number.
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
mod tests;

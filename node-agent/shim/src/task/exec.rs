//! Processes that containerd has the shim run in a container.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use containerd_shim::protos::events::task::TaskExecStarted;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use rustix::termios::Winsize;
use serde_json::Value;
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_records::WakeCause;
use torpor_runsc::control::{self, SignalScope};
use torpor_sandbox::console::Terminal;

use super::container::{Pod, lock};
use super::process::Life;
use super::run::{Begun, Running, Target, begin};
use super::streams::{self, Held, Paths};
use super::verbs::{self, Caller};
use super::{exited, own_pid};
use crate::KILLED;
use crate::keeper::Streams;
use crate::keeper::relay::Relay;

/// Time for which the shim holds an end of the input of a process.
const STDIN_HELD: Duration = Duration::from_secs(5);
/// Time in which a client takes the last output of a terminal.
const OUTPUT_LIMIT: Duration = Duration::from_secs(2);

/// A process, from its registration to its deletion.
#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) id: String,
    pub(crate) container: ContainerId,
    pub(crate) paths: Paths,
    pub(crate) life: Life,
    /// The OCI process.
    process: Value,
    held: Mutex<Held>,
    terminal: Mutex<Window>,
    target: Mutex<Option<Target>>,
}

/// The terminal of a process, and the size that containerd has requested.
#[derive(Debug, Default)]
struct Window {
    size: Option<Winsize>,
    /// The terminal's master, once there is one.
    master: Option<OwnedFd>,
}

impl Exec {
    /// `process`: the OCI process.
    pub(crate) fn new(id: String, container: ContainerId, process: Value, paths: Paths) -> Self {
        Self {
            id,
            container,
            paths,
            life: Life::new(),
            process,
            held: Mutex::default(),
            terminal: Mutex::default(),
            target: Mutex::default(),
        }
    }

    /// Runs the process. A sandbox that sleeps is woken first.
    pub(crate) fn start(
        self: &Arc<Self>,
        pod: &Arc<Pod>,
        caller: Caller<'_>,
    ) -> anyhow::Result<()> {
        let (streams, held) = streams::open(&self.paths)?;
        *lock(&self.held) = held;
        let (relay, slave) = match self.paths.terminal {
            true => self
                .terminal(&streams)
                .map(|(relay, slave)| (Some(relay), Some(slave)))?,
            false => (None, None),
        };
        let files = match &slave {
            Some(slave) => [slave.as_fd(); 3],
            None => streams.fds(),
        };
        let node = pod.node()?;
        let wake = |sandbox: &SandboxId| wake(caller, sandbox);
        let begun = begin(node, &self.container, self.process.clone(), files, &wake)?;
        // From now on the sandbox alone holds the streams, so that their end is noticed.
        drop((streams, slave));
        self.life.start();
        let event = TaskExecStarted {
            container_id: self.container.to_string(),
            exec_id: self.id.clone(),
            pid: own_pid(),
            ..TaskExecStarted::default()
        };
        pod.events.publish(&event);
        let running = match begun {
            Begun::Answered => {
                self.end(pod, 0);
                return Ok(());
            }
            Begun::Running(running) => running,
        };
        let target = running.target().clone();
        *lock(&self.target) = Some(target.clone());
        let kill = || target.signal(node, SignalScope::Process, Signal::SIGKILL as i32);
        // containerd has given the start up, and has deleted the process.
        if self.life.exit().is_some() {
            let _ = kill();
        }
        let (exec, of) = (Arc::clone(self), Arc::clone(pod));
        let waits = std::thread::Builder::new()
            .name("exec".to_owned())
            .spawn(move || exec.wait(&of, running, relay));
        if let Err(error) = waits {
            let _ = kill();
            self.end(pod, KILLED);
            return Err(error).context("cannot wait for the process");
        }
        Ok(())
    }

    /// Makes the terminal; returns it with the end that the process gets.
    fn terminal(&self, streams: &Streams) -> anyhow::Result<(Relay, OwnedFd)> {
        let Terminal { master, slave } = Terminal::open()?;
        let mut window = lock(&self.terminal);
        window.master = Some(master.try_clone()?);
        let mut relay = Relay::new(master, None, streams)?;
        relay.note_signals();
        if let Some(size) = window.size {
            relay.resize(size);
        }
        Ok((relay, slave))
    }

    /// Waits for the end of the process, and carries the bytes of its terminal.
    fn wait(&self, pod: &Pod, running: Running, mut relay: Option<Relay>) {
        // containerd has opened its end of the input by then. From then on the input ends with
        // containerd, whose client is gone when it has died.
        let keeps_stdin_until = Instant::now() + STDIN_HELD;
        while let Ok(false) = self.carry(pod, &running, &mut relay, keeps_stdin_until) {}
        let code = pod.node().map_or(KILLED, |node| running.wait(node));
        if let Some(relay) = &mut relay {
            relay.finish(OUTPUT_LIMIT);
        }
        drop(relay);
        self.end(pod, code);
    }

    /// Waits for one event; returns whether the process has ended.
    fn carry(
        &self,
        pod: &Pod,
        running: &Running,
        relay: &mut Option<Relay>,
        keeps_stdin_until: Instant,
    ) -> anyhow::Result<bool> {
        let left = keeps_stdin_until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            self.close_stdin();
        }
        let left = match left.is_zero() {
            true => PollTimeout::NONE,
            false => PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX),
        };
        let mut fds = vec![PollFd::new(running.ended(), PollFlags::POLLIN)];
        fds.extend(relay.iter().flat_map(Relay::poll_fds));
        match poll(&mut fds, left) {
            Ok(_) => {}
            Err(nix::Error::EINTR) => return Ok(false),
            Err(error) => return Err(error).context("cannot poll"),
        }
        if fds[0].any().unwrap_or(false) {
            return Ok(true);
        }
        if let Some(open) = relay {
            let is_open = open.carry();
            for signal in open.take_signals() {
                self.signal_foreground(pod, signal);
            }
            if !is_open {
                *relay = None;
            }
        }
        Ok(false)
    }

    /// Signals the processes in the terminal's foreground. A process that has just ended or has not
    /// started needs no signal.
    fn signal_foreground(&self, pod: &Pod, signal: Signal) {
        let _ = self.signal_scope(pod, SignalScope::Foreground, signal as i32);
    }

    /// Records and publishes the end.
    fn end(&self, pod: &Pod, code: u8) {
        drop(std::mem::take(&mut *lock(&self.held)));
        lock(&self.terminal).master = None;
        let exit = self.life.end(code);
        pod.events.publish(&exited(&self.container, &self.id, exit));
    }

    /// Signals the process. None: it does not run.
    pub(crate) fn signal(&self, pod: &Pod, signal: i32) -> Option<Result<(), control::Error>> {
        self.signal_scope(pod, SignalScope::Process, signal)
    }

    fn signal_scope(
        &self,
        pod: &Pod,
        scope: SignalScope,
        signal: i32,
    ) -> Option<Result<(), control::Error>> {
        let target = lock(&self.target).clone()?;
        let node = pod.node().ok()?;
        Some(target.signal(node, scope, signal))
    }

    /// Ends the wait for a process whose sandbox does not answer.
    pub(crate) fn give_up(&self) {
        if let Some(target) = &*lock(&self.target) {
            target.give_up();
        }
    }

    /// Sets the size of the process' terminal.
    pub(crate) fn resize(&self, pod: &Pod, size: Winsize) {
        let mut window = lock(&self.terminal);
        window.size = Some(size);
        if let Some(master) = &window.master {
            // A failure means that the terminal is gone.
            let _ = rustix::termios::tcsetwinsize(master, size);
        }
        drop(window);
        self.signal_foreground(pod, Signal::SIGWINCH);
    }

    /// Closes the process' standard input.
    pub(crate) fn close_stdin(&self) {
        lock(&self.held).stdin = None;
    }
}

/// Wakes the sandbox by a command, for an exec.
fn wake(caller: Caller<'_>, sandbox: &SandboxId) -> anyhow::Result<()> {
    let cause = WakeCause::Exec.as_str();
    verbs::run_for(caller, "wake-up", &[sandbox.as_str(), "--cause", cause])
}

//! Processes that containerd has the shim run in a container.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use containerd_shim::protos::events::task::{TaskExecStarted, TaskExit};
use containerd_shim::protos::protobuf::MessageField;
use containerd_shim::protos::topics::{TASK_EXEC_STARTED_EVENT_TOPIC, TASK_EXIT_EVENT_TOPIC};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use rustix::termios::Winsize;
use serde_json::Value;
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_oci::exec::{Begun, Running, Target, begin};
use torpor_oci::keeper::Streams;
use torpor_oci::keeper::relay::Relay;
use torpor_records::WakeCause;
use torpor_runsc::control::{self, SignalScope};
use torpor_sandbox::console::Terminal;

use crate::container::{Pod, lock};
use crate::process::Life;
use crate::streams::{self, Held, Paths};
use crate::task::{own_pid, timestamp};
use crate::verbs;

/// Exit code of a process whose end cannot be observed any more: that of a killed process.
const KILLED: u8 = 137;
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
    pub(crate) fn start(self: &Arc<Self>, pod: &Arc<Pod>) -> anyhow::Result<()> {
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
        pod.events.publish(TASK_EXEC_STARTED_EVENT_TOPIC, Box::new(event));
        let running = match begun {
            Begun::Answered => {
                self.end(pod, 0);
                return Ok(());
            }
            Begun::Running(running) => running,
        };
        *lock(&self.target) = Some(running.target(SignalScope::Process));
        let (exec, pod) = (Arc::clone(self), Arc::clone(pod));
        std::thread::Builder::new()
            .name("exec".to_owned())
            .spawn(move || exec.wait(&pod, running, relay))
            .context("cannot wait for the process")?;
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
        while let Ok(false) = self.carry(pod, &running, &mut relay) {}
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
    ) -> anyhow::Result<bool> {
        let mut fds = vec![PollFd::new(running.ended(), PollFlags::POLLIN)];
        fds.extend(relay.iter().flat_map(Relay::poll_fds));
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) => {}
            Err(nix::Error::EINTR) => return Ok(false),
            Err(error) => return Err(error).context("cannot poll"),
        }
        if fds[0].any().unwrap_or(false) {
            return Ok(true);
        }
        if let Some(open) = relay {
            let is_open = open.carry()?;
            for signal in open.take_signals() {
                self.signal_foreground(pod, &running.target(SignalScope::Foreground), signal);
            }
            if !is_open {
                *relay = None;
            }
        }
        Ok(false)
    }

    /// Signals the processes in the terminal's foreground. A process that has just ended needs no
    /// signal.
    fn signal_foreground(&self, pod: &Pod, target: &Target, signal: Signal) {
        if let Ok(node) = pod.node() {
            let _ = Running::signal(node, target, signal as i32);
        }
    }

    /// Records and publishes the end.
    fn end(&self, pod: &Pod, code: u8) {
        drop(std::mem::take(&mut *lock(&self.held)));
        lock(&self.terminal).master = None;
        let exit = self.life.end(code);
        let event = TaskExit {
            container_id: self.container.to_string(),
            id: self.id.clone(),
            pid: own_pid(),
            exit_status: exit.code.into(),
            exited_at: MessageField::some(timestamp(exit.at)),
            ..TaskExit::default()
        };
        pod.events.publish(TASK_EXIT_EVENT_TOPIC, Box::new(event));
    }

    /// Signals the process. None: it does not run.
    pub(crate) fn signal(&self, pod: &Pod, signal: i32) -> Option<Result<(), control::Error>> {
        let target = lock(&self.target).clone()?;
        let node = pod.node().ok()?;
        Some(Running::signal(node, &target, signal))
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
        let target = lock(&self.target).clone();
        if let Some(target) = target {
            let target = target.with_scope(SignalScope::Foreground);
            self.signal_foreground(pod, &target, Signal::SIGWINCH);
        }
    }

    /// Closes the process' standard input.
    pub(crate) fn close_stdin(&self) {
        lock(&self.held).stdin = None;
    }
}

/// Wakes the sandbox by a command, for an exec.
fn wake(sandbox: &SandboxId) -> anyhow::Result<()> {
    let cause = WakeCause::Exec.as_str();
    verbs::run("wake-up", &[sandbox.as_str(), "--cause", cause])
}

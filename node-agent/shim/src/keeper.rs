//! The keeper of a container: a thread of the shim that stands for the container's first process,
//! so that containerd sees a running container while its sandbox is hibernated.
//!
//! The keeper holds the container's standard streams. It waits for the container's end over the
//! sandbox's control socket, and ends with the same code. The end of a sandbox that hibernates is
//! not the container's end: the keeper listens until a request reports that the sandbox runs again.
//! The thread sleeps in poll.
//!
//! The pause container's keeper also accepts the connections of the agent ([`crate::agent`]), and
//! runs commands of the shim: one for each connection to the loopback of the pod's network
//! namespace (port-forward), and a wake when a packet arrives for a sleeping sandbox.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::termios::{Termios, Winsize};
use serde::{Deserialize, Serialize};
use torpor_core::ids::ContainerId;
use torpor_core::state::NOT_WATCHED;
use torpor_link::sensor::Next;
use torpor_messages::keeper::{Answer, SOCKET};
use torpor_records::Role;
use torpor_records::{ContainerRecord, Rules, SandboxState, WakeCause};
use torpor_runsc::control::{self, Control};

use torpor_sandbox::node::{CALL_LIMIT, Node};
use torpor_sandbox::restore::{self, transitions};

use crate::agent::Service;
use crate::{KILLED, commands};

mod children;
mod egress_hold;
mod input;
mod keepalive_probes;
mod loopback;
mod memory_room;
mod own_memory;
pub(crate) mod relay;
mod requests;
mod sender;
mod streams;
mod watch;

use children::{Children, Purpose};
use input::Input;
use loopback::{Accepted, Loopback, MAX_FORWARDS};
use memory_room::{Attempt, MemoryRoom};
use relay::Relay;
pub(crate) use streams::Streams;
use watch::Watch;

/// Time between two checks by a keeper that holds packets whether it still has to: the process that
/// should send the request may have died.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Time limit of a garbage collection of gVisor, which takes some hundredths of a second.
const COLLECT_LIMIT: Duration = Duration::from_secs(1);

struct Keeper<'a> {
    node: &'a Node,
    record: ContainerRecord,
    listener: OwnedFd,
    /// Present in the pause container's keeper.
    agent: Option<Arc<Service>>,
    /// The pending wait for the container's end.
    waiting: Option<Control>,
    relay: Option<Relay>,
    /// The settings of the container's terminal when the sandbox fell asleep.
    terminal_mode: Option<Termios>,
    /// The last window size that containerd has requested.
    window: Option<Winsize>,
    streams: Streams,
    input: Input,
    children: Children,
    /// Present in the pause container's keeper, if the kernel can direct the connections to the
    /// pod's loopback there.
    loopback: Option<Loopback>,
    /// Present while the pod's sandbox is saved, sleeps and wakes.
    watch: Option<Watch>,
    /// The rules that the agent has sent last.
    rules: Rules,
    /// An event was handled since the keeper gave the shim's memory back.
    was_active: bool,
    /// Present while the pod's limit of memory may be raised because of a wake.
    memory_room: Option<MemoryRoom>,
}

/// The answer of the command `create`. The keeper's descriptors come beside it: the listening
/// socket, the two of the loopback, and the console.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Handover {
    /// Features that the container lacks.
    pub(crate) warnings: Vec<String>,
    pub(crate) loopback: bool,
    pub(crate) console: bool,
}

/// Runs a keeper in this thread until the container has ended, and returns its exit code.
///
/// `files`: the descriptors that [`Handover`] names.
pub(crate) fn serve(
    node: &Arc<Node>,
    id: &ContainerId,
    handover: &Handover,
    files: Vec<OwnedFd>,
    streams: Streams,
) -> anyhow::Result<u8> {
    let socket = node.records.container_dir(id).join(SOCKET);
    let _removed = RemovedAtEnd(&socket);
    let mut files = files.into_iter();
    let mut next = || {
        files
            .next()
            .context("a descriptor of the keeper is missing")
    };
    let listener = next()?;
    let loopback = match handover.loopback {
        true => Some(Loopback::new(next()?, next()?)),
        false => None,
    };
    let record = node.container(id)?;
    let agent = match record.role {
        Role::Sandbox => Some(Service::begin(node, &record.sandbox)?),
        Role::Container => None,
    };
    let mut keeper = Keeper::new(node, record, listener, loopback, streams);
    keeper.agent = agent;
    if handover.console {
        keeper.carry_console(next()?)?;
    }
    keeper.watch_container()
}

/// Removes a keeper's socket when the keeper ends: from then on no process takes the keeper for one
/// that lives.
struct RemovedAtEnd<'a>(&'a Path);

impl Drop for RemovedAtEnd<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.0);
    }
}

impl<'a> Keeper<'a> {
    fn new(
        node: &'a Node,
        record: ContainerRecord,
        listener: OwnedFd,
        loopback: Option<Loopback>,
        streams: Streams,
    ) -> Self {
        Self {
            node,
            record,
            listener,
            agent: None,
            waiting: None,
            relay: None,
            terminal_mode: None,
            window: None,
            input: Input::new(&streams.stdin),
            streams,
            children: Children::default(),
            loopback,
            watch: None,
            rules: Rules::default(),
            was_active: true,
            memory_room: None,
        }
    }

    fn watch_container(mut self) -> anyhow::Result<u8> {
        loop {
            if let Some(code) = self.handle_event()? {
                return Ok(code);
            }
        }
    }

    /// Carries the bytes of gVisor's terminal from now on.
    fn carry_console(&mut self, console: OwnedFd) -> anyhow::Result<()> {
        let relay = Relay::new(console, self.terminal_mode.take(), &self.streams)?;
        if let Some(window) = self.window {
            relay.resize(window);
        }
        self.relay = Some(relay);
        Ok(())
    }

    /// Waits for one event and handles it. Returns the exit code when the container has ended.
    fn handle_event(&mut self) -> anyhow::Result<Option<u8>> {
        let ready = self.poll()?;
        self.was_active = true;
        let ended = self.children.reap();
        if let Some(watch) = &mut self.watch {
            let sandbox = &self.record.sandbox;
            // Another process may have continued the sandbox's processes without a wake.
            if watch.must_be_stopped() && !self.node.runsc.is_stopped_by_signal(sandbox) {
                watch.end_answers();
            }
            let next = watch.handle_frames();
            self.act(next);
        }
        self.check_sandbox(&ended);
        if self
            .memory_room
            .is_some_and(|room| room.is_due(Instant::now()))
        {
            self.give_room_back();
        }
        // The command that has woken the sandbox from a doze may not have sent a request.
        if ended.contains(&Purpose::Wake) && self.waiting.is_some() && !self.is_dozing() {
            self.input.woke();
        }
        if ready.timed_out && self.waiting.is_none() && self.children.is_empty() {
            own_memory::give_back();
            self.was_active = false;
        }
        if ready.loopback {
            self.forward();
        }
        if ready.relay
            && let Some(relay) = &mut self.relay
        {
            let (is_open, has_input) = (relay.carry(), relay.has_input());
            if !is_open {
                self.terminal_mode = relay.mode();
                self.relay = None;
            }
            // Neither a dozing nor a hibernated sandbox reads its terminal.
            if has_input && self.is_dozing() {
                self.wake_for_input();
            }
        }
        if let Some(events) = ready.input
            && self
                .input
                .requires_wake(events, &self.streams.stdin, Instant::now())
        {
            self.wake_for_input();
        }
        // The end is handled before a request: the request may begin another wait.
        if ready.ended {
            if let Some(code) = self.container_ended() {
                return Ok(Some(code));
            }
            if self.waiting.is_none() {
                self.input.fell_asleep(&self.streams.stdin);
            }
        }
        if ready.agent
            && let Some(agent) = &self.agent
            && let Some(peer) = requests::accepted(agent.listener())
        {
            agent.serve(peer);
        }
        if ready.request {
            return self.serve();
        }
        Ok(None)
    }

    fn poll(&mut self) -> anyhow::Result<Ready> {
        let timeout = self.poll_timeout();
        let mut fds = vec![PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
        let waiting = fds.len();
        if let Some(control) = &self.waiting {
            fds.push(PollFd::new(control.as_fd(), PollFlags::POLLIN));
        }
        let agent = fds.len();
        if let Some(service) = &self.agent {
            fds.push(PollFd::new(service.listener().as_fd(), PollFlags::POLLIN));
        }
        let loopback = fds.len();
        if let Some(loopback) = &self.loopback {
            fds.push(PollFd::new(loopback.as_fd(), PollFlags::POLLIN));
        }
        let relay = fds.len();
        if let Some(relay) = &self.relay {
            fds.extend(relay.poll_fds());
        }
        let input = fds.len();
        let stdin = self.streams.stdin.as_fd();
        fds.extend(self.input.poll_fd(stdin, Instant::now()));
        let packets = fds.len();
        // The following descriptors only end the poll.
        if let Some(watch) = &self.watch {
            fds.extend(watch.fds().map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        }
        fds.extend(self.children.poll_fds());
        let timed_out = match poll(&mut fds, timeout) {
            Ok(happened) => happened == 0,
            Err(nix::Error::EINTR) => false,
            Err(error) => return Err(error).context("cannot poll"),
        };
        let happened = |fd: &PollFd<'_>| fd.any().unwrap_or(false);
        Ok(Ready {
            request: happened(&fds[0]),
            ended: fds[waiting..agent].iter().any(happened),
            agent: fds[agent..loopback].iter().any(happened),
            loopback: fds[loopback..relay].iter().any(happened),
            relay: fds[relay..input].iter().any(happened),
            input: fds[input..packets]
                .first()
                .filter(|fd| happened(fd))
                .and_then(PollFd::revents),
            timed_out,
        })
    }

    /// Returns the time after which the keeper has to act without an event.
    fn poll_timeout(&mut self) -> PollTimeout {
        // A sandbox that is asleep needs no checks.
        let settled = self.watch.as_ref().is_none_or(Watch::is_asleep) && self.children.is_empty();
        // Without a sandbox to wait for, the keeper gives the shim's memory back once no event
        // comes.
        let may_give_back = self.waiting.is_none() && self.was_active;
        let check = (!settled || may_give_back).then_some(CHECK_INTERVAL);
        let watch = self.watch.as_mut().and_then(Watch::due_in);
        let room = self.memory_room.map(|room| room.due_in(Instant::now()));
        check
            .into_iter()
            .chain(watch)
            .chain(room)
            .chain(self.input.due_in(Instant::now()))
            .min()
            .map_or(PollTimeout::NONE, |wait| {
                // Rounded up: a poll that ends too early would only be repeated.
                let millis = wait.as_millis().saturating_add(1);
                PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)
            })
    }

    /// Updates the watch by the recorded state of the sandbox: it still sleeps, has just fallen
    /// asleep, or runs.
    fn check_sandbox(&mut self, ended: &[Purpose]) {
        let Some(watch) = &mut self.watch else { return };
        let sandbox = &self.record.sandbox;
        let records = &self.node.records;
        match records.state(sandbox) {
            Ok(SandboxState::Hibernated { .. }) => {
                if ended.contains(&Purpose::Wake) {
                    watch.wake_failed();
                }
                if !watch.is_hibernated() {
                    let next = watch.hibernated();
                    self.act(next);
                }
            }
            Ok(SandboxState::Running) if !records.is_noted_paused(sandbox) => self.release(),
            Ok(SandboxState::Running | SandboxState::Restoring { .. }) | Err(_) => {
                if ended.contains(&Purpose::Wake) {
                    watch.wake_failed();
                }
            }
        }
    }

    /// Releases the pod's packets, because the sandbox runs.
    ///
    /// To detach the programs from the pod's link, and to close the sockets that watched it, each
    /// takes a grace period of the kernel's RCU: 6 to 15 ms in which the keeper handles no other
    /// event.
    fn release(&mut self) {
        if let Some(watch) = self.watch.take() {
            let _expedited = self.node.expedited();
            watch.release();
            // The schedule was that of an earlier wake. The time of this wake's room begins now.
            self.memory_room = None;
        }
        self.put_quotas_back();
        self.give_room_back();
    }

    /// Gives back the room that a wake has added to the pod's limit of memory.
    ///
    /// The process that has woken the sandbox does so too, as soon as it can, and holds the pod's
    /// lock until then. So the keeper changes no room in the middle of a wake.
    fn give_room_back(&mut self) {
        let sandbox = &self.record.sandbox;
        let records = &self.node.records;
        let has_room = || records.room(sandbox).is_ok_and(|rooms| !rooms.is_empty());
        if self.record.role != Role::Sandbox || !has_room() {
            self.memory_room = None;
            return;
        }
        let now = Instant::now();
        let attempt = self
            .memory_room
            .map_or(Attempt::GiveBack, |room| room.attempt(now));
        let all_back = match records.try_lock(sandbox) {
            Ok(Some(_lock)) => self.end_room(attempt),
            _ => false,
        };
        let next = || {
            self.memory_room
                .map_or_else(|| MemoryRoom::new(now), |room| room.next(now))
        };
        self.memory_room = (!all_back).then(next);
    }

    /// Makes an attempt to give the room back. Returns whether no room is left.
    ///
    /// The caller holds the pod's lock.
    fn end_room(&self, attempt: Attempt) -> bool {
        let (node, sandbox) = (self.node, &self.record.sandbox);
        if restore::room::give_back(node, sandbox) {
            return true;
        }
        // A connection to a dozing sandbox would continue its processes.
        if attempt == Attempt::GiveBack || !matches!(node.records.doze(sandbox), Ok(None)) {
            return false;
        }
        let connected = node.runsc.connect(sandbox);
        if let Err(error) = connected.and_then(|mut control| control.collect_garbage(COLLECT_LIMIT))
        {
            torpor_sandbox::log_line!("{:#}", anyhow::Error::new(error));
        }
        match attempt {
            Attempt::GiveBack | Attempt::Collect => restore::room::narrow(node, sandbox),
            Attempt::Enforce => restore::room::enforce(node, sandbox),
        }
    }

    /// Restores the pod's limit of processor time, which a wake has lifted. The process that has
    /// woken the sandbox does so too, unless it was killed before.
    fn put_quotas_back(&self) {
        if self.record.role == Role::Sandbox {
            restore::put_quotas_back(self.node, &self.record.sandbox);
        }
    }

    /// Takes an action of the watch.
    ///
    /// The keeper itself resumes a dozing sandbox. Any other wake is the work of a command, which
    /// takes the pod's lock by itself.
    fn act(&mut self, next: Next) {
        let Next::Wake(cause) = next else { return };
        // After a failure here, the command tries again and reports the failure.
        if transitions::resume_in_keeper(self.node, &self.record.sandbox).is_ok_and(|runs| runs) {
            return self.release();
        }
        if !self.begin_wake(WakeCause::Packet, format_args!("{cause:?}"))
            && let Some(watch) = &mut self.watch
        {
            watch.wake_failed();
        }
    }

    /// Starts the command that wakes the sandbox. Returns whether the command runs.
    ///
    /// `client`: a description of the client that needs the sandbox, for the log.
    fn begin_wake(&mut self, cause: WakeCause, client: std::fmt::Arguments<'_>) -> bool {
        let sandbox = self.record.sandbox.as_str();
        let spawned = commands::child("wake")
            .args([sandbox, "--cause", cause.as_str()])
            .stdout(Stdio::null())
            .spawn();
        match spawned {
            Ok(child) => {
                self.children.add(Purpose::Wake, child);
                true
            }
            Err(error) => {
                torpor_sandbox::log_line!("cannot wake the sandbox for {client}: {error}");
                false
            }
        }
    }

    /// Begins to watch the pod's packets, by the rules that the agent has sent last.
    ///
    /// A pod that cannot be watched still sleeps on request, and everything but a packet wakes it.
    /// The recorded reason shows the agent that such a pod must not fall asleep by itself.
    fn watch_packets(&mut self) -> Answer {
        let records = &self.node.records;
        let pod = match records.pod(&self.record.sandbox) {
            Ok(pod) => pod,
            Err(error) => return Answer::refused("NoRecord", error.to_string()),
        };
        if self.watch.is_some() {
            // The sandbox dozed before this save. The held frames stay held.
            return Answer::ok(serde_json::Value::Null);
        }
        // Without the map, no packet from before the watch is known.
        let traffic_map = records
            .traffic(&self.record.sandbox)
            .ok()
            .and_then(Result::ok);
        let unacknowledged = records.unacknowledged(&self.record.sandbox).ok().flatten();
        let port = self.node.config.kubelet_port;
        match Watch::begin(&pod, &self.rules, port, traffic_map, unacknowledged) {
            Ok(watch) => {
                self.watch = Some(watch);
                // A note that cannot be removed only reports an earlier state.
                let _ = records.forget_not_watched(&self.record.sandbox);
                Answer::ok(serde_json::Value::Null)
            }
            Err(error) => {
                let why = format!("packets will not wake the Pod: {error:#}");
                // If the note fails, the answer still has the reason.
                let _ = records.note_not_watched(&self.record.sandbox, &why);
                Answer::refused(NOT_WATCHED, why)
            }
        }
    }

    /// Starts a command for one connection to the pod's loopback. A connection without a command is
    /// reset.
    fn forward(&mut self) {
        let Some(loopback) = &self.loopback else {
            return;
        };
        match loopback.accept() {
            Accepted::Connection(connection) if self.children.forwards() < MAX_FORWARDS => {
                if let Ok(child) = loopback::forward(&self.record.sandbox, connection) {
                    self.children.add(Purpose::Forward, child);
                }
            }
            Accepted::Connection(_) | Accepted::Nothing => {}
            // A waiting connection that cannot be accepted would end every poll at once. So the
            // keeper accepts no more connections.
            Accepted::Exhausted => self.loopback = None,
        }
    }

    /// Handles the end of the wait on the control socket: the container's exit code came, or the
    /// sandbox is gone. Returns the exit code if the container has ended.
    fn container_ended(&mut self) -> Option<u8> {
        let mut control = self.waiting.take()?;
        // The result is there in one piece. The limit is for a sandbox that tries to block its
        // keeper.
        match control.wait_result_within(CALL_LIMIT) {
            Ok(status) => Some(self.drain_terminal(status.exit_code())),
            Err(control::Error::Refused { .. }) => self.sandbox_gone(),
            // If the sandbox sleeps or is being restored, a request comes as soon as there is a
            // sandbox to wait for.
            Err(_) => self.sandbox_gone().and_then(|_| self.wait_anew()),
        }
    }

    /// Waits for the container's end, unless the keeper waits already. Returns the exit code if the
    /// container has ended.
    fn wait_on(&mut self) -> Option<u8> {
        // The pending wait may be that for a sandbox that has ended meanwhile.
        if self.waiting.as_ref().is_some_and(is_readable)
            && let Some(code) = self.container_ended()
        {
            return Some(code);
        }
        match self.waiting {
            Some(_) => None,
            None => self.wait_anew(),
        }
    }

    /// Begins a wait for the container's end. Returns the exit code if the sandbox is gone.
    ///
    /// If the keeper got no processor time for long, it may detect a sandbox's end only when the
    /// next sandbox runs in its place: the pod has slept and woken meanwhile.
    fn wait_anew(&mut self) -> Option<u8> {
        match self.attach() {
            Ok(control) => {
                self.waiting = Some(control);
                None
            }
            Err(_) => self.sandbox_gone(),
        }
    }

    /// Carries the container's last output, which may still be in its terminal. Returns `code`.
    fn drain_terminal(&mut self, code: u8) -> u8 {
        if let Some(relay) = &mut self.relay {
            relay.drain();
        }
        code
    }

    fn is_dozing(&self) -> bool {
        let doze = self.node.records.doze(&self.record.sandbox);
        doze.is_ok_and(|doze| doze.is_some())
    }

    /// Begins a wake of the sleeping sandbox, because a client of `attach` has sent input.
    ///
    /// The input stays where it is, and the next poll finds it again.
    fn wake_for_input(&mut self) {
        self.begin_wake(WakeCause::Typed, format_args!("an attached client"));
    }

    /// Returns the exit code of a container whose sandbox is gone; none if the sandbox sleeps or is
    /// being restored. A sandbox's sleep is recorded before its processes end.
    fn sandbox_gone(&self) -> Option<u8> {
        match self.node.records.state(&self.record.sandbox) {
            Ok(SandboxState::Hibernated { .. } | SandboxState::Restoring { .. }) => None,
            Ok(SandboxState::Running) | Err(_) => Some(KILLED),
        }
    }

    /// Connects to the sandbox and begins to wait for the container's end.
    fn attach(&self) -> Result<Control, control::Error> {
        let sandbox = &self.record.sandbox;
        let mut control = self.node.runsc.connect(sandbox)?;
        control.begin_wait(self.record.id.as_str())?;
        Ok(control)
    }
}

/// The events of one poll.
struct Ready {
    request: bool,
    ended: bool,
    /// A connection of the agent waits.
    agent: bool,
    /// A connection to the pod's loopback waits.
    loopback: bool,
    relay: bool,
    /// The events of the container's standard input, while gVisor does not read it.
    input: Option<PollFlags>,
    /// The poll's time is over, and no event has come.
    timed_out: bool,
}

/// Reports whether the wait is over.
fn is_readable(control: &Control) -> bool {
    let mut fds = [PollFd::new(control.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

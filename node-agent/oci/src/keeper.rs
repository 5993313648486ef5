//! The keeper: the process whose pid the shim watches in place of the container's first process.
//!
//! It holds the container's standard streams, sits in the container's cgroup, waits for the container's end over the
//! sandbox' control socket and ends with the same code. When the sandbox is hibernated, its end is no end: the keeper
//! goes on listening until it is told that the sandbox runs again. It is one thread that sleeps in poll.
//!
//! The pause container's keeper also starts programs: wakes and ends for the agent, one for each connection to the
//! loopback of the pod's network namespace (port-forward), and a wake when a packet arrives for a sandbox that sleeps.

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::termios::Termios;
use torpor_core::ids::ContainerId;
use torpor_core::state::NOT_WATCHED;
use torpor_link::sensor::Next;
use torpor_records::Role;
use torpor_records::{ContainerRecord, SandboxState, WakeCause};
use torpor_runsc::control::{self, Control};
use torpor_runsc::keeper::{Answer, Rules};

use crate::args::KeeperArgs;
use crate::doze;
use crate::node::{CALL_LIMIT, Node};
use crate::restore;

mod children;
mod egress_hold;
mod execs;
mod loopback;
mod others;
mod owed;
mod questions;
mod relay;
mod requests;
mod text;
mod typing;
mod watch;

use children::{Children, Purpose};
use execs::Execs;
use loopback::{Arrival, Loopback, MOST_FORWARDS};
use others::Others;
use owed::{Look, Owed};
use relay::Relay;
use requests::Handled;
use typing::Typing;
use watch::Watch;

/// How often a keeper that holds packets back makes sure that it still has to: whoever was to tell it may have died.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// A collection of gVisor's garbage takes some hundredths of a second.
const COLLECT_LIMIT: Duration = Duration::from_secs(1);
/// What the shim is told when the sandbox died under its container: as if it had been killed.
const KILLED: u8 = 137;

struct Keeper<'a> {
    node: &'a Node,
    record: ContainerRecord,
    listener: OwnedFd,
    /// The pending wait for the container's end.
    waiting: Option<Control>,
    relay: Option<Relay>,
    /// Of the terminal that went to sleep.
    terminal_mode: Option<Termios>,
    typing: Typing,
    children: Children,
    /// The pause container's keeper minds those of the other containers.
    others: Others,
    execs: Execs,
    /// The pause container's keeper has it, unless the kernel has no way to it.
    loopback: Option<Loopback>,
    /// While the pod's sandbox is saved, sleeps and wakes.
    watch: Option<Watch>,
    /// It has done something since it gave its memory back.
    stirred: bool,
    /// The pod's limit of memory may still be wider than it is to be.
    owed: Option<Owed>,
}

/// Runs until the container has ended.
pub(crate) fn run(node: &Node, args: &KeeperArgs) -> anyhow::Result<ExitCode> {
    let loopback = match (args.loopback, args.loopback_link) {
        (Some(listener), Some(link)) => Some(Loopback::new(inherited(listener)?, inherited(link)?)),
        _ => None,
    };
    let mut keeper = Keeper {
        node,
        record: node.container(&args.id)?,
        listener: inherited(args.socket)?,
        waiting: None,
        relay: None,
        terminal_mode: None,
        typing: Typing::new(relay::borrow_stdin()),
        children: Children::default(),
        others: Others::default(),
        execs: Execs::default(),
        loopback,
        watch: None,
        stirred: true,
        owed: None,
    };
    if keeper.record.terminal {
        relay::own_terminal()?;
    }
    loop {
        if let Some(code) = keeper.turn()? {
            return Ok(ExitCode::from(code));
        }
    }
}

#[allow(unsafe_code)]
fn inherited(socket: i32) -> anyhow::Result<OwnedFd> {
    anyhow::ensure!(
        socket > 2,
        "a descriptor that the keeper inherits must not be a standard stream"
    );
    // SAFETY: create passes this descriptor to the keeper alone, for one use, and nothing here has opened one by that
    // number.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
    Ok(socket)
}

impl Keeper<'_> {
    /// Waits for one event and handles it; a code when the container has ended.
    fn turn(&mut self) -> anyhow::Result<Option<u8>> {
        let ready = self.poll()?;
        self.stirred = true;
        let ended = self.children.reap();
        for container in self.others.gone() {
            self.bereave(&container);
        }
        for pid in self.execs.abandoned() {
            self.end_exec(pid);
        }
        if let Some(watch) = &mut self.watch {
            let sandbox = &self.record.sandbox;
            // Somebody may have let it go on without waking it.
            if watch.is_halted() && !self.node.runsc.is_halted(sandbox) {
                watch.go_on();
            }
            let next = watch.turn();
            self.follow(next);
        }
        self.look_at_sandbox(&ended);
        if self.owed.is_some_and(|owed| owed.is_due(Instant::now())) {
            self.give_room_back();
        }
        // Who woke it from a doze may not have told.
        if ended.contains(&Purpose::Rouse) && self.waiting.is_some() && !self.dozes() {
            self.typing.woke();
        }
        if ready.quiet && self.waiting.is_none() && self.children.is_empty() {
            text::give_back();
            self.stirred = false;
        }
        if ready.dialled {
            self.forward();
        }
        if ready.relay
            && let Some(relay) = &mut self.relay
        {
            let (goes_on, typed) = (relay.turn()?, relay.has_taken());
            if !goes_on {
                self.terminal_mode = relay.mode();
                self.relay = None;
            }
            // A dozing sandbox reads its terminal as little as one that hibernates.
            if typed && self.dozes() {
                self.typed();
            }
        }
        if let Some(seen) = ready.typed
            && self
                .typing
                .calls(seen, relay::borrow_stdin(), Instant::now())
        {
            self.typed();
        }
        // Before requests: one may bring another wait.
        if ready.ended {
            if let Some(code) = self.container_ended() {
                return Ok(Some(code));
            }
            if self.waiting.is_none() {
                self.typing.fell_asleep(relay::borrow_stdin());
            }
        }
        if ready.request
            && let Handled::Exit(code) = self.serve()?
        {
            return Ok(Some(code));
        }
        Ok(None)
    }

    fn poll(&mut self) -> anyhow::Result<Ready> {
        let patience = self.patience();
        let mut fds = vec![PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
        let waiting = fds.len();
        if let Some(control) = &self.waiting {
            fds.push(PollFd::new(borrow(control), PollFlags::POLLIN));
        }
        let loopback = fds.len();
        if let Some(loopback) = &self.loopback {
            fds.push(PollFd::new(loopback.as_fd(), PollFlags::POLLIN));
        }
        let relay = fds.len();
        if let Some(relay) = &self.relay {
            fds.extend(relay.interests());
        }
        let typing = fds.len();
        fds.extend(self.typing.interest(relay::borrow_stdin(), Instant::now()));
        let packets = fds.len();
        // Waking up is all that these are for.
        if let Some(watch) = &self.watch {
            fds.extend(watch.fds().map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        }
        fds.extend(self.children.interests());
        fds.extend(self.others.interests());
        fds.extend(self.execs.interests());
        let quiet = match poll(&mut fds, patience) {
            Ok(happened) => happened == 0,
            Err(nix::Error::EINTR) => false,
            Err(error) => return Err(error).context("cannot poll"),
        };
        let happened = |fd: &PollFd<'_>| fd.any().unwrap_or(false);
        Ok(Ready {
            request: happened(&fds[0]),
            ended: fds[waiting..loopback].iter().any(happened),
            dialled: fds[loopback..relay].iter().any(happened),
            relay: fds[relay..typing].iter().any(happened),
            typed: fds[typing..packets]
                .first()
                .filter(|fd| happened(fd))
                .and_then(PollFd::revents),
            quiet,
        })
    }

    /// A sandbox that sleeps soundly needs nobody to look.
    fn patience(&mut self) -> PollTimeout {
        let settled = self.watch.as_ref().is_none_or(Watch::is_asleep) && self.children.is_empty();
        // Without a sandbox to wait for there is memory to give back, once nothing more comes.
        let drowsy = self.waiting.is_none() && self.stirred;
        let look = (!settled || drowsy).then_some(LOOK_AGAIN);
        let turn = self.watch.as_mut().and_then(Watch::turn_again);
        let owed = self.owed.map(|owed| owed.wait(Instant::now()));
        look.into_iter()
            .chain(turn)
            .chain(owed)
            .chain(self.typing.patience(Instant::now()))
            .min()
            .map_or(PollTimeout::NONE, |wait| {
                // Rounded up: a poll that ends too early would only be made again.
                let millis = wait.as_millis().saturating_add(1);
                PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)
            })
    }

    /// Whether the sandbox that is watched still sleeps, has just fallen asleep, or runs.
    fn look_at_sandbox(&mut self, ended: &[Purpose]) {
        let Some(watch) = &mut self.watch else { return };
        let sandbox = &self.record.sandbox;
        let records = &self.node.records;
        match records.state(sandbox) {
            Ok(SandboxState::Hibernated { .. }) => {
                if ended.contains(&Purpose::Rouse) {
                    watch.wake_failed();
                }
                if !watch.is_home() {
                    let next = watch.asleep();
                    self.follow(next);
                }
            }
            Ok(SandboxState::Running) if !records.is_noted_paused(sandbox) => self.release(),
            Ok(SandboxState::Running | SandboxState::Restoring { .. }) | Err(_) => {
                if ended.contains(&Purpose::Rouse) {
                    watch.wake_failed();
                }
            }
        }
    }

    /// The sandbox runs. To take the programs off the pod's link, and to close what watched it, each waits for a grace period of the
    /// kernel's RCU: 6 to 15 ms in which the keeper hears nobody else.
    fn release(&mut self) {
        if let Some(watch) = self.watch.take() {
            let _expedited = self.node.expedited();
            watch.release();
            // The room of another wake, whose time begins now.
            self.owed = None;
        }
        self.put_quotas_back();
        self.give_room_back();
    }

    /// Who has woken the sandbox does so too, as soon as he can, and holds the pod's lock until he has: none of it is touched in the middle of a wake.
    fn give_room_back(&mut self) {
        let sandbox = &self.record.sandbox;
        let records = &self.node.records;
        let is_owed = || records.room(sandbox).is_ok_and(|rooms| !rooms.is_empty());
        if self.record.role != Role::Sandbox || !is_owed() {
            self.owed = None;
            return;
        }
        let now = Instant::now();
        let look = self.owed.map_or(Look::GiveBack, |owed| owed.look(now));
        let all_back = match records.try_lock(sandbox) {
            Ok(Some(_lock)) => self.end_room(look),
            _ => false,
        };
        let next = || {
            self.owed
                .map_or_else(|| Owed::new(now), |owed| owed.again(now))
        };
        self.owed = (!all_back).then(next);
    }

    /// Answers whether no room is left. The caller holds the pod's lock.
    fn end_room(&self, look: Look) -> bool {
        let (node, sandbox) = (self.node, &self.record.sandbox);
        if restore::room::give_back(node, sandbox) {
            return true;
        }
        // A sandbox that dozes is not connected to, which would let its processes go on.
        if look == Look::GiveBack || !matches!(node.records.doze(sandbox), Ok(None)) {
            return false;
        }
        let connected = node.runsc.connect(sandbox);
        if let Err(error) = connected.and_then(|mut control| control.collect_garbage(COLLECT_LIMIT))
        {
            eprintln!("torpor-oci: {:#}", anyhow::Error::new(error));
        }
        match look {
            Look::GiveBack | Look::Collect => restore::room::narrow(node, sandbox),
            Look::Enforce => restore::room::enforce(node, sandbox),
        }
    }

    /// Who has woken the sandbox does so too, unless he was killed before it.
    fn put_quotas_back(&self) {
        if self.record.role == Role::Sandbox {
            restore::put_quotas_back(self.node, &self.record.sandbox);
        }
    }

    /// Where more is to be done than to resume it, a program does it, which takes the pod's lock by itself.
    fn follow(&mut self, next: Next) {
        let Next::Wake(cause) = next else { return };
        // What has failed here is tried again by the program, and fails there.
        if doze::rouse_at_once(self.node, &self.record.sandbox).is_ok_and(|roused| roused) {
            return self.release();
        }
        if !self.begin_wake(WakeCause::Packet, format_args!("{cause:?}"))
            && let Some(watch) = &mut self.watch
        {
            watch.wake_failed();
        }
    }

    /// Starts the program that wakes the sandbox; answers whether it runs. `who` wants it, in words.
    fn begin_wake(&mut self, cause: WakeCause, who: std::fmt::Arguments<'_>) -> bool {
        let sandbox = self.record.sandbox.as_str();
        let args = ["wake", sandbox, "--cause", cause.as_str()];
        match spawn("torpor-wake", &args) {
            Ok(child) => {
                self.children.add(Purpose::Rouse, child);
                true
            }
            Err(error) => {
                eprintln!("torpor-oci: cannot wake the sandbox for {who}: {error}");
                false
            }
        }
    }

    /// A pod that cannot be watched sleeps all the same if somebody has asked for that, and is woken by everything else. Of what it does by itself the agent knows.
    fn watch(&mut self, rules: &Rules) -> Answer {
        let records = &self.node.records;
        let pod = match records.pod(&self.record.sandbox) {
            Ok(pod) => pod,
            Err(error) => return Answer::refused("NoRecord", error.to_string()),
        };
        if let Some(watch) = &mut self.watch {
            // It dozed before it is saved: what waits goes on waiting.
            let next = watch.set_rules(rules);
            self.follow(next);
            return Answer::ok(serde_json::Value::Null);
        }
        // Without the times nothing is known of what came before.
        let seen = records
            .traffic(&self.record.sandbox)
            .ok()
            .and_then(Result::ok);
        let noted = records.unacknowledged(&self.record.sandbox).ok().flatten();
        match Watch::begin(&pod, rules, self.node.config.kubelet_port, seen, noted) {
            Ok(watch) => {
                self.watch = Some(watch);
                // One that stays does no more than to tell what was once so.
                let _ = records.forget_not_watched(&self.record.sandbox);
                Answer::ok(serde_json::Value::Null)
            }
            Err(error) => {
                let why = format!("packets will not wake the Pod: {error:#}");
                // The answer says it too.
                let _ = records.note_not_watched(&self.record.sandbox, &why);
                Answer::refused(NOT_WATCHED, why)
            }
        }
    }

    /// Gives one connection to the pod's loopback to a program. One that is not taken is reset.
    fn forward(&mut self) {
        let Some(loopback) = &self.loopback else {
            return;
        };
        match loopback.accept() {
            Arrival::Connection(connection) if self.children.forwards() < MOST_FORWARDS => {
                if let Ok(child) = loopback::forward(&self.record.sandbox, connection) {
                    self.children.add(Purpose::Forward, child);
                }
            }
            Arrival::Connection(_) | Arrival::Nobody => {}
            // A connection that waits and cannot be accepted would keep the keeper awake: better none is taken from now on.
            Arrival::Exhausted => self.loopback = None,
        }
    }

    /// The wait on the control socket is over: with the container's status, or because the sandbox is gone.
    fn container_ended(&mut self) -> Option<u8> {
        let mut control = self.waiting.take()?;
        // It is there in one piece, unless the sandbox wants to keep its keeper from hearing anybody else.
        match control.wait_result_within(CALL_LIMIT) {
            Ok(status) => Some(self.last_words(status.exit_code())),
            Err(control::Error::Refused { .. }) => self.sandbox_gone(),
            // Of a sandbox that sleeps or is being restored it is told when there is something to wait for.
            Err(_) => self.sandbox_gone().and_then(|_| self.wait_anew()),
        }
    }

    /// Waits for the container's end, unless it does already; a code when it has ended.
    fn wait_on(&mut self) -> Option<u8> {
        // What it waits for may be a sandbox that has ended meanwhile.
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

    /// A keeper that was not given the processor for long may hear of the end of a sandbox when another runs in its place already: the pod has slept and woken meanwhile.
    fn wait_anew(&mut self) -> Option<u8> {
        match self.attach() {
            Ok(control) => {
                self.waiting = Some(control);
                None
            }
            Err(_) => self.sandbox_gone(),
        }
    }

    /// What the container wrote last may still be in its terminal.
    fn last_words(&mut self, code: u8) -> u8 {
        if let Some(relay) = &mut self.relay {
            relay.drain();
        }
        code
    }

    fn dozes(&self) -> bool {
        let doze = self.node.records.doze(&self.record.sandbox);
        doze.is_ok_and(|doze| doze.is_some())
    }

    /// A client of `attach` has typed something into a sandbox that sleeps. It stays where it is, and the next look finds it again.
    fn typed(&mut self) {
        self.begin_wake(WakeCause::Typed, format_args!("an attached client"));
    }

    /// A sandbox that is asleep is not dead. Whoever puts it to sleep says so before its processes end.
    fn sandbox_gone(&self) -> Option<u8> {
        match self.node.records.state(&self.record.sandbox) {
            Ok(SandboxState::Hibernated { .. } | SandboxState::Restoring { .. }) => None,
            Ok(SandboxState::Running) | Err(_) => Some(KILLED),
        }
    }

    /// A program does it, because it may have to wait for the pod's lock. One that cannot be started is not missed: the end of the pod ends the container too.
    fn bereave(&mut self, container: &ContainerId) {
        if let Ok(child) = spawn("torpor-bereave", &["bereave", container.as_str()]) {
            self.children.add(Purpose::Verb, child);
        }
    }

    /// A program does it, because the sandbox may take its time to answer.
    fn end_exec(&mut self, pid: i32) {
        let pid = pid.to_string();
        let args = ["end-exec", self.record.id.as_str(), pid.as_str()];
        if let Ok(child) = spawn("torpor-end-exec", &args) {
            self.children.add(Purpose::Verb, child);
        }
    }

    fn attach(&self) -> Result<Control, control::Error> {
        let sandbox = &self.record.sandbox;
        let mut control = self.node.runsc.connect(sandbox)?;
        control.begin_wait(self.record.id.as_str())?;
        Ok(control)
    }
}

/// Runs this program with one of the verbs that nobody waits for an answer of.
fn spawn(name: &str, args: &[&str]) -> std::io::Result<Child> {
    Command::new("/proc/self/exe")
        .arg0(name)
        .args(args)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
}

struct Ready {
    request: bool,
    ended: bool,
    dialled: bool,
    relay: bool,
    /// What was seen of the container's standard input, while gVisor does not read it.
    typed: Option<PollFlags>,
    /// Nothing for as long as it was willing to wait.
    quiet: bool,
}

/// Whether the wait is over.
fn is_readable(control: &Control) -> bool {
    let mut fds = [PollFd::new(borrow(control), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

#[allow(unsafe_code)]
fn borrow(control: &Control) -> BorrowedFd<'_> {
    // SAFETY: the descriptor lives as long as the control connection that is borrowed here.
    unsafe { BorrowedFd::borrow_raw(control.as_raw_fd()) }
}

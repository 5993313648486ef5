//! Runs a process in a container, over the sandbox' control socket. A sandbox that sleeps is woken
//! first.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::unistd::{Gid, Uid, fchown};
use serde_json::{Value, json};
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_records::{PodLock, ProbeNote, SandboxState, Session, WakeCause};
use torpor_runsc::control::{self, Control, SignalScope};
use torpor_runsc::exec::exec_args;
use torpor_runsc::{left, pause};
use torpor_sandbox::claim;
use torpor_sandbox::node::{CALL_LIMIT, Node};
use torpor_sandbox::restore::transitions;

use crate::KILLED;

/// Time between two reads of the state of a sandbox whose lock another process holds. The kubelet's
/// default timeout of a probe is a second.
const PROBE_INTERVAL: Duration = Duration::from_millis(20);

/// Runs a command that wakes the sandbox, for a caller that needs it, and waits for its end.
pub(crate) type WakeByCommand<'a> = &'a dyn Fn(&SandboxId) -> anyhow::Result<()>;

/// The result of [`begin`].
#[derive(Debug)]
pub(crate) enum Begun {
    /// Torpor answers the probe in place of the sandbox: the process counts as one that succeeded.
    Answered,
    Running(Running),
}

/// A process that runs in a container.
#[derive(Debug)]
pub(crate) struct Running {
    target: Target,
    /// The connection on which the sandbox reports the end of the process.
    waiting: Control,
    session: Session,
    /// With this lock the agent keeps the sandbox awake.
    _joined: Option<PodLock>,
    /// The sandbox' processor time when a probe began, in microseconds.
    used_before: Option<u64>,
    began: Instant,
}

/// Runs a process in a container, for a caller that waits for its end. A sandbox that sleeps is
/// woken first.
///
/// `process`: the OCI process. `files`: its standard streams, or its terminal three times.
pub(crate) fn begin(
    node: &Node,
    id: &ContainerId,
    process: Value,
    files: [BorrowedFd<'_>; 3],
    wake: WakeByCommand<'_>,
) -> anyhow::Result<Begun> {
    let record = node.container(id)?;
    let sandbox = &record.sandbox;
    let session = session_of(node, sandbox, &process);
    // The lock is held until the process runs: a save could otherwise end the sandbox meanwhile.
    let lock = match session {
        Session::Use => Some(lock_awake(node, sandbox, wake)?),
        Session::Probe => lock_for_probe(node, sandbox)?,
    };
    let Some(_lock) = lock else {
        return Ok(Begun::Answered);
    };
    let process = match session {
        Session::Use => with_exec_mark(process),
        Session::Probe => process,
    };
    let spec = node.records.spec(id)?;
    let mut process = process;
    claim::add_variables(&mut process, &spec);
    let request = exec_args(&process, &spec, id.as_str())?;
    let used_before = match session {
        Session::Probe => processor_time(node, sandbox),
        Session::Use => None,
    };
    // The note must exist before the process runs: it causes the search for processes that the
    // process leaves behind.
    if session == Session::Use {
        node.records.note_exec(sandbox)?;
    }
    let began = Instant::now();
    let joined = node.records.join_sessions(sandbox, session).ok();
    let mut waiting = node.runsc.connect(sandbox)?;
    let copy = Arc::new(waiting.as_fd().try_clone_to_owned()?);
    let target = Target {
        sandbox: sandbox.clone(),
        container: id.clone(),
        pid: start(node, sandbox, &request, files)?,
        waiting: copy,
    };
    // Without the note the time of the last session is an earlier one.
    let _ = node.records.note_session(sandbox, session);
    if let Err(error) = waiting.begin_wait_pid(id.as_str(), target.pid) {
        // Nothing would observe the process any more.
        let _ = target.signal(node, SignalScope::Process, Signal::SIGKILL as i32);
        return Err(error).context("cannot wait for the process");
    }
    Ok(Begun::Running(Running {
        target,
        waiting,
        session,
        _joined: joined,
        used_before,
        began,
    }))
}

/// Most commands that wake a sandbox for one exec. A sandbox falls asleep again only if it was idle
/// in between.
const MAX_WAKES: usize = 5;

/// Wakes the sandbox if it sleeps; returns its lock.
fn lock_awake(
    node: &Node,
    sandbox: &SandboxId,
    wake: WakeByCommand<'_>,
) -> anyhow::Result<PodLock> {
    for _ in 0..MAX_WAKES {
        let lock = node.records.lock(sandbox)?;
        let runs = node.records.state(sandbox)? == SandboxState::Running;
        if runs && !node.records.is_noted_paused(sandbox) {
            return Ok(lock);
        }
        if runs && transitions::resume_dozing(node, sandbox, WakeCause::Exec, true)? {
            return Ok(lock);
        }
        drop(lock);
        wake(sandbox)?;
    }
    bail!("the sandbox falls asleep again and again: try again")
}

impl Running {
    /// The descriptor that is readable when the process has ended.
    pub(crate) fn ended(&self) -> BorrowedFd<'_> {
        self.waiting.as_fd()
    }

    /// The target of signals to the process.
    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    /// Waits for the end of the process; returns its exit code.
    pub(crate) fn wait(mut self, node: &Node) -> u8 {
        // The result is there in one piece. A sandbox may send a part of it to block this thread.
        let status = self.waiting.wait_result_within(CALL_LIMIT);
        let code = status.map_or(KILLED, |status| status.exit_code());
        let sandbox = &self.target.sandbox;
        let used = self.used_before.zip(processor_time(node, sandbox));
        // The pod may have been removed when the process ended, so that notes fail.
        if let Some((before, after)) = used {
            let _ = note_probe(node, sandbox, after.saturating_sub(before), self.began);
        }
        let _ = node.records.note_session(sandbox, self.session);
        code
    }
}

/// A process in a container, as the target of signals.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    sandbox: SandboxId,
    container: ContainerId,
    /// In the sandbox.
    pid: i32,
    /// A copy of the connection on which the sandbox reports the end of the process.
    waiting: Arc<OwnedFd>,
}

impl Target {
    /// Sends a signal to the process, or to more processes by `scope`.
    pub(crate) fn signal(
        &self,
        node: &Node,
        scope: SignalScope,
        signal: i32,
    ) -> Result<(), control::Error> {
        let mut control = node.runsc.connect(&self.sandbox)?;
        control.signal(self.container.as_str(), self.pid, signal, scope, CALL_LIMIT)
    }

    /// Ends the wait for the process, as if its sandbox had ended.
    pub(crate) fn give_up(&self) {
        // A connection that is closed already has ended the wait.
        let _ = rustix::net::shutdown(&self.waiting, rustix::net::Shutdown::Both);
    }
}

/// Notes what a probe took: this processor time was not used by the sandbox' program.
fn note_probe(
    node: &Node,
    sandbox: &SandboxId,
    used_micros: u64,
    began: Instant,
) -> Result<(), torpor_records::Error> {
    let took_micros = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
    let taken = ProbeNote {
        used_micros,
        took_micros,
    };
    node.records.note_probe(sandbox, taken)
}

/// Adds the mark to the process' environment by which [`left`] finds the processes that the process
/// leaves behind.
fn with_exec_mark(mut process: Value) -> Value {
    match process.get_mut("env").and_then(Value::as_array_mut) {
        Some(env) => env.push(json!(left::MARK)),
        None => process["env"] = json!([left::MARK]),
    }
    process
}

/// Returns the processor time of the sandbox' cgroup in microseconds; none where the host does not
/// count it.
fn processor_time(node: &Node, sandbox: &SandboxId) -> Option<u64> {
    let pod = node.records.pod(sandbox).ok()?;
    let used = node.cgroups.processor_time(&pod.cgroup)?;
    u64::try_from(used.as_micros()).ok()
}

/// The handling of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProbeHandling {
    /// Torpor answers the probe in place of the sandbox.
    Answer,
    /// The probe runs in the sandbox.
    Run,
    /// Undecided while another process works on the sandbox.
    LookAgain,
}

/// Returns the handling of a probe. `paused`: the sandbox is paused, for any reason. `has_lock`:
/// this process has the sandbox' lock.
///
/// A save, and a wake that waits for its turn, hold the lock for longer than the kubelet waits for
/// a probe. So the probe of a paused sandbox is answered without the lock.
fn probe_handling(state: &SandboxState, paused: bool, has_lock: bool) -> ProbeHandling {
    match state {
        SandboxState::Hibernated { .. } => ProbeHandling::Answer,
        SandboxState::Running if paused => ProbeHandling::Answer,
        SandboxState::Running | SandboxState::Restoring { .. } => match has_lock {
            true => ProbeHandling::Run,
            false => ProbeHandling::LookAgain,
        },
    }
}

/// Reports whether the sandbox lives and is paused, for any reason. The caller holds the lock.
fn is_paused(node: &Node, sandbox: &SandboxId) -> bool {
    // A connection would continue a sandbox whose processes are stopped.
    if node.runsc.is_stopped_by_signal(sandbox) {
        return true;
    }
    node.runsc.connect(sandbox).is_ok_and(|mut control| {
        pause::is_paused(&node.records, &mut control, sandbox, CALL_LIMIT).unwrap_or(false)
    })
}

/// Waits for the handling of a probe. Returns the pod's lock for a probe that runs in the sandbox;
/// none for a probe that is answered in its place.
fn lock_for_probe(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Option<PodLock>> {
    loop {
        let lock = node.records.try_lock(sandbox)?;
        let state = node.records.state(sandbox)?;
        let paused = match &lock {
            Some(_) => state == SandboxState::Running && is_paused(node, sandbox),
            // The note exists if the process with the lock has paused the sandbox, or has not
            // resumed it yet.
            None => node.records.is_noted_paused(sandbox),
        };
        match probe_handling(&state, paused, lock.is_some()) {
            ProbeHandling::Answer => return Ok(None),
            ProbeHandling::Run => return Ok(lock),
            ProbeHandling::LookAgain => std::thread::sleep(PROBE_INTERVAL),
        }
    }
}

/// Returns the purpose of an exec. The kubelet's exec probes arrive like every exec, and are
/// recognized by their commands.
fn session_of(node: &Node, sandbox: &SandboxId, process: &Value) -> Session {
    let command: Option<Vec<String>> = process
        .get("args")
        .and_then(|args| serde_json::from_value(args.clone()).ok());
    // Without the note of the kubelet's probes each exec counts as use: the sandbox stays awake for
    // it.
    let probes = node.records.probes(sandbox).unwrap_or_default();
    match command.is_some_and(|command| probes.commands.contains(&command)) {
        true => Session::Probe,
        false => Session::Use,
    }
}

/// Starts the process; returns its pid in the sandbox. The sandbox gets copies of the standard
/// streams and becomes their owner.
fn start(
    node: &Node,
    sandbox: &SandboxId,
    request: &Value,
    files: [BorrowedFd<'_>; 3],
) -> anyhow::Result<i32> {
    let (uid, gid) = node.runsc.of(sandbox).sandbox_user(sandbox.as_str())?;
    for file in files {
        match fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid))) {
            // A stream without an owner, or whose owner cannot be changed, is used unchanged.
            Ok(()) | Err(Errno::EINVAL | Errno::EPERM | Errno::EROFS) => {}
            Err(error) => return Err(error).context("cannot give the streams to the sandbox"),
        }
    }
    let mut control = node.runsc.connect(sandbox)?;
    Ok(control.execute(request, &files, CALL_LIMIT)?)
}

#[cfg(test)]
mod tests {
    use torpor_core::ids::ImageId;

    use super::*;

    #[test]
    fn a_probe_is_answered_for_a_sleeping_sandbox_even_during_its_wake_or_save() {
        let image = || ImageId::parse("pod-a.1").expect("an id");
        let hibernated = SandboxState::Hibernated {
            image: image(),
            unstarted: None,
        };
        let restoring = SandboxState::Restoring {
            image: image(),
            started: Vec::new(),
        };
        for (state, paused, has_lock, expected) in [
            // Asleep, also while another process wakes the sandbox or waits for its turn.
            (&hibernated, false, true, ProbeHandling::Answer),
            (&hibernated, false, false, ProbeHandling::Answer),
            (&hibernated, true, false, ProbeHandling::Answer),
            // Dozing or frozen, also while the sandbox is saved or resumed.
            (&SandboxState::Running, true, true, ProbeHandling::Answer),
            (&SandboxState::Running, true, false, ProbeHandling::Answer),
            // About to be paused, or in use.
            (
                &SandboxState::Running,
                false,
                false,
                ProbeHandling::LookAgain,
            ),
            (&SandboxState::Running, false, true, ProbeHandling::Run),
            // The sandbox has no container yet for which Torpor could answer.
            (&restoring, false, false, ProbeHandling::LookAgain),
            (&restoring, false, true, ProbeHandling::Run),
            (&restoring, true, false, ProbeHandling::LookAgain),
        ] {
            assert_eq!(
                probe_handling(state, paused, has_lock),
                expected,
                "{state:?} {paused} {has_lock}"
            );
        }
    }
}

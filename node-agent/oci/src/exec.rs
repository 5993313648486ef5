//! `exec`: run a process in a container. A hibernated sandbox is woken first.
//!
//! The process is started over the sandbox' control socket, which takes less than a tenth of the
//! time of the runsc command. The shim needs a pid to watch. So exec starts a waiter, which ends
//! with the exit code of the process in the sandbox.

use std::io::PipeWriter;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{Gid, Uid, fchown};
use serde_json::{Value, json};
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_records::{ContainerRecord, PodLock, ProbeNote, SandboxState, Session, WakeCause};
use torpor_runsc::control::{self, Control, SignalScope};
use torpor_runsc::exec::exec_args;
use torpor_runsc::keeper::{self, Request};
use torpor_runsc::left;

use crate::args::ExecArgs;
use crate::state;
use torpor_sandbox::console::{Terminal, hand_over};
use torpor_sandbox::node::{CALL_LIMIT, Node, read_oci_json};
use torpor_sandbox::restore::transitions;

/// Time between two reads of the state of a sandbox whose lock another process holds. The kubelet's
/// default timeout of a probe is a second.
const PROBE_INTERVAL: Duration = Duration::from_millis(20);
/// Exit code of a process whose sandbox ended: that of a killed process.
const KILLED: u8 = 137;
/// Limit for the end of a killed process, which takes less than a millisecond.
const END_LIMIT: Duration = Duration::from_secs(3);

pub(crate) fn exec(node: &Node, args: &ExecArgs) -> anyhow::Result<()> {
    ensure!(
        args.detach,
        "exec without --detach is not supported: the shim always sets it"
    );
    let process = read_oci_json(&args.process, "process")?;
    let record = node.container(&args.id)?;
    let session = session_of(node, &record.sandbox, &process);
    let lock = match session {
        Session::Use => Some(node.records.lock(&record.sandbox)?),
        Session::Probe => lock_for_probe(node, &record.sandbox)?,
    };
    // The lock is held until the process runs: a save could otherwise end the sandbox meanwhile.
    let Some(_lock) = lock else {
        return answer_probe(node, args, &record);
    };
    transitions::wake_up(node, &record.sandbox, WakeCause::Exec)?;
    let spec = node.records.spec(&args.id)?;
    let process = match session {
        Session::Use => with_exec_mark(process),
        Session::Probe => process,
    };
    let request = exec_args(&process, &spec, args.id.as_str())?;
    let terminal = match &args.console_socket {
        Some(socket) => {
            let terminal = Terminal::open()?;
            hand_over(socket, &terminal.master)?;
            Some(terminal.slave)
        }
        None => None,
    };
    let before = match session {
        Session::Probe => processor_time(node, &record.sandbox),
        Session::Use => None,
    };
    let (end, ended) = std::io::pipe().context("cannot make a pipe")?;
    // The note must exist before the process runs: it causes the search for processes that the
    // process leaves behind.
    if session == Session::Use {
        node.records.note_exec(&record.sandbox)?;
    }
    let (stdin, stdout, stderr) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
    let files = match &terminal {
        Some(terminal) => [terminal.as_fd(); 3],
        None => [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
    };
    let pid = start(node, &record.sandbox, &request, files)?;
    let dir = node.records.container_dir(&args.id);
    // If the keeper refuses the request (it is of an older version), the process runs on when its
    // waiter is killed.
    let _ = keeper::ask(&dir, &Request::Exec { pid }, &[end.as_fd()], CALL_LIMIT);
    node.records.note_session(&record.sandbox, session)?;
    let mut waiter = waiter(&record.sandbox, &args.id, pid, terminal, ended);
    if session == Session::Probe {
        waiter.arg("--probe");
    }
    if let Some(micros) = before {
        waiter.arg("--used-micros").arg(micros.to_string());
    }
    let waiter = waiter.spawn().context("cannot start the waiter")?;
    hand_to_shim(node, args, &record, waiter.id())
}

/// Runs a command that wakes the sandbox, for a caller that needs it, and waits for its end.
pub type WakeByCommand<'a> = &'a dyn Fn(&SandboxId) -> anyhow::Result<()>;

/// The result of [`begin`].
#[derive(Debug)]
pub enum Begun {
    /// Torpor answers the probe in place of the sandbox: the process counts as one that succeeded.
    Answered,
    Running(Running),
}

/// A process that runs in a container.
#[derive(Debug)]
pub struct Running {
    sandbox: SandboxId,
    container: ContainerId,
    /// In the sandbox.
    pid: i32,
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
pub fn begin(
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
    let request = exec_args(&process, &node.records.spec(id)?, id.as_str())?;
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
    let pid = start(node, sandbox, &request, files)?;
    node.records.note_session(sandbox, session)?;
    waiting.begin_wait_pid(id.as_str(), pid)?;
    Ok(Begun::Running(Running {
        sandbox: sandbox.clone(),
        container: id.clone(),
        pid,
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
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.waiting.as_fd()
    }

    /// Sends a signal to the process.
    pub fn signal(node: &Node, target: &Target, signal: i32) -> Result<(), control::Error> {
        let mut control = node.runsc.connect(&target.sandbox)?;
        let container = target.container.as_str();
        control.signal(container, target.pid, signal, target.scope, CALL_LIMIT)
    }

    /// The target of signals to the process.
    pub fn target(&self, scope: SignalScope) -> Target {
        Target {
            sandbox: self.sandbox.clone(),
            container: self.container.clone(),
            pid: self.pid,
            scope,
        }
    }

    /// Waits for the end of the process; returns its exit code.
    pub fn wait(mut self, node: &Node) -> u8 {
        let status = self.waiting.wait_result();
        let code = status.map_or(KILLED, |status| status.exit_code());
        let used = self.used_before.zip(processor_time(node, &self.sandbox));
        // The pod may have been removed when the process ended, so that notes fail.
        if let Some((before, after)) = used {
            let _ = note_probe(
                node,
                &self.sandbox,
                after.saturating_sub(before),
                self.began,
            );
        }
        let _ = node.records.note_session(&self.sandbox, self.session);
        code
    }
}

/// The process, or the processes, that a signal goes to.
#[derive(Debug, Clone)]
pub struct Target {
    sandbox: SandboxId,
    container: ContainerId,
    pid: i32,
    scope: SignalScope,
}

impl Target {
    /// Returns the target with another scope.
    #[must_use]
    pub fn with_scope(self, scope: SignalScope) -> Self {
        Self { scope, ..self }
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

/// Writes the pid file and places the process in the container's cgroup: the shim watches this
/// process in place of the process in the sandbox.
fn hand_to_shim(
    node: &Node,
    args: &ExecArgs,
    record: &ContainerRecord,
    pid: u32,
) -> anyhow::Result<()> {
    node.cgroups.place(&record.cgroup, pid)?;
    if let Some(path) = &args.pid_file {
        std::fs::write(path, pid.to_string())
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
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

/// Waits for the handling of a probe. Returns the pod's lock for a probe that runs in the sandbox;
/// none for a probe that is answered in its place.
fn lock_for_probe(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Option<PodLock>> {
    loop {
        let lock = node.records.try_lock(sandbox)?;
        let state = node.records.state(sandbox)?;
        let paused = match &lock {
            Some(_) => state == SandboxState::Running && state::is_paused(node, sandbox),
            // With this note, the process that has the lock has paused the sandbox, or has not
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

/// Answers a probe of a sandbox that sleeps or is paused, by a process that succeeds.
///
/// Such a sandbox does not change until it runs again, and a probe is no reason to let it run. The
/// kubelet restarts a container whose probe fails, and the container's memory would be lost. A
/// probe of an awake sandbox runs in the sandbox again.
fn answer_probe(node: &Node, args: &ExecArgs, record: &ContainerRecord) -> anyhow::Result<()> {
    let succeeds = Command::new("/proc/self/exe")
        .arg0("torpor-exec")
        .arg("probe-answer")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot answer the probe")?;
    hand_to_shim(node, args, record, succeeds.id())
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

/// Returns the command of a waiter. A waiter for a terminal has it as its controlling terminal, so
/// that the kernel signals new window sizes and the terminal's signal keys to the waiter. `ended`:
/// pipe through which the waiter reports to the container's keeper that the process has ended.
fn waiter(
    sandbox: &SandboxId,
    container: &ContainerId,
    pid: i32,
    terminal: Option<OwnedFd>,
    ended: PipeWriter,
) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("torpor-exec").arg("exec-waiter");
    command
        .arg(sandbox.as_str())
        .arg(container.as_str())
        .arg(pid.to_string());
    command.current_dir("/").stdout(ended).stderr(Stdio::null());
    match terminal {
        Some(terminal) => command.arg("--terminal").stdin(terminal),
        None => command.stdin(Stdio::null()),
    };
    command
}

/// Waits for a probe, and records its processor time and duration: this processor time was not used
/// by the sandbox' program. Exits with the probe's code.
pub(crate) fn wait_for_probe(
    node: &Node,
    sandbox: &SandboxId,
    container: &ContainerId,
    pid: i32,
    used_before: Option<u64>,
) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let code = wait(node, sandbox, container, pid, false, Session::Probe)?;
    if let Some((before, after)) = used_before.zip(processor_time(node, sandbox)) {
        // The pod may have been removed when the process ended.
        let _ = note_probe(node, sandbox, after.saturating_sub(before), began);
    }
    Ok(code)
}

/// Waits for the process, and returns its exit code. Passes on the signals of its terminal.
pub(crate) fn wait(
    node: &Node,
    sandbox: &SandboxId,
    container: &ContainerId,
    pid: i32,
    terminal: bool,
    session: Session,
) -> anyhow::Result<ExitCode> {
    // With the lock of the session the agent keeps the sandbox awake. Without the lock a sleep of
    // the sandbox may end the session, and nothing else.
    let _session = node.records.join_sessions(sandbox, session).ok();
    let mut control = node.runsc.connect(sandbox)?;
    control.begin_wait_pid(container.as_str(), pid)?;
    if terminal {
        rustix::process::setsid().context("cannot start a session")?;
        rustix::process::ioctl_tiocsctty(std::io::stdin()).context("cannot take the terminal")?;
        let (root, sandbox) = (node.runsc.root_of(sandbox), sandbox.clone());
        let container = container.clone();
        let signals = terminal_signals();
        signals.thread_block().context("cannot block signals")?;
        // This thread ends with this process.
        std::thread::spawn(move || {
            while let Ok(signal) = signals.wait() {
                let scope = SignalScope::Foreground;
                // A process that has just ended needs no signal.
                let _ = Control::connect(&root, sandbox.as_str()).and_then(|mut control| {
                    control.signal(container.as_str(), pid, signal as i32, scope, CALL_LIMIT)
                });
            }
        });
    }
    let code = control
        .wait_result()
        .map_or(KILLED, |status| status.exit_code());
    // A keeper that has ended, or is of an older version, does not read the pipe.
    let _ = rustix::io::write(std::io::stdout(), &[0]);
    // The pod may have been removed when the process ended.
    let _ = node.records.note_session(sandbox, session);
    Ok(ExitCode::from(code))
}

/// Ends a process whose waiter was killed. The shim kills the waiter of a process that takes too
/// long (a probe), and cannot reach the process in the sandbox. Without this call one more such
/// process would run after each probe, and would hold the standard streams: containerd waits for
/// their end before it answers the kubelet.
pub(crate) fn end(node: &Node, container: &ContainerId, pid: i32) {
    // The processes of a removed container have ended with it.
    if let Ok(record) = node.container(container) {
        end_process(
            &node.runsc.root_of(&record.sandbox),
            &record.sandbox,
            container,
            pid,
        );
    }
}

/// Kills the process and waits for its end. gVisor keeps the status of an ended process until a
/// caller has waited for it.
fn end_process(root: &Path, sandbox: &SandboxId, container: &ContainerId, pid: i32) {
    let container = container.as_str();
    let connect = || Control::connect(root, sandbox.as_str());
    // A process that has ended by itself, or with its sandbox, needs no signal.
    let Ok(mut waiting) = connect() else { return };
    let waits = waiting.begin_wait_pid(container, pid).is_ok();
    let (kill, scope) = (Signal::SIGKILL as i32, SignalScope::Process);
    let killed =
        connect().and_then(|mut control| control.signal(container, pid, kill, scope, END_LIMIT));
    if waits && killed.is_ok() {
        let _ = waiting.wait_result_within(END_LIMIT);
    }
}

fn terminal_signals() -> SigSet {
    SigSet::from_iter([
        Signal::SIGWINCH,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGTSTP,
        Signal::SIGHUP,
        Signal::SIGTERM,
    ])
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use serde_json::json;
    use torpor_core::ids::ImageId;
    use torpor_runsc::control::socket_path;

    use super::*;

    #[test]
    fn what_nobody_stands_for_any_more_is_killed_and_waited_for() {
        let dir = tempfile::tempdir().expect("a directory");
        let sandbox = SandboxId::new("5".repeat(64)).expect("an id");
        let container = ContainerId::try_from("c".repeat(64)).expect("an id");
        let path = socket_path(dir.path(), sandbox.as_str());
        let listener = UnixListener::bind(path).expect("a socket");
        let sandbox_answers = std::thread::spawn(move || {
            // A request is one message, so one read gets all of it.
            let receive = || {
                let (mut peer, _) = listener.accept().expect("a connection");
                let mut request = [0; 4096];
                let length = peer.read(&mut request).expect("a request");
                let request: Value = serde_json::from_slice(&request[..length]).expect("JSON");
                (peer, request)
            };
            let ((mut waits, wait), (mut kills, kill)) = (receive(), receive());
            for (peer, result) in [(&mut kills, "null"), (&mut waits, "9")] {
                let answer = format!(r#"{{"success":true,"err":"","result":{result}}}"#);
                peer.write_all(answer.as_bytes()).expect("answered");
            }
            (wait, kill)
        });
        end_process(dir.path(), &sandbox, &container, 7);
        let (wait, kill) = sandbox_answers.join().expect("no panic");
        assert_eq!(wait["method"], json!("containerManager.WaitPID"));
        assert_eq!(kill["method"], json!("containerManager.Signal"));
        let arg = json!({ "CID": container.as_str(), "Signo": 9, "PID": 7, "Mode": 0 });
        assert_eq!(kill["arg"], arg);
        drop(dir);
        let gone = Path::new("/nonexistent");
        end_process(gone, &sandbox, &container, 7);
    }

    #[test]
    fn a_probe_is_answered_for_who_stands_still_also_while_somebody_is_at_work_on_it() {
        let image = || ImageId::parse("pod-a.1").expect("an id");
        let hibernated = SandboxState::Hibernated { image: image() };
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

//! `exec`: run a process in a container. A hibernated sandbox is woken first.
//!
//! The process is started over the sandbox' control socket, which costs less than a tenth of the runsc command. The shim
//! wants a pid to watch: a waiter, which ends as the process in the sandbox ends.

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
use torpor_runsc::control::{Control, SignalScope};
use torpor_runsc::exec::exec_args;
use torpor_runsc::keeper::{self, Request};
use torpor_runsc::left;

use crate::args::ExecArgs;
use crate::console::{Terminal, hand_over};
use crate::doze;
use crate::node::{CALL_LIMIT, Node, read_oci_json};
use crate::restore;
use crate::state::{refuse_frozen, stands_still};

/// Between two looks at a sandbox that somebody else is at work on. The kubelet gives a probe a second, if it is told nothing else.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// What the shim is told when the sandbox died under the process: as if it had been killed.
const KILLED: u8 = 137;
/// A killed process is gone within a millisecond.
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
    // Held until the process runs: a save that begins now would otherwise take the sandbox away under it.
    let Some(_lock) = lock else {
        return answer_probe(node, args, &record);
    };
    wake_up(node, &record.sandbox, WakeCause::Exec)?;
    let spec = node.records.spec(&args.id)?;
    let process = match session {
        Session::Use => marked(process),
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
    // Before it runs: what it leaves behind is looked for.
    if session == Session::Use {
        node.records.note_exec(&record.sandbox)?;
    }
    let pid = start(node, &record.sandbox, &request, terminal.as_ref())?;
    let dir = node.records.container_dir(&args.id);
    // Without it (a keeper of an older version) the process runs on when its waiter is killed.
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
    stand_for(node, args, &record, waiter.id())
}

/// With the mark by which what it leaves behind is known.
fn marked(mut process: Value) -> Value {
    match process.get_mut("env").and_then(Value::as_array_mut) {
        Some(env) => env.push(json!(left::MARK)),
        None => process["env"] = json!([left::MARK]),
    }
    process
}

/// Microseconds of the sandbox' cgroup; none where the host does not count them.
fn processor_time(node: &Node, sandbox: &SandboxId) -> Option<u64> {
    let pod = node.records.pod(sandbox).ok()?;
    let used = node.cgroups.processor_time(&pod.cgroup)?;
    u64::try_from(used.as_micros()).ok()
}

/// The shim watches this process in place of the one in the sandbox.
fn stand_for(
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

/// What becomes of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Probed {
    /// It is answered in the sandbox' place.
    Answered,
    /// It is run in the sandbox.
    Run,
    /// Nobody knows yet: somebody is at work on the sandbox.
    LookAgain,
}

/// A save and a wake that waits for its turn take longer than the kubelet waits for a probe, and have the lock: what they leave standing is answered for
/// without it. `stands_still`: paused, whatever for.
fn of_probe(state: &SandboxState, stands_still: bool, has_lock: bool) -> Probed {
    match state {
        SandboxState::Hibernated { .. } => Probed::Answered,
        SandboxState::Running if stands_still => Probed::Answered,
        SandboxState::Running | SandboxState::Restoring { .. } => match has_lock {
            true => Probed::Run,
            false => Probed::LookAgain,
        },
    }
}

/// The pod's lock, for a probe that is run in the sandbox; none for one that is answered in its place.
fn lock_for_probe(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Option<PodLock>> {
    loop {
        let lock = node.records.try_lock(sandbox)?;
        let state = node.records.state(sandbox)?;
        let stands_still = match &lock {
            Some(_) => state == SandboxState::Running && stands_still(node, sandbox),
            // Whoever has the lock has paused it, or has not resumed it yet.
            None => node.records.is_noted_paused(sandbox),
        };
        match of_probe(&state, stands_still, lock.is_some()) {
            Probed::Answered => return Ok(None),
            Probed::Run => return Ok(lock),
            Probed::LookAgain => std::thread::sleep(LOOK_AGAIN),
        }
    }
}

/// A sandbox that sleeps, or stands still, is as it was when that began, and a probe is no reason to let it run: it is answered by a process that
/// succeeds. The kubelet would restart what fails it, and the memory would be lost. When the sandbox is awake, its own answer counts again.
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
    stand_for(node, args, record, succeeds.id())
}

/// The kubelet's exec probes come the way every exec comes; their commands tell them apart.
fn session_of(node: &Node, sandbox: &SandboxId, process: &Value) -> Session {
    let command: Option<Vec<String>> = process
        .get("args")
        .and_then(|args| serde_json::from_value(args.clone()).ok());
    // Without the note it is somebody's: the sandbox stays awake for it.
    let probes = node.records.probes(sandbox).unwrap_or_default();
    match command.is_some_and(|command| probes.commands.contains(&command)) {
        true => Session::Probe,
        false => Session::Use,
    }
}

/// The pod's lock, with the sandbox running: one that hibernates or dozes is woken, one that is frozen is not.
pub(crate) fn awake(node: &Node, sandbox: &SandboxId, cause: WakeCause) -> anyhow::Result<PodLock> {
    let lock = node.records.lock(sandbox)?;
    wake_up(node, sandbox, cause)?;
    Ok(lock)
}

/// The caller holds the lock.
fn wake_up(node: &Node, sandbox: &SandboxId, cause: WakeCause) -> anyhow::Result<()> {
    match node.records.state(sandbox)? {
        SandboxState::Running if doze::rouse(node, sandbox, cause)? => Ok(()),
        SandboxState::Running => refuse_frozen(node, sandbox),
        SandboxState::Hibernated { .. } => restore::wake_locked(node, sandbox, cause),
        SandboxState::Restoring { .. } => {
            bail!("the sandbox is being restored: not all of its containers run yet")
        }
    }
}

/// Answers the pid in the sandbox. The sandbox gets copies of the standard streams, as their owner.
fn start(
    node: &Node,
    sandbox: &SandboxId,
    request: &Value,
    terminal: Option<&OwnedFd>,
) -> anyhow::Result<i32> {
    let (stdin, stdout, stderr) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
    let files: [BorrowedFd<'_>; 3] = match terminal {
        Some(terminal) => [terminal.as_fd(); 3],
        None => [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
    };
    let (uid, gid) = node.runsc.of(sandbox).sandbox_user(sandbox.as_str())?;
    for file in files {
        match fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid))) {
            // What has no owner (or one that cannot be changed) is used as it is.
            Ok(()) | Err(Errno::EINVAL | Errno::EPERM | Errno::EROFS) => {}
            Err(error) => return Err(error).context("cannot give the streams to the sandbox"),
        }
    }
    let mut control = node.runsc.connect(sandbox)?;
    Ok(control.execute(request, &files, CALL_LIMIT)?)
}

/// A waiter for a terminal has it as its controlling terminal, so that the kernel tells it of new window sizes and of keys
/// that mean signals. `ended`: where the container's keeper hears that the process has ended.
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

/// Waits for a probe, and notes what it took: that was not the work of the sandbox' program.
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
        let taken = ProbeNote {
            used_micros: after.saturating_sub(before),
            took_micros: u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX),
        };
        // The pod may be gone with the process.
        let _ = node.records.note_probe(sandbox, taken);
    }
    Ok(code)
}

/// Waits for the process and ends as it ended; passes on what its terminal signals.
pub(crate) fn wait(
    node: &Node,
    sandbox: &SandboxId,
    container: &ContainerId,
    pid: i32,
    terminal: bool,
    session: Session,
) -> anyhow::Result<ExitCode> {
    // The agent does not put the sandbox to sleep under a session. Without the lock it might, which ends only the session.
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
        // Ends with the process.
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
    // A keeper that is gone, or of an older version, does not listen.
    let _ = rustix::io::write(std::io::stdout(), &[0]);
    // The pod may be gone with the process.
    let _ = node.records.note_session(sandbox, session);
    Ok(ExitCode::from(code))
}

/// Ends a process whose waiter was killed: the shim kills the waiter of what takes too long (a probe), and knows of nobody else. The process would run on, one more
/// for each probe, and hold the streams for whose end containerd waits before it answers the kubelet.
pub(crate) fn end(node: &Node, container: &ContainerId, pid: i32) {
    // One whose container was removed has ended with it.
    if let Ok(record) = node.container(container) {
        end_process(
            &node.runsc.root_of(&record.sandbox),
            &record.sandbox,
            container,
            pid,
        );
    }
}

/// Waits for its end too: gVisor keeps the status of one that nobody waits for.
fn end_process(root: &Path, sandbox: &SandboxId, container: &ContainerId, pid: i32) {
    let container = container.as_str();
    let connect = || Control::connect(root, sandbox.as_str());
    // What has ended by itself, or with its sandbox, needs no signal.
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
            // All at once: a request is one message.
            let hear = || {
                let (mut peer, _) = listener.accept().expect("a connection");
                let mut request = [0; 4096];
                let length = peer.read(&mut request).expect("a request");
                let request: Value = serde_json::from_slice(&request[..length]).expect("JSON");
                (peer, request)
            };
            let ((mut waits, wait), (mut kills, kill)) = (hear(), hear());
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
        let whom = json!({ "CID": container.as_str(), "Signo": 9, "PID": 7, "Mode": 0 });
        assert_eq!(kill["arg"], whom);
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
        for (state, stands_still, has_lock, expected) in [
            // Asleep, and while somebody wakes it or waits for his turn to.
            (&hibernated, false, true, Probed::Answered),
            (&hibernated, false, false, Probed::Answered),
            (&hibernated, true, false, Probed::Answered),
            // Dozing or frozen, and while it is saved or resumed.
            (&SandboxState::Running, true, true, Probed::Answered),
            (&SandboxState::Running, true, false, Probed::Answered),
            // About to be paused, or in use.
            (&SandboxState::Running, false, false, Probed::LookAgain),
            (&SandboxState::Running, false, true, Probed::Run),
            // There is no container to speak for yet.
            (&restoring, false, false, Probed::LookAgain),
            (&restoring, false, true, Probed::Run),
            (&restoring, true, false, Probed::LookAgain),
        ] {
            assert_eq!(
                of_probe(state, stands_still, has_lock),
                expected,
                "{state:?} {stands_still} {has_lock}"
            );
        }
    }
}

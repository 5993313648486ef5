//! `kill`: a signal to a container. One that ends a hibernated container needs no wake.

use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use nix::sys::signal::Signal;
use torpor_cgroup as cgroup;
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_records::{ContainerRecord, SandboxState, WakeCause};
use torpor_runsc::control::{self, SignalScope};
use torpor_runsc::held_open::{self};
use torpor_runsc::keeper::{self, Request};

use crate::doze;
use crate::node::{CALL_LIMIT, COMMAND_LIMIT, Node};
use crate::restore;

/// The shim knows by these words that there is nothing left to kill.
const FINISHED: &str = "container not running";

/// By its number: nix knows no real-time signals, by one of which (SIGRTMIN+3) an image that runs systemd wants to be stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Number(i32);

impl Number {
    /// Linux has signals from 1 to this one.
    const LAST: i32 = 64;
    /// The first that means what its sender wants it to mean.
    const FIRST_REAL_TIME: i32 = 32;
}

impl From<Signal> for Number {
    fn from(signal: Signal) -> Self {
        Self(signal as i32)
    }
}

impl PartialEq<Signal> for Number {
    fn eq(&self, signal: &Signal) -> bool {
        *self == Self::from(*signal)
    }
}

/// How a container gets a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Its keeper is gone: the shim sends this to what is left of a container that has ended.
    ToOrphan,
    /// Its program does not run, but there may be processes of a restore that was cut off.
    ToRemains,
    /// Its program is in an image.
    ToKeeper,
    /// The sandbox runs, and its program with it.
    ToProgram,
    /// The sandbox is ended as a whole.
    ByForce,
}

pub(crate) fn kill(node: &Node, id: &ContainerId, signal: &str, all: bool) -> anyhow::Result<()> {
    let signal = parse(signal)?;
    let record = node.container(id)?;
    if ends(signal) {
        // What cannot be found out here is asked again below, with the lock.
        let _ = doze::left_to_agent(node, &record.sandbox);
    }
    let _lock = node.records.lock(&record.sandbox)?;
    match way(signal, prepare(node, &record, signal))? {
        Way::ToOrphan => end_orphaned(node, &record),
        Way::ToRemains => {
            end_sandbox(node, &record)?;
            end_keeper(node, id, signal)
        }
        Way::ToKeeper => end_keeper(node, id, signal),
        Way::ToProgram => deliver(node, &record, signal, all),
        Way::ByForce => end_by_force(node, &record),
    }
}

/// A sandbox of which nothing can be found out (it answers no question in time, or its records cannot be read) is ended as a whole when the
/// kubelet has decided that it must go: otherwise it would stay for as long as it is silent, and its programs have that in their hands.
fn way(signal: Number, prepared: anyhow::Result<Way>) -> anyhow::Result<Way> {
    match prepared {
        Err(error) if signal == Signal::SIGKILL => {
            eprintln!("torpor-oci: ending the whole sandbox: {error:#}");
            Ok(Way::ByForce)
        }
        other => other,
    }
}

/// What has to be before the container can get the signal, and how it then does. The caller holds the lock.
fn prepare(node: &Node, record: &ContainerRecord, signal: Number) -> anyhow::Result<Way> {
    let sandbox = &record.sandbox;
    let state = restore::settled(node, sandbox)?;
    let is_end = ends(signal) || is_suspended(node, sandbox);
    match state {
        SandboxState::Running if keeper_is_gone(node, &record.id) => Ok(Way::ToOrphan),
        SandboxState::Hibernated { .. } | SandboxState::Restoring { .. } if is_end => {
            Ok(Way::ToRemains)
        }
        SandboxState::Hibernated { .. } => {
            restore::wake_locked(node, sandbox, WakeCause::Signal)?;
            Ok(Way::ToProgram)
        }
        SandboxState::Restoring { .. } => {
            bail!("the sandbox is being restored: none of its processes runs yet")
        }
        SandboxState::Running if is_end && is_saved_and_paused(node, record)? => Ok(Way::ToKeeper),
        // Nobody may wake it, and nobody brings back what it has lost: who ends it must not wait for that.
        SandboxState::Running
            if is_end
                && !held_open::is_held_open(&node.records, sandbox)?
                && restore::sleep_on(node, sandbox)? =>
        {
            Ok(Way::ToKeeper)
        }
        SandboxState::Running => {
            // A paused container handles no signal, and who ends one wants it to run its handlers.
            if !doze::rouse(node, sandbox, WakeCause::Signal)? {
                run_on(node, record)?;
            }
            Ok(Way::ToProgram)
        }
    }
}

/// Its program goes on in another Pod, from the image, and nothing is told it here: whatever signal the image wants to be stopped by (SIGWINCH, SIGUSR1), it would wake the sandbox, and the
/// memory would be lost with this Pod.
fn is_suspended(node: &Node, sandbox: &SandboxId) -> bool {
    let pod = node.records.pod(sandbox);
    pod.is_ok_and(|pod| node.records.suspends(&pod.pod_uid))
}

/// The container's keeper is gone, and with it who tells of its end: containerd takes the container for ended, and waits for its output, which the program still holds.
pub(crate) fn bereave(node: &Node, id: &ContainerId) -> anyhow::Result<()> {
    // It ended as containers do, and was removed.
    let Ok(record) = node.container(id) else {
        return Ok(());
    };
    let _lock = node.records.lock(&record.sandbox)?;
    let there = node.container(id).is_ok();
    if !there {
        return Ok(());
    }
    match restore::settled(node, &record.sandbox)? {
        SandboxState::Running => end_orphaned(node, &record),
        SandboxState::Hibernated { .. } | SandboxState::Restoring { .. } => {
            end_sandbox(node, &record)
        }
    }
}

/// Ends every process of the sandbox. A restore that was cut off leaves some, and they hold the container's output, for whose end containerd
/// waits. Not by the pod's record: what is to go must go also when that cannot be read. The caller holds the lock.
fn end_sandbox(node: &Node, record: &ContainerRecord) -> anyhow::Result<()> {
    let processes = cgroup::beside(&record.cgroup, record.sandbox.as_str());
    restore::kill_processes(node, &processes)
}

/// A keeper that waits for the container's end sees that by itself.
fn end_by_force(node: &Node, record: &ContainerRecord) -> anyhow::Result<()> {
    end_sandbox(node, record)?;
    // One that is gone has seen it.
    let _ = end_keeper(node, &record.id, Signal::SIGKILL.into());
    Ok(())
}

/// A sandbox that sleeps does so without the container, and one that runs loses it. The caller holds the lock.
fn end_orphaned(node: &Node, record: &ContainerRecord) -> anyhow::Result<()> {
    if restore::sleep_on(node, &record.sandbox)? {
        return Ok(());
    }
    // Somebody died who had paused it for a save: as long as it stands still its programs do not end either.
    run_on(node, record)?;
    let connected = node.runsc.connect(&record.sandbox);
    let ended = connected.and_then(|mut control| {
        let (all, kill) = (SignalScope::All, Signal::SIGKILL as i32);
        control.signal(record.id.as_str(), 0, kill, all, CALL_LIMIT)
    });
    match ended {
        // Mostly it has ended already: that is why its keeper did.
        Ok(()) | Err(control::Error::NotRunning { .. } | control::Error::Refused { .. }) => Ok(()),
        Err(error) => Err(error).context("cannot end the container's program"),
    }
}

fn keeper_is_gone(node: &Node, id: &ContainerId) -> bool {
    let dir = node.records.container_dir(id);
    let asked = keeper::ask(&dir, &Request::Stdio, &[], CALL_LIMIT);
    matches!(asked, Err(keeper::Error::Gone { .. }))
}

/// Ends a container whose program does not run: `delete` removes the rest.
fn end_keeper(node: &Node, id: &ContainerId, signal: Number) -> anyhow::Result<()> {
    let code = 128 + u8::try_from(signal.0).unwrap_or(0);
    let dir = node.records.container_dir(id);
    match keeper::ask(&dir, &Request::Exit { code }, &[], CALL_LIMIT) {
        Err(keeper::Error::Gone { .. }) => bail!(FINISHED),
        other => other.map(drop).context("cannot end the container's keeper"),
    }
}

/// One that dozes is resumed in a millisecond, and its program ends as it would have. But a save was cut off between the commit and the end of the processes: the image is the sandbox already, and one that
/// ran on would make it stale for nothing.
fn is_saved_and_paused(node: &Node, record: &ContainerRecord) -> anyhow::Result<bool> {
    let dozes = node.records.doze(&record.sandbox)?.is_some();
    Ok(!dozes && restore::stands_in(node, &record.sandbox)?.is_some())
}

/// Lets the container's sandbox run on if it stands still. The caller holds the lock.
fn run_on(node: &Node, record: &ContainerRecord) -> anyhow::Result<()> {
    let sandbox = &record.sandbox;
    let Ok(mut control) = node.runsc.connect(sandbox) else {
        return Ok(());
    };
    restore::run_on(node, &mut control, sandbox, WakeCause::Signal).map(drop)
}

/// Sends the signal, and has the keeper wait for the container's end if it does not yet: containerd dies now and then between a container's creation and its start, in which nobody has
/// told the keeper of a program. For one that has none the wait ends at once.
fn deliver(node: &Node, record: &ContainerRecord, signal: Number, all: bool) -> anyhow::Result<()> {
    let sent = send(node, record, signal, all);
    if ends(signal) {
        let dir = node.records.container_dir(&record.id);
        // One that is gone has seen the end.
        let _ = keeper::ask(&dir, &Request::Attach, &[], CALL_LIMIT);
    }
    sent
}

fn send(node: &Node, record: &ContainerRecord, signal: Number, all: bool) -> anyhow::Result<()> {
    let scope = if all {
        SignalScope::All
    } else {
        SignalScope::Process
    };
    let sent = node
        .runsc
        .connect(&record.sandbox)
        .and_then(|mut control| control.signal(record.id.as_str(), 0, signal.0, scope, CALL_LIMIT));
    match sent {
        Ok(()) => Ok(()),
        // Its keeper sees that too, unless the sandbox died before it listened.
        Err(control::Error::NotRunning { .. }) if ends(signal) => {
            end_keeper(node, &record.id, Signal::SIGKILL.into())
        }
        Err(control::Error::NotRunning { .. }) => bail!(FINISHED),
        Err(control::Error::Refused { message, .. })
            if message.contains("no such process") || message.contains("not found") =>
        {
            bail!(FINISHED)
        }
        // It has not been started, or has nothing that could be signalled. It is taken out of the sandbox, in which others may run: a start that was cut off may have got as far as
        // the container's output, for whose end containerd waits.
        Err(control::Error::Refused { .. }) if ends(signal) => {
            let runsc = node.runsc_of(&record.sandbox);
            runsc.delete(record.id.as_str(), COMMAND_LIMIT)?;
            end_keeper(node, &record.id, signal)
        }
        // A sandbox that does not answer is ended as a whole: the kubelet has decided that it must go.
        Err(_) if signal == Signal::SIGKILL => end_sandbox(node, record),
        Err(error) => Err(error).context("cannot signal the container"),
    }
}

/// Whether the signal, unhandled, ends a process: the program of a hibernated container cannot handle it any more.
fn ends(signal: Number) -> bool {
    let known = matches!(
        Signal::try_from(signal.0),
        Ok(Signal::SIGTERM | Signal::SIGKILL | Signal::SIGINT | Signal::SIGQUIT | Signal::SIGHUP)
    );
    known || signal.0 >= Number::FIRST_REAL_TIME
}

/// A number, or a name with or without SIG.
fn parse(signal: &str) -> anyhow::Result<Number> {
    if let Ok(number) = signal.parse::<i32>() {
        let known = (1..=Number::LAST).contains(&number);
        ensure!(known, "unknown signal {signal}");
        return Ok(Number(number));
    }
    let upper = signal.to_ascii_uppercase();
    let name = if upper.starts_with("SIG") {
        upper
    } else {
        format!("SIG{upper}")
    };
    let named = Signal::from_str(&name).map(Number::from);
    named.with_context(|| format!("unknown signal {signal}"))
}

#[cfg(test)]
mod tests {
    use torpor_core::Entry;
    use torpor_core::ids::ImageId;
    use torpor_records::Role;
    use torpor_snapshots::{Digest, Store};

    use super::*;
    use crate::node::tests::one_pod;

    #[test]
    fn signals_are_understood_by_number_and_by_name() {
        for text in ["15", "TERM", "SIGTERM", "term"] {
            assert_eq!(parse(text).expect("a signal"), Signal::SIGTERM, "{text}");
        }
        for text in ["SIGNONE", "0", "65", "-1"] {
            parse(text).expect_err(text);
        }
        // What an image of systemd is stopped by.
        let real_time = parse("37").expect("a signal");
        assert!(ends(real_time) && real_time == Number(37));
    }

    #[test]
    fn a_sandbox_that_is_being_suspended_is_woken_by_no_signal() {
        let (_dir, node, pod) = one_pod();
        let image = ImageId::parse("pod-a.1").expect("an id");
        let store = Store::open(&node.config.store_dir).expect("a store");
        let ledger = store.ledger(&pod.pod_uid).expect("a ledger");
        let committed = Entry::Committed {
            image: image.clone(),
        };
        ledger.append(&committed).expect("written");
        let hibernated = SandboxState::Hibernated { image };
        let state = node.records.write_state(&pod.sandbox, &hibernated);
        state.expect("written");
        let record = ContainerRecord {
            id: ContainerId::try_from("c".repeat(64)).expect("an id"),
            sandbox: pod.sandbox.clone(),
            role: Role::Container,
            name: "a".to_owned(),
            terminal: false,
            cgroup: pod.cgroup.with_file_name("c"),
            spec_digest: Digest::of(b""),
            keeper_pid: 0,
            completed: None,
        };
        for (signal, suspends, ends) in [
            (Number::from(Signal::SIGTERM), false, true),
            (Signal::SIGWINCH.into(), false, false),
            (Signal::SIGWINCH.into(), true, true),
            (Signal::SIGUSR1.into(), true, true),
            (Number(37), false, true),
        ] {
            let noted = node.records.note_suspends(&pod.pod_uid, suspends);
            noted.expect("noted");
            // A wake fails here: there is no keeper.
            let way = prepare(&node, &record, signal);
            let ended = way.is_ok_and(|way| way == Way::ToRemains);
            assert_eq!(ended, ends, "{signal:?} {suspends}");
        }
    }

    #[test]
    fn a_sandbox_that_answers_no_question_does_not_keep_the_kubelet_from_ending_it() {
        let silent = || anyhow::anyhow!("the sandbox gave no answer to debug.Stacks");
        let killed = way(Signal::SIGKILL.into(), Err(silent())).expect("a way");
        assert_eq!(killed, Way::ByForce);
        for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGUSR1] {
            way(signal.into(), Err(silent())).expect_err("it may answer later");
        }
        // Where all is known nothing changes.
        for known in [Way::ToOrphan, Way::ToRemains, Way::ToKeeper, Way::ToProgram] {
            for signal in [Signal::SIGKILL, Signal::SIGTERM] {
                assert_eq!(way(signal.into(), Ok(known)).expect("a way"), known);
            }
        }
    }
}

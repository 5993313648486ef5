//! `kill`: a signal to a container. One that ends a hibernated container needs no wake.

use std::str::FromStr;

use anyhow::{Context, bail};
use nix::sys::signal::Signal;
use torpor_core::ids::ContainerId;
use torpor_gvisor::control::{self, Control, SignalScope};
use torpor_gvisor::keeper::{self, Request};
use torpor_gvisor::pause;
use torpor_gvisor::record::{ContainerRecord, SandboxState, WakeCause};

use crate::doze;
use crate::node::{CALL_LIMIT, COMMAND_LIMIT, Node};
use crate::restore;

/// The shim knows by these words that there is nothing left to kill.
const FINISHED: &str = "container not running";

pub(crate) fn kill(node: &Node, id: &ContainerId, signal: &str, all: bool) -> anyhow::Result<()> {
    let signal = parse(signal)?;
    let record = node.container(id)?;
    if ends(signal) {
        doze::left_to_agent(node, &record.sandbox)?;
    }
    let _lock = node.records.lock(&record.sandbox)?;
    match restore::settled(node, &record.sandbox)? {
        // The shim sends this to what is left of a container that has ended.
        SandboxState::Running if keeper_is_gone(node, id) => end_orphaned(node, &record),
        SandboxState::Hibernated { .. } | SandboxState::Restoring { .. } if ends(signal) => {
            end_remains(node, &record)?;
            end_keeper(node, id, signal)
        }
        SandboxState::Hibernated { .. } => {
            restore::wake_locked(node, &record.sandbox, WakeCause::Called)?;
            deliver(node, &record, signal, all)
        }
        SandboxState::Restoring { .. } => bail!("the sandbox is being restored: nothing runs yet"),
        SandboxState::Running if ends(signal) && is_saved_and_paused(node, &record)? => {
            end_keeper(node, id, signal)
        }
        // Nobody may wake it, and nobody brings back what it has lost: who ends it must not wait for that.
        SandboxState::Running
            if ends(signal)
                && !node.records.is_held_open(&record.sandbox)?
                && restore::sleep_on(node, &record.sandbox)? =>
        {
            end_keeper(node, id, signal)
        }
        SandboxState::Running => {
            // A paused container handles no signal, and who ends one wants it to run its handlers.
            if !doze::rouse(node, &record.sandbox, WakeCause::Called)? {
                run_on(node, &record)?;
            }
            deliver(node, &record, signal, all)
        }
    }
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
            end_remains(node, &record)
        }
    }
}

/// A restore that was cut off leaves processes, and they hold the container's output, for whose end containerd waits. The caller holds the lock.
fn end_remains(node: &Node, record: &ContainerRecord) -> anyhow::Result<()> {
    let pod = node.records.pod(&record.sandbox)?;
    restore::kill_processes(node, &pod.cgroup)
}

/// A sandbox that sleeps does so without the container, and one that runs loses it. The caller holds the lock.
fn end_orphaned(node: &Node, record: &ContainerRecord) -> anyhow::Result<()> {
    if restore::sleep_on(node, &record.sandbox)? {
        return Ok(());
    }
    // Somebody died who had paused it for a save: as long as it stands still its programs do not end either.
    run_on(node, record)?;
    let connected = Control::connect(node.runsc.root(), record.sandbox.as_str());
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
fn end_keeper(node: &Node, id: &ContainerId, signal: Signal) -> anyhow::Result<()> {
    let code = 128 + u8::try_from(signal as i32).unwrap_or(0);
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

/// Resumes the container's sandbox if it stands still. The caller holds the lock.
fn run_on(node: &Node, record: &ContainerRecord) -> anyhow::Result<()> {
    let (sandbox, records) = (&record.sandbox, &node.records);
    let Ok(mut control) = Control::connect(node.runsc.root(), sandbox.as_str()) else {
        return Ok(());
    };
    if pause::is_paused(records, &mut control, sandbox, CALL_LIMIT)? {
        let about_to_run = restore::about_to_run(node, sandbox)?;
        about_to_run.settle(pause::resume(records, &mut control, sandbox, CALL_LIMIT))?;
    }
    Ok(())
}

/// Sends the signal, and has the keeper wait for the container's end if it does not yet: containerd dies now and then between a container's creation and its start, in which nobody has
/// told the keeper of a program. For one that has none the wait ends at once.
fn deliver(node: &Node, record: &ContainerRecord, signal: Signal, all: bool) -> anyhow::Result<()> {
    let sent = send(node, record, signal, all);
    if ends(signal) {
        let dir = node.records.container_dir(&record.id);
        // One that is gone has seen the end.
        let _ = keeper::ask(&dir, &Request::Attach, &[], CALL_LIMIT);
    }
    sent
}

fn send(node: &Node, record: &ContainerRecord, signal: Signal, all: bool) -> anyhow::Result<()> {
    let scope = if all {
        SignalScope::All
    } else {
        SignalScope::Process
    };
    let sent =
        Control::connect(node.runsc.root(), record.sandbox.as_str()).and_then(|mut control| {
            control.signal(record.id.as_str(), 0, signal as i32, scope, CALL_LIMIT)
        });
    match sent {
        Ok(()) => Ok(()),
        // Its keeper sees that too, unless the sandbox died before it listened.
        Err(control::Error::NotRunning { .. }) if ends(signal) => {
            end_keeper(node, &record.id, Signal::SIGKILL)
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
        Err(_) if signal == Signal::SIGKILL => {
            let pod = node.records.pod(&record.sandbox)?;
            restore::kill_processes(node, &pod.cgroup)
        }
        Err(error) => Err(error).context("cannot signal the container"),
    }
}

/// Whether the signal, unhandled, ends a process: the program of a hibernated container cannot handle it any more.
fn ends(signal: Signal) -> bool {
    matches!(
        signal,
        Signal::SIGTERM | Signal::SIGKILL | Signal::SIGINT | Signal::SIGQUIT | Signal::SIGHUP
    )
}

/// A number, or a name with or without SIG.
fn parse(signal: &str) -> anyhow::Result<Signal> {
    if let Ok(number) = signal.parse::<i32>() {
        return Signal::try_from(number).with_context(|| format!("unknown signal {signal}"));
    }
    let upper = signal.to_ascii_uppercase();
    let name = if upper.starts_with("SIG") {
        upper
    } else {
        format!("SIG{upper}")
    };
    Signal::from_str(&name).with_context(|| format!("unknown signal {signal}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_understood_by_number_and_by_name() {
        for text in ["15", "TERM", "SIGTERM", "term"] {
            assert_eq!(parse(text).expect("a signal"), Signal::SIGTERM, "{text}");
        }
        parse("SIGNONE").unwrap_err();
        parse("0").unwrap_err();
    }
}

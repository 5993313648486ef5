//! `kill`: send a signal to a container. A signal that ends a hibernated container needs no wake.

use anyhow::{Context, ensure};
use nix::sys::signal::Signal;
use torpor_cgroup as cgroup;
use torpor_core::ids::ContainerId;
use torpor_core::transition::Delivery;
use torpor_messages::keeper::{self, Request};
use torpor_records::{ContainerRecord, Error, WakeCause};
use torpor_runsc::control::{self, SignalScope};

use torpor_sandbox::doze;
use torpor_sandbox::node::{CALL_LIMIT, COMMAND_LIMIT, Node};
use torpor_sandbox::restore::{self, Refusal, transitions};

/// Reason of the answer for a container without processes.
pub(crate) const FINISHED: &str = "ProcessFinished";

/// Returns the error for a container without processes.
fn finished() -> anyhow::Error {
    anyhow::Error::new(Refusal {
        reason: FINISHED,
        message: "the container has no process".to_owned(),
    })
}

/// The number of a signal. nix has no real-time signals, and the stop signal of an image that runs
/// systemd is one (SIGRTMIN+3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SignalNumber(i32);

impl SignalNumber {
    /// The highest signal of Linux; the lowest is 1.
    const LAST: i32 = 64;
    /// The first signal without a meaning of its own.
    const FIRST_REAL_TIME: i32 = 32;

    fn new(number: i32) -> anyhow::Result<Self> {
        ensure!(
            (1..=Self::LAST).contains(&number),
            "unknown signal {number}"
        );
        Ok(Self(number))
    }
}

impl From<Signal> for SignalNumber {
    fn from(signal: Signal) -> Self {
        Self(signal as i32)
    }
}

impl PartialEq<Signal> for SignalNumber {
    fn eq(&self, signal: &Signal) -> bool {
        *self == Self::from(*signal)
    }
}

/// The method by which a signal reaches a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    Deliver(Delivery),
    /// The whole sandbox is ended.
    ByForce,
}

pub(crate) fn kill(node: &Node, id: &ContainerId, signal: i32, all: bool) -> anyhow::Result<()> {
    let signal = SignalNumber::new(signal)?;
    let record = match node.records.container(id) {
        // The removal of its pod's sandbox has removed it.
        Err(Error::Missing(_)) => return Err(finished()),
        record => record.context("cannot signal the container")?,
    };
    if ends(signal) {
        // An error here occurs again below, where the lock is held.
        let _ = doze::wait_for_agent(node, &record.sandbox);
    }
    let _lock = node.records.lock(&record.sandbox)?;
    match method(signal, prepare(node, &record, signal))? {
        Method::Deliver(Delivery::Orphan) => end_orphaned(node, &record),
        Method::Deliver(Delivery::Remains) => {
            end_sandbox(node, &record)?;
            end_keeper(node, id, signal)
        }
        Method::Deliver(Delivery::Keeper) => end_keeper(node, id, signal),
        Method::Deliver(Delivery::Program) => deliver(node, &record, signal, all),
        Method::ByForce => end_by_force(node, &record),
    }
}

/// Returns the method for a signal. `prepared`: result of [`prepare`].
///
/// `prepare` fails where the sandbox does not answer in time, or where its records cannot be read.
/// SIGKILL means that the kubelet has decided to remove the container, so such a sandbox is ended
/// as a whole. Otherwise the sandbox would stay as long as it does not answer, and its programs
/// could cause that.
fn method(signal: SignalNumber, prepared: anyhow::Result<Delivery>) -> anyhow::Result<Method> {
    match prepared {
        Err(error) if signal == Signal::SIGKILL => {
            torpor_sandbox::log_line!("ending the whole sandbox: {error:#}");
            Ok(Method::ByForce)
        }
        prepared => prepared.map(Method::Deliver),
    }
}

/// Brings the sandbox into the state in which the container can receive the signal. The caller
/// holds the lock.
fn prepare(
    node: &Node,
    record: &ContainerRecord,
    signal: SignalNumber,
) -> anyhow::Result<Delivery> {
    let keeper_has_ended = || keeper_is_gone(node, &record.id);
    transitions::before_signal(node, &record.sandbox, ends(signal), keeper_has_ended)
}

/// Ends every process of the sandbox. An interrupted restore leaves processes, which hold the
/// container's output, and containerd waits for its end. The container's cgroup gives the path: a
/// sandbox whose pod record cannot be read is ended, too. The caller holds the lock.
fn end_sandbox(node: &Node, record: &ContainerRecord) -> anyhow::Result<()> {
    let processes = cgroup::beside(&record.cgroup, record.sandbox.as_str());
    restore::kill_processes(node, &processes)
}

/// Ends the whole sandbox, and the container's keeper. A keeper that waits for the container's end
/// notices that end by itself.
fn end_by_force(node: &Node, record: &ContainerRecord) -> anyhow::Result<()> {
    end_sandbox(node, record)?;
    // A keeper that has ended already has noticed the container's end.
    let _ = end_keeper(node, &record.id, Signal::SIGKILL.into());
    Ok(())
}

/// Ends the program of a container without a keeper. A paused sandbox whose memory is in an image
/// stays in the image; a running sandbox loses the container. The caller holds the lock.
fn end_orphaned(node: &Node, record: &ContainerRecord) -> anyhow::Result<()> {
    if transitions::stay_in_image(node, &record.sandbox)? {
        return Ok(());
    }
    // A process may have paused the sandbox for a save and died. Programs of a paused sandbox do
    // not end.
    transitions::run_on(node, &record.sandbox, WakeCause::Signal)?;
    let connected = node.runsc.connect(&record.sandbox);
    let ended = connected.and_then(|mut control| {
        let (all, kill) = (SignalScope::All, Signal::SIGKILL as i32);
        control.signal(record.id.as_str(), 0, kill, all, CALL_LIMIT)
    });
    match ended {
        // In most cases the program has ended already, and its end has ended the keeper.
        Ok(()) | Err(control::Error::NotRunning { .. } | control::Error::Refused { .. }) => Ok(()),
        Err(error) => Err(error).context("cannot end the container's program"),
    }
}

/// Reports whether no keeper listens for the container.
fn keeper_is_gone(node: &Node, id: &ContainerId) -> bool {
    let dir = node.records.container_dir(id);
    let asked = keeper::ask(&dir, &Request::Stdio, &[], CALL_LIMIT);
    matches!(asked, Err(keeper::Error::Gone { .. }))
}

/// Ends the keeper of a container whose program does not run, as if the signal had ended the
/// program. `delete` removes the rest of the container.
fn end_keeper(node: &Node, id: &ContainerId, signal: SignalNumber) -> anyhow::Result<()> {
    let code = 128 + u8::try_from(signal.0).unwrap_or(0);
    let dir = node.records.container_dir(id);
    match keeper::ask(&dir, &Request::Exit { code }, &[], CALL_LIMIT) {
        Err(keeper::Error::Gone { .. }) => Err(finished()),
        other => other.map(drop).context("cannot end the container's keeper"),
    }
}

/// Sends the signal. After a signal that ends a process, also has the keeper wait for the
/// container's end: containerd sometimes dies between a container's creation and its start, and
/// then the keeper does not wait yet. The wait for a container without a program ends at once.
fn deliver(
    node: &Node,
    record: &ContainerRecord,
    signal: SignalNumber,
    all: bool,
) -> anyhow::Result<()> {
    let sent = send(node, record, signal, all);
    if ends(signal) {
        let dir = node.records.container_dir(&record.id);
        // A keeper that has ended already has noticed the container's end.
        let _ = keeper::ask(&dir, &Request::Attach, &[], CALL_LIMIT);
    }
    sent
}

/// Sends the signal to the container's first process, or to all of them. A container that has no
/// process to signal is ended where the signal ends a process.
fn send(
    node: &Node,
    record: &ContainerRecord,
    signal: SignalNumber,
    all: bool,
) -> anyhow::Result<()> {
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
        // The keeper notices the sandbox' end, too, unless the sandbox ended before the keeper
        // could wait for it.
        Err(control::Error::NotRunning { .. }) if ends(signal) => {
            end_keeper(node, &record.id, Signal::SIGKILL.into())
        }
        Err(control::Error::NotRunning { .. }) => Err(finished()),
        Err(control::Error::Refused { message, .. })
            if message.contains("no such process") || message.contains("not found") =>
        {
            Err(finished())
        }
        // The container has not been started, or has no process. An interrupted start may already
        // hold the container's output, and containerd waits for its end. Other containers may run
        // in the sandbox, so only this one is removed from it.
        Err(control::Error::Refused { .. }) if ends(signal) => {
            let runsc = node.runsc_of(&record.sandbox);
            runsc.delete(record.id.as_str(), COMMAND_LIMIT)?;
            end_keeper(node, &record.id, signal)
        }
        // The kubelet has decided to remove the container, and the sandbox does not answer. So the
        // whole sandbox is ended.
        Err(_) if signal == Signal::SIGKILL => end_sandbox(node, record),
        Err(error) => Err(error).context("cannot signal the container"),
    }
}

/// Reports whether the signal ends a process that does not handle it. The program of a hibernated
/// container cannot handle a signal.
fn ends(signal: SignalNumber) -> bool {
    let known = matches!(
        Signal::try_from(signal.0),
        Ok(Signal::SIGTERM | Signal::SIGKILL | Signal::SIGINT | Signal::SIGQUIT | Signal::SIGHUP)
    );
    known || signal.0 >= SignalNumber::FIRST_REAL_TIME
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn only_signals_of_linux_are_sent() {
        for number in [0, 65, -1] {
            SignalNumber::new(number).expect_err("no signal");
        }
        // The stop signal of an image that runs systemd.
        let real_time = SignalNumber::new(37).expect("a signal");
        assert!(ends(real_time) && real_time == SignalNumber(37));
    }

    #[test]
    fn signals_that_end_a_program_are_distinguished_from_other_signals() {
        for signal in [Signal::SIGTERM, Signal::SIGKILL, Signal::SIGQUIT] {
            assert!(ends(signal.into()), "{signal}");
        }
        for signal in [Signal::SIGWINCH, Signal::SIGUSR1] {
            assert!(!ends(signal.into()), "{signal}");
        }
    }

    #[test]
    fn a_sigkill_ends_a_sandbox_that_does_not_answer() {
        let silent = || anyhow::anyhow!("the sandbox gave no answer to debug.Stacks");
        let killed = method(Signal::SIGKILL.into(), Err(silent())).expect("a way");
        assert_eq!(killed, Method::ByForce);
        for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGUSR1] {
            method(signal.into(), Err(silent())).expect_err("it may answer later");
        }
        // The delivery stays as it is where the sandbox' state is known.
        for known in [
            Delivery::Orphan,
            Delivery::Remains,
            Delivery::Keeper,
            Delivery::Program,
        ] {
            for signal in [Signal::SIGKILL, Signal::SIGTERM] {
                let found = method(signal.into(), Ok(known)).expect("a way");
                assert_eq!(found, Method::Deliver(known));
            }
        }
    }
}

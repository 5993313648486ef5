//! The way of a process from a wake's child to a sandbox' first process.
//!
//! A program with one thread goes this way ([`super::steps`]).

use std::convert::Infallible;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::sched::{CloneFlags, setns};
use nix::unistd::{dup2_stdin, setgroups};
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::CapabilitySet;

use super::gofer;
use super::message::{Message, receive_message, send_message};
use super::plan::{BootArgs, Descriptors};
use super::root;
use super::steps::{
    Step, cannot, close_from, execute, is_in_own_namespaces, keep_capabilities, pass_on, unmounter,
};

/// Number of files beside [`Message::Boot`] before those of its file systems: the network
/// namespace, the program, and the files that the program inherits.
pub(super) const FILES: usize = 6;

/// Capabilities of a sandbox' first process in its user namespace, whose users are the host's. The
/// process serves the sandbox' files (directfs), and its stubs (systrap).
const CAPABILITIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SYS_PTRACE);

/// Becomes a sandbox' first process or a container's gofer. The restoring process has started this
/// program with one end of a connection as standard input. The program must have one thread.
/// Returns in the parent of the new process, and after a failure, which it has sent.
pub fn become_process() -> std::io::Result<()> {
    // Other threads of the restoring process start processes at the same moment, so this program
    // may have inherited descriptors that were meant for those.
    close_from(3)?;
    let wake = std::io::stdin().as_fd().try_clone_to_owned()?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    dup2_stdin(&null)?;
    let failed = match become_requested(&wake) {
        Ok(()) => return Ok(()),
        Err((what, error)) => Message::Failed {
            message: format!("cannot {what}: {error}"),
        },
    };
    send_message(&wake, &failed, &[])
}

fn become_requested(wake: &OwnedFd) -> Step<()> {
    let failed = cannot("receive what to execute");
    let incomplete = || failed(std::io::ErrorKind::UnexpectedEof.into());
    let Some((message, files)) = receive_message(wake).map_err(failed)? else {
        return Err(incomplete());
    };
    // runsc's process keeps the groups of runsc's caller. Later, in the process' user namespace,
    // groups cannot be changed.
    setgroups(&[]).map_err(cannot("drop its groups"))?;
    match message {
        Message::Boot(args) => {
            let (files, file_systems) = files.split_first_chunk().ok_or_else(incomplete)?;
            become_sandbox(wake, &args, files, file_systems)
        }
        Message::Serve(args) => gofer::process::become_gofer(wake, &args, &files),
        _ => Err(incomplete()),
    }
}

fn become_sandbox(
    wake: &OwnedFd,
    args: &BootArgs,
    files: &[OwnedFd; FILES],
    file_systems: &[OwnedFd],
) -> Step<()> {
    let [network, program, inherited @ ..] = files;
    // gVisor locks pages for a moment to allocate many at once. It also works without.
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    let _ = setrlimit(Resource::Memlock, unlimited);
    setns(network, CloneFlags::CLONE_NEWNET)
        .map_err(cannot("enter the pod's network namespace"))?;
    // Opened while this program still has the host's mounts.
    let stdio = no_stdio()?;
    if is_in_own_namespaces(wake, CloneFlags::empty())? {
        run(args, program, inherited, file_systems, &stdio)?;
    }
    Ok(())
}

/// Executes runsc in the first process of the new PID namespace.
fn run(
    args: &BootArgs,
    program: &OwnedFd,
    inherited: &[OwnedFd; FILES - 2],
    file_systems: &[OwnedFd],
    stdio: &[OwnedFd; 3],
) -> Step<Infallible> {
    root::enter(program.as_raw_fd())?;
    let proc_sync = unmounter()?;
    let [log, booted, control, spec] = inherited.each_ref().map(AsRawFd::as_raw_fd);
    let descriptors = Descriptors {
        log,
        booted,
        control,
        spec,
        stdio: stdio.each_ref().map(AsRawFd::as_raw_fd),
        proc_sync: proc_sync.as_raw_fd(),
        file_systems: file_systems.iter().map(AsRawFd::as_raw_fd).collect(),
    };
    let all = inherited.iter().chain(file_systems).chain(stdio);
    pass_on(all.chain([&proc_sync]))?;
    keep_capabilities(CAPABILITIES, CapabilitySet::empty())?;
    execute(root::PROGRAM, "runsc-sandbox", args.to_args(&descriptors))
}

/// Opens standard input, output and error of a program that reads and writes nothing.
fn no_stdio() -> Step<[OwnedFd; 3]> {
    let open = |write: bool| -> Step<OwnedFd> {
        let opened = File::options().read(!write).write(write).open("/dev/null");
        Ok(opened.map_err(cannot("open /dev/null"))?.into())
    };
    Ok([open(false)?, open(true)?, open(true)?])
}

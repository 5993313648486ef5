//! The way of a process from a wake's child to the one that serves a container's files.

use std::convert::Infallible;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::sched::CloneFlags;
use rustix::thread::CapabilitySet;

use super::plan::{Descriptors, ServeArgs};
use super::root;
use crate::process::{
    Step, Word, cannot, execute, hand_on, is_in_own_namespaces, keep_capabilities, say, unmounter,
};

/// Files that come with [`Word::Serve`] before the connections: the program, and what it inherits.
pub(crate) const FILES: usize = 5;

/// What a gofer is allowed to do in its user namespace, whose users are the host's (gVisor, runsc/cmd/gofer.go). It has them whatever its program's file says.
const CAPABILITIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SYS_CHROOT);

/// Returns in the parent of the process.
pub(crate) fn become_gofer(wake: &OwnedFd, args: &ServeArgs, files: &[OwnedFd]) -> Step<()> {
    // Its namespace of networks is a new one with nothing in it.
    if is_in_own_namespaces(wake, CloneFlags::CLONE_NEWNET)? {
        run(wake, args, files)?;
    }
    Ok(())
}

/// The first process of the new PID namespace.
fn run(wake: &OwnedFd, args: &ServeArgs, files: &[OwnedFd]) -> Step<Infallible> {
    let Some(([program, inherited @ ..], connections)) = files.split_first_chunk::<FILES>() else {
        let silence = std::io::ErrorKind::UnexpectedEof.into();
        return Err(("receive what to serve", silence));
    };
    let filestores = root::enter(args, program.as_raw_fd())?;
    let borrowed: Vec<BorrowedFd<'_>> = filestores.iter().map(AsFd::as_fd).collect();
    let told = cannot("pass the files on");
    say(wake, &Word::Filestores, &borrowed).map_err(told)?;
    let proc_sync = unmounter()?;
    let [log, spec, mounts, rpc] = inherited.each_ref().map(AsRawFd::as_raw_fd);
    let descriptors = Descriptors {
        log,
        spec,
        mounts,
        rpc,
        connections: connections.iter().map(AsRawFd::as_raw_fd).collect(),
        proc_sync: proc_sync.as_raw_fd(),
    };
    hand_on(inherited.iter().chain(connections).chain([&proc_sync]))?;
    keep_capabilities(CAPABILITIES, CAPABILITIES)?;
    execute(root::PROGRAM, "runsc-gofer", args.words(&descriptors))
}

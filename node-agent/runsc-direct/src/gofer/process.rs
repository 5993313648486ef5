//! The way of a process from a wake's child to a container's gofer.

use std::convert::Infallible;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::sched::CloneFlags;
use rustix::thread::CapabilitySet;

use super::plan::{Descriptors, ServeArgs};
use super::root;
use crate::message::{Message, send_message};
use crate::steps::{
    Step, cannot, execute, is_in_own_namespaces, keep_capabilities, pass_on, unmounter,
};

/// Number of files beside [`Message::Serve`] before the connections: the program, and the files
/// that the program inherits.
pub(crate) const FILES: usize = 5;

/// Capabilities of a gofer in its user namespace, whose users are the host's (gVisor,
/// runsc/cmd/gofer.go). The gofer has them whatever capabilities its program's file has.
const CAPABILITIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SYS_CHROOT);

/// Becomes a container's gofer. Returns in the parent of the gofer's process.
pub(crate) fn become_gofer(wake: &OwnedFd, args: &ServeArgs, files: &[OwnedFd]) -> Step<()> {
    // The gofer has a new network namespace with no links in it.
    if is_in_own_namespaces(wake, CloneFlags::CLONE_NEWNET)? {
        run(wake, args, files)?;
    }
    Ok(())
}

/// Executes runsc in the first process of the new PID namespace.
fn run(wake: &OwnedFd, args: &ServeArgs, files: &[OwnedFd]) -> Step<Infallible> {
    let Some(([program, inherited @ ..], connections)) = files.split_first_chunk::<FILES>() else {
        let incomplete = std::io::ErrorKind::UnexpectedEof.into();
        return Err(("receive what to serve", incomplete));
    };
    let filestores = root::enter(args, program.as_raw_fd())?;
    let borrowed: Vec<BorrowedFd<'_>> = filestores.iter().map(AsFd::as_fd).collect();
    send_message(wake, &Message::Filestores, &borrowed).map_err(cannot("pass the files on"))?;
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
    pass_on(inherited.iter().chain(connections).chain([&proc_sync]))?;
    keep_capabilities(CAPABILITIES, CAPABILITIES)?;
    execute(root::PROGRAM, "runsc-gofer", args.to_args(&descriptors))
}

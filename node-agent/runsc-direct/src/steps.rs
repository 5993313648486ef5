//! Steps of a process on its way to a sandbox' first process, or to a gofer.
//!
//! A program with one thread takes them: a thread changes the namespaces and capabilities of itself
//! only, and other threads would keep theirs.
#![allow(unsafe_code)]

use std::convert::Infallible;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::libc;
use nix::mount::{MntFlags, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{ForkResult, Gid, Uid, dup2_stdin, fork, setgid, setsid, setuid};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set,
    configure_capability_in_ambient_set, remove_capability_from_bounding_set, set_capabilities,
};

use super::message::{Message, receive_message, send_message};

/// Result of a step. An error is the step that failed, and its cause.
pub(super) type Step<T> = Result<T, (&'static str, std::io::Error)>;

/// Returns a conversion of an error of the step `what`.
pub(super) fn cannot<E: Into<std::io::Error>>(
    what: &'static str,
) -> impl Fn(E) -> (&'static str, std::io::Error) + Copy {
    move |error| (what, error.into())
}

/// Makes new namespaces, and also those of `also`, and a child in them: the first process of the
/// new PID namespace. Returns true in the child.
pub(super) fn is_in_own_namespaces(wake: &OwnedFd, also: CloneFlags) -> Step<bool> {
    let own = CloneFlags::CLONE_NEWUSER
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWPID;
    unshare(own | also).map_err(cannot("make its namespaces"))?;
    let failed = cannot("communicate with the process that started it");
    send_message(wake, &Message::Unshared, &[]).map_err(failed)?;
    let Some((Message::Mapped, _)) = receive_message(wake).map_err(failed)? else {
        return Err(failed(std::io::ErrorKind::UnexpectedEof.into()));
    };
    // SAFETY: this program has one thread.
    match unsafe { fork() }.map_err(cannot("create the first process of its PID namespace"))? {
        ForkResult::Parent { child } => {
            let pid = child.as_raw();
            send_message(wake, &Message::Forked { pid }, &[]).map_err(failed)?;
            Ok(false)
        }
        ForkResult::Child => {
            setsid().map_err(cannot("start a session"))?;
            setgid(Gid::from_raw(0)).map_err(cannot("set its group"))?;
            setuid(Uid::from_raw(0)).map_err(cannot("set its user"))?;
            Ok(true)
        }
    }
}

/// Lets the executed program inherit the files.
pub(super) fn pass_on<'a>(files: impl IntoIterator<Item = &'a OwnedFd>) -> Step<()> {
    let mut files = files.into_iter();
    files.try_for_each(|fd| fcntl_setfd(fd, FdFlags::empty()).map_err(cannot("pass a file on")))
}

/// Executes runsc. `name`: its name in the list of processes.
pub(super) fn execute(program: &str, name: &str, args: Vec<String>) -> Step<Infallible> {
    let mut command = Command::new(program);
    let error = command.arg0(name).args(args).env_clear().exec();
    Err(("execute runsc", error))
}

/// Begins a child that unmounts `/proc` when it reads a byte. Returns the pipe for that byte.
///
/// gVisor needs `/proc` for some time after it has lost the right to unmount it. It writes the byte
/// and waits for the child's end. It does not continue if the child has failed.
pub(super) fn unmounter() -> Step<OwnedFd> {
    let (receiver, sender) = std::io::pipe().map_err(cannot("make a pipe"))?;
    // SAFETY: this program has one thread.
    match unsafe { fork() }.map_err(cannot("create the process that unmounts /proc"))? {
        ForkResult::Parent { .. } => Ok(sender.into()),
        ForkResult::Child => {
            let done = dup2_stdin(&receiver).is_ok() && close_from(3).is_ok() && unmounts();
            std::process::exit(i32::from(!done));
        }
    }
}

fn unmounts() -> bool {
    let mut byte = [0];
    let read = std::io::stdin().read_exact(&mut byte);
    read.is_ok() && umount2("/proc", MntFlags::MNT_DETACH).is_ok()
}

/// Drops all capabilities but `kept`. Executed programs get those of `passed_on`, whatever
/// capabilities their files have (capabilities(7): inheritable and ambient).
pub(super) fn keep_capabilities(kept: CapabilitySet, passed_on: CapabilitySet) -> Step<()> {
    let failed = cannot("drop capabilities");
    let mut all = (0..64).map(|number| CapabilitySet::from_bits_retain(1 << number));
    let stays = |one: &CapabilitySet| kept.contains(*one);
    for one in all.clone().filter(|one| !stays(one)) {
        match remove_capability_from_bounding_set(one) {
            Ok(()) => {}
            // The kernel has no more capabilities.
            Err(rustix::io::Errno::INVAL) => break,
            Err(refused) => return Err(failed(refused)),
        }
    }
    clear_ambient_capability_set().map_err(failed)?;
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: passed_on,
    };
    set_capabilities(None, sets).map_err(failed)?;
    let mut passed_on = all.by_ref().filter(|one| passed_on.contains(*one));
    passed_on.try_for_each(|one| {
        configure_capability_in_ambient_set(one, true).map_err(cannot("pass a capability on"))
    })
}

/// Closes every descriptor from this number on.
pub(super) fn close_from(number: libc::c_uint) -> std::io::Result<()> {
    // SAFETY: no pointers; the callers use none of the closed descriptors after this.
    match unsafe { libc::syscall(libc::SYS_close_range, number, libc::c_uint::MAX, 0) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

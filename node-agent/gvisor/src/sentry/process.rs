//! The way of a process from a wake's child to a sandbox' first process. It is a program of its own that has one thread: what a thread does to its namespaces
//! and capabilities another one would not have.
#![allow(unsafe_code)]

use std::convert::Infallible;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::libc;
use nix::mount::{MntFlags, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{ForkResult, Gid, Uid, dup2_stdin, fork, setgid, setgroups, setsid, setuid};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities,
};
use serde::{Deserialize, Serialize};

use super::plan::{BootArgs, Descriptors};
use super::root;
use crate::keeper::{receive, send};

/// What the process and the wake that began it say to one another.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Word {
    /// What to execute. With the files of [`FILES`].
    Boot(BootArgs),
    /// It is in its namespaces. That of users has none yet.
    Unshared,
    /// The users are there.
    Mapped,
    /// It has a child, which is to be the sandbox.
    Forked { pid: i32 },
    /// And is none. After [`Word::Forked`] silence is success: the connection closes as gVisor is executed.
    Failed { message: String },
}

/// Files that come with [`Word::Boot`]: the network namespace, the program, and what it inherits.
pub(super) const FILES: usize = 7;

/// What a sandbox' first process is allowed to do in its user namespace, whose users are the host's: it serves the sandbox' files (directfs), and its
/// stubs (systrap).
const CAPABILITIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SYS_PTRACE);

/// What could not be done, and why.
pub(super) type Step<T> = Result<T, (&'static str, std::io::Error)>;

pub(super) fn cannot<E: Into<std::io::Error>>(
    what: &'static str,
) -> impl Fn(E) -> (&'static str, std::io::Error) + Copy {
    move |error| (what, error.into())
}

pub(super) fn say(to: &OwnedFd, word: &Word, files: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    let bytes = serde_json::to_vec(word)?;
    Ok(send(to, &bytes, files)?)
}

/// None when the other end is closed.
pub(super) fn hear(from: &OwnedFd) -> std::io::Result<Option<(Word, Vec<OwnedFd>)>> {
    let (bytes, files) = receive(from)?;
    if bytes.is_empty() {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&bytes)?, files)))
}

/// Becomes a sandbox' first process: [`super::Start`] began this program, and standard input is the connection to it. It must have one thread.
/// Returns in the parent of that process, and where it failed, which it has told.
pub fn become_sandbox() -> std::io::Result<()> {
    // Other threads of who began this program begin others at this moment, and what these are to inherit this one has too.
    close_from(3)?;
    let wake = std::io::stdin().as_fd().try_clone_to_owned()?;
    let nothing = File::options().read(true).write(true).open("/dev/null")?;
    dup2_stdin(&nothing)?;
    let failed = match fork_sandbox(&wake) {
        Ok(()) => return Ok(()),
        Err((what, error)) => Word::Failed {
            message: format!("cannot {what}: {error}"),
        },
    };
    say(&wake, &failed, &[])
}

/// Enters the namespaces and leaves its child in them.
fn fork_sandbox(wake: &OwnedFd) -> Step<()> {
    let heard = cannot("hear what to execute");
    let silence = || heard(std::io::ErrorKind::UnexpectedEof.into());
    let Some((Word::Boot(args), files)) = hear(wake).map_err(heard)? else {
        return Err(silence());
    };
    let [network, program, inherited @ ..]: [OwnedFd; FILES] =
        files.try_into().map_err(|_| silence())?;
    // gVisor locks pages for a moment to have many at once. It does without.
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    let _ = setrlimit(Resource::Memlock, unlimited);
    // runsc's has those of who ran runsc. Afterwards nobody may, in its user namespace.
    setgroups(&[]).map_err(cannot("leave its groups"))?;
    setns(&network, CloneFlags::CLONE_NEWNET)
        .map_err(cannot("enter the pod's network namespace"))?;
    drop(network);
    // Of the host's mounts, as long as they are this program's.
    let stdio = no_stdio()?;
    let own = CloneFlags::CLONE_NEWUSER
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWPID;
    unshare(own).map_err(cannot("make its namespaces"))?;
    let told = cannot("talk to who began it");
    say(wake, &Word::Unshared, &[]).map_err(told)?;
    let Some((Word::Mapped, _)) = hear(wake).map_err(told)? else {
        return Err(told(std::io::ErrorKind::UnexpectedEof.into()));
    };
    // SAFETY: this program has one thread.
    match unsafe { fork() }.map_err(cannot("make the first process of its PID namespace"))? {
        ForkResult::Parent { child } => {
            let pid = child.as_raw();
            say(wake, &Word::Forked { pid }, &[]).map_err(told)
        }
        ForkResult::Child => run(&args, &program, &inherited, &stdio).map(|never| match never {}),
    }
}

/// The first process of the new PID namespace.
fn run(
    args: &BootArgs,
    program: &OwnedFd,
    inherited: &[OwnedFd; FILES - 2],
    stdio: &[OwnedFd; 3],
) -> Step<Infallible> {
    setsid().map_err(cannot("begin a session"))?;
    setgid(Gid::from_raw(0)).map_err(cannot("be its group"))?;
    setuid(Uid::from_raw(0)).map_err(cannot("be its user"))?;
    root::enter(program.as_raw_fd())?;
    let proc_sync = unmounter()?;
    let [log, root, booted, control, spec] = inherited.each_ref().map(AsRawFd::as_raw_fd);
    let descriptors = Descriptors {
        log,
        root,
        booted,
        control,
        spec,
        stdio: stdio.each_ref().map(AsRawFd::as_raw_fd),
        proc_sync: proc_sync.as_raw_fd(),
    };
    for fd in inherited.iter().chain(stdio).chain([&proc_sync]) {
        fcntl_setfd(fd, FdFlags::empty()).map_err(cannot("hand a file on"))?;
    }
    drop_capabilities()?;
    let error = Command::new(root::PROGRAM)
        .arg0("runsc-sandbox")
        .args(args.words(&descriptors))
        .env_clear()
        .exec();
    Err(("execute runsc", error))
}

/// Standard input, output and error of a program that reads and says nothing.
fn no_stdio() -> Step<[OwnedFd; 3]> {
    let open = |write: bool| -> Step<OwnedFd> {
        let opened = File::options().read(!write).write(write).open("/dev/null");
        Ok(opened.map_err(cannot("open /dev/null"))?.into())
    };
    Ok([open(false)?, open(true)?, open(true)?])
}

/// Begins a child that unmounts `/proc` when it is told, as gVisor needs it once more after it has lost the right to: it waits for the child's end, and
/// goes no further if it has failed. Answers where it is told.
fn unmounter() -> Step<OwnedFd> {
    let (told, tell) = std::io::pipe().map_err(cannot("make a pipe"))?;
    // SAFETY: this program has one thread.
    match unsafe { fork() }.map_err(cannot("make the process that unmounts /proc"))? {
        ForkResult::Parent { .. } => Ok(tell.into()),
        ForkResult::Child => {
            let done = dup2_stdin(&told).is_ok() && close_from(3).is_ok() && unmounts();
            std::process::exit(i32::from(!done));
        }
    }
}

fn unmounts() -> bool {
    let mut byte = [0];
    let told = std::io::stdin().read_exact(&mut byte);
    told.is_ok() && umount2("/proc", MntFlags::MNT_DETACH).is_ok()
}

fn drop_capabilities() -> Step<()> {
    for number in 0..64 {
        let one = CapabilitySet::from_bits_retain(1 << number);
        if CAPABILITIES.contains(one) {
            continue;
        }
        match remove_capability_from_bounding_set(one) {
            Ok(()) => {}
            // The kernel has no more.
            Err(rustix::io::Errno::INVAL) => break,
            Err(refused) => return Err(cannot("give capabilities up")(refused)),
        }
    }
    clear_ambient_capability_set().map_err(cannot("give ambient capabilities up"))?;
    let sets = CapabilitySets {
        effective: CAPABILITIES,
        permitted: CAPABILITIES,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets).map_err(cannot("give capabilities up"))
}

/// Closes every descriptor from this number on.
fn close_from(number: libc::c_uint) -> std::io::Result<()> {
    // SAFETY: no pointers; nothing that is open from there on is used after this, by its callers.
    match unsafe { libc::syscall(libc::SYS_close_range, number, libc::c_uint::MAX, 0) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

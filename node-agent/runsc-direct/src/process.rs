//! The way of a process from a wake's child to a sandbox' first process, or to one that serves a container's files. It is a program of its own that has one thread: what a thread does to its namespaces
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
    configure_capability_in_ambient_set, remove_capability_from_bounding_set, set_capabilities,
};
use serde::{Deserialize, Serialize};

use super::gofer::{self, ServeArgs};
use super::plan::{BootArgs, Descriptors};
use super::root;
use torpor_runsc::keeper::{receive, send};

/// What the process and the wake that began it say to one another.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Word {
    /// The sandbox' first process is to be executed. With the files of [`FILES`], and those that [`BootArgs`] counts.
    Boot(BootArgs),
    /// The process that serves a container's files is. With those of [`gofer::process::FILES`] and its connections.
    Serve(ServeArgs),
    /// It is in its namespaces. That of users has none yet.
    Unshared,
    /// The users are there.
    Mapped,
    /// It has a child, which is to be what was said.
    Forked { pid: i32 },
    /// With the files that gVisor writes to where a gofer serves others.
    Filestores,
    /// And is none. After [`Word::Forked`] silence is success: the connection closes as runsc is executed.
    Failed { message: String },
}

/// Files that come with [`Word::Boot`] before those of its file systems: the network namespace, the program, and what it inherits.
pub(super) const FILES: usize = 6;

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

/// Becomes a sandbox' first process, or the one that serves a container's files: who restores it has begun this program, and standard input is the connection
/// to it. It must have one thread. Returns in the parent of that process, and where it failed, which it has told.
pub fn become_process() -> std::io::Result<()> {
    // Other threads of who began this program begin others at this moment, and what these are to inherit this one has too.
    close_from(3)?;
    let wake = std::io::stdin().as_fd().try_clone_to_owned()?;
    let nothing = File::options().read(true).write(true).open("/dev/null")?;
    dup2_stdin(&nothing)?;
    let failed = match become_it(&wake) {
        Ok(()) => return Ok(()),
        Err((what, error)) => Word::Failed {
            message: format!("cannot {what}: {error}"),
        },
    };
    say(&wake, &failed, &[])
}

fn become_it(wake: &OwnedFd) -> Step<()> {
    let heard = cannot("receive what to execute");
    let silence = || heard(std::io::ErrorKind::UnexpectedEof.into());
    let Some((word, files)) = hear(wake).map_err(heard)? else {
        return Err(silence());
    };
    // runsc's has those of who ran runsc. Afterwards nobody may, in its user namespace.
    setgroups(&[]).map_err(cannot("drop its groups"))?;
    match word {
        Word::Boot(args) => {
            let (files, file_systems) = files.split_first_chunk().ok_or_else(silence)?;
            become_sandbox(wake, &args, files, file_systems)
        }
        Word::Serve(args) => gofer::process::become_gofer(wake, &args, &files),
        _ => Err(silence()),
    }
}

fn become_sandbox(
    wake: &OwnedFd,
    args: &BootArgs,
    files: &[OwnedFd; FILES],
    file_systems: &[OwnedFd],
) -> Step<()> {
    let [network, program, inherited @ ..] = files;
    // gVisor locks pages for a moment to have many at once. It does without.
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    let _ = setrlimit(Resource::Memlock, unlimited);
    setns(network, CloneFlags::CLONE_NEWNET)
        .map_err(cannot("enter the pod's network namespace"))?;
    // Of the host's mounts, as long as they are this program's.
    let stdio = no_stdio()?;
    if is_in_own_namespaces(wake, CloneFlags::empty())? {
        run(args, program, inherited, file_systems, &stdio)?;
    }
    Ok(())
}

/// Makes new namespaces, also of these kinds, and a child in them, the first process of its PID namespace. True in the child.
pub(super) fn is_in_own_namespaces(wake: &OwnedFd, also: CloneFlags) -> Step<bool> {
    let own = CloneFlags::CLONE_NEWUSER
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWPID;
    unshare(own | also).map_err(cannot("make its namespaces"))?;
    let told = cannot("communicate with the process that started it");
    say(wake, &Word::Unshared, &[]).map_err(told)?;
    let Some((Word::Mapped, _)) = hear(wake).map_err(told)? else {
        return Err(told(std::io::ErrorKind::UnexpectedEof.into()));
    };
    // SAFETY: this program has one thread.
    match unsafe { fork() }.map_err(cannot("create the first process of its PID namespace"))? {
        ForkResult::Parent { child } => {
            let pid = child.as_raw();
            say(wake, &Word::Forked { pid }, &[]).map_err(told)?;
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

/// The first process of the new PID namespace.
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
    hand_on(all.chain([&proc_sync]))?;
    keep_capabilities(CAPABILITIES, CapabilitySet::empty())?;
    execute(root::PROGRAM, "runsc-sandbox", args.words(&descriptors))
}

/// They are open in the program that is executed.
pub(super) fn hand_on<'a>(files: impl IntoIterator<Item = &'a OwnedFd>) -> Step<()> {
    let mut files = files.into_iter();
    files.try_for_each(|fd| fcntl_setfd(fd, FdFlags::empty()).map_err(cannot("pass a file on")))
}

pub(super) fn execute(program: &str, name: &str, words: Vec<String>) -> Step<Infallible> {
    let mut command = Command::new(program);
    let error = command.arg0(name).args(words).env_clear().exec();
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
pub(super) fn unmounter() -> Step<OwnedFd> {
    let (told, tell) = std::io::pipe().map_err(cannot("make a pipe"))?;
    // SAFETY: this program has one thread.
    match unsafe { fork() }.map_err(cannot("create the process that unmounts /proc"))? {
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

/// Gives all capabilities up but these, of which it passes some on to programs whatever their files say (capabilities(7): inheritable and ambient).
pub(super) fn keep_capabilities(kept: CapabilitySet, passed_on: CapabilitySet) -> Step<()> {
    let failed = cannot("drop capabilities");
    let mut all = (0..64).map(|number| CapabilitySet::from_bits_retain(1 << number));
    let stays = |one: &CapabilitySet| kept.contains(*one);
    for one in all.clone().filter(|one| !stays(one)) {
        match remove_capability_from_bounding_set(one) {
            Ok(()) => {}
            // The kernel has no more.
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
fn close_from(number: libc::c_uint) -> std::io::Result<()> {
    // SAFETY: no pointers; nothing that is open from there on is used after this, by its callers.
    match unsafe { libc::syscall(libc::SYS_close_range, number, libc::c_uint::MAX, 0) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

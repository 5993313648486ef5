//! The file systems that a gofer sees: a root of its own with the container's in it, and on that what the container has mounted of the host's, as
//! runsc/cmd/sandboxsetup/gofer_mount.go has it.
//!
//! The container's root file system is what its image and its program have made it: a place in it may be a link to anywhere. runsc followed the container's links when it
//! began, and recorded where they lead; the places are looked up as recorded, without following any, and below that root (openat2(2)). So each is where it was, and where the gofer,
//! which follows the links anew, will find it ([`super::ContainerStart::restore`] compares), or the look-up fails. A place must be there: runsc made it when the container began.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::Path;

use nix::mount::{MsFlags, mount};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, StatVfsMountFlags, fstatvfs, openat, openat2};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use super::plan::{Bind, ServeArgs};
use crate::process::{Step, cannot};
use crate::root::{keep_mounts, leave_hosts, local_time};

/// Made a place to build in; the mount namespace is the process' own, and nothing of a container's lies in it.
const PLACE: &str = "/proc/fs";

/// The program that this process executes once it is there: `/proc` goes away with it.
pub(super) const PROGRAM: &str = "/exe";

const NOTHING: Option<&str> = None;

/// Moves the process, the first one of new user, mount and PID namespaces, into it. `program`: the number of its descriptor. Answers the files
/// that gVisor writes to.
pub(super) fn enter(args: &ServeArgs, program: i32) -> Step<Vec<OwnedFd>> {
    let plain = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let place = Path::new(PLACE);
    keep_mounts()?;
    // By the host's mounts: a file that is open for writing would keep the container's root from becoming read-only.
    let filestores = args.filestores.iter().map(|dir| make(dir, &args.filestore));
    let filestores = filestores.collect::<Step<Vec<_>>>()?;
    mount(Some("runsc-root"), place, Some("tmpfs"), plain, NOTHING)
        .map_err(cannot("mount its root"))?;
    // It is mounted in what is about to be mounted in it.
    mount(NOTHING, place, NOTHING, MsFlags::MS_UNBINDABLE, NOTHING)
        .map_err(cannot("make its root unbindable"))?;
    for name in ["proc", "root"] {
        std::fs::create_dir(place.join(name)).map_err(cannot("make a directory"))?;
    }
    let _ = local_time(place);
    symlink(format!("/proc/self/fd/{program}"), place.join("exe"))
        .map_err(cannot("make a link"))?;
    let proc = place.join("proc");
    let whole = MsFlags::MS_BIND | MsFlags::MS_REC | MsFlags::MS_RDONLY | plain;
    mount(Some("/proc"), &proc, NOTHING, whole, NOTHING)
        .map_err(cannot("mount the host's /proc"))?;
    // By itself, so that there is no way out of it: gVisor keeps it open.
    let own_files = MsFlags::MS_BIND | MsFlags::MS_RDONLY | plain;
    let (source, target) = (proc.join("self/fd"), proc.join("fs"));
    mount(Some(&source), &target, NOTHING, own_files, NOTHING)
        .map_err(cannot("mount the list of its files"))?;
    containers(args, &place.join("root"))?;
    leave_hosts(place)?;
    Ok(filestores)
}

/// A new file there.
fn make(dir: &Path, name: &str) -> Step<OwnedFd> {
    let failed = cannot("create a filestore");
    let path_only = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let dir = rustix::fs::open(dir, path_only, Mode::empty()).map_err(failed)?;
    let new = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = openat(&dir, name, new, Mode::from_raw_mode(0o666)).map_err(failed)?;
    measure(&file);
    Ok(file)
}

/// Where the kernel measures what may be executed (IMA) it does so when a file is first mapped for that, with all that is in it: as long as it is empty
/// (gVisor, `pkg/sentry/pgalloc.IMAWorkAroundForMemFile`). Where it may not be, nothing is measured either.
#[allow(unsafe_code)]
fn measure(file: &OwnedFd) {
    const PAGE: usize = 4096;
    let nowhere = std::ptr::null_mut();
    // SAFETY: the kernel chooses the place, nobody is told of it, and it is given back at once.
    unsafe {
        if let Ok(mapped) = mmap(nowhere, PAGE, ProtFlags::EXEC, MapFlags::SHARED, file, 0) {
            let _ = munmap(mapped, PAGE);
        }
    }
}

/// The container's root file system at `place`, with what is mounted in it.
pub(super) fn containers(args: &ServeArgs, place: &Path) -> Step<()> {
    let whole = MsFlags::MS_BIND | MsFlags::MS_REC;
    mount(Some(&args.root), place, NOTHING, whole, NOTHING)
        .map_err(cannot("mount the container's root"))?;
    let path_only = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(place, path_only, Mode::empty())
        .map_err(cannot("enter the container's root"))?;
    let mounted = args.binds.iter();
    let mounted = mounted.map(|bind| Ok((bind, mount_in(root.as_fd(), bind)?)));
    // One that cannot be written to may have places for others.
    for (bind, at) in mounted.collect::<Step<Vec<_>>>()?.iter().rev() {
        restrict(&at.as_fd(), bind.flags())?;
    }
    if args.read_only {
        let read_only = MsFlags::MS_BIND | MsFlags::MS_RDONLY | MsFlags::MS_NODEV;
        restrict(&root.as_fd(), read_only)?;
    }
    Ok(())
}

/// Answers what is mounted there: the mount itself, which another look-up of its place need not find.
fn mount_in(root: BorrowedFd<'_>, bind: &Bind) -> Step<OwnedFd> {
    let mut clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if bind.flags().contains(MsFlags::MS_REC) {
        clone |= OpenTreeFlags::AT_RECURSIVE;
    }
    let mounted = open_tree(CWD, &bind.source, clone)
        .map_err(cannot("open a mount source of the container"))?;
    let within = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    let path_only = OFlags::PATH | OFlags::CLOEXEC;
    let place = openat2(root, &bind.destination, path_only, Mode::empty(), within)
        .map_err(cannot("open a mount point in the container"))?;
    let by_descriptor =
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(&mounted, "", &place, "", by_descriptor)
        .map_err(cannot("mount in the container"))?;
    if let Some(propagation) = bind.propagation() {
        mount(
            NOTHING,
            path_of(&mounted).as_str(),
            NOTHING,
            propagation,
            NOTHING,
        )
        .map_err(cannot("set the propagation of a container's mount"))?;
    }
    Ok(mounted)
}

/// Sets the flags of one mount. What is restricted on the host stays so: the kernel refuses to take it back from here.
fn restrict(mounted: &BorrowedFd<'_>, flags: MsFlags) -> Step<()> {
    let what = "restrict a container's mount";
    let hosts = fstatvfs(mounted).map_err(cannot(what))?.f_flag;
    let flags = flags | MsFlags::MS_REMOUNT | MsFlags::MS_NOSUID | of_hosts(hosts);
    mount(NOTHING, path_of(mounted).as_str(), NOTHING, flags, NOTHING).map_err(cannot(what))
}

/// The flags of mount(2) that a mount has by statvfs(3).
fn of_hosts(has: StatVfsMountFlags) -> MsFlags {
    let kept = [
        (StatVfsMountFlags::RDONLY, MsFlags::MS_RDONLY),
        (StatVfsMountFlags::NOEXEC, MsFlags::MS_NOEXEC),
        (StatVfsMountFlags::NODEV, MsFlags::MS_NODEV),
        (StatVfsMountFlags::NOATIME, MsFlags::MS_NOATIME),
        (StatVfsMountFlags::NODIRATIME, MsFlags::MS_NODIRATIME),
        (StatVfsMountFlags::RELATIME, MsFlags::MS_RELATIME),
    ];
    let kept = kept.into_iter().filter(|(is, _)| has.contains(*is));
    let flags = kept.fold(MsFlags::empty(), |all, (_, flag)| all | flag);
    match flags.intersects(MsFlags::MS_NOATIME | MsFlags::MS_RELATIME) {
        true => flags,
        // Nothing said is the kernel's own choice.
        false => flags | MsFlags::MS_STRICTATIME,
    }
}

fn path_of(file: &impl AsRawFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

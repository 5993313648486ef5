//! The file systems of a gofer, as in runsc/cmd/sandboxsetup/gofer_mount.go: a root of its own, in
//! that the container's root, and in that the container's mounts of the host.
//!
//! The container's image and its program control the container's root file system: a mount point in
//! it may be a link to anywhere. When runsc began the container, it resolved the container's links
//! and recorded the results. Here the recorded mount points are opened below the container's root
//! without following any link (openat2(2)). So each mount is at its recorded place, or the opening
//! fails. The gofer resolves the links anew, and [`super::ContainerStart::restore`] compares its
//! results with the record. A mount point must exist: runsc made it when the container began.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::Path;

use nix::mount::{MsFlags, mount};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, StatVfsMountFlags, fstatvfs, openat, openat2};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use super::plan::{Bind, ServeArgs};
use crate::root::{keep_mounts, leave_hosts, local_time};
use crate::steps::{Step, cannot};

/// Directory over which the new root is mounted, in the process' own mount namespace. No file of a
/// container is below it.
const PLACE: &str = "/proc/fs";

/// Path of the program in the new root. The program unmounts `/proc`, and the path with it.
pub(super) const PROGRAM: &str = "/exe";

const NOTHING: Option<&str> = None;

/// Moves the process into the new root, and returns the files that gVisor writes to. The process
/// must be the first one of new user, mount and PID namespaces. `program`: the descriptor of the
/// program to execute.
pub(super) fn enter(args: &ServeArgs, program: i32) -> Step<Vec<OwnedFd>> {
    let plain = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let place = Path::new(PLACE);
    keep_mounts()?;
    // Opened through the host's mounts: a file that is open for writing in the container's root
    // would keep that root from becoming read-only.
    let filestores = args.filestores.iter().map(|dir| make(dir, &args.filestore));
    let filestores = filestores.collect::<Step<Vec<_>>>()?;
    mount(Some("runsc-root"), place, Some("tmpfs"), plain, NOTHING)
        .map_err(cannot("mount its root"))?;
    // The new root is below `/proc`, which is mounted in it next.
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
    // gVisor keeps this directory open. It is a mount of its own, so that no path leads out of it.
    let own_files = MsFlags::MS_BIND | MsFlags::MS_RDONLY | plain;
    let (source, target) = (proc.join("self/fd"), proc.join("fs"));
    mount(Some(&source), &target, NOTHING, own_files, NOTHING)
        .map_err(cannot("mount the list of its files"))?;
    containers(args, &place.join("root"))?;
    leave_hosts(place)?;
    Ok(filestores)
}

/// Creates a file in the directory.
fn make(dir: &Path, name: &str) -> Step<OwnedFd> {
    let failed = cannot("create a filestore");
    let path_only = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let dir = rustix::fs::open(dir, path_only, Mode::empty()).map_err(failed)?;
    let new = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = openat(&dir, name, new, Mode::from_raw_mode(0o666)).map_err(failed)?;
    measure(&file);
    Ok(file)
}

/// Maps the empty file as executable, for a kernel that measures executable files (IMA). Such a
/// kernel reads a file's whole content at the first executable mapping, so this is done while the
/// file is empty (gVisor, `pkg/sentry/pgalloc.IMAWorkAroundForMemFile`). Where the mapping is
/// refused, the kernel measures nothing later either.
#[allow(unsafe_code)]
fn measure(file: &OwnedFd) {
    const PAGE: usize = 4096;
    let nowhere = std::ptr::null_mut();
    // SAFETY: the kernel chooses the address. No other code gets it, and the mapping is removed at
    // once.
    unsafe {
        if let Ok(mapped) = mmap(nowhere, PAGE, ProtFlags::EXEC, MapFlags::SHARED, file, 0) {
            let _ = munmap(mapped, PAGE);
        }
    }
}

/// Mounts the container's root file system at `place`, and the container's mounts in it.
pub(super) fn containers(args: &ServeArgs, place: &Path) -> Step<()> {
    let whole = MsFlags::MS_BIND | MsFlags::MS_REC;
    mount(Some(&args.root), place, NOTHING, whole, NOTHING)
        .map_err(cannot("mount the container's root"))?;
    let path_only = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(place, path_only, Mode::empty())
        .map_err(cannot("enter the container's root"))?;
    let mounted = args.binds.iter();
    let mounted = mounted.map(|bind| Ok((bind, mount_in(root.as_fd(), bind)?)));
    // Restricted after all mounts are made: a read-only mount may have other mounts' mount points.
    for (bind, at) in mounted.collect::<Step<Vec<_>>>()?.iter().rev() {
        restrict(&at.as_fd(), bind.flags())?;
    }
    if args.read_only {
        let read_only = MsFlags::MS_BIND | MsFlags::MS_RDONLY | MsFlags::MS_NODEV;
        restrict(&root.as_fd(), read_only)?;
    }
    Ok(())
}

/// Makes a mount, and returns its descriptor: another look-up of its path may find another file.
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

/// Sets the flags of one mount. Restrictions of the host's mount stay: the kernel refuses to remove
/// them in another user namespace.
fn restrict(mounted: &BorrowedFd<'_>, flags: MsFlags) -> Step<()> {
    let what = "restrict a container's mount";
    let hosts = fstatvfs(mounted).map_err(cannot(what))?.f_flag;
    let flags = flags | MsFlags::MS_REMOUNT | MsFlags::MS_NOSUID | mount_flags(hosts);
    mount(NOTHING, path_of(mounted).as_str(), NOTHING, flags, NOTHING).map_err(cannot(what))
}

/// Translates the flags of a mount from statvfs(3) to mount(2).
fn mount_flags(has: StatVfsMountFlags) -> MsFlags {
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
        // Without a flag for access times the kernel would choose one.
        false => flags | MsFlags::MS_STRICTATIME,
    }
}

fn path_of(file: &impl AsRawFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

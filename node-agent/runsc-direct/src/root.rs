//! The root file system of a sandbox' first process, as in runsc/cmd/chroot.go. It has only the
//! files of `/proc` that gVisor reads before it runs programs.

use std::io::Error;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::unistd::{chdir, pivot_root};

use super::steps::{Step, cannot};

/// Directory over which the new root is mounted, in the process' own mount namespace.
const PLACE: &str = "/tmp";
/// Settings of the machine that gVisor reads.
const COPIED: [&str; 2] = [
    "/proc/sys/vm/mmap_min_addr",
    "/proc/sys/kernel/cap_last_cap",
];

/// Path of the program in the new root. The program unmounts `/proc`, and the path with it.
pub(super) const PROGRAM: &str = "/proc/exe";

/// Moves the process into the new root. The process must be the first one of new user, mount and
/// PID namespaces. `program`: the descriptor of the program to execute.
pub(super) fn enter(program: i32) -> Step<()> {
    let nothing: Option<&str> = None;
    let plain = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;

    let place = Path::new(PLACE);
    // A mount on a link would be at the link's target.
    let is_dir = std::fs::symlink_metadata(place)
        .map_err(cannot("examine /tmp"))?
        .is_dir();
    if !is_dir {
        return Err((
            "use /tmp, which is not a directory",
            Error::from(std::io::ErrorKind::NotADirectory),
        ));
    }
    keep_mounts()?;
    mount(Some("runsc-root"), place, Some("tmpfs"), plain, nothing)
        .map_err(cannot("mount its root"))?;
    let _ = local_time(place);
    proc(place, program, plain)?;
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | MsFlags::MS_BIND;
    mount(nothing, place, nothing, read_only, nothing)
        .map_err(cannot("make its root read-only"))?;
    leave_hosts(place)
}

/// Keeps later mounts of this mount namespace out of all others.
pub(super) fn keep_mounts() -> Step<()> {
    let (slave, nothing) = (MsFlags::MS_SLAVE | MsFlags::MS_REC, None::<&str>);
    mount(nothing, "/", nothing, slave, nothing).map_err(cannot("make its mounts private"))
}

/// Makes the mount at `place` the process' root, and unmounts the host's root.
pub(super) fn leave_hosts(place: &Path) -> Step<()> {
    chdir(place).map_err(cannot("enter its root"))?;
    pivot_root(".", ".").map_err(cannot("change its root"))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(cannot("unmount the host's root"))?;
    chdir("/").map_err(cannot("enter its root"))
}

/// Copies the time zone for gVisor's log. Without it the log has UTC.
pub(super) fn local_time(place: &Path) -> Result<(), Error> {
    std::fs::create_dir(place.join("etc"))?;
    std::fs::copy("/etc/localtime", place.join("etc/localtime")).map(drop)
}

/// Makes `/proc` in the new root: a file system in memory with the few files that gVisor reads. The
/// files are the same whether the kernel allows a new proc file system or not: links lead to the
/// new one, or to the host's. The kernel refuses a new one to a user namespace where something is
/// mounted over a part of the host's `/proc`.
fn proc(place: &Path, program: i32, plain: MsFlags) -> Step<()> {
    let nothing: Option<&str> = None;
    let proc = place.join("proc");
    let make =
        |name: &str| std::fs::create_dir(proc.join(name)).map_err(cannot("make a directory"));

    std::fs::create_dir(&proc).map_err(cannot("make /proc"))?;
    mount(Some("runsc-proc"), &proc, Some("tmpfs"), plain, nothing)
        .map_err(cannot("mount /proc"))?;
    let read_only = plain | MsFlags::MS_RDONLY;
    let (fresh, hosts) = ("sandbox-proc", "host-proc");
    make(fresh)?;
    let own = proc.join(fresh);
    let whole = match mount(Some("proc"), &own, Some("proc"), read_only, nothing) {
        Ok(()) => fresh,
        Err(_) => {
            make(hosts)?;
            let bound = MsFlags::MS_BIND | MsFlags::MS_REC | read_only;
            mount(
                Some("/proc"),
                &proc.join(hosts),
                Some("bind"),
                bound,
                nothing,
            )
            .map_err(cannot("mount the host's /proc"))?;
            hosts
        }
    };
    ["sys", "sys/kernel", "sys/vm"]
        .into_iter()
        .try_for_each(make)?;
    for path in COPIED {
        let bytes = std::fs::read(path).map_err(cannot("read a setting"))?;
        let copy = place.join(path.trim_start_matches('/'));
        std::fs::write(copy, bytes).map_err(cannot("copy a setting"))?;
    }
    let program = format!("self/fd/{program}");
    for (name, to) in [("self", "self"), ("cpuinfo", "cpuinfo"), ("exe", &program)] {
        symlink(format!("{whole}/{to}"), proc.join(name)).map_err(cannot("make a link"))?;
    }
    let passable = std::fs::Permissions::from_mode(0o111);
    std::fs::set_permissions(&proc, passable).map_err(cannot("restrict access to /proc"))
}

//! The root file system of a sandbox' first process: nothing but what gVisor reads of `/proc` until it is about to run programs, as
//! runsc/cmd/chroot.go has it.

use std::io::Error;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::unistd::{chdir, pivot_root};

use super::process::{Step, cannot};

/// Made a place to build in; the mount namespace is the process' own.
const PLACE: &str = "/tmp";
/// What gVisor reads of the machine's settings.
const COPIED: [&str; 2] = [
    "/proc/sys/vm/mmap_min_addr",
    "/proc/sys/kernel/cap_last_cap",
];

/// The program that this process executes once it is there: `/proc` goes away with it.
pub(super) const PROGRAM: &str = "/proc/exe";

/// Moves the process, the first one of new user, mount and PID namespaces, into it. `program`: the number of its descriptor.
pub(super) fn enter(program: i32) -> Step<()> {
    let nothing: Option<&str> = None;
    let plain = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;

    let place = Path::new(PLACE);
    // What is mounted on a link is mounted on where it leads.
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

/// What is mounted from now on is seen by nobody else.
pub(super) fn keep_mounts() -> Step<()> {
    let (slave, nothing) = (MsFlags::MS_SLAVE | MsFlags::MS_REC, None::<&str>);
    mount(nothing, "/", nothing, slave, nothing).map_err(cannot("make its mounts private"))
}

/// What is mounted at `place` is the process' root; the host's is gone.
pub(super) fn leave_hosts(place: &Path) -> Step<()> {
    chdir(place).map_err(cannot("enter its root"))?;
    pivot_root(".", ".").map_err(cannot("change its root"))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(cannot("unmount the host's root"))?;
    chdir("/").map_err(cannot("enter its root"))
}

/// The time zone of gVisor's log; without it there is UTC in it.
pub(super) fn local_time(place: &Path) -> Result<(), Error> {
    std::fs::create_dir(place.join("etc"))?;
    std::fs::copy("/etc/localtime", place.join("etc/localtime")).map(drop)
}

/// A file system in memory with the few files of `/proc` that are read, so that they are the same ones whether the whole may be mounted anew or not: something may be
/// mounted over a part of the host's, and then the kernel gives no other one to a user namespace.
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

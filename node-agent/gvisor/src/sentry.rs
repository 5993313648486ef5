//! The start of a restored sandbox without runsc's command.
//!
//! `runsc restore` of a pause container executes runsc four times before gVisor's kernel runs: itself, the sandbox' process, that process once more without
//! capabilities, and a helper that unmounts `/proc` for it. Each start is 9 ms of processor time. Here the sandbox' process is made as runsc makes
//! it, and executes runsc once. What it may do is what runsc leaves it: the seccomp filter is gVisor's kernel's own, and namespaces, root and
//! capabilities are compared with runsc's by the e2e tests (`begun.rs`).
//!
//! That is gVisor's inside, so it is done where all is as this module knows it ([`Kept`]), and by runsc everywhere else.
//! See docs/decisions/2026-11-25-sandboxes-begun-by-torpor.md.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::LinkMessage;
use netlink_packet_route::neighbour::NeighbourMessage;
use netlink_packet_route::route::RouteMessage;
use nix::libc;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, bind, setsockopt, socket, socketpair, sockopt,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use serde_json::json;

use crate::control::{self, Control, socket_path};
use crate::dial::time_val;
use crate::net::{self, Netlink};
use crate::runsc::{self, Runsc, records};

pub use plan::Kept;
use plan::{Order, Plan};
pub use process::become_sandbox;
use process::{Word, hear, say};

mod links;
mod packets;
mod plan;
mod process;
mod root;

/// The hidden command of torpor-oci that calls [`become_sandbox`].
pub const COMMAND: &str = "sandbox-process";

/// Why a sandbox was not begun.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot open {path} for the sandbox")]
    Open {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot {what} for the sandbox")]
    Prepare {
        what: &'static str,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot talk to the process that is to be the sandbox")]
    Talk(#[source] std::io::Error),
    #[error("the process that is to be the sandbox {0}")]
    Failed(String),
    #[error("gVisor's kernel ended as it started: {0}")]
    Ended(String),
    /// The effect is unknown: observe again.
    #[error("gVisor's kernel did not start within {0:?}")]
    TimedOut(Duration),
    #[error(transparent)]
    Record(#[from] runsc::Error),
    #[error(transparent)]
    Network(#[from] net::Error),
    #[error(transparent)]
    Control(#[from] control::Error),
}

/// The start of one sandbox.
#[derive(Debug)]
pub struct Start<'a> {
    runsc: &'a Runsc,
    kept: &'a Kept,
    plan: Plan,
    sandbox: &'a str,
    /// Of the first container: `config.json` lies there.
    bundle: &'a Path,
}

impl<'a> Start<'a> {
    /// None where runsc must do it.
    pub fn new(
        runsc: &'a Runsc,
        kept: &'a Kept,
        sandbox: &'a str,
        bundle: &'a Path,
        network_namespace: Option<&Path>,
    ) -> Option<Self> {
        let plan = kept.plan()?;
        let fits = runsc.is_plain() && network_namespace == Some(plan.network_namespace.as_path());
        fits.then_some(Self {
            runsc,
            kept,
            plan,
            sandbox,
            bundle,
        })
    }

    /// Begins the sandbox and hands it the image, as `runsc restore` of its first container does. On failure processes and records may be left of it, as by runsc's
    /// command. Returns when gVisor has the image; it restores nothing before its last container is there.
    pub fn restore(&self, image: &Path, limit: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + limit;
        let left = || deadline.saturating_duration_since(Instant::now());
        let log = memory_file()?;
        let (booted, boots) = std::io::pipe().map_err(prepare("make a pipe"))?;
        let control = self.control_socket()?;
        let files = [
            open(&self.plan.network_namespace)?,
            // Where the node has it: it may be a link.
            File::open(self.runsc.path())
                .map_err(cannot_open(self.runsc.path()))?
                .into(),
            log.try_clone().map_err(prepare("share its log"))?.into(),
            open(&self.plan.root)?,
            boots.into(),
            control,
            open(&self.bundle.join("config.json"))?,
        ];
        let pid = self.begin(&files.each_ref().map(AsFd::as_fd), limit)?;
        // gVisor's kernel has the only ends now: they close when it ends.
        drop(files);
        await_boot(&booted.into(), log, limit, left())?;
        let record = self.kept.running(pid);
        records::write(self.runsc.root(), self.sandbox, &record)?;
        let mut control = Control::connect_to_new(self.runsc.root(), self.sandbox)?;
        self.connect(&mut control, left())?;
        hand_over(&mut control, image, left())
    }

    /// Where gVisor's control server will listen.
    fn control_socket(&self) -> Result<OwnedFd, Error> {
        let path = socket_path(self.runsc.root(), self.sandbox);
        let bound = || -> nix::Result<OwnedFd> {
            let (unix, cloexec) = (AddressFamily::Unix, SockFlag::SOCK_CLOEXEC);
            let control = socket(unix, SockType::Stream, cloexec, None)?;
            bind(control.as_raw_fd(), &UnixAddr::new(&path)?)?;
            Ok(control)
        };
        bound().map_err(prepare("make its control socket"))
    }

    /// Answers the number of the process that executes runsc.
    fn begin(&self, files: &[BorrowedFd<'_>], limit: Duration) -> Result<i32, Error> {
        let (unix, packets, cloexec) = (
            AddressFamily::Unix,
            SockType::SeqPacket,
            SockFlag::SOCK_CLOEXEC,
        );
        let (ours, theirs) =
            socketpair(unix, packets, None, cloexec).map_err(prepare("make a socket"))?;
        setsockopt(&ours, sockopt::ReceiveTimeout, &time_val(limit))
            .map_err(prepare("limit a socket"))?;
        let mut child = Command::new("/proc/self/exe")
            .arg0("torpor-sandbox")
            .args([COMMAND, self.sandbox])
            .stdin(theirs)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .current_dir("/")
            .env_clear()
            .spawn()
            .map_err(prepare("begin a process"))?;
        let begun = self.converse(&ours, &child, files);
        if begun.is_err() {
            // It may wait for a word that will not come.
            let _ = child.kill();
        }
        let _ = child.wait();
        begun
    }

    fn converse(
        &self,
        with: &OwnedFd,
        child: &Child,
        files: &[BorrowedFd<'_>],
    ) -> Result<i32, Error> {
        say(with, &Word::Be(self.order()?), files).map_err(Error::Talk)?;
        let mut pid = None;
        loop {
            match hear(with).map_err(Error::Talk)? {
                Some((Word::Apart, _)) => {
                    self.map_users(child.id())?;
                    say(with, &Word::Mapped, &[]).map_err(Error::Talk)?;
                }
                Some((Word::Forked { pid: forked }, _)) => pid = Some(forked),
                Some((Word::Failed { message }, _)) => return Err(Error::Failed(message)),
                Some((Word::Be(_) | Word::Mapped, _)) => {}
                None => return pid.ok_or_else(|| Error::Failed("ended without a word".to_owned())),
            }
        }
    }

    fn map_users(&self, pid: u32) -> Result<(), Error> {
        for (name, map) in [
            ("uid_map", self.plan.uid_map.as_str()),
            ("setgroups", "deny"),
            ("gid_map", &self.plan.gid_map),
        ] {
            let path = PathBuf::from(format!("/proc/{pid}/{name}"));
            std::fs::write(&path, map).map_err(|source| Error::Open { path, source })?;
        }
        Ok(())
    }

    fn order(&self) -> Result<Order, Error> {
        Ok(Order {
            flags: self.runsc.flags(),
            bundle: self.bundle.to_owned(),
            sandbox: self.sandbox.to_owned(),
            memory: machine_memory().map_err(prepare("read the machine's memory"))?,
            told: told(|path| std::fs::read_to_string(path).ok()),
        })
    }

    /// gVisor has its addresses and routes from the pod's links, which lose them.
    fn connect(&self, control: &mut Control, limit: Duration) -> Result<(), Error> {
        let (arguments, sockets) = net::within(&self.plan.network_namespace, take_links)?;
        let sockets: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
        let method = "containerManager.CreateLinksAndRoutes";
        control.call::<serde_json::Value>(method, &arguments, &sockets, limit)?;
        Ok(())
    }
}

/// For errors of the machine.
fn prepare<E: Into<std::io::Error>>(what: &'static str) -> impl Fn(E) -> Error {
    move |error| Error::Prepare {
        what,
        source: error.into(),
    }
}

fn open(path: &Path) -> Result<OwnedFd, Error> {
    let opened = File::options()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path);
    opened.map(Into::into).map_err(cannot_open(path))
}

fn cannot_open(path: &Path) -> impl Fn(std::io::Error) -> Error {
    move |source| Error::Open {
        path: path.to_owned(),
        source,
    }
}

fn memory_file() -> Result<File, Error> {
    let file = rustix::fs::memfd_create("runsc-output", MemfdFlags::CLOEXEC);
    file.map(Into::into).map_err(prepare("make its log"))
}

fn machine_memory() -> std::io::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    total_memory(&text).ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}

/// Bytes, of `/proc/meminfo`.
fn total_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// What `runsc boot` reads of the machine before it leaves the host's root.
fn told(read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut flags = Vec::new();
    let product = read("/sys/devices/virtual/dmi/id/product_name");
    flags.extend(product.map(|name| format!("--product-name={}", name.trim())));
    for (setting, flag) in [
        ("shmem_enabled", "host-thp-shmem-enabled"),
        ("defrag", "host-thp-defrag"),
    ] {
        let text = read(&format!("/sys/kernel/mm/transparent_hugepage/{setting}"));
        // always [madvise] never
        let chosen = text
            .as_deref()
            .and_then(|text| Some(text.split_once('[')?.1.split_once(']')?.0));
        flags.extend(chosen.map(|chosen| format!("--{flag}={chosen}")));
    }
    flags
}

/// Waits for the byte that gVisor's kernel writes when its control server listens.
fn await_boot(booted: &OwnedFd, log: File, limit: Duration, left: Duration) -> Result<(), Error> {
    let deadline = Instant::now() + left;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        let mut fds = [PollFd::new(booted, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) => return Err(Error::TimedOut(limit)),
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Error::Talk(errno.into())),
        }
    }
    match rustix::io::read(booted, &mut [0; 1]) {
        Ok(1) => Ok(()),
        Ok(_) => Err(Error::Ended(runsc::last_words(log))),
        Err(errno) => Err(Error::Talk(errno.into())),
    }
}

/// What is set in the thread's network namespace.
fn found() -> Result<links::Found, Error> {
    let mut netlink = Netlink::open()?;
    let mut found = links::Found::default();
    for request in [
        RouteNetlinkMessage::GetLink(LinkMessage::default()),
        RouteNetlinkMessage::GetAddress(AddressMessage::default()),
        RouteNetlinkMessage::GetRoute(RouteMessage::default()),
        RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default()),
    ] {
        let said = netlink.dump(request)?;
        said.into_iter().for_each(|message| found.add(message));
    }
    Ok(found)
}

/// Takes the addresses away from the links of the thread's network namespace that are the sandbox', and opens a packet socket on each. Answers gVisor's
/// arguments and the sockets.
fn take_links() -> Result<(serde_json::Value, Vec<OwnedFd>), Error> {
    let found = found()?;
    let links = found.links();
    let mut netlink = Netlink::open()?;
    for address in found.taken(&links) {
        netlink.remove_address(address.clone())?;
    }
    let (mut sockets, mut offloads) = (Vec::new(), Vec::new());
    for link in &links {
        let opened = packets::open(link.index, &link.name);
        let (socket, offload) = opened.map_err(prepare("open a packet socket"))?;
        sockets.push(socket);
        offloads.push(offload);
    }
    Ok((found.arguments(&links, &offloads), sockets))
}

/// gVisor begins to read the memory at once, and waits for the other containers.
fn hand_over(control: &mut Control, image: &Path, limit: Duration) -> Result<(), Error> {
    let [state, metadata, pages] =
        ["checkpoint.img", "pages_meta.img", "pages.img"].map(|name| open(&image.join(name)));
    let (state, mut files) = (state?, Vec::new());
    // An image that is compressed has one file.
    let has_pages = match metadata {
        Ok(metadata) => {
            files.extend([metadata, pages?]);
            true
        }
        Err(Error::Open { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => false,
        Err(error) => return Err(error),
    };
    let files: Vec<BorrowedFd<'_>> = [state.as_fd()]
        .into_iter()
        .chain(files.iter().map(AsFd::as_fd))
        .collect();
    let arguments = json!({ "HavePagesFile": has_pages });
    control.call::<serde_json::Value>("containerManager.Restore", &arguments, &files, limit)?;
    Ok(())
}

#[cfg(test)]
mod tests;

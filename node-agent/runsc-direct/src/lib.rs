//! The start of a restored sandbox without runsc's command.
//!
//! `runsc restore` of a pause container executes runsc four times before gVisor's kernel runs: itself, the sandbox' process, that process once more without
//! capabilities, and a helper that unmounts `/proc` for it. Each start is 9 ms of processor time. Here the sandbox' process is made as runsc makes
//! it, and executes runsc once. What it may do is what runsc leaves it: the seccomp filter is gVisor's kernel's own, and namespaces, root and
//! capabilities are compared with runsc's by the e2e tests (`begun.rs`).
//!
//! That is gVisor's inside, so it is done where all is as this module knows it ([`RunscRecord`]), and by runsc everywhere else.
//! See docs/decisions/2026-11-26-torpor-oci-starts-sandbox-and-gofers.md.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::LinkMessage;
use netlink_packet_route::neighbour::NeighbourMessage;
use netlink_packet_route::route::RouteMessage;
use nix::libc;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, bind, socket};
use rustix::fs::MemfdFlags;
use serde_json::json;

use torpor_link::net::{self, Netlink};
use torpor_records::RunscRecord;
use torpor_runsc::command::{self, Runsc, can_be_read};
use torpor_runsc::control::{self, Control, socket_path};
use torpor_runsc::kernel_tuning::bracketed;
use torpor_runsc::limits::Machine;
use torpor_runsc::save::FILES;
use torpor_runsc::state;

use begin::Beginning;
pub use gofer::{ContainerStart, Gofer, filestore};
pub use plan::is_known_release;
use plan::{BootArgs, Plan, Root};
use process::Word;
pub use process::become_process;

mod begin;
mod gofer;
mod links;
pub mod packet_sockets;
mod packets;
mod plan;
mod process;
mod root;

/// The hidden command of torpor-oci that calls [`become_process`].
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
    #[error("cannot communicate with the process that becomes the sandbox or a gofer")]
    Talk(#[source] std::io::Error),
    #[error("the process that becomes the sandbox or a gofer failed: {0}")]
    Failed(String),
    #[error("gVisor's kernel ended while it started: {0}")]
    Ended(String),
    #[error("gVisor's gofer ended while it started: {0}")]
    GoferEnded(String),
    #[error("a mount source of container {0} is no longer at its path")]
    Moved(String),
    /// It may still start: whoever goes on ends it first.
    #[error("gVisor did not start within {limit:?}: {said}")]
    TimedOut { limit: Duration, said: String },
    #[error(transparent)]
    Record(#[from] state::Error),
    #[error(transparent)]
    Runsc(#[from] command::Error),
    #[error(transparent)]
    Network(#[from] net::Error),
    #[error(transparent)]
    Control(#[from] control::Error),
}

/// The start of one sandbox.
#[derive(Debug)]
pub struct Start<'a> {
    runsc: &'a Runsc,
    kept: &'a RunscRecord,
    plan: Plan,
    sandbox: &'a str,
    /// Of the first container: `config.json` lies there.
    bundle: &'a Path,
    /// See [`torpor_runsc::limits::boot_flags`].
    limits: &'a [String],
}

impl<'a> Start<'a> {
    /// `spec`: what the bundle's `config.json` says. None where runsc must do it.
    pub fn new(
        runsc: &'a Runsc,
        kept: &'a RunscRecord,
        sandbox: &'a str,
        bundle: &'a Path,
        spec: &serde_json::Value,
        network_namespace: Option<&Path>,
        limits: &'a [String],
    ) -> Option<Self> {
        let plan = plan::plan(kept, spec, sandbox)?;
        let fits = runsc.is_plain() && network_namespace == Some(plan.network_namespace.as_path());
        fits.then_some(Self {
            runsc,
            kept,
            plan,
            sandbox,
            bundle,
            limits,
        })
    }

    /// Begins the sandbox and hands it the image, as `runsc restore` of its first container does. On failure a process and records may be left of it, which
    /// runsc's command would remove. Returns when gVisor has the image; it restores nothing before its last container is there.
    pub fn restore(&self, image: &Path, limit: Duration) -> Result<(), Error> {
        let until = Limit::new(limit);
        std::fs::create_dir_all(self.runsc.root()).map_err(prepare("make runsc's directory"))?;
        let _other_containers_wait =
            state::lock(self.runsc.root(), self.sandbox, self.sandbox, until.end)?;
        let log: File = command::memory_file("boot", MemfdFlags::CLOEXEC)?.into();
        let (booted, boots) = std::io::pipe().map_err(prepare("make a pipe"))?;
        let root = self.root(until)?;
        // Where the node has them: they may be links.
        let of_node = |path: &Path| File::open(path).map_err(cannot_open(path));
        let files: [OwnedFd; process::FILES] = [
            of_node(&self.plan.network_namespace)?.into(),
            of_node(self.runsc.path())?.into(),
            append_only(&log)?,
            boots.into(),
            self.control_socket()?,
            open(&self.bundle.join("config.json"))?,
        ];
        let handed = files.iter().map(AsFd::as_fd).chain(root.files());
        let begun = Beginning {
            name: "torpor-sandbox",
            id: self.sandbox,
            word: Word::Boot(self.boot_args(&root)?),
            files: &handed.collect::<Vec<_>>(),
            uid_map: &self.plan.uid_map,
            gid_map: &self.plan.gid_map,
        }
        .begin(until)?;
        let gofer = root.gofer();
        // gVisor's kernel has the only ends now: they close when it ends.
        drop((files, root));
        await_boot(&booted.into(), log, until)?;
        let record = plan::running_sandbox(self.kept, begun.pid, gofer);
        state::write(self.runsc.root(), self.sandbox, self.sandbox, &record)?;
        let mut control = Control::connect_to_new(self.runsc.root(), self.sandbox)?;
        self.connect(&mut control, until.left())?;
        hand_over(&mut control, image, until.left())
    }

    /// A gofer begins before the sandbox, which is handed its files.
    fn root(&self, until: Limit) -> Result<Opened, Error> {
        match &self.plan.root {
            Root::Image(path) => Ok(Opened::Image(open(path)?)),
            Root::Served(plan) => {
                let gofer = Gofer::begin(self.runsc, plan, self.sandbox, self.bundle, until)?;
                gofer.set_oom_score(plan)?;
                Ok(Opened::Served(gofer))
            }
        }
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

    fn boot_args(&self, root: &Opened) -> Result<BootArgs, Error> {
        let (connections, filestores) = root.counts();
        Ok(BootArgs {
            flags: self.runsc.flags(),
            bundle: self.bundle.to_owned(),
            sandbox: self.sandbox.to_owned(),
            memory: Machine::read()
                .map_err(prepare("read the machine's memory"))?
                .memory,
            limits: self.limits.to_vec(),
            host_flags: host_flags(|path| std::fs::read_to_string(path).ok()),
            mount_confs: self.plan.root.mount_confs().to_owned(),
            connections,
            filestores,
        })
    }

    /// gVisor has its addresses and routes from the pod's links, which lose them.
    fn connect(&self, control: &mut Control, limit: Duration) -> Result<(), Error> {
        let (arguments, sockets) = net::within(&self.plan.network_namespace, take_links)?;
        let sockets: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
        let method = "containerManager.SetNetworkArgs";
        control.call::<serde_json::Value>(method, &arguments, &sockets, limit)?;
        Ok(())
    }
}

/// The root file system of a sandbox' first container, and its volumes, for its first process.
#[derive(Debug)]
enum Opened {
    Image(OwnedFd),
    Served(Gofer),
}

impl Opened {
    /// Of [`Self::files`]: images and connections, then files that are written to.
    fn counts(&self) -> (usize, usize) {
        match self {
            Self::Image(_) => (1, 0),
            Self::Served(gofer) => gofer.counts(),
        }
    }

    fn files(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Self::Image(image) => vec![image.as_fd()],
            Self::Served(gofer) => gofer.files(),
        }
    }

    fn gofer(&self) -> Option<i32> {
        match self {
            Self::Image(_) => None,
            Self::Served(gofer) => Some(gofer.pid()),
        }
    }
}

/// How long all of it may take.
#[derive(Debug, Clone, Copy)]
struct Limit {
    limit: Duration,
    end: Instant,
}

impl Limit {
    fn new(limit: Duration) -> Self {
        Self {
            limit,
            end: Instant::now() + limit,
        }
    }

    fn left(self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    fn is_over(self, said: &str) -> Error {
        Error::TimedOut {
            limit: self.limit,
            said: said.to_owned(),
        }
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

/// For who only adds to it: where it ends is not shared.
fn append_only(log: &File) -> Result<OwnedFd, Error> {
    let path = PathBuf::from(format!("/proc/self/fd/{}", log.as_raw_fd()));
    let opened = File::options().append(true).open(&path);
    Ok(opened.map_err(cannot_open(&path))?.into())
}

/// What `runsc boot` reads of the machine before it leaves the host's root.
fn host_flags(read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut flags = Vec::new();
    let product = read("/sys/devices/virtual/dmi/id/product_name");
    flags.extend(product.map(|name| format!("--product-name={}", name.trim())));
    for (setting, flag) in [
        ("shmem_enabled", "host-thp-shmem-enabled"),
        ("defrag", "host-thp-defrag"),
    ] {
        let text = read(&format!("/sys/kernel/mm/transparent_hugepage/{setting}"));
        let chosen = text.as_deref().and_then(bracketed);
        flags.extend(chosen.map(|chosen| format!("--{flag}={chosen}")));
    }
    flags
}

/// Waits for the byte that gVisor's kernel writes when its control server listens.
fn await_boot(booted: &OwnedFd, log: File, until: Limit) -> Result<(), Error> {
    if !can_be_read(booted, until.end).map_err(Error::Talk)? {
        return Err(until.is_over(&command::last_words(log)));
    }
    match rustix::io::retry_on_intr(|| rustix::io::read(booted, &mut [0; 1])) {
        Ok(1) => Ok(()),
        Ok(_) => Err(Error::Ended(command::last_words(log))),
        Err(errno) => Err(Error::Talk(errno.into())),
    }
}

/// What is set in the network namespace.
fn found(netlink: &mut Netlink) -> Result<links::Found, Error> {
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
    let mut netlink = Netlink::open()?;
    let found = found(&mut netlink)?;
    let links = found.links();
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
    let [state, metadata, pages] = FILES.map(|name| open(&image.join(name)));
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

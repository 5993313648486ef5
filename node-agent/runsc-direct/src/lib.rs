//! The start of a restored sandbox without runsc's command.
//!
//! `runsc restore` of a pause container executes runsc four times before gVisor's kernel runs:
//! itself, the sandbox' process, that process once more without capabilities, and a helper that
//! unmounts `/proc` for it. Each start is 9 ms of processor time. This crate makes the sandbox'
//! process as runsc makes it, and executes runsc once. The process is confined as runsc confines
//! it: gVisor's kernel sets its seccomp filter itself, and the e2e tests (`begun.rs`) compare
//! namespaces, root and capabilities with runsc's.
//!
//! These are internals of gVisor. So this crate begins only sandboxes whose [`RunscRecord`] has no
//! unknown part, and runsc begins all others.
//! See docs/decisions/2026-11-26-torpor-oci-starts-sandbox-and-gofers.md.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::LinkMessage;
use netlink_packet_route::neighbour::NeighbourMessage;
use netlink_packet_route::route::RouteMessage;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, bind, socket};
use rustix::fs::MemfdFlags;
use serde_json::json;

use torpor_link::net::{self, Netlink};
use torpor_records::RunscRecord;
use torpor_runsc::command::{self, Runsc, can_be_read};
use torpor_runsc::control::{Control, socket_path};
use torpor_runsc::kernel_tuning::bracketed;
use torpor_runsc::limits::Machine;
use torpor_runsc::save::FILES;
use torpor_runsc::state;

use begin::Beginning;
pub use begin::COMMAND;
pub use error::Error;
use error::{cannot_open, prepare};
use files::{append_only, open};
pub use gofer::{ContainerStart, Gofer, filestore};
use limit::Limit;
use message::Message;
use plan::{BootArgs, Plan, Root};
pub use process::become_process;
pub use record::is_known_release;

mod begin;
mod error;
mod files;
mod gofer;
mod limit;
mod links;
mod message;
pub mod packet_sockets;
mod packets;
mod plan;
mod process;
mod record;
mod root;
mod steps;

/// The start of one sandbox.
#[derive(Debug)]
pub struct Start<'a> {
    runsc: &'a Runsc,
    kept: &'a RunscRecord,
    plan: Plan,
    sandbox: &'a str,
    /// Bundle of the first container, with its `config.json`.
    bundle: &'a Path,
    /// Arguments of [`torpor_runsc::limits::boot_flags`].
    limits: &'a [String],
}

impl<'a> Start<'a> {
    /// `spec`: content of the bundle's `config.json`. None where runsc must begin the sandbox.
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

    /// Begins the sandbox and passes the image to it, as `runsc restore` of its first container
    /// does. Returns when gVisor has the image. gVisor restores nothing before it has its last
    /// container. A failure may leave a process and records of the sandbox, which runsc's command
    /// would remove.
    pub fn restore(&self, image: &Path, limit: Duration) -> Result<(), Error> {
        let until = Limit::new(limit);
        std::fs::create_dir_all(self.runsc.root()).map_err(prepare("make runsc's directory"))?;
        let _other_containers_wait =
            state::lock(self.runsc.root(), self.sandbox, self.sandbox, until.end)?;
        let log: File = command::memory_file("boot", MemfdFlags::CLOEXEC)?.into();
        let (booted, boots) = std::io::pipe().map_err(prepare("make a pipe"))?;
        let root = self.root(until)?;
        // Paths of the node, which may be links.
        let follow = |path: &Path| File::open(path).map_err(cannot_open(path));
        let files: [OwnedFd; process::FILES] = [
            follow(&self.plan.network_namespace)?.into(),
            follow(self.runsc.path())?.into(),
            append_only(&log)?,
            boots.into(),
            self.control_socket()?,
            open(&self.bundle.join("config.json"))?,
        ];
        let passed_on = files.iter().map(AsFd::as_fd).chain(root.files());
        let begun = Beginning {
            name: "torpor-sandbox",
            id: self.sandbox,
            message: Message::Boot(self.boot_args(&root)?),
            files: &passed_on.collect::<Vec<_>>(),
            uid_map: &self.plan.uid_map,
            gid_map: &self.plan.gid_map,
        }
        .begin(until)?;
        let gofer = root.gofer();
        // gVisor's kernel has the only copies now: they close when it ends.
        drop((files, root));
        await_boot(&booted.into(), log, until)?;
        let record = plan::running_sandbox(self.kept, begun.pid, gofer);
        state::write(self.runsc.root(), self.sandbox, self.sandbox, &record)?;
        let mut control = Control::connect_to_new(self.runsc.root(), self.sandbox)?;
        self.connect(&mut control, until.left())?;
        restore_image(&mut control, image, until.left())
    }

    /// Opens the root file system. A gofer begins before the sandbox, which gets the gofer's files.
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

    /// Binds the socket on which gVisor's control server will listen.
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

    /// Configures gVisor's network with addresses and routes of the pod's links, which lose them.
    fn connect(&self, control: &mut Control, limit: Duration) -> Result<(), Error> {
        let (arguments, sockets) = net::within(&self.plan.network_namespace, take_links)?;
        let sockets: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
        let method = "containerManager.SetNetworkArgs";
        control.call::<serde_json::Value>(method, &arguments, &sockets, limit)?;
        Ok(())
    }
}

/// The opened root file system and volumes of a sandbox' first container, for its first process.
#[derive(Debug)]
enum Opened {
    Image(OwnedFd),
    Served(Gofer),
}

impl Opened {
    /// Returns the numbers of files among [`Self::files`]: of images and connections, and of files
    /// that gVisor writes to.
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

/// Returns the arguments of `runsc boot` for properties of the machine, which runsc reads before it
/// leaves the host's root.
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
        return Err(until.exceeded(&command::last_words(log)));
    }
    match rustix::io::retry_on_intr(|| rustix::io::read(booted, &mut [0; 1])) {
        Ok(1) => Ok(()),
        Ok(_) => Err(Error::Ended(command::last_words(log))),
        Err(errno) => Err(Error::Talk(errno.into())),
    }
}

/// Reads the configuration of the network namespace.
fn found(netlink: &mut Netlink) -> Result<links::Found, Error> {
    let mut found = links::Found::default();
    for request in [
        RouteNetlinkMessage::GetLink(LinkMessage::default()),
        RouteNetlinkMessage::GetAddress(AddressMessage::default()),
        RouteNetlinkMessage::GetRoute(RouteMessage::default()),
        RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default()),
    ] {
        let messages = netlink.dump(request)?;
        messages.into_iter().for_each(|message| found.add(message));
    }
    Ok(found)
}

/// Removes the addresses of the sandbox' links in the thread's network namespace, and opens a
/// packet socket on each link. Returns gVisor's arguments and the sockets.
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

/// Passes the image to gVisor. gVisor begins to read the memory at once, and waits for the other
/// containers.
fn restore_image(control: &mut Control, image: &Path, limit: Duration) -> Result<(), Error> {
    let [state, metadata, pages] = FILES.map(|name| open(&image.join(name)));
    let (state, mut files) = (state?, Vec::new());
    // A compressed image has one file.
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

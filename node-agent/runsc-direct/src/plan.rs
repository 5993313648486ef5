//! The plan of a sandbox' first process, from runsc's record of the sandbox when it last ran, and
//! the arguments of the process.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use torpor_records::RunscRecord;

use super::gofer::plan::{Plan as GoferPlan, numbers};
use super::record::{GOFERS, id_map, is_nothing, is_usual, namespace, running, text};

/// Use of a root file system that is an EROFS image with nothing over it, and has no gofer (gVisor,
/// `runsc/specutils.GoferMountConf`).
const EROFS_ALONE: &str = r#"[{"lower":2,"upper":0}]"#;

/// Setting for which runsc leaves IPv6 addresses on the pod's links.
const NO_IPV6: &str = "/spec/linux/sysctl/net.ipv6.conf.all.disable_ipv6";

/// The root file system of a sandbox' first container.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Root {
    /// An EROFS image, which gVisor reads by itself.
    Image(PathBuf),
    /// Files of the host, which a gofer serves.
    Served(Box<GoferPlan>),
}

impl Root {
    /// Returns the use of the root file system and of the volumes, as an argument of runsc.
    pub(super) fn mount_confs(&self) -> &str {
        match self {
            Self::Image(_) => "erofs:none",
            Self::Served(plan) => &plan.mount_confs,
        }
    }
}

/// The start of a sandbox' next process.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) root: Root,
    pub(super) network_namespace: PathBuf,
    /// Lines of `/proc/<pid>/uid_map` and `gid_map` (user_namespaces(7)).
    pub(super) uid_map: String,
    pub(super) gid_map: String,
}

/// Returns the plan of the sandbox' next process. `spec`: the first container's OCI spec. None
/// where the record has a part that is unknown here: runsc must begin the sandbox.
pub(super) fn plan(record: &RunscRecord, spec: &Value, sandbox: &str) -> Option<Plan> {
    let record = &record.sandbox;
    let nothing = |pointer: &str| record.pointer(pointer).is_none_or(is_nothing);
    let plain = is_usual(record)
        && ["/spec/process/terminal", "/spec/hooks"]
            .into_iter()
            .all(nothing)
        && text(record, NO_IPV6).is_none_or(|value| value == "0");
    if !plain {
        return None;
    }
    // runsc makes a user namespace where the pod has none, and records it.
    (namespace(record, "user")?.is_none()).then_some(())?;
    let root = match image(record) {
        Some(image) => Root::Image(image),
        None => Root::Served(Box::new(GoferPlan::new(record, spec, sandbox)?)),
    };
    Some(Plan {
        root,
        network_namespace: namespace(record, "network")??.into(),
        uid_map: id_map(record, "uidMappings")?,
        gid_map: id_map(record, "gidMappings")?,
    })
}

/// Returns the first container's record for runsc. The sandbox' sentry is now the process `pid`,
/// and its gofer, if any, the process `gofer`.
pub(super) fn running_sandbox(record: &RunscRecord, pid: i32, gofer: Option<i32>) -> Value {
    let mut record = running(&record.sandbox, pid);
    record["goferPid"] = json!(gofer.unwrap_or_default());
    record
}

/// Returns the EROFS image that is the root file system of a first container without a gofer.
fn image(record: &Value) -> Option<PathBuf> {
    let alone = serde_json::from_str::<Value>(EROFS_ALONE).ok()?;
    let annotation = |name: &str| {
        let annotations = record.pointer("/spec/annotations")?;
        annotations
            .get(format!("dev.gvisor.spec.rootfs.{name}"))?
            .as_str()
    };
    let is_alone = record.get(GOFERS) == Some(&alone)
        && record.get("goferPid") == Some(&json!(0))
        && annotation("type") == Some("erofs")
        && annotation("overlay").is_none();
    is_alone
        .then(|| annotation("source"))
        .flatten()
        .map(PathBuf::from)
}

/// Arguments of `runsc boot`, without its descriptors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BootArgs {
    /// Flags of all commands of runsc.
    pub(super) flags: Vec<String>,
    pub(super) bundle: PathBuf,
    pub(super) sandbox: String,
    /// Bytes of the machine's memory.
    pub(super) memory: u64,
    /// The Pod's limits, as arguments of runsc.
    pub(super) limits: Vec<String>,
    /// Properties of the host that runsc would read from `/sys`, which it no longer has.
    pub(super) host_flags: Vec<String>,
    /// Use of the first container's file systems, as an argument of runsc.
    pub(super) mount_confs: String,
    /// Numbers of descriptors of the file systems: of images and connections to a gofer, and of
    /// files that gVisor writes to. They come in this order. With a gofer the pipe of its mounts
    /// follows.
    pub(super) connections: usize,
    pub(super) filestores: usize,
}

/// The descriptors that the process inherits.
#[derive(Debug)]
pub(super) struct Descriptors {
    pub(super) log: i32,
    pub(super) booted: i32,
    pub(super) control: i32,
    pub(super) spec: i32,
    /// Standard input, output and error of the first container, whose program does not use them.
    pub(super) stdio: [i32; 3],
    /// Pipe to the process that unmounts `/proc` after a byte.
    pub(super) proc_sync: i32,
    /// Descriptors that [`BootArgs`] counts.
    pub(super) file_systems: Vec<i32>,
}

impl BootArgs {
    /// Returns the arguments of runsc's last execution of itself: `runsc boot` in the final
    /// namespaces and root.
    pub(super) fn to_args(&self, fds: &Descriptors) -> Vec<String> {
        let (connections, others) = fds.file_systems.split_at(self.connections);
        let (filestores, mounts) = others.split_at(self.filestores);
        let mut args = self.flags.clone();
        args.push(format!("--log-fd={}", fds.log));
        args.push("boot".to_owned());
        args.extend(self.host_flags.iter().cloned());
        args.extend(self.limits.iter().cloned());
        args.extend([
            "--apply-caps=false".to_owned(),
            "--setup-root=false".to_owned(),
            format!("--bundle={}", self.bundle.display()),
            format!("--gofer-mount-confs={}", self.mount_confs),
            format!("--total-host-memory={}", self.memory),
            format!("--io-fds={}", numbers(connections)),
            format!("--start-sync-fd={}", fds.booted),
            format!("--controller-fd={}", fds.control),
            format!("--spec-fd={}", fds.spec),
            format!("--stdio-fds={}", numbers(&fds.stdio)),
            format!("--proc-mount-sync-fd={}", fds.proc_sync),
        ]);
        if !filestores.is_empty() {
            args.push(format!("--gofer-filestore-fds={}", numbers(filestores)));
        }
        args.extend(mounts.iter().map(|fd| format!("--mounts-fd={fd}")));
        args.push(self.sandbox.clone());
        args
    }
}

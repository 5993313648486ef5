//! The plan of a container's gofer, from runsc's record of the container when it last ran and from
//! the container's spec, and the gofer's arguments. The first container has a gofer too where it
//! holds volumes or has a root file system of the host.

use std::path::{Component, Path, PathBuf};

use nix::mount::MsFlags;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::record::{GOFERS, id_map, is_nothing, is_usual, namespace, oom_score, running};
use torpor_messages::wire::MAX_MESSAGE;

/// Most file systems of a container. gVisor takes 128 files with one call (pkg/urpc, `maxFiles`):
/// one for each file system, and some others.
const MOST_FILE_SYSTEMS: usize = 100;
/// Most bytes of the mounts, which are sent in one message to the process that becomes the gofer.
const MOST_TEXT: usize = MAX_MESSAGE / 4;

/// Known options of a container's mount: all that a kubelet sets, with the flag of mount(2) for
/// each (gVisor, runsc/specutils/fs.go). "rw" means that "ro" is not set.
const OPTIONS: [(&str, MsFlags); 7] = [
    ("rbind", MsFlags::MS_BIND.union(MsFlags::MS_REC)),
    ("bind", MsFlags::MS_BIND),
    ("rw", MsFlags::empty()),
    ("ro", MsFlags::MS_RDONLY),
    ("nosuid", MsFlags::MS_NOSUID),
    ("nodev", MsFlags::MS_NODEV),
    ("noexec", MsFlags::MS_NOEXEC),
];
/// Known options of a mount's propagation, which takes a call of mount(2) of its own.
const PROPAGATION: [(&str, MsFlags); 4] = [
    ("private", MsFlags::MS_PRIVATE),
    ("rprivate", MsFlags::MS_PRIVATE.union(MsFlags::MS_REC)),
    ("slave", MsFlags::MS_SLAVE),
    ("rslave", MsFlags::MS_SLAVE.union(MsFlags::MS_REC)),
];

/// A bind mount of a file or directory of the host in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bind {
    pub(super) source: PathBuf,
    /// The spec's destination with the container's links resolved.
    pub(super) destination: PathBuf,
    /// Flags of mount(2).
    flags: u64,
    propagation: u64,
}

impl Bind {
    pub(super) fn flags(&self) -> MsFlags {
        MsFlags::from_bits_truncate(self.flags)
    }

    pub(super) fn propagation(&self) -> Option<MsFlags> {
        Some(MsFlags::from_bits_truncate(self.propagation)).filter(|flags| !flags.is_empty())
    }

    /// `mount`: the spec's mount. `recorded`: the mount in runsc's record. None where the mount has
    /// a property that is unknown here.
    pub(super) fn new(mount: &Value, recorded: &Value) -> Option<Self> {
        let path = |of: &Value, key: &str| of.get(key)?.as_str().map(PathBuf::from);
        let (source, destination) = (path(mount, "source")?, path(recorded, "destination")?);
        let own_users = ["uidMappings", "gidMappings"]
            .iter()
            .any(|key| mount.get(key).is_some_and(|value| !is_nothing(value)));
        let plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
        let is_place = destination.has_root() && destination.components().all(plain);
        let same = path(recorded, "source")? == source;
        if !source.is_absolute() || !is_place || !same || own_users {
            return None;
        }
        let (mut flags, mut propagation) = (MsFlags::MS_BIND, MsFlags::empty());
        for option in options(mount) {
            let flag_in = |known: &[(&str, MsFlags)]| {
                let mut known = known.iter();
                known
                    .find(|(name, _)| *name == option)
                    .map(|(_, flag)| *flag)
            };
            match (flag_in(&OPTIONS), flag_in(&PROPAGATION)) {
                (Some(flag), _) => flags |= flag,
                (None, Some(kind)) => propagation |= kind,
                (None, None) => return None,
            }
        }
        if options(mount).any(|option| option == "rw") && flags.contains(MsFlags::MS_RDONLY) {
            return None;
        }
        Some(Self {
            source,
            destination,
            flags: flags.bits(),
            propagation: propagation.bits(),
        })
    }
}

fn options(mount: &Value) -> impl Iterator<Item = &str> {
    let options = mount.get("options").and_then(Value::as_array);
    options
        .into_iter()
        .flatten()
        .map(|option| option.as_str().unwrap_or_default())
}

/// Reports whether a gofer serves the mount. gVisor serves all other mounts by itself.
fn is_bind(mount: &Value) -> bool {
    let binds =
        mount["type"] == "bind" || options(mount).any(|option| ["bind", "rbind"].contains(&option));
    binds && mount.get("source").is_some_and(|source| source != "")
}

/// Returns the name of the file in which gVisor keeps the writes of a sandbox' containers. Each
/// root file system and each emptyDir has one (`runsc/boot.SelfFilestorePath`).
pub fn filestore(sandbox: &str) -> String {
    format!(".gvisor.filestore.{sandbox}")
}

/// Prefix of the only gVisor annotations that a sandbox' first container may have: those of its
/// pod's volumes.
const VOLUMES: &str = "dev.gvisor.spec.mount.";

/// Reports whether the record requests nothing of runsc beside the serving of files.
fn is_plain(record: &Value, is_first: bool) -> bool {
    let nothing = |pointer: &str| record.pointer(pointer).is_none_or(is_nothing);
    let none_of = [
        "/consoleSocket",
        "/spec/process/terminal",
        "/spec/hooks",
        "/spec/linux/devices",
    ];
    let propagation = record.pointer("/spec/linux/rootfsPropagation");
    let unknown =
        |key: &String| key.starts_with("dev.gvisor.") && !(is_first && key.starts_with(VOLUMES));
    let annotations = record
        .pointer("/spec/annotations")
        .and_then(Value::as_object);
    is_usual(record)
        && none_of.into_iter().all(nothing)
        && propagation.is_none_or(|kind| kind == "" || kind == "rslave")
        && !annotations.is_some_and(|all| all.keys().any(unknown))
}

/// Returns the container's bind mounts, in the order of the spec.
fn host_mounts(record: &Value, spec: &Value) -> Option<Vec<Bind>> {
    let mounts = spec.get("mounts")?.as_array()?;
    let recorded = record.pointer("/spec/mounts")?.as_array()?;
    if recorded.len() != mounts.len() || mounts.iter().any(|mount| mount["type"] == "erofs") {
        return None;
    }
    let both = mounts.iter().zip(recorded);
    let binds = both.filter(|(mount, _)| is_bind(mount));
    binds
        .map(|(mount, recorded)| Bind::new(mount, recorded))
        .collect()
}

/// The start of a container's next gofer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    root: PathBuf,
    /// True: the gofer does not write to the root on the host.
    read_only: bool,
    /// Directories in which gVisor has a file for writes, and the file's name.
    filestores: Vec<PathBuf>,
    filestore: String,
    binds: Vec<Bind>,
    /// Use of the file systems, as an argument of runsc.
    pub(crate) mount_confs: String,
    pub(super) uid_map: String,
    pub(super) gid_map: String,
    /// User and group ids of the sandbox' processes.
    pub(super) user: (u32, u32),
    pub(super) oom_score: Option<i64>,
    record: Value,
}

impl Plan {
    /// `record`: runsc's record of the container. `spec`: the OCI spec of its bundle. None where a
    /// part of either is unknown here: runsc must begin the gofer.
    pub(crate) fn new(record: &Value, spec: &Value, sandbox: &str) -> Option<Self> {
        let is_first = record.get("id")? == sandbox;
        // runsc makes a user namespace where the pod has none, and records it.
        let own_users = namespace(record, "user")?.is_none();
        let root = PathBuf::from(spec.pointer("/root/path")?.as_str()?);
        if !is_plain(record, is_first) || !own_users || !root.is_absolute() {
            return None;
        }
        let host_mounts = host_mounts(record, spec)?;
        let confs = confs(record.get(GOFERS)?)?;
        let (of_root, of_mounts) = confs.split_first()?;
        if of_mounts.len() != host_mounts.len() {
            return None;
        }
        let (mut filestores, mut binds) = (Vec::new(), Vec::new());
        match of_root {
            Conf::Served => {}
            Conf::ServedBelowFile => filestores.push(root.clone()),
            Conf::InFile => return None,
        }
        for (conf, bind) in of_mounts.iter().zip(host_mounts) {
            match conf {
                Conf::Served => binds.push(bind),
                Conf::InFile if is_first => filestores.push(bind.source),
                Conf::InFile | Conf::ServedBelowFile => return None,
            }
        }
        let text = serde_json::to_string(&(&binds, &filestores)).ok()?;
        if binds.len() + filestores.len() >= MOST_FILE_SYSTEMS || text.len() > MOST_TEXT {
            return None;
        }
        let names: Vec<&str> = confs.iter().map(|conf| conf.name()).collect();
        let read_only = spec.pointer("/root/readonly") == Some(&json!(true));
        let number = |pointer: &str| u32::try_from(record.pointer(pointer)?.as_u64()?).ok();
        Some(Self {
            read_only: read_only || *of_root == Conf::ServedBelowFile,
            root,
            filestores,
            filestore: filestore(sandbox),
            binds,
            mount_confs: names.join(","),
            uid_map: id_map(record, "uidMappings")?,
            gid_map: id_map(record, "gidMappings")?,
            user: (number("/sandbox/uid")?, number("/sandbox/gid")?),
            oom_score: oom_score(record),
            record: record.clone(),
        })
    }

    /// Returns the number of file systems that the gofer serves.
    pub(super) fn file_systems(&self) -> usize {
        1 + self.binds.len()
    }

    pub(super) fn serve_args(
        &self,
        flags: Vec<String>,
        bundle: &Path,
        container: &str,
    ) -> ServeArgs {
        ServeArgs {
            flags,
            bundle: bundle.to_owned(),
            container: container.to_owned(),
            mount_confs: self.mount_confs.clone(),
            root: self.root.clone(),
            read_only: self.read_only,
            filestores: self.filestores.clone(),
            filestore: self.filestore.clone(),
            binds: self.binds.clone(),
        }
    }

    /// Returns the number of files that gVisor writes to.
    pub(super) fn filestores(&self) -> usize {
        self.filestores.len()
    }

    /// Returns runsc's record of the container when it last ran.
    pub(super) fn record(&self) -> &Value {
        &self.record
    }

    /// Returns the record for runsc of the running container. `gofer`, `sentry`: ids of the
    /// container's gofer and of its sandbox' sentry.
    pub(super) fn served(&self, gofer: i32, sentry: i32) -> Value {
        let mut record = running(&self.record, sentry);
        record["goferPid"] = json!(gofer);
        record
    }
}

/// Use of one of the file systems.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Conf {
    /// A gofer serves the file system, and nothing is over it.
    Served,
    /// A gofer serves the file system. Writes go to a file in it.
    ServedBelowFile,
    /// All content is in a file in the file system: a volume that the sandbox has for itself.
    InFile,
}

impl Conf {
    /// Parses an entry of runsc's record. None: an unknown use.
    fn new(recorded: &Value) -> Option<Self> {
        let number = |key: &str| recorded.get(key)?.as_u64();
        match (number("lower")?, number("upper")?, recorded.get("size")) {
            (1, 0, None) => Some(Self::Served),
            (1, 2, None) => Some(Self::ServedBelowFile),
            (0, 2, None) => Some(Self::InFile),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Served => "lisafs:none",
            Self::ServedBelowFile => "lisafs:self",
            Self::InFile => "none:self",
        }
    }
}

/// Parses all entries of runsc's record. None where one has an unknown use.
fn confs(recorded: &Value) -> Option<Vec<Conf>> {
    recorded.as_array()?.iter().map(Conf::new).collect()
}

/// Arguments of a process that becomes a gofer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ServeArgs {
    /// Flags of all commands of runsc.
    pub(super) flags: Vec<String>,
    pub(super) bundle: PathBuf,
    pub(super) container: String,
    pub(super) mount_confs: String,
    pub(super) root: PathBuf,
    pub(super) read_only: bool,
    /// Directories in which a file named `filestore` is made.
    pub(super) filestores: Vec<PathBuf>,
    pub(super) filestore: String,
    /// In the order of the spec.
    pub(super) binds: Vec<Bind>,
}

/// The descriptors that a gofer inherits.
#[derive(Debug)]
pub(super) struct Descriptors {
    pub(super) log: i32,
    pub(super) spec: i32,
    pub(super) mounts: i32,
    pub(super) rpc: i32,
    pub(super) connections: Vec<i32>,
    /// Pipe to the process that unmounts `/proc` after a byte.
    pub(super) proc_sync: i32,
}

impl ServeArgs {
    /// Returns the arguments of runsc's last execution of itself: `runsc gofer` in the final
    /// namespaces and root.
    pub(super) fn to_args(&self, fds: &Descriptors) -> Vec<String> {
        let mut args = self.flags.clone();
        args.push(format!("--log-fd={}", fds.log));
        args.extend([
            "gofer".to_owned(),
            "--apply-caps=false".to_owned(),
            "--setup-root=false".to_owned(),
            format!("--bundle={}", self.bundle.display()),
            format!("--gofer-mount-confs={}", self.mount_confs),
            format!("--io-fds={}", numbers(&fds.connections)),
            format!("--mounts-fd={}", fds.mounts),
            format!("--rpc-fd={}", fds.rpc),
            format!("--spec-fd={}", fds.spec),
            format!("--proc-mount-sync-fd={}", fds.proc_sync),
            self.container.clone(),
        ]);
        args
    }
}

/// Returns several descriptors as one argument of runsc.
pub(crate) fn numbers(fds: &[i32]) -> String {
    let numbers: Vec<String> = fds.iter().map(i32::to_string).collect();
    numbers.join(",")
}

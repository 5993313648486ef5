//! What a container's gofer is given, told from what runsc recorded of the container when it last ran, and from its spec. The first container has one too where it
//! holds volumes or has a root file system of the host's.

use std::path::{Component, Path, PathBuf};

use nix::mount::MsFlags;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::plan::{id_map, is_nothing, is_usual, namespace, numbers, oom_score, running};
use torpor_runsc::keeper::MAX_MESSAGE;

/// Of runsc's record: how each of the file systems that a gofer may serve is used, the root first (gVisor, `runsc/specutils.GoferMountConf`).
pub(crate) const GOFERS: &str = "goferMountConfs";

/// gVisor takes 128 files with one call (pkg/urpc, `maxFiles`): these, and some others.
const MOST_FILE_SYSTEMS: usize = 100;
/// Bytes of the mounts, as they are said to who becomes the gofer in one message.
const MOST_TEXT: usize = MAX_MESSAGE / 2;

/// What a container's mount may be told: all that a kubelet says, and what of mount(2) goes with it (gVisor, runsc/specutils/fs.go). "rw" is said of what is not "ro".
const OPTIONS: [(&str, MsFlags); 7] = [
    ("rbind", MsFlags::MS_BIND.union(MsFlags::MS_REC)),
    ("bind", MsFlags::MS_BIND),
    ("rw", MsFlags::empty()),
    ("ro", MsFlags::MS_RDONLY),
    ("nosuid", MsFlags::MS_NOSUID),
    ("nodev", MsFlags::MS_NODEV),
    ("noexec", MsFlags::MS_NOEXEC),
];
/// And what is said to the kernel by itself.
const PROPAGATION: [(&str, MsFlags); 4] = [
    ("private", MsFlags::MS_PRIVATE),
    ("rprivate", MsFlags::MS_PRIVATE.union(MsFlags::MS_REC)),
    ("slave", MsFlags::MS_SLAVE),
    ("rslave", MsFlags::MS_SLAVE.union(MsFlags::MS_REC)),
];

/// What of the host's is seen at a place of the container's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bind {
    pub(super) source: PathBuf,
    /// Where the container's links lead from what the spec names.
    pub(super) destination: PathBuf,
    /// Of mount(2).
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

    /// `mount`: of the spec. `recorded`: the same of runsc's record. None if it is told anything that is not known.
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
            let of = |known: &[(&str, MsFlags)]| {
                let mut known = known.iter();
                known
                    .find(|(name, _)| *name == option)
                    .map(|(_, flag)| *flag)
            };
            match (of(&OPTIONS), of(&PROPAGATION)) {
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

/// Whether a gofer serves it. Everything else is gVisor's own.
fn is_bind(mount: &Value) -> bool {
    let binds =
        mount["type"] == "bind" || options(mount).any(|option| ["bind", "rbind"].contains(&option));
    binds && mount.get("source").is_some_and(|source| source != "")
}

/// gVisor keeps what a sandbox' container writes in a file of this name in its root file system, and in each emptyDir (`runsc/boot.SelfFilestorePath`).
pub fn filestore(sandbox: &str) -> String {
    format!(".gvisor.filestore.{sandbox}")
}

/// What of a sandbox' first container may be said to gVisor: of its pod's volumes.
const VOLUMES: &str = "dev.gvisor.spec.mount.";

/// Whether nothing is asked for that runsc would have to do, or say, beside its files.
fn is_plain(record: &Value, is_first: bool) -> bool {
    let nothing = |pointer: &str| record.pointer(pointer).is_none_or(is_nothing);
    let none_of = [
        "/consoleSocket",
        "/spec/process/terminal",
        "/spec/hooks",
        "/spec/linux/devices",
    ];
    let propagation = record.pointer("/spec/linux/rootfsPropagation");
    let said =
        |key: &String| key.starts_with("dev.gvisor.") && !(is_first && key.starts_with(VOLUMES));
    let annotations = record
        .pointer("/spec/annotations")
        .and_then(Value::as_object);
    is_usual(record)
        && none_of.into_iter().all(nothing)
        && propagation.is_none_or(|kind| kind == "" || kind == "rslave")
        && !annotations.is_some_and(|all| all.keys().any(said))
}

/// What of the host's it mounts, in the order of the spec.
fn of_host(record: &Value, spec: &Value) -> Option<Vec<Bind>> {
    let mounts = spec.get("mounts")?.as_array()?;
    let recorded = record.pointer("/spec/mounts")?.as_array()?;
    if recorded.len() != mounts.len() || mounts.iter().any(|mount| mount["type"] == "erofs") {
        return None;
    }
    let both = mounts.iter().zip(recorded);
    let of_host = both.filter(|(mount, _)| is_bind(mount));
    of_host
        .map(|(mount, recorded)| Bind::new(mount, recorded))
        .collect()
}

/// How a container's next gofer begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    root: PathBuf,
    /// What is written to it is not written to the host's.
    read_only: bool,
    /// In which directories gVisor has a file for what is written, and its name.
    filestores: Vec<PathBuf>,
    filestore: String,
    binds: Vec<Bind>,
    /// As runsc says them.
    pub(crate) mount_confs: String,
    pub(super) uid_map: String,
    pub(super) gid_map: String,
    /// User and group that the sandbox runs as.
    pub(super) user: (u32, u32),
    pub(super) oom_score: Option<i64>,
    record: Value,
}

impl Plan {
    /// `record`: runsc's, of the container. `spec`: of its bundle. None where anything is not as this module knows it: runsc knows.
    pub(crate) fn new(record: &Value, spec: &Value, sandbox: &str) -> Option<Self> {
        let is_first = record.get("id")? == sandbox;
        // runsc makes a user namespace where the pod has none, and records it.
        let own_users = namespace(record, "user")?.is_none();
        let root = PathBuf::from(spec.pointer("/root/path")?.as_str()?);
        if !is_plain(record, is_first) || !own_users || !root.is_absolute() {
            return None;
        }
        let of_host = of_host(record, spec)?;
        let confs = confs(record.get(GOFERS)?)?;
        let (of_root, of_mounts) = confs.split_first()?;
        if of_mounts.len() != of_host.len() {
            return None;
        }
        let (mut filestores, mut binds) = (Vec::new(), Vec::new());
        match of_root {
            Conf::Served => {}
            Conf::ServedBelowFile => filestores.push(root.clone()),
            Conf::InFile => return None,
        }
        for (conf, bind) in of_mounts.iter().zip(of_host) {
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

    /// How many file systems a gofer serves.
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

    /// How many files gVisor writes to.
    pub(super) fn filestores(&self) -> usize {
        self.filestores.len()
    }

    /// runsc's record of the container when it last ran.
    pub(super) fn record(&self) -> &Value {
        &self.record
    }

    /// The same of the container that this gofer serves, in the sandbox that has this process.
    pub(super) fn served(&self, gofer: i32, sentry: i32) -> Value {
        let mut record = running(&self.record, sentry);
        record["goferPid"] = json!(gofer);
        record
    }
}

/// How one of the file systems is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Conf {
    /// By a gofer, and nothing is over it.
    Served,
    /// The same, and what is written is in a file in it.
    ServedBelowFile,
    /// All that is in it is in a file in it: a volume that a sandbox has for itself.
    InFile,
}

impl Conf {
    /// By what runsc records.
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

/// None if one is used in another way.
fn confs(recorded: &Value) -> Option<Vec<Conf>> {
    recorded.as_array()?.iter().map(Conf::new).collect()
}

/// What becomes a gofer is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ServeArgs {
    /// Of all commands of runsc's.
    pub(super) flags: Vec<String>,
    pub(super) bundle: PathBuf,
    pub(super) container: String,
    pub(super) mount_confs: String,
    pub(super) root: PathBuf,
    pub(super) read_only: bool,
    /// Directories in which a file of this name is made.
    pub(super) filestores: Vec<PathBuf>,
    pub(super) filestore: String,
    /// In the order of the spec.
    pub(super) binds: Vec<Bind>,
}

/// The descriptors that it inherits.
#[derive(Debug)]
pub(super) struct Descriptors {
    pub(super) log: i32,
    pub(super) spec: i32,
    pub(super) mounts: i32,
    pub(super) rpc: i32,
    pub(super) connections: Vec<i32>,
    /// A byte in it has `/proc` unmounted.
    pub(super) proc_sync: i32,
}

impl ServeArgs {
    /// The words of `runsc gofer` once the process is where it is to be, as runsc executes itself for the last time.
    pub(super) fn words(&self, fds: &Descriptors) -> Vec<String> {
        let mut words = self.flags.clone();
        words.push(format!("--log-fd={}", fds.log));
        words.extend([
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
        words
    }
}

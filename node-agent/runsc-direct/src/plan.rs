//! What a sandbox' first process is given, told from what runsc recorded of it when it last ran.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use torpor_records::RunscRecord;

use super::gofer;

/// Releases of gVisor of which it was read that they begin a restored sandbox as this module does
/// (runsc/sandbox/sandbox.go, runsc/sandbox/network.go, runsc/cmd/sentry/sentrycmd), and its other
/// containers (runsc/container/container.go, runsc/cmd/gofer.go, runsc/cmd/sandboxsetup,
/// runsc/config). Sandboxes of all others are begun by their own runsc. As `runsc --version` says
/// them: one that Google built, and the development cluster's.
const KNOWN_RELEASES: [&str; 2] = ["release-20260905.0", "release-20260905.0-torpor"];

/// Whether sandboxes of this release of gVisor may be begun without its runsc.
pub fn is_known_release(release: &str) -> bool {
    KNOWN_RELEASES.contains(&release)
}

/// What a record says of the sandbox where nothing is configured that would have to be done as runsc does it (`runsc/config.Config.MetricMetadata`).
const USUAL: [(&str, &str); 5] = [
    ("platform", "systrap"),
    ("network", "sandbox"),
    ("fsmode", "directfs"),
    ("coretags", "false"),
    ("experiment", ""),
];

/// Of a root file system that is an EROFS image, with nothing over it: no gofer (gVisor, `runsc/specutils.GoferMountConf`).
const EROFS_ALONE: &str = r#"[{"lower":2,"upper":0}]"#;

/// runsc leaves IPv6 addresses on the pod's links by it.
const NO_IPV6: &str = "/spec/linux/sysctl/net.ipv6.conf.all.disable_ipv6";

/// The root file system of its first container.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Root {
    /// An EROFS image, which gVisor reads by itself.
    Image(PathBuf),
    /// It has a gofer.
    Served(Box<gofer::Plan>),
}

impl Root {
    /// How it and the volumes are used, as runsc says it.
    pub(super) fn mount_confs(&self) -> &str {
        match self {
            Self::Image(_) => "erofs:none",
            Self::Served(plan) => &plan.mount_confs,
        }
    }
}

/// How its next process begins.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) root: Root,
    pub(super) network_namespace: PathBuf,
    /// Lines of `/proc/<pid>/uid_map` and `gid_map` (user_namespaces(7)).
    pub(super) uid_map: String,
    pub(super) gid_map: String,
}

/// The lowest `oom_score_adj` of all containers but the first, which the sandbox' process has
/// (`runsc/container.adjustSandboxOOMScoreAdj`).
pub(super) fn lowest_oom_score(record: &RunscRecord) -> Option<i64> {
    let scores = record.containers.values().filter_map(oom_score);
    scores.min()
}

/// How the sandbox' next process begins; `spec`: of the first container's bundle. None where the
/// record has anything that this module does not know: then runsc begins it.
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
        None => Root::Served(Box::new(gofer::Plan::new(record, spec, sandbox)?)),
    };
    Some(Plan {
        root,
        network_namespace: namespace(record, "network")??.into(),
        uid_map: id_map(record, "uidMappings")?,
        gid_map: id_map(record, "gidMappings")?,
    })
}

/// The first container's state for runsc, of the sandbox that has this process now, and this gofer
/// if any.
pub(super) fn running_sandbox(record: &RunscRecord, pid: i32, gofer: Option<i32>) -> Value {
    let mut record = running(&record.sandbox, pid);
    record["goferPid"] = json!(gofer.unwrap_or_default());
    record
}

/// The EROFS image that is the root file system of a first container without a gofer.
fn image(record: &Value) -> Option<PathBuf> {
    let alone = serde_json::from_str::<Value>(EROFS_ALONE).ok()?;
    let annotation = |name: &str| {
        let annotations = record.pointer("/spec/annotations")?;
        annotations
            .get(format!("dev.gvisor.spec.rootfs.{name}"))?
            .as_str()
    };
    let is_alone = record.get(gofer::GOFERS) == Some(&alone)
        && record.get("goferPid") == Some(&json!(0))
        && annotation("type") == Some("erofs")
        && annotation("overlay").is_none();
    is_alone
        .then(|| annotation("source"))
        .flatten()
        .map(PathBuf::from)
}

/// The record of a container, for runsc, in the sandbox that has this process now.
pub(super) fn running(record: &Value, pid: i32) -> Value {
    let mut record = record.clone();
    let mut set = |pointer: &str, value: Value| {
        if let Some(place) = record.pointer_mut(pointer) {
            *place = value;
        }
    };
    set("/status", json!("running"));
    set("/sandbox/pid", json!(pid));
    set("/sandbox/checkpointed", json!(false));
    set("/sandbox/restored", json!(true));
    record
}

fn text<'a>(record: &'a Value, pointer: &str) -> Option<&'a str> {
    record.pointer(pointer)?.as_str()
}

/// Whether its sandbox is of a release that is known, and configured as the modules here know it.
pub(super) fn is_usual(record: &Value) -> bool {
    let said = |key: &str| text(record, &format!("/sandbox/metricMetadata/{key}"));
    said("version").is_some_and(is_known_release)
        && USUAL.iter().all(|(key, value)| said(key) == Some(value))
}

/// What Go writes of what is not there.
pub(super) fn is_nothing(value: &Value) -> bool {
    [json!(null), json!(false), json!(""), json!({}), json!([])].contains(value)
}

pub(super) fn oom_score(record: &Value) -> Option<i64> {
    record.pointer("/spec/process/oomScoreAdj")?.as_i64()
}

/// The path of the namespace of this kind; none if it is a new one. None if there is not exactly one.
pub(super) fn namespace<'a>(record: &'a Value, kind: &str) -> Option<Option<&'a str>> {
    let all = record.pointer("/spec/linux/namespaces")?.as_array()?;
    let mut of_kind = all.iter().filter(|namespace| namespace["type"] == kind);
    let (namespace, others) = (of_kind.next()?, of_kind.next());
    let path = namespace.get("path").and_then(Value::as_str);
    others
        .is_none()
        .then_some(path.filter(|path| !path.is_empty()))
}

/// As `/proc/<pid>/uid_map` takes them.
pub(super) fn id_map(record: &Value, name: &str) -> Option<String> {
    let mappings = record.pointer("/spec/linux")?.get(name)?.as_array()?;
    let line = |mapping: &Value| {
        let number = |key: &str| mapping.get(key)?.as_u64();
        let (inside, outside) = (number("containerID")?, number("hostID")?);
        Some(format!("{inside} {outside} {}\n", number("size")?))
    };
    let map = mappings.iter().map(line).collect::<Option<String>>()?;
    (!map.is_empty()).then_some(map)
}

/// What `runsc boot` is told, beside the numbers of its descriptors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BootArgs {
    /// Of all commands of runsc's.
    pub(super) flags: Vec<String>,
    pub(super) bundle: PathBuf,
    pub(super) sandbox: String,
    /// Bytes that the machine has.
    pub(super) memory: u64,
    /// What of it the Pod may use, in runsc's words.
    pub(super) limits: Vec<String>,
    /// What it would read from `/sys`, where it is not any more.
    pub(super) host_flags: Vec<String>,
    /// Of its first container, as runsc says them.
    pub(super) mount_confs: String,
    /// Descriptors of its file systems: images and connections to a gofer, then files that it writes to, then, if there is a gofer, what tells its mounts.
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
    /// Standard input, output and error of the first container, whose program says nothing.
    pub(super) stdio: [i32; 3],
    /// A byte in it has `/proc` unmounted.
    pub(super) proc_sync: i32,
    /// As [`BootArgs`] counts them.
    pub(super) file_systems: Vec<i32>,
}

impl BootArgs {
    /// The words of `runsc boot` once the process is where it is to be, as runsc executes itself for the last time.
    pub(super) fn words(&self, fds: &Descriptors) -> Vec<String> {
        let (connections, others) = fds.file_systems.split_at(self.connections);
        let (filestores, mounts) = others.split_at(self.filestores);
        let mut words = self.flags.clone();
        words.push(format!("--log-fd={}", fds.log));
        words.push("boot".to_owned());
        words.extend(self.host_flags.iter().cloned());
        words.extend(self.limits.iter().cloned());
        words.extend([
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
            words.push(format!("--gofer-filestore-fds={}", numbers(filestores)));
        }
        words.extend(mounts.iter().map(|fd| format!("--mounts-fd={fd}")));
        words.push(self.sandbox.clone());
        words
    }
}

/// As runsc takes several descriptors.
pub(super) fn numbers(fds: &[i32]) -> String {
    let numbers: Vec<String> = fds.iter().map(i32::to_string).collect();
    numbers.join(",")
}

//! Sandboxes that Torpor begins by itself, without runsc's command.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{read_link, read_to_string};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use torpor_runsc::command::NodeRunsc;
use torpor_tests::case::{Case, case, uid};
use torpor_tests::pods::{COUNT, PYTHON, pod, shell, with};
use torpor_tests::wait;

/// Lines of `/proc/<pid>/status` about a process's rights and owner.
const STATUS: [&str; 13] = [
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
    "THP_enabled",
];
/// Lines with the process's number in each PID namespace, and with those of its group and session.
const NUMBERS: [&str; 3] = ["NSpid", "NSpgid", "NSsid"];
const NAMESPACES: [&str; 8] = ["cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"];
/// Time for temporary connections to a sandbox to end.
const SOON: Duration = Duration::from_secs(20);

fn read(pid: i32, name: &str) -> anyhow::Result<String> {
    let path = format!("/proc/{pid}/{name}");
    read_to_string(&path).with_context(|| format!("cannot read {path}"))
}

/// Returns all that the kernel reports about how a process is confined.
fn confinement(pid: i32) -> anyhow::Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    for line in read(pid, "status")?.lines() {
        let (name, value) = line.split_once(':').context("a line of status")?;
        if STATUS.contains(&name) {
            found.insert(name.to_owned(), value.trim().to_owned());
        }
        if NUMBERS.contains(&name) {
            // The innermost number is the one that the process sees.
            let numbers: Vec<&str> = value.split_whitespace().collect();
            let seen = numbers.last().unwrap_or(&"");
            found.insert(name.to_owned(), format!("{seen} of {}", numbers.len()));
        }
    }
    for name in [
        "limits",
        "oom_score_adj",
        "uid_map",
        "gid_map",
        "setgroups",
        "cgroup",
    ] {
        found.insert(name.to_owned(), read(pid, name)?);
    }
    // Not every kernel has all of these files.
    for name in ["loginuid", "coredump_filter", "attr/current"] {
        found.insert(name.to_owned(), read(pid, name).unwrap_or_default());
    }
    // Numbers of mounts and devices are assigned anew.
    let mounts: Vec<String> = (read(pid, "mountinfo")?.lines())
        .map(|line| line.split(' ').skip(3).collect::<Vec<_>>().join(" "))
        .collect();
    found.insert("mountinfo".to_owned(), mounts.join("\n"));
    for name in ["exe", "cwd", "root"] {
        let target = read_link(format!("/proc/{pid}/{name}"))?;
        found.insert(name.to_owned(), target.display().to_string());
    }
    for name in NAMESPACES {
        let of = |pid: &str| read_link(format!("/proc/{pid}/ns/{name}"));
        let is_hosts = of(&pid.to_string())? == of("self")?;
        found.insert(format!("ns/{name}"), format!("the host's: {is_hosts}"));
    }
    Ok(found)
}

/// Returns the signals that every thread of the process blocks, as inherited from the process that
/// began it.
///
/// gVisor has threads that block some signals; Go chooses these threads, and the first one may be
/// among them.
fn blocked_signals(pid: i32) -> anyhow::Result<u64> {
    let mut blocked = u64::MAX;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that has ended meanwhile does not count.
        let Ok(status) = read_to_string(thread?.path().join("status")) else {
            continue;
        };
        blocked &= signals(&status, "SigBlk:")?;
    }
    Ok(blocked)
}

/// Signals 32 and 33, which the C library keeps for itself. glibc's `posix_spawn` leaves them
/// ignored in the new process (`sysdeps/unix/sysv/linux/spawni.c`), its `fork` does not; which of
/// the two starts a command depends on the command's settings.
const OF_C_LIBRARY: u64 = 0b11 << 31;

/// Returns the signals that the process ignores, as inherited from the process that began it.
fn ignored_signals(pid: i32) -> anyhow::Result<u64> {
    let ignored = signals(&read(pid, "status")?, "SigIgn:")?;
    Ok(ignored & !OF_C_LIBRARY)
}

/// Returns a mask of signals from the text of `/proc/<pid>/status`.
fn signals(status: &str, name: &str) -> anyhow::Result<u64> {
    let mask = status.lines().find_map(|line| line.strip_prefix(name));
    let mask = mask.with_context(|| format!("no line {name}"))?;
    Ok(u64::from_str_radix(mask.trim(), 16)?)
}

/// Returns the number of open files of a process, by kind.
///
/// Files that gVisor makes on demand do not count. Neither do, in the sandbox's first process, the
/// container's files, which its program has open at the moment.
fn open_files(pid: i32) -> anyhow::Result<BTreeMap<String, usize>> {
    let serves = read(pid, "cmdline")?.starts_with("runsc-gofer");
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let target = read_link(entry?.path()).unwrap_or_default();
        let target = target.display().to_string();
        // The kind of a socket or pipe has no number.
        let kind = target.split('[').next().unwrap_or_default();
        let is_container = !serves && kind.starts_with("/root");
        if !is_container && !kind.starts_with("anon_inode") && !kind.is_empty() {
            *found.entry(kind.to_owned()).or_default() += 1;
        }
    }
    Ok(found)
}

/// Flags that are not compared.
///
/// Some tell runsc's own process to confine itself; Torpor's process is confined before it executes
/// runsc, and [`confinement`] compares the results. The others are descriptors that only slow ends
/// need (gVisor, `pkg/pinring`).
const NOT_COMPARED: [&str; 9] = [
    "--apply-caps",
    "--setup-root",
    "--sync-chroot-fd",
    "--proc-mount-sync-fd",
    "--product-name",
    "--host-thp-shmem-enabled",
    "--host-thp-defrag",
    "--pin-ring-fd",
    "--sync-sentry-exit-fd",
];

/// Returns the flags of `runsc boot`, with the number of descriptors instead of their numbers.
///
/// Descriptors that do not exist are left out, and so is the log.
fn flags(pid: i32) -> anyhow::Result<BTreeMap<String, String>> {
    let words = read(pid, "cmdline")?;
    // runsc passes some values in a word of their own.
    let words = (words.replace("-memory\0", "-memory=")).replace("--bundle\0", "--bundle=");
    let mut found = BTreeMap::new();
    let mut descriptors: BTreeMap<&str, usize> = BTreeMap::new();
    for word in words.split('\0') {
        let (name, value) = word.split_once('=').unwrap_or((word, "true"));
        let is_descriptor = name.ends_with("-fd") || name.ends_with("-fds");
        match (name, value) {
            ("" | "--log", _) => {}
            _ if NOT_COMPARED.contains(&name) => {}
            (_, "-1") if is_descriptor => {}
            _ if is_descriptor => {
                *descriptors.entry(name).or_default() += value.split(',').count();
            }
            _ => drop(found.insert(name.to_owned(), value.to_owned())),
        }
    }
    let counted = descriptors.into_iter();
    found.extend(counted.map(|(name, count)| (name.to_owned(), count.to_string())));
    Ok(found)
}

/// Returns runsc's record of a container, without its times and processes.
fn record(case: &Case, uid: &str, id: &str) -> anyhow::Result<Value> {
    let record = case.node.sandbox_of(uid)?;
    let sandbox = record.sandbox.as_str();
    let root = NodeRunsc::new(&case.node.config).root_of(&record.sandbox);
    let path = root.join(format!("{id}_sandbox:{sandbox}.state"));
    let mut record: Value = serde_json::from_str(&read_to_string(path)?)?;
    record["createdAt"] = json!(null);
    record["goferPid"] = json!(null);
    record["sandbox"]["startTime"] = json!(null);
    record["sandbox"]["pid"] = json!(null);
    Ok(record)
}

/// Returns the path of Torpor's file from which the sandbox's next processes are begun.
fn kept(case: &Case, uid: &str) -> anyhow::Result<PathBuf> {
    let record = case.node.sandbox_of(uid)?;
    Ok(case
        .node
        .records
        .pod_dir(&record.sandbox)
        .join("runsc.json"))
}

/// Reports whether runsc began the process.
///
/// runsc's processes drop their capabilities themselves; Torpor's have done so before they execute
/// runsc.
fn is_begun_by_runsc(pid: i32) -> anyhow::Result<bool> {
    let words = read(pid, "cmdline")?;
    Ok(!words.split('\0').any(|word| word == "--apply-caps=false"))
}

/// Starts a Pod with two containers; returns its UID.
///
/// Container `a` writes to its root and has read-only mounts: a directory and a file, and that file
/// at a path that is a link to `/usr/sbin`. The root of `b` is read-only. With `volumes` they share
/// one on disk and one in memory, of which the pause container holds one.
async fn started(case: &Case, volumes: bool) -> anyhow::Result<String> {
    let config = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "config" }, "data": { "key": "value" },
    });
    case.create(config).await?;
    let mut mounts = vec![
        json!({ "name": "config", "mountPath": "/config" }),
        json!({ "name": "config", "mountPath": "/etc/rmt", "subPath": "key" }),
    ];
    let mut shared = vec![json!({ "name": "config", "configMap": { "name": "config" } })];
    let mut of_both = Vec::new();
    if volumes {
        of_both.push(json!({ "name": "disk", "mountPath": "/disk" }));
        of_both.push(json!({ "name": "memory", "mountPath": "/memory" }));
        shared.push(json!({ "name": "disk", "emptyDir": {} }));
        shared.push(json!({ "name": "memory", "emptyDir": { "medium": "Memory" } }));
        mounts.extend(of_both.iter().cloned());
    }
    let counts = json!({ "image": PYTHON, "volumeMounts": mounts });
    let read_only = json!({
        "securityContext": { "readOnlyRootFilesystem": true }, "volumeMounts": of_both,
    });
    let spec = json!({
        "containers": [with(shell("a", COUNT), counts), with(shell("b", "sleep 100000"), read_only)],
        "volumes": shared,
    });
    Ok(uid(&case.start(pod("p", spec)).await?))
}

/// Properties of a sandbox's process that are compared.
struct Properties {
    confinement: BTreeMap<String, String>,
    network: PathBuf,
    flags: BTreeMap<String, String>,
    ignored: u64,
    open: BTreeMap<String, usize>,
}

impl Properties {
    fn of(pid: i32) -> anyhow::Result<Self> {
        Ok(Self {
            confinement: confinement(pid)?,
            network: read_link(format!("/proc/{pid}/ns/net"))?,
            flags: flags(pid)?,
            ignored: ignored_signals(pid)?,
            open: open_files(pid)?,
        })
    }

    fn is_confined_as(&self, by_runsc: &Self) -> anyhow::Result<()> {
        for (name, value) in &by_runsc.confinement {
            let own = self.confinement.get(name).map(String::as_str);
            let own = own.unwrap_or_default();
            ensure!(own == value, "{name}: {own}, by runsc {value}");
        }
        let (own, flags) = (&self.flags, &by_runsc.flags);
        ensure!(own == flags, "{own:?}, by runsc {flags:?}");
        let (own, ignored) = (&self.ignored, &by_runsc.ignored);
        ensure!(
            own == ignored,
            "it ignores signals {own:x}, by runsc {ignored:x}"
        );
        Ok(())
    }
}

/// Returns the sandbox's first process and its gofers: of `a`, of `b`, and of the pause container
/// if that holds volumes.
fn processes(case: &Case, uid: &str) -> anyhow::Result<Vec<i32>> {
    let gofer = |name: &str| case.node.gofer_of(uid, name);
    let sandbox = case.node.sandbox_of(uid)?.sandbox;
    let all = case.node.sandbox_processes(uid)?.into_iter();
    let of_pause = all.filter(|process| {
        process.command.starts_with("runsc-gofer") && process.command.contains(sandbox.as_str())
    });
    let mut found = vec![case.node.sentry(uid)?.pid, gofer("a")?.pid, gofer("b")?.pid];
    found.extend(of_pause.map(|process| process.pid));
    Ok(found)
}

fn all_properties(case: &Case, uid: &str) -> anyhow::Result<Vec<Properties>> {
    processes(case, uid)?
        .into_iter()
        .map(Properties::of)
        .collect()
}

/// Returns runsc's records of the sandbox's containers.
fn records(case: &Case, uid: &str) -> anyhow::Result<Vec<Value>> {
    let sandbox = case.node.sandbox_of(uid)?.sandbox;
    let mut ids = vec![sandbox.as_str().to_owned()];
    for name in ["a", "b"] {
        ids.push(case.node.container(uid, name)?.id.as_str().to_owned());
    }
    ids.iter().map(|id| record(case, uid, id)).collect()
}

/// Returns mode and owner of the files in which gVisor keeps what the container `a` writes, and
/// what is in a volume.
fn filestores(case: &Case, uid: &str) -> anyhow::Result<Vec<[u32; 3]>> {
    let record = case.node.sandbox_of(uid)?;
    let spec = case.node.records.spec(&case.node.container(uid, "a")?.id)?;
    let root = spec["root"]["path"].as_str().context("it has a root")?;
    let of_volumes = record.volumes.iter().filter(|volume| volume.name == "disk");
    let dirs = of_volumes.map(|volume| volume.source.as_path());
    let files = [Path::new(root)].into_iter().chain(dirs).map(|dir| {
        let path = dir.join(format!(".gvisor.filestore.{}", record.sandbox.as_str()));
        let file = std::fs::symlink_metadata(&path).with_context(|| format!("{path:?}"))?;
        Ok([file.mode(), file.uid(), file.gid()])
    });
    files.collect()
}

/// Reports for each of the sandbox's processes whether runsc began it.
fn begun_by_runsc(case: &Case, uid: &str) -> anyhow::Result<Vec<bool>> {
    let processes = processes(case, uid)?.into_iter();
    processes.map(is_begun_by_runsc).collect()
}

/// Compares a sandbox with the same one begun by `runsc create` and by `runsc restore`.
async fn is_as_confined(case: &Case, volumes: bool) -> anyhow::Result<()> {
    let uid = started(case, volumes).await?;
    let count = if volumes { 4 } else { 3 };
    let by = begun_by_runsc(case, &uid)?;
    ensure!(
        by == vec![true; count],
        "runsc begins a new sandbox: {by:?}"
    );
    let (created, files) = (all_properties(case, &uid)?, filestores(case, &uid)?);
    ensure!(files.len() == count - 2, "of the root, and of the volume");
    let dirs = if volumes { "/disk /memory" } else { "/tmp" };
    let fill = format!("for dir in {dirs}; do echo kept >$dir/file; done");
    case.sh("p", "a", &fill).await?;
    let check = format!("for dir in {dirs}; do cat $dir/file; done | sort -u");

    // The wake uses `runsc restore`.
    case.hibernate("p").await?;
    std::fs::remove_file(kept(case, &uid)?)?;
    case.wake("p").await?;
    let by = begun_by_runsc(case, &uid)?;
    ensure!(
        by == vec![true; count],
        "runsc begins a sandbox without Torpor's file: {by:?}"
    );
    let (restored, recorded) = (all_properties(case, &uid)?, records(case, &uid)?);

    for _ in 0..2 {
        case.hibernate("p").await?;
        case.wake("p").await?;
        let by = begun_by_runsc(case, &uid)?;
        ensure!(by == vec![false; count], "runsc began the sandbox: {by:?}");
        let ours = all_properties(case, &uid)?;
        for ((own, created), restored) in ours.iter().zip(&created).zip(&restored) {
            own.is_confined_as(restored)?;
            for (name, value) in &created.confinement {
                let own = own.confinement.get(name);
                ensure!(own == Some(value), "{name}: {own:?}, by runsc {value}");
            }
        }
        ensure!(
            ours[0].network == created[0].network,
            "it is in another network namespace"
        );
        let networks: BTreeSet<_> = ours.iter().map(|own| &own.network).collect();
        ensure!(networks.len() == count, "a gofer has a network");
        let own = filestores(case, &uid)?;
        ensure!(own == files, "its files are {own:?}, by runsc {files:?}");
        let own = records(case, &uid)?;
        ensure!(own == recorded, "runsc's records differ");
        let text = case.sh("p", "a", &check).await?;
        ensure!(text == "kept", "it has lost what it wrote: {text}");
        wait::until("it has no more files open than runsc's", SOON, async || {
            for (pid, restored) in processes(case, &uid)?.into_iter().zip(&restored) {
                let blocked = blocked_signals(pid)?;
                if blocked != 0 {
                    return Ok(Err(format!("signals {blocked:x} are blocked")));
                }
                let (own, by_runsc) = (open_files(pid)?, &restored.open);
                let mut kinds = own.iter();
                if !kinds.all(|(kind, count)| by_runsc.get(kind) >= Some(count)) {
                    return Ok(Err(format!("{own:?}, by runsc {by_runsc:?}")));
                }
            }
            Ok(Ok(()))
        })
        .await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_sandbox_is_as_confined_as_one_that_runsc_has_begun() -> anyhow::Result<()> {
    case("begun", async |case| is_as_confined(case, false).await).await
}

#[tokio::test]
async fn a_sandbox_with_volumes_is_as_confined_as_one_that_runsc_has_begun() -> anyhow::Result<()> {
    case("begun", async |case| is_as_confined(case, true).await).await
}

/// Change of Torpor's file about the sandbox.
type Change = fn(&mut Value);

/// Changes, and whether runsc then begins the sandbox and the container `a`.
const CHANGES: [(&str, Change, [bool; 2]); 8] = [
    (
        "another release",
        |kept| {
            kept["sandbox"]["sandbox"]["metricMetadata"]["version"] = json!("release-20200101.0")
        },
        [true, true],
    ),
    (
        "a root that is not there",
        |kept| kept["sandbox"]["spec"]["annotations"][ROOT] = json!("/opt/no-such-file"),
        [true, true],
    ),
    (
        "a root that gVisor refuses when the last container comes",
        |kept| kept["sandbox"]["spec"]["annotations"][ROOT] = json!("/etc/passwd"),
        [true, true],
    ),
    (
        "another program, where the image's program runs all the same",
        |kept| record_of_a(kept)["spec"]["process"]["args"] = json!(["other"]),
        [false, false],
    ),
    (
        "a container with memory over its root",
        |kept| record_of_a(kept)["goferMountConfs"][0]["upper"] = json!(1),
        [false, true],
    ),
    (
        "a container that the file does not have",
        |kept| *record_of_a(kept) = json!(null),
        [false, true],
    ),
    (
        "users that cannot be mapped",
        |kept| record_of_a(kept)["spec"]["linux"]["uidMappings"][0]["size"] = json!(0),
        [true, true],
    ),
    ("nothing", |_| {}, [false, false]),
];
const ROOT: &str = "dev.gvisor.spec.rootfs.source";

/// Returns the file's record of the container `a`.
fn record_of_a(kept: &mut Value) -> &mut Value {
    let containers = kept["containers"].as_object_mut();
    let mut records = containers.into_iter().flat_map(|all| all.values_mut());
    let is_a =
        |record: &Value| record["spec"]["annotations"]["io.kubernetes.cri.container-name"] == "a";
    records.find(|record| is_a(record)).expect("it is kept")
}

/// Torpor's file about the sandbox is changed so that Torpor cannot, or does not, begin the
/// sandbox.
#[tokio::test]
async fn runsc_begins_a_sandbox_that_torpor_cannot_begin() -> anyhow::Result<()> {
    case("begun", async |case| {
        let uid = started(case, false).await?;
        let mut counted = case.counted("p").await?;
        for (what, change, expected) in CHANGES {
            case.hibernate("p").await?;
            let path = kept(case, &uid)?;
            let mut kept: Value = serde_json::from_str(&read_to_string(&path)?)?;
            change(&mut kept);
            std::fs::write(&path, kept.to_string())?;
            case.wake("p").await?;
            let by_runsc = begun_by_runsc(case, &uid)?;
            ensure!(by_runsc[..2] == expected, "{what}: by runsc {by_runsc:?}");
            let now = case.counted("p").await?;
            ensure!(
                now > counted,
                "{what}: it counted {counted}, and {now} after the wake"
            );
            counted = now;
        }
        Ok(())
    })
    .await
}

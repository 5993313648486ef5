//! Sandboxes that Torpor begins by itself, without runsc's command.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{read_link, read_to_string};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use torpor_gvisor::runsc::NodeRunsc;
use torpor_tests::case::{Case, case, uid};
use torpor_tests::pods::{COUNT, pod, shell};
use torpor_tests::wait;

/// Lines of `/proc/<pid>/status` about what the process may do and whom it belongs to.
const STATUS: [&str; 14] = [
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "SigBlk",
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
/// Its number in each PID namespace, and of its group and session.
const NUMBERS: [&str; 3] = ["NSpid", "NSpgid", "NSsid"];
const NAMESPACES: [&str; 8] = ["cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"];
/// Connections to a sandbox come and go.
const SOON: Duration = Duration::from_secs(20);

fn read(pid: i32, name: &str) -> anyhow::Result<String> {
    let path = format!("/proc/{pid}/{name}");
    read_to_string(&path).with_context(|| format!("cannot read {path}"))
}

/// What the kernel says of a process: all of it that makes the difference between one that is confined and one that is not.
fn confinement(pid: i32) -> anyhow::Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    for line in read(pid, "status")?.lines() {
        let (name, value) = line.split_once(':').context("a line of status")?;
        if STATUS.contains(&name) {
            found.insert(name.to_owned(), value.trim().to_owned());
        }
        if NUMBERS.contains(&name) {
            // The innermost is what it sees.
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
    // Kernels have not all of them.
    for name in ["loginuid", "coredump_filter", "attr/current"] {
        found.insert(name.to_owned(), read(pid, name).unwrap_or_default());
    }
    // Numbers of mounts and devices are given anew.
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

/// How many files of each kind a process has open, but for the container's, which are what its program has open at the moment, and what gVisor
/// makes as it needs it.
fn open_files(pid: i32) -> anyhow::Result<BTreeMap<String, usize>> {
    let mut targets = BTreeSet::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let target = read_link(entry?.path()).unwrap_or_default();
        targets.insert(target.display().to_string());
    }
    let mut found = BTreeMap::new();
    for target in &targets {
        // Of a socket or pipe without its number.
        let kind = target.split('[').next().unwrap_or_default();
        if !kind.starts_with("/root") && !kind.starts_with("anon_inode") && !kind.is_empty() {
            *found.entry(kind.to_owned()).or_default() += 1;
        }
    }
    Ok(found)
}

/// What `runsc boot` was told, without the numbers of descriptors. What is said of those that there are not is nothing, and the log is one of them.
fn flags(pid: i32) -> anyhow::Result<BTreeSet<String>> {
    let words = read(pid, "cmdline")?;
    let words = words.split('\0').filter_map(|word| {
        let (name, value) = word.split_once('=').unwrap_or((word, "true"));
        let is_descriptor = name.ends_with("-fd") || name.ends_with("-fds");
        match (name, value) {
            ("", _) | ("--log", _) => None,
            (_, "-1") if is_descriptor => None,
            _ if is_descriptor => Some(format!("{name}={}", value.split(',').count())),
            _ => Some(format!("{name}={value}")),
        }
    });
    Ok(words.collect())
}

/// runsc's record of the sandbox, but for its times and its process.
fn record(case: &Case, uid: &str) -> anyhow::Result<Value> {
    let record = case.node.sandbox_of(uid)?;
    let sandbox = record.sandbox.as_str();
    let root = NodeRunsc::new(&case.node.config).root_of(&record.sandbox);
    let path = root.join(format!("{sandbox}_sandbox:{sandbox}.state"));
    let mut record: Value = serde_json::from_str(&read_to_string(path)?)?;
    record["createdAt"] = json!(null);
    record["sandbox"]["startTime"] = json!(null);
    record["sandbox"]["pid"] = json!(null);
    Ok(record)
}

/// What of Torpor's the sandbox' next process is told from.
fn kept(case: &Case, uid: &str) -> anyhow::Result<PathBuf> {
    let record = case.node.sandbox_of(uid)?;
    Ok(case
        .node
        .records
        .pod_dir(&record.sandbox)
        .join("runsc.json"))
}

/// runsc leaves the time of its start in the environment of a sandbox that it has begun; Torpor leaves nothing.
fn is_begun_by_runsc(pid: i32) -> anyhow::Result<bool> {
    Ok(!std::fs::read(format!("/proc/{pid}/environ"))?.is_empty())
}

async fn started(case: &Case) -> anyhow::Result<String> {
    let pod = pod("p", json!({ "containers": [shell("a", COUNT)] }));
    Ok(uid(&case.start(pod).await?))
}

#[tokio::test]
async fn a_sandbox_is_as_confined_as_one_that_runsc_has_begun() -> anyhow::Result<()> {
    case("begun", async |case| {
        let uid = started(case).await?;
        let created = case.node.sentry(&uid)?.pid;
        ensure!(is_begun_by_runsc(created)?, "a new one is not restored");
        let network = |pid: i32| read_link(format!("/proc/{pid}/ns/net"));
        let (created, of_pod) = (confinement(created)?, network(created)?);

        // By `runsc restore`.
        case.hibernate("p").await?;
        std::fs::remove_file(kept(case, &uid)?)?;
        case.wake("p").await?;
        let restored = case.node.sentry(&uid)?.pid;
        ensure!(is_begun_by_runsc(restored)?, "nothing is known of it");
        let by_runsc = (
            flags(restored)?,
            record(case, &uid)?,
            read(restored, "status")?,
        );
        let (restored, open) = (confinement(restored)?, open_files(restored)?);

        for _ in 0..2 {
            case.hibernate("p").await?;
            case.wake("p").await?;
            let pid = case.node.sentry(&uid)?.pid;
            ensure!(!is_begun_by_runsc(pid)?, "runsc has begun it");
            let ours = confinement(pid)?;
            for (name, value) in created.iter().chain(&restored) {
                let own = ours.get(name).map(String::as_str).unwrap_or_default();
                ensure!(own == value, "{name}: {own}, by runsc {value}");
            }
            ensure!(
                network(pid)? == of_pod,
                "it is in another network namespace"
            );
            ensure!(
                flags(pid)? == by_runsc.0,
                "{:?}, by runsc {:?}",
                flags(pid)?,
                by_runsc.0
            );
            ensure!(
                record(case, &uid)? == by_runsc.1,
                "runsc's record is another"
            );
            ensure!(
                ignored(&read(pid, "status")?) == ignored(&by_runsc.2),
                "it ignores other signals"
            );
            wait::until("it has no more open than runsc's", SOON, async || {
                let own = open_files(pid)?;
                let mut kinds = own.iter();
                let no_more = kinds.all(|(kind, count)| open.get(kind) >= Some(count));
                wait::holds(no_more, || format!("{own:?}, by runsc {open:?}"))
            })
            .await?;
        }
        Ok(())
    })
    .await
}

/// Signals that it got ignored from who began it.
fn ignored(status: &str) -> Option<&str> {
    status.lines().find(|line| line.starts_with("SigIgn"))
}

/// What Torpor knows of the sandbox is changed so that it cannot, or does not, begin it.
#[tokio::test]
async fn what_torpor_cannot_begin_runsc_begins() -> anyhow::Result<()> {
    case("begun", async |case| {
        let uid = started(case).await?;
        let another_release = |kept: &mut Value| {
            kept["sandbox"]["metricMetadata"]["version"] = json!("release-20200101.0")
        };
        let root = "dev.gvisor.spec.rootfs.source";
        let no_root =
            |kept: &mut Value| kept["spec"]["annotations"][root] = json!("/opt/no-such-file");
        // gVisor sees that it is no file system when the last container has come.
        let wrong_root =
            |kept: &mut Value| kept["spec"]["annotations"][root] = json!("/etc/passwd");
        let mut counted = case.counted("p").await?;
        for change in [
            &another_release as &dyn Fn(&mut Value),
            &no_root,
            &wrong_root,
            &|_| {},
        ] {
            case.hibernate("p").await?;
            let path = kept(case, &uid)?;
            let mut kept: Value = serde_json::from_str(&read_to_string(&path)?)?;
            let before = kept.clone();
            change(&mut kept);
            std::fs::write(&path, kept.to_string())?;
            case.wake("p").await?;
            let by_runsc = is_begun_by_runsc(case.node.sentry(&uid)?.pid)?;
            ensure!(by_runsc == (kept != before), "by runsc: {by_runsc}");
            let now = case.counted("p").await?;
            ensure!(
                now > counted,
                "it counts on from {counted}, and not from {now}"
            );
            counted = now;
        }
        Ok(())
    })
    .await
}

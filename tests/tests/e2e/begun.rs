//! Sandboxes that Torpor begins by itself, without runsc's command.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{read_link, read_to_string};

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use torpor_tests::case::{Case, case, uid};
use torpor_tests::pods::{COUNT, pod, shell};

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
const NAMESPACES: [&str; 8] = ["cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"];

/// What the kernel says of a process: all of it that makes the difference between one that is confined and one that is not.
fn confinement(pid: i32) -> anyhow::Result<BTreeMap<String, String>> {
    let read = |name: &str| {
        let path = format!("/proc/{pid}/{name}");
        read_to_string(&path).with_context(|| format!("cannot read {path}"))
    };
    let mut found = BTreeMap::new();
    for line in read("status")?.lines() {
        let (name, value) = line.split_once(':').context("a line of status")?;
        if STATUS.contains(&name) {
            found.insert(name.to_owned(), value.trim().to_owned());
        }
        // Its number in each PID namespace, and of its group and session: the innermost is what it sees.
        if ["NSpid", "NSpgid", "NSsid"].contains(&name) {
            let numbers: Vec<&str> = value.split_whitespace().collect();
            found.insert(
                name.to_owned(),
                format!("{} of {}", numbers.last().unwrap_or(&""), numbers.len()),
            );
        }
    }
    for name in [
        "limits",
        "oom_score_adj",
        "uid_map",
        "gid_map",
        "setgroups",
        "cgroup",
        "loginuid",
        "coredump_filter",
        "attr/current",
    ] {
        // Kernels have not all of them.
        found.insert(name.to_owned(), read(name).unwrap_or_default());
    }
    // Numbers of mounts and devices are given anew.
    let mounts: Vec<String> = (read("mountinfo")?.lines())
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
    found.insert(
        "what its descriptors are".to_owned(),
        kinds(pid)?.into_iter().collect::<Vec<_>>().join(" "),
    );
    Ok(found)
}

/// Of a process' descriptors, but for the container's files, which are what its program has open at the moment.
fn kinds(pid: i32) -> anyhow::Result<BTreeSet<String>> {
    let mut kinds = BTreeSet::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let target = read_link(entry?.path())
            .unwrap_or_default()
            .display()
            .to_string();
        // Of a socket or pipe without its number.
        let kind = target.split([':', '[']).next().unwrap_or_default();
        if !kind.starts_with("/root") && !kind.is_empty() {
            kinds.insert(kind.to_owned());
        }
    }
    Ok(kinds)
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
        let first = case.node.sentry(&uid)?.pid;
        ensure!(is_begun_by_runsc(first)?, "a new one is not restored");
        let network = |pid: i32| read_link(format!("/proc/{pid}/ns/net"));
        let (of_runsc, of_pod) = (confinement(first)?, network(first)?);
        for _ in 0..2 {
            case.hibernate("p").await?;
            case.wake("p").await?;
            let pid = case.node.sentry(&uid)?.pid;
            ensure!(!is_begun_by_runsc(pid)?, "runsc has begun it");
            let ours = confinement(pid)?;
            for (name, value) in &of_runsc {
                let own = ours.get(name).map(String::as_str).unwrap_or_default();
                ensure!(own == value, "{name}: {own}, by runsc {value}");
            }
            ensure!(
                network(pid)? == of_pod,
                "it is in another network namespace"
            );
        }
        Ok(())
    })
    .await
}

/// What Torpor knows of the sandbox is changed so that it cannot, or does not, begin it.
#[tokio::test]
async fn what_torpor_cannot_begin_runsc_begins() -> anyhow::Result<()> {
    case("begun", async |case| {
        let uid = started(case).await?;
        let another_release = |kept: &mut Value| {
            kept["sandbox"]["metricMetadata"]["version"] = json!("release-20200101.0")
        };
        let no_root = |kept: &mut Value| {
            kept["spec"]["annotations"]["dev.gvisor.spec.rootfs.source"] =
                json!("/opt/no-such-file")
        };
        // gVisor's kernel ends as it starts: it reads another sandbox' file, which is no file system.
        let wrong_root = |kept: &mut Value| {
            kept["spec"]["annotations"]["dev.gvisor.spec.rootfs.source"] = json!("/etc/passwd")
        };
        let mut counted = 0;
        for change in [
            another_release as fn(&mut Value),
            no_root,
            wrong_root,
            |_| {},
        ] {
            case.hibernate("p").await?;
            let record = case.node.sandbox_of(&uid)?;
            let path = case
                .node
                .records
                .pod_dir(&record.sandbox)
                .join("runsc.json");
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

//! The Pod's limits as the programs in a sandbox see them.
//!
//! gVisor's kernel gets its memory, number of processors and quota by its command line (`runsc
//! boot`, flags `--total-memory`, `--cpu-num`, `--cpu-quota`, `--cpu-period`). runsc reads the
//! values from the cgroup that it makes. Under Torpor runsc makes no cgroup (`--ignore-cgroups`),
//! and would pass the node's values. So Torpor's build of runsc reads arguments from a file of the
//! sandbox' bundle (`hack/devcluster/runsc/prepare.go`). Another build passes the node's values
//! until Torpor begins the sandbox by itself (`torpor-runsc-direct`).

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::unistd::{SysconfVar, sysconf};
use serde::Deserialize;
use serde_json::{Value, json};
use torpor_cgroup::limits::Limits;
use torpor_cgroup::{Hierarchies, meminfo};

use crate::control::{self, Control};
use crate::inside;
use torpor_records::{PodRecord, Records};

/// Name of the file with arguments of `runsc boot`, in the bundle of the sandbox' first container.
const FILE: &str = "boot-flags";
/// Fewest processors of a sandbox, as in gVisor: with one processor programs leave out locks that
/// they nevertheless need (runsc/sandbox/sandbox.go, `minCPUs`).
const LEAST_PROCESSORS: u64 = 2;

/// Bytes that are read of a process' list of cgroups, which has a line for each of gVisor's
/// controllers.
const MAX_CGROUPS: u64 = 64 << 10;
/// Period in microseconds where there is no quota (the kernel's default).
const USUAL_PERIOD: u64 = 100_000;

/// Memory and processors of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// Bytes.
    pub memory: u64,
    pub processors: u64,
}

impl Machine {
    pub fn read() -> std::io::Result<Self> {
        let online = sysconf(SysconfVar::_NPROCESSORS_ONLN)?;
        let processors = online.and_then(|online| u64::try_from(online).ok());
        Ok(Self {
            memory: meminfo::read()?.mem_total,
            processors: processors.ok_or(std::io::ErrorKind::InvalidData)?,
        })
    }

    /// Returns the bytes of memory that a Pod with these limits may use on this machine.
    fn memory_within(&self, limits: &Limits) -> u64 {
        limits.memory.unwrap_or(u64::MAX).min(self.memory)
    }
}

/// Returns the Pod's own limits, also while a wake has lifted or widened them. None: the Pod has no
/// cgroup of its own.
pub fn of_pod(
    records: &Records,
    cgroups: &Hierarchies,
    pod: &PodRecord,
) -> Result<Option<Limits>, torpor_records::Error> {
    let lifted = records.quotas(&pod.sandbox)?;
    let rooms = records.room(&pod.sandbox)?;
    let cgroup = pod.cgroup.parent();
    Ok(cgroup.map(|cgroup| cgroups.limits(cgroup, &lifted, &rooms)))
}

/// Returns arguments of `runsc boot` for the limits, by runsc's own rules
/// (runsc/sandbox/sandbox.go, `createSandboxProcess`).
pub fn boot_flags(limits: &Limits, machine: Machine) -> Vec<String> {
    let memory = machine.memory_within(limits);
    let mut flags = vec![format!("--total-memory={memory}")];
    if let Some(limit) = limits.processors {
        let wanted = limit.processors().max(LEAST_PROCESSORS);
        flags.push(format!("--cpu-num={}", wanted.min(machine.processors)));
        flags.push(format!("--cpu-quota={}", limit.quota));
        flags.push(format!("--cpu-period={}", limit.period));
    }
    flags
}

/// Writes the arguments for the sandbox that runsc begins from this bundle.
pub fn write_boot_flags(bundle: &Path, flags: &[String]) -> std::io::Result<()> {
    std::fs::write(bundle.join(FILE), flags.join("\n"))
}

/// gVisor's answer to `Cgroups.WriteControlFiles`.
#[derive(Deserialize)]
struct Written {
    #[serde(default)]
    results: Vec<WrittenFile>,
}

#[derive(Deserialize)]
struct WrittenFile {
    value: String,
    is_error: bool,
}

/// Why the limits could not be written to a sandbox.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Control(#[from] control::Error),
    #[error(transparent)]
    Inside(#[from] inside::Error),
    #[error("gVisor refused a limit: {0}")]
    Refused(String),
}

impl Error {
    /// Reports whether gVisor has refused the limits. A repetition is of no use then.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Refused(_) | Self::Control(control::Error::Refused { .. })
        )
    }
}

/// Writes the limits into the files of the sandbox' own cgroups. An image contains these files, and
/// a resize of the Pod does not change them. `MemTotal` and the number of processors keep the
/// values of the last start or restore of the sandbox' kernel. `containers`: the containers whose
/// programs run.
pub fn tell(
    control: &mut Control,
    containers: &[&str],
    limits: &Limits,
    machine: Machine,
    timeout: Duration,
) -> Result<(), Error> {
    // "/" is for containers that start later.
    let mut paths: BTreeSet<String> = ["/".to_owned()].into();
    let deadline = Instant::now() + timeout;
    for container in containers {
        paths.extend(cgroup_of(control, container, deadline)?);
    }
    let written: Written = control.call(
        "Cgroups.WriteControlFiles",
        &files(&paths, limits, machine),
        &[],
        timeout,
    )?;
    match written.results.into_iter().find(|file| file.is_error) {
        None => Ok(()),
        Some(refused) => Err(Error::Refused(refused.value)),
    }
}

/// Returns the path of the container's cgroup in the sandbox. The path has the container's id at
/// its start, which is another container's id after a resume. None for a container that has ended,
/// or whose `/proc/1/cgroup` cannot be read.
fn cgroup_of(
    control: &mut Control,
    container: &str,
    deadline: Instant,
) -> Result<Option<String>, Error> {
    let text = inside::read(control, container, "/proc/1/cgroup", MAX_CGROUPS, deadline)?;
    let text = String::from_utf8(text.unwrap_or_default()).unwrap_or_default();
    Ok(memory_cgroup(&text).map(str::to_owned))
}

/// Returns the path of the line of controller "memory". A line is `number:controllers:path`
/// (cgroups(7)).
fn memory_cgroup(text: &str) -> Option<&str> {
    let mut parts = text.lines().map(|line| line.splitn(3, ':').skip(1));
    let found = parts.find_map(|mut parts| (parts.next()? == "memory").then(|| parts.next())?);
    found.filter(|path| path.starts_with('/'))
}

/// Returns gVisor's `CgroupsWriteArgs`.
fn files(paths: &BTreeSet<String>, limits: &Limits, machine: Machine) -> Value {
    let memory = machine.memory_within(limits);
    let (quota, period) = match limits.processors {
        Some(limit) => (limit.quota.to_string(), limit.period),
        None => ("-1".to_owned(), USUAL_PERIOD),
    };
    let values = [
        ("memory", "memory.limit_in_bytes", memory.to_string()),
        ("cpu", "cpu.cfs_quota_us", quota),
        ("cpu", "cpu.cfs_period_us", period.to_string()),
    ];
    let of_cgroup = |path: &String| {
        let file = |(controller, name, value): &(&str, &str, String)| {
            json!({
                "file": { "controller": controller, "path": path, "name": name }, "value": value,
            })
        };
        values.iter().map(file).collect::<Vec<_>>()
    };
    json!({ "args": paths.iter().flat_map(of_cgroup).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use torpor_cgroup::limits::ProcessorLimit;

    use super::*;

    const MACHINE: Machine = Machine {
        memory: 1 << 30,
        processors: 4,
    };

    #[test]
    fn a_sandbox_gets_the_pods_limits_and_no_more_than_the_machine_has() {
        let of = |memory, processors: Option<(u64, u64)>| {
            let processors = processors.map(|(quota, period)| ProcessorLimit { quota, period });
            boot_flags(&Limits { memory, processors }, MACHINE).join(" ")
        };
        assert_eq!(of(None, None), "--total-memory=1073741824");
        assert_eq!(of(Some(1 << 40), None), "--total-memory=1073741824");
        let expected = |processors: u64, quota: u64| {
            format!(
                "--total-memory=4096 --cpu-num={processors} --cpu-quota={quota} --cpu-period=100000"
            )
        };
        for (quota, processors) in [(50_000, 2), (250_000, 3), (900_000, 4)] {
            let flags = of(Some(4096), Some((quota, 100_000)));
            assert_eq!(flags, expected(processors, quota));
        }
    }

    #[test]
    fn the_cgroup_of_a_process_is_read_from_its_file() {
        let text = "7:pids:/a\n6:memory:/b:c\n1:cpu:/d\n";
        assert_eq!(memory_cgroup(text), Some("/b:c"));
        for other in ["", "memory", "6:memory", "6:memory:no", "0::/x"] {
            assert_eq!(memory_cgroup(other), None, "{other}");
        }
    }

    #[test]
    fn every_cgroup_of_the_sandbox_gets_every_limit() {
        let paths = ["/", "/c"].map(str::to_owned).into();
        let limits = Limits {
            memory: Some(4096),
            processors: None,
        };
        let files = files(&paths, &limits, MACHINE);
        let written: Vec<String> = (files["args"].as_array().into_iter().flatten())
            .map(|arg| {
                let text = |pointer: &str| arg.pointer(pointer).and_then(Value::as_str);
                let words = ["/file/controller", "/file/path", "/file/name", "/value"].map(text);
                words.map(Option::unwrap_or_default).join(" ")
            })
            .collect();
        assert_eq!(
            written,
            [
                "memory / memory.limit_in_bytes 4096",
                "cpu / cpu.cfs_quota_us -1",
                "cpu / cpu.cfs_period_us 100000",
                "memory /c memory.limit_in_bytes 4096",
                "cpu /c cpu.cfs_quota_us -1",
                "cpu /c cpu.cfs_period_us 100000",
            ]
        );
    }
}

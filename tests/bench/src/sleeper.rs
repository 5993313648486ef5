//! Pods that sleep: their records on this node, and what they need to answer.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::{ResourceExt, api::ListParams};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    process::Command,
};
use torpor_api::annotations::{DOZE_AFTER, HIBERNATE};
use torpor_tests::{case::Case, machine, node::containerd_socket, wait};

use crate::setup::annotate_all;

/// Port of the Pods' programs.
pub(crate) const PORT: u16 = 8080;
/// Time for an answer that wakes a sandbox.
const ANSWER: Duration = Duration::from_secs(30);
/// Pause after each wake, in which a woken sandbox does its first work: part of the measurement.
pub(crate) const PAUSE: Duration = Duration::from_millis(300);

/// A way to sleep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Sleep {
    Dozing,
    Hibernated,
}

impl Sleep {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Dozing => "dozing",
            Self::Hibernated => "hibernated",
        }
    }

    /// Returns the annotation that puts a Pod to sleep.
    fn annotation(self) -> (&'static str, &'static str) {
        match self {
            Self::Dozing => (DOZE_AFTER, "1s"),
            Self::Hibernated => (HIBERNATE, "true"),
        }
    }

    /// Puts all Pods of the namespace to sleep and waits until they do.
    pub(crate) async fn begin(
        self,
        case: &Case,
        pods: &[Sleeper],
        limit: Duration,
    ) -> anyhow::Result<()> {
        let (key, value) = self.annotation();
        annotate_all(case, key, Some(value)).await?;
        self.until(pods, limit).await
    }

    /// Waits until all Pods sleep like this, by the node's records.
    pub(crate) async fn until(self, pods: &[Sleeper], limit: Duration) -> anyhow::Result<()> {
        let words = format!("all Pods are {}", self.name());
        wait::until(&words, limit, async || {
            let left = pods.iter().filter(|pod| !pod.sleeps(self)).count();
            wait::holds(left == 0, || format!("{left} of {} are not", pods.len()))
        })
        .await
    }

    /// Removes the annotation from all Pods of the namespace.
    pub(crate) async fn end(self, case: &Case) -> anyhow::Result<()> {
        annotate_all(case, self.annotation().0, None).await
    }
}

/// A Pod of this node, and the directory of its sandbox's records.
#[derive(Clone, Debug)]
pub(crate) struct Sleeper {
    pub name: String,
    pub uid: String,
    pub address: String,
    /// Id of its first container.
    pub container: String,
    /// Id of its sandbox.
    pub sandbox: String,
    /// Cgroup of the sandbox; its parent is the Pod's.
    pub cgroup: PathBuf,
    pub network_namespace: Option<PathBuf>,
    records: PathBuf,
}

impl Sleeper {
    /// Returns the Pods of the namespace, by name.
    pub(crate) async fn all(case: &Case) -> anyhow::Result<BTreeMap<String, Self>> {
        let pods = case.pods().list(&ListParams::default()).await?.items;
        let pods: BTreeMap<String, Pod> = pods
            .into_iter()
            .map(|pod| (pod.uid().unwrap_or_default(), pod))
            .collect();
        let mut found = BTreeMap::new();
        for record in case.node.records.pods()? {
            let Some(pod) = pods.get(record.pod_uid.as_str()) else {
                continue;
            };
            let status = pod.status.as_ref().context("no status")?;
            let containers = status.container_statuses.as_ref();
            let container = containers.and_then(|all| all.first()?.container_id.as_ref());
            let container = container.and_then(|id| id.rsplit('/').next());
            let sleeper = Self {
                name: pod.name_any(),
                uid: record.pod_uid.as_str().to_owned(),
                address: status.pod_ip.clone().context("no address")?,
                container: container.context("no container")?.to_owned(),
                records: case.node.records.pod_dir(&record.sandbox),
                sandbox: record.sandbox.to_string(),
                cgroup: record.cgroup,
                network_namespace: record.network_namespace,
            };
            found.insert(sleeper.name.clone(), sleeper);
        }
        Ok(found)
    }

    pub(crate) async fn of(case: &Case, name: &str) -> anyhow::Result<Self> {
        let found = Self::all(case).await?.remove(name);
        found.with_context(|| format!("the node has no record of Pod {name}"))
    }

    /// Reads a record of the sandbox; null where there is none.
    pub(crate) fn record(&self, name: &str) -> Value {
        let text = fs::read(self.records.join(name)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    pub(crate) fn sleeps(&self, how: Sleep) -> bool {
        match how {
            Sleep::Dozing => self.record("doze.json")["reclaimed"] == true,
            Sleep::Hibernated => self.record("state.json")["state"] == "Hibernated",
        }
    }

    /// Returns the stages of the last wake in order, each with its time.
    pub(crate) fn stages(&self) -> Vec<(String, Duration)> {
        stages(&self.record("wake.json")["stagesEndMicros"])
    }

    /// Returns the cgroup of the Pod: of the sandbox, without the Pod's shim.
    pub(crate) fn pod_cgroup(&self) -> &Path {
        self.cgroup.parent().unwrap_or(&self.cgroup)
    }

    /// Returns the time until the first byte of an answer, over a new TCP connection.
    pub(crate) async fn exchange(&self, word: &[u8]) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let exchange = async {
            let mut stream = TcpStream::connect((self.address.as_str(), PORT)).await?;
            stream.write_all(word).await?;
            anyhow::Ok(stream.read_u8().await?)
        };
        let answer = tokio::time::timeout(ANSWER, exchange).await;
        let took = begin.elapsed();
        let words = || format!("the answer of Pod {}", self.name);
        let first = answer.with_context(words)?.with_context(words)?;
        ensure!(word.first() == Some(&first), "{}: byte {first}", words());
        Ok(took)
    }

    /// Returns the time of a command in the first container by CRI ExecSync.
    ///
    /// `cri-execsync` measures the call alone, without the connection and its own start.
    pub(crate) async fn exec(&self, case: &Case, command: &[&str]) -> anyhow::Result<Duration> {
        let program = case.cluster.kubectl.with_file_name("cri-execsync");
        let endpoint = format!("unix://{}", containerd_socket()?.display());
        let ran = Command::new(&program)
            .args([endpoint.as_str(), &self.container])
            .args(command)
            .kill_on_drop(true)
            .output();
        let ran = tokio::time::timeout(ANSWER, ran).await?;
        let ran = ran.with_context(|| {
            let program = program.display();
            format!("no development cluster with its programs (hack/cluster up): {program}")
        })?;
        let errors = String::from_utf8_lossy(&ran.stderr);
        ensure!(ran.status.success(), "cri-execsync: {errors}");
        let out = String::from_utf8_lossy(&ran.stdout);
        let micros = out
            .split_whitespace()
            .next()
            .and_then(|word| word.parse().ok());
        let micros = micros.with_context(|| format!("cri-execsync printed {out:?}"))?;
        Ok(Duration::from_micros(micros))
    }
}

/// Returns the time of each stage, given the microseconds at which each ended.
fn stages(ends: &Value) -> Vec<(String, Duration)> {
    let ends = ends.as_object().into_iter().flatten();
    let mut ends: Vec<(u64, &String)> = ends
        .map(|(name, end)| (end.as_u64().unwrap_or_default(), name))
        .collect();
    ends.sort_unstable();
    let mut before = 0;
    let stage = |(end, name): (u64, &String)| {
        let took = Duration::from_micros(end - before);
        before = end;
        (name.clone(), took)
    };
    ends.into_iter().map(stage).collect()
}

/// Wakes Pods one after the other; returns the time of each wake.
pub(crate) async fn wake_each(
    pods: &[Sleeper],
    mut wake: impl AsyncFnMut(&Sleeper) -> anyhow::Result<Duration>,
) -> anyhow::Result<Vec<Duration>> {
    let mut times = Vec::new();
    for pod in pods {
        times.push(wake(pod).await?);
        tokio::time::sleep(PAUSE).await;
    }
    Ok(times)
}

/// Returns the processor time of a cgroup so far.
pub(crate) fn processor_time(cgroup: &Path) -> anyhow::Result<Duration> {
    // cgroup v1 counts nanoseconds in a file of their own.
    if let Some(nanos) = machine::cgroup_file(cgroup, "cpuacct.usage").first() {
        return Ok(Duration::from_nanos(nanos.parse()?));
    }
    let stat = machine::cgroup_file(cgroup, "cpu.stat");
    let micros = stat
        .iter()
        .find_map(|line| line.strip_prefix("usage_usec "));
    let micros = micros.with_context(|| format!("no processor time of {}", cgroup.display()))?;
    Ok(Duration::from_micros(micros.parse()?))
}

/// Returns the memory of a cgroup in MiB.
pub(crate) fn memory_mib(cgroup: &Path) -> anyhow::Result<f64> {
    let files = ["memory.usage_in_bytes", "memory.current"];
    let text = files
        .iter()
        .find_map(|name| machine::cgroup_file(cgroup, name).into_iter().next());
    let text = text.with_context(|| format!("no memory of {}", cgroup.display()))?;
    let bytes: f64 = text.parse()?;
    Ok(bytes / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_stage_takes_the_time_since_the_end_of_the_one_before() {
        let ends = json!({"resumed": 30, "recorded": 10, "released": 35});
        let micros = |(name, took): (String, Duration)| (name, took.as_micros());
        let found: Vec<_> = stages(&ends).into_iter().map(micros).collect();
        let expected = [("recorded", 10), ("resumed", 20), ("released", 5)];
        assert_eq!(found, expected.map(|(name, took)| (name.to_owned(), took)));
        assert_eq!(stages(&Value::Null), []);
    }
}

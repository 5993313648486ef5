//! The node, as the shim and its commands need it: configuration, runsc, records, cgroups, images.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;
use torpor_cgroup::Hierarchies;
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_records::config::Config;
use torpor_records::{ContainerRecord, Records};
use torpor_runsc::command::{NodeRunsc, Runsc};
use torpor_runsc::kernel_tuning::{self, GRACE_PERIODS, SettingGuard};
use torpor_snapshots::Store;

/// Limit for a runsc command. The slowest command, a restore, loads about a gigabyte per second, so
/// a command that takes longer hangs. The kubelet's own limit for a call is two minutes.
pub const COMMAND_LIMIT: Duration = Duration::from_secs(100);
/// Limit for calls on the control socket and to keepers that cause no long work.
pub const CALL_LIMIT: Duration = Duration::from_secs(10);

/// Most bytes that are read of a JSON file of an OCI bundle. The spec of a pod with thousands of
/// mounts is below a megabyte.
const MAX_OCI_JSON: u64 = 8 << 20;

const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// Reads a JSON file that containerd wrote into an OCI bundle. `what`: the file's content, for
/// errors.
pub fn read_oci_json(path: &Path, what: &str) -> anyhow::Result<Value> {
    let read = || -> anyhow::Result<Value> {
        let mut bytes = Vec::new();
        File::open(path)?
            .take(MAX_OCI_JSON)
            .read_to_end(&mut bytes)?;
        Ok(serde_json::from_slice(&bytes)?)
    };
    read().with_context(|| format!("cannot read the OCI {what} {}", path.display()))
}

#[derive(Debug)]
pub struct Node {
    pub config: Config,
    pub runsc: NodeRunsc,
    pub records: Records,
    pub cgroups: Hierarchies,
}

impl Node {
    /// Loads the configuration beside this program's file, and finds the node's cgroups.
    pub fn load() -> anyhow::Result<Self> {
        let config = Config::beside_own_binary()?;
        Ok(Self {
            runsc: NodeRunsc::new(&config),
            records: Records::new(&config),
            cgroups: Hierarchies::find(Path::new(CGROUP_ROOT))?,
            config,
        })
    }

    /// Opens the store of the node's images.
    pub fn store(&self) -> anyhow::Result<Store> {
        Ok(Store::open(&self.config.store_dir)?)
    }

    /// Expedites the kernel's grace periods while a keeper releases held packets; none if the
    /// node's operator does not allow it.
    pub fn expedited(&self) -> Option<SettingGuard> {
        let begin = || SettingGuard::begin(&self.config.state_dir, &GRACE_PERIODS);
        self.config.expedite_wakes.then(begin)
    }

    /// Expedites the kernel during a restore of an image of `bytes` bytes. If the node's operator
    /// does not allow it, undoes earlier settings and returns none.
    pub fn expedited_restore(&self, bytes: u64) -> Vec<SettingGuard> {
        let state_dir = &self.config.state_dir;
        if self.config.expedite_wakes {
            return kernel_tuning::for_restore(state_dir, bytes);
        }
        kernel_tuning::put_all_back(Path::new("/"), state_dir);
        Vec::new()
    }

    /// Returns the runsc build of a pod; the node's own build for a pod without a record.
    pub fn runsc_of(&self, sandbox: &SandboxId) -> Runsc {
        let runsc = self.runsc.of(sandbox);
        match self.records.pod(sandbox) {
            Ok(pod) => runsc.build(&pod.runsc),
            Err(_) => runsc,
        }
    }

    /// Returns the directory of the pause container, whose keeper is the pod's.
    pub fn pause_dir(&self, sandbox: &SandboxId) -> PathBuf {
        self.records.container_dir(&sandbox.clone().into())
    }

    /// Reads the record of a container.
    pub fn container(&self, id: &ContainerId) -> anyhow::Result<ContainerRecord> {
        let record = self.records.container(id);
        record.with_context(|| format!("container {} does not exist", id.as_str()))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use torpor_core::ids::{Namespace, PodUid};
    use torpor_records::Addresses;
    use torpor_records::PodRecord;

    use super::*;

    /// Returns the record of a pod without a network.
    pub(crate) fn record() -> PodRecord {
        PodRecord {
            sandbox: SandboxId::new("5".repeat(64)).expect("an id"),
            pod_uid: PodUid::new("pod-a").expect("a uid"),
            namespace: Namespace::new("default").expect("a name"),
            name: "a".to_owned(),
            runsc: PathBuf::new(),
            runsc_digest: String::new(),
            network_namespace: None,
            addresses: Addresses::default(),
            cgroup: "kubepods/pod1/torpor-555555555555".into(),
            volumes: Vec::new(),
            cold_start_on_failure: false,
        }
    }

    /// Makes a node in a temporary directory, with one pod.
    pub(crate) fn one_pod() -> (tempfile::TempDir, Node, PodRecord) {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("cgroup.controllers"), "cpu").expect("written");
        let config = Config {
            runsc: PathBuf::new(),
            runsc_digest: String::new(),
            state_dir: dir.path().join("state"),
            store_dir: dir.path().join("store"),
            kubelet_root: PathBuf::new(),
            kubelet_port: 10250,
            eviction_percent: None,
            platform: String::new(),
            expedite_wakes: false,
            begin_sandboxes: true,
            wakes_at_once: 0,
            revoked_runsc: Vec::new(),
            debug_log_dir: None,
        };
        std::fs::create_dir(&config.store_dir).expect("made");
        let node = Node {
            runsc: NodeRunsc::new(&config),
            records: Records::new(&config),
            cgroups: Hierarchies::find(dir.path()).expect("found"),
            config,
        };
        let pod = record();
        node.records.create_pod_dir(&pod.sandbox).expect("made");
        node.records.write_pod(&pod).expect("written");
        (dir, node, pod)
    }

    /// A node in a temporary directory, with one pod that has limits.
    #[derive(Debug)]
    pub(crate) struct Limited {
        dir: tempfile::TempDir,
        pub(crate) node: Node,
        pub(crate) pod: PodRecord,
    }

    impl Limited {
        /// Makes the pod's cgroup with these files: name and content.
        pub(crate) fn by(files: &[(&str, &str)]) -> Self {
            let (dir, node, pod) = one_pod();
            std::fs::create_dir_all(dir.path().join(&pod.cgroup)).expect("made");
            let limited = Self { dir, node, pod };
            for (name, text) in files {
                limited.set(name, text);
            }
            limited
        }

        fn file(&self, name: &str) -> PathBuf {
            self.dir.path().join("kubepods/pod1").join(name)
        }

        pub(crate) fn set(&self, name: &str, text: &str) {
            std::fs::write(self.file(name), text).expect("written");
        }

        pub(crate) fn get(&self, name: &str) -> String {
            std::fs::read_to_string(self.file(name)).expect("read")
        }
    }
}

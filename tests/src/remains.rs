//! Remains of a Pod on the node.
//!
//! A test notes the Pod's ids while the Pod exists, and the names of the Pod's files that contain
//! no id. Afterwards nothing on the node may have one of these names.

use std::path::PathBuf;

use crate::machine::{self, Process};
use crate::node::Node;

/// Ids of a Pod on the node.
#[derive(Debug, Clone)]
pub struct Footprint {
    uid: String,
    namespace: String,
    /// Ids of the Pod's sandboxes and containers.
    ids: Vec<String>,
    /// Network namespaces of the Pod's sandboxes, whose names contain no id of the Pod.
    networks: Vec<PathBuf>,
    /// Sockets of the Pod's shims, which are named after a digest.
    sockets: Vec<PathBuf>,
}

impl Footprint {
    /// Notes the ids of a Pod's sandboxes and containers, and the names that contain none of them.
    pub fn take(node: &Node, namespace: &str, uid: &str) -> anyhow::Result<Self> {
        let mut footprint = Self {
            uid: uid.to_owned(),
            namespace: namespace.to_owned(),
            ids: Vec::new(),
            networks: Vec::new(),
            sockets: Vec::new(),
        };
        footprint.add(node)?;
        Ok(footprint)
    }

    pub fn uid(&self) -> &str {
        &self.uid
    }

    /// Notes what was added since, after the kubelet made the sandbox anew.
    pub fn add(&mut self, node: &Node) -> anyhow::Result<()> {
        for pod in node.sandboxes_of(&self.uid)? {
            let containers = node.records.containers_of(&pod.sandbox)?;
            self.ids.push(pod.sandbox.to_string());
            self.ids.extend(
                containers
                    .into_iter()
                    .map(|container| container.id.to_string()),
            );
            let shims = node.shims_of(&pod.sandbox);
            self.sockets.extend(shims.iter().flat_map(Process::sockets));
            self.networks.extend(pod.network_namespace);
        }
        self.ids.sort();
        self.ids.dedup();
        self.networks.sort();
        self.networks.dedup();
        self.sockets.sort();
        self.sockets.dedup();
        Ok(())
    }

    /// Kills the Pod's shim, and ignores the file of its socket from then on.
    ///
    /// containerd leaves the socket of a killed shim, with runc too
    /// (github.com/containerd/containerd/issues/11292).
    pub fn kill_shim(&mut self, node: &Node) -> anyhow::Result<()> {
        let shim = node.shim(&self.uid)?;
        let forgiven = shim.sockets();
        shim.kill()?;
        self.sockets.retain(|path| !forgiven.contains(path));
        Ok(())
    }

    /// Describes what is left of the sandboxes: processes, mounts, cgroups, records, runsc's state,
    /// network namespaces, sockets of shims.
    pub fn of_sandbox(&self, node: &Node) -> Vec<String> {
        let sockets = self.sockets.iter().filter(|path| path.exists());
        let sockets = sockets.map(|path| format!("socket {}", path.display()));
        let mut left = self.of_sandbox_but_sockets(node);
        left.extend(sockets);
        left
    }

    /// Describes the same where shims are killed at any time: without sockets (see
    /// [`Self::kill_shim`]).
    pub fn of_sandbox_but_sockets(&self, node: &Node) -> Vec<String> {
        let mut words = self.ids.clone();
        words.push(self.uid.clone());
        let processes = machine::processes_naming(&words)
            .into_iter()
            // A kubectl of a test names the Pod too.
            .filter(|process| !process.command.contains("kubectl"))
            .map(|process| format!("process {} {}", process.pid, process.command));
        let mounts = machine::mounts_naming(&words)
            .into_iter()
            // containerd's own mount: after a shim's death the kubelet has it removed once a
            // minute, with runc too.
            .filter(|path| !(path.contains("io.containerd.grpc.v1.cri") && path.ends_with("/shm")))
            .map(|path| format!("mount {path}"));
        let cgroups = machine::cgroups_naming(&words).into_iter();
        let cgroups = cgroups.map(|path| format!("cgroup {}", path.display()));
        let state = &node.config.state_dir;
        let names = |dir: PathBuf| {
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).collect::<Vec<PathBuf>>()
        };
        let mut dirs = vec![state.join("pods"), state.join("containers")];
        // The files in runsc's directory, and in each of the root directories in it.
        dirs.extend(names(state.join("runsc")));
        dirs.push(state.join("runsc"));
        let files = dirs.into_iter().flat_map(names);
        let files = files
            .filter(|path| {
                words
                    .iter()
                    .any(|word| path.to_string_lossy().contains(word.as_str()))
            })
            .map(|path| format!("file {}", path.display()));
        let networks = self.networks.iter().filter(|path| path.exists());
        let networks = networks.map(|path| format!("network namespace {}", path.display()));
        processes
            .chain(mounts)
            .chain(cgroups)
            .chain(files)
            .chain(networks)
            .collect()
    }

    /// Describes what is left of the Pod's memory: images, ledger, the report of its last restore.
    pub fn of_memory(&self, node: &Node) -> Vec<String> {
        let images = node.images_of(&self.namespace, &self.uid);
        let report = node
            .config
            .state_dir
            .join("reports")
            .join(format!("{}.json", self.uid));
        let files = [node.ledger_path(&self.uid), report]
            .into_iter()
            .filter(|path| path.exists());
        images
            .into_iter()
            .chain(files)
            .map(|path| format!("file {}", path.display()))
            .collect()
    }
}

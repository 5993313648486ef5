//! What a Pod leaves on the node. Its ids are noted while it is there; afterwards nothing may name one of them.

use std::path::PathBuf;

use crate::machine::{self, Process};
use crate::node::Node;

/// The ids under which a Pod is known on the node.
#[derive(Debug, Clone)]
pub struct Footprint {
    uid: String,
    namespace: String,
    /// Ids of its sandboxes and containers.
    ids: Vec<String>,
}

impl Footprint {
    /// Notes the ids of a Pod's sandboxes and containers.
    pub fn take(node: &Node, namespace: &str, uid: &str) -> anyhow::Result<Self> {
        let mut footprint = Self {
            uid: uid.to_owned(),
            namespace: namespace.to_owned(),
            ids: Vec::new(),
        };
        footprint.add(node)?;
        Ok(footprint)
    }

    pub fn uid(&self) -> &str {
        &self.uid
    }

    /// Notes the ids that have come since, after the kubelet made the sandbox anew.
    pub fn add(&mut self, node: &Node) -> anyhow::Result<()> {
        for pod in node.sandboxes_of(&self.uid)? {
            let containers = node.records.containers_of(&pod.sandbox)?;
            self.ids.push(pod.sandbox.to_string());
            self.ids.extend(
                containers
                    .into_iter()
                    .map(|container| container.id.to_string()),
            );
        }
        self.ids.sort();
        self.ids.dedup();
        Ok(())
    }

    /// What is left of the sandboxes, in words: processes, mounts, cgroups, records, runsc's state, network namespaces.
    pub fn of_sandbox(&self, node: &Node) -> Vec<String> {
        self.of_sandbox_but(node, |_| false)
    }

    /// The same without the processes that are forgiven.
    pub fn of_sandbox_but(&self, node: &Node, forgiven: fn(&Process) -> bool) -> Vec<String> {
        let mut words = self.ids.clone();
        words.push(self.uid.clone());
        let processes = machine::processes_naming(&words)
            .into_iter()
            // A kubectl of a test names the Pod too.
            .filter(|process| !process.command.contains("kubectl") && !forgiven(process))
            .map(|process| format!("process {} {}", process.pid, process.command));
        let mounts = machine::mounts_naming(&words)
            .into_iter()
            // containerd's own: after a shim's death the kubelet has it removed once a minute, with runc too.
            .filter(|path| !(path.contains("io.containerd.grpc.v1.cri") && path.ends_with("/shm")))
            .map(|path| format!("mount {path}"));
        let cgroups = words.iter().flat_map(|word| machine::cgroups_naming(word));
        let cgroups = cgroups.map(|path| format!("cgroup {}", path.display()));
        let state = &node.config.state_dir;
        let files = ["runsc", "pods", "containers"].into_iter().flat_map(|dir| {
            let names = std::fs::read_dir(state.join(dir))
                .into_iter()
                .flatten()
                .flatten();
            names.map(|entry| entry.path()).collect::<Vec<PathBuf>>()
        });
        let files = files
            .filter(|path| {
                words
                    .iter()
                    .any(|word| path.to_string_lossy().contains(word.as_str()))
            })
            .map(|path| format!("file {}", path.display()));
        processes
            .chain(mounts)
            .chain(cgroups)
            .chain(files)
            .collect()
    }

    /// What is left of the Pod's memory, in words: images, ledger, the report of its last restore.
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

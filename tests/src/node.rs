//! Torpor's files about this node's Pods, and the processes of their sandboxes.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::Context;
use torpor_core::LedgerState;
use torpor_core::ids::{PodUid, SandboxId};
use torpor_core::ledger::Memory;
use torpor_records::Role;
use torpor_records::config::{Config, FILE_NAME};
use torpor_records::{ContainerRecord, PodRecord, Records, SandboxState};
use torpor_snapshots::Store;

use crate::machine::{self, Process};

/// Environment variable: directory in which Torpor is installed on the node.
const INSTALL_DIR: &str = "TORPOR_INSTALL_DIR";
const DEFAULT_INSTALL_DIR: &str = "/opt/torpor";
/// Name of the pause container in calls here; its record has no name.
pub const PAUSE: &str = "";

/// This machine as a node of the cluster.
#[derive(Debug)]
pub struct Node {
    pub config: Config,
    pub records: Records,
    pub store: Store,
}

impl Node {
    /// Reads the configuration that the installer wrote.
    pub fn here() -> anyhow::Result<Self> {
        let dir = std::env::var(INSTALL_DIR).unwrap_or_else(|_| DEFAULT_INSTALL_DIR.to_owned());
        let path = Path::new(&dir).join("bin").join(FILE_NAME);
        let config = Config::read(&path).context(
            "the end-to-end tests look at the node itself: run them, as root, on a node where Torpor is installed",
        )?;
        let (records, store) = (Records::new(&config), Store::open(&config.store_dir)?);
        Ok(Self {
            config,
            records,
            store,
        })
    }

    /// Returns the path of the shim's and the agent's configuration.
    pub fn config_file(&self) -> PathBuf {
        self.config.runsc.with_file_name(FILE_NAME)
    }

    /// Returns the path of the shim's program, which also runs commands on sandboxes.
    pub fn shim_program(&self) -> PathBuf {
        self.config
            .runsc
            .with_file_name("containerd-shim-torpor-v1")
    }

    /// Returns every sandbox that is recorded for the Pod, the newest last.
    pub fn sandboxes_of(&self, uid: &str) -> anyhow::Result<Vec<PodRecord>> {
        let mut found = self.records.pods()?;
        found.retain(|pod| pod.pod_uid.as_str() == uid);
        found.sort_by_key(|pod| self.records.made_at(&pod.sandbox));
        Ok(found)
    }

    /// Returns the Pod's newest sandbox.
    pub fn sandbox_of(&self, uid: &str) -> anyhow::Result<PodRecord> {
        self.sandboxes_of(uid)?
            .pop()
            .with_context(|| format!("no sandbox is recorded for Pod {uid}"))
    }

    /// Returns the state of the Pod's sandbox, by its record.
    pub fn state_of(&self, uid: &str) -> anyhow::Result<SandboxState> {
        Ok(self.records.state(&self.sandbox_of(uid)?.sandbox)?)
    }

    /// Reports whether the Pod's sandbox dozes with its memory reclaimed.
    ///
    /// The note of a doze outlasts it: a wake removes the note after the sandbox has answered. The
    /// ledger has the wake before the sandbox runs.
    pub fn dozes(&self, uid: &str) -> anyhow::Result<bool> {
        let note = self.records.doze(&self.sandbox_of(uid)?.sandbox)?;
        let reclaimed = note.is_some_and(|note| note.reclaimed);
        Ok(reclaimed && is_in_image(&self.ledger(uid)?.memory))
    }

    /// Returns the record of a container by its name in the Pod ([`PAUSE`] for the pause
    /// container).
    pub fn container(&self, uid: &str, name: &str) -> anyhow::Result<ContainerRecord> {
        let sandbox = self.sandbox_of(uid)?.sandbox;
        let found = self
            .records
            .containers_of(&sandbox)?
            .into_iter()
            .find(|container| {
                container.name == name && (container.role == Role::Sandbox) == (name == PAUSE)
            });
        found.with_context(|| format!("container {name:?} of Pod {uid} is not recorded"))
    }

    /// Returns the Pod's shim; not a process that containerd starts to find the shim, or to remove
    /// the remains of a dead one.
    pub fn shim(&self, uid: &str) -> anyhow::Result<Process> {
        let sandbox = self.sandbox_of(uid)?.sandbox;
        let is_at_work = |shim: &Process| {
            let verb = shim.command.rsplit(' ').next();
            verb.is_some_and(|verb| ["start", "delete"].contains(&verb))
        };
        let mut shims = self.shims_of(&sandbox).into_iter();
        shims
            .find(|shim| !is_at_work(shim))
            .with_context(|| format!("no shim runs for sandbox {sandbox}"))
    }

    /// Returns the shim of a sandbox, and its commands while they run.
    pub fn shims_of(&self, sandbox: &SandboxId) -> Vec<Process> {
        let mut found = machine::processes_naming(&[format!("-id {sandbox}")]);
        found.retain(|process| process.command.contains("containerd-shim"));
        found
    }

    /// Returns Torpor's shims whose sandbox is not recorded.
    ///
    /// The shim of a sandbox that is being created is one of them for a moment.
    pub fn shims_without_sandbox(&self) -> anyhow::Result<Vec<Process>> {
        let mut found = machine::processes_naming(&["/containerd-shim-torpor-v1 ".to_owned()]);
        let recorded = self.records.sandboxes()?;
        found.retain(|shim| {
            let is_of = |sandbox: &SandboxId| shim.command.contains(&format!("-id {sandbox}"));
            !recorded.iter().any(is_of)
        });
        Ok(found)
    }

    /// Returns the sandbox's own processes: sentry, gofers, and the stubs that hold the programs'
    /// memory.
    pub fn sandbox_processes(&self, uid: &str) -> anyhow::Result<Vec<Process>> {
        Ok(machine::processes_in(&self.sandbox_of(uid)?.cgroup))
    }

    /// Returns the Pod's sentry.
    pub fn sentry(&self, uid: &str) -> anyhow::Result<Process> {
        self.of_runsc(uid, "runsc-sandbox", "")
    }

    /// Returns one of the Pod's gofers.
    pub fn gofer(&self, uid: &str) -> anyhow::Result<Process> {
        self.of_runsc(uid, "runsc-gofer", "")
    }

    /// Returns the gofer of one of the Pod's containers.
    pub fn gofer_of(&self, uid: &str, name: &str) -> anyhow::Result<Process> {
        let container = self.container(uid, name)?;
        self.of_runsc(uid, "runsc-gofer", container.id.as_str())
    }

    /// Returns the first process of that name whose command line contains `word`.
    fn of_runsc(&self, uid: &str, name: &str, word: &str) -> anyhow::Result<Process> {
        let found = self
            .sandbox_processes(uid)?
            .into_iter()
            .find(|p| p.command.starts_with(name) && p.command.contains(word));
        found.with_context(|| format!("no {name} {word} runs for Pod {uid}"))
    }

    /// Returns the directory of a namespace's images.
    pub fn images_dir(&self, namespace: &str) -> PathBuf {
        self.config.store_dir.join("images").join(namespace)
    }

    /// Returns everything in the namespace's folder of the store that is named after the Pod:
    /// images, partial images, rubbish.
    pub fn images_of(&self, namespace: &str, uid: &str) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(self.images_dir(namespace)) else {
            return Vec::new();
        };
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let mut found: Vec<PathBuf> = paths
            .filter(|path| {
                path.file_name()
                    .is_some_and(|name| name.to_string_lossy().contains(uid))
            })
            .collect();
        found.sort();
        found
    }

    /// Returns the Pod's image; an error unless there is exactly one.
    pub fn image_of(&self, namespace: &str, uid: &str) -> anyhow::Result<PathBuf> {
        let mut images = self.images_of(namespace, uid);
        anyhow::ensure!(
            images.len() == 1,
            "Pod {uid} has other than one image: {images:?}"
        );
        images.pop().context("no image")
    }

    /// Returns the path of the Pod's ledger.
    pub fn ledger_path(&self, uid: &str) -> PathBuf {
        self.config.store_dir.join("ledger").join(uid)
    }

    /// Returns what the Pod's ledger states.
    pub fn ledger(&self, uid: &str) -> anyhow::Result<LedgerState> {
        let ledger = self.store.ledger(&PodUid::new(uid)?)?;
        ledger.read().context("cannot read the ledger")
    }

    /// Returns the number of entries that the Pod's ledger has had; a wake makes two.
    pub fn ledger_seq(&self, uid: &str) -> anyhow::Result<u64> {
        Ok(self.ledger(uid)?.seq)
    }

    /// Describes the Pod's ledger for people.
    pub fn ledger_words(&self, uid: &str) -> String {
        match self.ledger(uid) {
            Ok(ledger) => format!("{ledger:?}"),
            Err(error) => format!("{error:#}"),
        }
    }
}

/// Reports whether the memory is safe in an image, whatever happens to the sandbox's processes.
pub(crate) fn is_in_image(memory: &Memory) -> bool {
    match memory {
        Memory::Committed { .. } | Memory::Asleep { .. } | Memory::WakeFailed { .. } => true,
        // A sandbox that is being restored may be awake already. One that is being saved may not be
        // saved yet.
        Memory::Live | Memory::Saving { .. } | Memory::Waking { .. } => false,
    }
}

/// Returns the containerd of this node.
///
/// The installer's unit tests may run other ones at the same time, which do not count.
pub fn containerd() -> anyhow::Result<Process> {
    let folder_of_tests = std::env::temp_dir();
    let found = machine::processes().into_iter().find(|process| {
        let program = Path::new(process.command.split(' ').next().unwrap_or_default());
        program.ends_with("containerd") && !program.starts_with(&folder_of_tests)
    });
    found.context("containerd does not run on this machine")
}

/// Returns the socket of the containerd that serves the kubelet, from the command line of one of
/// its shims.
pub fn containerd_socket() -> anyhow::Result<PathBuf> {
    static SOCKET: OnceLock<PathBuf> = OnceLock::new();
    if let Some(known) = SOCKET.get() {
        return Ok(known.clone());
    }
    let processes = machine::processes();
    let mut found = processes.iter().filter_map(|one| address_in(&one.command));
    let found = found
        .next()
        .context("no shim of the kubelet's containerd runs on this machine")?;
    Ok(SOCKET.get_or_init(|| found).clone())
}

/// Returns containerd's address if this is the command line of a shim of the kubelet's Pods.
fn address_in(command: &str) -> Option<PathBuf> {
    let mut words = command.split(' ');
    let is_shim = words.next()?.contains("containerd-shim");
    let is_the_kubelets = command.contains("-namespace k8s.io");
    let address = words.skip_while(|word| *word != "-address").nth(1)?;
    (is_shim && is_the_kubelets).then(|| address.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containerds_socket_is_that_of_the_kubelets_shims() {
        let shim = "/bin/containerd-shim-runc-v2 -namespace k8s.io -id 0a -address /run/c.sock";
        assert_eq!(address_in(shim), Some("/run/c.sock".into()));
        for other in [
            "/bin/containerd-shim-runc-v2 -namespace moby -id 0a -address /run/docker.sock",
            "/bin/ctr -namespace k8s.io -address /run/c.sock",
            "/bin/containerd-shim-runc-v2 -namespace k8s.io -address",
            "",
        ] {
            assert_eq!(address_in(other), None, "{other}");
        }
    }
}

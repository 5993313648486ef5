//! What the agent has of its node: paths, runsc, records, images. Synchronous: called from blocking threads.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use torpor_cgroup::{Hierarchies, swap};
use torpor_core::ids::{ImageId, PodUid, SandboxId};
use torpor_core::store_limit::PerNamespace;
use torpor_records::config::Config;
use torpor_records::{PodLock, PodRecord, Records, WakeCause};
use torpor_runsc::command::NodeRunsc;
use torpor_runsc::control::{self, Control};
use torpor_runsc::keeper::{self, Answer, Request, Verb};
use torpor_snapshots::{Fingerprint, SaveError, Store};

use crate::policy::swap::{SwapRoom, has_swap};
use crate::reconcile::known::Known;

/// Calls on a control socket that do no work. A sandbox that is busy with its pages answers late.
pub(crate) const CALL_LIMIT: Duration = Duration::from_secs(10);

/// What this node's runsc can do, or why it is not known.
#[derive(Debug, Clone)]
pub(crate) struct Ability {
    pub(crate) capabilities: torpor_runsc::probe::Capabilities,
    pub(crate) fingerprint: Fingerprint,
}

/// What images may take of their disk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoreLimits {
    /// Percent of the disk that stay free.
    pub(crate) reserve: u8,
    pub(crate) per_namespace: PerNamespace,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) runsc: NodeRunsc,
    pub(crate) records: Records,
    known: Known,
    pub(crate) store: Store,
    pub(crate) limits: StoreLimits,
    pub(crate) ability: Result<Ability, String>,
    /// The port of the kubelet's API.
    pub(crate) kubelet_port: u16,
    /// None where the agent is not given the host's.
    pub(crate) cgroups: Option<Hierarchies>,
    /// What swap its dozing sandboxes may take.
    pub(crate) swap: Arc<SwapRoom>,
}

impl Node {
    pub(crate) fn new(
        config: Config,
        limits: StoreLimits,
        cgroup_root: &Path,
        swap: Arc<SwapRoom>,
    ) -> Result<Self, SaveError> {
        let runsc = NodeRunsc::new(&config);
        Ok(Self {
            ability: probe(&config, &runsc),
            records: Records::new(&config),
            known: Known::default(),
            store: Store::open(&config.store_dir)?,
            limits,
            kubelet_port: config.kubelet_port,
            cgroups: Hierarchies::find(cgroup_root).ok(),
            swap,
            runsc,
        })
    }

    /// The newest sandbox of a Pod.
    pub(crate) fn sandbox_of(&self, pod: &PodUid) -> Option<PodRecord> {
        self.known.sandbox_of(&self.records, pod)
    }

    /// The Pods of the node's sandboxes.
    pub(crate) fn pods(&self) -> BTreeSet<PodUid> {
        self.known.pods(&self.records)
    }

    /// The Pod's images that sandboxes of this node are being restored from.
    pub(crate) fn being_restored(&self, pod: &PodUid) -> BTreeSet<ImageId> {
        self.known.being_restored(&self.records, pod)
    }

    /// Whether sandboxes may doze on this node at all. What forbids it to one is seen with that one.
    pub(crate) fn can_doze(&self) -> Result<(), String> {
        has_swap()?;
        let told = self.cgroups.as_ref().map(swap::allowed_to_pods);
        told.unwrap_or(Ok(())).map_err(|error| error.to_string())
    }

    /// Whether no cgroup above the sandbox' own forbids swap. Its own is Torpor's, which lifts the limit there when it pushes the memory out.
    pub(crate) fn may_swap(&self, record: &PodRecord) -> Result<(), String> {
        let above = self.cgroups.as_ref().zip(record.cgroup.parent());
        let told = above.map(|(cgroups, pod)| swap::allowed(cgroups, pod));
        told.unwrap_or(Ok(())).map_err(|error| error.to_string())
    }

    /// Working set of the sandbox' Pod in bytes; none where it is not counted.
    pub(crate) fn working_set(&self, record: &PodRecord) -> Option<u64> {
        self.cgroups.as_ref()?.working_set(record.cgroup.parent()?)
    }

    /// Memory of the sandbox' Pod in bytes, in swap or not; none where not all of it is counted.
    pub(crate) fn memory_held(&self, record: &PodRecord) -> Option<u64> {
        self.cgroups.as_ref()?.held(record.cgroup.parent()?)
    }

    /// What the images of one namespace may take, in bytes; none without a limit.
    pub(crate) fn namespace_limit(&self) -> Option<u64> {
        let total = self.store.capacity().map_or(0, |capacity| capacity.total);
        self.limits.per_namespace.bytes(total)
    }

    /// Has the pod's keeper run a verb of torpor-oci, which holds the lock for as long as it works, whatever becomes of the agent.
    pub(crate) fn ask_keeper(
        &self,
        sandbox: &SandboxId,
        lock: &PodLock,
        verb: Verb,
        image: Option<&ImageId>,
        cause: Option<WakeCause>,
        limit: Duration,
    ) -> Result<Answer, keeper::Error> {
        let request = Request::Run {
            verb,
            image: image.cloned(),
            cause,
        };
        let dir = self.pause_dir(sandbox);
        keeper::ask(&dir, &request, &[lock.as_fd()], limit).map(|(answer, _)| answer)
    }

    /// The way to the sandbox. One that was stopped while it dozed goes on: the agent may signal nobody, so its keeper does it.
    pub(crate) fn connect(&self, sandbox: &SandboxId) -> Result<Control, control::Error> {
        self.let_go_on(sandbox);
        self.runsc.connect(sandbox)
    }

    /// For who connects by himself.
    pub(crate) fn let_go_on(&self, sandbox: &SandboxId) {
        if self.runsc.is_halted(sandbox) {
            let dir = self.pause_dir(sandbox);
            // Where that fails, so does the connection, and says why.
            let _ = keeper::ask(&dir, &Request::GoOn, &[], CALL_LIMIT);
        }
    }

    /// Directory of the pod sandbox' keeper.
    pub(crate) fn pause_dir(&self, sandbox: &SandboxId) -> std::path::PathBuf {
        self.records.container_dir(&sandbox.clone().into())
    }
}

fn probe(config: &Config, runsc: &NodeRunsc) -> Result<Ability, String> {
    let asked = || -> Result<Ability, torpor_runsc::probe::Error> {
        let capabilities = torpor_runsc::probe::capabilities(runsc)?;
        let version = runsc.version(CALL_LIMIT)?;
        let fingerprint = torpor_runsc::probe::fingerprint(config, version)?;
        Ok(Ability {
            capabilities,
            fingerprint,
        })
    };
    asked().map_err(|error| format!("{:#}", anyhow::Error::new(error)))
}

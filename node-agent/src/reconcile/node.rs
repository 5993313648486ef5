//! The agent's access to its node: paths, runsc, records, images.
//!
//! The calls block, so they run on threads that may block.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use torpor_cgroup::{Hierarchies, swap};
use torpor_core::ids::{ImageId, PodUid};
use torpor_core::store_limit::PerNamespace;
use torpor_records::config::Config;
use torpor_records::{PodRecord, Records};
use torpor_runsc::command::NodeRunsc;
use torpor_snapshots::{Fingerprint, SaveError, Store};

use crate::policy::swap::{SwapRoom, has_swap};
use crate::reconcile::sandbox_index::SandboxIndex;

/// Time limit of `runsc --version`.
const VERSION_LIMIT: Duration = Duration::from_secs(10);

/// The capabilities of this node's runsc, and the fingerprint of its images.
#[derive(Debug, Clone)]
pub(crate) struct Ability {
    pub(crate) capabilities: torpor_runsc::probe::Capabilities,
    pub(crate) fingerprint: Fingerprint,
}

/// The limits of images on their disk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoreLimits {
    /// Percent of the disk that stays free.
    pub(crate) reserve: u8,
    pub(crate) per_namespace: PerNamespace,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) records: Records,
    index: SandboxIndex,
    pub(crate) store: Store,
    pub(crate) limits: StoreLimits,
    /// `Err`: why runsc cannot be probed.
    pub(crate) ability: Result<Ability, String>,
    /// The port of the kubelet's API.
    pub(crate) kubelet_port: u16,
    /// None if the agent has no access to the host's cgroups.
    pub(crate) cgroups: Option<Hierarchies>,
    /// The swap that dozing sandboxes may take.
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
            index: SandboxIndex::default(),
            store: Store::open(&config.store_dir)?,
            limits,
            kubelet_port: config.kubelet_port,
            cgroups: Hierarchies::find(cgroup_root).ok(),
            swap,
        })
    }

    /// Returns the newest sandbox of a Pod.
    pub(crate) fn sandbox_of(&self, pod: &PodUid) -> Option<PodRecord> {
        self.index.sandbox_of(&self.records, pod)
    }

    /// Returns the Pods of the node's sandboxes.
    pub(crate) fn pods(&self) -> BTreeSet<PodUid> {
        self.index.pods(&self.records)
    }

    /// Returns the Pod's images from which sandboxes of this node are being restored.
    pub(crate) fn being_restored(&self, pod: &PodUid) -> BTreeSet<ImageId> {
        self.index.being_restored(&self.records, pod)
    }

    /// Checks that sandboxes may doze on this node at all. [`Self::may_swap`] checks one sandbox.
    /// `Err`: the reason.
    pub(crate) fn can_doze(&self) -> Result<(), String> {
        has_swap()?;
        let allowed = self.cgroups.as_ref().map(swap::allowed_to_pods);
        allowed.unwrap_or(Ok(())).map_err(|error| error.to_string())
    }

    /// Checks that no cgroup above the sandbox's own forbids swap. Torpor itself lifts the
    /// limit of the sandbox's own cgroup when it pushes the memory out. `Err`: the reason.
    pub(crate) fn may_swap(&self, record: &PodRecord) -> Result<(), String> {
        let above = self.cgroups.as_ref().zip(record.cgroup.parent());
        let allowed = above.map(|(cgroups, pod)| swap::allowed(cgroups, pod));
        allowed.unwrap_or(Ok(())).map_err(|error| error.to_string())
    }

    /// Returns the working set of the sandbox's Pod in bytes; none if the kernel does not count it.
    pub(crate) fn working_set(&self, record: &PodRecord) -> Option<u64> {
        self.cgroups.as_ref()?.working_set(record.cgroup.parent()?)
    }

    /// Returns how many bytes the images of one namespace may take; none without a limit.
    pub(crate) fn namespace_limit(&self) -> Option<u64> {
        let total = self.store.capacity().map_or(0, |capacity| capacity.total);
        self.limits.per_namespace.bytes(total)
    }
}

fn probe(config: &Config, runsc: &NodeRunsc) -> Result<Ability, String> {
    let probe = || -> Result<Ability, torpor_runsc::probe::Error> {
        let capabilities = torpor_runsc::probe::capabilities(runsc)?;
        let version = runsc.version(VERSION_LIMIT)?;
        let fingerprint = torpor_runsc::probe::fingerprint(config, version)?;
        Ok(Ability {
            capabilities,
            fingerprint,
        })
    };
    probe().map_err(|error| format!("{:#}", anyhow::Error::new(error)))
}

//! State shared by all reconcile passes.

use std::{collections::HashMap, sync::Mutex, time::Duration};

use tokio::sync::{OnceCell, Semaphore};
use torpor_repository::KeyFile;

use crate::{
    archive,
    calls::Apiserver,
    candidates::Candidates,
    claim,
    metrics::{Counted, Metrics},
    pool,
    settings::Settings,
    staging::nodes::Nodes,
    template,
    watches::{Caches, Queues},
};

/// State shared by all reconcile passes.
#[derive(Debug)]
pub struct Context {
    pub api: Apiserver,
    pub caches: Caches,
    pub queues: Queues,
    pub settings: Settings,
    pub cluster_domain: String,
    /// UID that identifies this cluster in repositories, once it was read.
    pub cluster_uid: OnceCell<String>,
    /// Encryption keys of repositories.
    pub keys: KeyFile,
    /// Turns of the passes that write or read archives.
    pub archives: Semaphore,
    pub metrics: Metrics,
    pub failures: Failures,
    /// Members of pools that claims may take.
    pub candidates: Candidates,
    /// Facts about claims that this process knows and no object holds yet.
    pub claims: claim::memory::Memory,
    /// Facts about pools that this process knows and no object holds yet.
    pub pools: pool::memory::Memory,
    /// Events published about templates.
    pub templates: template::memory::Memory,
    /// Nodes on which images may be staged.
    pub nodes: Nodes,
}

impl Context {
    /// Returns a context with empty caches.
    pub fn new(api: Apiserver, cluster_domain: String, settings: Settings) -> Self {
        let caches = Caches::default();
        let metrics = Metrics::default();
        let repositories = &settings.repositories;
        metrics.count(Counted {
            sandboxes: caches.sandboxes.clone(),
            pools: caches.pools.clone(),
            templates: caches.templates.clone(),
            staged: caches.staged.clone(),
        });
        Self {
            api,
            caches,
            queues: Queues::default(),
            keys: KeyFile::new(&repositories.keys, repositories.kms.as_deref()),
            settings,
            cluster_domain,
            cluster_uid: OnceCell::new(),
            archives: Semaphore::new(archive::AT_ONCE),
            metrics,
            failures: Failures::default(),
            candidates: Candidates::default(),
            claims: claim::memory::Memory::default(),
            pools: pool::memory::Memory::default(),
            templates: template::memory::Memory::default(),
            nodes: Nodes::default(),
        }
    }
}

impl Context {
    /// Returns the current metrics in OpenMetrics text format.
    pub fn metrics_text(&self) -> Result<String, std::fmt::Error> {
        let Queues {
            sandboxes,
            snapshots,
            claims,
            pools,
            templates,
            triggers,
            pod_snapshots,
            retention,
        } = &self.queues;
        for (controller, queue) in [
            ("sandbox", sandboxes),
            ("sandboxsnapshot", snapshots),
            ("sandboxclaim", claims),
            ("sandboxwarmpool", pools),
            ("sandboxtemplate", templates),
            ("podsnapshotmanualtrigger", triggers),
            ("podsnapshot", pod_snapshots),
            ("snapshotretention", retention),
        ] {
            self.metrics.set_depth(controller, queue.depth());
        }
        for namespace in self.settings.namespaces.names() {
            let listed = self.caches.knows(namespace, &self.settings);
            self.metrics.set_listed(namespace, listed);
        }
        self.metrics.text()
    }
}

/// Consecutive failures of each object, for the growing delay between tries.
#[derive(Debug, Default)]
pub struct Failures(Mutex<HashMap<String, u32>>);

/// Delay after the first failure, doubled with each further failure.
const FIRST_DELAY: Duration = Duration::from_millis(50);
/// Longest delay between tries.
const LONGEST_DELAY: Duration = Duration::from_secs(120);

impl Failures {
    /// Counts a failure and returns the delay before the next try.
    pub fn count(&self, object: &str) -> Duration {
        let mut all = self
            .0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let count = all.entry(object.to_owned()).or_default();
        let delay = FIRST_DELAY
            .saturating_mul(1 << (*count).min(16))
            .min(LONGEST_DELAY);
        *count += 1;
        delay
    }

    /// Forgets the failures of an object after a success or after its deletion.
    pub fn forget(&self, object: &str) {
        self.0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .remove(object);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_a_limit_and_start_anew_after_success() {
        let failures = Failures::default();
        let first: Vec<u128> = (0..3).map(|_| failures.count("a").as_millis()).collect();
        assert_eq!(first, [50, 100, 200]);
        for _ in 0..100 {
            failures.count("a");
        }
        assert_eq!(failures.count("a"), LONGEST_DELAY);
        failures.forget("a");
        assert_eq!(failures.count("a"), FIRST_DELAY);
    }
}

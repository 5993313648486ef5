//! What the command line decides about how kinds are reconciled.

use std::{sync::Arc, time::Duration};

use torpor_api::SandboxWarmPool;

use crate::{network::Cidr, scope::Namespaces};

/// How kinds are reconciled. The defaults are upstream's.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Reconcile SandboxClaims, SandboxTemplates and SandboxWarmPools too.
    pub extensions: bool,
    /// Publish Events about Sandboxes.
    pub sandbox_events: bool,
    /// Namespaces that the controller works in.
    pub namespaces: Namespaces,
    /// Watch only Services that carry the label of a Sandbox.
    pub cache_label_selectors: bool,
    pub sandbox_workers: u16,
    pub claim_workers: u16,
    pub pool_workers: u16,
    pub template_workers: u16,
    /// Image of the sandbox runtime, for Sandboxes that ask to have it put into their Pod. Torpor's.
    pub runtime_image: Option<Arc<str>>,
    pub pools: PoolSettings,
    pub claims: ClaimSettings,
    pub network: NetworkSettings,
}

impl Settings {
    /// Whether anything is decided by NetworkPolicies.
    pub fn watches_policies(&self) -> bool {
        self.extensions || self.network.default_policy
    }
}

/// What sandboxes may reach. Torpor's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkSettings {
    /// Sandboxes that have no template get the strict rules too.
    pub default_policy: bool,
    /// Ranges that the strict rules block beside the private addresses.
    pub except: Vec<Cidr>,
}

/// How pools are filled.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolSettings {
    /// Most members that are made or deleted in one pass.
    pub max_batch: usize,
    /// How long to wait after a member has left, so that a burst of claims is served first. Each further one that leaves begins the wait anew.
    pub replenish_delay: Duration,
    /// Members per second and pool; 0 does not limit.
    pub max_refill_rate: f64,
    /// How long a member may take to become ready before it is replaced.
    pub readiness_grace: Duration,
    /// How often a member that no node has room for is looked at again.
    pub unschedulable_recheck: Duration,
    /// Whether the cluster autoscaler may take unclaimed members away.
    pub eviction: bool,
    /// How often the status of a pool is written at most while members come and go. Torpor's.
    pub status_interval: Duration,
    /// How long a pass goes on while other pools wait for theirs. Torpor's.
    pub turn: Duration,
}

/// How claims are served.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimSettings {
    pub events: bool,
    /// Write when a claim was first seen, and its trace.
    pub observability: bool,
    /// How long after its creation a claim waits for a member that has no address yet.
    pub candidate_grace: Duration,
    /// Domains whose labels a claim may put on its Pod.
    pub label_domains: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            extensions: false,
            sandbox_events: true,
            namespaces: Namespaces::default(),
            cache_label_selectors: false,
            sandbox_workers: 100,
            claim_workers: 8,
            pool_workers: 1,
            template_workers: 1,
            runtime_image: None,
            pools: PoolSettings::default(),
            claims: ClaimSettings::default(),
            network: NetworkSettings::default(),
        }
    }
}

impl PoolSettings {
    /// Those of one pool, which may say some of its own.
    #[must_use]
    pub fn of(&self, pool: &SandboxWarmPool) -> Self {
        let own = pool.spec.readiness_grace_period_seconds;
        let own = own.and_then(|seconds| u64::try_from(seconds).ok());
        Self {
            readiness_grace: own.map_or(self.readiness_grace, Duration::from_secs),
            ..self.clone()
        }
    }
}

impl Default for PoolSettings {
    fn default() -> Self {
        Self {
            max_batch: 300,
            replenish_delay: Duration::ZERO,
            max_refill_rate: 0.0,
            readiness_grace: Duration::from_secs(300),
            unschedulable_recheck: Duration::from_secs(60),
            eviction: true,
            status_interval: Duration::from_millis(500),
            // As a pass at 20 claims a second mostly takes: shorter ones are not cut.
            turn: Duration::from_secs(1),
        }
    }
}

impl Default for ClaimSettings {
    fn default() -> Self {
        Self {
            events: true,
            observability: true,
            candidate_grace: Duration::from_secs(2),
            label_domains: vec!["sandbox.users.io".to_owned()],
        }
    }
}

/// The domains that a file lists: one a line or separated by commas, `#` begins a comment. `None` when it lists none.
pub fn label_domains(text: &str) -> Option<Vec<String>> {
    let domains: Vec<String> = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default())
        .flat_map(|line| line.split(','))
        .map(|domain| domain.trim().to_ascii_lowercase())
        .filter(|domain| !domain.is_empty())
        .collect();
    (!domains.is_empty()).then_some(domains)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_allow_list_is_read_line_by_line() {
        let text = "# ours\nexample.com\n team.example.org , Other.io # and theirs\n\n";
        let expected = ["example.com", "team.example.org", "other.io"];
        assert_eq!(label_domains(text).unwrap(), expected);
        assert_eq!(label_domains("# nothing\n"), None);
    }
}

//! Settings of the reconcilers, from the command line.

use std::{path::PathBuf, sync::Arc, time::Duration};

use torpor_api::SandboxWarmPool;

use crate::{network::Cidr, scope::Namespaces};

/// Settings of all reconcilers. The defaults are upstream's.
#[derive(Clone, Debug)]
pub struct Settings {
    /// True if SandboxClaims, SandboxTemplates and SandboxWarmPools are reconciled.
    pub extensions: bool,
    /// True if Events about Sandboxes are published.
    pub sandbox_events: bool,
    /// Namespaces that the controller works in.
    pub namespaces: Namespaces,
    /// True if only Services with the label of a Sandbox are watched.
    pub cache_label_selectors: bool,
    pub sandbox_workers: u16,
    pub claim_workers: u16,
    pub pool_workers: u16,
    pub template_workers: u16,
    /// Image of the sandbox runtime, for Sandboxes that ask for it in their Pod. Torpor's.
    pub runtime_image: Option<Arc<str>>,
    pub pools: PoolSettings,
    pub claims: ClaimSettings,
    pub network: NetworkSettings,
    pub repositories: RepositorySettings,
}

impl Settings {
    /// Reports whether any NetworkPolicy affects reconciling.
    pub fn watches_policies(&self) -> bool {
        self.extensions || self.network.default_policy
    }
}

/// Repositories of images. Torpor's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RepositorySettings {
    /// Directory with one file for each credential.
    pub credentials: PathBuf,
    /// File with the encryption keys.
    pub keys: PathBuf,
    /// Socket of the KMS plug-in that opens sealed keys.
    pub kms: Option<PathBuf>,
    /// Interval between sweeps; none without sweeps.
    pub sweep_interval: Option<Duration>,
}

/// Network access of sandboxes. Torpor's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkSettings {
    /// True if Sandboxes without a template get the strict rules too.
    pub default_policy: bool,
    /// Ranges that the strict rules block in addition to the private addresses.
    pub except: Vec<Cidr>,
}

/// Settings of warm pools.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolSettings {
    /// Most members that are created or deleted in one pass.
    pub max_batch: usize,
    /// Delay before a member that left is replaced, so that a burst of claims is served first. Each
    /// further member that leaves restarts the delay.
    pub replenish_delay: Duration,
    /// Most members created per second and pool; 0 is no limit.
    pub max_refill_rate: f64,
    /// Time that a member may take to become ready before it is replaced.
    pub readiness_grace: Duration,
    /// Interval at which a member that no node has room for is checked again.
    pub unschedulable_recheck: Duration,
    /// True if the cluster autoscaler may evict unclaimed members.
    pub eviction: bool,
    /// Shortest interval between writes of a pool's status while members come and go. Torpor's.
    pub status_interval: Duration,
    /// Longest time of a pass while other pools wait. Torpor's.
    pub turn: Duration,
}

/// Settings of claims.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimSettings {
    pub events: bool,
    /// True if the time of first sight and the trace are written to the claim.
    pub observability: bool,
    /// Time after its creation that a claim waits for a member without an address.
    pub candidate_grace: Duration,
    /// Domains whose labels a claim may set on its Pod.
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
            repositories: RepositorySettings::default(),
        }
    }
}

impl PoolSettings {
    /// Returns the settings of one pool, with those that the pool sets itself.
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
            // Most passes at 20 claims a second take no longer, and are not cut.
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

/// Parses the domains in a file: one a line or separated by commas; `#` begins a comment. `None`
/// when there are none.
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

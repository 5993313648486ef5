//! Templates, warm pools and claims for tests.

use kube::ResourceExt;
use kube::api::ListParams;
use serde_json::{Value, json};
use torpor_api::conditions::find;
use torpor_api::{Sandbox, SandboxClaim, SandboxWarmPool};

use crate::case::Case;
use crate::pods::with;
use crate::sandboxes::LIMIT;
use crate::wait;

/// Returns an object of upstream's extensions.
pub fn extension(kind: &str, name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": kind,
        "metadata": { "name": name },
        "spec": spec,
    })
}

impl Case {
    /// Waits until the pool has this many members, all Ready.
    pub async fn pool_is_ready(&self, pool: &str, replicas: u32) -> anyhow::Result<()> {
        let (pools, words) = (self.api::<SandboxWarmPool>(), "the pool is full and ready");
        wait::object(pools, pool, words, LIMIT, |found| {
            let status = found.and_then(|pool| pool.status).unwrap_or_default();
            let ready = status.ready_replicas.unwrap_or(0);
            if i64::from(ready) == i64::from(replicas) && status.replicas == status.ready_replicas {
                Ok(())
            } else {
                Err(format!("{status:?}"))
            }
        })
        .await
    }

    /// Claims from the pool; returns the name of the Sandbox that the claim got, once it is Ready.
    pub async fn claim(&self, pool: &str, name: &str) -> anyhow::Result<String> {
        self.begin_claim(pool, name, json!({})).await?;
        self.claimed(name).await
    }

    /// Creates a claim from the pool. `more`: fields of its spec.
    pub async fn begin_claim(&self, pool: &str, name: &str, more: Value) -> anyhow::Result<()> {
        let spec =
            json!({ "warmPoolRef": { "name": pool }, "lifecycle": { "shutdownPolicy": "Delete" } });
        self.create(extension("SandboxClaim", name, with(spec, more)))
            .await
    }

    /// Waits until the claim is Ready; returns the name of its Sandbox.
    pub async fn claimed(&self, name: &str) -> anyhow::Result<String> {
        let claims = self.api::<SandboxClaim>();
        wait::object(claims, name, "the claim is Ready", LIMIT, |found| {
            let status = found.and_then(|claim| claim.status).unwrap_or_default();
            let ready = find(&status.conditions, "Ready").is_some_and(|c| c.status == "True");
            match status.sandbox {
                Some(sandbox) if ready => Ok(sandbox.name),
                _ => Err(format!("{:?}", status.conditions)),
            }
        })
        .await
    }

    /// Returns the unclaimed members of all pools.
    pub async fn members(&self) -> anyhow::Result<Vec<Sandbox>> {
        let members = ListParams::default().labels(torpor_api::labels::WARM_POOL_SANDBOX);
        let mut found = self.sandboxes().list(&members).await?.items;
        found.retain(|member| member.metadata.deletion_timestamp.is_none());
        found.sort_by_key(ResourceExt::name_any);
        Ok(found)
    }
}

//! Objects that the load creates, deletes and waits for.

use std::{fmt::Debug, time::Duration};

use anyhow::Context as _;
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{DeleteParams, ListParams, PostParams},
    core::NamespaceResourceScope,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use torpor_api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};

/// Name of the template and of the pool in every namespace.
const POOL: &str = "pool";
/// Time between two looks at a condition.
const LOOK: Duration = Duration::from_millis(200);

/// Creates a namespace; Pods may be created in it when this returns.
pub(crate) async fn namespace(client: &Client, name: &str) -> anyhow::Result<()> {
    let all: Api<Namespace> = Api::all(client.clone());
    let namespace = serde_json::from_value(json!({"metadata": {"name": name}}))?;
    let created = all.create(&PostParams::default(), &namespace).await;
    created.with_context(|| format!("create namespace {name}"))?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), name);
    until(
        "the default ServiceAccount",
        Duration::from_secs(30),
        || async { Ok(accounts.get_opt("default").await?.is_some()) },
    )
    .await
}

/// Creates a template and a pool of it.
pub(crate) async fn pool(client: &Client, namespace: &str, members: i32) -> anyhow::Result<()> {
    let template = json!({
        "apiVersion": SandboxTemplate::api_version(&()), "kind": SandboxTemplate::kind(&()),
        "metadata": {"name": POOL},
        "spec": {"podTemplate": pod_template()},
    });
    create::<SandboxTemplate>(client, namespace, template).await?;
    let pool = json!({
        "apiVersion": SandboxWarmPool::api_version(&()), "kind": SandboxWarmPool::kind(&()),
        "metadata": {"name": POOL},
        "spec": {"replicas": members, "sandboxTemplateRef": {"name": POOL}},
    });
    create::<SandboxWarmPool>(client, namespace, pool).await
}

fn pod_template() -> Value {
    json!({"spec": {"containers": [{
        "name": "main",
        "image": "debian:latest",
        "command": ["sleep", "infinity"],
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
    }]}})
}

/// Returns a claim for the namespace's pool.
pub(crate) fn claim(name: &str) -> SandboxClaim {
    let mut claim = SandboxClaim::default();
    claim.metadata.name = Some(name.to_owned());
    claim.spec.warm_pool_ref.name = POOL.to_owned();
    claim
}

/// Returns a Sandbox as a pool makes one, for the bare client.
pub(crate) fn sandbox(name: &str) -> Value {
    json!({
        "apiVersion": Sandbox::api_version(&()), "kind": Sandbox::kind(&()),
        "metadata": {
            "name": name,
            "labels": {
                "agents.x-k8s.io/warm-pool-sandbox": "00000000",
                "agents.x-k8s.io/sandbox-template-ref-hash": "00000000",
            },
        },
        "spec": {"podTemplate": pod_template()},
    })
}

pub(crate) async fn create<K>(client: &Client, namespace: &str, object: Value) -> anyhow::Result<()>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + Serialize
        + DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    let object: K = serde_json::from_value(object)?;
    let created = api.create(&PostParams::default(), &object).await;
    let name = object.name_any();
    created.with_context(|| format!("create {} {name}", K::kind(&())))?;
    Ok(())
}

/// Waits until the pool of each namespace has all its members ready.
pub(crate) async fn pools_full(
    client: &Client,
    namespaces: &[String],
    members: i32,
    limit: Duration,
) -> anyhow::Result<()> {
    for namespace in namespaces {
        let pools: Api<SandboxWarmPool> = Api::namespaced(client.clone(), namespace);
        until("a full pool", limit, || async {
            let pool = pools.get_status(POOL).await?;
            Ok(pool
                .status
                .is_some_and(|status| status.ready_replicas == Some(members)))
        })
        .await?;
    }
    Ok(())
}

/// Deletes all Sandboxes and claims of a namespace; waits until they and their Pods are gone.
pub(crate) async fn clear(client: &Client, namespace: &str) -> anyhow::Result<()> {
    let claims: Api<SandboxClaim> = Api::namespaced(client.clone(), namespace);
    let sandboxes: Api<Sandbox> = Api::namespaced(client.clone(), namespace);
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    delete_all(&claims).await?;
    delete_all(&sandboxes).await?;
    let all = ListParams::default();
    until("an empty namespace", Duration::from_secs(120), || async {
        Ok(claims.list_metadata(&all).await?.items.is_empty()
            && sandboxes.list_metadata(&all).await?.items.is_empty()
            && pods.list_metadata(&all).await?.items.is_empty())
    })
    .await
}

async fn delete_all<K>(api: &Api<K>) -> anyhow::Result<()>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let names = api.list_metadata(&ListParams::default()).await?.items;
    let delete = DeleteParams::default();
    stream::iter(names)
        .map(|object| {
            let delete = &delete;
            async move {
                match api.delete(&object.name_any(), delete).await {
                    Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
                    other => other.map(drop),
                }
            }
        })
        .buffer_unordered(16)
        .try_collect::<()>()
        .await
        .context("delete what the bare client made")
}

/// Polls until the condition holds.
pub(crate) async fn until<F, Holds>(what: &str, limit: Duration, holds: F) -> anyhow::Result<()>
where
    F: Fn() -> Holds,
    Holds: Future<Output = anyhow::Result<bool>>,
{
    let looks = async {
        while !holds().await? {
            tokio::time::sleep(LOOK).await;
        }
        anyhow::Ok(())
    };
    match tokio::time::timeout(limit, looks).await {
        Ok(result) => result.with_context(|| format!("wait for {what}")),
        Err(_) => anyhow::bail!("no {what} within {limit:?}"),
    }
}

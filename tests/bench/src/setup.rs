//! Namespace and Pods of a benchmark on the development cluster.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::{Value, json};
use torpor_tests::{
    case::Case, cluster::Cluster, kubectl::Kubectl, node::Node, pods, sleep::is_ready, wait,
};

use crate::stop::Stop;

/// Name of a Pod's container.
pub(crate) const MAIN: &str = "main";
/// Time for a namespace of an earlier run to be gone; thousands of objects take minutes.
const GONE: Duration = Duration::from_secs(500);
/// Time for the Pods of a benchmark to be deleted.
const REMOVED: Duration = Duration::from_secs(280);
/// Time for Pods that start at the same time to become ready.
const READY: Duration = Duration::from_secs(280);
/// Number of requests that are sent to the API server at a time.
pub(crate) const AT_ONCE: usize = 16;

/// Runs a benchmark in its own namespace, which is deleted afterwards, also after an error or a
/// signal.
pub(crate) async fn namespaced(
    name: &str,
    stop: &mut Stop,
    body: impl AsyncFnOnce(&Case) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "must run as root: it reads the node's processes and cgroups"
    );
    let cluster = Cluster::from_env().await?;
    let kubectl = Kubectl {
        program: cluster.kubectl.clone(),
        namespace: name.to_owned(),
    };
    let case = Case {
        cluster,
        node: Node::here()?,
        namespace: name.to_owned(),
        kubectl,
    };
    let measured = async {
        create(&case).await?;
        body(&case).await
    };
    let outcome = stop.unless(Box::pin(measured)).await;
    let removed = stop.unless(remove(&case)).await;
    outcome.and(removed)
}

/// Creates the namespace anew; Pods may be created in it when this returns.
async fn create(case: &Case) -> anyhow::Result<()> {
    let all: Api<Namespace> = Api::all(case.client());
    if all.get_opt(&case.namespace).await?.is_some() {
        remove(case).await?;
        let words = "the end of an earlier run's namespace";
        wait::object(all.clone(), &case.namespace, words, GONE, |left| {
            left.map_or(Ok(()), |_| Err("it is still there".to_owned()))
        })
        .await?;
    }
    let wanted = serde_json::from_value(json!({ "metadata": { "name": case.namespace } }))?;
    all.create(&PostParams::default(), &wanted).await?;
    let accounts: Api<ServiceAccount> = case.api();
    let words = "the namespace's ServiceAccount";
    wait::object(accounts, "default", words, REMOVED, |account| {
        account.map(drop).ok_or_else(String::new)
    })
    .await
}

/// Deletes the namespace in the background, and waits for the end of its Pods.
async fn remove(case: &Case) -> anyhow::Result<()> {
    let all: Api<Namespace> = Api::all(case.client());
    let background = DeleteParams::background();
    match all.delete(&case.namespace, &background).await {
        Err(kube::Error::Api(answer)) if answer.is_not_found() => return Ok(()),
        deleted => drop(deleted.context("delete the namespace")?),
    }
    delete_pods(case).await
}

/// Deletes all Pods of the namespace and waits until they are gone.
pub(crate) async fn delete_pods(case: &Case) -> anyhow::Result<()> {
    let pods = case.pods();
    let (background, all) = (DeleteParams::background(), ListParams::default());
    pods.delete_collection(&background, &all).await?;
    wait::none(&pods, "the end of the Pods", REMOVED).await
}

/// Returns a Pod of the RuntimeClass torpor with one container, [`MAIN`].
///
/// `container` adds to the container: its probes.
pub(crate) fn pod(name: &str, image: &str, command: &[&str], container: Value) -> Value {
    let base = json!({
        "name": MAIN, "image": image, "imagePullPolicy": "Never", "command": command,
    });
    pods::pod(name, json!({ "containers": [pods::with(base, container)] }))
}

/// Returns the startup probe of a program that creates `/tmp/ready` once it serves.
pub(crate) fn ready_file() -> Value {
    json!({ "startupProbe": {
        "exec": { "command": ["test", "-e", "/tmp/ready"] },
        "periodSeconds": 1,
        "failureThreshold": 100,
    }})
}

/// Creates Pods and waits until all of the namespace are ready.
pub(crate) async fn start(case: &Case, pods: Vec<Value>) -> anyhow::Result<()> {
    stream::iter(pods)
        .map(|pod| case.create(pod))
        .buffer_unordered(AT_ONCE)
        .try_collect::<()>()
        .await?;
    wait::until("all Pods are ready", READY, async || {
        let found: Vec<Pod> = case.pods().list(&ListParams::default()).await?.items;
        let left: Vec<String> = found
            .iter()
            .filter(|pod| !is_ready(pod))
            .map(ResourceExt::name_any)
            .collect();
        wait::holds(left.is_empty(), || {
            format!("not ready: {}", left.join(", "))
        })
    })
    .await
}

/// Sets an annotation of all Pods of the namespace; `None` removes it.
pub(crate) async fn annotate_all(
    case: &Case,
    key: &str,
    value: Option<&str>,
) -> anyhow::Result<()> {
    let names = case.pods().list_metadata(&ListParams::default()).await?;
    let names: Vec<String> = names.iter().map(ResourceExt::name_any).collect();
    stream::iter(&names)
        .map(|name| case.annotate(name, key, value))
        .buffer_unordered(AT_ONCE)
        .try_collect()
        .await
}

//! Runs one test: in its own namespace, with a time limit, an explanation of a failure and a
//! cleanup.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use anyhow::Context;
use futures::FutureExt;
use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use kube::api::{
    Api, DeleteParams, DynamicObject, ListParams, LogParams, Patch, PatchParams, PostParams,
};
use kube::core::GroupVersionKind;
use kube::discovery::ApiResource;
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::RwLock;
use torpor_api::Sandbox;
use torpor_api::snapshot::SandboxSnapshot;

use crate::agent::Agent;
use crate::cluster::Cluster;
use crate::kubectl::Kubectl;
use crate::node::Node;
use crate::{explain, wait};

/// Time limit of a test.
const LIMIT: Duration = Duration::from_secs(240);
/// Time for the removal of a test's Pods, whose grace periods are a few seconds.
const REMOVAL_LIMIT: Duration = Duration::from_secs(60);
/// Time for a Pod to become ready: a second or two, more where four tests start Pods at once.
pub const START_LIMIT: Duration = Duration::from_secs(60);
/// Time to read a container's log, which is a file of the node.
const LOG_LIMIT: Duration = Duration::from_secs(40);

/// Lock of the machine: a test that kills shared processes (the agent, containerd) runs alone.
static MACHINE: RwLock<()> = RwLock::const_new(());

/// Cluster, node and namespace of a test.
#[derive(Debug)]
pub struct Case {
    pub cluster: Cluster,
    pub node: Node,
    pub namespace: String,
    pub kubectl: Kubectl,
}

/// Runs a test beside others.
pub async fn case(
    name: &str,
    body: impl AsyncFnOnce(&Case) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let _turn = MACHINE.read().await;
    run(LIMIT, name, body).await
}

/// Runs a test that disturbs the node, alone.
pub async fn case_alone(
    name: &str,
    body: impl AsyncFnOnce(&Case) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    alone_within(LIMIT, name, body).await
}

/// Runs a test alone, with its own time limit.
pub async fn alone_within(
    limit: Duration,
    name: &str,
    body: impl AsyncFnOnce(&Case) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let _turn = MACHINE.write().await;
    run(limit, name, async |case| {
        Agent::settled(case).await?;
        body(case).await
    })
    .await
}

async fn run(
    limit: Duration,
    name: &str,
    body: impl AsyncFnOnce(&Case) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let limit = wait::scaled(limit);
    let case = Case::begin(name).await?;
    let guarded = AssertUnwindSafe(body(&case)).catch_unwind();
    let outcome = tokio::time::timeout(limit, guarded).await;
    let failed = !matches!(outcome, Ok(Ok(Ok(()))));
    if failed {
        eprintln!("{}", explain::explain(&case).await);
    }
    let removed = case.end().await;
    match outcome {
        Ok(Ok(result)) => result.and(removed),
        Ok(Err(panic)) => std::panic::resume_unwind(panic),
        Err(_) => anyhow::bail!("the test did not end within {limit:?}"),
    }
}

impl Case {
    async fn begin(name: &str) -> anyhow::Result<Self> {
        let cluster = Cluster::from_env().await?;
        let node = Node::here()?;
        let namespaces: Api<Namespace> = Api::all(cluster.client.clone());
        let wanted: Namespace = serde_json::from_value(json!({
            "metadata": { "generateName": format!("e2e-{name}-"), "labels": { "torpor.dev/e2e": "true" } },
        }))?;
        let made = namespaces
            .create(&PostParams::default(), &wanted)
            .await
            .context("no namespace")?;
        let namespace = made.name_any();
        let kubectl = Kubectl {
            program: cluster.kubectl.clone(),
            namespace: namespace.clone(),
        };
        let case = Self {
            cluster,
            node,
            namespace,
            kubectl,
        };
        case.default_service_account().await?;
        Ok(case)
    }

    /// Creates the namespace's default ServiceAccount.
    ///
    /// The API server refuses Pods until it exists. Kubernetes creates it a moment after the
    /// namespace and accepts one that exists.
    async fn default_service_account(&self) -> anyhow::Result<()> {
        let accounts: Api<ServiceAccount> = self.api();
        let wanted = serde_json::from_value(json!({ "metadata": { "name": "default" } }))?;
        match accounts.create(&PostParams::default(), &wanted).await {
            Err(kube::Error::Api(answer)) if answer.is_already_exists() => Ok(()),
            made => made.map(drop).context("no ServiceAccount"),
        }
    }

    /// Deletes the namespace in the background, and its Pods.
    ///
    /// Every test checks that its Pods can be deleted. Kubernetes would delete the Pods five
    /// seconds later, until which they would run, and would then poll the namespace until they are
    /// gone.
    async fn end(&self) -> anyhow::Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client());
        let (background, all) = (DeleteParams::background(), ListParams::default());
        namespaces.delete(&self.namespace, &background).await?;
        let pods = self.pods();
        pods.delete_collection(&background, &all).await?;
        wait::none(&pods, "the end of the test's Pods", REMOVAL_LIMIT).await
    }

    pub fn client(&self) -> Client {
        self.cluster.client.clone()
    }

    /// Returns the API of one kind in the test's namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client(), &self.namespace)
    }

    pub fn pods(&self) -> Api<Pod> {
        self.api()
    }

    pub fn sandboxes(&self) -> Api<Sandbox> {
        self.api()
    }

    pub fn snapshots(&self) -> Api<SandboxSnapshot> {
        self.api()
    }

    /// Creates an object of any kind from its manifest.
    pub async fn create(&self, manifest: Value) -> anyhow::Result<()> {
        let text = |key: &str| {
            manifest
                .get(key)
                .and_then(Value::as_str)
                .unwrap_or_default()
        };
        let (group, version) = text("apiVersion")
            .split_once('/')
            .unwrap_or_else(|| ("", text("apiVersion")));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, text("kind")));
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client(), &self.namespace, &resource);
        let object = serde_json::from_value(manifest.clone())?;
        api.create(&PostParams::default(), &object)
            .await
            .with_context(|| format!("cannot create {}", manifest))?;
        Ok(())
    }

    /// Creates a Pod and waits until it is ready.
    pub async fn start(&self, pod: Value) -> anyhow::Result<Pod> {
        let name = pod
            .pointer("/metadata/name")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        self.create(pod).await?;
        self.ready(&name).await
    }

    /// Returns the Pod once all its containers are ready.
    pub async fn ready(&self, pod: &str) -> anyhow::Result<Pod> {
        self.pod_until(pod, "it is ready", START_LIMIT, |pod| {
            condition(pod, "Ready").0 == "True"
        })
        .await
    }

    /// Returns the Pod once the predicate holds for it.
    pub async fn pod_until(
        &self,
        pod: &str,
        words: &str,
        limit: Duration,
        predicate: impl Fn(&Pod) -> bool,
    ) -> anyhow::Result<Pod> {
        let words = format!("Pod {pod}: {words}");
        wait::object(self.pods(), pod, &words, limit, |found| match found {
            Some(pod) if predicate(&pod) => Ok(pod),
            Some(pod) => Err(summary(&pod)),
            None => Err("there is no such Pod".to_owned()),
        })
        .await
    }

    /// Checks that the predicate holds for the Pod during this time.
    pub async fn pod_stays(
        &self,
        pod: &str,
        words: &str,
        time: Duration,
        predicate: impl Fn(&Pod) -> bool,
    ) -> anyhow::Result<()> {
        let words = format!("Pod {pod} stays {words}");
        wait::stays(self.pods(), pod, &words, time, |found| match found {
            Some(pod) if predicate(&pod) => Ok(()),
            Some(pod) => Err(summary(&pod)),
            None => Err("there is no such Pod".to_owned()),
        })
        .await
    }

    /// Returns a container's log without the white space around it.
    pub async fn log(&self, pod: &str, container: &str) -> anyhow::Result<String> {
        let words = || format!("the log of {pod}/{container}");
        let of = LogParams {
            container: Some(container.to_owned()),
            ..LogParams::default()
        };
        let pods = self.pods();
        let log = tokio::time::timeout(wait::scaled(LOG_LIMIT), pods.logs(pod, &of)).await;
        let log = log.with_context(words)?.with_context(words)?;
        Ok(log.trim().to_owned())
    }

    /// Sets an annotation of a Pod; `None` removes it.
    pub async fn annotate(&self, pod: &str, key: &str, value: Option<&str>) -> anyhow::Result<()> {
        let patch = Patch::Merge(json!({ "metadata": { "annotations": { key: value } } }));
        self.pods()
            .patch(pod, &PatchParams::default(), &patch)
            .await?;
        Ok(())
    }

    /// Lets the node take new Pods, or not.
    pub async fn cordon(&self, node: &str, unschedulable: bool) -> anyhow::Result<()> {
        let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(self.client());
        let patch = Patch::Merge(json!({ "spec": { "unschedulable": unschedulable } }));
        nodes.patch(node, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Deletes the Pod and waits until it is gone.
    pub async fn delete_pod(&self, pod: &str, limit: Duration) -> anyhow::Result<()> {
        let pods = self.pods();
        pods.delete(pod, &DeleteParams::default()).await?;
        let words = format!("the end of Pod {pod}");
        wait::object(pods, pod, &words, limit, |left| {
            left.map_or(Ok(()), |left| Err(summary(&left)))
        })
        .await
    }
    /// Deletes the Pod without waiting.
    pub async fn delete_pod_at_once(&self, pod: &str) -> anyhow::Result<()> {
        self.pods().delete(pod, &DeleteParams::default()).await?;
        Ok(())
    }
}

/// Returns status, reason and message of a Pod's condition; empty strings where there is none.
pub fn condition<'a>(pod: &'a Pod, kind: &str) -> (&'a str, &'a str, &'a str) {
    let conditions = pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_deref());
    let found = conditions
        .unwrap_or_default()
        .iter()
        .find(|condition| condition.type_ == kind);
    found.map_or(("", "", ""), |condition| {
        let text = |field: &'a Option<String>| field.as_deref().unwrap_or_default();
        (
            &condition.status,
            text(&condition.reason),
            text(&condition.message),
        )
    })
}

/// Describes phase, conditions and containers of a Pod in a line.
fn summary(pod: &Pod) -> String {
    let status = pod.status.clone().unwrap_or_default();
    let conditions = status
        .conditions
        .unwrap_or_default()
        .into_iter()
        .map(|condition| {
            let reason = condition.reason.unwrap_or_default();
            format!("{}={} {reason}", condition.type_, condition.status)
        });
    let conditions: Vec<String> = conditions.collect();
    let init = status.init_container_statuses.unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    let containers = init.into_iter().chain(containers).map(|status| {
        let state = serde_json::to_string(&status.state).unwrap_or_default();
        format!("{} restarts={} {state}", status.name, status.restart_count)
    });
    let containers: Vec<String> = containers.collect();
    format!(
        "{} {conditions:?} {containers:?}",
        status.phase.unwrap_or_default()
    )
}

/// Returns the name of the Pod's node; empty before it has one.
pub fn node_of(pod: &Pod) -> String {
    let spec = pod.spec.as_ref();
    spec.and_then(|spec| spec.node_name.clone())
        .unwrap_or_default()
}

/// Returns the UID of an object from the API.
pub fn uid(object: &impl ResourceExt) -> String {
    object.uid().unwrap_or_default()
}

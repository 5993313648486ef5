//! The controller is away while a sleeping sandbox' Pod goes: what becomes of the memory.

use std::time::Duration;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{EvictParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use torpor_api::annotations::HIBERNATE;
use torpor_api::conditions::POD_RESTORED;
use torpor_api::node::{SandboxNode, SandboxReport};
use torpor_tests::agent::NAMESPACE;
use torpor_tests::case::{Case, case_alone, condition, uid};
use torpor_tests::sandboxes::sandbox;
use torpor_tests::{wait, witness};

const CONTROLLER: &str = "agent-sandbox-controller";
const LIMIT: Duration = Duration::from_secs(60);

/// The controller's Deployment, with so many replicas as it has in this cluster.
struct Controller {
    deployments: Api<Deployment>,
    pods: Api<Pod>,
    selector: String,
    replicas: i32,
}

impl Controller {
    async fn find(case: &Case) -> anyhow::Result<Self> {
        let deployments: Api<Deployment> = Api::namespaced(case.client(), NAMESPACE);
        let spec = deployments.get(CONTROLLER).await?.spec;
        let labels = spec.selector.match_labels.unwrap_or_default();
        let labels: Vec<_> = labels.iter().map(|(k, v)| format!("{k}={v}")).collect();
        Ok(Self {
            deployments,
            pods: Api::namespaced(case.client(), NAMESPACE),
            selector: labels.join(","),
            replicas: spec.replicas.unwrap_or(1),
        })
    }

    async fn scale(&self, replicas: i32) -> anyhow::Result<()> {
        let patch = Patch::Merge(json!({ "spec": { "replicas": replicas } }));
        let params = PatchParams::default();
        self.deployments.patch(CONTROLLER, &params, &patch).await?;
        let of_controller = ListParams::default().labels(&self.selector);
        wait::until("so many controllers are there", LIMIT, async || {
            let pods = self.pods.list_metadata(&of_controller).await?.items;
            let there = i32::try_from(pods.len())?;
            wait::holds(there == replicas, || format!("{there} Pods"))
        })
        .await
    }

    /// Does something while no controller runs, which is there again afterwards whatever came of it.
    async fn away<T>(&self, act: impl AsyncFnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
        let acted = match self.scale(0).await {
            Ok(()) => act().await,
            Err(error) => Err(error),
        };
        self.scale(self.replicas).await?;
        acted
    }
}

fn manifest() -> Value {
    sandbox("s", json!({ "containers": [witness::container(5, &[])] }))
}

/// A Sandbox that sleeps in place, and what its program said of itself before.
async fn asleep(case: &Case) -> anyhow::Result<(Pod, witness::State)> {
    case.create(manifest()).await?;
    let pod = case.sandbox_ready("s").await?;
    let before = witness::ask(&pod).await?;
    let asked = json!({ "metadata": { "annotations": { HIBERNATE: "true" } } });
    case.patch("s", asked).await?;
    case.sandbox_says("s", "Hibernated", "True", "Hibernated")
        .await?;
    Ok((pod, before))
}

async fn gone(case: &Case, pod: &Pod) -> anyhow::Result<()> {
    let words = "the Pod is gone";
    wait::object(case.pods(), "s", words, LIMIT, |now| match now {
        Some(now) if uid(&now) == uid(pod) => Err("the same Pod".to_owned()),
        _ => Ok(()),
    })
    .await
}

/// What the node says of the Pod.
async fn report_of(case: &Case, pod: &Pod) -> anyhow::Result<Option<SandboxReport>> {
    let spec = pod.spec.as_ref();
    let node = spec.and_then(|spec| spec.node_name.clone());
    let nodes: Api<SandboxNode> = Api::all(case.client());
    let status = nodes.get_status(&node.unwrap_or_default()).await?.status;
    let reports = status.unwrap_or_default().sandboxes;
    Ok(reports
        .into_iter()
        .find(|report| report.pod_uid == uid(pod)))
}

/// The Sandbox is to run; its next Pod.
async fn awake(case: &Case) -> anyhow::Result<Pod> {
    let no_more = json!({ "metadata": { "annotations": { HIBERNATE: null } } });
    case.patch("s", no_more).await?;
    case.sandbox_ready("s").await
}

#[tokio::test]
async fn a_sleeping_sandbox_that_is_evicted_while_the_controller_is_away_keeps_its_memory()
-> anyhow::Result<()> {
    case_alone("away", async |case| {
        let (pod, before) = asleep(case).await?;
        let controller = Controller::find(case).await?;
        let evicted = async || {
            case.pods().evict("s", &EvictParams::default()).await?;
            gone(case, &pod).await?;
            wait::until("the node tells of the image", LIMIT, async || {
                let told = report_of(case, &pod).await?;
                let told = told.filter(|told| told.pod_gone_since.is_some());
                let is_whole = told.as_ref().is_some_and(|told| {
                    told.image_id.is_some()
                        && told.sandbox_name == "s"
                        && told.namespace == case.namespace
                });
                wait::holds(is_whole, || format!("{told:?}"))
            })
            .await
        };
        controller.away(evicted).await?;
        let back = awake(case).await?;
        assert_ne!(uid(&back), uid(&pod));
        witness::ask(&back).await?.goes_on_from(&before)?;
        let told = |pod: &Pod| condition(pod, POD_RESTORED).0 == "True";
        case.pod_until("s", "it says that it was restored", LIMIT, told)
            .await
            .map(drop)
    })
    .await
}

#[tokio::test]
async fn a_sleeping_sandbox_whose_pod_somebody_deletes_while_the_controller_is_away_starts_anew()
-> anyhow::Result<()> {
    case_alone("awaydeleted", async |case| {
        let (pod, before) = asleep(case).await?;
        let controller = Controller::find(case).await?;
        let deleted = async || {
            case.delete_pod("s", LIMIT).await?;
            wait::until("the node has nothing of it", LIMIT, async || {
                let told = report_of(case, &pod).await?;
                wait::holds(told.is_none(), || format!("{told:?}"))
            })
            .await
        };
        controller.away(deleted).await?;
        let back = awake(case).await?;
        let now = witness::ask(&back).await?;
        anyhow::ensure!(now.secret != before.secret, "it goes on: {now:?}");
        Ok(())
    })
    .await
}

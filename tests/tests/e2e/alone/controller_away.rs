//! Memory of a sleeping sandbox whose Pod goes while the controller is away.

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

/// The controller's Deployment and its number of replicas in this cluster.
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
        wait::until("the controller has its replicas", LIMIT, async || {
            let pods = self.pods.list_metadata(&of_controller).await?.items;
            let there = i32::try_from(pods.len())?;
            wait::holds(there == replicas, || format!("{there} Pods"))
        })
        .await
    }

    /// Runs `act` while no controller runs, and starts the controller again in any case.
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

/// Creates a Sandbox that sleeps in place; returns its Pod and the program's state before.
async fn asleep(case: &Case) -> anyhow::Result<(Pod, witness::State)> {
    case.create(manifest()).await?;
    let pod = case.sandbox_ready("s").await?;
    let before = witness::ask(&pod).await?;
    let asked = json!({ "metadata": { "annotations": { HIBERNATE: "true" } } });
    case.patch("s", asked).await?;
    case.sandbox_has("s", "Hibernated", "True", "Hibernated")
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

/// Returns the node's report about the Pod.
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

/// Withdraws the request to sleep; returns the Sandbox's next Pod.
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
            wait::until("the node reports the image", LIMIT, async || {
                let report = report_of(case, &pod).await?;
                let report = report.filter(|report| report.pod_gone_since.is_some());
                let is_whole = report.as_ref().is_some_and(|report| {
                    report.image_id.is_some()
                        && report.sandbox_name == "s"
                        && report.namespace == case.namespace
                });
                wait::holds(is_whole, || format!("{report:?}"))
            })
            .await
        };
        controller.away(evicted).await?;
        let back = awake(case).await?;
        assert_ne!(uid(&back), uid(&pod));
        witness::ask(&back).await?.goes_on_from(&before)?;
        let restored = |pod: &Pod| condition(pod, POD_RESTORED).0 == "True";
        case.pod_until("s", "its condition shows the restore", LIMIT, restored)
            .await
            .map(drop)
    })
    .await
}

#[tokio::test]
async fn a_sleeping_sandbox_whose_pod_is_deleted_while_the_controller_is_away_starts_anew()
-> anyhow::Result<()> {
    case_alone("awaydeleted", async |case| {
        let (pod, before) = asleep(case).await?;
        let controller = Controller::find(case).await?;
        let deleted = async || {
            case.delete_pod("s", LIMIT).await?;
            wait::until("the node reports nothing of the Pod", LIMIT, async || {
                let report = report_of(case, &pod).await?;
                wait::holds(report.is_none(), || format!("{report:?}"))
            })
            .await
        };
        controller.away(deleted).await?;
        let back = awake(case).await?;
        let now = witness::ask(&back).await?;
        anyhow::ensure!(
            now.secret != before.secret,
            "the program continued: {now:?}"
        );
        Ok(())
    })
    .await
}

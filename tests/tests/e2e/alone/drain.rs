//! Memory of sandboxes whose node is drained.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Pod};
use kube::Api;
use kube::api::{EvictParams, ListParams};
use serde_json::{Value, json};
use torpor_api::annotations::{DOZE_AFTER, HIBERNATE};
use torpor_api::conditions::POD_RESTORED;
use torpor_api::reasons::event;
use torpor_tests::case::{Case, case_alone, condition, uid};
use torpor_tests::pods::with;
use torpor_tests::sandboxes::sandbox;
use torpor_tests::swap::Swap;
use torpor_tests::{wait, witness};

const LIMIT: Duration = Duration::from_secs(60);

/// Evicts the Pod as `kubectl drain` does.
async fn evict(case: &Case, pod: &Pod) -> anyhow::Result<()> {
    case.pods().evict("s", &EvictParams::default()).await?;
    let words = "the Pod is gone";
    wait::object(case.pods(), "s", words, LIMIT, |now| match now {
        Some(now) if uid(&now) == uid(pod) => Err("the same Pod".to_owned()),
        _ => Ok(()),
    })
    .await
}

/// Evicts the Sandbox's Pod while it sleeps, and checks that the next Pod continues.
async fn drained(case: &Case, manifest: Value, sleeps: Sleeps) -> anyhow::Result<()> {
    case.create(manifest).await?;
    let pod = case.sandbox_ready("s").await?;
    let spec = pod.spec.as_ref();
    let node = spec.and_then(|spec| spec.node_name.clone());
    let node = node.unwrap_or_default();
    let before = witness::ask(&pod).await?;
    match sleeps {
        Sleeps::Hibernated => {
            let asked = json!({ "metadata": { "annotations": { HIBERNATE: "true" } } });
            case.patch("s", asked).await?;
            case.sandbox_has("s", "Hibernated", "True", "Hibernated")
                .await?;
        }
        Sleeps::Dozing => {
            case.dozes("s").await?;
        }
    }
    case.cordon(&node, true).await?;
    let drained = async {
        evict(case, &pod).await?;
        // The image is on this node, so the next Pod must run here.
        let waits = |pod: &Pod| condition(pod, "PodScheduled").1 == "Unschedulable";
        case.pod_until("s", "it waits for its node", LIMIT, waits)
            .await?;
        let no_more = json!({ "metadata": { "annotations": { HIBERNATE: null } } });
        case.patch("s", no_more).await
    };
    let drained = drained.await;
    case.cordon(&node, false).await?;
    drained?;
    let back = case.sandbox_ready("s").await?;
    assert_ne!(uid(&back), uid(&pod));
    witness::ask(&back).await?.goes_on_from(&before)?;
    let told = |pod: &Pod| condition(pod, POD_RESTORED).0 == "True";
    case.pod_until("s", "its condition shows the restore", LIMIT, told)
        .await
        .map(drop)
}

enum Sleeps {
    Hibernated,
    Dozing,
}

fn witness() -> Value {
    sandbox("s", json!({ "containers": [witness::container(5, &[])] }))
}

#[tokio::test]
async fn a_sleeping_sandbox_keeps_its_memory_when_its_node_is_drained() -> anyhow::Result<()> {
    case_alone("drain", async |case| {
        drained(case, witness(), Sleeps::Hibernated).await
    })
    .await
}

#[tokio::test]
async fn a_dozing_sandbox_keeps_its_memory_when_its_node_is_drained() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case_alone("draindoze", async |case| {
        let idle = json!({ "metadata": { "annotations": { DOZE_AFTER: "3s" } } });
        drained(case, with(witness(), idle), Sleeps::Dozing).await
    })
    .await
}

#[tokio::test]
async fn a_drain_that_costs_an_awake_sandbox_its_memory_is_reported() -> anyhow::Result<()> {
    case_alone("drained", async |case| {
        case.create(witness()).await?;
        let pod = case.sandbox_ready("s").await?;
        evict(case, &pod).await?;
        let events: Api<Event> = case.api();
        let params = ListParams::default().fields(&format!("reason={}", event::MEMORY_NOT_KEPT));
        wait::until("the Event is there", LIMIT, async || {
            let said = events.list(&params).await?.items;
            wait::holds(!said.is_empty(), || "not yet".to_owned())
        })
        .await
    })
    .await
}

#[tokio::test]
async fn an_awake_sandbox_continues_after_a_drain_by_the_plugin() -> anyhow::Result<()> {
    case_alone("drainplugin", async |case| {
        case.create(witness()).await?;
        let pod = case.sandbox_ready("s").await?;
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        let node = node.unwrap_or_default();
        let before = witness::ask(&pod).await?;
        let drained = async {
            // The plugin may print messages about other sandboxes of the node, too.
            let ran = case.run_plugin(&["torpor", "drain", &node]).await?;
            let words = format!("agents.x-k8s.io/s -n {} suspended", case.namespace);
            anyhow::ensure!(ran.out.contains(&words), "{ran:?}");
            let waits = |pod: &Pod| condition(pod, "PodScheduled").1 == "Unschedulable";
            let words = "the next Pod waits for its node";
            case.pod_until("s", words, LIMIT, waits).await
        };
        let drained = drained.await;
        case.cordon(&node, false).await?;
        drained?;
        let back = case.sandbox_ready("s").await?;
        assert_ne!(uid(&back), uid(&pod));
        witness::ask(&back).await?.goes_on_from(&before)
    })
    .await
}

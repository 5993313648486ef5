//! Memory that continues on another node without a repository: straight from the node that has it.

use anyhow::ensure;
use kube::ResourceExt;
use kube::api::{EvictParams, ListParams};
use serde_json::json;
use torpor_api::annotations::{HIBERNATE, RESTORE_FROM};
use torpor_api::conditions;
use torpor_tests::agent::{AGENT, Agent, delete_pods};
use torpor_tests::case::{Case, alone_within, uid};
use torpor_tests::sandboxes::{condition_of, sandbox};
use torpor_tests::two_nodes::{gone_from, nothing_fetched, on_both};
use torpor_tests::witness;

use super::{LIMIT, TEST, continues_on, golden, start_with};

async fn case(
    name: &str,
    body: impl AsyncFnOnce(&Case) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    alone_within(TEST, name, async |case| {
        on_both(case, async || body(case).await).await
    })
    .await
}

/// Checks that no image of the namespace was uploaded.
async fn nothing_uploaded(case: &Case) -> anyhow::Result<()> {
    for snapshot in case.snapshots().list(&ListParams::default()).await? {
        let uploaded = conditions::find(snapshot.conditions(), conditions::UPLOADED);
        ensure!(uploaded.is_none(), "{}: {uploaded:?}", snapshot.name_any());
    }
    Ok(())
}

#[tokio::test]
async fn a_suspended_sandbox_continues_on_the_other_node_and_comes_back_without_a_repository()
-> anyhow::Result<()> {
    case("direct", async |case| {
        let first = start_with(case, "node-0", 20, json!({})).await?;
        let before = witness::ask(&first).await?;
        case.suspend("s").await?;
        nothing_uploaded(case).await?;
        case.cordon("node-0", true).await?;
        let second = case.resume("s").await?;
        continues_on(&second, "node-1", &before).await?;
        let there = witness::ask(&second).await?;
        nothing_fetched(case, "node-1").await?;
        let folder = format!("/var/lib/torpor/images/{}", case.namespace);
        gone_from(case, "node-0", &folder).await?;

        case.suspend("s").await?;
        case.cordon("node-0", false).await?;
        case.cordon("node-1", true).await?;
        let third = case.resume("s").await?;
        continues_on(&third, "node-0", &there).await
    })
    .await
}

#[tokio::test]
async fn a_hibernated_sandbox_of_a_drained_node_continues_on_the_other_without_a_repository()
-> anyhow::Result<()> {
    case("direct-drain", async |case| {
        let asleep = json!({ HIBERNATE: "true" });
        let first = start_with(case, "node-0", 5, json!({})).await?;
        let before = witness::ask(&first).await?;
        case.patch("s", json!({ "metadata": { "annotations": asleep } }))
            .await?;
        case.sandbox_has("s", "Hibernated", "True", "Hibernated")
            .await?;
        case.cordon("node-0", true).await?;
        case.pods().evict("s", &EvictParams::default()).await?;
        let awake = json!({ "metadata": { "annotations": { HIBERNATE: null } } });
        case.patch("s", awake).await?;
        let second = case.next_pod(&first, LIMIT).await?;
        continues_on(&second, "node-1", &before).await
    })
    .await
}

#[tokio::test]
async fn a_fetch_from_a_node_outlives_the_agents_of_both_nodes() -> anyhow::Result<()> {
    case("direct-agents", async |case| {
        let first = start_with(case, "node-0", 100, json!({})).await?;
        let before = witness::ask(&first).await?;
        case.suspend("s").await?;
        case.cordon("node-0", true).await?;
        case.set_mode("s", "Running").await?;
        let made = case.pod_until("s", "it has a node", LIMIT, |pod| {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
            node == Some("node-1") && pod.uid() != first.uid()
        });
        let made = made.await?;
        delete_pods(case.client(), &ListParams::default().labels(AGENT)).await?;
        let second = case.sandbox_ready("s").await?;
        ensure!(uid(&second) == uid(&made), "another Pod was made");
        continues_on(&second, "node-1", &before).await?;
        nothing_fetched(case, "node-1").await
    })
    .await
}

#[tokio::test]
async fn a_sandbox_waits_for_an_agent_that_hangs_on_the_node_of_its_image() -> anyhow::Result<()> {
    case("direct-away", async |case| {
        let first = start_with(case, "node-0", 5, json!({})).await?;
        let before = witness::ask(&first).await?;
        case.suspend("s").await?;
        case.cordon("node-0", true).await?;
        // The kernel accepts connections for it, and nothing answers them.
        let agent = Agent::of_node("node-0")?;
        agent.process.stop()?;
        let waits = async {
            case.set_mode("s", "Running").await?;
            case.sandbox_has("s", "Restored", "False", "SourceNodeUnavailable")
                .await
        };
        let waits = waits.await;
        agent.process.go_on()?;
        let message = condition_of(&waits?, "Restored").2.to_owned();
        ensure!(message.contains("node \"node-0\""), "{message}");
        let second = case.sandbox_ready("s").await?;
        continues_on(&second, "node-1", &before).await
    })
    .await
}

#[tokio::test]
async fn the_golden_image_of_one_node_reaches_the_other_without_a_repository() -> anyhow::Result<()>
{
    case("direct-golden", async |case| {
        golden::shared_pool(case).await?;
        nothing_uploaded(case).await?;
        golden::the_program_starts_once(case).await
    })
    .await
}

#[tokio::test]
async fn copies_of_a_snapshot_run_on_both_nodes_without_a_repository() -> anyhow::Result<()> {
    case("direct-copies", async |case| {
        let first = start_with(case, "node-0", 20, json!({})).await?;
        let before = witness::ask(&first).await?;
        case.snapshot("m", "s").await?;
        case.cordon("node-0", true).await?;
        for name in ["one", "two"] {
            let container = witness::container(20, &["/file"]);
            let mut copy = sandbox(name, json!({ "containers": [container] }));
            copy["metadata"]["annotations"] = json!({ RESTORE_FROM: "m" });
            // The saved program knows its hostname.
            copy["spec"]["podTemplate"]["spec"]["hostname"] = json!("s");
            case.create(copy).await?;
        }
        for name in ["one", "two"] {
            let pod = case.sandbox_ready(name).await?;
            continues_on(&pod, "node-1", &before).await?;
        }
        witness::ask(&first).await?.goes_on_from(&before)
    })
    .await
}

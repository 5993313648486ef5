//! Sandboxes that are woken or resumed at a set time (`agents.x-k8s.io/next-wakeup`).

use std::time::Duration;

use jiff::Timestamp;
use kube::ResourceExt;
use serde_json::json;
use torpor_api::annotations::{HIBERNATE_AFTER, NEXT_WAKEUP};
use torpor_api::conditions::POD_HIBERNATED;
use torpor_api::reasons::hibernated::AWAKE;
use torpor_records::WakeCause;
use torpor_tests::case::{Case, case, condition, uid};
use torpor_tests::pods::{pod, shell, with};
use torpor_tests::sandboxes::sandbox;
use torpor_tests::sleep::SLEEP_LIMIT;

/// Time until the wake: longer than a save or a suspension takes.
const AHEAD: Duration = Duration::from_secs(25);
const LIMIT: Duration = Duration::from_secs(60);
const KEEP: &str = "date +%s%N >/mem; sleep 1000000";

fn ahead() -> anyhow::Result<Timestamp> {
    Ok(Timestamp::now().checked_add(AHEAD)?)
}

async fn memory(case: &Case, pod: &str) -> anyhow::Result<String> {
    case.written(pod, "a", "/mem").await
}

#[tokio::test]
async fn a_pod_that_fell_asleep_by_itself_is_awake_at_its_time_and_sleeps_again()
-> anyhow::Result<()> {
    case("clock", async |case| {
        let annotations = json!({ "metadata": { "annotations": { HIBERNATE_AFTER: "6s" } } });
        let spec = json!({ "containers": [shell("a", KEEP)] });
        let started = case.start(with(pod("p", spec), annotations)).await?;
        let before = memory(case, "p").await?;
        case.asleep("p").await?;
        let time = ahead()?;
        case.annotate("p", NEXT_WAKEUP, Some(&time.to_string()))
            .await?;
        let awake = |pod: &_| condition(pod, POD_HIBERNATED).1 == AWAKE;
        case.pod_until("p", "it is awake", LIMIT, awake).await?;
        anyhow::ensure!(Timestamp::now() >= time, "awake before its time");
        let sandbox = case.node.sandbox_of(&uid(&started))?.sandbox;
        let woken = case.node.records.wake(&sandbox)?;
        anyhow::ensure!(woken.cause == WakeCause::Clock, "{woken:?}");
        // The Pod falls asleep by itself again, and the time that is over does not wake it once
        // more.
        let asleep = case.asleep("p").await?;
        let entries = case.node.ledger_seq(&uid(&asleep))?;
        tokio::time::sleep(Duration::from_secs(6)).await;
        anyhow::ensure!(
            case.node.ledger_seq(&uid(&started))? == entries,
            "woken twice"
        );
        anyhow::ensure!(memory(case, "p").await? == before, "another life");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_suspended_sandbox_is_resumed_at_its_time_and_the_time_is_forgotten() -> anyhow::Result<()>
{
    case("clocks", async |case| {
        case.create(sandbox("s", json!({ "containers": [shell("a", KEEP)] })))
            .await?;
        case.sandbox_has("s", "Ready", "True", "DependenciesReady")
            .await?;
        let before = memory(case, "s").await?;
        let time = ahead()?;
        let change = json!({
            "metadata": { "annotations": { NEXT_WAKEUP: time.to_string() } },
            "spec": { "operatingMode": "Suspended" },
        });
        case.patch("s", change).await?;
        case.sandbox_has("s", "Suspended", "True", "PodTerminated")
            .await?;
        anyhow::ensure!(
            Timestamp::now() < time,
            "the suspension took too long for this test"
        );
        let resumed = case
            .sandbox_has("s", "Ready", "True", "DependenciesReady")
            .await?;
        anyhow::ensure!(Timestamp::now() >= time, "resumed before its time");
        anyhow::ensure!(
            !resumed.annotations().contains_key(NEXT_WAKEUP),
            "the annotation is not removed"
        );
        case.pod_until("s", "it goes on from its memory", SLEEP_LIMIT, |pod| {
            condition(pod, "torpor.dev/Restored").0 == "True"
        })
        .await?;
        anyhow::ensure!(memory(case, "s").await? == before, "another life");
        Ok(())
    })
    .await
}

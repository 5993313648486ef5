//! A node loses power: every process is killed, what a boot does not find again is removed, and the
//! cluster is started from what was on its disk.
//!
//! This is a test target of its own, because nothing else can run meanwhile. Run as root, with
//! KUBECONFIG and TORPOR_DEV of a development cluster: `cargo test -p torpor-tests --test reboot`.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio::process::Command;
use torpor_api::annotations::DOZE_AFTER;
use torpor_core::transition::Origin;
use torpor_records::SandboxState;
use torpor_tests::case::{Case, alone_within, uid};
use torpor_tests::pods::{pod, with};
use torpor_tests::remains::Footprint;
use torpor_tests::sandboxes::sandbox;
use torpor_tests::swap::Swap;
use torpor_tests::wait;
use torpor_tests::witness::{self, State};

/// Time for the whole test: the cluster is up again after half a minute, its Pods after another.
const LIMIT: Duration = Duration::from_secs(400);
const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// Time for the Pods to come back: the kubelet makes sandboxes anew one after the other, and waits
/// after each attempt that came too early.
const COMEBACK_LIMIT: Duration = Duration::from_secs(120);

fn witness() -> Value {
    json!({ "containers": [witness::container(5, &["/file"])] })
}

async fn reboot(driver: &Path) -> anyhow::Result<()> {
    let done = Command::new(driver).arg("reboot").output();
    let done = tokio::time::timeout(wait::scaled(BOOT_LIMIT), done).await;
    let done = done.context("the cluster did not come back in time")??;
    let words = String::from_utf8_lossy(&done.stderr);
    anyhow::ensure!(done.status.success(), "hack/cluster reboot: {words}");
    Ok(())
}

/// Returns the state of the Pod's program once the Pod, or its successor, runs and answers.
async fn answers(case: &Case, name: &str) -> anyhow::Result<State> {
    let pods = case.pods();
    wait::until(&format!("{name} answers"), COMEBACK_LIMIT, async || {
        let Some(pod) = pods.get_opt(name).await? else {
            return Ok(Err("no Pod".to_owned()));
        };
        let asked = async { witness::Connection::open(&pod).await?.ask().await };
        Ok(asked
            .await
            .map_err(|error: anyhow::Error| format!("{error:#}")))
    })
    .await
}

async fn dozes(case: &Case, pod: &Pod) -> anyhow::Result<()> {
    wait::until("it dozes", COMEBACK_LIMIT, async || {
        wait::holds(case.node.dozes(&uid(pod))?, || "awake".to_owned())
    })
    .await
}

#[tokio::test]
async fn sleeping_sandboxes_survive_a_reboot_of_their_node_with_their_memory() -> anyhow::Result<()>
{
    let _swap = Swap::on()?;
    alone_within(LIMIT, "reboot", async |case| {
        let driver = case.cluster.driver.clone();
        let driver =
            driver.context("TORPOR_DEV is not set: only a development cluster can be rebooted")?;
        let awake = case.start(pod("awake", witness())).await?;
        let asleep = case.start(pod("asleep", witness())).await?;
        let idle = json!({ "metadata": { "annotations": { DOZE_AFTER: "2s" } } });
        let dozing = case.start(with(pod("dozing", witness()), idle)).await?;
        case.create(sandbox("suspended", witness())).await?;
        let suspended = case.sandbox_ready("suspended").await?;
        let footprint = Footprint::take(&case.node, &case.namespace, &uid(&asleep))?;

        let mut before = Vec::new();
        for pod in [&awake, &asleep, &dozing, &suspended] {
            before.push(witness::ask(pod).await?);
        }
        case.hibernate("asleep").await?;
        case.suspend("suspended").await?;
        dozes(case, &dozing).await?;

        reboot(&driver).await?;

        // The Pod that is to sleep is not restored first: it sleeps on in its image.
        wait::until("it sleeps on", COMEBACK_LIMIT, async || {
            let state = case.node.state_of(&uid(&asleep));
            let origin = match &state {
                Ok(SandboxState::Hibernated { unstarted, .. }) => *unstarted,
                _ => None,
            };
            wait::holds(origin == Some(Origin::Own), || format!("{state:?}"))
        })
        .await?;

        case.set_mode("suspended", "Running").await?;
        for (name, before) in ["asleep", "dozing", "suspended"]
            .into_iter()
            .zip(&before[1..])
        {
            let now = answers(case, name).await?;
            now.goes_on_from(before).with_context(|| name.to_owned())?;
        }
        // The sandbox that was awake is not set back to an older state: Kubernetes starts it anew.
        let now = answers(case, "awake").await?;
        anyhow::ensure!(
            now.secret != before[0].secret,
            "memory of a sandbox that was awake: {now:?}"
        );
        // The restored Pod can hibernate, wake and be deleted again.
        let before = answers(case, "asleep").await?;
        case.hibernate("asleep").await?;
        answers(case, "asleep").await?.goes_on_from(&before)?;
        case.delete_pod("asleep", COMEBACK_LIMIT).await?;
        wait::until("nothing of the Pod is left", COMEBACK_LIMIT, async || {
            let left = [
                footprint.of_sandbox(&case.node),
                footprint.of_memory(&case.node),
            ]
            .concat();
            wait::holds(left.is_empty(), || format!("{left:#?}"))
        })
        .await
    })
    .await
}

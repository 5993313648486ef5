//! A build of runsc is revoked on the node, as an operator does after a vulnerability is found.

use std::path::Path;

use anyhow::ensure;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::Api;
use kube::api::ListParams;
use torpor_api::annotations::HIBERNATE;
use torpor_api::conditions::{self, POD_RESTORED};
use torpor_api::node::SandboxNode;
use torpor_api::reasons::restored::RUNSC_REVOKED;
use torpor_records::config::Config;
use torpor_tests::case::{Case, START_LIMIT, case_alone, condition, uid};
use torpor_tests::pods::{COUNT, shell_pod};
use torpor_tests::sleep::{SLEEP_LIMIT, restarts};
use torpor_tests::wait;

/// Writes the node's configuration atomically, as the installer does.
fn write_config(path: &Path, config: &Config) -> anyhow::Result<()> {
    let new = path.with_extension("json.test");
    std::fs::write(&new, serde_json::to_vec_pretty(config)?)?;
    Ok(std::fs::rename(&new, path)?)
}

/// Runs the body while the installed build is revoked.
async fn while_revoked(
    case: &Case,
    body: impl AsyncFnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let path = case.node.config_file();
    let before = Config::read(&path)?;
    let revoked = Config {
        revoked_runsc: vec![before.runsc_digest.clone()],
        ..before.clone()
    };
    write_config(&path, &revoked)?;
    let done = body().await;
    write_config(&path, &before)?;
    done
}

/// Returns the messages of the kubelet's Events about a Pod that it could not start.
async fn refusals(case: &Case, pod: &str) -> anyhow::Result<String> {
    let events: Api<Event> = case.api();
    let about = format!("involvedObject.name={pod},reason=FailedCreatePodSandBox");
    let found = events.list(&ListParams::default().fields(&about)).await?;
    let words = found.items.into_iter().filter_map(|event| event.message);
    Ok(words.collect::<Vec<_>>().join("\n"))
}

async fn node_says(case: &Case, status: &str, reason: &str) -> anyhow::Result<()> {
    let nodes: Api<SandboxNode> = Api::all(case.client());
    let words = format!("a SandboxNode has RunscRevoked={status}/{reason}");
    wait::until(&words, SLEEP_LIMIT, async || {
        let told: Vec<String> = nodes
            .list(&ListParams::default())
            .await?
            .into_iter()
            .filter_map(|node| {
                let told = node.status?.conditions;
                let found = conditions::find(&told, conditions::RUNSC_REVOKED)?;
                Some(format!("{}/{}", found.status, found.reason))
            })
            .collect();
        wait::holds(told.contains(&format!("{status}/{reason}")), || {
            format!("{told:?}")
        })
    })
    .await
}

#[tokio::test]
async fn a_revoked_build_wakes_and_starts_nothing_and_its_memory_continues_after_the_revocation()
-> anyhow::Result<()> {
    case_alone("revoked", async |case| {
        case.start(shell_pod("sleeper", COUNT)).await?;
        let before = case.counted("sleeper").await?;
        let asleep = case.hibernate("sleeper").await?;
        let image = case.node.image_of(&case.namespace, &uid(&asleep))?;
        while_revoked(case, async || {
            let exec = case.exec("sleeper", "a", &["cat", "/n"]).await?;
            ensure!(
                exec.code != 0 && exec.err.contains("is revoked"),
                "{exec:?}"
            );
            case.annotate("sleeper", HIBERNATE, None).await?;
            // The condition first reports why the exec failed, then why the agent's own attempt
            // failed.
            let told = |pod: &Pod| {
                let (status, reason, message) = condition(pod, POD_RESTORED);
                (status, reason) == ("False", RUNSC_REVOKED) && message.contains("--revoked-runsc")
            };
            case.pod_until("sleeper", "its wake is refused", SLEEP_LIMIT, told)
                .await?;
            ensure!(image.is_dir(), "the image is gone");

            case.create(shell_pod("new", COUNT)).await?;
            wait::until("the kubelet reports why", START_LIMIT, async || {
                let said = refusals(case, "new").await?;
                wait::holds(said.contains("is revoked"), || said.clone())
            })
            .await?;
            node_says(case, "True", "InstalledBuild").await
        })
        .await?;

        let now = case.counted("sleeper").await?;
        ensure!(now >= before, "{before} → {now}");
        let awake = case.wake("sleeper").await?;
        ensure!(restarts(&awake) == 0, "it was restarted");
        case.ready("new").await?;
        node_says(case, "False", "NoneRevoked").await
    })
    .await
}

//! A resume while the node's agent is stopped.
//!
//! The sandbox continues without the agent. A client that asks once, as soon as the Pod is ready,
//! is not status of a fresh start.

use anyhow::ensure;
use serde_json::json;
use torpor_tests::agent::Agent;
use torpor_tests::case::{Case, case_alone, condition};
use torpor_tests::machine::Process;
use torpor_tests::pods::BUSYBOX;
use torpor_tests::sandboxes::{LIMIT, sandbox};

/// The agent, stopped until drop.
struct StoppedAgent(Process);

impl StoppedAgent {
    fn stop() -> anyhow::Result<Self> {
        let agent = Agent::find()?;
        agent.process.stop()?;
        Ok(Self(agent.process))
    }
}

impl Drop for StoppedAgent {
    fn drop(&mut self) {
        if let Err(error) = self.0.go_on() {
            eprintln!("the agent stays stopped: {error:#}");
        }
    }
}

#[tokio::test]
async fn a_resumed_pod_is_not_ready_before_its_agent_has_reported_the_restore() -> anyhow::Result<()>
{
    case_alone("stoppedagent", async |case| {
        case.with_pod_snapshots(async || goes_through(case).await)
            .await
    })
    .await
}

async fn goes_through(case: &Case) -> anyhow::Result<()> {
    let spec = json!({ "containers": [{
        "name": "a", "image": BUSYBOX, "imagePullPolicy": "Never", "command": ["sleep", "infinity"],
    }] });
    case.create(sandbox("s", spec)).await?;
    case.sandbox_ready("s").await?;
    case.create(json!({
        "apiVersion": "podsnapshot.gke.io/v1",
        "kind": "PodSnapshotManualTrigger",
        "metadata": { "name": "t" },
        "spec": { "targetPod": "s" },
    }))
    .await?;
    let taken = ["podsnapshotmanualtrigger/t", "--for=condition=Triggered"];
    let ready = ["podsnapshot/t", "--for=condition=Ready"];
    for [object, condition] in [taken, ready] {
        let words = ["wait", object, condition, "--timeout=35s"];
        case.kubectl.ok(&words).await?;
    }
    case.suspend("s").await?;

    let agent = StoppedAgent::stop()?;
    case.set_mode("s", "Running").await?;
    let words = "its containers run";
    let pod = case
        .pod_until("s", words, LIMIT, |pod| {
            condition(pod, "ContainersReady").0 == "True"
        })
        .await?;
    // An error instead of a panic: what is applied here has to be removed again.
    let conditions = (condition(&pod, "Ready").1, condition(&pod, "PodRestored").0);
    ensure!(
        conditions == ("ReadinessGatesNotReady", ""),
        "{conditions:?}"
    );
    drop(agent);
    let pod = case.ready("s").await?;
    let (status, _, message) = condition(&pod, "PodRestored");
    ensure!(
        status == "True" && message.contains("\"t\""),
        "{status}: {message}"
    );
    Ok(())
}

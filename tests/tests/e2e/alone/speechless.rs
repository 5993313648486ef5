//! A resume while the node's agent says nothing: the sandbox goes on without it, and who asks once, as soon as the Pod is ready, is not told a fresh start.

use anyhow::ensure;
use serde_json::json;
use torpor_tests::agent::Agent;
use torpor_tests::case::{Case, case_alone, condition};
use torpor_tests::machine::Process;
use torpor_tests::pods::BUSYBOX;
use torpor_tests::sandboxes::{LIMIT, sandbox};

/// Stands still for as long as this lives.
struct Speechless(Process);

impl Speechless {
    fn agent() -> anyhow::Result<Self> {
        let agent = Agent::find()?;
        agent.process.stop()?;
        Ok(Self(agent.process))
    }
}

impl Drop for Speechless {
    fn drop(&mut self) {
        if let Err(error) = self.0.go_on() {
            eprintln!("the agent stands still: {error:#}");
        }
    }
}

#[tokio::test]
async fn a_resumed_pod_is_not_ready_before_its_agent_has_said_how_the_restore_went()
-> anyhow::Result<()> {
    case_alone("speechless", async |case| {
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

    let agent = Speechless::agent()?;
    case.set_mode("s", "Running").await?;
    let words = "its containers run";
    let pod = case
        .pod_until("s", words, LIMIT, |pod| {
            condition(pod, "ContainersReady").0 == "True"
        })
        .await?;
    // No panic: what is applied here has to be taken off again.
    let said = (condition(&pod, "Ready").1, condition(&pod, "PodRestored").0);
    ensure!(said == ("ReadinessGatesNotReady", ""), "{said:?}");
    drop(agent);
    let pod = case.ready("s").await?;
    let (told, _, message) = condition(&pod, "PodRestored");
    ensure!(
        told == "True" && message.contains("\"t\""),
        "{told}: {message}"
    );
    Ok(())
}

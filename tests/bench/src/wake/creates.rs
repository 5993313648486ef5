//! Time from the creation of a Pod and of a Sandbox until they are ready.

use std::time::{Duration, Instant};

use serde_json::json;
use torpor_api::{Sandbox, conditions};
use torpor_tests::{
    case::{Case, START_LIMIT},
    wait,
};

use crate::{stats::Times, table};

/// Creates Pods and Sandboxes in turns, and prints the time of each kind.
pub(super) async fn measure(case: &Case, runs: usize) -> anyhow::Result<()> {
    let (mut pods, mut sandboxes) = (Vec::new(), Vec::new());
    for number in 1..=runs {
        pods.push(create_pod(case, &format!("pod-{number}")).await?);
        sandboxes.push(create_sandbox(case, &format!("sandbox-{number}")).await?);
    }
    let (pods, sandboxes) = (Times::of(&pods), Times::of(&sandboxes));
    println!("{}", table::row("create to Ready: a Pod", &pods, &pods));
    println!(
        "{}",
        table::row("create to Ready: a Sandbox", &sandboxes, &pods)
    );
    Ok(())
}

async fn create_pod(case: &Case, name: &str) -> anyhow::Result<Duration> {
    let begin = Instant::now();
    case.start(super::idle(name)).await?;
    let took = begin.elapsed();
    case.delete_pod_at_once(name).await?;
    Ok(took)
}

async fn create_sandbox(case: &Case, name: &str) -> anyhow::Result<Duration> {
    let sandbox = json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": name},
        "spec": {"podTemplate": {"spec": super::idle(name)["spec"]}},
    });
    let begin = Instant::now();
    case.create(sandbox).await?;
    let words = format!("Sandbox {name} is ready");
    wait::object(case.sandboxes(), name, &words, START_LIMIT, is_ready).await?;
    let took = begin.elapsed();
    case.sandboxes().delete(name, &Default::default()).await?;
    Ok(took)
}

fn is_ready(sandbox: Option<Sandbox>) -> Result<(), String> {
    let status = sandbox.and_then(|sandbox| sandbox.status);
    let conditions = status.map(|status| status.conditions).unwrap_or_default();
    if conditions::is_true(&conditions, conditions::READY) {
        Ok(())
    } else {
        Err(format!("{conditions:?}"))
    }
}

//! What a sandbox hears of its link.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::json;
use torpor_tests::case::{Case, case, uid};
use torpor_tests::pods::{COUNT, pod, shell};
use torpor_tests::wait;

/// The filter comes after the answer to who woke the sandbox.
const SOON: Duration = Duration::from_secs(10);

/// A bridge gives every multicast to all of its ports: a sandbox would run for each Pod of its node that begins.
#[tokio::test]
async fn a_sandbox_hears_nothing_that_is_for_routers() -> anyhow::Result<()> {
    case("hearing", async |case| {
        let pod = case
            .start(pod("p", json!({ "containers": [shell("a", COUNT)] })))
            .await?;
        let uid = uid(&pod);
        narrowed(case, &uid).await?;
        // One that is restored has another socket.
        case.hibernate("p").await?;
        case.wake("p").await?;
        narrowed(case, &uid).await
    })
    .await
}

/// Every packet socket of the Pod's network namespace has the filter: the kernel says so, by its instructions.
async fn narrowed(case: &Case, uid: &str) -> anyhow::Result<()> {
    let record = case.node.sandbox_of(uid)?;
    let namespace = record.network_namespace.context("it has its own")?;
    wait::until("its packet socket is narrowed", SOON, async || {
        let told = std::process::Command::new("nsenter")
            .arg(format!("--net={}", namespace.display()))
            .args(["ss", "--packet", "--bpf", "--numeric"])
            .output()
            .context("cannot list packet sockets")?;
        ensure!(told.status.success(), "{told:?}");
        let told = String::from_utf8_lossy(&told.stdout).into_owned();
        let sockets = told.lines().filter(|line| line.starts_with("p_")).count();
        // Listener reports of version 2.
        let filters = told.matches("0x15 1 0 143").count();
        wait::holds(sockets > 0 && filters == sockets, || told)
    })
    .await
}

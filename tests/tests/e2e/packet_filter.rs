//! Packets that a sandbox receives from its link.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::json;
use torpor_tests::case::{Case, case, uid};
use torpor_tests::pods::{COUNT, pod, shell};
use torpor_tests::wait;

/// Time until the filter is set, which happens after the answer to a wake.
const SOON: Duration = Duration::from_secs(10);

/// A bridge sends every multicast to all of its ports: a sandbox would run for each Pod that begins
/// on its node.
#[tokio::test]
async fn a_sandbox_receives_no_packets_for_routers() -> anyhow::Result<()> {
    case("multicast", async |case| {
        let pod = case
            .start(pod("p", json!({ "containers": [shell("a", COUNT)] })))
            .await?;
        let uid = uid(&pod);
        has_filter(case, &uid).await?;
        // A restored sandbox has another socket.
        case.hibernate("p").await?;
        case.wake("p").await?;
        has_filter(case, &uid).await
    })
    .await
}

/// Waits until the kernel lists the filter's instructions for every packet socket of the Pod's
/// network namespace.
async fn has_filter(case: &Case, uid: &str) -> anyhow::Result<()> {
    let record = case.node.sandbox_of(uid)?;
    let namespace = record.network_namespace.context("it has its own")?;
    wait::until("its packet socket has the filter", SOON, async || {
        let listed = std::process::Command::new("nsenter")
            .arg(format!("--net={}", namespace.display()))
            .args(["ss", "--packet", "--bpf", "--numeric"])
            .output()
            .context("cannot list packet sockets")?;
        ensure!(listed.status.success(), "{listed:?}");
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let sockets = listed.lines().filter(|line| line.starts_with("p_")).count();
        // Listener reports of version 2.
        let filters = listed.matches("0x15 1 0 143").count();
        wait::holds(sockets > 0 && filters == sockets, || listed)
    })
    .await
}

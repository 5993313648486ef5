//! Attached clients and forwarded ports of a Pod that falls asleep.

use anyhow::Context;
use serde_json::json;
use torpor_tests::attached::{self, Attached};
use torpor_tests::case::{case, uid};
use torpor_tests::forward::Forward;
use torpor_tests::pods::pod;
use torpor_tests::sleep::restarts;
use torpor_tests::witness::{self, Connection};

#[tokio::test]
async fn attach_shows_what_a_container_without_a_terminal_prints_and_wakes_it() -> anyhow::Result<()>
{
    case("attachout", async |case| {
        case.start(pod("p", attached::echoes())).await?;
        let mut attached = Attached::to(case)?;
        attached.answers("first").await?;
        case.hibernate("p").await?;
        attached.answers("second").await?;
        assert_eq!(restarts(&case.pods().get("p").await?), 0);
        Ok(())
    })
    .await
}

fn witness_pod() -> serde_json::Value {
    pod("p", json!({ "containers": [witness::container(5, &[])] }))
}

#[tokio::test]
async fn port_forward_wakes_a_hibernated_sandbox() -> anyhow::Result<()> {
    case("forwardwake", async |case| {
        let pod = case.start(witness_pod()).await?;
        let before = witness::ask(&pod).await?;
        case.hibernate("p").await?;
        let forward = Forward::open(&case.kubectl, "p", witness::PORT).await?;
        let mut connection = Connection::over(forward.connect().await?);
        connection.ask().await?.goes_on_from(&before)?;
        assert_eq!(restarts(&case.pods().get("p").await?), 0);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_pod_with_an_open_port_forward_can_be_hibernated() -> anyhow::Result<()> {
    case("forwardsave", async |case| {
        let pod = case.start(witness_pod()).await?;
        witness::ask(&pod).await?;
        let forward = Forward::open(&case.kubectl, "p", witness::PORT).await?;
        let mut connection = Connection::over(forward.connect().await?);
        let before = connection.ask().await?;
        case.hibernate("p").await?;
        // The connection is not part of the image.
        connection
            .ask()
            .await
            .expect_err("the connection was ended");
        let awake = case.wake("p").await?;
        witness::ask(&awake).await?.goes_on_from(&before)?;
        let forward = Forward::open(&case.kubectl, "p", witness::PORT).await?;
        let mut connection = Connection::over(forward.connect().await?);
        connection.ask().await?.goes_on_from(&before)
    })
    .await
}

/// Returns the names of the files that a process holds open.
fn open_files(pid: i32) -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        // A descriptor may be closed meanwhile.
        if let Ok(name) = std::fs::read_link(entry?.path()) {
            names.push(name.to_string_lossy().into_owned());
        }
    }
    Ok(names)
}

#[tokio::test]
async fn the_helper_of_a_forwarded_connection_is_a_copy_in_memory_and_no_program_of_the_host()
-> anyhow::Result<()> {
    case("forwardfile", async |case| {
        let pod = case.start(witness_pod()).await?;
        witness::ask(&pod).await?;
        let forward = Forward::open(&case.kubectl, "p", witness::PORT).await?;
        let mut connection = Connection::over(forward.connect().await?);
        connection.ask().await?;
        let files = open_files(case.node.sentry(&uid(&pod))?.pid)?;
        let helper = files
            .iter()
            .any(|name| name.contains("memfd:torpor-inside"));
        anyhow::ensure!(helper, "gVisor has no helper: {files:#?}");
        let runsc = &case.node.config.runsc;
        let programs = runsc.parent().context("runsc has a directory")?;
        // The pause container's root file system is a file there, too.
        let of_host = |name: &&String| {
            std::path::Path::new(name).starts_with(programs) && !name.ends_with(".erofs")
        };
        let of_host: Vec<_> = files.iter().filter(of_host).collect();
        anyhow::ensure!(of_host.is_empty(), "gVisor has {of_host:?}");
        Ok(())
    })
    .await
}
